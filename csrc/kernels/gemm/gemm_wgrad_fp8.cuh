/* gemm_wgrad_fp8.cuh - the gradient of weights in FP8, for Hopper: the MMA warps, and the kernel's body.
 *
 * The tensor cores add up all rows of an expert. The sums are multiplied by the scales of the expert's 128
 * rows and of each 128 columns at the end of a tile. out may be fp32: scale times the product is added to it
 * (gemm_accumulate.cuh).
 *
 * Exports ep_wgrad_fp8_body. */
#ifndef EP_GEMM_WGRAD_FP8_CUH
#define EP_GEMM_WGRAD_FP8_CUH
#include "kernels/gemm/gemm_wgrad_produce.cuh"

/* ---- the MMA warps ---- */

/* Process a block, and release the one before it, whose wgmmas have then finished; as ep_gemm_mma_stage. */
template <typename C> EP_PTX void ep_wgrad_mma_block(float (&d)[C::BN / 2], EpGemmDeferred<C> *deferred,
                                                     const EpGemmParams *p, const EpGemmTile *t, uint32_t k,
                                                     uint32_t stage, uint32_t *before,
                                                     const EpGemmShared *s) {
    const uint32_t group = threadIdx.x / 128 - 1, at = s->stages + stage * C::STAGE_BYTES;
    const bool active = 64 * group < t->num_rows;
    if (active) {
        const uint64_t a = ep_wgmma_desc(at + group * EP_GEMM_BOX, EP_GEMM_BOX);
        const uint64_t b = ep_wgmma_desc(at + C::A_BYTES, EP_GEMM_BOX);
        ep_wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) /* 32 values of k are 2 units of 16 bytes */
            ep_wgmma_e4m3<C::BN>(d, a + 2 * j, b + 2 * j, k || j);
        ep_wgmma_commit();
    }
    if constexpr (!C::ACCUMULATES)
        ep_gemm_write_deferred<C, C::EAGER_PARTS>(deferred, ep_gemm_out_cols(p),
                                                  s->staging + (threadIdx.x / 32 - 4) * EP_GEMM_OUT_STAGING);
    if (active) ep_wgmma_wait<1>();
    __syncwarp(); /* every lane has finished its wait, before the stage is overwritten */
    if (k && threadIdx.x % 32 == 0) ep_gemm_release_stage(s->empty + 8 * *before);
    *before = stage;
}

/* Multiply the sums by the scales of the tile's 128 rows and of each 128 columns. */
template <typename C> EP_PTX void ep_wgrad_apply_scales(float (&d)[C::BN / 2], const EpWgradFp8Params *q,
                                                        const EpGemmTile *t) {
    const uint32_t num_n = ep_gemm_num_blocks(q->gemm.n), num_k = ep_gemm_num_blocks(q->gemm.k);
    const uint32_t col = t->col0 / EP_TRANSPOSED_ROWS;
    const float rows = q->a_scale[(uint64_t)t->expert * num_n + t->row0 / EP_TRANSPOSED_ROWS];
    const float *cols = q->b_scale + (uint64_t)t->expert * num_k;
    const float left = rows * cols[min(col, num_k - 1)], right = rows * cols[min(col + 1, num_k - 1)];
#pragma unroll
    for (int i = 0; i < C::BN / 2; i++) d[i] *= i < C::BN / 4 ? left : right;
}

/* The MMA warps' loop. Half of a tile is written while the next one is computed. */
template <typename C> EP_PTX void ep_wgrad_mma_tiles(const EpWgradFp8Params *q, const EpGemmShared *s) {
    const EpGemmParams *p = &q->gemm;
    const uint32_t group = threadIdx.x / 128 - 1;
    const uint32_t staging = s->staging + (threadIdx.x / 32 - 4) * EP_GEMM_OUT_STAGING;
    EpRing ring = {0, 0};
    EpGemmDeferred<C> deferred;
    deferred.part = C::PARTS;
    for (;;) {
        float d[C::BN / 2];
        ep_gemm_wait<C>(s->full + 8 * ring.stage, ring.parity, p->limit_ns);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage);
        uint32_t before = ring.stage;
        if (t.num_rows == 0) break;
        if (t.num_k == 0) {
            ep_wgrad_write_zeros<C>(p, &t);
            ep_gemm_release_by_warp(s, ring.stage);
            ep_ring_next<C::STAGES>(&ring);
            continue;
        }
        if constexpr (C::ACCUMULATES) ep_gemm_prefetch_out<C>(p, &t, group);
        for (uint32_t k = 0; k < t.num_k; k += C::BK, ep_ring_next<C::STAGES>(&ring)) {
            ep_gemm_wait<C>(s->full + 8 * ring.stage, ring.parity, p->limit_ns);
            ep_wgrad_mma_block<C>(d, &deferred, p, &t, k, ring.stage, &before, s);
        }
        ep_wgmma_wait<0>();
        ep_wgmma_keep_order(d);
        ep_gemm_release_by_warp(s, before);
        if constexpr (!C::ACCUMULATES)
            while (ep_gemm_write_deferred<C, C::EAGER_PARTS>(&deferred, ep_gemm_out_cols(p), staging)) {
            }
        ep_wgrad_apply_scales<C>(d, q, &t);
        if constexpr (C::ACCUMULATES) ep_gemm_accumulate<C>(d, p, &t, group);
        else ep_gemm_defer<C, C::EAGER_PARTS>(&deferred, d, p, &t, group, staging);
    }
    if constexpr (!C::ACCUMULATES)
        while (ep_gemm_write_deferred<C, C::EAGER_PARTS>(&deferred, ep_gemm_out_cols(p), staging)) {
        }
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
        if (threadIdx.x == 0) ep_wgrad_produce_tiles<C>(&p->gemm, &s, map_a, map_b);
        __syncwarp();
    } else {
        ep_setmaxnreg_inc<C::MMA_REGS>();
        ep_wgrad_mma_tiles<C>(p, &s);
    }
    ep_cluster_sync(); /* the other CTA may still write to this CTA's shared memory */
}

#endif /* EP_GEMM_WGRAD_FP8_CUH */
