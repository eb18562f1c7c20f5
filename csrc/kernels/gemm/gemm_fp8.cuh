/* gemm_fp8.cuh - the MMA warps of the grouped GEMM of FP8 for Hopper: a tile of 128 x 128.
 *
 * A stage has 128 values of k, which share a scale in each row and in each 128 columns. Four wgmmas add up
 * their products, in the tensor cores' own format. The sum is multiplied by both scales and added to the
 * tile's accumulators in float32. While a warpgroup does so, the other one has the tensor cores: the two are
 * half a stage apart.
 *
 * Each lane reads the scales of its two rows from global memory, one stage ahead.
 * Exports ep_gemm_mma_tile_fp8. Hooks::scales has the scales. */
#ifndef EP_GEMM_FP8_CUH
#define EP_GEMM_FP8_CUH
#include "kernels/gemm/gemm_stages.cuh"

/* A lane's scales of one stage. up: that of up columns, if they have one of their own; gate columns have
 * cols. */
typedef struct {
    float top, bottom, cols, up;
} EpGemmStageScales;
/* Where a lane reads its next ones. */
typedef struct {
    const float *top, *bottom, *cols, *up;
} EpGemmScaleWalk;

/* The scales of the first stage of a tile. Rows and columns that do not exist get the scales of the last ones
 * that do; their products are not written. */
template <typename C> EP_PTX EpGemmScaleWalk ep_gemm_scales_begin(const EpGemmParams *p,
                                                                  const EpGemmScales *scales,
                                                                  const EpGemmTile *t, uint32_t group) {
    const uint32_t num_k = ep_gemm_num_blocks(p->k), num_n = ep_gemm_num_blocks(p->n);
    const uint32_t row = t->row0 + 64 * group + threadIdx.x / 32 % 4 * 16 + ep_lane_now() / 4;
    const uint32_t last_row = p->num_rows - 1;
    const uint32_t col = C::TWO_SCALES ? t->col0 / 2 : t->col0;
    const float *of_expert = scales->b + (uint64_t)t->expert * num_n * num_k;
    EpGemmScaleWalk w;
    w.top = scales->a + min(row, last_row) * scales->a_row;
    w.bottom = scales->a + min(row + 8, last_row) * scales->a_row;
    w.cols = of_expert + min(col / EP_GEMM_SCALE_BLOCK, num_n - 1) * num_k;
    w.up = of_expert + min((p->n / 2 + col) / EP_GEMM_SCALE_BLOCK, num_n - 1) * num_k;
    return w;
}
template <typename C> EP_PTX EpGemmStageScales ep_gemm_scales_next(const EpGemmScales *scales,
                                                                   EpGemmScaleWalk *w) {
    EpGemmStageScales s = {__ldg(w->top), __ldg(w->bottom), __ldg(w->cols), 0};
    if (C::TWO_SCALES) s.up = __ldg(w->up++);
    w->top += scales->a_block;
    w->bottom += scales->a_block;
    w->cols++;
    return s;
}

/* d += part * scales. Of each group of eight columns, a lane has two of its top row and two of its bottom
 * row. With two scales the columns are eight gates, eight ups, and so on. */
template <typename C> EP_PTX void ep_gemm_promote(float (&d)[C::BN / 2], const float (&part)[C::BN / 2],
                                                  const EpGemmStageScales *s) {
    const float scales[4] = {s->top * s->cols, s->bottom * s->cols, s->top * s->up, s->bottom * s->up};
#pragma unroll
    for (int i = 0; i < C::BN / 2; i++)
        d[i] = fmaf(scales[(C::TWO_SCALES ? i / 4 % 2 * 2 : 0) + i % 4 / 2], part[i], d[i]);
}

/* Release the stages of a tile that has no rows for this warpgroup. */
template <typename C> EP_PTX void ep_gemm_skip_tile(const EpGemmParams *p, const EpGemmTile *t,
                                                    const EpGemmShared *s, EpRing *ring) {
    for (uint32_t k = 0; k < t->num_k; k += C::BK, ep_ring_next<C::STAGES>(ring)) {
        ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->limit_ns);
        __syncwarp(); /* every lane has read the info, before it is overwritten */
        if (threadIdx.x % 32 == 0) ep_gemm_release_stage(s->empty + 8 * ring->stage);
    }
}

/* d = this warpgroup's 64 rows of the tile. The caller has waited for its first stage. A stage is released
 * when its wgmmas have finished. From then until it issues the next ones, the warpgroup leaves the tensor
 * cores to the other one. So it only promotes then: it reads scales and waits for the next stage before. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_mma_tile_fp8(float (&d)[C::BN / 2], EpGemmDeferred<C> *deferred, const EpGemmParams *p,
                                 Hooks &hooks, const EpGemmTile *t, uint32_t group, const EpGemmShared *s,
                                 EpRing *ring) {
    const uint32_t staging = s->staging + (threadIdx.x / 32 - 4) * EP_GEMM_OUT_STAGING;
    if (64 * group >= t->num_rows) return ep_gemm_skip_tile<C>(p, t, s, ring);
    EpGemmScaleWalk walk = ep_gemm_scales_begin<C>(p, hooks.scales, t, group);
    EpGemmStageScales next = ep_gemm_scales_next<C>(hooks.scales, &walk);
#pragma unroll
    for (int i = 0; i < C::BN / 2; i++) d[i] = 0;
    for (uint32_t k = 0; k < t->num_k;) {
        float part[C::BN / 2];
        const uint32_t at = s->stages + ring->stage * C::STAGE_BYTES, empty = s->empty + 8 * ring->stage;
        const uint64_t a = ep_wgmma_desc(at + group * EP_GEMM_BOX, EP_GEMM_BOX);
        const uint64_t b = ep_wgmma_desc(at + C::A_BYTES, EP_GEMM_BOX);
        ep_wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::BK / 32; i++) /* 32 values of k are 2 units of 16 bytes */
            ep_wgmma_e4m3<C::BN>(part, a + 2 * i, b + 2 * i, i);
        ep_wgmma_commit();
        if (k == 0) hooks.mma_in_flight();
        if constexpr (EP_GEMM_DEFERS<C, Hooks>)
            ep_gemm_write_deferred<C, C::EAGER_PARTS>(deferred, ep_gemm_out_cols(p), staging);
        const EpGemmStageScales now = next;
        k += C::BK;
        ep_ring_next<C::STAGES>(ring);
        if (k < t->num_k) {
            next = ep_gemm_scales_next<C>(hooks.scales, &walk);
            ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->limit_ns);
        }
        ep_wgmma_wait<0>();
        ep_wgmma_keep_order(part);
        __syncwarp(); /* every lane has finished its wait and read the info, before they are overwritten */
        if (threadIdx.x % 32 == 0) ep_gemm_release_stage(empty);
        ep_gemm_promote<C>(d, part, &now);
    }
}

#endif /* EP_GEMM_FP8_CUH */
