/* abi.h - what all ranks must agree on: shapes, the header of a call, and the layout of shared memory.
 *
 * Letters, in all files: W ranks, E experts, L = E/W local experts, T tokens of this rank, K choices per
 * token, H hidden size, M rows received by this rank.
 *
 * Two functions compute every offset, for host, kernels, Python and tests:
 *   ep_comm_layout()   a communication buffer in the symmetric heap (the same on every rank)
 *   ep_plan_layout()   the plan of one call, in memory of the caller (a tensor of int32)
 *
 * All byte offsets are 64-bit. Invariant: a communication buffer's layout depends only on the shape, so ranks
 * need not exchange offsets.
 *
 * A slot is the position of a token among the distinct tokens that one rank sends to another. It numbers a
 * row of the staging buffer. A token is sent once per rank, also if several of its experts are there. The
 * slot in which a token returns may differ from the slot in which it was sent (EpPlanParams.sort_slots). */
#ifndef EP_ABI_H
#define EP_ABI_H
#include "protocol/ops.h"
#include "protocol/port.h"
#include "protocol/slot.h"

#define EP_ABI_VERSION 0x65700008u
#define EP_MAX_RANKS 8u
#define EP_MAX_TOPK 32u
#define EP_MAX_EXPERTS 1024u
#define EP_WRONG_CELLS 3u /* cells of a plan in which a rank reports a wrong argument; see plan.h */
#define EP_PLAN_CTAS 128u /* most CTAs of the plan kernel */
#define EP_CHUNK_SLOTS 4u /* slots published by one flag */
#define EP_TILE_ROWS 128  /* rows of a row block, and of a full grouped-GEMM tile */
#define EP_LINE 128u      /* bytes; words with different writers are on different lines */
#define EP_FILL_NAN 0xffu /* every dtype reads this byte pattern as NaN */

/* All error codes: code, name of the exception, text. Host functions return these negative values. */
#define EP_ERRORS(X)                                                          \
    X(EP_EINVAL, -1, "ValueError", "wrong argument")                          \
    X(EP_ETYPE, -2, "TypeError", "argument of the wrong type")                \
    X(EP_ENOMEM, -3, "HeapExhausted", "out of memory")                        \
    X(EP_EPEERDIED, -4, "PeerDied", "a peer died")                            \
    X(EP_ETIMEOUT, -5, "EpTimeout", "a wait reached its limit")               \
    X(EP_EMISMATCH, -6, "EpMismatch", "ranks disagree")                       \
    X(EP_EOVERFLOW, -7, "EpOverflow", "more rows than there is capacity for") \
    X(EP_EINDEX, -8, "EpIndexError", "expert index out of range")             \
    X(EP_EPEER, -9, "PeerError", "a peer failed before the operation")        \
    X(EP_ECLOSED, -10, "EpClosed", "used after close")                        \
    X(EP_ESYS, -11, "EpError", "operating system error")                      \
    X(EP_ECUDA, -12, "EpError", "CUDA error")                                 \
    X(EP_ECORRUPT, -13, "EpError", "a peer's words make no sense")
typedef enum {
    EP_OK = 0,
#define X(code, value, exception, text) code = value,
    EP_ERRORS(X)
#undef X
} EpCode;

typedef enum { EP_F32 = 0, EP_F16 = 1, EP_BF16 = 2 } EpDtype;
/* LOCAL: the expert's rank adds up its rows of a token and pushes one row per (token, rank).
 * SCATTER: the expert's rank pushes one row per choice. GATHER: the token's rank pulls one row per choice. */
typedef enum { EP_COMBINE_LOCAL = 0, EP_COMBINE_SCATTER = 1, EP_COMBINE_GATHER = 2 } EpCombineMode;

typedef struct {
    uint32_t num_ranks;    /* W */
    uint32_t num_experts;  /* E, a multiple of W */
    uint32_t num_topk;     /* K */
    uint32_t max_tokens;   /* upper limit of T on every rank */
    uint32_t hidden;       /* H, in elements */
    uint32_t dtype;        /* EpDtype */
    uint32_t combine_mode; /* EpCombineMode */
    uint32_t capacity;     /* upper limit of M on every rank */
} EpShape;

/* The header that a rank writes to every peer when it enters an operation. The fields of the X list must
 * be equal on all ranks. */
#define EP_HEADER_FIELDS(X) \
    X(abi)                  \
    X(op)                   \
    X(dtype)                \
    X(hidden)               \
    X(num_topk)             \
    X(num_experts)          \
    X(max_tokens)           \
    X(combine_mode)         \
    X(capacity)             \
    X(has_weight)           \
    X(has_scalar)           \
    X(plan_idx)             \
    X(requires_grad)
typedef struct {
#define X(name) uint32_t name;
    EP_HEADER_FIELDS(X)
#undef X
    int32_t status;      /* 0, or the EpCode with which this rank has already failed */
    uint32_t num_tokens; /* T; may differ between ranks */
    uint32_t pad;
} EpHeader;
/* Indices of the fields that are compared; see ep_header_diff. */
enum {
#define X(name) EP_FIELD_##name,
    EP_HEADER_FIELDS(X)
#undef X
        EP_FIELD_COUNT
};
#define EP_NUM_HEADER_FIELDS ((uint32_t)EP_FIELD_COUNT)

/* Words that only the workers of the owner's rank use. Each group is on a line of its own. */
typedef struct {
    uint64_t epoch, faulted, claim, pad0[13];
    uint64_t queue_send[EP_MAX_RANKS], pad1[8]; /* task counters: [0] alone, or one for each peer */
    uint64_t queue_recv, pad2[15];
    uint64_t num_left, num_copied, pad3[14];
    uint64_t grid_arrived, pad4[15];
    uint64_t queue_tiles, pad5[15];
} EpLocal;

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
    uint64_t stage_off; /* the staging buffer; its format depends on the operation */
    uint64_t num_bytes;
    uint64_t row_bytes;       /* H elements */
    uint64_t slot_stride;     /* row + trailer, for dispatch and LOCAL combine */
    uint64_t choice_stride;   /* row + trailer, for SCATTER and GATHER combine */
    uint32_t num_chunks;      /* flags per source rank */
    uint32_t num_count_cells; /* E + W + EP_WRONG_CELLS */
    uint32_t num_row_blocks;  /* row blocks of EP_TILE_ROWS rows */
} EpCommLayout;

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

EP_PURE uint32_t ep_ceil_div_u32(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }
EP_PURE uint64_t ep_align_u64(uint64_t a, uint64_t to) { return (a + to - 1) / to * to; }
EP_PURE uint32_t ep_num_local_experts(const EpShape *s) { return s->num_experts / s->num_ranks; }
EP_PURE uint32_t ep_dtype_bytes(uint32_t dtype) { return dtype == EP_F32 ? 4u : 2u; }
EP_PURE uint64_t ep_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

EP_PURE uint64_t ep_take(uint64_t *cursor, uint64_t num_bytes, uint64_t alignment) {
    uint64_t off = ep_align_u64(*cursor, alignment);
    *cursor = off + num_bytes;
    return off;
}

/* The layout of a communication buffer. Nothing else computes these offsets. */
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
    stage = slots * l.slot_stride;
    if (s->combine_mode == EP_COMBINE_SCATTER)
        stage = ep_max_u64(stage, (uint64_t)s->max_tokens * s->num_topk * l.choice_stride);
    if (s->combine_mode == EP_COMBINE_GATHER) stage = ep_max_u64(stage, s->capacity * l.choice_stride);
    l.stage_off = ep_take(&at, stage, EP_LINE);
    l.num_bytes = ep_align_u64(at, EP_LINE);
    return l;
}

/* The layout of a plan. Nothing else computes these offsets. */
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

/* The first fault of a communication buffer, in memory that the host reads. */
typedef struct {
    uint64_t state; /* 0: none, 1: written */
    int32_t code;   /* EpCode */
    uint32_t op;
    uint32_t peer, word; /* EpWord */
    uint32_t field, pad; /* 1 + index of a header field, or position of a wrong index, or 0 */
    uint64_t epoch, want, got;
} EpFaultRecord;
typedef enum {
    EP_WORD_NONE = 0,
    EP_WORD_ENTER = 1,
    EP_WORD_COUNTS = 2,
    EP_WORD_FLAG = 3,
    EP_WORD_SIGNAL = 4,
    EP_WORD_HEADER = 5,
    EP_WORD_INDEX = 6,
    EP_WORD_ROWS = 7,
    EP_WORD_GRID = 8,
    EP_WORD_SCATTER = 9,
    EP_WORD_READY = 10
} EpWord;

/* The result of a plan, which the host reads without a stream synchronisation. */
typedef struct {
    uint64_t ticket; /* number that the host gave the call; written last */
    uint32_t num_rows;
    int32_t status; /* EpCode */
    uint64_t epoch; /* epoch of the plan; the flight record uses it */
} EpPlanResult;

/* Host memory of one communication buffer. Workers write it and the host polls it. */
typedef struct {
    /* nonzero: every wait must end. The host sets it, workers read it. */
    uint64_t abort;
    /* Epoch of an operation in which a wait has lasted longer than EP_STUCK_NS. The waiting worker
     * writes it at each check until the wait ends. */
    uint64_t stuck;
    EpFaultRecord fault;
    EpPlanResult plan;
} EpHostWords;

/* One span of time of one warp, for the profiler; see kernels/arch/trace.cuh. */
#define EP_TRACE_WARPS 12u /* warps of a CTA */
typedef enum {
    EP_SPAN_ENTER = 1,
    EP_SPAN_SEND = 2,
    EP_SPAN_RECEIVE = 3,
    EP_SPAN_WAIT_ROWS = 4,
    EP_SPAN_GEMM = 5,
    EP_SPAN_RETURN = 6,
    EP_SPAN_ADD = 7
} EpSpan;
typedef struct {
    uint64_t begin_ns;
    uint32_t num_ns;
    uint16_t what, of; /* EpSpan; the rank or the expert that the work was for */
} EpTraceEvent;

/* One rank's view of one communication buffer: all that a stage needs except its tensors. */
typedef struct {
    EpShape shape;
    EpCommLayout layout;
    unsigned char *base[EP_MAX_RANKS]; /* address of the buffer in each rank's heap, as mapped by this rank */
    uint32_t my_rank;
    int32_t status; /* see EpHeader */
    EpHostWords *host;
    uint64_t timeout_ns;
    EpTraceEvent *trace; /* where the profiler writes, or NULL */
    /* The profiler's memory: number of CTAs that have a part of it, and events per warp. */
    uint32_t trace_blocks, trace_room;
    uint32_t reserve_sms; /* SMs that the kernel leaves to other kernels */
    /* The operation will have a backward, which is an operation of its own. */
    uint32_t requires_grad;
    /* Host only: operations of one lane run in the order of their calls (cuda/launch_order.h). */
    uint32_t launch_lane;
} EpComm;

typedef struct {
    EpComm comm;
    EpPlanLayout layout;
    const void *exp_indices;        /* [T][K] i32 or i64 */
    const int32_t *scatter_indices; /* [T][K] of this rank, or those of all ranks in rank order; or NULL */
    int32_t *plan;
    uint32_t num_tokens, index_bytes;
    uint32_t num_scatter_tokens;
    /* nonzero: at each rank, send slots are sorted by a token's first expert there, return slots by its
     * last */
    uint32_t sort_slots;
    uint64_t ticket; /* see EpPlanResult */
} EpPlanParams;

typedef struct {
    EpComm comm;
    EpPlanLayout layout;
    const void *x;       /* [T / num_copies][H] */
    const float *weight; /* [T][K] or NULL */
    const int32_t *plan;
    int32_t *recv;     /* [W][max_tokens] records; see slot.h */
    void *rows;        /* [num_rows][H] */
    float *row_weight; /* [num_rows] or NULL */
    uint32_t num_rows; /* rows of the tensor; dispatch alone sets rows M and after to zero */
    uint32_t has_weight;
    /* Consecutive tokens that share one row of x. 1; but K in a fused operation without token saving,
     * where each token stands for one choice. */
    uint32_t num_copies;
} EpDispatchParams;

typedef struct {
    EpComm comm;
    EpPlanLayout layout;
    const void *rows;        /* [num_rows][H] */
    const float *row_weight; /* [num_rows] or NULL */
    const float *row_scalar; /* [num_rows] or NULL: returned together with the rows */
    const int32_t *plan, *recv;
    void *out;         /* [T][H] */
    float *out_scalar; /* [T][K] or NULL */
    /* has_*: whether the tensor was given. The address cannot tell: a tensor without rows may have a null
     * address. */
    uint32_t num_rows, has_weight, has_scalar;
    uint32_t row_pieces; /* fused: into how many pieces the GEMM's column tiles divide a row */
} EpCombineParams;

#ifdef __cplusplus
#define EP_STATIC_ASSERT static_assert
#else
#define EP_STATIC_ASSERT _Static_assert
#endif
EP_STATIC_ASSERT(sizeof(EpHeader) == 64, "a header is one line of 64 bytes");
EP_STATIC_ASSERT(offsetof(EpHeader, status) == 4 * EP_NUM_HEADER_FIELDS,
                 "all fields of the list are compared");
EP_STATIC_ASSERT(sizeof(EpLocal) == 6 * EP_LINE, "groups of local words are on lines of their own");
EP_STATIC_ASSERT(EP_HEAD_NUM_RECV - EP_HEAD_NUM_SEND == EP_MAX_RANKS, "room for every rank");

#define EP_AT(type, comm, rank, off) ((type *)((comm)->base[rank] + (off)))

/* Slot `slot` of those that of_rank sends, in at_rank's staging buffer. */
EP_FN unsigned char *ep_slot_at(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint32_t slot) {
    return c->base[at_rank] + c->layout.stage_off +
           ((uint64_t)of_rank * c->shape.max_tokens + slot) * c->layout.slot_stride;
}
/* Choice idx in at_rank's staging buffer: idx is token * K + k in SCATTER, the expert's row in GATHER. */
EP_FN unsigned char *ep_choice_at(const EpComm *c, uint32_t at_rank, uint64_t idx) {
    return c->base[at_rank] + c->layout.stage_off + idx * c->layout.choice_stride;
}
/* The first word of a record in recv, and the number of words of recv. */
EP_PURE uint64_t ep_record_at(const EpShape *s, uint32_t of_rank, uint32_t return_slot) {
    return ((uint64_t)of_rank * s->max_tokens + return_slot) * ep_record_words(s->num_topk);
}
EP_PURE uint64_t ep_recv_words(const EpShape *s) { return ep_record_at(s, s->num_ranks, 0); }

#endif /* EP_ABI_H */
