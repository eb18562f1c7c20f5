/* emulated_port.h - the emulation of protocol/port.h, and of the CUDA functions that plan, dispatch and
 * combine use, with CPU threads and plain C++.
 *
 * A process is a CTA, so static variables are its shared memory. CTAs and ranks communicate through memory
 * that their processes share.
 *
 * The emulation includes memory order: ThreadSanitizer reports accesses that are not ordered. A cp.async
 * copy is in flight until the wait for it. The emulation does not include time. */
#ifndef EMULATED_PORT_H
#define EMULATED_PORT_H
#define EP_EMULATED
#include "cuda/capabilities.h"
#include "emulated_threads.h"
#include "protocol/port.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <sched.h>
#include <stdbool.h>
#include <time.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <vector>

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define EP_WARPS 4u
#define EP_MAX_WARPS 8u
static uint32_t ep_few_chunks = 8; /* few_tokens.cuh */
#define EP_FEW_CHUNKS ep_few_chunks

/* ---- warp and CTA collectives ---- */

static EpBarrier ep_cta_barrier, ep_warp_barriers[EP_MAX_WARPS];
static uint64_t ep_lane_words[EP_MAX_WARPS][32];
/* Whether this thread has executed a fence since the last synchronisation of its warp. Only then it
 * publishes the stores of the other lanes. */
static thread_local bool ep_has_fenced;
static void __syncwarp() {
    ep_has_fenced = false;
    ep_warp_barriers[threadIdx.x / 32].arrive(32);
}
static void __syncthreads() { ep_cta_barrier.arrive(blockDim.x); }

/* Every lane provides a value. f gets a function that returns the value of a lane. Like a shuffle, this
 * function does not order memory. */
template <typename T, typename F> static auto ep_exchange_lanes(T mine, F f) {
    EpBarrier &barrier = ep_warp_barriers[threadIdx.x / 32];
    uint64_t bits = 0;
    memcpy(&bits, &mine, sizeof mine);
    __atomic_store_n(&ep_lane_words[threadIdx.x / 32][threadIdx.x % 32], bits, __ATOMIC_RELAXED);
    barrier.arrive<EP_RELAXED>(32);
    const auto result = f([&](uint32_t lane) {
        T theirs;
        const uint64_t word = __atomic_load_n(&ep_lane_words[threadIdx.x / 32][lane], __ATOMIC_RELAXED);
        memcpy(&theirs, &word, sizeof theirs);
        return theirs;
    });
    barrier.arrive<EP_RELAXED>(32);
    return result;
}
template <typename F> static uint32_t ep_lanes_where(F f) {
    uint32_t mask = 0;
    for (uint32_t i = 0; i < 32; i++) mask |= (uint32_t)f(i) << i;
    return mask;
}
template <typename T> static T __shfl_sync(uint32_t, T v, int lane) {
    return ep_exchange_lanes(v, [&](auto value_of) { return value_of((uint32_t)lane % 32); });
}
template <typename T> static T __shfl_up_sync(uint32_t, T v, uint32_t d) {
    const uint32_t lane = threadIdx.x % 32;
    return ep_exchange_lanes(v, [&](auto value_of) { return value_of(lane < d ? lane : lane - d); });
}
template <typename T> static T __shfl_xor_sync(uint32_t, T v, int mask) {
    const uint32_t lane = threadIdx.x % 32;
    return ep_exchange_lanes(v, [&](auto value_of) { return value_of(lane ^ (uint32_t)mask); });
}
static uint32_t __reduce_or_sync(uint32_t, uint32_t v) {
    return ep_exchange_lanes(v, [](auto value_of) {
        uint32_t all = 0;
        for (uint32_t i = 0; i < 32; i++) all |= value_of(i);
        return all;
    });
}
static uint32_t __reduce_max_sync(uint32_t, uint32_t v) {
    return ep_exchange_lanes(v, [](auto value_of) {
        uint32_t most = 0;
        for (uint32_t i = 0; i < 32; i++) most = value_of(i) > most ? value_of(i) : most;
        return most;
    });
}
static uint32_t __ballot_sync(uint32_t, int v) {
    return ep_exchange_lanes(
        v, [&](auto value_of) { return ep_lanes_where([&](uint32_t i) { return value_of(i) != 0; }); });
}
template <typename T> static uint32_t __match_any_sync(uint32_t, T v) {
    return ep_exchange_lanes(
        v, [&](auto value_of) { return ep_lanes_where([&](uint32_t i) { return value_of(i) == v; }); });
}
static int __syncthreads_and(int v) {
    static uint32_t num_false[2], round;
    const uint32_t mine = __atomic_load_n(&round, __ATOMIC_ACQUIRE) % 2;
    if (!v) __atomic_fetch_add(&num_false[mine], 1, __ATOMIC_ACQ_REL);
    __syncthreads();
    const bool all = __atomic_load_n(&num_false[mine], __ATOMIC_ACQUIRE) == 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        num_false[mine] = 0;
        __atomic_store_n(&round, mine + 1, __ATOMIC_RELEASE);
    }
    __syncthreads();
    return all;
}
static uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = x | (uint64_t)y << 32;
    uint32_t v = 0;
    for (uint32_t i = 0; i < 4; i++) v |= (uint32_t)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return v;
}
static uint32_t __popc(uint32_t v) { return (uint32_t)__builtin_popcount(v); }
static int __ffs(int v) { return __builtin_ffs(v); }
static void atomicAdd(uint32_t *p, uint32_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
static void atomicOr(uint32_t *p, uint32_t v) { __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
static void atomicMin(uint32_t *p, uint32_t v) {
    for (uint32_t old = *p;
         v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);)
        continue;
}
static uint4 __ldg(const uint4 *p) { return *p; }
static uint32_t __ldcg(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static float __uint_as_float(uint32_t v) {
    float f;
    memcpy(&f, &v, 4);
    return f;
}
static uint32_t __float_as_uint(float f) {
    uint32_t v;
    memcpy(&v, &f, 4);
    return v;
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1.0f / a; }
/* The GPU returns the other number for every NaN; the host's fmaxf returns NaN for a signaling NaN. */
static float ep_gpu_max(float a, float b) { return a != a || b > a ? b : a; }
#define fmaxf ep_gpu_max

/* ---- the port ---- */

#define EP_FN static inline
#define EP_PURE static inline
#define EP_LANES 32u
EP_FN uint32_t ep_lane(void) { return threadIdx.x % 32; }
EP_FN void ep_warp_sync(void) { __syncwarp(); }
EP_FN uint32_t ep_warp_min_u32(uint32_t x) {
    return ep_exchange_lanes(x, [](auto value_of) {
        uint32_t least = value_of(0);
        for (uint32_t i = 1; i < 32; i++) least = value_of(i) < least ? value_of(i) : least;
        return least;
    });
}
EP_FN uint64_t ep_warp_bcast_u64(uint64_t x) {
    x = ep_exchange_lanes(x, [](auto value_of) { return value_of(0); });
    __syncwarp();
    return x;
}
EP_FN bool ep_warp_all(bool x) {
    x = __ballot_sync(~0u, x) == ~0u;
    __syncwarp();
    return x;
}
#define EP_LD(name, order) \
    EP_FN uint64_t name(const uint64_t *p) { return __atomic_load_n(p, order); }
#define EP_ST(name, order) \
    EP_FN void name(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, order); }
#define EP_RMW(name, f, order) \
    EP_FN uint64_t name(uint64_t *p, uint64_t v) { return f(p, v, order); }
EP_LD(ep_ld_acquire_sys_u64, __ATOMIC_ACQUIRE)
EP_LD(ep_ld_relaxed_sys_u64, __ATOMIC_RELAXED)
EP_LD(ep_ld_relaxed_gpu_u64, __ATOMIC_RELAXED)
EP_LD(ep_ld_acquire_gpu_u64, __ATOMIC_ACQUIRE)
EP_ST(ep_st_release_sys_u64, __ATOMIC_RELEASE)
EP_ST(ep_st_relaxed_sys_u64, __ATOMIC_RELAXED)
EP_ST(ep_st_relaxed_gpu_u64, __ATOMIC_RELAXED)
EP_RMW(ep_add_release_sys_u64, __atomic_fetch_add, __ATOMIC_RELEASE)
EP_RMW(ep_add_acq_rel_gpu_u64, __atomic_fetch_add, __ATOMIC_ACQ_REL)
EP_RMW(ep_add_relaxed_gpu_u64, __atomic_fetch_add, __ATOMIC_RELAXED)
EP_RMW(ep_swap_relaxed_gpu_u64, __atomic_exchange_n, __ATOMIC_RELAXED)
EP_FN uint64_t ep_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
EP_FN void ep_pause(uint32_t polls) {
    struct timespec pause = {0, 50000};
    if (polls > 20) nanosleep(&pause, NULL);
    else sched_yield();
}
EP_FN bool ep_time_to_check(uint32_t polls) { return polls % 64 == 63; }
EP_FN void ep_chaos(uint32_t) {}
/* The objects of the CPU backend call it, too. */
extern "C" __attribute__((weak)) bool ep_interrupted(void) { return false; }

/* ---- replacements for ptx.cuh and resident.cuh ---- */

#define EP_PTX_CUH
#define EP_RESIDENT_CUH
#define EP_DEVICE_MATH /* for activation_math.h */
EP_FN float ep_ex2(float x) { return exp2f(x); }
EP_FN float ep_rcp(float x) { return 1.0f / x; }
EP_FN void ep_sleep_2us(void) { sched_yield(); }
EP_FN void ep_fence_acq_rel_gpu(void) { ep_has_fenced = true; }
EP_FN void ep_red_add_relaxed_gpu(uint64_t *p, uint64_t v) {
    /* ThreadSanitizer does not support fences, so the add itself releases. */
    if (ep_has_fenced) __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
    else __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

EP_FN uint64_t ep_ld_relaxed_shared(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
EP_FN uint32_t ep_ld_relaxed_shared(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
EP_FN void ep_st_relaxed_shared(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
EP_FN void ep_st_release_shared(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
EP_FN bool ep_take_shared(uint64_t *p, uint64_t seen, uint64_t taken) {
    return __atomic_compare_exchange_n(p, &seen, taken, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

/* Each word of a slot is an access of its own, and orders nothing. */
EP_FN uint32_t ep_ld_words(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
EP_FN uint2 ep_ld_words(const uint2 *p) { return make_uint2(ep_ld_words(&p->x), ep_ld_words(&p->y)); }
EP_FN uint4 ep_ld_words(const uint4 *p) {
    return make_uint4(ep_ld_words(&p->x), ep_ld_words(&p->y), ep_ld_words(&p->z), ep_ld_words(&p->w));
}
EP_FN void ep_st_words(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
EP_FN void ep_st_words(uint2 *p, uint2 v) {
    ep_st_words(&p->y, v.y);
    ep_st_words(&p->x, v.x);
}
EP_FN void ep_st_words(uint4 *p, uint4 v) {
    ep_st_words(&p->z, v.z);
    ep_st_words(&p->x, v.x);
    ep_st_words(&p->w, v.w);
    ep_st_words(&p->y, v.y);
}

alignas(1024) static unsigned char ep_shared[1u << 18];
static uint32_t my_block, num_sm = 2; /* one CTA per SM */
static uint32_t *ep_dynamic_smem(void) { return (uint32_t *)ep_shared; }
EP_FN uint4 ep_ld_row(const uint4 *p) { return *p; }
EP_FN uint32_t ep_smem(const void *p) { return (uint32_t)((const unsigned char *)p - ep_shared); }
static unsigned char *ep_at(uint32_t at, uint32_t n) {
    if (at % n || at + n > sizeof ep_shared) ep_die("a shared memory address is out of range or not aligned");
    return ep_shared + at;
}
template <typename T> static T ep_ld_shared_as(uint32_t src) {
    T v;
    memcpy(&v, ep_at(src, sizeof v), sizeof v);
    return v;
}
EP_FN uint4 ep_ld_shared(uint32_t src) { return ep_ld_shared_as<uint4>(src); }
EP_FN uint64_t ep_ld_shared_u64(uint32_t src) { return ep_ld_shared_as<uint64_t>(src); }
EP_FN uint32_t ep_ld_shared_u32(uint32_t src) { return ep_ld_shared_as<uint32_t>(src); }
EP_FN void ep_st_shared_u32(uint32_t dst, uint32_t v) { memcpy(ep_at(dst, 4), &v, 4); }
EP_FN void ep_st_shared_u64(uint32_t dst, uint64_t v) { memcpy(ep_at(dst, 8), &v, 8); }

/* The GPU may execute an asynchronous copy at any time between its start and the wait for it. So the
 * emulation overwrites the destination at the start and writes the data at the wait. It checks that the
 * source has not changed in between. */
struct EpCopy {
    uint32_t dst;
    const void *src;
    uint4 data; /* the source at the start of the copy */
};
/* Groups of copies. The last group is still open. */
static thread_local std::deque<std::vector<EpCopy>> ep_copies(1);
EP_FN void ep_cp_async_16(uint32_t dst, const void *src) {
    if ((uintptr_t)src % 16) ep_die("the source address of a copy is not a multiple of 16");
    ep_copies.back().push_back({dst, src, *(const uint4 *)src});
    memset(ep_at(dst, 16), 0xff, 16);
}
EP_FN void ep_cp_async_commit(void) { ep_copies.push_back({}); }
template <int N> EP_FN void ep_cp_async_wait(void) {
    for (; ep_copies.size() > N + 1; ep_copies.pop_front())
        for (const EpCopy &c : ep_copies.front()) {
            if (memcmp(c.src, &c.data, 16))
                ep_die("the source of a copy changed before the wait for the copy");
            memcpy(ep_at(c.dst, 16), &c.data, 16);
        }
}

extern "C" int ep_capabilities(EpCapabilities *c) {
    *c = {};
    c->num_sms = num_sm;
    c->smem_bytes = sizeof ep_shared;
    return 0;
}
static cudaError_t ep_resident_blocks(uint32_t wanted, uint32_t, uint32_t *num_blocks) {
    *num_blocks = wanted < num_sm ? wanted : num_sm;
    return cudaSuccess;
}

/* Run the CTA of this process, if the grid has a CTA with this index. */
template <typename P>
static cudaError_t ep_launch_resident(void (*kernel)(P), uint32_t num_blocks, uint32_t num_warps,
                                      size_t smem_bytes, void *, const P &p) {
    if (smem_bytes > sizeof ep_shared || num_warps > EP_MAX_WARPS) return cudaErrorInvalidValue;
    std::vector<std::thread> threads;
    ep_resident_blocks(num_blocks, 0, &num_blocks);
    gridDim = dim3(num_blocks);
    blockDim = dim3(32 * num_warps);
    memset(ep_shared, 0xff, sizeof ep_shared);
    for (uint32_t i = 0; my_block < num_blocks && i < 32 * num_warps; i++)
        threads.emplace_back([&, i] {
            threadIdx.x = i;
            blockIdx.x = my_block;
            kernel(p);
            for (const std::vector<EpCopy> &group : ep_copies)
                if (!group.empty()) ep_die("a thread ended without a wait for its copy");
        });
    for (std::thread &t : threads) t.join();
    for (size_t i = smem_bytes; i < sizeof ep_shared; i++)
        if (ep_shared[i] != 0xff) ep_die("a kernel wrote after the end of its dynamic shared memory");
    return cudaSuccess;
}
#define ep_launch_resident_early ep_launch_resident
static void ep_await_previous_kernel() {}
#define cudaFuncGetAttributes(a, f) ((void)(a), cudaSuccess)
#define ep_allow_smem(...) cudaSuccess

#endif /* EMULATED_PORT_H */
