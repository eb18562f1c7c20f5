/* cpu/rows.c - rows of numbers in plain C: sums, and e4m3; see cpu/rows.h.
 *
 * Invariant: every product and every sum is rounded to float32 by itself (no fused multiply-add), and the
 * rows are added in the order in which the caller lists them. So results have the same bits as those of the
 * CUDA kernels. */
#include "cpu/rows.h"

#include <math.h>
#include <string.h>

__extension__ typedef _Float16 EpF16;
EP_HANDLES_ALL(EP_NUM_DTYPES, 3);
EP_HANDLES_ALL(EP_NUM_FP8, 4);

static float bf16_to_f32(uint16_t v) {
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint16_t f32_to_bf16(float f) { /* round to nearest even; NaN stays NaN */
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* acc += w * src. The product and the sum are each rounded to float32. Without a weight: acc += src. */
static void row_add(float *acc, const void *src, uint32_t dtype, uint32_t n, const float *weight) {
#define ADD(load)                                                  \
    do {                                                           \
        if (weight) {                                              \
            float w = *weight;                                     \
            for (uint32_t i = 0; i < n; i++) acc[i] += w * (load); \
        } else {                                                   \
            for (uint32_t i = 0; i < n; i++) acc[i] += (load);     \
        }                                                          \
    } while (0)
    const float *f = (const float *)src;
    const uint16_t *b = (const uint16_t *)src;
    const EpF16 *h = (const EpF16 *)src;
    if (dtype == EP_F32) ADD(f[i]);
    if (dtype == EP_BF16) ADD(bf16_to_f32(b[i]));
    if (dtype == EP_F16) ADD((float)h[i]);
#undef ADD
}
static void row_store(void *dst, const float *acc, uint32_t dtype, uint32_t n) {
    if (dtype == EP_F32) memcpy(dst, acc, 4ull * n);
    if (dtype == EP_BF16)
        for (uint32_t i = 0; i < n; i++) ((uint16_t *)dst)[i] = f32_to_bf16(acc[i]);
    if (dtype == EP_F16)
        for (uint32_t i = 0; i < n; i++) ((EpF16 *)dst)[i] = (EpF16)acc[i];
}

void ep_cpu_sum_rows(void *dst, const void *const *rows, const float *weights, uint32_t num, uint32_t dtype,
                     uint32_t hidden) {
    float acc[1024];
    const uint32_t most = sizeof acc / sizeof acc[0], size = ep_dtype_bytes(dtype);
    for (uint32_t at = 0; at < hidden; at += most) {
        uint32_t n = hidden - at < most ? hidden - at : most;
        memset(acc, 0, sizeof acc);
        for (uint32_t i = 0; i < num; i++)
            row_add(acc, (const unsigned char *)rows[i] + (uint64_t)at * size, dtype, n,
                    weights ? &weights[i] : NULL);
        row_store((unsigned char *)dst + (uint64_t)at * size, acc, dtype, n);
    }
}

void ep_cpu_fill_nan(void *at, uint64_t num_bytes) {
    if (at && num_bytes) memset(at, EP_FILL_NAN, num_bytes);
}

/* ---- e4m3: 1 sign, 4 exponent (bias 7), 3 mantissa bits; the largest number is 448 ---- */

uint8_t ep_cpu_to_e4m3(float f) {
    uint32_t u, magnitude;
    memcpy(&u, &f, 4);
    magnitude = u & 0x7fffffffu;
    const uint8_t sign = (uint8_t)(u >> 24 & 0x80u);
    if (magnitude > 0x7f800000u) return 0x7f;
    if (magnitude < 121u << 23) { /* below 2^-6 numbers are multiples of 2^-9, and the sum rounds to them */
        const float sum = fabsf(f) + 0x1p14f;
        memcpy(&magnitude, &sum, 4);
        return sign | (uint8_t)(magnitude & 0xffu);
    }
    magnitude += 0x7ffffu + (magnitude >> 20 & 1u); /* 20 bits of the mantissa are rounded off */
    const uint32_t e4m3 = (magnitude >> 20) - (120u << 3);
    return sign | (uint8_t)(e4m3 < 0x7eu ? e4m3 : 0x7eu);
}

float ep_cpu_from_e4m3(uint8_t v) {
    const uint32_t magnitude = v & 0x7fu, normal = (magnitude << 20) + (120u << 23);
    float f = (float)magnitude * 0x1p-9f; /* below 8: subnormal */
    if (magnitude >= 8) memcpy(&f, &normal, 4);
    if (magnitude == 0x7f) f = NAN;
    return v & 0x80u ? -f : f;
}

void ep_cpu_sum_fp8(void *dst, const void *const *rows, const float *const *scales, uint32_t num,
                    uint32_t dtype, uint32_t hidden) {
    const uint32_t size = ep_dtype_bytes(dtype);
    for (uint32_t at = 0; at < hidden; at += EP_FP8_GROUP) {
        float acc[EP_FP8_GROUP] = {0};
        for (uint32_t i = 0; i < num; i++) {
            const uint8_t *row = (const uint8_t *)rows[i];
            if (!scales[i]) {
                row_add(acc, row + (uint64_t)at * size, dtype, EP_FP8_GROUP, NULL);
                continue;
            }
            const float scale = scales[i][at / EP_FP8_GROUP];
            for (uint32_t j = 0; j < EP_FP8_GROUP; j++) acc[j] += scale * ep_cpu_from_e4m3(row[at + j]);
        }
        row_store((unsigned char *)dst + (uint64_t)at * size, acc, dtype, EP_FP8_GROUP);
    }
}

float ep_cpu_number(const void *src, uint32_t dtype, uint64_t i) {
    return dtype == EP_BF16 ? bf16_to_f32(((const uint16_t *)src)[i]) : (float)((const EpF16 *)src)[i];
}
void ep_cpu_load(float *to, const void *src, uint32_t dtype, uint64_t at, uint32_t n) {
    const float *f = (const float *)src;
    const uint16_t *b = (const uint16_t *)src;
    const EpF16 *h = (const EpF16 *)src;
    if (dtype == EP_F32) memcpy(to, f + at, 4ull * n);
    if (dtype == EP_BF16)
        for (uint32_t i = 0; i < n; i++) to[i] = bf16_to_f32(b[at + i]);
    if (dtype == EP_F16)
        for (uint32_t i = 0; i < n; i++) to[i] = (float)h[at + i];
}
void ep_cpu_store(void *dst, uint32_t dtype, uint64_t i, float value) {
    if (dtype == EP_BF16) ((uint16_t *)dst)[i] = f32_to_bf16(value);
    else ((EpF16 *)dst)[i] = (EpF16)value;
}

float ep_cpu_quantize_floats(uint8_t *dst, const float *src, uint32_t n, uint32_t fp8) {
    float most = 0x1p-100f;
    /* A comparison, because fmaxf returns NaN for a signaling NaN and so forgets the numbers before it. */
    for (uint32_t i = 0; i < n; i++) {
        const float magnitude = fabsf(src[i]);
        most = magnitude > most ? magnitude : most;
    }
    float scale = most / 448.0f;
    if (fp8 >= EP_FP8_POW2) { /* the next power of two; infinity stays infinity */
        uint32_t bits;
        memcpy(&bits, &scale, 4);
        if (bits & 0x7fffffu) bits = (bits | 0x7fffffu) + 1;
        memcpy(&scale, &bits, 4);
    }
    const float inverse = 1.0f / scale;
    for (uint32_t i = 0; i < n; i++) dst[i] = ep_cpu_to_e4m3(src[i] * inverse);
    return scale;
}

float ep_cpu_quantize(uint8_t *dst, const void *src, uint32_t dtype, uint32_t fp8) {
    float group[EP_FP8_GROUP];
    ep_cpu_load(group, src, dtype, 0, EP_FP8_GROUP);
    return ep_cpu_quantize_floats(dst, group, EP_FP8_GROUP, fp8);
}
