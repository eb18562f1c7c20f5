/* made_rows.h - emulates the GEMM of GEMM + combine: warps produce the rows, and count them.
 *
 * Exports Division (of a round), CombineRunParams, num_groups and make_rows. */
#ifndef MADE_ROWS_H
#define MADE_ROWS_H
#include "stages.h"

#include "kernels/stage/combine.cuh"

typedef EpCombineConfig<EP_BF16, EP_OP_GEMM_COMBINE>::Fifo LargeFifo;
enum {
    COMM_WARPS = 3,
    ROW_WARPS = 2,
    PIECES = 3,
    FIFO_BYTES = COMM_WARPS * EpFusedFifo::BYTES + ROW_WARPS * LargeFifo::BYTES
};
static_assert(COMM_WARPS + ROW_WARPS < EP_MAX_WARPS, "the emulation has too few warps");

/* How the work of a round is divided between CTAs and warps. */
struct Division {
    uint32_t num_move, num_tail, num_reduce; /* numbers of CTAs, as in params.h */
    bool comm_warps_combine;                 /* the communication warps combine tokens */
    bool row_warps_combine;                  /* the warps that produce rows combine tokens afterwards */
    bool is_serial;                          /* see params.h */
    bool opens_chunks;                       /* as the kernels of 16 bits do, and not those of FP8 */
    uint32_t delay_us; /* the most that a warp waits before it produces a piece of 16 rows */
    /* How long a row block takes at least, after all chunks are open. In round 0, warps have the time to
     * return some slots of a chunk before the others. */
    uint32_t block_ms;
};
static const Division divisions[ROUNDS] = {{2, 0, 2, true, false, false, true, 400, 80},
                                           {1, 0, 1, false, true, false, true, 400, 0},
                                           {2, 1, 1, true, true, false, false, 400, 0},
                                           {1, 0, 2, true, true, true, true, 400, 0}};

struct CombineRunParams {
    EpCombineParams k;
    Division division;
    const unsigned char *product;
    const uint32_t *order; /* the order in which pieces of rows are produced */
    uint64_t *ready;
};

/* A warp produces rows in groups of 16. A tile may begin at any row, so the first group has only 11 rows. */
static uint32_t num_groups(uint32_t num_rows) { return ep_ceil_div_u32(num_rows + 5, 16); }

static uint32_t num_chunks_of(const CombineRunParams &p, uint32_t r) {
    return ep_ceil_div_u32((uint32_t)p.k.plan[EP_HEAD_NUM_RECV + r], EP_CHUNK_SLOTS);
}
/* Wait until all chunks are open, if the tables have room for them. */
static void await_open_chunks(const CombineRunParams &p) {
    const EpComm *c = &p.k.comm;
    const uint32_t W = c->shape.num_ranks;
    uint64_t num = 0, num_open = 0;
    for (uint32_t r = 0; r < W; r++) num += num_chunks_of(p, r);
    if (c->shape.combine_mode == EP_COMBINE_GATHER || num > EP_OPEN_CHUNKS * p.division.num_move) return;
    for (const uint64_t until = ep_now_ns() + 20000000000ull; num_open < num && ep_now_ns() < until;) {
        usleep(1000);
        num_open = 0;
        for (uint32_t r = 0; r < W; r++)
            num_open +=
                std::min<uint64_t>(num_chunks_of(p, r), ep_ld_relaxed_gpu_u64(ep_local(c)->queue_send + r));
    }
}
static void make_rows(const CombineRunParams &p) {
    const EpComm *c = &p.k.comm;
    const uint32_t m = num_staged_rows(p.k), num_vec = (uint32_t)(c->layout.row_bytes / 16), lane = ep_lane();
    if (p.division.block_ms) await_open_chunks(p);
    const uint64_t start = ep_now_ns();
    for (uint64_t n; m && (n = ep_queue_pop(&ep_local(c)->queue_tiles)) < num_groups(m) * PIECES;) {
        const uint32_t piece = p.order[n] % PIECES, group = p.order[n] / PIECES;
        const uint32_t row = group ? 16 * group - 5 : 0;
        const uint32_t end = 16 * group + 11 < m ? 16 * group + 11 : m;
        const uint32_t num_rows = end - row;
        const uint32_t first = num_vec * piece / PIECES, last = num_vec * (piece + 1) / PIECES;
        const uint64_t from = start + row / EP_TILE_ROWS * p.division.block_ms * 1000000ull;
        const uint64_t delay_ns = 1000ull * (p.order[n] * 2654435761u % p.division.delay_us);
        for (uint64_t now = start; now < from + delay_ns; now = ep_now_ns()) usleep(100);
        for (uint32_t r = row; r < end; r++)
            for (uint32_t v = first + lane; v < last; v += 32)
                ((uint4 *)p.k.rows)[(uint64_t)r * num_vec + v] =
                    ((const uint4 *)p.product)[(uint64_t)r * num_vec + v];
        /* The rest is the same as EpCombineHooks::count. */
        const uint32_t block = row / EP_TILE_ROWS;
        const uint32_t left = (block + 1) * EP_TILE_ROWS - row;
        const uint32_t in_first = num_rows < left ? num_rows : left;
        __syncwarp();
        ep_fence_acq_rel_gpu();
        if (lane == 0) ep_red_add_relaxed_gpu(ep_ready_word(c, block), in_first);
        if (lane == 1 && num_rows > in_first)
            ep_red_add_relaxed_gpu(ep_ready_word(c, block + 1), num_rows - in_first);
    }
}

#endif /* MADE_ROWS_H */
