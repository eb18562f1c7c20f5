/* thread.h - threads of the library. Exports ep_thread_start. */
#ifndef EP_THREAD_H
#define EP_THREAD_H
#include <pthread.h>

/* Start a thread that blocks all signals, so that the program's own threads receive them. Exceptions are the
 * synchronous signals: the kernel delivers those to the thread that caused the fault. name: shown by
 * debuggers and by top -H; at most 15 characters. Returns 0, or an errno. */
int ep_thread_start(pthread_t *thread, void *(*main)(void *), void *argument, const char *name);

#endif /* EP_THREAD_H */
