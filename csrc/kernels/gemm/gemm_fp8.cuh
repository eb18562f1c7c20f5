/* gemm_fp8.cuh - the grouped GEMM of FP8 with scales of blocks, for Hopper: the warp that loads the scales,
 * and the MMA warps.
 *
 * The products of each 128 values of k share a scale in each row and in each 128 columns. Four wgmmas add
 * them up, in the tensor cores' own format. The sum is multiplied by both scales and added to the tile's
 * accumulators in float32.
 *
 * Many rows: a tile of 256 x 128. A warpgroup has two halves of 64 rows, one after the other in each stage.
 * So the columns of a stage are loaded once for 256 rows: with 128 rows, shared memory cannot deliver what
 * the tensor cores take. The two warpgroups take turns: one has the tensor cores while the other one adds its
 * sums. A half is written while the wgmmas of the other half are in flight, so the tensor cores have work at
 * the end of a tile, too.
 * Few rows: a tile of 32 x 64, of which a stage has 512 values of k; see gemm_tune.h.
 *
 * Exports ep_gemm_load_scales, ep_gemm_mma_tiles_fp8 and ep_gemm_mma_few_fp8. Hooks::scales has the
 * scales. */
#ifndef EP_GEMM_FP8_CUH
#define EP_GEMM_FP8_CUH
#include "kernels/gemm/gemm_stages.cuh"

/* ---- the warp that loads scales ---- */

/* Where a lane reads: the scale of its first row, and that of a block of columns: gates if the lane is even,
 * ups if it is odd. */
typedef struct {
    const float *row, *col;
} EpGemmScaleWalk;

template <typename C> EP_PTX EpGemmScaleWalk ep_gemm_scales_begin(const EpGemmParams *p,
                                                                  const EpGemmScales *scales,
                                                                  const EpGemmTile *t) {
    const uint32_t lane = ep_lane_now(), last = ep_gemm_num_blocks(p->n) - 1;
    const uint32_t gate = C::TWO_SCALES ? t->col0 / 2 : t->col0;
    const uint32_t col = C::TWO_SCALES && lane % 2 ? p->n / 2 + gate : gate;
    EpGemmScaleWalk w;
    w.row = scales->a + (t->row0 + lane) * scales->a_row;
    w.col = scales->b + t->expert * scales->b_expert + min(col / EP_GEMM_SCALE_BLOCK, last) * scales->b_n;
    return w;
}

/* Start to copy the scales of 128 values of k to shared memory. Those of rows that do not exist are not
 * copied: their products are not written. */
template <typename C> EP_PTX void ep_gemm_scales_copy(const EpGemmScales *scales, EpGemmScaleWalk *w,
                                                      uint32_t num_rows, uint32_t rows, uint32_t cols) {
    const uint32_t lane = ep_lane_now();
    const float *row = w->row;
#pragma unroll
    for (uint32_t i = 0; i < C::BM / 32; i++, row += 32 * scales->a_row)
        if (lane + 32 * i < num_rows) ep_cp_async_4(rows + 4 * lane + 128 * i, row);
    if (lane < 1 + C::TWO_SCALES) ep_cp_async_4(cols + 4 * lane, w->col);
    w->row += scales->a_k;
    w->col += scales->b_k;
}

/* One warp loads the scales of all tiles. It learns from the producer which tile a stage belongs to, and that
 * the stage is free. A stage is full when all its lanes' copies are complete. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_load_scales(const EpGemmParams *p, Hooks &hooks, const EpGemmShared *s) {
    EpRing ring = {0, 0};
    for (;;) {
        ep_mbar_wait(ep_gemm_told<C>(s, ring.stage), ring.parity, p->limit_ns);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage);
        if (t.num_rows == 0) break;
        EpGemmScaleWalk w = ep_gemm_scales_begin<C>(p, hooks.scales, &t);
        for (uint32_t k = 0; k < t.num_k; k += C::BK, ep_ring_next<C::STAGES>(&ring)) {
            const uint32_t slot = ep_gemm_slot<C>(s, ring.stage);
            if (k) ep_mbar_wait(ep_gemm_told<C>(s, ring.stage), ring.parity, p->limit_ns);
#pragma unroll
            for (uint32_t kk = 0; kk < C::K_BOXES; kk++)
                if (kk == 0 || k + kk * C::BOX_K < t.num_k)
                    ep_gemm_scales_copy<C>(hooks.scales, &w, t.num_rows, slot + 4 * C::BM * kk,
                                           slot + 4 * C::BM * C::K_BOXES + 8 * kk);
            ep_cp_async_mbar_arrive(s->full + 8 * ring.stage);
        }
    }
    ep_mbar_arrive(s->full + 8 * ring.stage);
}

/* ---- adding sums ---- */

/* The scales by which a lane multiplies its two rows: of gate columns, or all, and of up columns. */
typedef struct {
    float top, bottom, up_top, up_bottom;
} EpGemmProducts;
template <typename C> EP_PTX EpGemmProducts ep_gemm_scales_get(uint32_t rows, uint32_t cols) {
    const float top = ep_ld_shared_f32(rows), bottom = ep_ld_shared_f32(rows + 32);
    const float of_cols = ep_ld_shared_f32(cols), up = C::TWO_SCALES ? ep_ld_shared_f32(cols + 4) : 0;
    const EpGemmProducts s = {top * of_cols, bottom * of_cols, top * up, bottom * up};
    return s;
}

/* d += part * scales. Of each group of eight columns, a lane has two of its top row and two of its bottom
 * row. With two scales the columns are eight gates, eight ups, and so on. */
template <typename C> EP_PTX void ep_gemm_promote(float (&d)[C::BN / 2], const float (&part)[C::BN / 2],
                                                  const EpGemmProducts *s) {
#pragma unroll
    for (int i = 0; i < C::BN / 2; i++) {
        const bool is_up = C::TWO_SCALES && i / 4 % 2, is_bottom = i % 4 / 2;
        d[i] = fmaf(is_bottom ? is_up ? s->up_bottom : s->bottom : is_up ? s->up_top : s->top, part[i], d[i]);
    }
}

/* ---- few rows ---- */

/* d = this warpgroup's part of the tile: all of it or nothing, because a tile has at most 32 rows. The
 * products of values of k that do not exist are 0, and so must be their scales. */
template <typename C> EP_PTX void ep_gemm_mma_few_fp8(float (&d)[C::BN / 2], const EpGemmParams *p,
                                                      const EpGemmTile *t, uint32_t group,
                                                      const EpGemmShared *s, EpRing *ring) {
    const uint32_t row = threadIdx.x / 32 % 4 * 16 + ep_lane_now() / 4;
    const bool active = 64 * group < t->num_rows;
#pragma unroll
    for (int i = 0; i < C::BN / 2; i++) d[i] = 0;
    for (uint32_t k = 0; k < t->num_k; k += C::BK, ep_ring_next<C::STAGES>(ring)) {
        const uint32_t at = s->stages + ring->stage * C::STAGE_BYTES;
        const uint32_t slot = ep_gemm_slot<C>(s, ring->stage);
        float part[C::K_BOXES][C::BN / 2];
        EpGemmProducts scales[C::K_BOXES];
        ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->limit_ns);
        if (active) {
            const uint64_t a = ep_wgmma_desc(at, EP_GEMM_BOX);
            const uint64_t b = ep_wgmma_desc(at + C::A_BYTES, EP_GEMM_BOX);
            ep_wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4 * C::K_BOXES; i++)
                ep_wgmma_e4m3<C::BN>(part[i / 4], a + i / 4 * (C::A_SLAB / 16) + 2 * (i % 4),
                                     b + i / 4 * (C::B_SLAB / 16) + 2 * (i % 4), i % 4);
            ep_wgmma_commit();
#pragma unroll
            for (int kk = 0; kk < C::K_BOXES; kk++) {
                const EpGemmProducts none = {0, 0, 0, 0};
                scales[kk] = ep_gemm_scales_get<C>(slot + 4 * (C::BM * kk + row % C::BM),
                                                   slot + 4 * C::BM * C::K_BOXES + 8 * kk);
                if (k + kk * C::BOX_K >= t->num_k) scales[kk] = none;
            }
            ep_wgmma_wait<0>();
#pragma unroll
            for (int kk = 0; kk < C::K_BOXES; kk++) ep_wgmma_keep_order(part[kk]);
        }
        __syncwarp(); /* every lane has finished its wait and read the scales and the info */
        if (threadIdx.x % 32 == 0) ep_gemm_release_stage(s->empty + 8 * ring->stage);
        if (active)
#pragma unroll
            for (int kk = 0; kk < C::K_BOXES; kk++) ep_gemm_promote<C>(d, part[kk], &scales[kk]);
    }
}

/* ---- many rows ---- */

/* What a warp knows while it computes a tile. */
typedef struct {
    uint32_t group;   /* the warpgroup: 0 or 1 */
    bool takes_turns; /* both warpgroups have the same number of halves */
    uint32_t turn;    /* the parity of the warpgroup's next turn */
    EpRing ring;
} EpGemmFp8Work;

/* Start the products of a half, when it is this warpgroup's turn. They are in flight until
 * ep_gemm_finish_half. Without turns the tensor cores could process the wgmmas of both warpgroups
 * alternately: both would end at the same time, and then both would add their sums.
 * The turns are mbarriers, not named barriers, because a wait with a loop is the end of a basic block. ptxas
 * places a named barrier before the additions, and they would begin only when the other one has started. */
template <typename C, int HALF>
EP_PTX void ep_gemm_start_half(float (&part)[C::BN / 2], EpGemmFp8Work *w, const EpGemmParams *p,
                               const EpGemmShared *s) {
    const uint32_t at = s->stages + w->ring.stage * C::STAGE_BYTES;
    const uint64_t a = ep_wgmma_desc(at + (w->group + 2 * HALF) * EP_GEMM_BOX, EP_GEMM_BOX);
    const uint64_t b = ep_wgmma_desc(at + C::A_BYTES, EP_GEMM_BOX);
    if (w->takes_turns) {
        ep_mbar_wait(ep_gemm_turn<C>(s, w->group), w->turn, p->limit_ns);
        w->turn ^= 1;
    }
    ep_wgmma_fence();
#pragma unroll
    for (int j = 0; j < C::BK / 32; j++) /* 32 values of k are 2 units of 16 bytes */
        ep_wgmma_e4m3<C::BN>(part, a + 2 * j, b + 2 * j, j);
    ep_wgmma_commit();
    if (w->takes_turns && threadIdx.x % 32 == 0) ep_mbar_arrive(ep_gemm_turn<C>(s, 1 - w->group));
}

/* Wait for the products of a half in stage `stage`, and add their sums to d. The last half of a stage
 * releases it. */
template <typename C, int HALF, bool RELEASES>
EP_PTX void ep_gemm_finish_half(float (&d)[C::BN / 2], float (&part)[C::BN / 2], const EpGemmFp8Work *w,
                                const EpGemmShared *s, uint32_t stage) {
    const uint32_t slot = ep_gemm_slot<C>(s, stage);
    const uint32_t row = (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4 + 128 * HALF;
    const EpGemmProducts scales = ep_gemm_scales_get<C>(slot + 4 * row, slot + 4 * C::BM);
    ep_wgmma_wait<0>();
    ep_wgmma_keep_order(part);
    if (RELEASES) {
        __syncwarp(); /* every lane has finished its wait and read the scales and the info */
        if (threadIdx.x % 32 == 0) ep_gemm_release_stage(s->empty + 8 * stage);
    }
    ep_gemm_promote<C>(d, part, &scales);
}

/* Step to the next stage of the tile, and wait for it. Returns the previous stage. */
template <typename C>
EP_PTX uint32_t ep_gemm_next_stage(EpGemmFp8Work *w, const EpGemmParams *p, const EpGemmShared *s) {
    const uint32_t before = w->ring.stage;
    ep_ring_next<C::STAGES>(&w->ring);
    ep_mbar_wait(s->full + 8 * w->ring.stage, w->ring.parity, p->limit_ns);
    return before;
}

/* Note in shared memory, which has room at the end of the staging buffer, what ep_gemm_write_half must know.
 * There are no registers for it. Of a tile that has no rows for a half, ep_gemm_write_half writes nothing. */
EP_PTX uint32_t ep_gemm_staging(const EpGemmShared *s) {
    return s->staging + (threadIdx.x / 32 - 4) * EP_GEMM_OUT_STAGING;
}
EP_PTX void ep_gemm_keep_tile(const EpGemmShared *s, const EpGemmTile *t) {
    __syncwarp(); /* every lane has read the note of the tile before */
    if (threadIdx.x % 32 == 0)
        ep_st_shared(ep_gemm_staging(s) + EP_GEMM_OUT_STAGING - 16, t->expert, t->row0, t->num_rows, t->col0);
    __syncwarp();
}
template <typename C, int HALF>
EP_PTX void ep_gemm_write_half(float (&d)[C::BN / 2], const EpGemmParams *p, const EpGemmShared *s) {
    const uint4 note = ep_ld_shared(ep_gemm_staging(s) + EP_GEMM_OUT_STAGING - 16);
    const EpGemmTile t = {note.x, note.y, note.z, note.w, 0, 0, 0};
    EpGemmDeferred<C> all;
    ep_gemm_defer<C, C::PARTS>(&all, d, p, &t, threadIdx.x / 128 - 1 + 2 * HALF, ep_gemm_staging(s));
}

/* The two halves of a tile, after the first products of the first half have been started. The second half is
 * left in d1, for the caller to write. */
template <typename C>
EP_PTX void ep_gemm_mma_halves(float (&d0)[C::BN / 2], float (&d1)[C::BN / 2], float (&part)[C::BN / 2],
                               EpGemmFp8Work *w, const EpGemmParams *p, uint32_t num_k,
                               const EpGemmShared *s) {
    for (uint32_t k = C::BK; k < num_k; k += C::BK) {
        ep_gemm_finish_half<C, 0, false>(d0, part, w, s, w->ring.stage);
        ep_gemm_start_half<C, 1>(part, w, p, s);
        const uint32_t stage = ep_gemm_next_stage<C>(w, p, s);
        ep_gemm_finish_half<C, 1, true>(d1, part, w, s, stage);
        ep_gemm_start_half<C, 0>(part, w, p, s);
    }
    ep_gemm_finish_half<C, 0, false>(d0, part, w, s, w->ring.stage);
    ep_gemm_start_half<C, 1>(part, w, p, s);
    ep_gemm_write_half<C, 0>(d0, p, s);
    ep_gemm_finish_half<C, 1, true>(d1, part, w, s, w->ring.stage);
    ep_ring_next<C::STAGES>(&w->ring);
}
/* The same for a tile that has no rows for this warpgroup's second half. The first half is written. */
template <typename C>
EP_PTX void ep_gemm_mma_half(float (&d0)[C::BN / 2], float (&part)[C::BN / 2], EpGemmFp8Work *w,
                             const EpGemmParams *p, uint32_t num_k, const EpGemmShared *s) {
    for (uint32_t k = C::BK; k < num_k; k += C::BK) {
        const uint32_t stage = ep_gemm_next_stage<C>(w, p, s);
        ep_gemm_finish_half<C, 0, true>(d0, part, w, s, stage);
        ep_gemm_start_half<C, 0>(part, w, p, s);
    }
    ep_gemm_finish_half<C, 0, true>(d0, part, w, s, w->ring.stage);
    ep_ring_next<C::STAGES>(&w->ring);
    ep_gemm_write_half<C, 0>(d0, p, s);
}
/* Release the stages of a tile that has no rows for this warpgroup. */
template <typename C> EP_PTX void ep_gemm_skip_tile(EpGemmFp8Work *w, const EpGemmParams *p, uint32_t num_k,
                                                    const EpGemmShared *s) {
    for (uint32_t k = 0; k < num_k; k += C::BK, ep_ring_next<C::STAGES>(&w->ring)) {
        ep_mbar_wait(s->full + 8 * w->ring.stage, w->ring.parity, p->limit_ns);
        __syncwarp(); /* every lane has read the info, before it is overwritten */
        if (threadIdx.x % 32 == 0) ep_gemm_release_stage(s->empty + 8 * w->ring.stage);
    }
}

/* The MMA warps' loop. The second half of a tile is written after the next tile has begun. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_mma_tiles_fp8(const EpGemmParams *p, Hooks &hooks, const EpGemmShared *s) {
    static_assert(!Hooks::FUSED, "no worker may wait for a tile, because its end is written late");
    EpGemmFp8Work w = {threadIdx.x / 128 - 1, false, threadIdx.x < 256, {0, 0}}; /* the first one begins */
    float d0[C::BN / 2], d1[C::BN / 2], part[C::BN / 2];
    const EpGemmTile none = {0, 0, 0, 0, 0, 0, 0};
    ep_gemm_keep_tile(s, &none);
    for (;;) {
        ep_mbar_wait(s->full + 8 * w.ring.stage, w.ring.parity, p->limit_ns);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * w.ring.stage);
        const bool has_both = 64 * w.group + 128 < t.num_rows;
        if (t.num_rows == 0) break;
        if (64 * w.group >= t.num_rows) {
            ep_gemm_skip_tile<C>(&w, p, t.num_k, s);
            continue;
        }
        w.takes_turns = (t.num_rows - 1) / 64 % 2; /* 65 to 128 rows, or more than 192 */
        ep_gemm_start_half<C, 0>(part, &w, p, s);
        ep_gemm_write_half<C, 1>(d1, p, s);
        ep_gemm_keep_tile(s, &t);
#pragma unroll
        for (int i = 0; i < C::BN / 2; i++) d0[i] = d1[i] = 0;
        if (has_both) ep_gemm_mma_halves<C>(d0, d1, part, &w, p, t.num_k, s);
        else ep_gemm_mma_half<C>(d0, part, &w, p, t.num_k, s);
    }
    ep_gemm_write_half<C, 1>(d1, p, s);
}

#endif /* EP_GEMM_FP8_CUH */
