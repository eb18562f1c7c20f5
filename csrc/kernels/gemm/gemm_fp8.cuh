/* gemm_fp8.cuh - the grouped GEMM of FP8 with scales of blocks, for Hopper: how a warp loads scales, and the
 * MMA warps.
 *
 * The products of each 128 values of k share a scale in each row and in each 128 columns. Four wgmmas add
 * them up, in the tensor cores' own format. The sum is multiplied by both scales and added to the tile's
 * accumulators in float32.
 *
 * A tile has 128 x 256 numbers; gemm_small_m.cuh has the tiles for small M. A warpgroup has 64 rows and two
 * pieces of 128 columns, one after the other in each stage. It loads its rows into registers once for both
 * pieces: shared memory cannot deliver rows and columns as fast as the tensor cores take them, and reading
 * them costs power. The two warpgroups take turns: one has the tensor cores while the other one adds its
 * sums. A piece is written while the wgmmas of the other piece are in flight, so the tensor cores have work
 * at the end of a tile, too.
 *
 * Exports ep_gemm_load_scales and ep_gemm_mma_tiles_fp8. Hooks::scales has the scales. */
#ifndef EP_GEMM_FP8_CUH
#define EP_GEMM_FP8_CUH
#include "kernels/arch/wgmma.cuh"
#include "kernels/gemm/gemm_stages.cuh"

/* ---- loading scales ---- */

/* Where a lane reads: the scale of its first row, and that of a block of columns. Two lanes have those of a
 * piece: gates or all columns, and ups. */
typedef struct {
    const float *row, *col;
} EpGemmScaleCursor;

template <typename C> EP_PTX EpGemmScaleCursor ep_gemm_scales_begin(const EpGemmParams *p,
                                                                    const EpGemmScales *scales,
                                                                    const EpGemmTile *t) {
    const uint32_t lane = ep_lane_now(), last = ep_gemm_num_blocks(p->n) - 1;
    const uint32_t first = t->col0 + lane / 2 % C::NUM_PIECES * 128;
    const uint32_t gate = C::TWO_SCALES ? first / 2 : first;
    const uint32_t col = C::TWO_SCALES && lane % 2 ? p->n / 2 + gate : gate;
    EpGemmScaleCursor cursor;
    cursor.row = scales->a + (t->row0 + lane) * scales->a_row;
    cursor.col =
        scales->b + t->expert * scales->b_expert + min(col / EP_GEMM_SCALE_BLOCK, last) * scales->b_n;
    return cursor;
}

/* Start to copy the scales of 128 values of k to shared memory. Those of rows that do not exist are not
 * copied: their products are not written. */
template <typename C> EP_PTX void ep_gemm_scales_copy(const EpGemmScales *scales, EpGemmScaleCursor *cursor,
                                                      uint32_t num_rows, uint32_t rows, uint32_t cols) {
    const uint32_t lane = ep_lane_now();
    const float *row = cursor->row;
#pragma unroll
    for (uint32_t i = 0; i < C::BM / 32; i++, row += 32 * scales->a_row)
        if (lane + 32 * i < num_rows) ep_cp_async_4(rows + 4 * lane + 128 * i, row);
    if (lane < 2 * C::NUM_PIECES) ep_cp_async_4(cols + 4 * lane, cursor->col);
    cursor->row += scales->a_k;
    cursor->col += scales->b_k;
}

/* Start to copy the scales of a stage, whose values of k begin at k. The stage is full when all lanes' copies
 * are complete. */
template <typename C>
EP_PTX void ep_gemm_stage_scales(const EpGemmScales *scales, EpGemmScaleCursor *cursor, const EpGemmTile *t,
                                 uint32_t k, const EpGemmShared *s, uint32_t stage) {
    const uint32_t slot = ep_gemm_slot<C>(s, stage);
#pragma unroll
    for (uint32_t kk = 0; kk < C::K_BOXES; kk++)
        if (kk == 0 || k + kk * C::BOX_K < t->num_k)
            ep_gemm_scales_copy<C>(scales, cursor, t->num_rows, slot + 4 * C::BM * kk,
                                   slot + 4 * C::BM * C::K_BOXES + 8 * kk);
    ep_cp_async_mbar_arrive(s->full + 8 * stage);
}

/* A warp that loads the scales of all tiles. It learns from the producer which tile a stage belongs to, and
 * that the stage is free. With WARP_PRODUCES the producer's warp does this itself. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_load_scales(const EpGemmParams *p, Hooks &hooks, const EpGemmShared *s) {
    EpRing ring = {0, 0};
    for (;;) {
        ep_gemm_wait<C>(ep_gemm_info_ready<C>(s, ring.stage), ring.parity, p->limit_ns);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage);
        if (t.num_rows == 0) break;
        EpGemmScaleCursor cursor = ep_gemm_scales_begin<C>(p, hooks.scales, &t);
        for (uint32_t k = 0; k < t.num_k; k += C::BK, ep_ring_next<C::STAGES>(&ring)) {
            if (k) ep_gemm_wait<C>(ep_gemm_info_ready<C>(s, ring.stage), ring.parity, p->limit_ns);
            ep_gemm_stage_scales<C>(hooks.scales, &cursor, &t, k, s, ring.stage);
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
template <typename C, int N>
EP_PTX void ep_gemm_promote(float (&d)[N], const float (&part)[N], const EpGemmProducts *s) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        const bool is_up = C::TWO_SCALES && i / 4 % 2, is_bottom = i % 4 / 2;
        d[i] = fmaf(is_bottom ? is_up ? s->up_bottom : s->bottom : is_up ? s->up_top : s->top, part[i], d[i]);
    }
}

/* A warpgroup's accumulators of a piece, and the rows of a stage that it has in registers. */
typedef float EpGemmPiece[64];
typedef uint32_t EpGemmRows[16];

template <typename C>
EP_PTX void ep_gemm_load_fragments(EpGemmRows &a, const EpGemmShared *s, uint32_t stage) {
    const uint32_t lane = ep_lane_now(), row = (threadIdx.x / 32 - 4) * 16 + lane % 16;
    const uint32_t at = s->stages + stage * C::STAGE_BYTES + row * 128;
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) /* 32 values of k are two pieces of 16 bytes */
        ep_ldmatrix_x4(at + ((2 * j + lane / 16) ^ (lane % 8)) * 16, &a[4 * j]);
}

/* Start the products of piece PIECE in a stage, when it is this warpgroup's turn. They are in flight until
 * ep_gemm_finish_piece. Without turns the tensor cores could process the wgmmas of both warpgroups
 * alternately: both would end at the same time, and then both would add their sums.
 * The rows are those in registers, or in shared memory. */
template <typename C, int PIECE, bool REGISTERS>
EP_PTX void ep_gemm_start_piece(EpGemmPiece &part, const EpGemmRows &a, const EpGemmShared *s, uint32_t stage,
                                bool takes_turns) {
    const uint32_t at = s->stages + stage * C::STAGE_BYTES, group = threadIdx.x / 128 - 1;
    const uint64_t rows = ep_wgmma_desc(at + group * EP_GEMM_BOX, EP_GEMM_BOX);
    const uint64_t cols = ep_wgmma_desc(at + C::A_BYTES + PIECE * 2 * EP_GEMM_BOX, EP_GEMM_BOX);
    if (takes_turns) ep_bar_sync(2 + group, 256);
    ep_wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) /* 32 values of k are 2 units of 16 bytes */
        if constexpr (REGISTERS) ep_wgmma_e4m3_rows(part, &a[4 * j], cols + 2 * j, j);
        else ep_wgmma_e4m3<128>(part, rows + 2 * j, cols + 2 * j, j);
    ep_wgmma_commit();
    if (takes_turns) ep_bar_arrive(3 - group, 256);
}

/* Wait for the products of a piece. Returns the scales by which ep_gemm_promote multiplies them. */
template <typename C, int PIECE>
EP_PTX EpGemmProducts ep_gemm_finish_piece(EpGemmPiece &part, const EpGemmShared *s, uint32_t stage) {
    const uint32_t slot = ep_gemm_slot<C>(s, stage);
    const uint32_t row = (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4;
    const EpGemmProducts scales = ep_gemm_scales_get<C>(slot + 4 * row, slot + 4 * C::BM + 8 * PIECE);
    ep_wgmma_wait<0>();
    ep_wgmma_keep_order(part);
    return scales;
}

/* Note in shared memory, which has room at the end of the staging buffer, what ep_gemm_write_piece must know.
 * There are no registers for it. */
template <typename C> EP_PTX uint32_t ep_gemm_staging(const EpGemmShared *s) {
    uint32_t warp = threadIdx.x / 32;
    if constexpr (C::IS_MEGA) asm volatile("" : "+r"(warp)); /* compute it again, where registers lack */
    return s->staging + (warp - 4) * EP_GEMM_OUT_STAGING;
}
template <typename C> EP_PTX void ep_gemm_save_tile(const EpGemmShared *s, const EpGemmTile *t) {
    __syncwarp(); /* every lane has read the note of the tile before */
    if (threadIdx.x % 32 == 0)
        ep_st_shared(ep_gemm_staging<C>(s) + EP_GEMM_OUT_STAGING - 16, t->expert, t->row0, t->num_rows,
                     t->col0);
    __syncwarp();
}
template <typename C> EP_PTX EpGemmTile ep_gemm_saved_tile(const EpGemmShared *s) {
    const uint4 note = ep_ld_shared(ep_gemm_staging<C>(s) + EP_GEMM_OUT_STAGING - 16);
    return {note.x, note.y, note.z, note.w, 0, 0, 0};
}
/* Round a piece and store its first AT_ONCE parts. ep_gemm_write_parts stores the others. */
template <typename C, int PIECE, int AT_ONCE>
EP_PTX void ep_gemm_write_piece(EpGemmDeferred<typename C::Piece> *v, EpGemmPiece &d, const EpGemmParams *p,
                                const EpGemmShared *s) {
    EpGemmTile t = ep_gemm_saved_tile<C>(s);
    t.col0 += 128 * PIECE;
    ep_gemm_defer<typename C::Piece, AT_ONCE>(v, d, p, &t, threadIdx.x / 128 - 1, ep_gemm_staging<C>(s));
}

EP_PTX void ep_gemm_release_by_warp(const EpGemmShared *s, uint32_t stage) {
    __syncwarp(); /* every lane has finished its wait and read the scales and the info */
    if (threadIdx.x % 32 == 0) ep_gemm_release_stage(s->empty + 8 * stage);
}

/* Wait until stage number n of the CTA is full: the n-th in the order of the tiles. There are no registers
 * for an EpRing. */
template <typename C>
EP_PTX void ep_gemm_await_stage(const EpGemmParams *p, const EpGemmShared *s, uint32_t n) {
    ep_gemm_wait<C>(s->full + 8 * (n % C::STAGES), n / C::STAGES % 2, p->limit_ns);
}

/* The pieces of a tile. Before, the first products of the first piece have been started, and the second piece
 * of the last tile has been written. The second piece is left in d1, for the caller to write. In the last
 * stage its wgmmas read the rows from shared memory, because the registers are needed to write the first
 * piece. There are not enough to round it meanwhile, if it has as many columns as the product. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_mma_pieces(EpGemmPiece &d0, EpGemmPiece &d1, EpGemmPiece &part, EpGemmRows &a,
                               const EpGemmParams *p, Hooks &hooks, bool takes_turns, const EpGemmShared *s,
                               uint32_t *n) {
    EpGemmProducts scales;
    for (uint32_t k = C::BK; k < p->k; k += C::BK) {
        const uint32_t stage = *n % C::STAGES;
        scales = ep_gemm_finish_piece<C, 0>(part, s, stage);
        ep_gemm_promote<C>(d0, part, &scales);
        ep_gemm_start_piece<C, 1, true>(part, a, s, stage, takes_turns);
        ep_gemm_await_stage<C>(p, s, ++*n);
        scales = ep_gemm_finish_piece<C, 1>(part, s, stage);
        ep_gemm_load_fragments<C>(a, s, *n % C::STAGES);
        ep_gemm_release_by_warp(s, stage);
        ep_gemm_promote<C>(d1, part, &scales);
        ep_gemm_start_piece<C, 0, true>(part, a, s, *n % C::STAGES, takes_turns);
    }
    uint32_t stage = (*n)++ % C::STAGES;
    hooks.mma_in_flight(); /* late, because its fence then finds the stores of the last tile done */
    scales = ep_gemm_finish_piece<C, 0>(part, s, stage);
    ep_gemm_promote<C>(d0, part, &scales);
    if constexpr (C::IS_MEGA && !C::GATED) /* compute addresses again, instead of keeping them */
        asm volatile("" : "+r"(stage));
    typedef typename C::Piece P;
    EpGemmDeferred<P> v;
    if constexpr (!C::GATED) ep_gemm_write_piece<C, 0, P::PARTS>(&v, d0, p, s);
    ep_gemm_start_piece<C, 1, false>(part, a, s, stage, takes_turns);
    if constexpr (C::GATED) ep_gemm_write_piece<C, 0, P::PARTS>(&v, d0, p, s);
    scales = ep_gemm_finish_piece<C, 1>(part, s, stage);
    ep_gemm_release_by_warp(s, stage);
    ep_gemm_promote<C>(d1, part, &scales);
}

/* Release the stages of a tile that has no rows for this warpgroup. */
template <typename C>
EP_PTX void ep_gemm_skip_tile(const EpGemmParams *p, const EpGemmShared *s, uint32_t *n) {
    for (uint32_t k = 0; k < p->k; k += C::BK, ++*n) {
        ep_gemm_await_stage<C>(p, s, *n);
        ep_gemm_release_by_warp(s, *n % C::STAGES);
    }
}

/* The MMA warps' loop. The second piece of a tile is written after the next tile has begun. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_mma_tiles_fp8(const EpGemmParams *p, Hooks &hooks, const EpGemmShared *s) {
    const uint32_t group = threadIdx.x / 128 - 1;
    const EpGemmTile none = {0, 0, 0, 0, 0, 0, 0};
    EpGemmPiece d0, d1, part;
    EpGemmRows a;
    uint32_t n = 0; /* stages before */
    ep_gemm_save_tile<C>(s, &none);
    if (group == 1) ep_bar_arrive(2, 256); /* the first turn */
    for (;;) {
        ep_gemm_await_stage<C>(p, s, n);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * (n % C::STAGES));
        const bool takes_turns = t.num_rows > 64;
        if (t.num_rows == 0) break;
        const uint64_t begun = hooks.tile_started();
        if (64 * group >= t.num_rows) {
            ep_gemm_skip_tile<C>(p, s, &n);
            continue;
        }
        ep_gemm_load_fragments<C>(a, s, n % C::STAGES);
        ep_gemm_start_piece<C, 0, true>(part, a, s, n % C::STAGES, takes_turns);
        EpGemmDeferred<typename C::Piece> v;
        ep_gemm_write_piece<C, 1, C::Piece::PARTS>(&v, d1, p, s);
        ep_gemm_save_tile<C>(s, &t);
#pragma unroll
        for (int i = 0; i < 64; i++) d0[i] = d1[i] = 0;
        ep_gemm_mma_pieces<C>(d0, d1, part, a, p, hooks, takes_turns, s, &n);
        hooks.tile_written(ep_gemm_saved_tile<C>(s), group, begun);
    }
    EpGemmDeferred<typename C::Piece> v;
    ep_gemm_write_piece<C, 1, C::Piece::PARTS>(&v, d1, p, s);
    if (group == 0) ep_bar_sync(2, 256); /* the turn that no tile has taken */
    hooks.after_last_tile(s->stages);
}

#endif /* EP_GEMM_FP8_CUH */
