/* gemm_write.cuh - the epilogue of the grouped GEMM for Hopper: from accumulators to global memory.
 *
 * Exports ep_gemm_defer and ep_gemm_write_deferred. gemm_small_m.cuh writes tiles for small M.
 * C is an EpGemmConfig. Invariant: only rows and columns that exist are written. */
#ifndef EP_GEMM_WRITE_CUH
#define EP_GEMM_WRITE_CUH
#include "kernels/gemm/gemm_epilogue.cuh"
#include "kernels/gemm/gemm_tile_scheduler.h"

enum {
    /* bytes of a row in the staging buffer; consecutive rows start in different banks */
    EP_GEMM_OUT_PITCH = 256 + 16,
    EP_GEMM_OUT_STAGING = 8 * EP_GEMM_OUT_PITCH
};

/* The epilogue of a warp's 16 rows. Input: d, the accumulators. Output: v, 16-bit results, two neighbouring
 * columns in 32 bits; of each group of eight columns, a lane has two of row lane / 4 and two of the row 8
 * below. Steps: the scales of the row and the expert in FP8; in a forward product bias, activation and row
 * weight; rounding. Whether there is a bias or a row weight is tested once, not per number. */
template <typename C>
EP_PTX void ep_gemm_finish(uint32_t (&v)[2 * C::OUT_GROUPS], float (&d)[C::BN / 2], const EpGemmParams *p,
                           const EpGemmTile *t, uint32_t row, uint32_t num_rows, uint32_t col0,
                           uint32_t out_cols) {
    constexpr int SIZE = C::GATED ? 8 : 4; /* accumulators of a lane per group of eight output columns */
    if (C::KIND == EP_GEMM_WGRAD && t->num_k == 0) /* there was no wgmma, so the accumulators are not set */
#pragma unroll
        for (int i = 0; i < C::BN / 2; i++) d[i] = 0;
    if constexpr (C::FP8 && !C::BY_BLOCK) {
        const EpGemmScales *scales = &((const EpGemmFp8Params *)p)->scales;
        const float of_expert = scales->b[t->expert * scales->b_expert];
        const uint32_t r = ep_lane_now() / 4, last = num_rows - 1;
        const float top = scales->a[(row + min(r, last)) * scales->a_row] * of_expert;
        const float bottom = scales->a[(row + min(r + 8, last)) * scales->a_row] * of_expert;
#pragma unroll
        for (int i = 0; i < C::BN / 2; i++) d[i] *= i % 4 < 2 ? top : bottom;
    }
    if (C::KIND == EP_GEMM_FORWARD && p->bias) {
        const uint32_t c = col0 + ep_lane_now() % 4 * 2, last = out_cols - 2;
        /* groups of 4 or fewer, because there are no registers for more loads */
#pragma unroll
        for (int i = 0; i < C::OUT_GROUPS; i += C::ACT_GROUPS)
            if (col0 + 8 * i < out_cols)
#pragma unroll
                for (int j = i; j < i + C::ACT_GROUPS; j++)
                    ep_gemm_add_bias<C::ACT, C::F16>(p, t->expert, min(c + 8 * j, last), d + SIZE * j);
    }
    /* groups of 4, so that their latencies overlap; fewer where registers are scarce */
#pragma unroll
    for (int i = 0; i < C::OUT_GROUPS; i += C::ACT_GROUPS)
        if (col0 + 8 * i < out_cols)
#pragma unroll
            for (int j = i; j < i + C::ACT_GROUPS; j++) ep_gemm_activate<C::ACT>(p, d + SIZE * j, d + 4 * j);
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

/* Store the upper (or lower) eight rows of NUM_GROUPS * 8 columns to the staging buffer; v begins with
 * their first value. */
template <int NUM_GROUPS> EP_PTX void ep_gemm_stage_rows(uint32_t to, const uint32_t *v) {
#pragma unroll
    for (int i = 0; i < NUM_GROUPS; i += 4)
        ep_stmatrix_x4(to + 16 * i, v[2 * i], v[2 * i + 2], v[2 * i + 4], v[2 * i + 6]);
}

/* ---- written during the next tile ---- */

/* A warp's finished part of a tile, packed. The registers suffice to keep 128 columns of it together with
 * the next tile's accumulators. So these are written while the next tile is computed. */
template <typename C> struct EpGemmDeferred {
    uint32_t v[2 * C::OUT_GROUPS]; /* see ep_gemm_finish */
    uint16_t *out;                 /* address of this lane's first piece */
    uint32_t num_rows, cols_left; /* that exist, counted from the warp's first row and from the first piece */
    uint32_t part;                /* the part that is written next */
};

/* Write eight rows of up to 128 columns through the staging buffer, so that whole lines are stored. */
template <typename C, int PART> EP_PTX void ep_gemm_write_part(const EpGemmDeferred<C> *h, uint32_t out_cols,
                                                               uint32_t staging) {
    constexpr int LOADS = C::PASS / 4, ROWS = 32 / C::PASS; /* per staging buffer: loads, and rows per load */
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

/* Finish a warp's part of a tile and write its first AT_ONCE parts. The others are deferred. */
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

/* Write one deferred part, if any of those from AT_ONCE on is left. True if it did. */
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

#endif /* EP_GEMM_WRITE_CUH */
