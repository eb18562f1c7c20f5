/* cpu/quantize.c - rows to e4m3 with a scale for each 128 numbers, and e4m3 with other scales, on the CPU;
 * see protocol/quantize.h. */
#include "cpu/quantize.h"

#include <math.h>

#include "cpu/rows.h"
#include "protocol/activation_math.h"

/* Read numbers col, .., col + num - 1 of a row after its activation. */
static void read_group(float *to, const EpQuantizeParams *p, uint32_t row, uint32_t col, uint32_t num) {
    const uint32_t act = p->activation.kind;
    const bool gated = EP_ACT_IS_GATED(act), mixed = EP_ACT_IS_MIXED(act);
    const uint64_t begin = (uint64_t)row * p->k * (gated ? 2 : 1);
    float in[2 * EP_QUANTIZE_GROUP]; /* gate, up, gate, up; or all gates, then the ups */
    if (mixed) {
        ep_cpu_load(in, p->x, p->dtype, begin + 2ull * col, 2 * num);
    } else {
        ep_cpu_load(in, p->x, p->dtype, begin + col, num);
        if (gated) ep_cpu_load(in + num, p->x, p->dtype, begin + p->k + col, num);
    }
    for (uint32_t i = 0; i < num; i++) {
        const float x = mixed ? in[2 * i] : in[i];
        if (gated) to[i] = ep_quantize_gate(p, act, x, mixed ? in[2 * i + 1] : in[num + i]);
        else if (act == EP_ACT_GELU) to[i] = ep_quantize_gelu(x);
        else to[i] = act ? ep_quantize_ungated(p, act, x) : x;
    }
}

void ep_cpu_quantize_rows(const EpQuantizeParams *p) {
    const uint32_t num_rows = ep_quantize_rows(p), num_groups = ep_quantize_num_groups(p);
    float group[EP_QUANTIZE_GROUP];
    for (uint32_t row = 0; row < num_rows; row++)
        for (uint32_t g = 0; g < num_groups; g++) {
            const uint32_t col = g * EP_QUANTIZE_GROUP, left = p->k - col;
            const uint32_t num = left < EP_QUANTIZE_GROUP ? left : EP_QUANTIZE_GROUP;
            read_group(group, p, row, col, num);
            p->scales[(uint64_t)g * p->max_rows + row] = ep_cpu_quantize_floats(
                p->q + (uint64_t)row * p->k + col, group, num, p->is_pow2 ? EP_FP8_POW2 : EP_FP8_SCALED);
        }
}

/* Row r of matrix i. */
static void rescale_row(const EpRescaleParams *p, uint32_t i, uint32_t r) {
    float *scales = p->scales + i * p->scale_matrix + r / p->rows_of_scale * p->scale_row;
    uint8_t *q = p->q + ((uint64_t)i * p->n + r) * p->k;
    const uint32_t num_groups = ep_gemm_num_blocks(p->k);
    float to = p->to ? p->to[i] : 0;
    if (!p->to)
        for (uint32_t g = 0; g < num_groups; g++) to = fmaxf(to, scales[g * p->scale_col]);
    for (uint32_t c = 0; c < p->k; c++) {
        const float scale = scales[c / EP_QUANTIZE_GROUP * p->scale_col];
        if (scale != to) q[c] = ep_cpu_to_e4m3(ep_cpu_from_e4m3(q[c]) * (scale * (1.0f / to)));
    }
    if (!p->to)
        for (uint32_t g = 0; g < num_groups; g++) scales[g * p->scale_col] = to;
}

void ep_cpu_rescale(const EpRescaleParams *p) {
    const uint64_t num_rows = ep_rescale_num_rows(p);
    for (uint64_t row = 0; row < num_rows; row++)
        rescale_row(p, (uint32_t)(row / p->n), (uint32_t)(row % p->n));
}
