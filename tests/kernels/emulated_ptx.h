/* emulated_ptx.h - the emulation of kernels/ptx.cuh with CPU threads and plain C++. Every GPU thread of a
 * pair of CTAs is a CPU thread.
 *
 * The emulation includes:
 *   - the positions of numbers: 128-byte swizzle, descriptors and accumulators of wgmma, stmatrix, and boxes
 *     of tensor maps with their edges;
 *   - phases and byte counts of mbarriers;
 *   - the latest time at which a wgmma may read its operands: the emulation executes a wgmma at the wait for
 *     it.
 * The emulation does not include memory order between proxies, nor time. */
#ifndef EP_PTX_CUH
#define EP_PTX_CUH
#define EP_WGMMA_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <vector>

#include "cuda/capabilities.h"
#include "emulated_threads.h"
#include "kernels/gemm/gemm_maps.h"

#define EP_PTX static inline
#define CUtensorMap EpTensorMap
using std::max;
using std::min;

static unsigned char smem_bytes[1]; /* represents address 0 of shared memory */
alignas(1024) static unsigned char ep_shared[2][EP_CTA_SMEM_BYTES]; /* for each CTA of the pair */
static thread_local uint32_t ep_rank;                               /* the CTA of this thread in the pair */

static uint32_t ep_smem(const void *p) { return (uint32_t)((const unsigned char *)p - smem_bytes); }
static unsigned char *ep_at(uint32_t at, uint32_t n, uint32_t rank = ep_rank) {
    if (at + n > EP_CTA_SMEM_BYTES) ep_die("a shared memory address is out of range");
    return ep_shared[rank] + at;
}
/* The position of a 16-byte piece in its 128-byte line depends on the index of the line. */
static uint32_t ep_swizzle(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

/* ---- barriers ---- */

struct EpMbarrier {
    std::mutex lock;
    std::condition_variable changed;
    uint32_t count = 0, pending = 0, phase = 0;
    int64_t bytes = 0;
    void settle() {
        if (pending || bytes) return;
        pending = count;
        phase++;
        changed.notify_all();
    }
};
static EpBarrier ep_warps[2][12], ep_named[2][4], ep_cluster;
static EpMbarrier ep_mbarriers[2][EP_CTA_SMEM_BYTES / 8];
/* One thread of the producer warp, two warpgroups, and with scales of blocks the warp that loads them. The
 * communication warps are not emulated. */
static uint32_t ep_cta_threads = 257;

static void __syncthreads() { ep_named[ep_rank][0].arrive(ep_cta_threads); }
/* How many lanes of the producer's warp are emulated. */
static uint32_t ep_producer_lanes = 1;
static void __syncwarp() {
    ep_warps[ep_rank][threadIdx.x / 32].arrive(threadIdx.x / 32 ? 32 : ep_producer_lanes);
}
/* An instruction with .sync.aligned needs all lanes of the warp. It does not order memory. */
static void ep_aligned() { ep_warps[ep_rank][threadIdx.x / 32].arrive<EP_RELAXED>(32); }
/* A shuffle does not order memory. Each lane gets the value of lane `from`. */
template <typename T> static T ep_shuffle(T v, uint32_t from) {
    static T lanes[2][12][32];
    T(&warp)[32] = lanes[ep_rank][threadIdx.x / 32];
    __atomic_store(&warp[threadIdx.x % 32], &v, __ATOMIC_RELAXED);
    ep_aligned();
    __atomic_load(&warp[from % 32], &v, __ATOMIC_RELAXED);
    ep_aligned();
    return v;
}
static float __shfl_xor_sync(uint32_t, float v, int mask) {
    return ep_shuffle(v, threadIdx.x % 32 ^ (uint32_t)mask);
}
static uint32_t __shfl_sync(uint32_t, uint32_t v, uint32_t lane) { return ep_shuffle(v, lane); }
static uint32_t __shfl_up_sync(uint32_t, uint32_t v, uint32_t d) {
    const uint32_t lane = threadIdx.x % 32;
    return ep_shuffle(v, lane < d ? lane : lane - d);
}
static uint32_t __ballot_sync(uint32_t, int v) {
    static uint32_t lanes[2][12][32];
    uint32_t(&warp)[32] = lanes[ep_rank][threadIdx.x / 32];
    uint32_t bits = 0;
    __atomic_store_n(&warp[threadIdx.x % 32], v != 0, __ATOMIC_RELAXED);
    ep_aligned();
    for (uint32_t i = 0; i < 32; i++) bits |= __atomic_load_n(&warp[i], __ATOMIC_RELAXED) << i;
    ep_aligned();
    return bits;
}
static uint32_t __reduce_or_sync(uint32_t, uint32_t v) {
    for (uint32_t i = 1; i < 32; i *= 2) v |= ep_shuffle(v, threadIdx.x % 32 ^ i);
    return v;
}
static int __ffs(int v) { return __builtin_ffs(v); }
static int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
EP_PTX void ep_bar_sync(uint32_t id, uint32_t num) { ep_named[ep_rank][id].arrive(num); }
EP_PTX void ep_bar_arrive(uint32_t id, uint32_t num) { ep_named[ep_rank][id].arrive(num, false); }
EP_PTX uint32_t ep_cluster_rank(void) { return ep_rank; }
EP_PTX void ep_cluster_sync(void) { ep_cluster.arrive(2 * ep_cta_threads); }
EP_PTX void ep_mbar_init(uint32_t bar, uint32_t count) {
    EpMbarrier &b = ep_mbarriers[ep_rank][bar / 8];
    b.count = b.pending = count;
    b.phase = 0;
    b.bytes = 0;
}
static void ep_mbar_change(uint32_t bar, uint32_t arrivals, int64_t bytes, uint32_t rank = ep_rank) {
    EpMbarrier &b = ep_mbarriers[rank][bar / 8];
    std::lock_guard<std::mutex> hold(b.lock);
    if (b.pending < arrivals) ep_die("an mbarrier has more arrivals than its count");
    b.pending -= arrivals;
    b.bytes += bytes;
    b.settle();
}
EP_PTX void ep_mbar_arrive(uint32_t bar) { ep_mbar_change(bar, 1, 0); }
EP_PTX void ep_st_async(uint32_t dst, uint32_t value, uint32_t bar, uint32_t rank) {
    memcpy(ep_at(dst, 4, rank), &value, 4);
    ep_mbar_change(bar, 0, -4, rank);
}
EP_PTX void ep_mbar_arrive_at(uint32_t bar, uint32_t rank) { ep_mbar_change(bar, 1, 0, rank); }
EP_PTX void ep_mbar_arrive_expect(uint32_t bar, uint32_t n) {
    EpMbarrier &b = ep_mbarriers[ep_rank][bar / 8];
    std::lock_guard<std::mutex> hold(b.lock);
    b.bytes += n;
    b.pending--;
    b.settle();
}
EP_PTX void ep_mbar_wait(uint32_t bar, uint32_t parity, uint64_t limit_ns) {
    EpMbarrier &b = ep_mbarriers[ep_rank][bar / 8];
    std::unique_lock<std::mutex> hold(b.lock);
    const std::chrono::nanoseconds limit(limit_ns);
    if (!b.changed.wait_for(hold, limit, [&] { return (b.phase & 1) != parity; }))
        ep_die("the wait for an mbarrier timed out");
}
EP_PTX void ep_mbar_wait_lean(uint32_t bar, uint32_t parity, uint64_t limit_ns) {
    ep_mbar_wait(bar, parity, limit_ns);
}
EP_PTX void ep_fence_mbar_init(void) {}
EP_PTX void ep_fence_proxy_async_shared(void) {}
template <int N> EP_PTX void ep_setmaxnreg_inc(void) {}
template <int N> EP_PTX void ep_setmaxnreg_dec(void) {}

/* ---- bulk tensor copies ---- */

/* For each element of a box call f(element, address in shared memory). The element is NULL if it is
 * outside of the tensor. */
template <typename F> static void ep_box(const EpTensorMap *m, uint32_t smem, const int64_t (&at)[5],
                                         uint32_t num_dims, F f) {
    uint32_t i[5] = {0}, n = 0, total = 1;
    if (m->num_dims != num_dims)
        ep_die("the tensor map has another number of dimensions than the instruction");
    const uint32_t size = ep_map_number_bytes(m->type);
    if (m->box[0] * size != 128 || smem % 1024)
        ep_die("a box is not 128 bytes wide, or its address is not aligned");
    for (uint32_t d = 0; d < num_dims; d++) total *= m->box[d];
    for (uint32_t d = 0; d + 1 < num_dims; d++)
        if (m->strides[d] * size % 16) ep_die("a stride is not a multiple of 16 bytes");
    for (; n < total; n++) {
        uint64_t off = 0;
        bool inside = true;
        for (uint32_t d = 0; d < num_dims; d++) {
            const int64_t x = at[d] + i[d];
            inside = inside && x >= 0 && (uint64_t)x < m->dims[d];
            off += (uint64_t)x * (d ? m->strides[d - 1] : 1);
        }
        f(inside ? (const unsigned char *)m->base + off * size : NULL, ep_swizzle(smem + size * n), size);
        for (uint32_t d = 0; d < num_dims && ++i[d] == m->box[d]; d++) i[d] = 0;
    }
}
static void ep_load_box(uint32_t dst, const EpTensorMap *map, uint32_t bar, const int64_t (&at)[5],
                        uint32_t num_dims, uint32_t rank = ep_rank) {
    int64_t num_bytes = 0;
    ep_box(map, dst, at, num_dims, [&](const unsigned char *p, uint32_t to, uint32_t size) {
        if (p) memcpy(ep_at(to, size, rank), p, size);
        else memset(ep_at(to, size, rank), 0, size);
        num_bytes += size;
    });
    ep_mbar_change(bar, 0, -num_bytes, rank);
}
EP_PTX void ep_tma_prefetch(const EpTensorMap *) {}
template <bool BOTH> static void ep_load(uint32_t dst, const EpTensorMap *map, uint32_t bar,
                                         const int64_t (&at)[5], uint32_t num_dims) {
    for (uint32_t r = 0; r < 2; r++)
        if (BOTH || r == ep_rank) ep_load_box(dst, map, bar, at, num_dims, r);
}
template <bool BOTH> EP_PTX void ep_tma_load_2d(uint32_t dst, const EpTensorMap *map, uint32_t bar, int32_t x,
                                                int32_t y) {
    ep_load<BOTH>(dst, map, bar, {x, y, 0, 0, 0}, 2);
}
template <bool BOTH> EP_PTX void ep_tma_load_3d(uint32_t dst, const EpTensorMap *map, uint32_t bar, int32_t x,
                                                int32_t y, int32_t z) {
    ep_load<BOTH>(dst, map, bar, {x, y, z, 0, 0}, 3);
}
template <bool BOTH>
EP_PTX void ep_tma_load_5d(uint32_t dst, const EpTensorMap *map, uint32_t bar, int32_t x, int32_t y,
                           int32_t z, int32_t u, int32_t v) {
    ep_load<BOTH>(dst, map, bar, {x, y, z, u, v}, 5);
}

EP_PTX void ep_bulk_load(uint32_t dst, const void *src, uint32_t num_bytes, uint32_t bar) {
    if ((dst | (uint64_t)src | num_bytes) % 16 || num_bytes == 0)
        ep_die("a bulk copy is empty, or not aligned to 16 bytes");
    memcpy(ep_at(dst, num_bytes), src, num_bytes);
    ep_mbar_change(bar, 0, -(int64_t)num_bytes);
}

template <bool BOTH>
EP_PTX void ep_bulk_load_to(uint32_t dst, const void *src, uint32_t num_bytes, uint32_t bar) {
    const uint32_t own = ep_rank;
    for (uint32_t r = 0; r < 2; r++)
        if (BOTH || r == own) {
            ep_rank = r;
            ep_bulk_load(dst, src, num_bytes, bar);
        }
    ep_rank = own;
}

/* ---- a warp's shared memory ---- */

static uint32_t ep_warp_address[2][12][32];
EP_PTX void ep_stmatrix_x4(uint32_t dst, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, r[4] = {r0, r1, r2, r3};
    uint32_t *of_lane = ep_warp_address[ep_rank][warp];
    __atomic_store_n(&of_lane[lane], dst, __ATOMIC_RELAXED);
    ep_aligned();
    for (uint32_t i = 0; i < 4; i++)
        memcpy(ep_at(__atomic_load_n(&of_lane[8 * i + lane / 4], __ATOMIC_RELAXED) + lane % 4 * 4, 4), &r[i],
               4);
    ep_aligned();
}
EP_PTX void ep_ldmatrix_x4(uint32_t src, uint32_t *r) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t *of_lane = ep_warp_address[ep_rank][warp];
    __atomic_store_n(&of_lane[lane], src, __ATOMIC_RELAXED);
    ep_aligned();
    for (uint32_t i = 0; i < 4; i++)
        memcpy(&r[i], ep_at(__atomic_load_n(&of_lane[8 * i + lane / 4], __ATOMIC_RELAXED) + lane % 4 * 4, 4),
               4);
    ep_aligned();
}
EP_PTX uint4 ep_ld_shared(uint32_t src) {
    uint4 v;
    memcpy(&v, ep_at(src, 16), 16);
    return v;
}
EP_PTX uint2 ep_ld_shared_u32x2(uint32_t src) {
    uint2 v;
    memcpy(&v, ep_at(src, 8), 8);
    return v;
}
EP_PTX uint32_t ep_ld_shared_u16(uint32_t src) {
    uint16_t v;
    memcpy(&v, ep_at(src, 2), 2);
    return v;
}
EP_PTX uint32_t ep_ld_shared_u32(uint32_t src) {
    uint32_t v;
    memcpy(&v, ep_at(src, 4), 4);
    return v;
}
EP_PTX float ep_ld_shared_f32(uint32_t src) {
    float v;
    memcpy(&v, ep_at(src, 4), 4);
    return v;
}
/* A small copy is executed when its thread arrives at the mbarrier. Until then its destination is NaN. */
static thread_local std::vector<std::pair<uint32_t, const void *>> ep_copies;
EP_PTX void ep_cp_async_4(uint32_t dst, const void *src) {
    ep_copies.push_back({dst, src});
    memset(ep_at(dst, 4), 0xff, 4);
}
EP_PTX void ep_cp_async_mbar_arrive(uint32_t bar) {
    for (const auto &c : ep_copies) memcpy(ep_at(c.first, 4), c.second, 4);
    ep_copies.clear();
    ep_mbar_change(bar, 1, 0);
}
EP_PTX void ep_st_shared_u32(uint32_t dst, uint32_t v) { memcpy(ep_at(dst, 4), &v, 4); }
EP_PTX void ep_st_shared(uint32_t dst, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    const uint32_t v[4] = {x, y, z, w};
    memcpy(ep_at(dst, 16), v, 16);
}

EP_PTX void ep_st_global_if(bool wanted, void *dst, uint4 v) {
    if (wanted) memcpy(dst, &v, 16);
}
EP_PTX void ep_prefetch_l2(const void *from, uint32_t num_bytes) {
    if (((uint64_t)from | num_bytes) % 16) ep_die("a prefetch is not aligned to 16 bytes");
}
EP_PTX void ep_red_add_f32x2(float *to, float a, float b) {
    if ((uint64_t)to % 8) ep_die("the address of a reduction is not aligned to 8 bytes");
    to[0] += a;
    to[1] += b;
}
EP_PTX uint32_t ep_lane_now(void) { return threadIdx.x % 32; }
EP_PTX uint32_t ep_num_ctas_now(void) { return gridDim.x; }

EP_PTX uint32_t ep_and_or(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }
EP_PTX float __uint_as_float(uint32_t v) {
    float f;
    memcpy(&f, &v, 4);
    return f;
}
EP_PTX uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t v = 0;
    for (uint32_t i = 0; i < 4; i++) v |= (uint32_t)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return v;
}

#define EP_DEVICE_MATH /* for activation_math.h */
EP_PTX float ep_ex2(float x) { return exp2f(x); }
EP_PTX float ep_rcp(float x) { return 1 / x; }
static uint16_t ep_round(float v, bool f16) {
    uint16_t bits;
    if (f16) {
        const __half h = __float2half_rn(v);
        memcpy(&bits, &h, 2);
    } else {
        const __nv_bfloat16 h = __float2bfloat16_rn(v);
        memcpy(&bits, &h, 2);
    }
    return bits;
}
static float ep_widen(uint16_t bits, bool f16) {
    __half h;
    const uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy((void *)&h, &bits, 2);
    memcpy(&f, &u, 4);
    return f16 ? __half2float(h) : f;
}
template <bool F16> EP_PTX uint32_t ep_pack(float lo, float hi) {
    return ep_round(lo, F16) | (uint32_t)ep_round(hi, F16) << 16;
}
template <bool F16> EP_PTX void ep_unpack(uint32_t v, float *lo, float *hi) {
    *lo = ep_widen((uint16_t)v, F16);
    *hi = ep_widen((uint16_t)(v >> 16), F16);
}

/* ---- wgmma ---- */

EP_PTX uint64_t ep_wgmma_desc(uint32_t smem, uint32_t slab) {
    return (uint64_t)((smem & 0x3ffff) >> 4) | (uint64_t)(slab >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           1ull << 62;
}
EP_PTX uint64_t ep_wgmma_desc_rows(uint32_t smem, uint32_t stride) {
    return (uint64_t)((smem & 0x3ffff) >> 4) | (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}
static float ep_widen_fp8(uint8_t e4m3) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(e4m3, __NV_E4M3)));
}
/* Return element k (of 32) of the contraction dimension in row mn of a K-major tile of FP8. */
static float ep_operand_fp8(uint64_t desc, uint32_t mn, uint32_t k) {
    const uint32_t start = (uint32_t)(desc & 0x3fff) << 4;
    const uint32_t stride = (uint32_t)(desc >> 32 & 0x3fff) << 4;
    const uint8_t byte = *ep_at(ep_swizzle(start + mn / 8 * stride + mn % 8 * 128 + k), 1);
    return ep_widen_fp8(byte);
}
/* Return element k (of 16) of the contraction dimension in row mn of the tile with this descriptor. */
static float ep_operand(uint64_t desc, uint32_t mn, uint32_t k, bool trans, bool f16) {
    const uint32_t start = (uint32_t)(desc & 0x3fff) << 4;
    const uint32_t lead = (uint32_t)(desc >> 16 & 0x3fff) << 4;
    const uint32_t stride = (uint32_t)(desc >> 32 & 0x3fff) << 4;
    const uint32_t off = trans ? mn / 64 * lead + mn % 64 * 2 + k / 8 * stride + k % 8 * 128
                               : mn / 8 * stride + mn % 8 * 128 + k * 2;
    uint16_t bits;
    memcpy(&bits, ep_at(ep_swizzle(start + off), 2), 2);
    return ep_widen(bits, f16);
}
struct EpProduct {
    float *d;
    uint32_t n;
    uint64_t a, b;
    bool add, f16, trans_a, trans_b, fp8;
    const uint32_t *rows; /* instead of a: the lane's registers */
};
static thread_local std::deque<std::vector<EpProduct>> ep_groups(1);
/* Element k of row lane / 4 + 8 * i, which one of four lanes has in its registers. */
static float ep_row_fp8(const uint32_t (*of_lane)[4], uint32_t i, uint32_t k) {
    const uint32_t word = of_lane[threadIdx.x % 32 / 4 * 4 + k % 16 / 4][i + k / 16 * 2];
    return ep_widen_fp8((uint8_t)(word >> k % 4 * 8));
}
static float ep_row_16(const uint32_t (*of_lane)[4], uint32_t i, uint32_t k, bool f16) {
    const uint32_t word = of_lane[threadIdx.x % 32 / 4 * 4 + k % 8 / 2][i + k / 8 * 2];
    return ep_widen((uint16_t)(word >> k % 2 * 16), f16);
}
static uint32_t ep_rows[2][12][32][4];
static void ep_execute(const EpProduct &p) {
    const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const uint32_t num_k = p.fp8 ? 32 : 16;
    uint32_t(*rows)[4] = ep_rows[ep_rank][threadIdx.x / 32];
    float a[2][32];
    if (p.rows) {
        __syncwarp();
        memcpy(rows[lane], p.rows, sizeof rows[lane]);
        __syncwarp();
    }
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t k = 0; k < num_k; k++)
            a[i][k] = p.rows && p.fp8 ? ep_row_fp8(rows, i, k)
                      : p.rows        ? ep_row_16(rows, i, k, p.f16)
                      : p.fp8         ? ep_operand_fp8(p.a, row + 8 * i, k)
                                      : ep_operand(p.a, row + 8 * i, k, p.trans_a, p.f16);
    for (uint32_t i = 0; i < p.n / 4; i++) {
        const uint32_t col = i / 2 * 8 + lane % 4 * 2 + i % 2;
        float sum[2] = {0, 0};
        for (uint32_t k = 0; k < num_k; k++) {
            const float b = p.fp8 ? ep_operand_fp8(p.b, col, k) : ep_operand(p.b, col, k, p.trans_b, p.f16);
            sum[0] += a[0][k] * b;
            sum[1] += a[1][k] * b;
        }
        for (uint32_t r = 0; r < 2; r++) {
            float *d = &p.d[i / 2 * 4 + r * 2 + i % 2];
            *d = p.add ? *d + sum[r] : sum[r];
        }
    }
}
EP_PTX void ep_wgmma_fence(void) { ep_aligned(); }
EP_PTX void ep_wgmma_commit(void) { ep_groups.push_back({}); }
template <int N> EP_PTX void ep_wgmma_wait(void) {
    for (; ep_groups.size() > N + 1; ep_groups.pop_front())
        for (const EpProduct &p : ep_groups.front()) ep_execute(p);
    ep_aligned();
}
template <int N> EP_PTX void ep_wgmma_keep_order(float (&)[N]) {}
template <int N, bool F16, int TRANS_A, int TRANS_B> EP_PTX void ep_wgmma(float (&d)[N / 2], uint64_t a,
                                                                          uint64_t b, uint32_t add) {
    ep_groups.back().push_back({d, N, a, b, add != 0, F16, TRANS_A != 0, TRANS_B != 0, false, NULL});
}
template <int N, bool F16>
EP_PTX void ep_wgmma_rows(float (&d)[N / 2], const uint32_t *a, uint64_t b, uint32_t add) {
    ep_groups.back().push_back({d, N, 0, b, add != 0, F16, false, false, false, a});
}
/* Each lane shows the others its registers. */
template <bool F16> EP_PTX void ep_mma(float *d, const uint32_t *a, const uint32_t *b) {
    static uint32_t columns[2][12][32][2];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    memcpy(ep_rows[ep_rank][warp][lane], a, 16);
    memcpy(columns[ep_rank][warp][lane], b, 8);
    __syncwarp();
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t k = 0; k < 16; k++) {
            const uint32_t word = columns[ep_rank][warp][(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2][k / 8];
            d[i] += ep_row_16(ep_rows[ep_rank][warp], i / 2, k, F16) *
                    ep_widen((uint16_t)(word >> k % 2 * 16), F16);
        }
    __syncwarp();
}
template <int N> EP_PTX void ep_wgmma_e4m3(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t add) {
    ep_groups.back().push_back({d, N, a, b, add != 0, false, false, false, true, NULL});
}
EP_PTX void ep_wgmma_e4m3_rows(float (&d)[64], const uint32_t *a, uint64_t b, uint32_t add) {
    ep_groups.back().push_back({d, 128, 0, b, add != 0, false, false, false, true, a});
}

#endif /* EP_PTX_CUH */
