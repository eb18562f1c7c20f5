/* cpu/expand.c - weights of 4 bits to float32, and to e4m3, on the CPU; see protocol/four_bit.h. */
#include <math.h>

#include "cpu/quantize.h"
#include "cpu/rows.h"

enum { SIDE = EP_QUANTIZE_GROUP }; /* of a block */
static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Weights k, .., k + num - 1 of row n of an expert. sizes: [N][K] of the expert. */
static void expand(const EpFourBit *w, const uint8_t *numbers, const uint32_t sizes[2], uint32_t dtype,
                   uint32_t expert, uint32_t n, uint32_t k, uint32_t num, float *to) {
    const uint8_t *codes = numbers + (uint64_t)expert * sizes[0] * (sizes[1] / 2);
    for (uint32_t i = 0; i < num; i++, k++) {
        const uint64_t group = ep_four_bit_scale(w, sizes[0], sizes[1], expert, n, k);
        const uint32_t code = ep_four_bit_code(w, codes, sizes[1], n, k);
        const int zero = w->zeros ? w->zeros[group] : 8;
        uint16_t rounded;
        ep_cpu_store(&rounded, dtype, 0,
                     w->format == EP_MXFP4
                         ? ep_four_bit_mxfp4(code, ((const uint8_t *)w->scales)[group])
                         : (float)((int)code - zero) * ep_cpu_number(w->scales, dtype, group));
        to[i] = ep_cpu_number(&rounded, dtype, 0);
    }
}

void ep_cpu_expand_row(const EpFourBit *w, const EpGemmParams *p, uint32_t expert, uint32_t n, float *to) {
    const uint32_t sizes[2] = {p->n, p->k};
    expand(w, (const uint8_t *)p->b, sizes, p->is_f16 ? EP_F16 : EP_BF16, expert, n, 0, p->k, to);
}

/* A block of weights: num_n by num_k numbers, from row n and column k of an expert on. */
static void expand_block(const EpExpandParams *p, uint32_t e, uint32_t n, uint32_t k, uint32_t num_n,
                         uint32_t num_k) {
    const uint64_t block = ((uint64_t)e * ep_gemm_num_blocks(p->n) + n / SIDE) * ep_gemm_num_blocks(p->k);
    const uint32_t sizes[2] = {p->n, p->k};
    float x[SIDE][SIDE], most = EP_QUANTIZE_LEAST;
    for (uint32_t r = 0; r < num_n; r++) {
        expand(&p->weights, p->numbers, sizes, p->dtype, e, n + r, k, num_k, x[r]);
        for (uint32_t c = 0; c < num_k; c++) most = fmaxf(most, fabsf(x[r][c])); /* without NaN */
    }
    const float scale = p->to ? p->to[e] : ep_quantize_pow2(most), inverse = ep_quantize_pow2_inverse(scale);
    for (uint32_t r = 0; r < num_n; r++)
        for (uint32_t c = 0; c < num_k; c++)
            p->q[((uint64_t)e * p->n + n + r) * p->k + k + c] = ep_cpu_to_e4m3(x[r][c] * inverse);
    p->q_scales[block + k / SIDE] = scale;
}

void ep_cpu_expand(const EpExpandParams *p) {
    for (uint32_t e = 0; e < p->num; e++)
        for (uint32_t n = 0; n < p->n; n += SIDE)
            for (uint32_t k = 0; k < p->k; k += SIDE)
                expand_block(p, e, n, k, smaller(p->n - n, SIDE), smaller(p->k - k, SIDE));
}
