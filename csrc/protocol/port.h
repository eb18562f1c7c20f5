/* port.h - what differs between C11 and CUDA C: the only file that tests which compiler compiles it.
 *
 * A worker executes one task at a time. In C11 a worker is one CPU thread (a warp with one lane). In CUDA C a
 * worker is a warp of 32 lanes. Exported:
 *   EP_FN                      qualifier of a function that workers call
 *   EP_PURE                    qualifier of arithmetic that workers and the host call
 *   EP_LANES, EP_FOR_LANES     lanes of a worker; i = lane, lane + EP_LANES, ... < n
 *   ep_warp_sync, ep_warp_{min_u32,bcast_u64,all}   the warp operations. All except min_u32 also order
 *                              memory: after it every lane reads what any lane wrote before it
 *   ep_{ld,st,add,swap}_<order>_<scope>_<type>   the only memory operations of the protocol
 *   ep_now_ns, ep_pause, ep_time_to_check, EP_MAX_COUNTED_GAP_NS   for waits: the clock, the backoff, when to
 *                              look at the clock, and how much of a gap between two looks counts
 *   ep_interrupted             in host code, whether the user has interrupted the wait (runtime/interrupt.h);
 *                              in device code false
 *   EP_FAULT(name)             whether a test build contains this deliberate bug; false in other builds
 *   ep_chaos(point)            a random delay in a test build; does nothing in other builds
 *   EP_STATIC_ASSERT           a condition that the compiler checks
 *   EP_HANDLES_ALL             that code which compares the members of an enumeration knows all of them
 *
 * Invariant, which every caller keeps: `gpu` scope is only for words that neither another rank nor a host
 * thread reads or writes during the operation. All others need `sys`. On the CPU the scopes are equal. */
#ifndef EP_PORT_H
#define EP_PORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define EP_STATIC_ASSERT static_assert
#else
#define EP_STATIC_ASSERT _Static_assert
#endif
/* Such code would take a new member for another one. So when an enumeration gets a member, the compiler stops
 * at each place that does not know it yet. */
#define EP_HANDLES_ALL(count, num) EP_STATIC_ASSERT((count) == (num), "a new member: handle it here, too")

#ifndef EP_FAULT_IDX
#define EP_FAULT_IDX 0
#endif
/* The seeded faults. A test build sets EP_FAULT_IDX to one of them, and the C tests must catch it. */
enum {
    EP_FAULT_RELAXED_LOAD = 1,    /* a load that should acquire is relaxed */
    EP_FAULT_RELAXED_STORE = 2,   /* a store that should release is relaxed */
    EP_FAULT_RELAXED_ADD = 3,     /* an addition that should acquire and release is relaxed */
    EP_FAULT_ONE_BANK = 4,        /* one bank of enter words and headers instead of two */
    EP_FAULT_ENTER_FIRST = 5,     /* the enter word is published before its header */
    EP_FAULT_NO_ENTER_WAIT = 6,   /* no rank waits for enter */
    EP_FAULT_NO_FLAG_WAIT = 7,    /* no rank waits for flags */
    EP_FAULT_EARLY_LAST = 8,      /* the first worker out acts as the last one */
    EP_FAULT_SHARED_TASK = 9,     /* two workers may take the same task */
    EP_FAULT_OLD_COUNTS = 10,     /* counts of an earlier plan are accepted */
    EP_FAULT_NO_EMPTY_ENTER = 11, /* a rank without tokens does not enter */
    EP_FAULT_UNCHECKED_ROWS = 12, /* row numbers from a peer are not checked */
    EP_FAULT_FLAG_FIRST = 13,     /* a flag is published before its slots are written */
    EP_FAULT_NO_CLEAR = 14,       /* low latency: the slots of a void operation are not cleared */
    EP_FAULT_NO_ZERO = 15         /* low latency: a word of a slot is not set to 0 after it was read */
};
#define EP_FAULT(name) (EP_FAULT_IDX == EP_FAULT_##name)

/* The points at which ep_chaos may delay a worker. */
enum {
    EP_CHAOS_ENTER = 1,
    EP_CHAOS_ENTER_AWAIT = 2,
    EP_CHAOS_FLAG_PUBLISH = 3,
    EP_CHAOS_FLAG_READ = 4,
    EP_CHAOS_LEAVE = 5,
    EP_CHAOS_COUNTS_WRITE = 6,
    EP_CHAOS_COUNTS_READ = 7,
    EP_CHAOS_ROWS_COUNT = 8,
    EP_CHAOS_ROWS_AWAIT = 9,
    EP_CHAOS_SIGNAL = 10
};

/* A waiting thread checks the clock more often than this. A longer gap means that its process was
 * suspended (SIGSTOP, a debugger, a checkpoint of the whole job), and suspended time must not count toward
 * the timeout. Of each gap at most this much counts. It is not zero, so that a wait ends even on a machine
 * that never checks more often. */
#define EP_MAX_COUNTED_GAP_NS 500000000u

#if defined(EP_EMULATED) /* tests/kernels/emulated_port.h has the rest */

#elif defined(__CUDACC__)

#define EP_FN static __device__ __forceinline__
#define EP_PURE static __host__ __device__ __forceinline__
#define EP_LANES 32u

EP_FN uint32_t ep_lane(void) { return threadIdx.x % 32u; }
EP_FN void ep_warp_sync(void) { __syncwarp(); }
EP_FN uint32_t ep_warp_min_u32(uint32_t x) { return __reduce_min_sync(0xffffffffu, x); }
EP_FN uint64_t ep_warp_bcast_u64(uint64_t x) {
    x = __shfl_sync(0xffffffffu, (unsigned long long)x, 0);
    __syncwarp();
    return x;
}
EP_FN bool ep_warp_all(bool x) {
    x = __all_sync(0xffffffffu, x);
    __syncwarp();
    return x;
}

#define EP_LD(name, ptx)                                              \
    EP_FN uint64_t name(const uint64_t *p) {                          \
        uint64_t v;                                                   \
        asm volatile(ptx " %0, [%1];" : "=l"(v) : "l"(p) : "memory"); \
        return v;                                                     \
    }
#define EP_ST(name, ptx) \
    EP_FN void name(uint64_t *p, uint64_t v) { asm volatile(ptx " [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
#define EP_RMW(name, ptx)                                                         \
    EP_FN uint64_t name(uint64_t *p, uint64_t v) {                                \
        uint64_t o;                                                               \
        asm volatile(ptx " %0, [%1], %2;" : "=l"(o) : "l"(p), "l"(v) : "memory"); \
        return o;                                                                 \
    }
EP_LD(ep_ld_acquire_sys_u64, "ld.acquire.sys.u64")
EP_LD(ep_ld_relaxed_sys_u64, "ld.relaxed.sys.u64")
EP_LD(ep_ld_relaxed_gpu_u64, "ld.relaxed.gpu.u64")
EP_LD(ep_ld_acquire_gpu_u64, "ld.acquire.gpu.u64")
EP_ST(ep_st_release_sys_u64, "st.release.sys.u64")
EP_ST(ep_st_relaxed_sys_u64, "st.relaxed.sys.u64")
EP_ST(ep_st_relaxed_gpu_u64, "st.relaxed.gpu.u64")
EP_RMW(ep_add_release_sys_u64, "atom.release.sys.add.u64")
EP_RMW(ep_add_acq_rel_gpu_u64, "atom.acq_rel.gpu.add.u64")
EP_RMW(ep_add_relaxed_gpu_u64, "atom.relaxed.gpu.add.u64")
EP_RMW(ep_swap_relaxed_gpu_u64, "atom.relaxed.gpu.exch.b64")

EP_FN uint64_t ep_now_ns(void) {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}
EP_FN void ep_pause(uint32_t polls) {
    if (polls > 64) __nanosleep(40);
}
EP_FN bool ep_interrupted(void) { return false; }
/* Whether a wait checks the clock and the abort word after this poll. Polls are fast here. */
EP_FN bool ep_time_to_check(uint32_t polls) { return polls % 256 == 255; }
#ifdef EP_CHAOS /* tests only: one call in eight sleeps up to 8 us; EP_CHAOS is the random seed */
EP_FN void ep_chaos(uint32_t point) {
    uint32_t h = (uint32_t)clock64() ^ blockIdx.x * 0x9e3779b9u ^ threadIdx.x / 32u * 0x85ebca6bu ^
                 point * 0xc2b2ae35u ^ EP_CHAOS * 0x27d4eb2fu;
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    if (h >> 29 == 0) __nanosleep(h >> 16 & 8191u);
}
#else
EP_FN void ep_chaos(uint32_t) {}
#endif

#else /* C11; also C++17, so that a C++ compiler can check the headers */

#include <sched.h>
#include <stdbool.h>
#include <time.h>

#ifdef __cplusplus
extern "C"
#endif
    bool
    ep_interrupted(void);

#define EP_FN static inline
#define EP_PURE static inline
#define EP_LANES 1u

EP_FN uint32_t ep_lane(void) { return 0; }
EP_FN void ep_warp_sync(void) {}
EP_FN uint32_t ep_warp_min_u32(uint32_t x) { return x; }
EP_FN uint64_t ep_warp_bcast_u64(uint64_t x) { return x; }
EP_FN bool ep_warp_all(bool x) { return x; }

EP_FN uint64_t ep_ld_acquire_sys_u64(const uint64_t *p) {
    return __atomic_load_n(p, EP_FAULT(RELAXED_LOAD) ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE);
}
EP_FN uint64_t ep_ld_relaxed_sys_u64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
EP_FN uint32_t ep_ld_relaxed_sys_u32(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
EP_FN uint64_t ep_ld_relaxed_gpu_u64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
EP_FN uint64_t ep_ld_acquire_gpu_u64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
EP_FN void ep_st_release_sys_u64(uint64_t *p, uint64_t v) {
    __atomic_store_n(p, v, EP_FAULT(RELAXED_STORE) ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
}
EP_FN void ep_st_relaxed_sys_u64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
EP_FN void ep_st_relaxed_sys_u32(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
EP_FN void ep_st_relaxed_gpu_u64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
EP_FN uint64_t ep_add_release_sys_u64(uint64_t *p, uint64_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
}
EP_FN uint64_t ep_add_acq_rel_gpu_u64(uint64_t *p, uint64_t v) {
    return __atomic_fetch_add(p, v, EP_FAULT(RELAXED_ADD) ? __ATOMIC_RELAXED : __ATOMIC_ACQ_REL);
}
EP_FN uint64_t ep_add_relaxed_gpu_u64(uint64_t *p, uint64_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
EP_FN uint64_t ep_swap_relaxed_gpu_u64(uint64_t *p, uint64_t v) {
    return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
}

EP_FN uint64_t ep_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
/* Ranks often share cores. So first spin, then yield the core, then sleep. */
EP_FN void ep_pause(uint32_t polls) {
    struct timespec nap = {0, 20000};
    if (polls > 4000) nanosleep(&nap, NULL);
    else if (polls > 32) sched_yield();
}

/* Whether a wait checks the clock and the abort word after this poll. Polls that sleep may take long on a
 * busy machine, so each of those is followed by a check. */
EP_FN bool ep_time_to_check(uint32_t polls) { return polls % 64 == 63 || polls > 4000; }

#ifdef EP_CHAOS /* tests link a function that sleeps for a random time at points of the protocol */
#ifdef __cplusplus
extern "C"
#endif
    void
    ep_chaos(uint32_t point);
#else
EP_FN void ep_chaos(uint32_t point) { (void)point; }
#endif

#endif

#define EP_FOR_LANES(i, n) for (uint32_t i = ep_lane(); i < (n); i += EP_LANES)
/* A lane's array for its part of n <= 32 numbers, and where number i of EP_FOR_LANES is in it. */
#define EP_LANE_ROOM(n) (EP_LANES == 1 ? (n) : 1)
#define EP_LANE_AT(i) (EP_LANES == 1 ? (i) : 0)

#endif /* EP_PORT_H */
