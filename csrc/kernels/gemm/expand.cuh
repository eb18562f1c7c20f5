/* expand.cuh - codes of 4 bits to numbers of 16 bits, in registers; protocol/four_bit.h has the layout.
 *
 * The template parameter C has FORMAT, an EpFourBitFormat, and F16, the dtype of the results.
 *
 * Exports EpGemmW4Raw, EpGemmW4Factors, ep_gemm_w4_log2_group, ep_gemm_w4_mxfp4_scales, ep_gemm_w4_offsets,
 * ep_gemm_w4_factors and ep_gemm_w4_expand_line. */
#ifndef EP_EXPAND_CUH
#define EP_EXPAND_CUH
#include "kernels/arch/ptx.cuh"
#include "protocol/four_bit.h"

/* What a lane reads of a unit: the codes of its two lines, and words with their scales and zeros. In MXFP4
 * the lower half of a word has both scales of the unit. In INT4 a word has both, or one of them is the
 * unit's, and half a word its zeros. */
typedef struct {
    uint2 codes[2];
    uint32_t scales[2], zeros[2];
} EpGemmW4Raw;

/* By what a unit's codes become numbers, of a line: in each half the number for one of its two groups. A
 * weight is (code + offset) * scale in INT4, and code * scale in MXFP4. */
typedef struct {
    uint32_t scales, offsets;
} EpGemmW4Factors;

EP_PTX uint32_t ep_gemm_w4_log2_group(const EpFourBit *w) {
    return w->group == 32 ? 5 : w->group == 64 ? 6 : 7;
}

/* The factors of E2M1 numbers, whose bits are the last ones of the exponent and the first one of the
 * mantissa: they are too small by 2^126 in bf16, and by 2^14 in fp16. One in each half, of both groups of a
 * unit, whose scales are half I of the word. */
EP_PTX float ep_gemm_w4_mxfp4_f16_scale(uint32_t byte) { /* 0 for a byte that is no scale */
    constexpr uint32_t BIAS = EP_MXFP4_BIAS - 14;
    return __uint_as_float(byte > BIAS ? (byte - BIAS) << 23 : 0);
}
template <bool F16, int I> EP_PTX uint32_t ep_gemm_w4_mxfp4_scales(uint32_t bytes) {
    if constexpr (F16)
        return ep_pack<true>(ep_gemm_w4_mxfp4_f16_scale(bytes >> 16 * I & 0xff),
                             ep_gemm_w4_mxfp4_f16_scale(bytes >> (16 * I + 8) & 0xff));
    return __byte_perm(bytes, 0, I ? 0x4342 : 0x4140) << 7; /* the exponents */
}

/* A pair of 16-bit numbers, each times number H of another pair, or plus it, and rounded. Not assembly,
 * because the compiler knows instructions that take one half of a register. */
template <bool F16> struct EpPair {
    typedef __nv_bfloat162 Type;
};
template <> struct EpPair<true> {
    typedef __half2 Type;
};
template <bool F16> EP_PTX typename EpPair<F16>::Type ep_as_pair(uint32_t v) {
    typename EpPair<F16>::Type pair;
    memcpy(&pair, &v, 4);
    return pair;
}
template <bool F16, int H> EP_PTX typename EpPair<F16>::Type ep_half_twice(uint32_t v) {
    if constexpr (F16) return H ? __high2half2(ep_as_pair<F16>(v)) : __low2half2(ep_as_pair<F16>(v));
    else return H ? __high2bfloat162(ep_as_pair<F16>(v)) : __low2bfloat162(ep_as_pair<F16>(v));
}
template <bool F16, int H> EP_PTX uint32_t ep_mul_by_half(uint32_t a, uint32_t b) {
    const typename EpPair<F16>::Type product = __hmul2(ep_as_pair<F16>(a), ep_half_twice<F16, H>(b));
    uint32_t v;
    memcpy(&v, &product, 4);
    return v;
}
template <bool F16, int H> EP_PTX uint32_t ep_add_half(uint32_t a, uint32_t b) {
    const typename EpPair<F16>::Type sum = __hadd2_rn(ep_as_pair<F16>(a), ep_half_twice<F16, H>(b));
    uint32_t v;
    memcpy(&v, &sum, 4);
    return v;
}

/* The offsets of INT4 of a unit, whose zeros are half I of the word. With them, a code is in the last bits of
 * 1024 or 128; see ep_gemm_w4_expand. */
template <bool F16> EP_PTX uint32_t ep_gemm_w4_offsets(uint32_t zeros, uint32_t selector) {
    return __byte_perm(zeros, F16 ? 0xe4 : 0xc3, selector); /* the upper byte of -1024 or of -128 */
}

/* unit: the number of the unit in its block of 256 values of k. */
template <typename C>
EP_PTX EpGemmW4Factors ep_gemm_w4_factors(const EpGemmW4Raw *raw, int i, const EpFourBit *w, uint32_t unit) {
    if constexpr (C::FORMAT == EP_MXFP4) return {ep_gemm_w4_mxfp4_scales<C::F16, 0>(raw->scales[i]), 0};
    /* which half of the word is of the first 32 values of k, and which of the others */
    const uint32_t log2 = ep_gemm_w4_log2_group(w), at = unit * EP_FOUR_BIT_UNIT;
    const uint32_t first = (at >> log2) % 2, second = (at + 32 >> log2) % 2;
    return {__byte_perm(raw->scales[i], 0, 0x1010 + first * 0x22 + second * 0x2200),
            ep_gemm_w4_offsets<C::F16>(raw->zeros[i], 0x4040 + first * 0x01 + second * 0x0100)};
}

/* Pair I of word H of a unit's codes, in 16 bits. Half H of the factors is of this word's group. */
template <typename C, int H, int I>
EP_PTX uint32_t ep_gemm_w4_expand(uint32_t word, const EpGemmW4Factors *f) {
    if constexpr (C::FORMAT == EP_MXFP4) {
        const uint32_t pair = ep_mxfp4_pair(word, I);
        /* in fp16 the exponent ends three bits higher */
        return ep_mul_by_half<C::F16, H>(C::F16 ? (pair & 0x80008000u) | (pair & 0x01c001c0u) << 3 : pair,
                                         f->scales);
    }
    const uint32_t code = ep_and_or(word >> 4 * I, 0x000f000fu, C::F16 ? 0x64006400u : 0x43004300u);
    return ep_mul_by_half<C::F16, H>(ep_add_half<C::F16, H>(code, f->offsets), f->scales);
}

/* Expand a unit of line I, both words of its codes: half of a lane's operands of four products. */
template <typename C, int I>
EP_PTX void ep_gemm_w4_expand_line(uint32_t (&a)[16], uint2 codes, EpGemmW4Factors f) {
    a[I] = ep_gemm_w4_expand<C, 0, 0>(codes.x, &f);
    a[I + 2] = ep_gemm_w4_expand<C, 0, 1>(codes.x, &f);
    a[I + 4] = ep_gemm_w4_expand<C, 0, 2>(codes.x, &f);
    a[I + 6] = ep_gemm_w4_expand<C, 0, 3>(codes.x, &f);
    a[I + 8] = ep_gemm_w4_expand<C, 1, 0>(codes.y, &f);
    a[I + 10] = ep_gemm_w4_expand<C, 1, 1>(codes.y, &f);
    a[I + 12] = ep_gemm_w4_expand<C, 1, 2>(codes.y, &f);
    a[I + 14] = ep_gemm_w4_expand<C, 1, 3>(codes.y, &f);
}

#endif /* EP_EXPAND_CUH */
