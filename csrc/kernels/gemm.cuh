/* gemm.cuh - the grouped GEMM for Hopper: persistent blocks of one loading warp and two warpgroups that multiply.
 *
 * A block walks over tiles of 128 x BN of the product.  The loader fills a ring of stages, 64 of the
 * contraction each, by TMA; a warpgroup multiplies 64 rows by BN columns with wgmma, sums in registers, and
 * writes its part through shared memory while the loader is filling stages for the next tile.  Rows are not
 * padded: the tile at an expert's end reads into the next expert's rows and does not write them.  Blocks may
 * work in pairs (clusters of two), side by side in the same rows: each loads half of the rows for both.
 *
 * Gated activations: the gate and the up row of a column are brought side by side by the tensor map of the
 * weights (its dimensions are k, 8 rows, gate or up, groups of 8, expert), so that one thread holds both. */
#ifndef EP_GEMM_CUH
#define EP_GEMM_CUH
#include "gemm_epilogue.cuh"
#include "gemm_tiles.h"

enum { EP_GEMM_BM = 128, EP_GEMM_BK = 64, EP_GEMM_THREADS = 384, EP_GEMM_BOX = 64 * 64 * 2, EP_GEMM_OUT_BOX = 16 * 64 * 2 };

template <int KIND_, int BN_, int ACT_, bool F16_, int CLUSTER_> struct EpGemmConfig {
    static constexpr int KIND = KIND_, BN = BN_, ACT = ACT_, CLUSTER = CLUSTER_;
    static constexpr bool F16 = F16_, GATED = ACT >= EP_ACT_SWIGLU;
    static constexpr int TRANS_A = KIND == EP_GEMM_WGRAD, TRANS_B = KIND != EP_GEMM_FORWARD;
    static constexpr int A_BYTES = 2 * EP_GEMM_BOX, STAGE_BYTES = A_BYTES + BN * EP_GEMM_BK * 2, STAGES = BN == 128 ? 6 : 4;
    static constexpr int OUT_BLOCKS = BN / 8 / (GATED ? 2 : 1); /* of 8 columns */
    static constexpr int SMEM_BYTES = STAGES * STAGE_BYTES + 8 * 2 * EP_GEMM_OUT_BOX + 2 * STAGES * 8;
    static_assert(SMEM_BYTES <= 232448, "what a block can have");
    static_assert(OUT_BLOCKS % 8 == 0, "boxes of 64 columns");
};

/* Tile of round n of a block.  The blocks of a cluster have the same rows and neighbouring columns; a neighbour
 * behind the last column multiplies zeros, which nobody writes, so that all go the same rounds. */
template <typename C> EP_PTX bool ep_gemm_next(const EpGemmParams *p, EpGemmWalk *w, uint32_t n, EpGemmTile *t) {
    if (!ep_gemm_tile(p, EP_GEMM_BM, C::BN * C::CLUSTER, w, n / C::CLUSTER, t)) return false;
    if (C::CLUSTER == 2) t->col0 += ep_cluster_rank() * C::BN;
    return true;
}

/* The ring of stages, as one side sees it: which stage, and the parity of its turn. */
typedef struct {
    uint32_t stage, parity;
} EpRing;
template <int STAGES> EP_PTX void ep_ring_next(EpRing *r) {
    if (++r->stage == STAGES) r->stage = 0, r->parity ^= 1;
}

/* ---- the loader ---- */

template <typename C>
EP_PTX void ep_gemm_load_block(const EpGemmTile *t, uint32_t k, uint32_t smem, uint32_t bar, const CUtensorMap *map_a,
                               const CUtensorMap *map_b) {
    const int32_t at = (int32_t)(t->k0 + k), row = (int32_t)t->row0, col = (int32_t)t->col0, e = (int32_t)t->expert;
    const uint32_t num_a = t->num_rows > 64 ? 2 : 1, mine = C::CLUSTER == 2 ? ep_cluster_rank() : 0;
    ep_mbar_arrive_expect(bar, num_a * EP_GEMM_BOX + C::BN * EP_GEMM_BK * 2);
    for (uint32_t i = mine; i < num_a; i += C::CLUSTER) {
        const int32_t x = C::TRANS_A ? row + 64 * (int32_t)i : at, y = C::TRANS_A ? at : row + 64 * (int32_t)i;
        if (C::CLUSTER == 2) ep_tma_load_2d_multicast(smem + i * EP_GEMM_BOX, map_a, bar, x, y, 3);
        else ep_tma_load_2d(smem + i * EP_GEMM_BOX, map_a, bar, x, y);
    }
    smem += C::A_BYTES;
    if (C::GATED) ep_tma_load_5d(smem, map_b, bar, at, 0, 0, col / 16, e);
    else if (!C::TRANS_B) ep_tma_load_3d(smem, map_b, bar, at, col, e);
    else
        for (int32_t i = 0; i < C::BN / 64; i++) {
            const uint32_t slab = smem + (uint32_t)i * EP_GEMM_BOX;
            if (C::KIND == EP_GEMM_WGRAD) ep_tma_load_2d(slab, map_b, bar, col + 64 * i, at);
            else ep_tma_load_3d(slab, map_b, bar, col + 64 * i, at, e);
        }
}

template <typename C, typename Hooks>
EP_PTX void ep_gemm_load(const EpGemmParams *p, const Hooks &hooks, uint32_t smem, uint32_t full, uint32_t empty, const CUtensorMap *map_a,
                         const CUtensorMap *map_b) {
    EpGemmWalk w = {0, 0, 0, 0, 0};
    EpRing ring = {0, 1};
    EpGemmTile t;
    ep_walk_enter(p, EP_GEMM_BM, &w);
    for (uint32_t n = blockIdx.x; ep_gemm_next<C>(p, &w, n, &t); n += gridDim.x) {
        hooks.await_rows(t);
        for (uint32_t k = 0; k < t.num_k; k += EP_GEMM_BK, ep_ring_next<C::STAGES>(&ring)) {
            ep_mbar_wait(empty + 8 * ring.stage, ring.parity);
            ep_gemm_load_block<C>(&t, k, smem + ring.stage * C::STAGE_BYTES, full + 8 * ring.stage, map_a, map_b);
        }
    }
}

/* ---- multiplying ---- */

/* An expert's last rows are followed by others' in memory: where the contraction runs over rows, those
 * behind the end become zero in both operands, whatever they hold. */
template <typename C> EP_PTX void ep_gemm_clear_tail(uint32_t smem, uint32_t num_valid) {
    const uint32_t num_lines = EP_GEMM_BK - num_valid, thread = threadIdx.x - 128;
    for (uint32_t i = thread; i < (2 + C::BN / 64) * num_lines * 8; i += 256) {
        const uint32_t slab = i / (num_lines * 8), line = num_valid + i / 8 % num_lines;
        ep_st_shared_zero(smem + slab * EP_GEMM_BOX + line * 128 + i % 8 * 16);
    }
    ep_fence_proxy_async_shared();
    ep_bar_sync(1, 256);
}

/* A stage may be filled again: half of its rows come from the neighbour, so it has to know too. */
template <typename C> EP_PTX void ep_gemm_give_back(uint32_t empty) {
    if (C::CLUSTER == 1) ep_mbar_arrive(empty);
    else ep_mbar_arrive_at(empty, 0), ep_mbar_arrive_at(empty, 1);
}

/* d = this warpgroup's 64 rows of the tile.  A stage is given back when its products are done, one later. */
template <typename C>
EP_PTX void ep_gemm_multiply(float (&d)[C::BN / 2], const EpGemmTile *t, uint32_t group, uint32_t smem, uint32_t full, uint32_t empty,
                             EpRing *ring) {
    constexpr uint64_t STEP_A = C::TRANS_A ? 128 : 2, STEP_B = C::TRANS_B ? 128 : 2; /* 16 of the contraction, in 16 bytes */
    const bool active = 64 * group < t->num_rows, signals = threadIdx.x % 32 == 0;
    uint32_t before = 0;
    if (C::KIND == EP_GEMM_WGRAD && t->num_k == 0) { /* an expert without rows: elsewhere the first product overwrites */
#pragma unroll
        for (int i = 0; i < C::BN / 2; i++) d[i] = 0;
    }
    for (uint32_t k = 0; k < t->num_k; k += EP_GEMM_BK, ep_ring_next<C::STAGES>(ring)) {
        const uint32_t at = smem + ring->stage * C::STAGE_BYTES;
        ep_mbar_wait(full + 8 * ring->stage, ring->parity);
        if (C::KIND == EP_GEMM_WGRAD && t->num_k - k < EP_GEMM_BK) ep_gemm_clear_tail<C>(at, t->num_k - k);
        if (active) {
            const uint64_t a = ep_wgmma_desc(at + group * EP_GEMM_BOX, EP_GEMM_BOX), b = ep_wgmma_desc(at + C::A_BYTES, EP_GEMM_BOX);
            ep_wgmma_fence();
#pragma unroll
            for (int i = 0; i < EP_GEMM_BK / 16; i++)
                ep_wgmma<C::BN, C::F16, C::TRANS_A, C::TRANS_B>(d, a + i * STEP_A, b + i * STEP_B, k || i);
            ep_wgmma_commit();
            ep_wgmma_wait<1>();
        }
        __syncwarp(); /* no lane still waits for what may now be overwritten */
        if (k && signals) ep_gemm_give_back<C>(empty + 8 * before);
        before = ring->stage;
    }
    ep_wgmma_wait<0>();
    ep_wgmma_hold(d);
    if (t->num_k && signals) ep_gemm_give_back<C>(empty + 8 * before);
}

/* ---- writing ---- */

/* Eight output columns of this warp's 16 rows, as two registers of pairs: rows lane / 4 and 8 below. */
template <typename C>
EP_PTX void ep_gemm_finish(const float (&d)[C::BN / 2], int block, const EpGemmParams *p, uint32_t e, uint32_t c, uint32_t out_cols,
                           const float (&weight)[2], uint32_t *top, uint32_t *bottom) {
    float v[4], u[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = d[(C::GATED ? 8 : 4) * block + i], u[i] = C::GATED ? d[8 * block + 4 + i] : 0;
    if (C::KIND == EP_GEMM_FORWARD) {
        if (p->bias && c < out_cols) ep_gemm_add_bias<C::ACT, C::F16>(p, e, c, v, u);
        ep_gemm_activate<C::ACT>(&v[0], &v[1], u[0], u[1]);
        ep_gemm_activate<C::ACT>(&v[2], &v[3], u[2], u[3]);
        v[0] *= weight[0], v[1] *= weight[0], v[2] *= weight[1], v[3] *= weight[1];
    }
    *top = ep_pack<C::F16>(v[0], v[1]), *bottom = ep_pack<C::F16>(v[2], v[3]);
}

/* A warp's 16 rows leave in boxes of 64 columns, two in turn: by TMA, or, where the expert ends inside
 * them, by plain stores of the rows that are its. */
template <typename C>
EP_PTX void ep_gemm_write(const float (&d)[C::BN / 2], const EpGemmParams *p, const EpGemmTile *t, uint32_t group, uint32_t smem,
                          const CUtensorMap *map_out) {
    const uint32_t lane = threadIdx.x % 32, first = 64 * group + threadIdx.x / 32 % 4 * 16, out_cols = ep_gemm_out_cols(p);
    if (first >= t->num_rows) return;
    const uint32_t row = t->row0 + first, num_rows = min(16u, t->num_rows - first), col0 = C::GATED ? t->col0 / 2 : t->col0;
    float weight[2] = {1, 1};
    if (C::KIND == EP_GEMM_FORWARD && p->row_weight)
        for (uint32_t i = 0; i < 2; i++)
            if (lane / 4 + 8 * i < num_rows) weight[i] = p->row_weight[row + lane / 4 + 8 * i];
#pragma unroll
    for (int pass = 0; pass < C::OUT_BLOCKS / 8; pass++) {
        const uint32_t box = smem + pass % 2 * EP_GEMM_OUT_BOX, col = col0 + 64 * pass;
        if (lane == 0) ep_bulk_wait_read<1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t r[4];
            ep_gemm_finish<C>(d, 8 * pass + j, p, t->expert, col + 8 * j + lane % 4 * 2, out_cols, weight, &r[0], &r[1]);
            ep_gemm_finish<C>(d, 8 * pass + j + 1, p, t->expert, col + 8 * (j + 1) + lane % 4 * 2, out_cols, weight, &r[2], &r[3]);
            ep_stmatrix_x4(box + lane % 16 * 128 + (((uint32_t)j + lane / 16) ^ lane % 8) * 16, r[0], r[1], r[2], r[3]);
        }
        if (num_rows == 16) {
            ep_fence_proxy_async_shared();
            __syncwarp();
            if (lane == 0) ep_tma_store_3d(map_out, box, (int32_t)col, (int32_t)row, C::KIND == EP_GEMM_WGRAD ? (int32_t)t->expert : 0);
        } else {
            __syncwarp();
            for (uint32_t i = lane / 8; i < num_rows; i += 4) {
                const uint4 v = ep_ld_shared(box + i * 128 + (lane % 8 ^ i % 8) * 16);
                const uint32_t c = col + lane % 8 * 8;
                if (c < out_cols) *(uint4 *)((uint16_t *)p->out + (uint64_t)(row + i) * out_cols + c) = v;
            }
        }
        if (lane == 0) ep_bulk_commit(); /* also an empty one: the wait counts groups */
    }
}

/* ---- the kernel ---- */

/* What a megakernel plugs in.  await_rows: the loader, before it reads a tile's rows.  tile_written: a warp, when
 * its part of the tile has been handed to the copy engine. */
struct EpGemmNoHooks {
    __device__ void await_rows(const EpGemmTile &) const {}
    __device__ void tile_written(const EpGemmTile &) const {}
};

template <typename C, typename Hooks>
EP_PTX void ep_gemm_body(const EpGemmParams *p, const Hooks &hooks, const CUtensorMap *map_a, const CUtensorMap *map_b,
                         const CUtensorMap *map_out) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const uint32_t smem = ep_smem(smem_bytes), boxes = smem + C::STAGES * C::STAGE_BYTES, full = boxes + 16 * EP_GEMM_OUT_BOX;
    const uint32_t empty = full + 8 * C::STAGES;
    if (threadIdx.x == 0) {
        ep_tma_prefetch(map_a), ep_tma_prefetch(map_b), ep_tma_prefetch(map_out);
        for (uint32_t s = 0; s < C::STAGES; s++) ep_mbar_init(full + 8 * s, 1), ep_mbar_init(empty + 8 * s, 8 * C::CLUSTER);
        ep_fence_mbar_init();
    }
    if (C::CLUSTER == 1) __syncthreads();
    else ep_cluster_sync();
    if (threadIdx.x < 128) { /* the loader: one thread; its neighbours have nothing to do */
        ep_setmaxnreg_dec<40>();
        if (threadIdx.x == 0) ep_gemm_load<C>(p, hooks, smem, full, empty, map_a, map_b);
        __syncwarp();
    } else {
        ep_setmaxnreg_inc<232>();
        const uint32_t group = threadIdx.x / 128 - 1, box = boxes + (threadIdx.x / 32 - 4) * 2 * EP_GEMM_OUT_BOX;
        EpGemmWalk w = {0, 0, 0, 0, 0};
        EpRing ring = {0, 0};
        EpGemmTile t;
        ep_walk_enter(p, EP_GEMM_BM, &w);
        for (uint32_t n = blockIdx.x; ep_gemm_next<C>(p, &w, n, &t); n += gridDim.x) {
            float d[C::BN / 2];
            ep_gemm_multiply<C>(d, &t, group, smem, full, empty, &ring);
            ep_gemm_write<C>(d, p, &t, group, box, map_out);
            hooks.tile_written(t);
        }
        ep_bulk_wait(); /* shared memory is read until then */
    }
    if (C::CLUSTER == 2) ep_cluster_sync(); /* a neighbour may still write here */
}

#endif /* EP_GEMM_CUH */
