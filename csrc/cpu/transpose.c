/* cpu/transpose.c - FP8 with the contraction along memory, on the CPU: rows and weights, quantised and
 * transposed; see protocol/wgrad_fp8.h. */
#include <math.h>
#include <string.h>

#include "cpu/quantize.h"
#include "cpu/rows.h"

enum { SIDE = EP_TRANSPOSED_ROWS }; /* of a block */
EP_HANDLES_ALL(EP_NUM_FP8_FORMATS, 2);

/* Round to e5m2: 1 sign, 5 exponent (bias 15), 2 mantissa bits. To nearest even; a magnitude above 57344
 * becomes 57344; NaN becomes 0x7f. */
static uint8_t to_e5m2(float f) {
    uint32_t u, magnitude;
    memcpy(&u, &f, 4);
    magnitude = u & 0x7fffffffu;
    const uint8_t sign = (uint8_t)(u >> 24 & 0x80u);
    if (magnitude > 0x7f800000u) return 0x7f;
    if (magnitude < 113u << 23) { /* below 2^-14 numbers are multiples of 2^-16, and the sum rounds to them */
        const float sum = fabsf(f) + 0x1p7f;
        memcpy(&magnitude, &sum, 4);
        return sign | (uint8_t)(magnitude & 0xffu);
    }
    magnitude += 0xfffffu + (magnitude >> 21 & 1u); /* 21 bits of the mantissa are rounded off */
    const uint32_t e5m2 = (magnitude >> 21) - (112u << 2);
    return sign | (uint8_t)(e5m2 < 0x7bu ? e5m2 : 0x7bu);
}
static uint8_t to_fp8(float f, uint32_t format) { return format == EP_E5M2 ? to_e5m2(f) : ep_cpu_to_e4m3(f); }

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static float larger(float most, float x) { return fabsf(x) > most ? fabsf(x) : most; } /* without NaN */

/* Columns col, .., col + num - 1 of a block of rows, from 16 or 32 bits. */
static void quantize_block(const EpTransposeParams *p, EpTransposedBlock b, uint64_t block, uint32_t col,
                           uint32_t num) {
    const uint64_t size = (uint64_t)SIDE * ep_transposed_num_blocks(p->num_rows, p->num_experts);
    float x[SIDE][SIDE];
    for (uint32_t r = 0; r < b.num; r++)
        ep_cpu_load(x[r], p->x, p->dtype, (uint64_t)(b.row + r) * p->num_cols + col, num);
    for (uint32_t c = 0; c < num; c++) {
        float most = EP_QUANTIZE_LEAST;
        for (uint32_t r = 0; r < b.num; r++) most = larger(most, x[r][c]);
        const float scale = ep_quantize_pow2(most, p->format), inverse = ep_quantize_pow2_inverse(scale);
        uint8_t *to = p->q + (col + c) * size + block * SIDE;
        for (uint32_t r = 0; r < SIDE; r++) to[r] = r < b.num ? to_fp8(x[r][c] * inverse, p->format) : 0;
        p->scales[block * p->num_cols + col + c] = scale;
    }
}

/* The largest scale of rows from e4m3, in 128 columns. */
static float largest_scale(const EpTransposeParams *p, uint64_t row, uint64_t end, uint32_t col) {
    float scale = EP_TRANSPOSED_LEAST;
    for (; row < end; row++)
        scale = larger(scale, p->x_scale[row * p->scale_row + col / SIDE * p->scale_col]);
    return scale;
}

/* The same from e4m3, for columns that share a scale in each row. */
static void shift_block(const EpTransposeParams *p, EpTransposedBlock b, uint64_t block, uint32_t col,
                        uint32_t num) {
    const uint64_t size = (uint64_t)SIDE * ep_transposed_num_blocks(p->num_rows, p->num_experts);
    const float *of_row = p->x_scale + b.row * p->scale_row + col / SIDE * p->scale_col;
    const uint8_t *x = (const uint8_t *)p->x + (uint64_t)b.row * p->num_cols + col;
    const uint64_t of_expert = (uint64_t)b.expert * ep_gemm_num_blocks(p->num_cols) + col / SIDE;
    const float scale = p->by_expert ? p->scales[of_expert] : largest_scale(p, b.row, b.row + b.num, col);
    for (uint32_t c = 0; c < num; c++) {
        memset(p->q + (col + c) * size + block * SIDE, 0, SIDE);
        if (!p->by_expert) p->scales[block * p->num_cols + col + c] = scale;
    }
    for (uint32_t r = 0; r < b.num; r++, x += p->num_cols) {
        const float ratio = of_row[r * p->scale_row] * (1.0f / scale);
        for (uint32_t c = 0; c < num; c++)
            p->q[(col + c) * size + block * SIDE + r] =
                ratio == 1 ? x[c] : ep_cpu_to_e4m3(ep_cpu_from_e4m3(x[c]) * ratio);
    }
}

void ep_cpu_transpose(const EpTransposeParams *p) {
    for (uint32_t e = 0; e < p->num_experts; e++) {
        const uint32_t from = ep_transpose_clamp(p, p->offsets[e]);
        const uint32_t to = ep_transpose_clamp(p, p->offsets[e + 1]),
                       groups = ep_gemm_num_blocks(p->num_cols);
        uint32_t block = ep_transposed_first_block(from, e);
        for (uint32_t i = 0; i < groups && p->by_expert; i++)
            p->scales[(uint64_t)e * groups + i] = largest_scale(p, from, to, i * SIDE);
        for (EpTransposedBlock b; (b = ep_transposed_block(p, e, block)).num; block++)
            for (uint32_t col = 0; col < p->num_cols; col += SIDE) {
                const uint32_t num = smaller(p->num_cols - col, SIDE);
                if (p->dtype == EP_TRANSPOSE_E4M3) shift_block(p, b, block, col, num);
                else quantize_block(p, b, block, col, num);
            }
    }
}

/* A block of weights: num_n by num_k numbers, from row n and column k of weights e on. */
static void quantize_weight_block(const EpQuantizeWeightParams *p, uint64_t e, uint32_t n, uint32_t k,
                                  uint32_t num_n, uint32_t num_k) {
    const uint64_t blocks_n = ep_gemm_num_blocks(p->n), blocks_k = ep_gemm_num_blocks(p->k);
    float x[SIDE][SIDE], most = EP_QUANTIZE_LEAST;
    for (uint32_t r = 0; r < num_n; r++) {
        ep_cpu_load(x[r], p->x, p->dtype, (e * p->n + n + r) * p->k + k, num_k);
        for (uint32_t c = 0; c < num_k; c++) most = larger(most, x[r][c]);
    }
    const float scale = ep_quantize_pow2(most, EP_E4M3), inverse = ep_quantize_pow2_inverse(scale);
    for (uint32_t r = 0; r < num_n; r++)
        for (uint32_t c = 0; c < num_k; c++) {
            const uint8_t q = ep_cpu_to_e4m3(x[r][c] * inverse);
            p->q[(e * p->n + n + r) * p->k + k + c] = q;
            p->transposed[(e * p->k + k + c) * p->n + n + r] = q;
        }
    p->scales[(e * blocks_n + n / SIDE) * blocks_k + k / SIDE] = scale;
    p->transposed_scales[(e * blocks_k + k / SIDE) * blocks_n + n / SIDE] = scale;
}

void ep_cpu_quantize_weight(const EpQuantizeWeightParams *p) {
    for (uint32_t e = 0; e < p->num; e++)
        for (uint32_t n = 0; n < p->n; n += SIDE)
            for (uint32_t k = 0; k < p->k; k += SIDE)
                quantize_weight_block(p, e, n, k, smaller(p->n - n, SIDE), smaller(p->k - k, SIDE));
}
