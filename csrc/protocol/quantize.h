/* quantize.h - rows of float8_e4m3fn with a scale for each 128 numbers: the parameters. Exports
 * EpQuantizeParams, EpRescaleParams and ep_quantize_*; the activations are in activation_math.h.
 *
 * The group of a row and 128 columns has scale = most / 448, where most is its largest magnitude, at least
 * 2^-100, and NaN does not count; with is_pow2, the next power of two. A number of it becomes
 * x * (1 / scale), rounded to nearest even. With an activation, x is the activation of a row's numbers,
 * computed in float32 and not rounded in between.
 *
 * Invariant: both backends compute the same bits. */
#ifndef EP_QUANTIZE_H
#define EP_QUANTIZE_H
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
    uint32_t dtype; /* EpDtype of x */
    EpActivation activation;
    float slope;      /* of its sigmoid, see ep_quantize_set_activation */
    uint32_t is_pow2; /* scales are powers of two, see ep_quantize_pow2 */
} EpQuantizeParams;

/* Give numbers of e4m3 one scale for many blocks, in place: a number becomes number * scale / the new scale,
 * rounded to nearest even. All scales are powers of two, so it is the same number, unless it becomes
 * subnormal. The scale of matrix i, row r and column c is scales[i * scale_matrix + r / rows_of_scale *
 * scale_row + c / 128 * scale_col]. */
typedef struct {
    uint8_t *q;      /* [num][n][k] */
    float *scales;   /* without `to` they become the new ones */
    const float *to; /* NULL: each row gets the largest of its scales. [num]: a matrix gets this one */
    const int32_t
        *num_rows; /* NULL; or of the rows of all matrices, those from this number on are left alone */
    uint64_t scale_matrix, scale_row, scale_col;
    uint32_t num, n, k;
    uint32_t rows_of_scale; /* without `to` 1 */
} EpRescaleParams;
/* The rows to rescale. A wrong number on the device is clamped. */
EP_PURE uint64_t ep_rescale_num_rows(const EpRescaleParams *p) {
    const uint64_t all = (uint64_t)p->num * p->n;
    if (!p->num_rows) return all;
    return *p->num_rows < 0 ? 0 : (uint64_t)*p->num_rows < all ? (uint64_t)*p->num_rows : all;
}

/* The scale of numbers of which `most` is the largest magnitude, at least EP_QUANTIZE_LEAST: the least power
 * of two that is not less than most / 448, where 448 = 1.75 * 2^8. Infinity stays infinity. */
EP_PURE float ep_quantize_pow2(float most) {
    uint32_t bits;
    memcpy(&bits, &most, 4);
    if (bits >= 0x7f800000u) return most;
    bits = ((bits + 0x1fffffu) & 0x7f800000u) - (8u << 23); /* mantissa > 1.75 */
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

/* Set a valid activation. Its sigmoid is 1 / (1 + 2^(slope * x)). */
EP_PURE void ep_quantize_set_activation(EpQuantizeParams *p, EpActivation activation) {
    p->activation = ep_act_with_numbers(activation);
    p->slope = -1.44269504f * p->activation.alpha;
}
EP_PURE uint32_t ep_quantize_num_groups(const EpQuantizeParams *p) { return ep_gemm_num_blocks(p->k); }
/* The rows to quantise. A wrong number on the device is clamped. */
EP_PURE uint32_t ep_quantize_rows(const EpQuantizeParams *p) {
    const int32_t num = p->num_rows ? *p->num_rows : INT32_MAX;
    return num < 0 ? 0 : (uint32_t)num < p->max_rows ? (uint32_t)num : p->max_rows;
}

#endif /* EP_QUANTIZE_H */
