/* fork.c - closes the sockets of a process in its forked children. See fork.h. */
#include "runtime/fork.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* All guarded descriptors, in no order. The lock guards the three fields. */
static int *guarded;
static uint32_t num_guarded, num_allocated;
/* Written only by the handler in a child, which has one thread then. */
static uint32_t num_forks;

void ep_fork_lock(void) { pthread_mutex_lock(&lock); }
void ep_fork_unlock(void) { pthread_mutex_unlock(&lock); }
uint32_t ep_fork_count(void) { return num_forks; }

/* The child has one thread, and the thread that forked held the lock. So the array is complete. */
static void close_in_child(void) {
    num_forks++;
    while (num_guarded) close(guarded[--num_guarded]);
    ep_fork_unlock();
}
/* When the library is loaded, no thread uses it yet. So every fork() that begins later calls the handlers. */
__attribute__((constructor)) static void register_handlers(void) {
    pthread_atfork(ep_fork_lock, ep_fork_unlock, close_in_child);
}

int ep_fork_guard(int fd) {
    if (fd < 0) return fd;
    if (num_guarded == num_allocated) {
        uint32_t num = num_allocated ? 2 * num_allocated : 64;
        int *more = (int *)realloc(guarded, num * sizeof *more);
        if (!more) {
            close(fd);
            errno = ENOMEM;
            return -1;
        }
        guarded = more;
        num_allocated = num;
    }
    return guarded[num_guarded++] = fd;
}

void ep_fork_close(int fd) {
    ep_fork_lock();
    for (uint32_t i = num_guarded; i-- > 0;)
        if (guarded[i] == fd) {
            guarded[i] = guarded[--num_guarded];
            close(fd);
            break;
        }
    ep_fork_unlock();
}
