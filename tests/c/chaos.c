/* chaos.c - the random delays of a module that is built with EPMOE_CHAOS=N (see setup.py).
 *
 * At each marked point of the protocol a thread continues at once, yields its core, spins for some
 * microseconds, or sleeps. The C tests have their own delays (harness.c). */
#include "protocol/port.h"

void ep_chaos(uint32_t point) {
    static uint64_t num_threads;
    static _Thread_local uint64_t state;
    if (state == 0)
        state = (ep_add_relaxed_gpu_u64(&num_threads, 1) + 1) * 0x9e3779b97f4a7c15u ^
                EP_CHAOS * 0xd1342543de82ef95u;
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint32_t dice = (uint32_t)(state >> 40) % 1024, much = (uint32_t)(state >> 33) % 128;
    if (dice < 128) sched_yield();
    if (dice >= 128 && dice < 256 + 16 * point) {
        uint64_t until = ep_now_ns() + much * 200u;
        while (ep_now_ns() < until) continue;
    }
    if (dice >= 1020) nanosleep(&(struct timespec){0, 1000 + (long)much * 4000}, NULL);
}
