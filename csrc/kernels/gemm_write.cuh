/* gemm_write.cuh - how the sums of the grouped GEMM for Hopper leave a warp's registers.  C is an EpGemmConfig. */
#ifndef EP_GEMM_WRITE_CUH
#define EP_GEMM_WRITE_CUH
#include "gemm_epilogue.cuh"
#include "gemm_tiles.h"

enum {
    EP_GEMM_OUT_PITCH = 256 + 16, /* of a row: neighbours lie in other banks */
    EP_GEMM_OUT_STAGING = 8 * EP_GEMM_OUT_PITCH
};

/* v = what is to be written, packed: of each eight columns a lane has two of row lane / 4, and two of the row 8 below.
 * Whether there is a bias or a weight is asked once, not at each number. */
template <typename C>
EP_PTX void ep_gemm_finish(uint32_t (&v)[2 * C::OUT_GROUPS], float (&d)[C::BN / 2], const EpGemmParams *p,
                           const EpGemmTile *t, uint32_t row, uint32_t num_rows, uint32_t col0,
                           uint32_t out_cols) {
    constexpr int SIZE = C::GATED ? 8 : 4;         /* of eight columns: products, and what belongs to gates */
    if (C::KIND == EP_GEMM_WGRAD && t->num_k == 0) /* nothing was summed */
#pragma unroll
        for (int i = 0; i < C::BN / 2; i++) d[i] = 0;
    if (C::KIND == EP_GEMM_FORWARD && p->bias) {
        const uint32_t c = col0 + ep_lane_now() % 4 * 2, last = out_cols - 2;
#pragma unroll
        for (int i = 0; i < C::OUT_GROUPS; i += 4) /* so many at a time: there are no registers for more */
            if (col0 + 8 * i < out_cols)
#pragma unroll
                for (int j = i; j < i + 4; j++)
                    ep_gemm_add_bias<C::ACT, C::F16>(p, t->expert, min(c + 8 * j, last), d + SIZE * j);
    }
#pragma unroll
    for (int i = 0; i < C::OUT_GROUPS; i += 4) /* so many that one hides another's waits */
        if (col0 + 8 * i < out_cols)
#pragma unroll
            for (int j = i; j < i + 4; j++) ep_gemm_activate<C::ACT>(p, d + SIZE * j, d + 4 * j);
    if (C::KIND == EP_GEMM_FORWARD && p->row_weight) {
        const uint32_t r = ep_lane_now() / 4;
        const float top = r < num_rows ? p->row_weight[row + r] : 0;
        const float bottom = r + 8 < num_rows ? p->row_weight[row + r + 8] : 0;
#pragma unroll
        for (int i = 0; i < 4 * C::OUT_GROUPS; i++) d[i] *= i % 4 < 2 ? top : bottom;
    }
#pragma unroll
    for (int i = 0; i < 2 * C::OUT_GROUPS; i++) v[i] = ep_pack<C::F16>(d[2 * i], d[2 * i + 1]);
}

/* The upper or the lower eight rows of NUM_GROUPS times eight columns: v begins with theirs. */
template <int NUM_GROUPS> EP_PTX void ep_gemm_stage_rows(uint32_t to, const uint32_t *v) {
#pragma unroll
    for (int i = 0; i < NUM_GROUPS; i += 4)
        ep_stmatrix_x4(to + 16 * i, v[2 * i], v[2 * i + 2], v[2 * i + 4], v[2 * i + 6]);
}

/* ---- many rows: while the next tile is multiplied ---- */

/* What a warp has made of a tile, packed.  There are registers to keep 128 columns of it beside the next tile's sums:
 * they are written while those are made. */
template <typename C> struct EpGemmDeferred {
    uint32_t v[2 * C::OUT_GROUPS]; /* see ep_gemm_finish */
    uint16_t *out;                 /* where this lane's first piece belongs */
    uint32_t num_rows, cols_left;  /* that exist, from the warp's first row and that piece on */
    uint32_t part;                 /* that is written next */
};

/* Eight rows leave through a box of up to 128 columns, as whole lines. */
template <typename C, int PART> EP_PTX void ep_gemm_write_part(const EpGemmDeferred<C> *h, uint32_t out_cols,
                                                               uint32_t staging) {
    constexpr int LOADS = C::PASS / 4, ROWS = 32 / C::PASS; /* of a box: loads, and rows in each */
    constexpr int BOTTOM = PART % 2, COL = PART / 2 * C::PASS * 8;
    const uint32_t lane = ep_lane_now();
    const uint32_t row = lane / C::PASS;
    const uint32_t to = staging + lane % 8 * EP_GEMM_OUT_PITCH + lane / 8 * 16;
    uint4 piece[LOADS];
    ep_gemm_stage_rows<C::PASS>(to, h->v + COL / 4 + BOTTOM);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LOADS; i++)
        piece[i] = ep_ld_shared(staging + (row + i * ROWS) * EP_GEMM_OUT_PITCH + lane % C::PASS * 16);
#pragma unroll
    for (int i = 0; i < LOADS; i++)
        ep_st_global_if(row + i * ROWS + 8 * BOTTOM < h->num_rows && COL < h->cols_left,
                        h->out + (uint64_t)(i * ROWS + 8 * BOTTOM) * out_cols + COL, piece[i]);
    __syncwarp();
}

template <typename C, int PART, int END> EP_PTX void
ep_gemm_write_parts(const EpGemmDeferred<C> *h, uint32_t out_cols, uint32_t staging) {
    if constexpr (PART < END) {
        ep_gemm_write_part<C, PART>(h, out_cols, staging);
        ep_gemm_write_parts<C, PART + 1, END>(h, out_cols, staging);
    }
}

/* The first parts, AT_ONCE of them, are written at once. */
template <typename C, int AT_ONCE>
EP_PTX void ep_gemm_defer(EpGemmDeferred<C> *h, float (&d)[C::BN / 2], const EpGemmParams *p,
                          const EpGemmTile *t, uint32_t group, uint32_t staging) {
    const uint32_t first = 64 * group + threadIdx.x / 32 % 4 * 16;
    const uint32_t row = t->row0 + first;
    const uint32_t col0 = C::GATED ? t->col0 / 2 : t->col0;
    if (first >= t->num_rows) return;
    const uint32_t num_rows = min(16u, t->num_rows - first);
    const uint32_t out_cols = ep_gemm_out_cols(p);
    const uint32_t lane = ep_lane_now();
    const uint32_t c = col0 + lane % C::PASS * 8;
    ep_gemm_finish<C>(h->v, d, p, t, row, num_rows, col0, out_cols);
    h->out = (uint16_t *)p->out +
             ((C::KIND == EP_GEMM_WGRAD ? (uint64_t)t->expert * p->n : 0) + row + lane / C::PASS) * out_cols +
             c;
    h->num_rows = num_rows;
    h->cols_left = c < out_cols ? out_cols - c : 0;
    h->part = AT_ONCE;
    ep_gemm_write_parts<C, 0, AT_ONCE>(h, out_cols, staging);
}

/* One more part of those from AT_ONCE on, if any is left: then true. */
template <typename C, int AT_ONCE> EP_PTX bool ep_gemm_write_deferred(EpGemmDeferred<C> *h, uint32_t out_cols,
                                                                      uint32_t staging) {
    if constexpr (AT_ONCE < C::PARTS) {
        if (h->part != AT_ONCE) return ep_gemm_write_deferred<C, AT_ONCE + 1>(h, out_cols, staging);
        ep_gemm_write_part<C, AT_ONCE>(h, out_cols, staging);
        h->part++;
        return true;
    }
    return false;
}

/* ---- few rows: results are written in bursts ---- */

/* Memory that is read at full speed loses seven times as much to a line that is written between, and less when many are
 * written at once.  So eight rows of a tile wait in a box, with a note of where they belong, until there are as many
 * tiles as should fill the boxes.  Blocks have about as many tiles each: the bursts of all come together, which counts. */
typedef struct {
    uint32_t num_groups, num_tiles;
} EpGemmBurst;

/* The boxes of a block are written by all of its warps, which count the same ones. */
template <typename C> EP_PTX void ep_gemm_burst_write(const EpGemmParams *p, uint32_t staging,
                                                      EpGemmBurst *burst) {
    const uint32_t lane = ep_lane_now();
    const uint32_t row = lane / C::OUT_GROUPS;
    const uint32_t col_group = lane % C::OUT_GROUPS;
    const uint32_t out_cols = ep_gemm_out_cols(p);
    ep_bar_sync(1, 256);
    for (uint32_t i = threadIdx.x / 32 - 4; i < burst->num_groups; i += 8) {
        const uint32_t from = staging + i * C::BURST_GROUP + row * C::BURST_PITCH + col_group * 16;
        const uint4 note = ep_ld_shared(staging + C::NUM_BURST_GROUPS * C::BURST_GROUP +
                                        16 * i); /* first row, rows, first column */
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

template <typename C>
EP_PTX void ep_gemm_burst_add(float (&d)[C::BN / 2], const EpGemmParams *p, const EpGemmTile *t,
                              uint32_t group, uint32_t staging, EpGemmBurst *burst) {
    const uint32_t first = 64 * group + threadIdx.x / 32 % 4 * 16;
    const uint32_t col0 = C::GATED ? t->col0 / 2 : t->col0;
    const uint32_t lane = ep_lane_now();
    const uint32_t num_groups = (t->num_rows + 7) / 8;
    const uint32_t tiles_per_burst = /* tiles: of the mean number of boxes, and some room */
        C::NUM_BURST_GROUPS * 8 / (p->num_rows / p->num_experts + 7);
    if (burst->num_tiles >= tiles_per_burst || burst->num_groups + num_groups > C::NUM_BURST_GROUPS)
        ep_gemm_burst_write<C>(p, staging, burst);
    uint32_t v[2 * C::OUT_GROUPS];
    if (first < t->num_rows)
        ep_gemm_finish<C>(v, d, p, t, t->row0 + first, t->num_rows - first, col0, ep_gemm_out_cols(p));
#pragma unroll
    for (uint32_t bottom = 0; bottom < 2; bottom++) {
        const uint32_t from = first + 8 * bottom, i = burst->num_groups + from / 8;
        const uint32_t to = staging + i * C::BURST_GROUP + lane % 8 * C::BURST_PITCH + lane / 8 * 16;
        if (from >= t->num_rows) break;
        ep_gemm_stage_rows<C::OUT_GROUPS>(to, v + bottom);
        if (lane == 0)
            ep_st_shared(staging + C::NUM_BURST_GROUPS * C::BURST_GROUP + 16 * i, t->row0 + from,
                         t->num_rows - from, col0, 0);
    }
    burst->num_groups += num_groups;
    burst->num_tiles++;
}

#endif /* EP_GEMM_WRITE_CUH */
