/* ptx.cuh - the instructions of sm_90a that C cannot express: one per function, and the function has its
 * name.
 *
 * mbarrier, bulk tensor copies (TMA), wgmma, and the fences that order them. Shared memory is given as a
 * 32-bit address. Invariant: an instruction that orders memory has a "memory" clobber, and a proxy fence is
 * in the function's name.
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

/* ---- wgmma ---- */

/* The wgmma descriptor of a tile in shared memory, swizzled within lines of 128 bytes. k counts along the
 * contraction.
 * K-major (a line is 64 values of k of one row): 8 rows are 1024 bytes; 16 values of k are 32 bytes.
 * MN-major (a line is 64 rows at one k): 8 values of k are 1024 bytes, 16 are 2048 bytes; the next 64 rows
 * are located `slab` bytes later. */
EP_PTX uint64_t ep_wgmma_desc(uint32_t smem, uint32_t slab) {
    return (uint64_t)((smem & 0x3ffff) >> 4) | (uint64_t)(slab >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           1ull << 62;
}
EP_PTX void ep_wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
EP_PTX void ep_wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> EP_PTX void ep_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from moving reads of an accumulator before the wait for it. */
template <int N> EP_PTX void ep_wgmma_keep_order(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* clang-format off */
#define EP_R32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define EP_R64 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define EP_R96 EP_R64 "," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define EP_R128 EP_R96 "," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define EP_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EP_D8(i) EP_D4(i), EP_D4(i + 4)
#define EP_D32(i) EP_D8(i), EP_D8(i + 8), EP_D8(i + 16), EP_D8(i + 24)
#define EP_WGMMA(N, TYPE, REGS, A, B, P, TA, TB, ...)                                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGS "}, "         \
                 "%" A ", %" B ", p, 1, 1, %" TA ", %" TB ";\n}"                                       \
                 : __VA_ARGS__                                                                         \
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B))
/* clang-format on */

/* d[64][N] = a * b, plus d if `add`, for one warpgroup. TRANS: the operand is MN-major. */
template <int N, bool F16, int TRANS_A, int TRANS_B> EP_PTX void ep_wgmma(float (&d)[N / 2], uint64_t a,
                                                                          uint64_t b, uint32_t add) {
    static_assert(N == 64 || N == 128 || N == 192 || N == 256, "tiles of 64, 128, 192 or 256 columns");
#define EP_WGMMA_N(TYPE)                                                                                 \
    if constexpr (N == 64) EP_WGMMA("64", TYPE, EP_R32, "32", "33", "34", "35", "36", EP_D32(0));        \
    if constexpr (N == 128)                                                                              \
        EP_WGMMA("128", TYPE, EP_R64, "64", "65", "66", "67", "68", EP_D32(0), EP_D32(32));              \
    if constexpr (N == 192)                                                                              \
        EP_WGMMA("192", TYPE, EP_R96, "96", "97", "98", "99", "100", EP_D32(0), EP_D32(32), EP_D32(64)); \
    if constexpr (N == 256)                                                                              \
    EP_WGMMA("256", TYPE, EP_R128, "128", "129", "130", "131", "132", EP_D32(0), EP_D32(32), EP_D32(64), \
             EP_D32(96))
    if constexpr (F16) {
        EP_WGMMA_N("f16");
    } else {
        EP_WGMMA_N("bf16");
    }
#undef EP_WGMMA_N
}
/* The same with e4m3 numbers: 32 values of k, both operands K-major. A line is 128 values of k. */
template <int N> EP_PTX void ep_wgmma_e4m3(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t add) {
    static_assert(N == 64 || N == 128 || N == 256, "tiles of 64, 128 or 256 columns");
#define EP_WGMMA_E4M3(COLS, REGS, A, B, P, ...)                                                        \
    if constexpr (N == COLS)                                                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #COLS "k32.f32.e4m3.e4m3 {" REGS "}, %" A ", %" B \
                 ", p, 1, 1;\n}"                                                                       \
                 : __VA_ARGS__                                                                         \
                 : "l"(a), "l"(b), "r"(add))
    EP_WGMMA_E4M3(64, EP_R32, "32", "33", "34", EP_D32(0));
    EP_WGMMA_E4M3(128, EP_R64, "64", "65", "66", EP_D32(0), EP_D32(32));
    EP_WGMMA_E4M3(256, EP_R128, "128", "129", "130", EP_D32(0), EP_D32(32), EP_D32(64), EP_D32(96));
#undef EP_WGMMA_E4M3
}
/* The same with 128 columns, and with rows in registers: a warp has 16 of them, as ep_ldmatrix_x4 loads the
 * matrices of rows 0 to 7 and of rows 8 to 15, with k from 0 on, and then both with k from 16 on. */
EP_PTX void ep_wgmma_e4m3_rows(float (&d)[64], const uint32_t *a, uint64_t b, uint32_t add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" EP_R64 "}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1;\n}"
                 : EP_D32(0), EP_D32(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#endif /* EP_PTX_CUH */
