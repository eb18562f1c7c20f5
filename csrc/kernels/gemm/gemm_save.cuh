/* gemm_save.cuh - the epilogue of a training step's forward: SwiGLU, and gate and up are saved for the
 * backward.
 *
 * Exports ep_gemm_save. Gate and up are rounded first, and the activation is that of the rounded numbers. So
 * the results have the bits of a GEMM without activation and then activation.cu, and the backward pass, which
 * reads gate and up, differentiates exactly what the forward pass has computed. */
#ifndef EP_GEMM_SAVE_CUH
#define EP_GEMM_SAVE_CUH
#include "kernels/gemm/gemm_stages.cuh"
#define EP_DEVICE_MATH
#include "protocol/activation_math.h"

template <int BN_, bool F16_> struct EpGemmSaveConfig
    : EpGemmConfig<EP_GEMM_FORWARD, BN_, EP_ACT_SWIGLU, F16_> {
    static constexpr bool SAVES = true;
};

EP_PTX float ep_save_value(float gate, float up) {
    return ep_act_gradient(EP_ACT_SWIGLU, 1.0f, INFINITY, gate, up).value;
}

/* A warp writes 64 columns of each matrix at a time: there are no registers for more. */
struct EpGemmSaved {
    static constexpr int OUT_GROUPS = 8, PASS = 8, PARTS = 2;
};

/* Write a part of a matrix with lines of `pitch` numbers, of which num_cols belong to these columns. */
EP_PTX void ep_gemm_write_saved(EpGemmDeferred<EpGemmSaved> *h, void *to, uint32_t row, uint32_t pitch,
                                uint32_t col0, uint32_t num_cols, uint32_t staging) {
    const uint32_t lane = ep_lane_now(), c = col0 + lane % EpGemmSaved::PASS * 8;
    h->out = (uint16_t *)to + (uint64_t)(row + lane / EpGemmSaved::PASS) * pitch + c;
    h->cols_left = c < num_cols ? num_cols - c : 0;
    ep_gemm_write_parts<EpGemmSaved, 0, EpGemmSaved::PARTS>(h, pitch, staging);
}

/* d: the gates and ups of 64 columns; see ep_gemm_finish. */
template <typename C> EP_PTX void ep_gemm_save_part(const float *d, const EpGemmParams *p, uint32_t row,
                                                    uint32_t num_rows, uint32_t col0, uint32_t staging) {
    const uint32_t out_cols = ep_gemm_out_cols(p);
    EpGemmDeferred<EpGemmSaved> gates, ups, values;
    gates.num_rows = ups.num_rows = values.num_rows = num_rows;
#pragma unroll
    for (int i = 0; i < 2 * EpGemmSaved::OUT_GROUPS; i++) {
        const float *v = d + i / 2 * 8 + i % 2 * 2;
        float v0, v1, u0, u1;
        gates.v[i] = ep_pack<C::F16>(v[0], v[1]);
        ups.v[i] = ep_pack<C::F16>(v[4], v[5]);
        ep_unpack<C::F16>(gates.v[i], &v0, &v1);
        ep_unpack<C::F16>(ups.v[i], &u0, &u1);
        values.v[i] = ep_pack<C::F16>(ep_save_value(v0, u0), ep_save_value(v1, u1));
    }
    ep_gemm_write_saved(&gates, p->saved, row, p->n, col0, out_cols, staging);
    ep_gemm_write_saved(&ups, (uint16_t *)p->saved + out_cols, row, p->n, col0, out_cols, staging);
    ep_gemm_write_saved(&values, p->out, row, out_cols, col0, out_cols, staging);
}

/* Finish a warp's part of a tile and write it: the gates, the ups, and then the activated rows. */
template <typename C> EP_PTX void ep_gemm_save(float (&d)[C::BN / 2], const EpGemmParams *p,
                                               const EpGemmTile *t, uint32_t group, uint32_t staging) {
    const uint32_t first = 64 * group + threadIdx.x / 32 % 4 * 16;
    const uint32_t col0 = t->col0 / 2, out_cols = ep_gemm_out_cols(p);
    if (first >= t->num_rows) return;
    if (p->bias) {
        const uint32_t c = col0 + ep_lane_now() % 4 * 2, last = out_cols - 2;
        /* groups of 4, because there are no registers for more loads */
#pragma unroll
        for (int i = 0; i < C::OUT_GROUPS; i += 4)
            if (col0 + 8 * i < out_cols)
#pragma unroll
                for (int j = i; j < i + 4; j++)
                    ep_gemm_add_bias<C::ACT, C::F16>(p, t->expert, min(c + 8 * j, last), d + 8 * j);
    }
#pragma unroll
    for (int i = 0; i < C::OUT_GROUPS; i += EpGemmSaved::OUT_GROUPS)
        if (col0 + 8 * i < out_cols)
            ep_gemm_save_part<C>(d + 8 * i, p, t->row0 + first, min(16u, t->num_rows - first), col0 + 8 * i,
                                 staging);
}

#endif /* EP_GEMM_SAVE_CUH */
