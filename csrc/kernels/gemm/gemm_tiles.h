/* gemm_tiles.h - the tile with number t of a grouped GEMM: pure arithmetic on the experts' sizes, which are
 * on the device.
 *
 * CTAs work alone (cluster size 1) or in pairs (cluster size 2). A number belongs to one of them, and stands
 * for one tile of each of its CTAs. The two tiles of a pair have one operand in common, which is loaded once:
 *   the columns   The tiles are two row blocks of an expert with the same columns, and share the weights.
 *   the rows      The tiles are two column blocks of one row block. If the product has an odd number of
 *                 column blocks, the last tile of the second CTA is empty.
 * A pair shares the columns, with these exceptions:
 *   - If an expert has an odd number of row blocks, a pair shares the rows of the last block.
 *   - If it has an even number, a tile has at least EP_GEMM_BM rows, and the last block is at most half full,
 *     a pair shares the rows of each of the last two blocks. In a pair of these two, the CTA with the short
 *     block would be done early, and then wait for the other, because a pair advances together. */
#ifndef EP_GEMM_TILES_H
#define EP_GEMM_TILES_H
#include "protocol/gemm_params.h"

/* rows of a tile; fewer in the kernels for few rows and in the portable kernel */
#define EP_GEMM_BM 128u
/* row blocks (or pairs of them) that proceed through the columns together */
#define EP_GEMM_GROUP 4u

typedef struct {
    uint32_t expert;
    /* rows of the output: the first one, and how many exist from there on (may be more than a tile has) */
    uint32_t row0, num_rows;
    uint32_t col0;      /* first column of the product; may be beyond the last one */
    uint32_t k0, num_k; /* the contraction: start and length */
    /* the pair shares the rows; otherwise it shares the columns */
    uint32_t shares_rows;
} EpGemmTile;

/* A CTA's position in the sequence of tiles. Its tile numbers increase, so it never goes back. */
typedef struct {
    uint32_t expert, first_tile, row0, num_rows;
    /* Row blocks of the expert: sets of `size` that share columns, and row blocks whose rows are shared. */
    uint32_t num_sets, num_left;
} EpGemmWalk;

/* Clamp an offset to the rows that exist. */
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
    if (bm >= EP_GEMM_BM && size == 2 && num_m && w->num_left == 0 && (rows - 1) % bm < bm / 2) {
        w->num_sets--;
        w->num_left = 2;
    }
}
EP_PURE uint32_t ep_walk_num_tiles(const EpGemmWalk *w, uint32_t num_n, uint32_t size) {
    return w->num_sets * num_n + w->num_left * ((num_n + size - 1) / size);
}

/* Find the position of tile number t: of the only CTA, or of CTA `rank` of a pair (`size`: 1 or 2). Numbers
 * count over all experts. *w remembers the expert of the last call, whose first number is w->first_tile.
 * False if t is past the last tile; w->first_tile is then the number of all tiles. Within an expert, numbers
 * that follow each other have EP_GEMM_GROUP row blocks (or pairs of them) of one column block, then the same
 * row blocks of the next column block, and so on. So CTAs that run at the same time read the same weights. */
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
    EP_HANDLES_ALL(EP_NUM_GEMM_KINDS, 3);
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
