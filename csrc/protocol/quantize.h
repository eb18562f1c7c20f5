/* quantize.h - rows of float8_e4m3fn with a scale for each 128 numbers: the parameters, and activations.
 * Exports EpQuantizeParams and ep_quantize_*.
 *
 * The group of a row and 128 columns has scale = most / 448, where most is its largest magnitude, at least
 * 2^-100, and NaN does not count; with is_pow2, the next power of two. A number of it becomes
 * x * (1 / scale), rounded to nearest even. With an activation, x is the activation of a row's numbers,
 * computed in float32 and not rounded in between.
 *
 * Invariant: both backends compute the same bits. So the functions here use only operations that IEEE 754
 * defines exactly, and no product feeds a sum except in fmaf: a compiler has nothing to contract. */
#ifndef EP_QUANTIZE_H
#define EP_QUANTIZE_H
#include <math.h>
#include <string.h>

#include "protocol/gemm_params.h"

#define EP_QUANTIZE_GROUP EP_GEMM_SCALE_BLOCK
#define EP_QUANTIZE_LEAST 0x1p-100f /* the least magnitude that a scale is computed from */

typedef struct {
    const void *x;           /* [max_rows][k]; if the activation is gated [max_rows][2 * k] */
    const int32_t *num_rows; /* NULL; or rows from this number on are neither read nor written */
    uint8_t *q;              /* [max_rows][k] */
    float *scales;           /* [ceil(k / 128)][max_rows]: column after column */
    uint32_t max_rows, k;
    uint32_t dtype;      /* EpDtype of x */
    uint32_t activation; /* EpActivation */
    float slope, limit;  /* of the activation, see ep_quantize_set_activation */
    uint32_t is_pow2;    /* scales are powers of two, see ep_quantize_pow2 */
} EpQuantizeParams;

/* The formats of 8-bit numbers. Their largest numbers are 448 = 1.75 * 2^8 and 57344 = 1.75 * 2^15. */
typedef enum { EP_E4M3 = 0, EP_E5M2 = 1, EP_NUM_FP8_FORMATS } EpFp8Format;
/* The scale of numbers of which `most` is the largest magnitude, at least EP_QUANTIZE_LEAST: the least power
 * of two that is not less than most / the largest number of the format. Infinity stays infinity. */
EP_PURE float ep_quantize_pow2(float most, uint32_t format) {
    uint32_t bits;
    memcpy(&bits, &most, 4);
    if (bits >= 0x7f800000u) return most;
    bits = ((bits + 0x1fffffu) & 0x7f800000u) - ((format == EP_E5M2 ? 15u : 8u) << 23); /* mantissa > 1.75 */
    memcpy(&most, &bits, 4);
    return most;
}
/* 1 / scale, for a scale of ep_quantize_pow2. */
EP_PURE float ep_quantize_pow2_inverse(float scale) {
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = bits >= 0x7f800000u ? 0 : (254u << 23) - bits;
    memcpy(&scale, &bits, 4);
    return scale;
}

EP_HANDLES_ALL(EP_NUM_ACTIVATIONS, 10); /* here and in ep_quantize_gate and ep_quantize_ungated */
/* Set an activation that exists (ep_gemm_is_activation). Its sigmoid is 1 / (1 + 2^(slope * x)). */
EP_PURE void ep_quantize_set_activation(EpQuantizeParams *p, uint32_t activation, float alpha, float limit) {
    const bool is_tanh = activation == EP_ACT_GEGLU_TANH || activation == EP_ACT_GELU_TANH;
    const bool has_numbers = activation >= EP_ACT_GPT_OSS && activation <= EP_ACT_SWIGLU_PLUS_ONE;
    p->activation = activation;
    p->slope = -1.44269504f * (is_tanh ? 1.59576912f : has_numbers ? alpha : 1.0f); /* 2 * sqrt(2 / pi) */
    p->limit = has_numbers ? limit : INFINITY;
}
EP_PURE uint32_t ep_quantize_num_groups(const EpQuantizeParams *p) { return ep_gemm_num_blocks(p->k); }
/* The rows to quantise. A wrong number on the device is clamped. */
EP_PURE uint32_t ep_quantize_rows(const EpQuantizeParams *p) {
    const int32_t num = p->num_rows ? *p->num_rows : INT32_MAX;
    return num < 0 ? 0 : (uint32_t)num < p->max_rows ? (uint32_t)num : p->max_rows;
}

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
        const float most = p->limit, least = -most;
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

#endif /* EP_QUANTIZE_H */
