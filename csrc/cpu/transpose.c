/* cpu/transpose.c - FP8 with the contraction along memory, on the CPU: rows, transposed, and weights, also
 * quantised; see protocol/wgrad_fp8.h. */
#include <math.h>
#include <string.h>

#include "cpu/quantize.h"
#include "cpu/rows.h"

enum { SIDE = EP_TRANSPOSED_ROWS }; /* of a block */
static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static float larger(float most, float x) { return fabsf(x) > most ? fabsf(x) : most; } /* without NaN */

/* The largest scale of an expert's rows, in 128 columns. */
static float largest_scale(const EpTransposeParams *p, uint64_t row, uint64_t end, uint32_t col) {
    float scale = EP_TRANSPOSED_LEAST;
    for (; row < end; row++)
        scale = larger(scale, p->x_scale[row * p->scale_row + col / SIDE * p->scale_col]);
    return scale;
}

/* Columns col, .., col + num - 1 of a block of rows. They share a scale in each row. */
static void shift_block(const EpTransposeParams *p, EpTransposedBlock b, uint64_t block, uint32_t col,
                        uint32_t num) {
    const uint64_t size = (uint64_t)SIDE * ep_transposed_num_blocks(p->num_rows, p->num_experts);
    const float *of_row = p->x_scale + b.row * p->scale_row + col / SIDE * p->scale_col;
    const uint8_t *x = p->x + (uint64_t)b.row * p->num_cols + col;
    const float scale = p->scales[(uint64_t)b.expert * ep_gemm_num_blocks(p->num_cols) + col / SIDE];
    for (uint32_t c = 0; c < num; c++) memset(p->q + (col + c) * size + block * SIDE, 0, SIDE);
    for (uint32_t r = 0; r < b.num; r++, x += p->num_cols) {
        const float ratio = of_row[r * p->scale_row] * (1.0f / scale);
        for (uint32_t c = 0; c < num; c++)
            p->q[(col + c) * size + block * SIDE + r] =
                ratio == 1 ? x[c] : ep_cpu_to_e4m3(ep_cpu_from_e4m3(x[c]) * ratio);
    }
}

void ep_cpu_transpose(const EpTransposeParams *p) {
    const uint32_t groups = ep_gemm_num_blocks(p->num_cols);
    for (uint32_t e = 0; e < p->num_experts; e++) {
        const uint32_t from = ep_transpose_clamp(p, p->offsets[e]);
        const uint32_t to = ep_transpose_clamp(p, p->offsets[e + 1]);
        uint32_t block = ep_transposed_first_block(from, e);
        for (uint32_t i = 0; i < groups; i++)
            p->scales[(uint64_t)e * groups + i] = largest_scale(p, from, to, i * SIDE);
        for (EpTransposedBlock b; (b = ep_transposed_block(p, e, block)).num; block++)
            for (uint32_t col = 0; col < p->num_cols; col += SIDE)
                shift_block(p, b, block, col, smaller(p->num_cols - col, SIDE));
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
    const float scale = ep_quantize_pow2(most), inverse = ep_quantize_pow2_inverse(scale);
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
