/* gemm_epilogue.cuh - what happens to a sum before it is written: bias, activation, rounding. */
#ifndef EP_GEMM_EPILOGUE_CUH
#define EP_GEMM_EPILOGUE_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm.h"
#include "ptx.cuh"

template <bool F16> EP_PTX float ep_load_16(const void *p, uint64_t i) {
    return F16 ? __half2float(((const __half *)p)[i]) : __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}

/* 1 / (1 + exp(-s * x)) of two numbers with one reciprocal.  Below s * x = -40 it is 4e-18 and not less, which
 * is nothing beside any 16-bit number that it multiplies, and the product of both stays finite. */
EP_PTX void ep_sigmoid_pair(float x0, float x1, float s, float *y0, float *y1) {
    const float minus_log2e = -1.4426950408889634f;
    const float a = 1.0f + ep_ex2(minus_log2e * fmaxf(s * x0, -40.0f)), b = 1.0f + ep_ex2(minus_log2e * fmaxf(s * x1, -40.0f));
    const float r = ep_rcp(a * b);
    *y0 = b * r, *y1 = a * r;
}

/* Two neighbouring columns of a row: v are products (and gates), u what belongs to the gates. */
template <int ACT> EP_PTX void ep_gemm_activate(const EpGemmParams *p, float *v0, float *v1, float u0, float u1) {
    float s0, s1;
    if (ACT == EP_ACT_GELU) {
        *v0 *= 0.5f + 0.5f * erff(*v0 * 0.70710678f), *v1 *= 0.5f + 0.5f * erff(*v1 * 0.70710678f);
    } else if (ACT == EP_ACT_SWIGLU) {
        ep_sigmoid_pair(*v0, *v1, 1.0f, &s0, &s1);
        *v0 *= s0 * u0, *v1 *= s1 * u1;
    } else if (ACT == EP_ACT_GPT_OSS) { /* comparisons that let NaN through */
        const float most = p->limit, least = -most;
        *v0 = *v0 > most ? most : *v0, *v1 = *v1 > most ? most : *v1;
        u0 = u0 > most ? most : u0 < least ? least : u0, u1 = u1 > most ? most : u1 < least ? least : u1;
        ep_sigmoid_pair(*v0, *v1, p->alpha, &s0, &s1);
        *v0 *= s0 * (u0 + 1.0f), *v1 *= s1 * (u1 + 1.0f);
    }
}

/* Where the bias of output column c stands: of its product or gate, and of its up. */
template <int ACT, bool F16> EP_PTX void ep_gemm_add_bias(const EpGemmParams *p, uint32_t e, uint32_t c, float (&v)[4], float (&u)[4]) {
    const uint64_t base = (uint64_t)e * p->n;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t of_v = ACT == EP_ACT_GPT_OSS ? 2 * (c + i) : c + i, of_u = ACT == EP_ACT_GPT_OSS ? of_v + 1 : of_v + p->n / 2;
        const float b = ep_load_16<F16>(p->bias, base + of_v);
        v[i] += b, v[2 + i] += b;
        if (!(ACT >= EP_ACT_SWIGLU)) continue;
        const float bu = ep_load_16<F16>(p->bias, base + of_u);
        u[i] += bu, u[2 + i] += bu;
    }
}

#endif /* EP_GEMM_EPILOGUE_CUH */
