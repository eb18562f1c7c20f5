/* e4m3.cuh - a group of numbers to e4m3: its scale, and 8 numbers as bytes. Exports ep_quantize_scale and
 * ep_quantize_pack. The bits are those of cpu/rows.c; see protocol/quantize.h. */
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

#endif /* EP_E4M3_CUH */
