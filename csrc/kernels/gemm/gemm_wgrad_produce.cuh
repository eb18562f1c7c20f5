/* gemm_wgrad_produce.cuh - the gradient of weights in FP8, for Hopper: the configuration of an instance, and
 * the producer.
 *
 * out[e] = a * b^T over the blocks of expert e, where a [N][P] and b [K][P] are transposed rows
 * (protocol/wgrad_fp8.h). Tiles and pairs of CTAs are those of gemm.cuh. A stage is a block of 128 numbers of
 * the contraction.
 *
 * Exports EpWgradFp8Config, ep_wgrad_produce_tiles and ep_wgrad_write_zeros. */
#ifndef EP_GEMM_WGRAD_PRODUCE_CUH
#define EP_GEMM_WGRAD_PRODUCE_CUH
#include "kernels/gemm/gemm.cuh"
#include "protocol/wgrad_fp8.h"

template <bool F16, bool ADDS> struct EpWgradFp8Config : EpGemmConfig<EP_GEMM_WGRAD, 256, EP_ACT_NONE, F16> {
    /* BY_BLOCK, although scales are of experts: the epilogue multiplies by none, and waits are lean. */
    static constexpr bool FP8 = true, BY_BLOCK = true, ACCUMULATES = ADDS;
    static constexpr int TRANS_A = false, TRANS_B = false;
    static constexpr int BOX_K = EP_TRANSPOSED_ROWS, BK = BOX_K;
    static constexpr int PRODUCER_REGS = 40, MMA_REGS = 232;
};

/* ---- the producer ---- */

/* Load a block of a tile, whose first number of the contraction is `at`: both operands, of which the pair
 * shares one. */
template <typename C> EP_PTX void ep_wgrad_load_stage(const EpGemmTile *t, uint32_t at, uint32_t smem,
                                                      uint32_t bar, const CUtensorMap *map_a,
                                                      const CUtensorMap *map_b) {
    const int32_t k = (int32_t)at, row = (int32_t)t->row0, col = (int32_t)t->col0;
    const uint32_t rank = ep_cluster_rank(), num_a = (t->num_rows + 63) / 64;
    ep_mbar_arrive_expect(bar, num_a * EP_GEMM_BOX + C::B_SLAB);
    if (t->shares_rows) {
        if (rank < num_a)
            ep_tma_load_2d<true>(smem + rank * EP_GEMM_BOX, map_a, bar, k, row + 64 * (int32_t)rank);
        ep_tma_load_2d<false>(smem + C::A_BYTES, map_b, bar, k, col);
        ep_tma_load_2d<false>(smem + C::A_BYTES + C::B_SLAB / 2, map_b, bar, k, col + 128);
    } else {
        ep_tma_load_2d<false>(smem, map_a, bar, k, row);
        if (num_a == 2) ep_tma_load_2d<false>(smem + EP_GEMM_BOX, map_a, bar, k, row + 64);
        ep_tma_load_2d<true>(smem + C::A_BYTES + rank * (C::B_SLAB / 2), map_b, bar, k,
                             col + 128 * (int32_t)rank);
    }
}

/* The producer's loop, as ep_gemm_produce_tiles. The tile of an expert without rows uses one stage, which
 * contains only its info. */
template <typename C> EP_PTX void ep_wgrad_produce_tiles(const EpGemmParams *g, const EpGemmShared *s,
                                                         const CUtensorMap *map_a, const CUtensorMap *map_b) {
    uint32_t num_done = 0, drawn = 0xffffffffu;
    EpGemmTileScheduler sched = {0};
    EpRing ring = {0, 1};
    EpGemmTile t;
    ep_tile_scheduler_enter(g, C::BM, 2, &sched);
    for (uint32_t n = blockIdx.x / 2; ep_gemm_tile(g, C::BM, C::BN, 2, ep_cluster_rank(), &sched, n, &t);
         num_done++) {
        t.num_rows = min(t.num_rows, (uint32_t)C::BM);
        t.k0 = ep_transposed_first_block(sched.row0, sched.expert) * EP_TRANSPOSED_ROWS;
        t.num_k = (sched.num_rows + EP_TRANSPOSED_ROWS - 1) / EP_TRANSPOSED_ROWS * EP_TRANSPOSED_ROWS;
        ep_gemm_wait<C>(s->empty + 8 * ring.stage, ring.parity, g->limit_ns);
        ep_gemm_put_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage, &t);
        bool is_first = true;
        do { /* the first stage has been waited for, and to wait again returns at once */
            ep_gemm_wait<C>(s->empty + 8 * ring.stage, ring.parity, g->limit_ns);
            if (t.num_k == 0) ep_mbar_arrive(s->full + 8 * ring.stage);
            else
                ep_wgrad_load_stage<C>(&t, t.k0, s->stages + ring.stage * C::STAGE_BYTES,
                                       s->full + 8 * ring.stage, map_a, map_b);
            if (is_first && ep_cluster_rank() == 0) drawn = ep_next_tile_send<C>(g, s, num_done);
            is_first = false;
            t.k0 += C::BK;
            ep_ring_next<C::STAGES>(&ring);
        } while (t.num_k > C::BK && (t.num_k -= C::BK));
        n = ep_num_ctas_now() / 2 + ep_next_tile_receive<C>(g, s, num_done);
    }
    if (drawn == sched.first_tile - 1) *g->tile_counter = 0; /* the last number has been drawn */
    ep_gemm_wait<C>(s->empty + 8 * ring.stage, ring.parity, g->limit_ns);
    t.num_rows = 0; /* the end */
    ep_gemm_put_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage, &t);
    ep_mbar_arrive(s->full + 8 * ring.stage);
}

/* ---- an expert without rows ---- */

/* A tile of an expert without rows: zeros, if it is not added. A warp has 16 rows, a lane 8 columns. */
template <typename C> EP_PTX void ep_wgrad_write_zeros(const EpGemmParams *p, const EpGemmTile *t) {
    if constexpr (!C::ACCUMULATES) {
        const uint32_t first = (threadIdx.x / 32 - 4) * 16, col = t->col0 + 8 * ep_lane_now();
        const uint4 zero = {0, 0, 0, 0};
        uint16_t *out = (uint16_t *)p->out + ((uint64_t)t->expert * p->n + t->row0 + first) * p->k + col;
#pragma unroll 1
        for (uint32_t i = 0; i < 16 && first + i < t->num_rows; i++, out += p->k)
            ep_st_global_if(col < p->k, out, zero);
    }
}

#endif /* EP_GEMM_WGRAD_PRODUCE_CUH */
