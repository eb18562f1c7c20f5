/* gemm_small_m.cuh - the MMA warps of the grouped GEMM for Hopper for small M: few rows per expert
 * (gemm_tune.h has the limit). A tile has 32 rows (tokens) and 64 columns (of the output; each is a row of
 * the weights). A pipeline stage holds 512 bytes of each of them.
 *
 * Reading the weights takes most of the time. At the limit of its power the GPU lowers its clock, and then
 * reads memory more slowly (docs/experiments, E-113). So the tensor cores must not compute what nobody needs.
 * A wgmma always multiplies 64 rows of its first operand, and 8, 16, 24 or 32 of its second one. So here the
 * weights are the first operand, and the tokens the second one; in the kernels for large M it is the other
 * way round.
 *
 * Of a CTA's two MMA warpgroups, the first one computes all tiles. Both write them to global memory.
 *
 * Exports ep_gemm_mma_tiles_small_m. The template parameter C is an EpGemmConfig. Invariant: only rows and
 * columns that exist are written. */
#ifndef EP_GEMM_SMALL_M_CUH
#define EP_GEMM_SMALL_M_CUH
#include "kernels/arch/wgmma.cuh"
#include "kernels/gemm/gemm_stages.cuh"

/* A lane's accumulators of a tile: for each eight rows, two neighbouring rows by two columns that are eight
 * columns apart. */
typedef float EpGemmSmallM[16];

/* ---- products ---- */

/* The scales of FP8 for 128 values of k: of a lane's rows (two of each eight), and of its two columns. Past
 * the end of k, shared memory holds old scales, which may be NaN. Such scales are 0, because 0 * NaN is
 * NaN. */
template <int N> struct EpGemmSmallMScales {
    float row[N / 4], col, col_8;
};
template <typename C, int N>
EP_PTX EpGemmSmallMScales<N> ep_gemm_small_m_scales(uint32_t rows, uint32_t cols, bool exist) {
    EpGemmSmallMScales<N> s;
#pragma unroll
    for (uint32_t i = 0; i < N / 4; i++)
        s.row[i] = exist ? ep_ld_shared_f32(rows + 4 * (i / 2 * 8 + ep_lane_now() % 4 * 2 + i % 2)) : 0;
    s.col = exist ? ep_ld_shared_f32(cols) : 0;
    s.col_8 = !C::TWO_SCALES ? s.col : exist ? ep_ld_shared_f32(cols + 4) : 0;
    return s;
}

/* d += the products of an FP8 stage. Each 128 values of k are summed up by themselves, because they have
 * scales of their own. Then this warp releases the stage. */
template <typename C, int N>
EP_PTX void ep_gemm_small_m_add_fp8(float (&d)[N / 2], uint64_t w, uint64_t x, uint32_t slot, uint32_t num_k,
                                    uint32_t empty) {
    float part[C::K_BOXES][N / 2];
    EpGemmSmallMScales<N> s[C::K_BOXES];
    ep_wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * C::K_BOXES; i++)
        ep_wgmma_e4m3<N>(part[i / 4], w + i / 4 * (C::B_SLAB / 16) + 2 * (i % 4),
                         x + i / 4 * (C::A_SLAB / 16) + 2 * (i % 4), i % 4);
    ep_wgmma_commit();
#pragma unroll
    for (uint32_t kk = 0; kk < C::K_BOXES; kk++)
        s[kk] = ep_gemm_small_m_scales<C, N>(slot + 4 * C::BM * kk, slot + 4 * C::BM * C::K_BOXES + 8 * kk,
                                             kk * C::BOX_K < num_k);
    ep_wgmma_wait<0>();
    __syncwarp(); /* every lane has finished its wait and read the scales and the tile's info */
    if (threadIdx.x % 32 == 0) ep_gemm_release_stage(empty);
#pragma unroll
    for (int kk = 0; kk < C::K_BOXES; kk++) {
        ep_wgmma_keep_order(part[kk]);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float scale = s[kk].row[i / 4 * 2 + i % 2] * (i % 4 < 2 ? s[kk].col : s[kk].col_8);
            d[i] = fmaf(scale, part[kk][i], d[i]);
        }
    }
}

/* d = the products of a tile, for its first N rows. Each warp releases a stage as soon as the wgmmas that
 * read it have finished, and not one stage later, as the kernels for large M do: then the producer could
 * not refill the last stage of a tile before the first stage of the next tile has arrived. */
template <typename C, int N> EP_PTX void ep_gemm_small_m_products(EpGemmSmallM &d, const EpGemmParams *p,
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
            ep_gemm_small_m_add_fp8<C, N>(sum, w, x, ep_gemm_slot<C>(s, ring->stage), t->num_k - k, empty);
        } else {
            ep_wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4 * C::K_BOXES; i++)
                ep_wgmma<N, C::F16, 0, 0>(sum, w + i / 4 * (C::B_SLAB / 16) + 2 * (i % 4),
                                          x + i / 4 * (C::A_SLAB / 16) + 2 * (i % 4), 1);
            ep_wgmma_commit();
            ep_wgmma_wait<0>();
            ep_wgmma_keep_order(sum);
            __syncwarp(); /* every lane has finished its wait and read the tile's info */
            if (threadIdx.x % 32 == 0) ep_gemm_release_stage(empty);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) d[i] = i < N / 2 ? sum[i] : 0;
}

/* The second warpgroup: wait for each stage of a tile and release it. Every warp must, because a stage is
 * free when all MMA warps of both CTAs have released it. */
template <typename C> EP_PTX void ep_gemm_small_m_skip(const EpGemmParams *p, const EpGemmTile *t,
                                                       const EpGemmShared *s, EpRing *ring) {
    for (uint32_t k = 0; k < t->num_k; k += C::BK, ep_ring_next<C::STAGES>(ring)) {
        ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->limit_ns);
        __syncwarp(); /* every lane has finished its wait and read the tile's info */
        if (threadIdx.x % 32 == 0) ep_gemm_release_stage(s->empty + 8 * ring->stage);
    }
}

/* ---- from accumulators to 16 bits ---- */

/* The epilogue computes two neighbouring columns of a row together and packs them into 32 bits. But the wgmma
 * leaves a lane two neighbouring rows of a column, because the weights are its first operand. So each lane
 * swaps half of its numbers with lane ^ 4, which has the neighbouring column. For each eight rows and
 * each 16 columns of the tile:
 *
 *             before                                            after
 *   rows      lane % 4 * 2, and the next one                    lane % 4 * 2 + lane / 4 % 2
 *   columns   lane / 4, and 8 + lane / 4                        lane / 8 * 2 and the next one; the same + 8
 *
 * With a gated activation, columns 0 to 7 of the 16 are gates, and 8 to 15 are their ups. d is then ordered
 * as in the kernels for large M, so that the epilogue and its bits are the same. Each eight numbers belong
 * to 16 rows: two columns of the lane's row in the first eight rows, the same of the second eight rows, and
 * then these four for the columns + 8. */
EP_PTX void ep_gemm_small_m_swap(EpGemmSmallM &d) {
    const bool odd = ep_lane_now() / 4 % 2;
    EpGemmSmallM e;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float own = odd ? d[i + 1] : d[i];
        const float got = __shfl_xor_sync(0xffffffffu, odd ? d[i] : d[i + 1], 4);
        const int to = i / 8 * 8 + i % 4 * 2 + i % 8 / 4 * 2;
        e[to] = odd ? got : own;
        e[to + 1] = odd ? own : got;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) d[i] = e[i];
}

/* The epilogue for 16 rows, of which a lane has `row` and `row` + 8: bias, activation, row weight, rounding.
 * `row` counts from the first row of the tile, and `col` from the first column of the output. v = the
 * results, two columns in 32 bits: those of both rows, and without gates also those of both rows eight
 * columns on. */
template <typename C>
EP_PTX void ep_gemm_small_m_finish(uint32_t (&v)[4], float *d, const EpGemmParams *p, const EpGemmTile *t,
                                   uint32_t row, uint32_t col) {
    constexpr int SIZE = C::GATED ? 8 : 4, NUM = 8 / SIZE;
    const uint32_t last = ep_gemm_out_cols(p) - 2;
    if (p->bias)
#pragma unroll
        for (int i = 0; i < NUM; i++)
            ep_gemm_add_bias<C::ACT, C::F16>(p, t->expert, min(col + 8 * i, last), d + SIZE * i);
    if constexpr (C::SAVES) { /* braces: without them nvcc 13.0 leaves out the next loop, too */
#pragma unroll
        for (int i = 0; i < 2 * NUM; i++) {
            const uint32_t r = row + i % 2 * 8, c = col + i / 2 * 8;
            if (r < t->num_rows && c <= last && (!C::LOW_RANK || p->saves))
                ep_gemm_save_pair<C::ACT, C::F16>(p, t->row0 + r, c, d + SIZE * (i / 2) + i % 2 * 2);
        }
    }
#pragma unroll
    for (int i = 0; i < NUM; i++) ep_gemm_activate<C::ACT>(p, d + SIZE * i, d + 4 * i);
    if (!C::SAVES && p->row_weight) {
        const float top = row < t->num_rows ? p->row_weight[t->row0 + row] : 0;
        const float bottom = row + 8 < t->num_rows ? p->row_weight[t->row0 + row + 8] : 0;
#pragma unroll
        for (int i = 0; i < 4 * NUM; i++) d[i] *= i % 4 < 2 ? top : bottom;
    }
#pragma unroll
    for (int i = 0; i < 2 * NUM; i++) v[i] = ep_pack<C::F16>(d[2 * i], d[2 * i + 1]);
}

/* ---- written in bursts ---- */

/* The kernel reads weights at the full DRAM bandwidth. When DRAM turns from reading to writing and back, it
 * loses time: a byte written between such reads costs as much time as reading seven bytes (E-031). A burst of
 * many writes costs less, if all CTAs write at the same time (E-050). So results wait in shared memory, in
 * groups of eight rows by the columns of a tile, each with a note of its destination. A CTA writes them after
 * a number of tiles that is the same for all CTAs and about fills the shared memory. CTAs process tiles at
 * about the same rate, because memory limits all of them. So their bursts coincide. */
typedef struct {
    uint32_t num_groups, num_tiles;
} EpGemmBurst;

/* Write a burst: all groups that wait in shared memory. All MMA warps of the CTA take part. Each warp counts
 * groups and tiles in its own *burst, and all count the same. */
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

/* Before a tile is put into the burst: write the burst if enough tiles wait, or if there is no room for this
 * tile. All MMA warps of the CTA call this. */
template <typename C> EP_PTX void ep_gemm_burst_make_room(const EpGemmParams *p, uint32_t num_groups,
                                                          uint32_t staging, EpGemmBurst *burst) {
    /* so many tiles fill the shared memory if each has the mean number of groups, rounded up */
    const uint32_t tiles_per_burst = C::NUM_BURST_GROUPS * 8 / (p->num_rows / p->num_experts + 7);
    if (burst->num_tiles >= tiles_per_burst || burst->num_groups + num_groups > C::NUM_BURST_GROUPS)
        ep_gemm_burst_write<C>(p, staging, burst);
}

/* Put a tile into the burst, from the accumulators of its warpgroup. */
template <typename C> EP_PTX void ep_gemm_burst_put(EpGemmSmallM &d, const EpGemmParams *p,
                                                    const EpGemmTile *t, uint32_t staging,
                                                    uint32_t num_groups) {
    const uint32_t lane = ep_lane_now(), warp = threadIdx.x / 32 % 4;
    const uint32_t row = lane % 4 * 2 + lane / 4 % 2, col0 = C::GATED ? t->col0 / 2 : t->col0;
    const uint32_t col = warp * (C::GATED ? 8 : 16) + lane / 8 * 2; /* counted from col0 */
    ep_gemm_small_m_swap(d);
#pragma unroll
    for (uint32_t first = 0; first < C::BM; first += 16) {
        if (first >= t->num_rows) break;
        uint32_t v[4];
        ep_gemm_small_m_finish<C>(v, d + first / 2, p, t, first + row, col0 + col);
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

template <typename C> EP_PTX void ep_gemm_mma_tiles_small_m(const EpGemmParams *p, const EpGemmShared *s) {
    EpRing ring = {0, 0};
    EpGemmBurst burst = {0, 0};
    for (;;) {
        EpGemmSmallM d;
        ep_mbar_wait(s->full + 8 * ring.stage, ring.parity, p->limit_ns);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage);
        const uint32_t num_groups = (t.num_rows + 7) / 8;
        const bool computes = threadIdx.x < 256;
        if (num_groups == 0) break;
        if (!computes) ep_gemm_small_m_skip<C>(p, &t, s, &ring);
        else if (num_groups == 1) ep_gemm_small_m_products<C, 8>(d, p, &t, s, &ring);
        else if (num_groups == 2) ep_gemm_small_m_products<C, 16>(d, p, &t, s, &ring);
        else if (num_groups == 3) ep_gemm_small_m_products<C, 24>(d, p, &t, s, &ring);
        else ep_gemm_small_m_products<C, 32>(d, p, &t, s, &ring);
        ep_gemm_burst_make_room<C>(p, num_groups, s->staging, &burst);
        if (computes) ep_gemm_burst_put<C>(d, p, &t, s->staging, burst.num_groups);
        burst.num_groups += num_groups;
        burst.num_tiles++;
    }
    ep_gemm_burst_write<C>(p, s->staging, &burst);
}

#endif /* EP_GEMM_SMALL_M_CUH */
