/* emulated_threads.h - one thread block in one process: every GPU thread is a thread here.  What a warp does
 * together goes through a meeting of its 32 threads, so a lane that goes another way is seen as a hang. */
#ifndef EMULATED_THREADS_H
#define EMULATED_THREADS_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector_types.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

static thread_local uint3 threadIdx, blockIdx;
static dim3 gridDim, blockDim;

[[noreturn]] static void ep_die(const char *why) {
    fprintf(stderr, "emulation: %s (thread %u of block %u)\n", why, threadIdx.x, blockIdx.x);
    abort();
}

struct EpMeeting {
    std::mutex lock;
    std::condition_variable changed;
    uint32_t num_here = 0, turn = 0;
    void arrive(uint32_t num) {
        std::unique_lock<std::mutex> hold(lock);
        const uint32_t mine = turn;
        if (++num_here == num) {
            num_here = 0, turn++;
            changed.notify_all();
        } else if (!changed.wait_for(hold, std::chrono::seconds(60), [&] { return turn != mine; })) {
            ep_die("a barrier is not complete after a minute");
        }
    }
};

#endif /* EMULATED_THREADS_H */
