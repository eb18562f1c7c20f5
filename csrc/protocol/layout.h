/* layout.h - where everything is located in the memory that operations use. Each of these functions computes
 * the offsets in one memory, for host, kernels, Python and tests. Nothing else computes them.
 *   ep_comm_layout()   a communication buffer in the symmetric heap (the same on every rank)
 *   ep_plan_layout()   the plan of one call, in memory of the caller (a tensor of int32)
 *   ep_record_at()     the records that dispatch saves for combine, in the tensor recv (of int32)
 *
 * All offsets are 64-bit. They are in bytes in a communication buffer, and in int32 elements in the tensors.
 * Invariant: a communication buffer's layout depends only on the shape, so ranks need not exchange
 * offsets. */
#ifndef EP_LAYOUT_H
#define EP_LAYOUT_H
#include "protocol/shape.h"
#include "protocol/slot.h"
#include "protocol/words.h"

#define EP_CHUNK_SLOTS 4u /* slots published by one flag */
#define EP_TILE_ROWS 128  /* rows of a row block, and of a full grouped-GEMM tile */
#define EP_WRONG_CELLS 3u /* cells of a plan in which a rank reports a wrong argument; see plan.h */
#define EP_PIECE_VECS 64u /* low latency: units of 16 bytes of a row that a warp moves at a time */
#define EP_LL_BANKS 3u    /* low latency: banks of slots */
#define EP_PLAN_CTAS 128u /* most CTAs of the plan kernel */

/* The next aligned offset at the cursor. The cursor moves past num_bytes from there. */
EP_PURE uint64_t ep_take(uint64_t *cursor, uint64_t num_bytes, uint64_t alignment) {
    uint64_t off = ep_align_u64(*cursor, alignment);
    *cursor = off + num_bytes;
    return off;
}

/* The layout of a communication buffer: offsets in bytes. */
typedef struct {
    uint64_t enter_off;  /* u64 [2][W], each on its own line; bank = epoch % 2 */
    uint64_t header_off; /* EpHeader [2][W]; bank = epoch % 2 */
    uint64_t counts_off; /* u64 [W][num_count_cells]; see plan.h */
    uint64_t flag_off;   /* u64 [W][num_chunks] */
    uint64_t local_off;  /* EpLocal */
    /* u32 [EP_PLAN_CTAS][num_count_cells + 2 E]: each CTA's counts during a plan; only this rank uses them */
    uint64_t scratch_off;
    /* u64 [num_row_blocks]: how many rows of each row block are ready; only this rank uses them; see
     * fused.cuh */
    uint64_t ready_off;
    /* Low latency only, see low_latency.h: two banks of u64 [W][EP_LINE / 8] heads and of u64
     * [W][max_tokens][K] routes. */
    uint64_t ll_head_off, ll_route_off;
    uint64_t stage_off; /* the staging buffer; its format depends on the operation */
    uint64_t num_bytes;
    uint64_t row_bytes;       /* H elements */
    uint64_t slot_stride;     /* row + trailer, for dispatch and LOCAL combine */
    uint64_t choice_stride;   /* row + trailer, for SCATTER and GATHER combine */
    uint32_t num_chunks;      /* flags per source rank */
    uint32_t num_count_cells; /* E + W + EP_WRONG_CELLS */
    uint32_t num_row_blocks;  /* row blocks of EP_TILE_ROWS rows */
    uint32_t num_pieces;      /* low latency: pieces of a row */
    uint32_t slots_of_token;  /* low latency: slots of a bank for each token; see ep_ll_slot */
} EpCommLayout;

EP_PURE EpCommLayout ep_comm_layout(const EpShape *s) {
    EpCommLayout l;
    uint64_t at = 0, w = s->num_ranks, slots = w * s->max_tokens, stage;
    l.row_bytes = (uint64_t)s->hidden * ep_dtype_bytes(s->dtype);
    /* Rows begin on a line, so that a warp's store of 512 bytes covers four lines and not five. */
    l.slot_stride = ep_align_u64(l.row_bytes + 4ull * ep_trailer_words(s->num_topk), EP_LINE);
    l.choice_stride = ep_align_u64(l.row_bytes + 4ull * EP_CHOICE_WORDS, EP_LINE);
    l.num_chunks = ep_ceil_div_u32(s->max_tokens, EP_CHUNK_SLOTS);
    l.num_count_cells = s->num_experts + s->num_ranks + EP_WRONG_CELLS;
    l.num_row_blocks = ep_ceil_div_u32(s->capacity, EP_TILE_ROWS);
    l.enter_off = ep_take(&at, 2 * w * EP_LINE, EP_LINE);
    l.header_off = ep_take(&at, 2 * w * sizeof(EpHeader), EP_LINE);
    l.counts_off = ep_take(&at, 8 * w * l.num_count_cells, EP_LINE);
    l.flag_off = ep_take(&at, 8 * w * l.num_chunks, EP_LINE);
    l.local_off = ep_take(&at, sizeof(EpLocal), EP_LINE);
    l.scratch_off = ep_take(&at, 4ull * EP_PLAN_CTAS * (l.num_count_cells + 2 * s->num_experts), EP_LINE);
    l.ready_off = ep_take(&at, 8ull * l.num_row_blocks, EP_LINE);
    const bool is_ll = ep_is_low_latency(s);
    l.num_pieces = (uint32_t)(ep_align_u64(l.row_bytes, 16 * EP_PIECE_VECS) / (16 * EP_PIECE_VECS));
    l.ll_head_off = ep_take(&at, is_ll ? 2 * w * EP_LINE : 0, EP_LINE);
    l.ll_route_off = ep_take(&at, is_ll ? 16 * slots * s->num_topk : 0, EP_LINE);
    l.slots_of_token = s->num_ranks + (s->combine_mode == EP_LOW_LATENCY_SCATTER ? s->num_topk : 0);
    stage = (is_ll ? (uint64_t)EP_LL_BANKS * l.slots_of_token * s->max_tokens : slots) * l.slot_stride;
    if (s->combine_mode == EP_COMBINE_SCATTER)
        stage = ep_max_u64(stage, (uint64_t)s->max_tokens * s->num_topk * l.choice_stride);
    if (s->combine_mode == EP_COMBINE_GATHER) stage = ep_max_u64(stage, s->capacity * l.choice_stride);
    l.stage_off = ep_take(&at, stage, EP_LINE);
    l.num_bytes = ep_align_u64(at, EP_LINE);
    return l;
}

/* The head of a plan: offsets in int32 elements. */
enum {
    EP_HEAD_STATUS = 0,     /* 0, or the error code on which all ranks agreed */
    EP_HEAD_PLAN_IDX = 1,   /* low half of the epoch in which the plan was made */
    EP_HEAD_NUM_ROWS = 2,   /* M */
    EP_HEAD_NUM_TOKENS = 3, /* T */
    EP_HEAD_NUM_TILES = 4,
    EP_HEAD_NUM_SEND = 8,   /* [W] distinct tokens from this rank to each rank */
    EP_HEAD_NUM_RECV = 16,  /* [W] distinct tokens from each rank to this rank */
    EP_HEAD_RANK_ROWS = 24, /* [W] M of every rank */
    EP_HEAD_WORDS = 32
};
/* The layout of a plan: offsets in int32 elements. The head is at 0. */
typedef struct {
    uint64_t counts_off;       /* [W][E] choices that rank w routes to expert e */
    uint64_t expert_row_off;   /* [L + 1] first row of each local expert; the last entry is M */
    uint64_t token_expert_off; /* [T][K] expert of each choice; -1: dropped */
    uint64_t token_row_off;    /* [T][K] row at the expert's rank; -1: dropped */
    uint64_t token_slot_off;   /* [T][W] slot in which the token returns from each rank; -1: not sent there */
    uint64_t sort_off;         /* [T * K] t * K + k, sorted by expert, token, choice; -1 after the last */
    uint64_t send_token_off;   /* [W][T] token in each slot that this rank sends */
    uint64_t tile_expert_off;  /* [num_tiles] local expert of each tile */
    uint64_t tile_row_off;     /* [num_tiles] first row of each tile */
    uint64_t num_words;
    uint32_t num_tokens;
    uint32_t max_tiles;
} EpPlanLayout;

EP_PURE EpPlanLayout ep_plan_layout(const EpShape *s, uint32_t num_tokens) {
    EpPlanLayout l;
    /* T is rounded up to a multiple of 4. The length is then linear in the rounded T, which a compiler
     * that traces the program symbolically can compute. */
    uint64_t at = EP_HEAD_WORDS, w = s->num_ranks, k = s->num_topk, t = ep_align_u64(num_tokens, 4);
    l.num_tokens = num_tokens;
    l.max_tiles = s->capacity / EP_TILE_ROWS + ep_num_local_experts(s);
    l.counts_off = ep_take(&at, w * s->num_experts, 4);
    l.expert_row_off = ep_take(&at, ep_num_local_experts(s) + 1, 4);
    l.token_expert_off = ep_take(&at, t * k, 4);
    l.token_row_off = ep_take(&at, t * k, 4);
    l.token_slot_off = ep_take(&at, t * w, 4);
    l.sort_off = ep_take(&at, t * k, 4);
    l.send_token_off = ep_take(&at, w * t, 4);
    l.tile_expert_off = ep_take(&at, l.max_tiles, 4);
    l.tile_row_off = ep_take(&at, l.max_tiles, 4);
    l.num_words = ep_align_u64(at, 4);
    return l;
}

/* The first word of a record in recv, and the number of words of recv. */
EP_PURE uint64_t ep_record_at(const EpShape *s, uint32_t of_rank, uint32_t return_slot) {
    return ((uint64_t)of_rank * s->max_tokens + return_slot) * ep_record_words(s->num_topk);
}
EP_PURE uint64_t ep_recv_words(const EpShape *s) { return ep_record_at(s, s->num_ranks, 0); }

EP_STATIC_ASSERT(EP_HEAD_NUM_RECV - EP_HEAD_NUM_SEND >= EP_MAX_RANKS, "room for every rank in NUM_SEND");
EP_STATIC_ASSERT(EP_HEAD_RANK_ROWS - EP_HEAD_NUM_RECV >= EP_MAX_RANKS, "room for every rank in NUM_RECV");
EP_STATIC_ASSERT(EP_HEAD_WORDS - EP_HEAD_RANK_ROWS >= EP_MAX_RANKS, "room for every rank in RANK_ROWS");
EP_HANDLES_ALL(EP_NUM_COMBINE_MODES, 5); /* ep_comm_layout: the staging buffer */

#endif /* EP_LAYOUT_H */
