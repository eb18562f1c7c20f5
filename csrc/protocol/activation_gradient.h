/* activation_gradient.h - the parameters of the gradient of an activation.
 *
 * Exports EpActivationParams, ep_act_rows, and the columns of a gate and its up value. The arithmetic of one
 * column is in activation_math.h.
 *
 * For each row, h are the columns before the activation, y = activation(h), w the row's weight, and d the
 * gradient of the unweighted row y:
 *   d_h = w * d * y'(h)    the gradient of h
 *   weighted = w * y       what the weight gradient of the next product needs
 *   dot = sum of d * y     the gradient of w
 * d_h and weighted are rounded to 16 bits. With d_h8 they are then quantised to e4m3, with scales that are
 * powers of two, as quantize.h does it, and not stored in 16 bits.
 * dot is a sum in float32 in a fixed order: column c is added to partial sum c / 8 % EP_DOT_PARTS, in the
 * order of the columns, and then the partial sums are added up in pairs: 0 + 16, .., then 0 + 8, .. */
#ifndef EP_ACTIVATION_GRADIENT_H
#define EP_ACTIVATION_GRADIENT_H
#include "protocol/activation.h"

#define EP_DOT_PARTS 32u /* lanes of a warp: each has 8 neighbouring columns of 256 */

typedef struct {
    const void *h;           /* [M][I], or [M][2 I] if the activation is gated; bf16 or f16 */
    const void *d;           /* [M][I] */
    const int32_t *offsets;  /* [L + 1] first row of each expert; other rows are neither read nor written */
    const float *row_weight; /* [M] or NULL: all are 1 */
    void *d_h;               /* as h; not with d_h8 */
    void *weighted;          /* [M][I]; may be d; not with d_h8 */
    float *dots;             /* [M] */
    uint8_t *d_h8;           /* NULL, or as h. I is then a multiple of 128 */
    uint8_t *weighted8;      /* with d_h8: [M][I] */
    float *d_h_scales;       /* with d_h8: [columns of h / 128][M] */
    float *weighted_scales;  /* with d_h8: [I / 128][M] */
    uint32_t num_rows;       /* M */
    uint32_t num_experts;    /* L */
    uint32_t num_cols;       /* I; a multiple of 8 on CUDA */
    uint32_t is_f16;         /* fp16, otherwise bf16 */
    EpActivation activation; /* of ep_act_with_numbers */
} EpActivationParams;

/* The columns of h for column c of y: the gate (the only one if there are no gates), and up. */
EP_PURE uint32_t ep_act_gate_col(uint32_t activation, uint32_t c) {
    return EP_ACT_IS_MIXED(activation) ? 2 * c : c;
}
EP_PURE uint32_t ep_act_up_col(uint32_t activation, uint32_t c, uint32_t num_cols) {
    return EP_ACT_IS_MIXED(activation) ? 2 * c + 1 : num_cols + c;
}

/* The rows of the experts: [*begin, *end), within the rows that exist. */
EP_PURE void ep_act_rows(const EpActivationParams *p, uint32_t *begin, uint32_t *end) {
    const int32_t first = p->offsets[0], last = p->offsets[p->num_experts];
    *begin = first < 0 ? 0 : (uint32_t)first;
    *end = last < 0 ? 0 : (uint32_t)last < p->num_rows ? (uint32_t)last : p->num_rows;
}

#endif /* EP_ACTIVATION_GRADIENT_H */
