/* gemm_fp8.cuh - the MMA warps of the grouped GEMM of FP8 for Hopper: a tile of 256 x 128.
 *
 * A stage has 128 values of k, which share a scale in each row and in each 128 columns. Four wgmmas add up
 * their products, in the tensor cores' own format. The sum is multiplied by both scales and added to the
 * tile's accumulators in float32. While a warpgroup does so, the other one has the tensor cores.
 *
 * A warpgroup has two halves of 64 rows, one after the other in each stage. So the columns of a stage are
 * loaded once for 256 rows: with 128 rows, shared memory cannot deliver what the tensor cores take.
 *
 * Each warp copies the scales of its rows and columns to shared memory, EP_SCALES_AHEAD stages ahead, because
 * L2 takes longer than a stage when it is busy.
 * Exports ep_gemm_mma_tile_fp8. Hooks::scales has the scales. */
#ifndef EP_GEMM_FP8_CUH
#define EP_GEMM_FP8_CUH
#include "kernels/gemm/gemm_stages.cuh"

/* The scales of one stage that a lane multiplies with. up: that of up columns, if they have one of their own;
 * gate columns have cols. */
typedef struct {
    float top, bottom, cols, up;
} EpGemmStageScales;
/* Where a lane reads what it copies: the scale of a row, and that of cols (lane 0) or up (lane 1). */
typedef struct {
    const float *row, *col;
    uint32_t slots; /* in shared memory: 32 rows, cols, up; for EP_SCALE_SLOTS stages */
} EpGemmScaleWalk;

/* The first stage of a tile. Rows and columns that do not exist get the scales of the last ones that do;
 * their products are not written. */
template <typename C> EP_PTX EpGemmScaleWalk ep_gemm_scales_begin(const EpGemmParams *p,
                                                                  const EpGemmScales *scales,
                                                                  const EpGemmTile *t, uint32_t group,
                                                                  const EpGemmShared *s) {
    const uint32_t num_k = ep_gemm_num_blocks(p->k), num_n = ep_gemm_num_blocks(p->n);
    const uint32_t lane = ep_lane_now(), warp = threadIdx.x / 32 - 4;
    const uint32_t row = t->row0 + 64 * (group + lane / 16 * 2) + warp % 4 * 16 + lane % 16;
    const uint32_t gate = C::TWO_SCALES ? t->col0 / 2 : t->col0;
    const uint32_t col = C::TWO_SCALES && lane == 1 ? p->n / 2 + gate : gate;
    EpGemmScaleWalk w;
    w.row = scales->a + min(row, p->num_rows - 1) * scales->a_row;
    w.col = scales->b + ((uint64_t)t->expert * num_n + min(col / EP_GEMM_SCALE_BLOCK, num_n - 1)) * num_k;
    w.slots = s->end - C::SCALE_BYTES + warp * (EP_SCALE_SLOTS * EP_SCALE_SLOT);
    return w;
}
/* Start to copy the scales of stage i of a tile, if it has that many. */
template <typename C> EP_PTX void ep_gemm_scales_copy(const EpGemmScales *scales, EpGemmScaleWalk *w,
                                                      uint32_t i, uint32_t num_k) {
    const uint32_t lane = ep_lane_now(), slot = w->slots + i % EP_SCALE_SLOTS * EP_SCALE_SLOT;
    if (i * EP_GEMM_SCALE_BLOCK < num_k) {
        if (lane < 16 * C::HALVES) ep_cp_async_4(slot + 4 * lane, w->row);
        if (lane < 1 + C::TWO_SCALES) ep_cp_async_4(slot + 128 + 4 * lane, w->col);
        w->row += scales->a_block;
        w->col++;
    }
    ep_cp_async_commit();
}
EP_PTX EpGemmStageScales ep_gemm_scales_get(const EpGemmScaleWalk *w, uint32_t i, uint32_t half) {
    const uint32_t slot = w->slots + i % EP_SCALE_SLOTS * EP_SCALE_SLOT;
    const uint32_t row = slot + 64 * half + ep_lane_now() / 4 * 4;
    const EpGemmStageScales s = {ep_ld_shared_f32(row), ep_ld_shared_f32(row + 32),
                                 ep_ld_shared_f32(slot + 128), ep_ld_shared_f32(slot + 132)};
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

/* What a warpgroup has while it computes a tile. */
typedef struct {
    EpGemmScaleWalk walk;
    uint32_t group;
    bool is_full; /* the second half has rows */
} EpGemmFp8Work;

/* d += the products of stage i for 64 rows. After the last half that has rows, the stage is released. From
 * the end of its wgmmas until it issues the next ones, the warpgroup leaves the tensor cores to the other
 * one. So it only promotes then: it waits for the next stage before. */
template <typename C, int HALF, typename Hooks>
EP_PTX void ep_gemm_mma_half(float (&d)[C::BN / 2], EpGemmFp8Work *w, const EpGemmParams *p, Hooks &hooks,
                             const EpGemmTile *t, uint32_t i, const EpGemmShared *s, EpRing *ring) {
    const uint32_t at = s->stages + ring->stage * C::STAGE_BYTES, empty = s->empty + 8 * ring->stage;
    const uint64_t a = ep_wgmma_desc(at + (w->group + 2 * HALF) * EP_GEMM_BOX, EP_GEMM_BOX);
    const uint64_t b = ep_wgmma_desc(at + C::A_BYTES, EP_GEMM_BOX);
    const bool is_last = HALF == 1 || !w->is_full;
    float part[C::BN / 2];
    ep_wgmma_fence();
#pragma unroll
    for (int j = 0; j < C::BK / 32; j++) /* 32 values of k are 2 units of 16 bytes */
        ep_wgmma_e4m3<C::BN>(part, a + 2 * j, b + 2 * j, j);
    ep_wgmma_commit();
    if (HALF == 0) {
        ep_gemm_scales_copy<C>(hooks.scales, &w->walk, i + EP_SCALES_AHEAD, t->num_k);
        ep_cp_async_wait<EP_SCALES_AHEAD>();
        __syncwarp(); /* every lane has copied the scales of this stage */
    }
    if (is_last) {
        ep_ring_next<C::STAGES>(ring);
        if ((i + 1) * C::BK < t->num_k) ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->limit_ns);
    }
    const EpGemmStageScales now = ep_gemm_scales_get(&w->walk, i, HALF);
    ep_wgmma_wait<0>();
    ep_wgmma_keep_order(part);
    __syncwarp(); /* every lane has finished its wait and read the scales and the info */
    if (is_last && threadIdx.x % 32 == 0) ep_gemm_release_stage(empty);
    ep_gemm_promote<C>(d, part, &now);
}

/* d = this warpgroup's two halves of the tile. The caller has waited for its first stage. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_mma_tile_fp8(float (&d)[C::HALVES][C::BN / 2], const EpGemmParams *p, Hooks &hooks,
                                 const EpGemmTile *t, uint32_t group, const EpGemmShared *s, EpRing *ring) {
    if (64 * group >= t->num_rows) return ep_gemm_skip_tile<C>(p, t, s, ring);
    EpGemmFp8Work w = {ep_gemm_scales_begin<C>(p, hooks.scales, t, group, s), group,
                       64 * group + 128 < t->num_rows};
#pragma unroll
    for (uint32_t i = 0; i < EP_SCALES_AHEAD; i++) ep_gemm_scales_copy<C>(hooks.scales, &w.walk, i, t->num_k);
#pragma unroll
    for (int i = 0; i < C::BN / 2; i++) d[0][i] = d[1][i] = 0;
    /* The second warpgroup begins when the first one has promoted, and they stay apart. In tiles of fewer
     * stages the first one could arrive twice before the second one waits. */
    const bool is_apart = t->num_rows > 64 && t->num_k > (C::STAGES - 1) * C::BK;
    if (is_apart && group == 1) ep_bar_sync(2, 256);
    for (uint32_t i = 0; i * C::BK < t->num_k; i++) {
        ep_gemm_mma_half<C, 0>(d[0], &w, p, hooks, t, i, s, ring);
        if (is_apart && group == 0 && i == 0) ep_bar_arrive(2, 256);
        if (w.is_full) ep_gemm_mma_half<C, 1>(d[1], &w, p, hooks, t, i, s, ring);
    }
}

#endif /* EP_GEMM_FP8_CUH */
