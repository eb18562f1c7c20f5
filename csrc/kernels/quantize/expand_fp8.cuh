/* expand_fp8.cuh - weights of 4 bits to e4m3 with a scale for each block of 128 by 128; see EpExpandParams.
 *
 * A CTA has a block. Four lanes have two of its rows, as protocol/four_bit.h lays them out: of each eight
 * values of k a lane has the codes of two. It expands them to 16 bits in registers, finds the largest
 * magnitude of the block with the other threads, and quantises. The four lanes then exchange their numbers,
 * so that each writes 16 consecutive ones. Memory limits the kernel.
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

/* Read a lane's codes of a unit, and the scales and zeros of both rows. row, k: the first of two rows of an
 * expert, and the first value of k of the unit. */
template <typename C>
EP_PTX void ep_expand_read(EpGemmW4Raw *raw, const EpExpandParams *p, uint32_t e, uint32_t row, uint32_t k) {
    const EpFourBit *w = &p->weights;
    const uint64_t rows = (uint64_t)e * (p->n / EP_FOUR_BIT_UNIT) + row / EP_FOUR_BIT_UNIT;
    const uint64_t unit = rows * (p->k / EP_FOUR_BIT_UNIT) + k / EP_FOUR_BIT_UNIT;
    const uint8_t *codes = p->numbers + unit * 2048 + row % EP_FOUR_BIT_UNIT * 32 + threadIdx.x % 4 * 16;
    const uint4 both = __ldg((const uint4 *)codes);
    raw->codes[0] = make_uint2(both.x, both.y);
    raw->codes[1] = make_uint2(both.z, both.w);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint64_t at = ep_four_bit_scale(w, p->n, p->k, e, row + i, k);
        if constexpr (C::FORMAT == EP_MXFP4) raw->scales[i] = __ldg((const uint16_t *)w->scales + at / 2);
        else { /* a word has two scales, of which one or both are the unit's */
            raw->scales[i] = __ldg((const uint32_t *)w->scales + at / 2);
            raw->zeros[i] = w->zeros ? __ldg((const uint16_t *)w->zeros + at / 2) : 0x0808;
        }
    }
}

/* The larger magnitudes of two pairs of 16-bit numbers, without NaN. */
template <bool F16> EP_PTX typename EpPair<F16>::Type ep_expand_larger(typename EpPair<F16>::Type most,
                                                                       uint32_t pair) {
    return __hmax2(most, __habs2(ep_as_pair<F16>(pair)));
}
template <bool F16> EP_PTX float2 ep_expand_floats(uint32_t pair) {
    if constexpr (F16) return __half22float2(ep_as_pair<true>(pair));
    else return __bfloat1622float2(ep_as_pair<false>(pair));
}

/* Of a row and a unit lane c of four has pair i, of k = 8 i + 2 c and the next one. Quantise them, and return
 * the 16 numbers from k = 16 c on. a: pair i is a[2 i]. */
template <bool F16> EP_PTX uint4 ep_expand_quantize(const uint32_t *a, float inverse) {
    const bool is_odd = threadIdx.x % 2, is_last = threadIdx.x % 4 / 2;
    uint32_t word[4]; /* pairs 2 i and 2 i + 1, of the lane to which they go */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t pair[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float2 f = ep_expand_floats<F16>(a[4 * i + 2 * j]);
            pair[j] = __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(f.x, inverse), __fmul_rn(f.y, inverse)),
                                               __NV_SATFINITE, __NV_E4M3);
        }
        word[i] = pair[0] | pair[1] << 16;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) { /* transpose four words of four lanes: with the neighbour, */
        const uint32_t got = __shfl_xor_sync(0xffffffffu, is_odd ? word[i] : word[i + 1], 1);
        word[i] = is_odd ? got : word[i];
        word[i + 1] = is_odd ? word[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) { /* and then two by two */
        const uint32_t got = __shfl_xor_sync(0xffffffffu, is_last ? word[i] : word[i + 2], 2);
        word[i] = is_last ? got : word[i];
        word[i + 2] = is_last ? word[i + 2] : got;
    }
    return make_uint4(__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[2], word[3], 0x5410),
                      __byte_perm(word[0], word[1], 0x7632), __byte_perm(word[2], word[3], 0x7632));
}

template <typename C> __global__ void __launch_bounds__(EP_EXPAND_THREADS, 3)
    expand_fp8_kernel(const __grid_constant__ EpExpandParams p) {
    typedef typename EpPair<C::F16>::Type Pair;
    constexpr int UNITS = EP_QUANTIZE_GROUP / EP_FOUR_BIT_UNIT, WARPS = EP_EXPAND_THREADS / 32;
    __shared__ float part[WARPS];
    const uint32_t blocks_n = ep_gemm_num_blocks(p.n), blocks_k = ep_gemm_num_blocks(p.k);
    const uint32_t e = blockIdx.x / (blocks_n * blocks_k), i = blockIdx.x % (blocks_n * blocks_k);
    const uint32_t row = i / blocks_k * EP_QUANTIZE_GROUP + threadIdx.x / 4 * 2;
    const uint32_t k0 = i % blocks_k * EP_QUANTIZE_GROUP;
    uint32_t a[UNITS][16];
    EpGemmW4Raw raw[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (row < p.n && k0 + u * EP_FOUR_BIT_UNIT < p.k)
            ep_expand_read<C>(&raw[u], &p, e, row, k0 + u * EP_FOUR_BIT_UNIT);
    Pair most = ep_as_pair<C::F16>(0);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const uint32_t k = k0 + u * EP_FOUR_BIT_UNIT;
        if (row >= p.n || k >= p.k) continue;
        const uint32_t unit = k % EP_FOUR_BIT_BLOCK / EP_FOUR_BIT_UNIT;
        ep_gemm_w4_expand_line<C, 0, 0>(a[u], &raw[u], &p.weights, unit);
        ep_gemm_w4_expand_line<C, 0, 1>(a[u], &raw[u], &p.weights, unit);
#pragma unroll
        for (int j = 0; j < 16; j++) most = ep_expand_larger<C::F16>(most, a[u][j]);
    }
    uint32_t bits;
    memcpy(&bits, &most, 4);
    const float2 both = ep_expand_floats<C::F16>(bits);
    float largest = fmaxf(fmaxf(both.x, both.y), EP_QUANTIZE_LEAST);
#pragma unroll
    for (int j = 16; j > 0; j /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, j));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < WARPS; j++) largest = fmaxf(largest, part[j]);
    const float scale = ep_quantize_pow2(largest), inverse = ep_quantize_pow2_inverse(scale);
    if (threadIdx.x == 0) p.q_scales[blockIdx.x] = scale;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const uint32_t k = k0 + u * EP_FOUR_BIT_UNIT;
        if (row >= p.n || k >= p.k) continue; /* eight rows of a warp are of the same 64: all its lanes */
        uint8_t *to = p.q + ((uint64_t)e * p.n + row) * p.k + k + threadIdx.x % 4 * 16;
        *(uint4 *)to = ep_expand_quantize<C::F16>(a[u], inverse);
        *(uint4 *)(to + p.k) = ep_expand_quantize<C::F16>(a[u] + 1, inverse);
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
