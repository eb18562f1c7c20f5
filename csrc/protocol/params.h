/* params.h - the parameters of each operation: what layer_ops.c fills in and a backend executes.
 *
 * Exports EpPlanParams, EpDispatchParams, EpCombineParams; for the fused kernels EpDispatchGemmParams and
 * EpGemmCombineParams; EpScales, the dtype and the scales of these; and for the low-latency operations
 * EpLlDispatchParams and EpLlCombineParams.
 * Invariant: a captured CUDA graph keeps a copy of these structs. So they contain neither an epoch nor the
 * number of received rows: a worker reads the epoch from its local words, and the number from the plan. */
#ifndef EP_PARAMS_H
#define EP_PARAMS_H
#include "protocol/comm.h"
#include "protocol/gemm_params.h"

#define EP_FP8_GROUP 128u   /* numbers of a row in FP8 that share a scale */
enum { EP_MAX_BIASES = 2 }; /* biases of a combine */

/* Padding rows: the rows of each expert are padded to a multiple of `alignment`; 0: there are none. With
 * has_capacity every expert has exactly `alignment` rows. */
typedef struct {
    uint32_t alignment, has_capacity;
} EpPadding;

typedef struct {
    EpComm comm;
    EpPlanLayout layout;
    const void *exp_indices;        /* [T][K] i32 or i64 */
    const int32_t *scatter_indices; /* [T][K] of this rank, or those of all ranks in rank order; or NULL */
    int32_t *plan;
    uint32_t num_tokens, index_bytes;
    uint32_t num_scatter_tokens;
    uint32_t balance_key; /* see EpHeader */
    /* nonzero: at each rank, send slots are sorted by a token's first expert there, return slots by its
     * last */
    uint32_t sort_slots;
    uint64_t ticket; /* see EpPlanResult */
    EpPadding padding;
    uint32_t host_counts; /* nonzero: EpHostWords.expert_choices is part of the result */
} EpPlanParams;

typedef struct {
    EpComm comm;
    EpPlanLayout layout;
    const void *x;       /* [T / num_copies][H] */
    const float *weight; /* [T][K] or NULL */
    const int32_t *tag;  /* [T / num_copies] or NULL: a number of the caller that travels with the token */
    const int32_t *plan;
    int32_t *recv;     /* [W][max_tokens] records; see slot.h */
    void *rows;        /* [num_rows][H] */
    float *row_weight; /* [num_rows] or NULL */
    /* [num_rows] or NULL: the tag of each row's token, 0 where its rank has given none. Not set for rows of
     * no expert. A fused operation has none. */
    int32_t *row_tag;
    uint32_t num_rows; /* rows of the tensor; dispatch alone sets rows M and after to zero */
    uint32_t has_weight;
    /* Consecutive tokens that share one row of x. 1; but K in a fused operation without token saving,
     * where each token stands for one choice. */
    uint32_t num_copies;
    /* The plan pads the rows of experts: dispatch alone sets padding rows to zero. */
    uint32_t has_padding;
} EpDispatchParams;

/* The scales of rows in FP8: one for each group of EP_FP8_GROUP numbers of a row. */
typedef struct {
    const float *x; /* that of group g of row t of x is x[t * x_row + g * x_group] */
    int64_t x_row, x_group;
    float *rows; /* that of group g of row r is rows[r * row_step + g * group_step] */
    int64_t row_step, group_step;
    uint32_t num_groups;
} EpRowScales;
EP_PURE float *ep_row_scale(const EpRowScales *s, uint32_t row, uint32_t group) {
    return s->rows + row * s->row_step + group * s->group_step;
}

/* The dtype of an operation, and in FP8 its scales. They are apart from the other parameters, because only
 * the kernels of FP8 take them. An element then has one byte: comm.layout.row_bytes of a dispatch is H, while
 * the rest of the layout, and the shape, are those of the layer; and EpGemmParams.is_f16 says of what dtype
 * out and bias are. */
typedef struct {
    uint32_t dtype;    /* EpOpDtype */
    EpRowScales rows;  /* of the rows that dispatch moves */
    EpGemmScales gemm; /* of the product; in dispatch + GEMM those of its a are rows.rows */
} EpScales;

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
    /* Options of combine without a GEMM. bias: [T][H] each, for this rank's own tokens. The sum of a token
     * begins with them, in this order, and is rounded once, at its end. */
    uint32_t num_biases;
    /* LOCAL: add what the ranks return in the order of the token's last choices at them. 0: in the order of
     * the ranks. The other modes always add in the order of the choices. */
    uint32_t by_choice;
    const void *bias[EP_MAX_BIASES];
} EpCombineParams;
EP_PURE bool ep_combine_has_options(const EpCombineParams *p) { return p->num_biases || p->by_choice; }

typedef struct {
    EpDispatchParams dispatch;
    EpGemmParams gemm; /* FORWARD, on the rows that dispatch places */
    /* CTAs whose communication warps work; at least 1 */
    uint32_t num_move_blocks;
    /* The first num_tail_blocks of these only receive, and the others only send. 0: all do both. */
    uint32_t num_tail_blocks;
    /* A tile waits for all rows of its expert, not only for the row blocks in which it has rows. */
    uint32_t waits_for_expert;
} EpDispatchGemmParams;

typedef struct {
    EpGemmParams gemm; /* FORWARD; its output is the rows of combine */
    EpCombineParams combine;
    /* CTAs whose warps return rows; at least 1 */
    uint32_t num_move_blocks;
    /* CTAs whose warps add up tokens; at least 1 */
    uint32_t num_reduce_blocks;
    /* No row is returned before all rows are ready. */
    uint32_t is_serial;
    EpLowRank low; /* what is added to the product; an a of NULL: nothing */
} EpGemmCombineParams;

/* e4m3 rows, with a scale for each 128 numbers: the largest magnitude / 448, or the next power of two. UE8M0:
 * that power's exponent + 127 in one byte, four bytes of consecutive groups in a word. */
typedef enum { EP_FP8_NONE = 0, EP_FP8_SCALED = 1, EP_FP8_POW2 = 2, EP_FP8_UE8M0 = 3, EP_NUM_FP8 } EpLlFp8;
/* The halves of an operation that a launch executes. */
typedef enum { EP_LL_SEND = 1, EP_LL_RECEIVE = 2, EP_LL_BOTH = 3 } EpLlParts;

typedef struct {
    EpComm comm;
    const void *x;       /* [T][H] */
    const void *indices; /* [T][K] i32 or i64 */
    const float *weight; /* [T][K] or NULL: all weights are 1 */
    const int32_t *tag;  /* [T] or NULL, as in dispatch */
    int32_t *handle;     /* see EpLlHandle */
    void *rows;          /* masked: [L][W * max_tokens][H]; else [capacity][H] */
    int32_t *row_tag;    /* of each row, or NULL, as in dispatch */
    void *scales;        /* masked: [L][lines][scale_line] of 4 bytes, else [lines][scale_line]; or NULL */
    int32_t *counts;     /* [L] */
    uint32_t num_tokens, index_bytes;
    uint32_t scale_line; /* words of a line of scales; ep_ll_scale_lines has the number of lines */
    uint32_t is_masked, fp8, parts;
} EpLlDispatchParams;

typedef struct {
    EpComm comm;
    const void *rows; /* as in dispatch, in the layer's dtype */
    const int32_t *handle;
    void *out; /* [T][H] */
    uint32_t num_tokens, is_masked, parts;
    uint32_t fp8; /* EP_FP8_SCALED: the sums travel in FP8; else EP_FP8_NONE */
} EpLlCombineParams;

#endif /* EP_PARAMS_H */
