/* gemm_accumulate.cuh - the epilogue of WGRAD for Hopper that adds to fp32 numbers in global memory.
 *
 * Exports EpGemmAccumulateConfig, ep_gemm_prefetch_out and ep_gemm_accumulate. C is an EpGemmConfig.
 * out += scale * the product. One thread adds to a number, once in a launch, so the result does not depend on
 * the order of the tiles. Invariant: only rows and columns that exist are touched, and none of an expert
 * without rows.
 *
 * The accumulators are sent to the L2 as they are, without a staging buffer: four lanes have the 32 bytes of
 * a row that are a sector of the L2. The L2 adds, so that the MMA warps wait for no load. A warp requests its
 * part of out when it starts a tile (ep_gemm_prefetch_out): the additions then find it in the L2. */
#ifndef EP_GEMM_ACCUMULATE_CUH
#define EP_GEMM_ACCUMULATE_CUH
#include "kernels/gemm/gemm_stages.cuh"

template <int BN, bool F16> struct EpGemmAccumulateConfig
    : EpGemmConfig<EP_GEMM_WGRAD, BN, EP_ACT_NONE, F16> {
    static constexpr bool ACCUMULATES = true;
};

/* A lane's part of a tile: row `row` of the tile and the row 8 below, from column `col` of out on. */
typedef struct {
    float *out;
    uint32_t row, col;
} EpGemmSums;
EP_PTX EpGemmSums ep_gemm_sums(const EpGemmParams *p, const EpGemmTile *t, uint32_t row, uint32_t col) {
    float *out = (float *)p->out + ((uint64_t)t->expert * p->n + t->row0 + row) * p->k + col;
    const EpGemmSums s = {out, row, col};
    return s;
}

/* Request the 16 rows of a warp. The lanes 0 to 15 have one row each. */
template <typename C>
EP_PTX void ep_gemm_prefetch_out(const EpGemmParams *p, const EpGemmTile *t, uint32_t group) {
    const uint32_t lane = ep_lane_now();
    const uint32_t row = 64 * group + threadIdx.x / 32 % 4 * 16 + lane;
    if (lane >= 16 || row >= t->num_rows || t->col0 >= p->k || t->num_k == 0) return;
    ep_prefetch_l2(ep_gemm_sums(p, t, row, t->col0).out, 4 * min((uint32_t)C::BN, p->k - t->col0));
}

template <typename C> EP_PTX void ep_gemm_accumulate(const float (&d)[C::BN / 2], const EpGemmParams *p,
                                                     const EpGemmTile *t, uint32_t group) {
    const uint32_t lane = ep_lane_now();
    const uint32_t row = 64 * group + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const EpGemmSums s = ep_gemm_sums(p, t, row, t->col0 + lane % 4 * 2);
    if (t->num_k == 0) return; /* the accumulators are not set, and there is nothing to add */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (s.row + 8 * half >= t->num_rows) return;
        float *out = s.out + (uint64_t)(8 * half) * p->k;
#pragma unroll
        for (int i = 0; i < C::OUT_GROUPS; i++) {
            const float *sum = d + 4 * i + 2 * half;
            if (s.col + 8 * i < p->k) ep_red_add_f32x2(out + 8 * i, p->scale * sum[0], p->scale * sum[1]);
        }
    }
}

#endif /* EP_GEMM_ACCUMULATE_CUH */
