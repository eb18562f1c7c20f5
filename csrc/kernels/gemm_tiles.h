/* gemm_tiles.h - which part of a grouped GEMM is tile number t: pure arithmetic on the experts' sizes, which
 * stand on the device.
 *
 * A tile number belongs to one block, or to a pair of blocks (size 2), each of which does a tile of it: two row
 * blocks of the same columns, which share the weights; or two column blocks of the same rows, which share those.  The
 * latter is for an expert's last row block, where they do not come out even, and for the last two where the last has
 * rows for one of its block's two warpgroups only: a tile of it takes half the time, which the pair would wait for. */
#ifndef EP_GEMM_TILES_H
#define EP_GEMM_TILES_H
#include "gemm.h"

#define EP_GEMM_BM 128u  /* rows of a tile; where there are few, or in the portable kernel, fewer */
#define EP_GEMM_GROUP 4u /* row blocks (or pairs of them) that go through the columns together */

typedef struct {
    uint32_t expert;
    uint32_t row0, num_rows; /* of the output: first row, and rows that exist (may be more than a tile has) */
    uint32_t col0;           /* of the product; may lie behind the last one */
    uint32_t k0, num_k;      /* of the contraction: where it begins, how long it is */
    uint32_t shares_rows;    /* with the other of the pair: rows, else columns */
} EpGemmTile;

/* Where a block's walk has come to: its tiles have rising numbers, so it never looks back. */
typedef struct {
    uint32_t expert, first_tile, row0, num_rows;
    uint32_t num_sets, num_left; /* of row blocks: sets of `size`, and those that share their rows */
} EpGemmWalk;

/* An offset is not believed beyond the rows that there are. */
EP_PURE uint32_t ep_gemm_clamp_row(const EpGemmParams *p, int32_t row) {
    return row < 0 ? 0 : (uint32_t)row < p->num_rows ? (uint32_t)row : p->num_rows;
}
EP_PURE void ep_walk_enter(const EpGemmParams *p, uint32_t bm, uint32_t size, EpGemmWalk *w) {
    if (w->expert >= p->num_experts) return;
    const uint32_t from = ep_gemm_clamp_row(p, p->offsets[w->expert]);
    const uint32_t to = ep_gemm_clamp_row(p, p->offsets[w->expert + 1]);
    w->row0 = from;
    w->num_rows = to > from ? to - from : 0;
    const uint32_t rows = p->kind == EP_GEMM_WGRAD ? p->n : w->num_rows, num_m = (rows + bm - 1) / bm;
    w->num_sets = num_m / size;
    w->num_left = num_m % size;
    if (bm == EP_GEMM_BM && size == 2 && num_m && w->num_left == 0 && (rows - 1) % bm < bm / 2) {
        w->num_sets--;
        w->num_left = 2;
    }
}
EP_PURE uint32_t ep_walk_num_tiles(const EpGemmWalk *w, uint32_t num_n, uint32_t size) {
    return w->num_sets * num_n + w->num_left * ((num_n + size - 1) / size);
}

/* Tile number t, as block `rank` of `size` has it: false behind the last one, and w->first_tile is then how many there
 * are.  Inside an expert, EP_GEMM_GROUP row blocks go through the columns together, so that blocks running side by
 * side read the same weights. */
EP_PURE bool ep_gemm_tile(const EpGemmParams *p, uint32_t bm, uint32_t bn, uint32_t size, uint32_t rank,
                          EpGemmWalk *w, uint32_t t, EpGemmTile *tile) {
    const uint32_t num_n = (ep_gemm_num_cols(p) + bn - 1) / bn;
    while (w->expert < p->num_experts && t >= w->first_tile + ep_walk_num_tiles(w, num_n, size)) {
        w->first_tile += ep_walk_num_tiles(w, num_n, size);
        w->expert++;
        ep_walk_enter(p, bm, size, w);
    }
    if (w->expert >= p->num_experts) return false;
    const uint32_t i = t - w->first_tile, num_even = w->num_sets * num_n;
    uint32_t m, n;
    tile->shares_rows = i >= num_even;
    if (i < num_even) {
        const uint32_t first = i / (EP_GEMM_GROUP * num_n) * EP_GEMM_GROUP;
        const uint32_t j = i % (EP_GEMM_GROUP * num_n);
        const uint32_t left = w->num_sets - first;
        const uint32_t group = left < EP_GEMM_GROUP ? left : EP_GEMM_GROUP;
        m = (first + j % group) * size + rank;
        n = j / group;
    } else {
        m = w->num_sets * size + (i - num_even) % w->num_left;
        n = (i - num_even) / w->num_left * size + rank;
    }
    m *= bm;
    tile->expert = w->expert;
    tile->col0 = n * bn;
    if (p->kind == EP_GEMM_WGRAD) {
        tile->row0 = m;
        tile->num_rows = p->n - m;
        tile->k0 = w->row0;
        tile->num_k = w->num_rows;
    } else {
        tile->row0 = w->row0 + m;
        tile->num_rows = w->num_rows - m;
        tile->k0 = 0;
        tile->num_k = p->kind == EP_GEMM_FORWARD ? p->k : p->n;
    }
    return true;
}

#endif /* EP_GEMM_TILES_H */
