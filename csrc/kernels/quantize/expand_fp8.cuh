/* expand_fp8.cuh - weights of 4 bits to e4m3 with a scale for each block of 128 by 128; see EpExpandParams.
 *
 * A CTA has a block, and a warp 16 of its rows. Of two rows and 64 values of k, two lanes have the codes, as
 * protocol/four_bit.h lays them out. A lane expands its codes to 16 bits in registers, finds the largest
 * magnitude of the block with the other threads, and quantises. Its numbers pass through shared memory, so
 * that a warp writes whole rows of the block.
 * Invariant: the bits are those of cpu/expand.c. */
#ifndef EP_EXPAND_FP8_CUH
#define EP_EXPAND_FP8_CUH
#include <cuda_fp8.h>

#include "kernels/gemm/expand.cuh"
#include "protocol/layout.h"
#include "protocol/quantize.h"

#define EP_EXPAND_THREADS 256 /* four for two of 128 rows */

template <int FORMAT_, bool F16_> struct EpExpandConfig {
    static constexpr int FORMAT = FORMAT_;
    static constexpr bool F16 = F16_;
};

/* A lane's place in the rows of its warp: two rows from `row` on, unit `unit` of the block, and of each eight
 * values of k there the first four or the last four. */
typedef struct {
    uint32_t row, unit, half;
} EpExpandLane;
EP_PTX EpExpandLane ep_expand_lane(void) {
    const uint32_t lane = threadIdx.x % 32;
    return {lane / 4 * 2, lane / 2 % 2, lane % 2};
}

/* Read a lane's codes, and the scales and zeros of both rows. raw[i]: of the values 2 (2 half + i) of each
 * eight, and the next ones. row, k: the first of two rows of an expert, and the first value of the unit. */
template <typename C>
EP_PTX void ep_expand_read(EpGemmW4Raw (&raw)[2], const EpExpandParams *p, uint32_t e, uint32_t row,
                           uint32_t k, uint32_t half) {
    const EpFourBit *w = &p->weights;
    const uint64_t rows = (uint64_t)e * (p->n / EP_FOUR_BIT_UNIT) + row / EP_FOUR_BIT_UNIT;
    const uint64_t unit = rows * (p->k / EP_FOUR_BIT_UNIT) + k / EP_FOUR_BIT_UNIT;
    const uint8_t *codes = p->numbers + unit * 2048 + row % EP_FOUR_BIT_UNIT * 32 + half * 32;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint4 both = __ldg((const uint4 *)codes + i);
        raw[i].codes[0] = make_uint2(both.x, both.y);
        raw[i].codes[1] = make_uint2(both.z, both.w);
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint64_t at = ep_four_bit_scale(w, p->n, p->k, e, row + i, k);
        if constexpr (C::FORMAT == EP_MXFP4) raw[0].scales[i] = __ldg((const uint16_t *)w->scales + at / 2);
        else { /* a word has two scales, of which one or both are the unit's */
            raw[0].scales[i] = __ldg((const uint32_t *)w->scales + at / 2);
            raw[0].zeros[i] = w->zeros ? __ldg((const uint16_t *)w->zeros + at / 2) : 0x0808;
            raw[1].zeros[i] = raw[0].zeros[i];
        }
        raw[1].scales[i] = raw[0].scales[i];
    }
}

/* The largest and the least numbers of each half of pairs, without NaN. */
template <bool F16> struct EpExpandBounds {
    typename EpPair<F16>::Type most, least;
};
template <bool F16> EP_PTX void ep_expand_bound(EpExpandBounds<F16> *b, uint32_t pair) {
    b->most = __hmax2(b->most, ep_as_pair<F16>(pair));
    b->least = __hmin2(b->least, ep_as_pair<F16>(pair));
}
template <bool F16> EP_PTX float2 ep_expand_floats(uint32_t pair) {
    if constexpr (F16) return __half22float2(ep_as_pair<true>(pair));
    else return __bfloat1622float2(ep_as_pair<false>(pair));
}
/* The largest magnitude of a block, at least EP_QUANTIZE_LEAST. b: this thread's. */
template <bool F16> EP_PTX float ep_expand_largest(const EpExpandBounds<F16> *b) {
    constexpr int WARPS = EP_EXPAND_THREADS / 32;
    __shared__ float part[WARPS];
    uint32_t bits[2];
    memcpy(bits, b, 8);
    const float2 most = ep_expand_floats<F16>(bits[0]), least = ep_expand_floats<F16>(bits[1]);
    float largest = fmaxf(fmaxf(most.x, most.y), fmaxf(-least.x, -least.y));
    largest = fmaxf(largest, EP_QUANTIZE_LEAST);
#pragma unroll
    for (int j = 16; j > 0; j /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, j));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < WARPS; j++) largest = fmaxf(largest, part[j]);
    return largest;
}

/* A pair of numbers, each times inverse, in e4m3. */
template <bool F16> EP_PTX uint32_t ep_expand_quantize(uint32_t pair, float inverse) {
    float2 f;
    if constexpr (F16) {
        f = ep_expand_floats<true>(pair);
        f = make_float2(__fmul_rn(f.x, inverse), __fmul_rn(f.y, inverse));
    } else { /* a power of two: exact in bf16, too, or so small that e4m3 has zero */
        const __nv_bfloat162 product = __hmul2(ep_as_pair<false>(pair), __float2bfloat162_rn(inverse));
        uint32_t bits;
        memcpy(&bits, &product, 4);
        f = ep_expand_floats<false>(bits);
    }
    return __nv_cvt_float2_to_fp8x2(f, __NV_SATFINITE, __NV_E4M3);
}

template <typename C> __global__ void __launch_bounds__(EP_EXPAND_THREADS, 3)
    expand_fp8_kernel(const __grid_constant__ EpExpandParams p) {
    __shared__ uint4 rows[EP_QUANTIZE_GROUP][8]; /* pieces of 16 bytes; see `swizzle` */
    const uint32_t blocks_n = ep_gemm_num_blocks(p.n), blocks_k = ep_gemm_num_blocks(p.k);
    const uint32_t e = blockIdx.x / (blocks_n * blocks_k), block = blockIdx.x % (blocks_n * blocks_k);
    const uint32_t row0 = block / blocks_k * EP_QUANTIZE_GROUP, k0 = block % blocks_k * EP_QUANTIZE_GROUP;
    const uint32_t lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16; /* the first row of the warp */
    const EpExpandLane l = ep_expand_lane();
    const uint32_t row = row0 + own + l.row, k = k0 + l.unit * EP_FOUR_BIT_UNIT;
    const bool exists = row < p.n && k < p.k;
    uint32_t a[2][16] = {}; /* of raw[i] and line j: pair n, of k = 8 n + 4 half + 2 i, is a[i][2 n + j] */
    EpExpandBounds<C::F16> bounds = {ep_as_pair<C::F16>(0), ep_as_pair<C::F16>(0)};
    if (exists) {
        EpGemmW4Raw raw[2];
        const uint32_t unit = k % EP_FOUR_BIT_BLOCK / EP_FOUR_BIT_UNIT;
        ep_expand_read<C>(raw, &p, e, row, k, l.half);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ep_gemm_w4_expand_line<C, 0>(a[i], raw[i].codes[0],
                                         ep_gemm_w4_factors<C>(&raw[i], 0, &p.weights, unit));
            ep_gemm_w4_expand_line<C, 1>(a[i], raw[i].codes[1],
                                         ep_gemm_w4_factors<C>(&raw[i], 1, &p.weights, unit));
#pragma unroll
            for (int j = 0; j < 16; j++) ep_expand_bound<C::F16>(&bounds, a[i][j]);
        }
    }
    const float scale = p.to ? p.to[e] : ep_quantize_pow2(ep_expand_largest<C::F16>(&bounds));
    const float inverse = ep_quantize_pow2_inverse(scale);
    if (threadIdx.x == 0) p.q_scales[blockIdx.x] = scale;
    /* Piece c of rows r and r + 1 is at c ^ swizzle, so that few lanes of a store meet in a bank. */
    const uint32_t swizzle = l.row / 2;
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
#pragma unroll
        for (uint32_t n = 0; n < 8; n++) {
            const uint32_t first = ep_expand_quantize<C::F16>(a[0][2 * n + j], inverse);
            const uint32_t word = first | ep_expand_quantize<C::F16>(a[1][2 * n + j], inverse) << 16;
            const uint32_t piece = (4 * l.unit + n / 2) ^ swizzle;
            ((uint32_t *)&rows[own + l.row + j][piece])[n % 2 * 2 + l.half] = word;
        }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) { /* four rows at once, of eight pieces each */
        const uint32_t r = 4 * i + lane / 8, piece = lane % 8, n = row0 + own + r, at = k0 + 16 * piece;
        if (n < p.n && at < p.k)
            *(uint4 *)(p.q + ((uint64_t)e * p.n + n) * p.k + at) = rows[own + r][piece ^ r / 2];
    }
}

typedef void EpExpandKernel(EpExpandParams);
static EpExpandKernel *ep_expand_kernel(uint32_t format, uint32_t dtype) {
    EP_HANDLES_ALL(EP_NUM_FOUR_BIT_FORMATS, 2);
    if (format == EP_MXFP4)
        return dtype == EP_F16 ? expand_fp8_kernel<EpExpandConfig<EP_MXFP4, true>>
                               : expand_fp8_kernel<EpExpandConfig<EP_MXFP4, false>>;
    return dtype == EP_F16 ? expand_fp8_kernel<EpExpandConfig<EP_INT4, true>>
                           : expand_fp8_kernel<EpExpandConfig<EP_INT4, false>>;
}
static uint64_t ep_expand_num_ctas(const EpExpandParams *p) {
    return (uint64_t)p->num * ep_gemm_num_blocks(p->n) * ep_gemm_num_blocks(p->k);
}

#endif /* EP_EXPAND_FP8_CUH */
