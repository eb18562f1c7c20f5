/* gemm_epilogue.cuh - the arithmetic of the epilogue: bias and activation of accumulators, and what a
 * training step saves of them. */
#ifndef EP_GEMM_EPILOGUE_CUH
#define EP_GEMM_EPILOGUE_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/arch/ptx.cuh"
#include "protocol/gemm_params.h"

/* 1 / (1 + exp(-s * x)) for two numbers, with one reciprocal. s * x is clamped at -40, where the result is
 * 4e-18: negligible in any 16-bit number that it multiplies. The clamp keeps the product a * b finite. */
EP_PTX void ep_sigmoid_pair(float x0, float x1, float s, float *y0, float *y1) {
    const float minus_log2e = -1.4426950408889634f;
    const float a = 1.0f + ep_ex2(minus_log2e * fmaxf(s * x0, -40.0f));
    const float b = 1.0f + ep_ex2(minus_log2e * fmaxf(s * x1, -40.0f));
    const float r = ep_rcp(a * b);
    *y0 = b * r;
    *y1 = a * r;
}

/* The limits of a gate and of its up value. These comparisons let NaN through. */
EP_PTX void ep_clamp_gate(float most, float *v, float *u) {
    const float least = -most;
    *v = *v > most ? most : *v;
    *u = *u > most ? most : *u < least ? least : *u;
}

/* What alpha times the sigmoid is applied to: x, or for a GELU with tanh x + 0.044715 x^3. */
EP_PTX float ep_sigmoid_argument(bool is_tanh, float x) { return is_tanh ? x + 0.044715f * x * x * x : x; }

/* Apply the activation to two neighbouring columns of two rows. d: four products; or four
 * gate values and then the four up values. out may be d, or precede it in memory. */
template <int ACT> EP_PTX void ep_gemm_activate(const EpGemmParams *p, const float *d, float *out) {
    static_assert(ACT == EP_ACT_KERNEL(ACT), "the others are read from the parameters");
    EP_HANDLES_ALL(EP_NUM_ACTIVATIONS, 10);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        float v0 = d[i], v1 = d[i + 1], s0, s1;
        if (ACT == EP_ACT_GELU) {
            v0 *= 0.5f + 0.5f * erff(v0 * 0.70710678f);
            v1 *= 0.5f + 0.5f * erff(v1 * 0.70710678f);
        } else if (ACT == EP_ACT_SWIGLU) {
            ep_sigmoid_pair(v0, v1, 1.0f, &s0, &s1);
            v0 *= s0 * d[4 + i];
            v1 *= s1 * d[5 + i];
        } else if (ACT == EP_ACT_GPT_OSS) { /* these comparisons let NaN through */
            const float most = p->limit, least = -most;
            float u0 = d[4 + i], u1 = d[5 + i];
            v0 = v0 > most ? most : v0;
            v1 = v1 > most ? most : v1;
            u0 = u0 > most ? most : u0 < least ? least : u0;
            u1 = u1 > most ? most : u1 < least ? least : u1;
            ep_sigmoid_pair(v0, v1, p->alpha, &s0, &s1);
            v0 *= s0 * (u0 + 1.0f);
            v1 *= s1 * (u1 + 1.0f);
        } else if (ACT == EP_ACT_ANY_GATE) {
            const bool is_tanh = p->activation == EP_ACT_GEGLU_TANH;
            const float one = p->activation == EP_ACT_SWIGLU_PLUS_ONE ? 1.0f : 0.0f;
            float u0 = d[4 + i], u1 = d[5 + i];
            ep_clamp_gate(p->limit, &v0, &u0);
            ep_clamp_gate(p->limit, &v1, &u1);
            ep_sigmoid_pair(ep_sigmoid_argument(is_tanh, v0), ep_sigmoid_argument(is_tanh, v1), p->alpha, &s0,
                            &s1);
            v0 *= s0 * (u0 + one);
            v1 *= s1 * (u1 + one);
        } else if (ACT == EP_ACT_ANY_UNGATED) {
            if (p->activation == EP_ACT_RELU2) { /* NaN stays */
                s0 = v0 < 0 ? 0 : v0;
                s1 = v1 < 0 ? 0 : v1;
            } else {
                const bool is_tanh = p->activation == EP_ACT_GELU_TANH;
                ep_sigmoid_pair(ep_sigmoid_argument(is_tanh, v0), ep_sigmoid_argument(is_tanh, v1), p->alpha,
                                &s0, &s1);
            }
            v0 *= s0;
            v1 *= s1;
        }
        out[i] = v0;
        out[i + 1] = v1;
    }
}

/* Load two consecutive numbers, the first at an even index. */
template <bool F16> EP_PTX float2 ep_load_pair(const void *p, uint64_t i) {
    return F16 ? __half22float2(((const __half2 *)p)[i / 2])
               : __bfloat1622float2(((const __nv_bfloat162 *)p)[i / 2]);
}
/* Add the bias of output columns c (even) and c + 1, in two rows. d: four products; or four
 * gate values and then the four up values. */
template <int ACT, bool F16> EP_PTX void ep_gemm_add_bias(const EpGemmParams *p, uint32_t e, uint32_t c,
                                                          float *d) {
    const uint64_t base = (uint64_t)e * p->n;
    float2 v, u = {0, 0};
    if (ACT == EP_ACT_GPT_OSS) { /* the weights are interleaved: gate, up, gate, up */
        const float2 a = ep_load_pair<F16>(p->bias, base + 2 * c);
        const float2 b = ep_load_pair<F16>(p->bias, base + 2 * c + 2);
        v.x = a.x;
        u.x = a.y;
        v.y = b.x;
        u.y = b.y;
    } else v = ep_load_pair<F16>(p->bias, base + c);
    if (EP_ACT_IS_GATED(ACT) && ACT != EP_ACT_GPT_OSS) u = ep_load_pair<F16>(p->bias, base + c + p->n / 2);
    d[0] += v.x;
    d[1] += v.y;
    d[2] += v.x;
    d[3] += v.y;
    if (EP_ACT_IS_GATED(ACT)) {
        d[4] += u.x;
        d[5] += u.y;
        d[6] += u.x;
        d[7] += u.y;
    }
}

/* Save what belongs to output columns c (even) and c + 1 of a row: two products; or two gates d[0], d[1] and
 * their ups d[4], d[5]. */
template <int ACT, bool F16> EP_PTX void ep_gemm_save_pair(const EpGemmParams *p, uint64_t row, uint32_t c,
                                                           const float *d) {
    uint32_t *to = (uint32_t *)((uint16_t *)p->saved + row * p->n);
    if (ACT == EP_ACT_GPT_OSS) { /* gate, up, gate, up */
        to[c] = ep_pack<F16>(d[0], d[4]);
        to[c + 1] = ep_pack<F16>(d[1], d[5]);
    } else {
        to[c / 2] = ep_pack<F16>(d[0], d[1]);
        if (EP_ACT_IS_GATED(ACT)) to[(p->n / 2 + c) / 2] = ep_pack<F16>(d[4], d[5]);
    }
}

#endif /* EP_GEMM_EPILOGUE_CUH */
