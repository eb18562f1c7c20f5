/* cpu/activation.c - the gradient of an activation in plain C; see protocol/activation.h. */
#include "cpu/ops.h"
#include "cpu/rows.h"
#include "protocol/activation_math.h"

static void compute_row(const EpActivationParams *p, uint32_t row) {
    const uint32_t I = p->num_cols, act = p->activation, dtype = p->is_f16 ? EP_F16 : EP_BF16;
    const bool gated = ep_gemm_is_gated(act);
    const uint64_t at = (uint64_t)row * I, of_h = gated ? 2 * at : at;
    const float w = p->row_weight ? p->row_weight[row] : 1.0f;
    float parts[EP_DOT_PARTS] = {0};
    for (uint32_t c = 0; c < I; c++) {
        const uint64_t gate = of_h + ep_act_gate_col(act, c), up = of_h + ep_act_up_col(act, c, I);
        const float u = gated ? ep_cpu_number(p->h, dtype, up) : 0;
        const EpActivated y = ep_act_gradient(act, p->alpha, p->limit, ep_cpu_number(p->h, dtype, gate), u);
        const float d = ep_cpu_number(p->d, dtype, at + c);
        const float wd = w * d;
        float *part = &parts[c / 8 % EP_DOT_PARTS];
        ep_cpu_store(p->weighted, dtype, at + c, w * y.value);
        *part = fmaf(d, y.value, *part);
        ep_cpu_store(p->d_h, dtype, gate, wd * y.of_gate);
        if (gated) ep_cpu_store(p->d_h, dtype, up, wd * y.of_up);
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
