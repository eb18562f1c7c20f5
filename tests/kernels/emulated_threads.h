/* emulated_threads.h - a CTA as one process, in which every GPU thread is a CPU thread.
 *
 * A warp collective waits at a barrier for all 32 threads of its warp. So if a lane does not take part,
 * the emulation reports a timeout. */
#ifndef EMULATED_THREADS_H
#define EMULATED_THREADS_H
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <vector_types.h>

static thread_local uint3 threadIdx, blockIdx;
static dim3 gridDim, blockDim;

[[noreturn]] static void ep_die(const char *why) {
    fprintf(stderr, "emulation: %s (thread %u of CTA %u)\n", why, threadIdx.x, blockIdx.x);
    abort();
}

/* A barrier of threads. By default it also orders memory. With EP_RELAXED it does not, as a warp shuffle
 * does not. So ThreadSanitizer reports code that relies on a shuffle to order memory. Without
 * ThreadSanitizer, both kinds of barrier order memory. */
#ifdef __SANITIZE_THREAD__
#define EP_RELAXED __ATOMIC_RELAXED
#else
#define EP_RELAXED __ATOMIC_ACQ_REL
#endif
struct EpBarrier {
    uint64_t word = 0; /* lower half: number of threads that have arrived; upper half: completed phases */
    template <int ORDER = __ATOMIC_ACQ_REL> void arrive(uint32_t num, bool waits = true) {
        const uint64_t old = __atomic_fetch_add(&word, 1, ORDER);
        uint32_t *phase = (uint32_t *)&word + 1; /* the upper half, on a little-endian machine */
        if ((uint32_t)old + 1 == num) {
            __atomic_fetch_add(&word, (1ull << 32) - num, ORDER);
            syscall(SYS_futex, phase, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
            return;
        }
        if (!waits) return;
        const struct timespec minute = {60, 0};
        while (__atomic_load_n(&word, ORDER == __ATOMIC_ACQ_REL ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED) >>
                   32 ==
               old >> 32)
            if (syscall(SYS_futex, phase, FUTEX_WAIT_PRIVATE, (uint32_t)(old >> 32), &minute, NULL, 0) &&
                errno == ETIMEDOUT)
                ep_die("a barrier is not complete after 60 s");
    }
};

#endif /* EMULATED_THREADS_H */
