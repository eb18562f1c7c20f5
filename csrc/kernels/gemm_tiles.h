/* gemm_tiles.h - which part of a grouped GEMM is tile number t: pure arithmetic on the experts' sizes, which
 * stand on the device.  Every block and every role counts for itself, so nobody hands tiles out. */
#ifndef EP_GEMM_TILES_H
#define EP_GEMM_TILES_H
#include "gemm.h"

#define EP_GEMM_GROUP 8u /* row blocks that go through the columns together */

typedef struct {
    uint32_t expert;
    uint32_t row0, num_rows; /* of the output: first row, and rows that exist (may be more than a tile has) */
    uint32_t col0;           /* of the product */
    uint32_t k0, num_k;      /* of the contraction: where it begins, how long it is */
} EpGemmTile;

/* Where a block's walk has come to: its tiles have rising numbers, so it never looks back. */
typedef struct {
    uint32_t expert, first_tile, row0, num_rows, num_m;
} EpGemmWalk;

/* An offset is not believed beyond the rows that there are. */
EP_PURE uint32_t ep_gemm_clamp_row(const EpGemmParams *p, int32_t row) {
    return row < 0 ? 0 : (uint32_t)row < p->num_rows ? (uint32_t)row : p->num_rows;
}
EP_PURE void ep_walk_enter(const EpGemmParams *p, uint32_t bm, EpGemmWalk *w) {
    if (w->expert >= p->num_experts) return;
    const uint32_t from = ep_gemm_clamp_row(p, p->offsets[w->expert]), to = ep_gemm_clamp_row(p, p->offsets[w->expert + 1]);
    w->row0 = from, w->num_rows = to > from ? to - from : 0;
    w->num_m = ((p->kind == EP_GEMM_WGRAD ? p->n : w->num_rows) + bm - 1) / bm;
}

/* Tile number t: false behind the last one.  Inside an expert, EP_GEMM_GROUP row blocks go through the columns together, so
 * that blocks running side by side read the same weights. */
EP_PURE bool ep_gemm_tile(const EpGemmParams *p, uint32_t bm, uint32_t bn, EpGemmWalk *w, uint32_t t, EpGemmTile *tile) {
    const uint32_t num_n = ((p->kind == EP_GEMM_FORWARD ? p->n : p->k) + bn - 1) / bn;
    while (w->expert < p->num_experts && t >= w->first_tile + w->num_m * num_n) {
        w->first_tile += w->num_m * num_n, w->expert++;
        ep_walk_enter(p, bm, w);
    }
    if (w->expert >= p->num_experts) return false;
    const uint32_t i = t - w->first_tile, first_m = i / (EP_GEMM_GROUP * num_n) * EP_GEMM_GROUP, left = w->num_m - first_m;
    const uint32_t j = i % (EP_GEMM_GROUP * num_n), group = left < EP_GEMM_GROUP ? left : EP_GEMM_GROUP, m = (first_m + j % group) * bm;
    tile->expert = w->expert, tile->col0 = j / group * bn;
    if (p->kind == EP_GEMM_WGRAD) tile->row0 = m, tile->num_rows = p->n - m, tile->k0 = w->row0, tile->num_k = w->num_rows;
    else tile->row0 = w->row0 + m, tile->num_rows = w->num_rows - m, tile->k0 = 0, tile->num_k = p->kind == EP_GEMM_FORWARD ? p->k : p->n;
    return true;
}

#endif /* EP_GEMM_TILES_H */
