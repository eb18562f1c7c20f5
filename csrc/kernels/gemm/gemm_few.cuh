/* gemm_few.cuh - the MMA warps of the grouped GEMM for Hopper, for few rows of each expert: tiles of 32 rows
 * by 64 columns, of which a stage has 512 bytes of each row of the weights; see gemm_tune.h.
 *
 * Reading the weights takes most of the time, and the power that the tensor cores use lowers the clock of the
 * GPU and so that rate. A wgmma multiplies 64 rows of its first operand, whether they are needed or not. So
 * the first operand is the weights: the 64 columns of the tile. The second one is the rows of the tile, of
 * which a wgmma takes 8, 16, 24 or 32. A tile is one warpgroup's work; the other one helps to write.
 *
 * Exports ep_gemm_mma_tiles_few. C is an EpGemmConfig. Only rows and columns that exist are written. */
#ifndef EP_GEMM_FEW_CUH
#define EP_GEMM_FEW_CUH
#include "kernels/arch/wgmma.cuh"
#include "kernels/gemm/gemm_stages.cuh"

/* A lane's accumulators of a tile: of each eight rows, two rows by two columns. */
typedef float EpGemmFew[16];

/* ---- products ---- */

/* The scales of 128 values of k by which a lane multiplies its sums: of its rows, two of each eight, and of
 * its upper and its lower column. Those of values of k that do not exist are 0, as their products are. */
template <int N> struct EpGemmFewScales {
    float row[N / 4], top, bottom;
};
template <typename C, int N>
EP_PTX EpGemmFewScales<N> ep_gemm_few_scales(uint32_t rows, uint32_t cols, bool exist) {
    EpGemmFewScales<N> s;
#pragma unroll
    for (uint32_t i = 0; i < N / 4; i++)
        s.row[i] = exist ? ep_ld_shared_f32(rows + 4 * (i / 2 * 8 + ep_lane_now() % 4 * 2 + i % 2)) : 0;
    s.top = exist ? ep_ld_shared_f32(cols) : 0;
    s.bottom = !C::TWO_SCALES ? s.top : exist ? ep_ld_shared_f32(cols + 4) : 0;
    return s;
}

/* d += the products of a stage, of FP8. Each 128 values of k have their own sums and scales. */
template <typename C, int N>
EP_PTX void ep_gemm_few_add_fp8(float (&d)[N / 2], uint64_t w, uint64_t x, uint32_t slot, uint32_t num_k,
                                uint32_t empty) {
    float part[C::K_BOXES][N / 2];
    EpGemmFewScales<N> s[C::K_BOXES];
    ep_wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * C::K_BOXES; i++)
        ep_wgmma_e4m3<N>(part[i / 4], w + i / 4 * (C::B_SLAB / 16) + 2 * (i % 4),
                         x + i / 4 * (C::A_SLAB / 16) + 2 * (i % 4), i % 4);
    ep_wgmma_commit();
#pragma unroll
    for (uint32_t kk = 0; kk < C::K_BOXES; kk++)
        s[kk] = ep_gemm_few_scales<C, N>(slot + 4 * C::BM * kk, slot + 4 * C::BM * C::K_BOXES + 8 * kk,
                                         kk * C::BOX_K < num_k);
    ep_wgmma_wait<0>();
    __syncwarp(); /* every lane has finished its wait and read the scales and the info */
    if (threadIdx.x % 32 == 0) ep_gemm_release_stage(empty);
#pragma unroll
    for (int kk = 0; kk < C::K_BOXES; kk++) {
        ep_wgmma_keep_order(part[kk]);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float scale = s[kk].row[i / 4 * 2 + i % 2] * (i % 4 < 2 ? s[kk].top : s[kk].bottom);
            d[i] = fmaf(scale, part[kk][i], d[i]);
        }
    }
}

/* d = the products of a tile, of which N rows are computed. A stage is released as soon as its own wgmmas
 * have finished: otherwise the last stage of a tile would stay empty until the next one has arrived. */
template <typename C, int N> EP_PTX void ep_gemm_few_products(EpGemmFew &d, const EpGemmParams *p,
                                                              const EpGemmTile *t, const EpGemmShared *s,
                                                              EpRing *ring) {
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] = 0;
    for (uint32_t k = 0; k < t->num_k; k += C::BK, ep_ring_next<C::STAGES>(ring)) {
        const uint32_t at = s->stages + ring->stage * C::STAGE_BYTES, empty = s->empty + 8 * ring->stage;
        const uint64_t x = ep_wgmma_desc(at, EP_GEMM_BOX), w = ep_wgmma_desc(at + C::A_BYTES, EP_GEMM_BOX);
        ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->limit_ns);
        if constexpr (C::FP8) {
            ep_gemm_few_add_fp8<C, N>(sum, w, x, ep_gemm_slot<C>(s, ring->stage), t->num_k - k, empty);
        } else {
            ep_wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4 * C::K_BOXES; i++)
                ep_wgmma<N, C::F16, 0, 0>(sum, w + i / 4 * (C::B_SLAB / 16) + 2 * (i % 4),
                                          x + i / 4 * (C::A_SLAB / 16) + 2 * (i % 4), 1);
            ep_wgmma_commit();
            ep_wgmma_wait<0>();
            ep_wgmma_keep_order(sum);
            __syncwarp(); /* every lane has finished its wait and read the info */
            if (threadIdx.x % 32 == 0) ep_gemm_release_stage(empty);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) d[i] = i < N / 2 ? sum[i] : 0;
}

/* Release the stages of a tile, which the other warpgroup computes. */
template <typename C> EP_PTX void ep_gemm_few_skip(const EpGemmParams *p, const EpGemmTile *t,
                                                   const EpGemmShared *s, EpRing *ring) {
    for (uint32_t k = 0; k < t->num_k; k += C::BK, ep_ring_next<C::STAGES>(ring)) {
        ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->limit_ns);
        __syncwarp(); /* every lane has finished its wait and read the info */
        if (threadIdx.x % 32 == 0) ep_gemm_release_stage(s->empty + 8 * ring->stage);
    }
}

/* ---- from accumulators to 16 bits ---- */

/* A wgmma gives a lane numbers of two neighbouring rows (of the tile) and one column: lane / 4, and eight
 * further down the same two rows. Exchange them with the lane of the neighbouring column, so that a lane has
 * two neighbouring columns of one row, lane % 4 * 2 + lane / 4 % 2 of each eight. Their order is then that of
 * the kernels for many rows: of 16 rows two columns in two rows, eight rows apart, and the same of eight
 * columns on, or of the ups. */
EP_PTX void ep_gemm_few_exchange(EpGemmFew &d) {
    const bool odd = ep_lane_now() / 4 % 2;
    EpGemmFew e;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float kept = odd ? d[i + 1] : d[i];
        const float got = __shfl_xor_sync(0xffffffffu, odd ? d[i] : d[i + 1], 4);
        const int to = i / 8 * 8 + i % 4 * 2 + i % 8 / 4 * 2;
        e[to] = odd ? got : kept;
        e[to + 1] = odd ? kept : got;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) d[i] = e[i];
}

/* Epilogue of 16 rows: bias, activation, row weight, rounding. v = the results, packed: of each group of
 * eight columns, two of the upper row and two of the lower one. row counts from the first one of the tile. */
template <typename C>
EP_PTX void ep_gemm_few_finish(uint32_t (&v)[4], float *d, const EpGemmParams *p, const EpGemmTile *t,
                               uint32_t row, uint32_t col) {
    constexpr int SIZE = C::GATED ? 8 : 4, NUM = 8 / SIZE;
    const uint32_t last = ep_gemm_out_cols(p) - 2;
    if (p->bias)
#pragma unroll
        for (int i = 0; i < NUM; i++)
            ep_gemm_add_bias<C::ACT, C::F16>(p, t->expert, min(col + 8 * i, last), d + SIZE * i);
#pragma unroll
    for (int i = 0; i < NUM; i++) ep_gemm_activate<C::ACT>(p, d + SIZE * i, d + 4 * i);
    if (p->row_weight) {
        const float top = row < t->num_rows ? p->row_weight[t->row0 + row] : 0;
        const float bottom = row + 8 < t->num_rows ? p->row_weight[t->row0 + row + 8] : 0;
#pragma unroll
        for (int i = 0; i < 4 * NUM; i++) d[i] *= i % 4 < 2 ? top : bottom;
    }
#pragma unroll
    for (int i = 0; i < 2 * NUM; i++) v[i] = ep_pack<C::F16>(d[2 * i], d[2 * i + 1]);
}

/* ---- written in bursts ---- */

/* The kernel reads weights at the full DRAM bandwidth. A write interleaved with such reads costs seven times
 * its bytes (DRAM read/write turnaround), and less if many are written together. So groups of eight rows wait
 * in shared memory, each with a note of its destination, until about as many tiles are there as fill it. All
 * CTAs have about the same number of tiles, so their bursts coincide, and that is what saves turnarounds. */
typedef struct {
    uint32_t num_groups, num_tiles;
} EpGemmBurst;

/* Write a burst: all groups of rows that wait in shared memory. All MMA warps of the CTA take part; each has
 * counted the same groups and tiles. */
template <typename C> EP_PTX void ep_gemm_burst_write(const EpGemmParams *p, uint32_t staging,
                                                      EpGemmBurst *burst) {
    const uint32_t lane = ep_lane_now();
    const uint32_t row = lane / C::OUT_GROUPS;
    const uint32_t col_group = lane % C::OUT_GROUPS;
    const uint32_t out_cols = ep_gemm_out_cols(p);
    ep_bar_sync(1, 256);
    for (uint32_t i = threadIdx.x / 32 - 4; i < burst->num_groups; i += 8) {
        const uint32_t from = staging + i * C::BURST_GROUP + row * C::BURST_PITCH + col_group * 16;
        /* the note: first row, number of rows, first column */
        const uint4 note = ep_ld_shared(staging + C::NUM_BURST_GROUPS * C::BURST_GROUP + 16 * i);
        const uint32_t c = note.z + 8 * col_group;
        uint16_t *out = (uint16_t *)p->out + (uint64_t)(note.x + row) * out_cols + c;
#pragma unroll
        for (uint32_t r = 0; r < 8; r += 32 / C::OUT_GROUPS)
            ep_st_global_if(row + r < note.y && c < out_cols, out + (uint64_t)r * out_cols,
                            ep_ld_shared(from + r * C::BURST_PITCH));
    }
    ep_bar_sync(1, 256);
    burst->num_groups = burst->num_tiles = 0;
}

/* Write a burst first, if it is due, or if the tile has no room. All MMA warps of the CTA call this. */
template <typename C> EP_PTX void ep_gemm_burst_make_room(const EpGemmParams *p, uint32_t num_groups,
                                                          uint32_t staging, EpGemmBurst *burst) {
    /* for the mean number of groups per tile, with a margin */
    const uint32_t tiles_per_burst = C::NUM_BURST_GROUPS * 8 / (p->num_rows / p->num_experts + 7);
    if (burst->num_tiles >= tiles_per_burst || burst->num_groups + num_groups > C::NUM_BURST_GROUPS)
        ep_gemm_burst_write<C>(p, staging, burst);
}

/* Put a tile into the burst, from the accumulators of its warpgroup. */
template <typename C> EP_PTX void ep_gemm_burst_put(EpGemmFew &d, const EpGemmParams *p, const EpGemmTile *t,
                                                    uint32_t staging, uint32_t num_groups) {
    const uint32_t lane = ep_lane_now(), warp = threadIdx.x / 32 % 4;
    const uint32_t row = lane % 4 * 2 + lane / 4 % 2, col0 = C::GATED ? t->col0 / 2 : t->col0;
    const uint32_t col = warp * (C::GATED ? 8 : 16) + lane / 8 * 2; /* in the tile */
    ep_gemm_few_exchange(d);
#pragma unroll
    for (uint32_t first = 0; first < C::BM; first += 16) {
        if (first >= t->num_rows) break;
        uint32_t v[4];
        ep_gemm_few_finish<C>(v, d + first / 2, p, t, first + row, col0 + col);
#pragma unroll
        for (uint32_t bottom = 0; bottom < 2; bottom++) {
            const uint32_t from = first + 8 * bottom, i = num_groups + from / 8;
            const uint32_t to = staging + i * C::BURST_GROUP + row * C::BURST_PITCH + col * 2;
            if (from >= t->num_rows) break;
            ep_st_shared_u32(to, v[bottom]);
            if constexpr (!C::GATED) ep_st_shared_u32(to + 16, v[2 + bottom]);
            if (warp == 0 && lane == 0)
                ep_st_shared(staging + C::NUM_BURST_GROUPS * C::BURST_GROUP + 16 * i, t->row0 + from,
                             t->num_rows - from, col0, 0);
        }
    }
}

/* ---- the MMA warps' loop ---- */

template <typename C> EP_PTX void ep_gemm_mma_tiles_few(const EpGemmParams *p, const EpGemmShared *s) {
    EpRing ring = {0, 0};
    EpGemmBurst burst = {0, 0};
    for (;;) {
        EpGemmFew d;
        ep_mbar_wait(s->full + 8 * ring.stage, ring.parity, p->limit_ns);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage);
        const uint32_t num_groups = (t.num_rows + 7) / 8;
        const bool computes = threadIdx.x < 256;
        if (num_groups == 0) break;
        if (!computes) ep_gemm_few_skip<C>(p, &t, s, &ring);
        else if (num_groups == 1) ep_gemm_few_products<C, 8>(d, p, &t, s, &ring);
        else if (num_groups == 2) ep_gemm_few_products<C, 16>(d, p, &t, s, &ring);
        else if (num_groups == 3) ep_gemm_few_products<C, 24>(d, p, &t, s, &ring);
        else ep_gemm_few_products<C, 32>(d, p, &t, s, &ring);
        ep_gemm_burst_make_room<C>(p, num_groups, s->staging, &burst);
        if (computes) ep_gemm_burst_put<C>(d, p, &t, s->staging, burst.num_groups);
        burst.num_groups += num_groups;
        burst.num_tiles++;
    }
    ep_gemm_burst_write<C>(p, s->staging, &burst);
}

#endif /* EP_GEMM_FEW_CUH */
