/* gemm_save.cuh - the epilogue of a training step's forward: the activation, and the product with its bias is
 * saved for the backward.
 *
 * Exports ep_gemm_save. The activation is that of the sums in float32, by the code of
 * inference. So the forward of a training step has the bits of inference. What is saved is rounded to 16
 * bits, and the backward pass differentiates there. */
#ifndef EP_GEMM_SAVE_CUH
#define EP_GEMM_SAVE_CUH
#include "kernels/gemm/gemm_stages.cuh"

template <int BN_, int ACT_, bool F16_> struct EpGemmSaveConfig
    : EpGemmConfig<EP_GEMM_FORWARD, BN_, ACT_, F16_> {
    static constexpr bool SAVES = true;
};

/* A warp writes 64 columns of a matrix at a time: there are no registers for more. */
struct EpGemmSaved {
    static constexpr int OUT_GROUPS = 8, PASS = 8, PARTS = 2;
};

/* Write a part of a matrix with lines of `pitch` numbers, of which num_cols exist. */
EP_PTX void ep_gemm_write_saved(EpGemmDeferred<EpGemmSaved> *h, void *to, uint32_t row, uint32_t pitch,
                                uint32_t col0, uint32_t num_cols, uint32_t staging) {
    const uint32_t lane = ep_lane_now(), c = col0 + lane % EpGemmSaved::PASS * 8;
    h->out = (uint16_t *)to + (uint64_t)(row + lane / EpGemmSaved::PASS) * pitch + c;
    h->cols_left = c < num_cols ? num_cols - c : 0;
    ep_gemm_write_parts<EpGemmSaved, 0, EpGemmSaved::PARTS>(h, pitch, staging);
}

/* GPT_OSS: eight outputs have 16 columns of `saved`: gate, up, gate, up. A lane has the gates and ups of two
 * outputs of a row, so four columns. Written are groups of eight columns, of which a lane has two. So each
 * lane takes them from the lane that has them. v, u: two gates and their ups. low, high: of the first eight
 * columns and of the second. */
template <bool F16> EP_PTX void ep_gemm_save_mixed(float v0, float v1, float u0, float u1, uint32_t *low,
                                                   uint32_t *high) {
    const uint32_t first = ep_pack<F16>(v0, u0), second = ep_pack<F16>(v1, u1);
    const uint32_t lane = ep_lane_now(), from = lane / 4 * 4 + lane % 4 / 2;
    const uint32_t a = __shfl_sync(0xffffffffu, first, from), b = __shfl_sync(0xffffffffu, second, from);
    const uint32_t c = __shfl_sync(0xffffffffu, first, from + 2),
                   d = __shfl_sync(0xffffffffu, second, from + 2);
    *low = lane % 2 ? b : a;
    *high = lane % 2 ? d : c;
}

/* Finish 64 output columns: save, activate, write. d: their sums, with the bias; see ep_gemm_finish. */
template <typename C> EP_PTX void ep_gemm_save_part(float *d, const EpGemmParams *p, uint32_t row,
                                                    uint32_t num_rows, uint32_t col0, uint32_t staging) {
    constexpr int SIZE = C::GATED ? 8 : 4;
    const uint32_t out_cols = ep_gemm_out_cols(p);
    const bool saves = !C::LOW_RANK || p->saves;
    EpGemmDeferred<EpGemmSaved> saved, values;
    saved.num_rows = values.num_rows = num_rows;
    if constexpr (EP_ACT_IS_MIXED(C::ACT)) {
#pragma unroll
        for (int half = 0; half < 2 && saves; half++) {
#pragma unroll
            for (int i = 0; i < EpGemmSaved::OUT_GROUPS; i++) { /* of 32 outputs, for the two rows */
                const float *v = d + (half * 4 + i / 2) * SIZE + i % 2 * 2;
                const int to = i / 2 * 4 + i % 2;
                ep_gemm_save_mixed<C::F16>(v[0], v[1], v[4], v[5], &saved.v[to], &saved.v[to + 2]);
            }
            ep_gemm_write_saved(&saved, p->saved, row, p->n, 2 * col0 + 64 * half, p->n, staging);
        }
    } else {
#pragma unroll
        for (int part = 0; part < SIZE / 4 && saves; part++) { /* the gates, then the ups; or the products */
#pragma unroll
            for (int i = 0; i < 2 * EpGemmSaved::OUT_GROUPS; i++) {
                const float *v = d + i / 2 * SIZE + i % 2 * 2 + 4 * part;
                saved.v[i] = ep_pack<C::F16>(v[0], v[1]);
            }
            ep_gemm_write_saved(&saved, (uint16_t *)p->saved + part * out_cols, row, p->n, col0, out_cols,
                                staging);
        }
    }
#pragma unroll
    for (int i = 0; i < EpGemmSaved::OUT_GROUPS; i++) {
        float *v = d + i * SIZE;
        ep_gemm_activate<C::ACT>(p, v, v);
        values.v[2 * i] = ep_pack<C::F16>(v[0], v[1]);
        values.v[2 * i + 1] = ep_pack<C::F16>(v[2], v[3]);
    }
    ep_gemm_write_saved(&values, p->out, row, out_cols, col0, out_cols, staging);
}

/* Finish a warp's part of a tile. */
template <typename C> EP_PTX void ep_gemm_save(float (&d)[C::BN / 2], const EpGemmParams *p,
                                               const EpGemmTile *t, uint32_t group, uint32_t staging) {
    constexpr int SIZE = C::GATED ? 8 : 4;
    const uint32_t first = 64 * group + threadIdx.x / 32 % 4 * 16;
    const uint32_t col0 = C::GATED ? t->col0 / 2 : t->col0, out_cols = ep_gemm_out_cols(p);
    if (first >= t->num_rows) return;
    if (p->bias) {
        const uint32_t c = col0 + ep_lane_now() % 4 * 2, last = out_cols - 2;
        /* groups of 4, because there are no registers for more loads */
#pragma unroll
        for (int i = 0; i < C::OUT_GROUPS; i += 4)
            if (col0 + 8 * i < out_cols)
#pragma unroll
                for (int j = i; j < i + 4; j++)
                    ep_gemm_add_bias<C::ACT, C::F16>(p, t->expert, min(c + 8 * j, last), d + SIZE * j);
    }
#pragma unroll
    for (int i = 0; i < C::OUT_GROUPS; i += EpGemmSaved::OUT_GROUPS)
        if (col0 + 8 * i < out_cols)
            ep_gemm_save_part<C>(d + SIZE * i, p, t->row0 + first, min(16u, t->num_rows - first),
                                 col0 + 8 * i, staging);
}

#endif /* EP_GEMM_SAVE_CUH */
