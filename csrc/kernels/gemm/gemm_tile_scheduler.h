/* gemm_tile_scheduler.h - the tile scheduler: the tile with number t of a grouped GEMM: pure arithmetic on
 * the experts' sizes, which are on the device.
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
 *     block would be done early, and then wait for the other, because a pair advances together.
 *   - With by_rows a pair always shares the rows. */
#ifndef EP_GEMM_TILE_SCHEDULER_H
#define EP_GEMM_TILE_SCHEDULER_H
#include "protocol/gemm_params.h"

/* rows of a tile; fewer in the kernels for small M and in the portable kernel */
#define EP_GEMM_BM 128u
/* row blocks (or pairs of them) that proceed through the columns together */
#define EP_GEMM_GROUP 4u
/* experts whose offsets are read at once */
#define EP_GEMM_SKIP 8u

typedef struct {
    uint32_t expert;
    /* rows of the output: the first one, and how many exist from there on (may be more than a tile has) */
    uint32_t row0, num_rows;
    uint32_t col0;      /* first column of the product; may be beyond the last one */
    uint32_t k0, num_k; /* the contraction: start and length */
    /* the pair shares the rows; otherwise it shares the columns */
    uint32_t shares_rows;
} EpGemmTile;

/* The state of a CTA's tile scheduler: its position in the sequence of tiles. The tile numbers increase, so
 * it never goes back. */
typedef struct {
    uint32_t expert, first_tile, row0, num_rows;
    /* Row blocks of the expert: sets of `size` that share columns, and row blocks whose rows are shared. */
    uint32_t num_sets, num_left;
    bool by_rows; /* a pair always shares the rows. A kernel sets it before its first tile */
} EpGemmTileScheduler;

/* Clamp an offset to the rows that exist. */
EP_PURE uint32_t ep_gemm_clamp_row(const EpGemmParams *p, int32_t row) {
    return row < 0 ? 0 : (uint32_t)row < p->num_rows ? (uint32_t)row : p->num_rows;
}
/* The row blocks of an expert with these rows of the product, in *sched. */
EP_PURE void ep_tile_scheduler_split(uint32_t bm, uint32_t size, uint32_t rows, EpGemmTileScheduler *sched) {
    const uint32_t num_m = (rows + bm - 1) / bm;
    sched->num_sets = num_m / size;
    sched->num_left = num_m % size;
    if (sched->by_rows) {
        sched->num_sets = 0;
        sched->num_left = num_m;
    } else if (bm >= EP_GEMM_BM && size == 2 && num_m && sched->num_left == 0 && (rows - 1) % bm < bm / 2) {
        sched->num_sets--;
        sched->num_left = 2;
    }
}
EP_PURE void ep_tile_scheduler_enter(const EpGemmParams *p, uint32_t bm, uint32_t size,
                                     EpGemmTileScheduler *sched) {
    if (sched->expert >= p->num_experts) return;
    const uint32_t from = ep_gemm_clamp_row(p, p->offsets[sched->expert]);
    const uint32_t to = ep_gemm_clamp_row(p, p->offsets[sched->expert + 1]);
    sched->row0 = from;
    sched->num_rows = to > from ? to - from : 0;
    ep_tile_scheduler_split(bm, size, p->kind == EP_GEMM_WGRAD ? p->n : sched->num_rows, sched);
}
EP_PURE uint32_t ep_tile_scheduler_num_tiles(const EpGemmTileScheduler *sched, uint32_t num_n,
                                             uint32_t size) {
    return sched->num_sets * num_n + sched->num_left * ((num_n + size - 1) / size);
}
/* For small M: go past experts that end before tile t, EP_GEMM_SKIP at once, as long as each has at most one
 * row block. Their offsets are read together. One read after the other took 3 us for 32 experts, at the start
 * of each kernel. If offsets fall, or go beyond the rows, this goes past none: all CTAs must count the tiles
 * that ep_tile_scheduler_enter counts. */
EP_PURE void ep_tile_scheduler_skip(const EpGemmParams *p, uint32_t bm, uint32_t num_n, uint32_t size,
                                    EpGemmTileScheduler *sched, uint32_t t) {
    const uint32_t num_tiles = (num_n + size - 1) / size; /* of an expert with rows: the pair shares them */
    bool is_past = true;
    while (is_past && sched->expert + EP_GEMM_SKIP <= p->num_experts) {
        uint32_t row[EP_GEMM_SKIP + 1], most = 0;
#pragma unroll
        for (uint32_t i = 0; i <= EP_GEMM_SKIP; i++) row[i] = (uint32_t)p->offsets[sched->expert + i];
#pragma unroll
        for (uint32_t i = 0; i < EP_GEMM_SKIP; i++) /* of falling offsets the difference is large */
            most = row[i + 1] - row[i] > most ? row[i + 1] - row[i] : most;
        if (most > bm || row[0] > row[EP_GEMM_SKIP] || row[EP_GEMM_SKIP] > p->num_rows) return;
#pragma unroll
        for (uint32_t i = 0; i < EP_GEMM_SKIP; i++) {
            const uint32_t next = sched->first_tile + (row[i + 1] != row[i] ? num_tiles : 0);
            is_past = is_past && t >= next;
            sched->first_tile = is_past ? next : sched->first_tile;
            sched->expert += is_past;
        }
    }
}

/* Find the position of tile number t: of the only CTA, or of CTA `rank` of a pair (`size`: 1 or 2). Numbers
 * count over all experts. *sched remembers the expert of the last call, whose first number is
 * sched->first_tile. False if t is past the last tile; sched->first_tile is then the number of all tiles.
 * Within an expert, numbers that follow each other have EP_GEMM_GROUP row blocks (or pairs of them) of one
 * column block, then the same row blocks of the next column block, and so on. So CTAs that run at the same
 * time read the same weights. */
EP_PURE bool ep_gemm_tile(const EpGemmParams *p, uint32_t bm, uint32_t bn, uint32_t size, uint32_t rank,
                          EpGemmTileScheduler *sched, uint32_t t, EpGemmTile *tile) {
    const uint32_t num_n = (ep_gemm_num_cols(p) + bn - 1) / bn;
    for (uint32_t num_past = 0; sched->expert < p->num_experts &&
                                t >= sched->first_tile + ep_tile_scheduler_num_tiles(sched, num_n, size);) {
        sched->first_tile += ep_tile_scheduler_num_tiles(sched, num_n, size);
        sched->expert++;
        if (bm < EP_GEMM_BM && size == 2 && ++num_past == 3) /* there may be many more */
            ep_tile_scheduler_skip(p, bm, num_n, size, sched, t);
        ep_tile_scheduler_enter(p, bm, size, sched);
    }
    if (sched->expert >= p->num_experts) return false;
    const uint32_t i = t - sched->first_tile, num_even = sched->num_sets * num_n;
    uint32_t m, n;
    tile->shares_rows = i >= num_even;
    if (i < num_even) {
        const uint32_t first = i / (EP_GEMM_GROUP * num_n) * EP_GEMM_GROUP;
        const uint32_t j = i % (EP_GEMM_GROUP * num_n);
        const uint32_t left = sched->num_sets - first;
        const uint32_t group = left < EP_GEMM_GROUP ? left : EP_GEMM_GROUP;
        m = (first + j % group) * size + rank;
        n = j / group;
    } else {
        m = sched->num_sets * size + (i - num_even) % sched->num_left;
        n = (i - num_even) / sched->num_left * size + rank;
    }
    m *= bm;
    tile->expert = sched->expert;
    tile->col0 = n * bn;
    EP_HANDLES_ALL(EP_NUM_GEMM_KINDS, 3);
    if (p->kind == EP_GEMM_WGRAD) {
        tile->row0 = m;
        tile->num_rows = p->n - m;
        tile->k0 = sched->row0;
        tile->num_k = sched->num_rows;
    } else {
        tile->row0 = sched->row0 + m;
        tile->num_rows = sched->num_rows - m;
        tile->k0 = 0;
        tile->num_k = p->kind == EP_GEMM_FORWARD ? p->k : p->n;
    }
    return true;
}

#endif /* EP_GEMM_TILE_SCHEDULER_H */
