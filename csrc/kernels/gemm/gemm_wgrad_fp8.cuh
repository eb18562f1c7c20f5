/* gemm_wgrad_fp8.cuh - the gradient of weights in FP8, for Hopper: the MMA warps for scales of blocks, and
 * the kernel's body.
 *
 * As in gemm_fp8.cuh, a warpgroup has its rows in registers and two pieces of 128 columns, and takes turns
 * with the other one. What is different:
 *   - An expert has few blocks: eight on average in DeepSeek-V3 with 64 experts a rank. So the end of a tile
 *     counts: each piece is written while products are in flight.
 *   - Each row of a tile has a scale in each block, and so has each column, or each 128 columns
 *     (EpWgradScales). Scales of experts are applied at the end of a tile: gemm_wgrad_expert.cuh.
 *   - out may be fp32: alpha times the product is added to it (gemm_accumulate.cuh).
 *
 * Exports ep_wgrad_fp8_body. */
#ifndef EP_GEMM_WGRAD_FP8_CUH
#define EP_GEMM_WGRAD_FP8_CUH
#include "kernels/gemm/gemm_wgrad_expert.cuh"

/* ---- the MMA warps ---- */

/* Start the products of piece PIECE in a stage, as ep_gemm_start_piece. */
template <typename C, int PIECE, bool REGISTERS>
EP_PTX void ep_wgrad_start_piece(EpGemmPiece &part, const EpGemmRows &a, const EpGemmShared *s,
                                 uint32_t stage, bool takes_turns) {
    const uint32_t at = s->stages + stage * C::STAGE_BYTES, group = threadIdx.x / 128 - 1;
    const uint64_t rows = ep_wgmma_desc(at + group * EP_GEMM_BOX, EP_GEMM_BOX);
    const uint64_t cols = ep_wgmma_desc(at + C::A_BYTES + PIECE * 2 * EP_GEMM_BOX, EP_GEMM_BOX);
    if (takes_turns) ep_bar_sync(2 + group, 256);
    ep_wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if constexpr (REGISTERS && C::A_FORMAT == EP_E5M2)
            ep_wgmma_e5m2_rows(part, &a[4 * j], cols + 2 * j, j);
        else if constexpr (REGISTERS) ep_wgmma_e4m3_rows(part, &a[4 * j], cols + 2 * j, j);
        else if constexpr (C::A_FORMAT == EP_E5M2) ep_wgmma_e5m2<128>(part, rows + 2 * j, cols + 2 * j, j);
        else ep_wgmma_e4m3<128>(part, rows + 2 * j, cols + 2 * j, j);
    }
    ep_wgmma_commit();
    if (takes_turns) ep_bar_arrive(3 - group, 256);
}

/* Wait for the products of a piece, and add them to d: d += part * the scales of the row and of the column.
 * Of each group of eight columns, a lane has two of its top row and two of the row 8 below. */
template <typename C, int PIECE>
EP_PTX void ep_wgrad_finish_piece(EpGemmPiece &d, EpGemmPiece &part, const EpGemmShared *s, uint32_t stage) {
    const uint32_t row = (threadIdx.x / 32 - 4) * 16 + ep_lane_now() / 4;
    const uint32_t rows = ep_gemm_slot<C>(s, stage) + 4 * row;
    const uint32_t cols = ep_gemm_slot<C>(s, stage) + 4 * C::BM + 512 * PIECE + ep_lane_now() % 4 * 8;
    float top = ep_ld_shared_f32(rows), bottom = ep_ld_shared_f32(rows + 32);
    if constexpr (C::SCALES == EP_SCALES_BLOCK) {
        const float of_cols = ep_ld_shared_f32(cols);
        top *= of_cols;
        bottom *= of_cols;
    }
    ep_wgmma_wait<0>();
    ep_wgmma_keep_order(part);
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
        float2 of_cols = {1, 1};
        if constexpr (C::SCALES == EP_SCALES_COLUMN) of_cols = ep_ld_shared_f32x2(cols + 8 * i);
        d[i] = fmaf(top * of_cols.x, part[i], d[i]);
        d[i + 1] = fmaf(top * of_cols.y, part[i + 1], d[i + 1]);
        d[i + 2] = fmaf(bottom * of_cols.x, part[i + 2], d[i + 2]);
        d[i + 3] = fmaf(bottom * of_cols.y, part[i + 3], d[i + 3]);
    }
}

/* Write a piece of the tile that ep_gemm_save_tile has noted. */
template <typename C, int PIECE>
EP_PTX void ep_wgrad_write_piece(EpGemmPiece &d, const EpGemmParams *p, const EpGemmShared *s) {
    EpGemmTile t = ep_gemm_saved_tile<C>(s);
    t.col0 += 128 * PIECE;
    t.num_k = 1; /* d is set: tiles without products are written elsewhere */
    if constexpr (C::ACCUMULATES) ep_gemm_accumulate<typename C::Piece>(d, p, &t, threadIdx.x / 128 - 1);
    else {
        EpGemmDeferred<typename C::Piece> v;
        ep_gemm_defer<typename C::Piece, C::Piece::PARTS>(&v, d, p, &t, threadIdx.x / 128 - 1,
                                                          ep_gemm_staging<C>(s));
    }
}

/* The pieces of a tile. Before, the products of the first piece in the first block have been started. The
 * second piece is left in d1. In the last block the second piece's wgmmas read the rows from shared memory,
 * because the registers are needed to write the first piece meanwhile. */
template <typename C> EP_PTX void ep_wgrad_mma_pieces(EpGemmPiece &d0, EpGemmPiece &d1, EpGemmPiece &part,
                                                      EpGemmRows &a, const EpGemmParams *p, uint32_t num_k,
                                                      bool takes_turns, const EpGemmShared *s, uint32_t *n) {
    for (uint32_t k = C::BK; k < num_k; k += C::BK) {
        const uint32_t stage = *n % C::STAGES;
        ep_wgrad_finish_piece<C, 0>(d0, part, s, stage);
        ep_wgrad_start_piece<C, 1, true>(part, a, s, stage, takes_turns);
        ep_gemm_await_stage<C>(p, s, ++*n);
        ep_wgrad_finish_piece<C, 1>(d1, part, s, stage);
        ep_gemm_load_fragments<C>(a, s, *n % C::STAGES);
        ep_gemm_release_by_warp(s, stage);
        ep_wgrad_start_piece<C, 0, true>(part, a, s, *n % C::STAGES, takes_turns);
    }
    const uint32_t stage = (*n)++ % C::STAGES;
    ep_wgrad_finish_piece<C, 0>(d0, part, s, stage);
    ep_wgrad_start_piece<C, 1, false>(part, a, s, stage, takes_turns);
    ep_wgrad_write_piece<C, 0>(d0, p, s);
    ep_wgrad_finish_piece<C, 1>(d1, part, s, stage);
    ep_gemm_release_by_warp(s, stage);
}

/* The MMA warps' loop. The second piece of a tile is written after the next tile has begun. */
template <typename C> EP_PTX void ep_wgrad_mma_tiles(const EpGemmParams *p, const EpGemmShared *s) {
    const uint32_t group = threadIdx.x / 128 - 1;
    const EpGemmTile none = {0, 0, 0, 0, 0, 0, 0};
    EpGemmPiece d0, d1, part;
    EpGemmRows a;
    uint32_t n = 0; /* stages before */
    ep_gemm_save_tile<C>(s, &none);
#pragma unroll
    for (int i = 0; i < 64; i++) d1[i] = 0;
    if (group == 1) ep_bar_arrive(2, 256); /* the first turn */
    for (;;) {
        ep_gemm_await_stage<C>(p, s, n);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * (n % C::STAGES));
        const bool takes_turns = t.num_rows > 64;
        if (t.num_rows == 0) break;
        if (64 * group >= t.num_rows || t.num_k == 0) { /* no products for this warpgroup */
            if (t.num_k == 0) ep_wgrad_write_zeros<C>(p, &t);
            for (uint32_t k = 0; k == 0 || k < t.num_k; k += C::BK, ++n) {
                ep_gemm_await_stage<C>(p, s, n);
                ep_gemm_release_by_warp(s, n % C::STAGES);
            }
            continue;
        }
        if constexpr (C::ACCUMULATES) ep_gemm_prefetch_out<C>(p, &t, group);
        ep_gemm_load_fragments<C>(a, s, n % C::STAGES);
        ep_wgrad_start_piece<C, 0, true>(part, a, s, n % C::STAGES, takes_turns);
        ep_wgrad_write_piece<C, 1>(d1, p, s);
        ep_gemm_save_tile<C>(s, &t);
#pragma unroll
        for (int i = 0; i < 64; i++) d0[i] = d1[i] = 0;
        ep_wgrad_mma_pieces<C>(d0, d1, part, a, p, t.num_k, takes_turns, s, &n);
    }
    ep_wgrad_write_piece<C, 1>(d1, p, s);
    if (group == 0) ep_bar_sync(2, 256); /* the turn that no tile has taken */
}

/* ---- the kernel ---- */

template <typename C> EP_PTX void ep_wgrad_fp8_body(const EpWgradFp8Params *p, const CUtensorMap *map_a,
                                                    const CUtensorMap *map_b) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const EpGemmShared s = ep_gemm_shared<C>(ep_smem(smem_bytes));
    if (threadIdx.x == 0) {
        ep_tma_prefetch(map_a);
        ep_tma_prefetch(map_b);
        for (uint32_t i = 0; i < C::STAGES; i++) {
            ep_mbar_init(s.full + 8 * i, 1);
            ep_mbar_init(s.empty + 8 * i, 2 * 8);
        }
        for (uint32_t i = 0; i < C::NUM_NEXT; i++) ep_mbar_init(s.next_tile_bars + 8 * i, 1);
        ep_fence_mbar_init();
    }
    ep_cluster_sync();
    if (threadIdx.x < 128) {
        ep_setmaxnreg_dec<C::PRODUCER_REGS>();
        if (threadIdx.x == 0) ep_wgrad_produce_tiles<C>(p, &s, map_a, map_b);
        __syncwarp();
    } else {
        ep_setmaxnreg_inc<C::MMA_REGS>();
        if constexpr (C::HAS_SLOTS) ep_wgrad_mma_tiles<C>(&p->gemm, &s);
        else ep_wgrad_mma_tiles_by_expert<C>(p, &s);
    }
    ep_cluster_sync(); /* the other CTA may still write to this CTA's shared memory */
}

#endif /* EP_GEMM_WGRAD_FP8_CUH */
