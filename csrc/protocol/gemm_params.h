/* gemm_params.h - the parameters of the grouped GEMM, and the list of the activations. Exports EpGemmParams,
 * EpGemmKind, EP_ACTIVATIONS and what follows from it, and ep_gemm_*: what follows from the parameters, the
 * same for every kernel.
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
#include <math.h>

#include "protocol/port.h"

#define EP_GEMM_MAX_COLS (1u << 24) /* limit of N and K, so that a number of tiles fits 32 bits */
/* With so few rows of an expert, as in decoding, reading the weights takes all the time. Then FORWARD has the
 * kernels for small M, which compute tiles of fewer rows (docs/experiments, E-033). */
#define EP_GEMM_FEW_ROWS 24u

typedef enum { EP_GEMM_FORWARD = 0, EP_GEMM_DGRAD = 1, EP_GEMM_WGRAD = 2, EP_NUM_GEMM_KINDS } EpGemmKind;
EP_HANDLES_ALL(EP_NUM_GEMM_KINDS, 3); /* ep_gemm_num_cols */

/* The activations, in the order of their numbers: X(NAME, name, COLUMNS, alpha).
 *   name     in Python; activations.py says what each computes, activation_math.h how
 *   COLUMNS  of the product for a column of the output. ONE. GATES_FIRST: a gate and an up, and in the
 *            weights all gates come before the ups. MIXED: a gate and an up, which alternate in the weights
 *   alpha    the constant in the sigmoid, where the activation has one; EP_ACT_GIVEN: the caller gives alpha,
 *            and the limit of gate and up
 *
 * NONE, GELU, SWIGLU and GPT_OSS are compiled into kernels of their own. The others share kernels: those with
 * gates EP_ACT_ANY_GATE, those without EP_ACT_ANY_UNGATED. A shared kernel reads from EpGemmParams, at run
 * time, which activation to compute. A new activation without gates becomes the last row. */
#define EP_ACT_GIVEN 0.0f
#define EP_ACT_OF_TANH 1.59576912f /* 2 * sqrt(2 / pi) */
#define EP_ACTIVATIONS(X)                                                                     \
    X(NONE, "none", ONE, 1.0f)                                                                \
    X(GELU, "gelu", ONE, 1.0f)                                                                \
    X(SWIGLU, "swiglu", GATES_FIRST, 1.0f)                                                    \
    X(GPT_OSS, "gpt_oss", MIXED, EP_ACT_GIVEN)                                                \
    X(SWIGLU_NUMBERS, "swiglu_numbers", GATES_FIRST, EP_ACT_GIVEN)                            \
    X(SWIGLU_PLUS_ONE, "swiglu_plus_one", GATES_FIRST, EP_ACT_GIVEN) /* up + 1, as GPT_OSS */ \
    X(GEGLU_TANH, "geglu_tanh", GATES_FIRST, EP_ACT_OF_TANH)                                  \
    X(RELU2, "relu2", ONE, 1.0f)                                                              \
    X(GELU_TANH, "gelu_tanh", ONE, EP_ACT_OF_TANH)                                            \
    X(SILU, "silu", ONE, 1.0f)
typedef enum { EP_COLUMNS_ONE, EP_COLUMNS_GATES_FIRST, EP_COLUMNS_MIXED } EpActivationColumns;
typedef enum {
#define X(NAME, name, COLUMNS, alpha) EP_ACT_##NAME,
    EP_ACTIVATIONS(X)
#undef X
        EP_NUM_ACTIVATIONS,
    EP_ACT_ANY_GATE = EP_ACT_SWIGLU_NUMBERS,
    EP_ACT_ANY_UNGATED = EP_ACT_RELU2
} EpActivation;
/* The gates are neighbours in the list, and one is mixed: kernels need two comparisons, and one. */
#define EP_ACT_IS_GATED(act) ((act) >= EP_ACT_SWIGLU && (act) < EP_ACT_ANY_UNGATED)
#define EP_ACT_IS_MIXED(act) ((act) == EP_ACT_GPT_OSS)
#define X(NAME, name, COLUMNS, alpha)                                                                  \
    EP_STATIC_ASSERT(EP_ACT_IS_GATED(EP_ACT_##NAME) == (EP_COLUMNS_##COLUMNS != EP_COLUMNS_ONE) &&     \
                         EP_ACT_IS_MIXED(EP_ACT_##NAME) == (EP_COLUMNS_##COLUMNS == EP_COLUMNS_MIXED), \
                     "gates stand from SWIGLU to RELU2, and GPT_OSS is the mixed one");
EP_ACTIVATIONS(X)
#undef X
/* X(activation): those for which kernels are compiled, and which of them computes an activation. */
#define EP_ACT_KERNELS(X) \
    X(EP_ACT_NONE) X(EP_ACT_GELU) X(EP_ACT_SWIGLU) X(EP_ACT_GPT_OSS) X(EP_ACT_ANY_GATE) X(EP_ACT_ANY_UNGATED)
#define EP_ACT_KERNEL(act) \
    ((act) < EP_ACT_ANY_GATE ? (act) : EP_ACT_IS_GATED(act) ? EP_ACT_ANY_GATE : EP_ACT_ANY_UNGATED)

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
    float alpha, limit;     /* of the activation, see ep_gemm_set_activation */
    uint8_t activation;     /* EpActivation */
    uint8_t is_f16;         /* fp16, otherwise bf16 */
    uint8_t is_portable;    /* use the portable kernel even if there is a faster one */
    uint8_t accumulates;    /* WGRAD: out is fp32, and alpha times the product is added to it */
    uint8_t saves;          /* there is `saved`, and no row_weight */
    uint8_t is_small_m;     /* FORWARD: an expert is expected to have EP_GEMM_FEW_ROWS rows or fewer */
    uint8_t clears;         /* FORWARD, DGRAD: rows of out that belong to no expert become 0 */
} EpGemmParams;

/* The scales of e4m3 numbers. a: [M][K / 128], b: [L][N / 128][K / 128], both sizes rounded up, with the
 * stride of each dimension in numbers. A stride of 0: all share a scale. */
#define EP_GEMM_SCALE_BLOCK 128u
typedef struct {
    const float *a, *b;
    uint64_t a_row, a_k, b_expert, b_n, b_k;
} EpGemmScales;
/* Whether an expert's numbers of the product are all multiplied by the same two scales. */
EP_PURE bool ep_gemm_has_one_scale(const EpGemmScales *s) { return !(s->a_row | s->a_k | s->b_n | s->b_k); }
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

EP_PURE uint32_t ep_gemm_is_gated(uint32_t activation) { return EP_ACT_IS_GATED(activation); }
/* alpha of an activation that exists, or EP_ACT_GIVEN. */
EP_PURE float ep_act_alpha(uint32_t activation) {
#define X(NAME, name, COLUMNS, alpha) \
    if (activation == EP_ACT_##NAME) return alpha;
    EP_ACTIVATIONS(X)
#undef X
    return 1.0f;
}
EP_PURE bool ep_act_has_numbers(uint32_t activation) { return ep_act_alpha(activation) == EP_ACT_GIVEN; }
/* Replace the numbers that a caller gives for an activation that has none. */
EP_PURE void ep_act_numbers(uint32_t activation, float *alpha, float *limit) {
    if (ep_act_has_numbers(activation)) return;
    *alpha = ep_act_alpha(activation);
    *limit = INFINITY;
}
/* Whether the activation exists, and the caller's numbers, if it has any, are valid: a finite alpha and a
 * positive limit. */
EP_PURE bool ep_gemm_is_activation(uint32_t activation, float alpha, float limit) {
    return activation < EP_NUM_ACTIVATIONS &&
           (!ep_act_has_numbers(activation) || (alpha - alpha == 0 && limit > 0));
}
/* Set an activation that exists. NONE keeps alpha, which WGRAD reads. */
EP_PURE void ep_gemm_set_activation(EpGemmParams *p, uint32_t activation, float alpha, float limit) {
    p->activation = (uint8_t)activation;
    p->cols_per_out = 1 + ep_gemm_is_gated(activation);
    p->alpha = alpha;
    p->limit = limit;
    if (activation != EP_ACT_NONE) ep_act_numbers(activation, &p->alpha, &p->limit);
}
/* num_cols: columns of the product, which is divided into tiles. out_cols: columns that are written; half as
 * many if the activation is gated. */
EP_PURE uint32_t ep_gemm_num_cols(const EpGemmParams *p) { return p->kind == EP_GEMM_FORWARD ? p->n : p->k; }
EP_PURE uint32_t ep_gemm_out_cols(const EpGemmParams *p) {
    return ep_gemm_num_cols(p) >> (p->cols_per_out >= 2);
}

#endif /* EP_GEMM_PARAMS_H */
