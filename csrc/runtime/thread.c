/* thread.c - starts the threads of the library. See thread.h. */
#include "runtime/thread.h"

#include <signal.h>
#include <stdint.h>

int ep_thread_start(pthread_t *thread, void *(*main)(void *), void *argument, const char *name) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigset_t others, before;
    sigfillset(&others);
    for (uint32_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&others, faults[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    int e = pthread_create(thread, NULL, main, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!e) pthread_setname_np(*thread, name);
    return e;
}
