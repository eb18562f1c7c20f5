/* activation_math.h - the arithmetic of the activations, for both backends: the only place that knows what a
 * member of EP_ACTIVATIONS computes. Each is here three times, because three callers want different things:
 *
 *   ep_act_gradient   value and derivatives of a column. The gradient's kernel and the CPU backend.
 *   ep_act_pair       values of two neighbouring columns, in the GEMM's epilogue: one reciprocal for both.
 *   ep_quantize_*     a value by operations that IEEE 754 defines exactly, for quantize.h.
 *
 * A kernel includes ptx.cuh before this file, which defines EP_DEVICE_MATH and has ep_ex2 and ep_rcp. In
 * ep_act_gradient only these and erff differ between the backends. */
#ifndef EP_ACTIVATION_MATH_H
#define EP_ACTIVATION_MATH_H
#include <math.h>
#include <string.h>

#include "protocol/gemm_params.h"
#include "protocol/quantize.h"

#ifndef EP_DEVICE_MATH
EP_FN float ep_ex2(float x) { return exp2f(x); } /* 2^x */
EP_FN float ep_rcp(float x) { return 1.0f / x; }
#endif

/* ---- value and derivatives ---- */

typedef struct {
    float value, of_gate, of_up; /* the activation, and its derivatives */
} EpActivated;

/* x * sigmoid(alpha * x), or for a GELU with tanh x * sigmoid(alpha * (x + 0.044715 x^3)), and its
 * derivative. Where the slope of the sigmoid is 0, its factor may be infinite, and the product is 0. */
EP_FN void ep_act_gate(bool is_tanh, float alpha, float x, float *value, float *slope) {
    const float arg = is_tanh ? x + 0.044715f * x * x * x : x;
    const float s = ep_rcp(1.0f + ep_ex2(-1.44269504f * (alpha * arg)));
    const float of_sigmoid = s * (1.0f - s);
    const float of_arg = is_tanh ? 1.0f + 0.134145f * x * x : 1.0f;
    *value = x * s;
    *slope = of_sigmoid == 0 ? s : s + alpha * x * of_arg * of_sigmoid;
}

EP_HANDLES_ALL(EP_NUM_ACTIVATIONS, 10); /* here, in ep_act_pair and ep_quantize_* */
/* v: the gate, or the only column; u: up. NaN gives NaN. A clamped number has the derivative 0, as in torch;
 * a number equal to its limit is not clamped. */
EP_FN EpActivated ep_act_gradient(const EpActivation *act, float v, float u) {
    const uint32_t activation = act->kind;
    const float alpha = act->alpha, limit = act->limit;
    EpActivated a = {v, 1, 0};
    float slope;
    if (EP_ACT_IS_GATED(activation)) {
        const bool is_tanh = activation == EP_ACT_GEGLU_TANH;
        const bool plus_one = activation == EP_ACT_GPT_OSS || activation == EP_ACT_SWIGLU_PLUS_ONE;
        float gate;
        ep_act_gate(is_tanh, alpha, v > limit ? limit : v, &gate, &slope);
        const float up = (u > limit ? limit : u < -limit ? -limit : u) + (plus_one ? 1.0f : 0.0f);
        a.value = gate * up;
        a.of_gate = v > limit ? 0 : slope * up;
        a.of_up = u > limit || u < -limit ? 0 : gate;
    } else if (activation == EP_ACT_GELU) {
        const float cdf = 0.5f + 0.5f * erff(v * 0.70710678f);
        const float pdf = 0.39894228f * ep_ex2(-0.72134752f * v * v);
        a.value = v * cdf;
        a.of_gate = pdf == 0 ? cdf : cdf + v * pdf;
    } else if (activation == EP_ACT_RELU2) {
        const float x = v < 0 ? 0 : v;
        a.value = x * x;
        a.of_gate = 2 * x;
    } else if (activation == EP_ACT_GELU_TANH || activation == EP_ACT_SILU) {
        ep_act_gate(activation == EP_ACT_GELU_TANH, alpha, v, &a.value, &a.of_gate);
    }
    return a;
}

/* ---- the epilogue ---- */

/* 1 / (1 + exp(-s * x)) for two numbers, with one reciprocal. s * x is clamped at -40, where the result is
 * 4e-18: negligible in any 16-bit number that it multiplies. The clamp keeps the product a * b finite. */
EP_FN void ep_sigmoid_pair(float x0, float x1, float s, float *y0, float *y1) {
    const float minus_log2e = -1.4426950408889634f;
    const float a = 1.0f + ep_ex2(minus_log2e * fmaxf(s * x0, -40.0f));
    const float b = 1.0f + ep_ex2(minus_log2e * fmaxf(s * x1, -40.0f));
    const float r = ep_rcp(a * b);
    *y0 = b * r;
    *y1 = a * r;
}

/* The limits of a gate and of its up value. These comparisons let NaN through. */
EP_FN void ep_clamp_gate(float most, float *v, float *u) {
    const float least = -most;
    *v = *v > most ? most : *v;
    *u = *u > most ? most : *u < least ? least : *u;
}

/* What alpha times the sigmoid is applied to: x, or for a GELU with tanh x + 0.044715 x^3. */
EP_FN float ep_sigmoid_argument(bool is_tanh, float x) { return is_tanh ? x + 0.044715f * x * x * x : x; }

/* out[0], out[1] = the activation of two neighbouring columns v. u: their ups, if it is gated. kernel: a
 * constant, EP_ACT_KERNEL(p->activation.kind), by which a compiler removes the others. out may be v. */
EP_FN void ep_act_pair(uint32_t kernel, const EpGemmParams *p, const float *v, const float *u, float *out) {
    float v0 = v[0], v1 = v[1], s0, s1;
    if (kernel == EP_ACT_GELU) {
        v0 *= 0.5f + 0.5f * erff(v0 * 0.70710678f);
        v1 *= 0.5f + 0.5f * erff(v1 * 0.70710678f);
    } else if (kernel == EP_ACT_SWIGLU) {
        ep_sigmoid_pair(v0, v1, 1.0f, &s0, &s1);
        v0 *= s0 * u[0];
        v1 *= s1 * u[1];
    } else if (kernel == EP_ACT_GPT_OSS) { /* these comparisons let NaN through */
        const float most = p->activation.limit, least = -most;
        float u0 = u[0], u1 = u[1];
        v0 = v0 > most ? most : v0;
        v1 = v1 > most ? most : v1;
        u0 = u0 > most ? most : u0 < least ? least : u0;
        u1 = u1 > most ? most : u1 < least ? least : u1;
        ep_sigmoid_pair(v0, v1, p->activation.alpha, &s0, &s1);
        v0 *= s0 * (u0 + 1.0f);
        v1 *= s1 * (u1 + 1.0f);
    } else if (kernel == EP_ACT_ANY_GATE) {
        const bool is_tanh = p->activation.kind == EP_ACT_GEGLU_TANH;
        const float one = p->activation.kind == EP_ACT_SWIGLU_PLUS_ONE ? 1.0f : 0.0f;
        float u0 = u[0], u1 = u[1];
        ep_clamp_gate(p->activation.limit, &v0, &u0);
        ep_clamp_gate(p->activation.limit, &v1, &u1);
        ep_sigmoid_pair(ep_sigmoid_argument(is_tanh, v0), ep_sigmoid_argument(is_tanh, v1),
                        p->activation.alpha, &s0, &s1);
        v0 *= s0 * (u0 + one);
        v1 *= s1 * (u1 + one);
    } else if (kernel == EP_ACT_ANY_UNGATED) {
        if (p->activation.kind == EP_ACT_RELU2) { /* NaN stays */
            s0 = v0 < 0 ? 0 : v0;
            s1 = v1 < 0 ? 0 : v1;
        } else {
            const bool is_tanh = p->activation.kind == EP_ACT_GELU_TANH;
            ep_sigmoid_pair(ep_sigmoid_argument(is_tanh, v0), ep_sigmoid_argument(is_tanh, v1),
                            p->activation.alpha, &s0, &s1);
        }
        v0 *= s0;
        v1 *= s1;
    }
    out[0] = v0;
    out[1] = v1;
}

/* ---- quantised rows: the same bits on both backends ----
 *
 * These functions use only operations that IEEE 754 defines exactly, and no product feeds a sum except in
 * fmaf: a compiler has nothing to contract. */

/* 2^t for |t| <= 125, and 2^-125 or 2^125 outside, with a relative error of 2^-22. A large summand rounds t
 * to an integer, which is then in the lowest bits of the sum. A polynomial computes the rest, |r| <= 1/2. */
EP_PURE float ep_quantize_exp2(float t) {
    const float summand = 0x1.8p23f;
    t = fmaxf(fminf(t, 125.0f), -125.0f);
    const float sum = t + summand, r = t - (sum - summand);
    float e = fmaf(r, 0.0013276472f, 0.009675541f);
    e = fmaf(r, e, 0.05550713f);
    e = fmaf(r, e, 0.2402212f);
    e = fmaf(r, e, 0.69314694f);
    e = fmaf(r, e, 1.0f);
    uint32_t bits, exponent;
    memcpy(&bits, &e, 4);
    memcpy(&exponent, &sum, 4);
    bits += exponent << 23;
    memcpy(&e, &bits, 4);
    return e;
}
/* 1 / d for 1 <= d <= 2^126, with a relative error of 2^-22: three steps of Newton. A division would have a
 * branch for each number. */
EP_PURE float ep_quantize_reciprocal(float d) {
    float y;
    uint32_t bits;
    memcpy(&bits, &d, 4);
    bits = 0x7ef311c7u - bits;
    memcpy(&y, &bits, 4);
    y = fmaf(y, fmaf(-d, y, 1.0f), y);
    y = fmaf(y, fmaf(-d, y, 1.0f), y);
    return fmaf(y, fmaf(-d, y, 1.0f), y);
}
EP_PURE float ep_quantize_sigmoid(float t) { return ep_quantize_reciprocal(1.0f + ep_quantize_exp2(t)); }

/* x times the distribution function of the normal distribution, with a relative error below 2^-16: for
 * z >= 0, erfc(z) = t * 2^(P(t) - z^2 / ln 2), where t = 1 / (1 + z / 2). */
EP_PURE float ep_quantize_gelu(float x) {
    const float z = fminf(fabsf(x) * 0.70710678f, 16.0f);
    const float t = ep_quantize_reciprocal(fmaf(0.5f, z, 1.0f));
    float p = fmaf(t, -0.27090073f, 1.0847981f);
    p = fmaf(t, p, -1.4463047f);
    p = fmaf(t, p, 0.50803906f);
    p = fmaf(t, p, -0.059824944f);
    p = fmaf(t, p, 0.5694449f);
    p = fmaf(t, p, 1.4404258f);
    p = fmaf(t, p, -1.8256785f);
    const float e = ep_quantize_exp2(fmaf(z * z, -1.44269504f, p - 1.0f)); /* erfc(z) = 2 * t * e */
    return x * (x < 0 ? t * e : fmaf(-t, e, 1.0f));
}

/* A gated activation of gate x and up value u. Where it is a constant, a compiler removes the others. */
EP_PURE float ep_quantize_gate(const EpQuantizeParams *p, uint32_t activation, float x, float u) {
    const bool is_tanh = activation == EP_ACT_GEGLU_TANH;
    if (activation != EP_ACT_SWIGLU) { /* these comparisons let NaN through */
        const float most = p->activation.limit, least = -most;
        x = x > most ? most : x;
        u = u > most ? most : u < least ? least : u;
        u += activation == EP_ACT_GPT_OSS || activation == EP_ACT_SWIGLU_PLUS_ONE ? 1.0f : 0.0f;
    }
    const float y = is_tanh ? fmaf(0.044715f * x * x, x, x) : x;
    return x * ep_quantize_sigmoid(y * p->slope) * u;
}
/* An activation without a gate. EP_ACT_GELU, which is long, is left to the caller. */
EP_PURE float ep_quantize_ungated(const EpQuantizeParams *p, uint32_t activation, float x) {
    const float positive = x < 0 ? 0.0f : x;
    const float y = activation == EP_ACT_GELU_TANH ? fmaf(0.044715f * x * x, x, x) : x;
    const float sigmoid = ep_quantize_sigmoid(y * p->slope);
    return activation == EP_ACT_RELU2 ? positive * positive : x * sigmoid;
}

#endif /* EP_ACTIVATION_MATH_H */
