/* gemm_params.h - the parameters of the grouped GEMM. Exports EpGemmParams, EpGemmKind, and ep_gemm_*: what
 * follows from the parameters, the same for every kernel.
 *
 * The rows are grouped by expert, the weights are [L][N][K], and the groups' sizes are on the device:
 *   FORWARD  out[r] = act(a[r] * w[e(r)]^T)       a [M][K], b = w, out [M][N] (gated: [M][N / 2])
 *   DGRAD    out[r] = a[r] * w[e(r)]              a [M][N], b = w, out [M][K]
 *   WGRAD    out[e] = sum of a[r]^T b[r] over e's rows   a [M][N], b [M][K], out [L][N][K]
 *
 * Inputs are bf16 or fp16, sums are fp32. out has the dtype of the inputs; WGRAD can also add to an out of
 * fp32. FORWARD also takes e4m3 with scales: the products of each 128 values of k are added up, and their sum
 * is multiplied by a scale of the row and a scale of the block of weights.
 * Invariant: rows from offsets[L] on are not used, and not written unless p->clears. */
#ifndef EP_GEMM_PARAMS_H
#define EP_GEMM_PARAMS_H
#include "protocol/activation.h"

#define EP_GEMM_MAX_COLS (1u << 24) /* limit of N and K, so that a number of tiles fits 32 bits */
/* With so few rows of an expert, as in decoding, reading the weights takes all the time. Then FORWARD has the
 * kernels for small M, which compute tiles of fewer rows (docs/experiments, E-033). */
#define EP_GEMM_FEW_ROWS 24u

typedef enum { EP_GEMM_FORWARD = 0, EP_GEMM_DGRAD = 1, EP_GEMM_WGRAD = 2, EP_NUM_GEMM_KINDS } EpGemmKind;
EP_HANDLES_ALL(EP_NUM_GEMM_KINDS, 3); /* ep_gemm_num_cols */

typedef struct {
    const void *a, *b;
    void *out;
    const int32_t *offsets; /* [L + 1] first row of each expert */
    const void *bias;       /* FORWARD: [L][N] or NULL */
    union {
        const float *row_weight; /* FORWARD: [M] or NULL; multiplies the result of the activation */
        /* FORWARD with an activation, in a training step: [M][N]; the product with its bias, rounded, for the
         * backward. out has the bits that it has without: its activation is that of the sums in float32. */
        void *saved;
    };
    uint64_t *tile_counter; /* one number: tiles drawn; 0 before and after a launch */
    uint64_t limit_ns;      /* limit of waits within the kernel; see ep_mbar_wait */
    uint32_t num_rows;      /* M: rows of a and out */
    uint32_t num_experts;   /* L */
    uint32_t n, k;          /* N, K of the weights: multiples of 16 */
    uint32_t kind;          /* EpGemmKind */
    uint32_t cols_per_out;  /* columns of the product for a column of out: 2 if gated, otherwise 1 */
    EpActivation activation;
    float scale;         /* WGRAD that accumulates: multiplies the product */
    uint8_t is_f16;      /* fp16, otherwise bf16 */
    uint8_t is_portable; /* use the portable kernel even if there is a faster one */
    uint8_t accumulates; /* WGRAD: out is fp32, and scale times the product is added to it */
    uint8_t saves;       /* there is `saved`, and no row_weight */
    uint8_t is_small_m;  /* FORWARD: an expert is expected to have EP_GEMM_FEW_ROWS rows or fewer */
    uint8_t clears;      /* FORWARD, DGRAD: rows of out that belong to no expert become 0 */
} EpGemmParams;

/* The scales of e4m3 numbers. a: [M][K / 128], b: [L][N / 128][K / 128], both sizes rounded up, with the
 * stride of each dimension in numbers. A stride of 0: all share a scale. */
#define EP_GEMM_SCALE_BLOCK 128u
typedef struct {
    const float *a, *b;
    uint64_t a_row, a_k, b_expert, b_n, b_k;
} EpGemmScales;
/* Whether a row has one scale, and an expert's weights have one. Then sums of products need no scales. */
EP_PURE bool ep_gemm_scales_sums(const EpGemmScales *s) { return !(s->a_k | s->b_n | s->b_k); }
/* A GEMM of e4m3. gemm.is_f16 is the dtype of out and bias; gemm.kind is FORWARD. gemm is the first member:
 * an epilogue that knows its address also finds the scales. */
typedef struct {
    EpGemmParams gemm;
    EpGemmScales scales;
} EpGemmFp8Params;

/* A mixture of adapters: a product of rows with the first factors of all adapters, without an activation. It
 * has of_adapter columns for each of them, a multiple of 8. A row keeps those of its own adapter, whose
 * number is its tag, and gets zeros in the others. A row with another number keeps none. */
typedef struct {
    const int32_t *row_tag; /* [M]; NULL: every row keeps all columns */
    uint32_t of_adapter;
} EpOwnColumns;
/* The first of a row's own columns, or num_cols if it has none. */
EP_FN uint32_t ep_first_own_column(const EpOwnColumns *own, uint64_t row, uint32_t num_cols) {
    const int32_t tag = own->row_tag[row];
    const uint64_t first = (uint64_t)(uint32_t)tag * own->of_adapter;
    return tag < 0 || first >= num_cols ? num_cols : (uint32_t)first;
}
/* A product of low rank, which FORWARD and DGRAD add to their sums before anything is rounded. Its b has the
 * place of the weights, and r that of the contraction:
 *   FORWARD  out[r] = act(.. + a[r] * b[e(r)]^T)   a [M][R], b [L][N][R]
 *   DGRAD    out[r] = .. + a[r] * b[e(r)]          a [M][R], b [L][R][K] */
typedef struct {
    const void *a, *b;
    uint32_t r; /* R: a multiple of 16 on CUDA */
} EpLowRank;
typedef struct {
    EpGemmParams gemm;
    EpLowRank low;
} EpGemmLowRankParams;
/* A GEMM with few columns, for which Hopper has kernels of its own. */
typedef struct {
    EpGemmParams gemm;
    EpOwnColumns own;
} EpGemmNarrowParams;

/* The product of low rank by itself: its operands have these parameters' places. */
EP_PURE EpGemmParams ep_gemm_low_rank(const EpGemmParams *p, const EpLowRank *low) {
    EpGemmParams q = *p;
    q.a = low->a;
    q.b = low->b;
    *(p->kind == EP_GEMM_FORWARD ? &q.k : &q.n) = low->r;
    return q;
}

EP_PURE uint32_t ep_gemm_num_blocks(uint32_t size) {
    return size / EP_GEMM_SCALE_BLOCK + (size % EP_GEMM_SCALE_BLOCK != 0);
}

/* Set an activation that exists. */
EP_PURE void ep_gemm_set_activation(EpGemmParams *p, EpActivation activation) {
    p->activation = ep_act_with_numbers(activation);
    p->cols_per_out = EP_ACT_IS_GATED(activation.kind) ? 2 : 1;
}
/* num_cols: columns of the product, which is divided into tiles. out_cols: columns that are written; half as
 * many if the activation is gated. */
EP_PURE uint32_t ep_gemm_num_cols(const EpGemmParams *p) { return p->kind == EP_GEMM_FORWARD ? p->n : p->k; }
EP_PURE uint32_t ep_gemm_out_cols(const EpGemmParams *p) {
    return ep_gemm_num_cols(p) >> (p->cols_per_out >= 2);
}

#endif /* EP_GEMM_PARAMS_H */
