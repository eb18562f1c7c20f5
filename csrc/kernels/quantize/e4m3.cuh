/* e4m3.cuh - a group of numbers to e4m3: its scale, and 8 numbers as bytes; and e4m3 with a larger scale.
 * Exports ep_quantize_scale, ep_quantize_pack and ep_e4m3_shift. The bits are those of cpu/rows.c; see
 * protocol/quantize.h. */
#ifndef EP_E4M3_CUH
#define EP_E4M3_CUH
#include <cuda_fp8.h>

#include "kernels/stage/rows.cuh"
#include "protocol/quantize.h"

/* The scale of numbers of which `most` is the largest magnitude. */
EP_FN float ep_quantize_scale(float most, bool is_pow2) {
    const uint32_t mantissa = is_pow2 ? 0x7fffffu : 0; /* bits that are rounded up */
    return __uint_as_float((__float_as_uint(__fdiv_rn(most, 448.0f)) + mantissa) & ~mantissa);
}

/* f * inverse as 8 bytes. */
EP_FN uint2 ep_quantize_pack(const float *f, float inverse) {
    uint32_t q[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        q[i] = __nv_cvt_float2_to_fp8x2(
            make_float2(__fmul_rn(f[2 * i], inverse), __fmul_rn(f[2 * i + 1], inverse)), __NV_SATFINITE,
            __NV_E4M3);
    return make_uint2(q[0] | q[1] << 16, q[2] | q[3] << 16);
}

/* A word of four e4m3 numbers, each times a power of two that is at most 1. It is exact in fp16: a number has
 * four bits, and what fp16 cannot represent is far below half of the least e4m3 number. */
EP_FN uint32_t ep_e4m3_shift(uint32_t word, __half2 ratio) {
    uint32_t pair[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const __half2 h =
            __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(word >> 16 * i), __NV_E4M3));
        pair[i] = __nv_cvt_halfraw2_to_fp8x2(__half2_raw(__hmul2(h, ratio)), __NV_SATFINITE, __NV_E4M3);
    }
    return pair[0] | pair[1] << 16;
}

#endif /* EP_E4M3_CUH */
