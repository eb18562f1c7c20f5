/* ptx.cuh - the instructions of sm_90a that C cannot express: one per function, and the function has its
 * name.
 *
 * mbarrier, bulk tensor copies (TMA), and the fences that order them; wgmma.cuh has the products. Shared
 * memory is given as a 32-bit address. Invariant: an instruction that orders memory has a "memory" clobber,
 * and a proxy fence is in the function's name.
 * Tiles are swizzled within lines of 128 bytes: the 16-byte piece c of line r is located at piece c ^ (r %
 * 8). */
#ifndef EP_PTX_CUH
#define EP_PTX_CUH
#include <cuda.h>

#include "protocol/port.h"

#define EP_PTX static __device__ __forceinline__

EP_PTX uint32_t ep_smem(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- mbarrier ---- */

EP_PTX void ep_mbar_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
/* Publishes initialised mbarriers: to the async proxy, and to the other threads of the cluster after its
 * barrier. */
EP_PTX void ep_fence_mbar_init(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
EP_PTX void ep_mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
EP_PTX void ep_mbar_arrive_expect(uint32_t bar, uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                 "r"(num_bytes)
                 : "memory");
}
/* Sleep until the phase with this parity has ended, but at most for the given time. Sleeping matters: a
 * warp that polls takes power from the MMA warps. */
EP_PTX bool ep_mbar_try_wait(uint32_t bar, uint32_t parity, uint32_t nanoseconds) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2, %3;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity), "r"(nanoseconds)
                 : "memory");
    return done != 0;
}
/* Wait until the phase with this parity has ended.
 * The arrivals come from warps of this CTA or of the other CTA of the pair, and the waits of those warps
 * are bounded. So a wait that exceeds limit_ns is a bug of the kernel. Then a store to address 0 aborts
 * the kernel with an error, because otherwise the GPU would hang. A `trap` instead of the store would
 * disable setmaxnreg: ptxas would give 168 registers to all threads. */
EP_PTX void ep_mbar_wait(uint32_t bar, uint32_t parity, uint64_t limit_ns) {
    if (ep_mbar_try_wait(bar, parity, 10000000)) return;
    const uint64_t start = ep_now_ns();
    while (!ep_mbar_try_wait(bar, parity, 10000000))
        if (ep_now_ns() - start > limit_ns)
            asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(0) : "memory");
}

/* The same in fewer registers, with a limit in units of 2^20 ns. */
EP_PTX void ep_mbar_wait_lean(uint32_t bar, uint32_t parity, uint64_t limit_ns) {
    if (ep_mbar_try_wait(bar, parity, 10000000)) return;
    const uint32_t start = (uint32_t)(ep_now_ns() >> 20);
    while (!ep_mbar_try_wait(bar, parity, 10000000))
        if ((uint32_t)(ep_now_ns() >> 20) - start > (uint32_t)(limit_ns >> 20))
            asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(0) : "memory");
}

/* ---- clusters: CTAs that run at the same time and can access each other's shared memory ---- */

EP_PTX uint32_t ep_cluster_rank(void) {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
/* A barrier of all threads of all CTAs of the cluster. It also orders their memory operations. */
EP_PTX void ep_cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
/* Arrive at an mbarrier of any CTA of the cluster. Relaxed: the arrival orders no memory operations of this
 * thread, because a release at cluster scope costs a fence of the whole GPU. None is needed to release a
 * pipeline stage to the other CTA: only wgmma has read it, and those reads have completed. */
EP_PTX void ep_mbar_arrive_at(uint32_t bar, uint32_t rank) {
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
                 "r"(rank)
                 : "memory");
}

/* Store a number at the same address in the shared memory of CTA `rank` of the cluster. The 4 bytes
 * complete a transaction of that CTA's mbarrier. */
EP_PTX void ep_st_async(uint32_t dst, uint32_t value, uint32_t bar, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 to, remote;\n"
        "mapa.shared::cluster.u32 to, %0, %3;\n"
        "mapa.shared::cluster.u32 remote, %2, %3;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [remote];\n}" ::"r"(dst),
        "r"(value), "r"(bar), "r"(rank)
        : "memory");
}

/* ---- counters for the other CTAs of this GPU ---- */

/* Orders all that the warp has written (before a __syncwarp) before the counter updates that follow. One
 * fence serves many counters. */
EP_PTX void ep_fence_acq_rel_gpu(void) { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
EP_PTX void ep_red_add_relaxed_gpu(uint64_t *p, uint64_t v) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/* ---- words of slots ---- */

/* Load or store one, two or four words of 32 bits. Each word is an access of its own: a load may see a new
 * value in one word and an old one in the next. */
EP_PTX uint32_t ep_ld_words(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
EP_PTX uint2 ep_ld_words(const uint2 *p) {
    uint2 v;
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
EP_PTX uint4 ep_ld_words(const uint4 *p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
EP_PTX void ep_st_words(uint32_t *p, uint32_t v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
EP_PTX void ep_st_words(uint2 *p, uint2 v) {
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
EP_PTX void ep_st_words(uint4 *p, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

/* ---- proxies and barriers ---- */

/* Makes data that this thread has acquired readable by TMA copies that the same thread issues afterwards. */
EP_PTX void ep_fence_proxy_async_global(void) { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/* Orders generic writes to shared memory before later reads by TMA or wgmma. */
EP_PTX void ep_fence_proxy_async_shared(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
EP_PTX void ep_bar_sync(uint32_t id, uint32_t num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
/* Arrive at the barrier, and do not wait. */
EP_PTX void ep_bar_arrive(uint32_t id, uint32_t num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
template <int N> EP_PTX void ep_setmaxnreg_inc(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> EP_PTX void ep_setmaxnreg_dec(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- bulk tensor copies ---- */

EP_PTX void ep_tma_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Copy a box of a tensor to shared memory; the mbarrier counts its bytes. BOTH: multicast to the same
 * address in both CTAs of a pair; the mbarrier of each CTA counts the bytes that this CTA receives. */
#define EP_TMA_LOAD(DIMS, COORDS, ...)                                                               \
    if (BOTH)                                                                                        \
        asm volatile("cp.async.bulk.tensor." DIMS                                                    \
                     ".shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster " \
                     "[%0], [%1, {" COORDS "}], [%2], %3;" ::"r"(dst),                               \
                     "l"(map), "r"(bar), "h"((uint16_t)3), __VA_ARGS__                               \
                     : "memory");                                                                    \
    else                                                                                             \
        asm volatile("cp.async.bulk.tensor." DIMS                                                    \
                     ".shared::cluster.global.tile.mbarrier::complete_tx::bytes "                    \
                     "[%0], [%1, {" COORDS "}], [%2];" ::"r"(dst),                                   \
                     "l"(map), "r"(bar), "h"((uint16_t)3), __VA_ARGS__                               \
                     : "memory")
template <bool BOTH> EP_PTX void ep_tma_load_2d(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x,
                                                int32_t y) {
    EP_TMA_LOAD("2d", "%4, %5", "r"(x), "r"(y));
}
template <bool BOTH> EP_PTX void ep_tma_load_3d(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x,
                                                int32_t y, int32_t z) {
    EP_TMA_LOAD("3d", "%4, %5, %6", "r"(x), "r"(y), "r"(z));
}
template <bool BOTH>
EP_PTX void ep_tma_load_5d(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x, int32_t y,
                           int32_t z, int32_t u, int32_t v) {
    EP_TMA_LOAD("5d", "%4, %5, %6, %7, %8", "r"(x), "r"(y), "r"(z), "r"(u), "r"(v));
}

/* Copy consecutive bytes to shared memory; the mbarrier counts them. Addresses and size are multiples of 16.
 */
EP_PTX void ep_bulk_load(uint32_t dst, const void *src, uint32_t num_bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
        "l"(src), "r"(num_bytes), "r"(bar)
        : "memory");
}

/* The same, where BOTH as ep_tma_load_2d does for a tensor. */
template <bool BOTH>
EP_PTX void ep_bulk_load_to(uint32_t dst, const void *src, uint32_t num_bytes, uint32_t bar) {
    if (BOTH)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
                     "l"(src), "r"(num_bytes), "r"(bar), "h"((uint16_t)3)
                     : "memory");
    else ep_bulk_load(dst, src, num_bytes, bar);
}

/* ---- small copies into shared memory ---- */

/* Copy 16 bytes, bypassing L1. Only the thread that has issued the copy and waited for it may read them. */
EP_PTX void ep_cp_async_16(uint32_t dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
EP_PTX void ep_cp_async_4(uint32_t dst, const void *src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
/* Arrive at an mbarrier when all copies that this thread has started are complete. The mbarrier must count
 * the arrival. */
EP_PTX void ep_cp_async_mbar_arrive(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
EP_PTX void ep_cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Wait until at most N of this thread's groups of copies are in flight. */
template <int N> EP_PTX void ep_cp_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- shared memory, registers ---- */

/* Store four 8x8 matrices of 16-bit numbers. Lane l gives the address of row l % 8 of matrix l / 8. */
EP_PTX void ep_stmatrix_x4(uint32_t dst, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

/* Load four 8x8 matrices of 16-bit numbers. Lane l gives the address of row l % 8 of matrix l / 8. */
EP_PTX void ep_ldmatrix_x4(uint32_t src, uint32_t *r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(src)
                 : "memory");
}

/* Load 16 bytes of a row. Peers write the staging buffer, so it is read with ordinary loads after an
 * acquire, never through the read-only path. Rows are used once, so they are not allocated in L1. */
EP_PTX uint4 ep_ld_row(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

EP_PTX uint4 ep_ld_shared(uint32_t src) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(src)
                 : "memory");
    return v;
}
EP_PTX uint64_t ep_ld_shared_u64(uint32_t src) {
    uint64_t v;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(src) : "memory");
    return v;
}
EP_PTX uint2 ep_ld_shared_u32x2(uint32_t src) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(src) : "memory");
    return v;
}
EP_PTX uint32_t ep_ld_shared_u16(uint32_t src) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(src) : "memory");
    return v;
}
EP_PTX uint32_t ep_ld_shared_u32(uint32_t src) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(src) : "memory");
    return v;
}
EP_PTX float ep_ld_shared_f32(uint32_t src) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(src) : "memory");
    return v;
}
EP_PTX void ep_st_shared_u32(uint32_t dst, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(dst), "r"(v) : "memory");
}
EP_PTX void ep_st_shared_u64(uint32_t dst, uint64_t v) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(dst), "l"(v) : "memory");
}
EP_PTX void ep_st_shared(uint32_t dst, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* A predicated store. A branch instead of the predicate would keep loads and stores around it from
 * overlapping. */
EP_PTX void ep_st_global_if(bool wanted, void *dst, uint4 v) {
    asm volatile("{\n.reg .pred wanted;\n"
                 "setp.ne.u32 wanted, %5, 0;\n"
                 "@wanted st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(dst),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((uint32_t)wanted)
                 : "memory");
}
/* Request memory for the L2. The address and the number of bytes are multiples of 16. */
EP_PTX void ep_prefetch_l2(const void *from, uint32_t num_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(num_bytes) : "memory");
}
/* Add two fp32 numbers to global memory. The L2 adds, and the thread does not wait. Subnormal numbers and
 * results count as zero. The address is a multiple of 8. */
EP_PTX void ep_red_add_f32x2(float *to, float a, float b) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
}
/* Backoff of 2 us for a warp that polls for something slow: polling takes issue slots and power from the
 * MMA warps. */
/* Words in shared memory with which the warps of a CTA hand work to each other. */
EP_PTX uint64_t ep_ld_relaxed_shared(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.relaxed.cta.shared::cta.u64 %0, [%1];" : "=l"(v) : "r"(ep_smem(p)) : "memory");
    return v;
}
EP_PTX uint32_t ep_ld_relaxed_shared(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.relaxed.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(ep_smem(p)) : "memory");
    return v;
}
EP_PTX void ep_st_relaxed_shared(uint32_t *p, uint32_t v) {
    asm volatile("st.relaxed.cta.shared::cta.u32 [%0], %1;" ::"r"(ep_smem(p)), "r"(v) : "memory");
}
EP_PTX void ep_st_release_shared(uint64_t *p, uint64_t v) {
    asm volatile("st.release.cta.shared::cta.u64 [%0], %1;" ::"r"(ep_smem(p)), "l"(v) : "memory");
}
/* Replace a word that is `seen` by `taken`, with an acquire. Returns whether it was `seen`. */
EP_PTX bool ep_take_shared(uint64_t *p, uint64_t seen, uint64_t taken) {
    uint64_t before;
    asm volatile("atom.acquire.cta.shared::cta.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "r"(ep_smem(p)), "l"(seen), "l"(taken)
                 : "memory");
    return before == seen;
}

EP_PTX void ep_sleep_2us(void) { __nanosleep(2000); }
/* The lane number, read again at each call, so that values computed from it occupy no registers between
 * calls. */
EP_PTX uint32_t ep_lane_now(void) {
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* The number of CTAs of the launch, in the same way. */
EP_PTX uint32_t ep_num_ctas_now(void) {
    uint32_t num;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(num));
    return num;
}

/* Two numbers, each rounded to 16 bits; lo is in the lower half. */
template <bool F16> EP_PTX uint32_t ep_pack(float lo, float hi) {
    uint32_t v;
    if (F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
/* (a & b) | c, in one instruction also if b and c are constants. */
EP_PTX uint32_t ep_and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
    return v;
}
/* The reverse. For fp16 one block of assembly, because the compiler would keep the two halves in registers of
 * their own from the packing on. */
template <bool F16> EP_PTX void ep_unpack(uint32_t v, float *lo, float *hi) {
    if (F16)
        asm("{\n.reg .b16 lo, hi;\n"
            "mov.b32 {lo, hi}, %2;\n"
            "cvt.f32.f16 %0, lo;\n"
            "cvt.f32.f16 %1, hi;\n}"
            : "=f"(*lo), "=f"(*hi)
            : "r"(v));
    else {
        *lo = __uint_as_float(v << 16);
        *hi = __uint_as_float(v & 0xffff0000u);
    }
}
#define EP_DEVICE_MATH /* for activation_math.h */
/* 2^x and 1 / x, each with a relative error of about 2^-22. Subnormal arguments and results become 0. */
EP_PTX float ep_ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
EP_PTX float ep_rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif /* EP_PTX_CUH */
