/* cpu/activation.c - the gradient of an activation in plain C; see protocol/activation_gradient.h. */
#include "cpu/ops.h"
#include "cpu/quantize.h"
#include "cpu/rows.h"
#include "protocol/activation_math.h"

enum { GROUP = EP_QUANTIZE_GROUP };

/* Quantise the last GROUP columns of a row, of which c is the last. of_h: of d_h, all gates before the ups or
 * mixed as in h. */
static void quantize_columns(const EpActivationParams *p, uint32_t row, uint32_t c, const uint16_t *of_h,
                             const uint16_t *weighted) {
    const uint32_t I = p->num_cols, act = p->activation.kind, dtype = p->is_f16 ? EP_F16 : EP_BF16;
    const uint32_t halves = 1 + EP_ACT_IS_GATED(act), first = c / GROUP * GROUP;
    const uint64_t at = (uint64_t)row * I;
    p->weighted_scales[(uint64_t)(first / GROUP) * p->num_rows + row] =
        ep_cpu_quantize(p->weighted8 + at + first, weighted, dtype, EP_FP8_POW2);
    for (uint32_t half = 0; half < halves; half++) {
        const uint32_t col = EP_ACT_IS_MIXED(act) ? 2 * first + half * GROUP : first + half * I;
        p->d_h_scales[(uint64_t)(col / GROUP) * p->num_rows + row] =
            ep_cpu_quantize(p->d_h8 + halves * at + col, of_h + half * GROUP, dtype, EP_FP8_POW2);
    }
}

static void compute_row(const EpActivationParams *p, uint32_t row) {
    const uint32_t I = p->num_cols, act = p->activation.kind, dtype = p->is_f16 ? EP_F16 : EP_BF16;
    const bool gated = EP_ACT_IS_GATED(act), quantizes = p->d_h8 != NULL;
    const uint64_t at = (uint64_t)row * I, of_h = gated ? 2 * at : at;
    const float w = p->row_weight ? p->row_weight[row] : 1.0f;
    uint16_t group_h[2 * GROUP], group_y[GROUP];
    float parts[EP_DOT_PARTS] = {0};
    for (uint32_t c = 0; c < I; c++) {
        const uint64_t gate = of_h + ep_act_gate_col(act, c), up = of_h + ep_act_up_col(act, c, I);
        const float u = gated ? ep_cpu_number(p->h, dtype, up) : 0;
        const EpActivated y = ep_act_gradient(&p->activation, ep_cpu_number(p->h, dtype, gate), u);
        const float d = ep_cpu_number(p->d, dtype, at + c);
        const float wd = w * d;
        const uint32_t j = c % GROUP;
        float *part = &parts[c / 8 % EP_DOT_PARTS];
        ep_cpu_store(quantizes ? group_y : p->weighted, dtype, quantizes ? j : at + c, w * y.value);
        *part = fmaf(d, y.value, *part);
        ep_cpu_store(quantizes ? group_h : p->d_h, dtype, quantizes ? ep_act_gate_col(act, j) : gate,
                     wd * y.of_gate);
        if (gated)
            ep_cpu_store(quantizes ? group_h : p->d_h, dtype, quantizes ? ep_act_up_col(act, j, GROUP) : up,
                         wd * y.of_up);
        if (quantizes && j == GROUP - 1) quantize_columns(p, row, c, group_h, group_y);
    }
    for (uint32_t half = EP_DOT_PARTS / 2; half; half /= 2)
        for (uint32_t i = 0; i < half; i++) parts[i] += parts[i + half];
    p->dots[row] = parts[0];
}

void ep_cpu_activation(const EpActivationParams *p) {
    uint32_t begin, end;
    ep_act_rows(p, &begin, &end);
    for (uint32_t row = begin; row < end; row++) compute_row(p, row);
}
