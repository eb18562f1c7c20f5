/* gemm_params.h - the parameters of the grouped GEMM. Exports EpGemmParams, EpGemmKind, EpActivation and
 * ep_gemm_*: what follows from the parameters, the same for every kernel.
 *
 * The rows are grouped by expert, the weights are [L][N][K], and the groups' sizes are on the device:
 *   FORWARD  out[r] = act(a[r] * w[e(r)]^T)       a [M][K], b = w, out [M][N] (gated: [M][N / 2])
 *   DGRAD    out[r] = a[r] * w[e(r)]              a [M][N], b = w, out [M][K]
 *   WGRAD    out[e] = sum of a[r]^T b[r] over e's rows   a [M][N], b [M][K], out [L][N][K]
 *
 * Inputs are bf16 or fp16, sums are fp32. out has the dtype of the inputs; WGRAD can also add to an out of
 * fp32. FORWARD also takes e4m3 with scales: the products of each 128 values of k are added up, and their sum
 * is multiplied by a scale of the row and a scale of the block of weights.
 * Invariant: rows from offsets[L] on are neither used nor written. */
#ifndef EP_GEMM_PARAMS_H
#define EP_GEMM_PARAMS_H
#include <math.h>

#include "protocol/port.h"

#define EP_GEMM_MAX_COLS (1u << 24) /* limit of N and K, so that a number of tiles fits 32 bits */

typedef enum { EP_GEMM_FORWARD = 0, EP_GEMM_DGRAD = 1, EP_GEMM_WGRAD = 2, EP_NUM_GEMM_KINDS } EpGemmKind;
EP_HANDLES_ALL(EP_NUM_GEMM_KINDS, 3); /* ep_gemm_num_cols */

/* The activations; see activations.py. A gated one computes a column of the output from two rows of the
 * weights, a gate and an up. For GPT_OSS, gates and ups alternate in the weights; for the others all gates
 * come first.
 *
 * NONE, GELU, SWIGLU and GPT_OSS are compiled into kernels of their own. The other gated ones share kernels
 * (EP_ACT_ANY_GATE), and so do RELU2, GELU_TANH and SILU (EP_ACT_ANY_UNGATED). Those kernels read at run time
 * which activation to compute, from EpGemmParams. */
typedef enum {
    EP_ACT_NONE = 0,
    EP_ACT_GELU = 1,
    EP_ACT_SWIGLU = 2,
    EP_ACT_GPT_OSS = 3,
    EP_ACT_SWIGLU_NUMBERS = 4,  /* SWIGLU with alpha and limit */
    EP_ACT_SWIGLU_PLUS_ONE = 5, /* the same, with up + 1: the function of GPT_OSS */
    EP_ACT_GEGLU_TANH = 6,
    EP_ACT_RELU2 = 7,
    EP_ACT_GELU_TANH = 8,
    EP_ACT_SILU = 9,
    EP_NUM_ACTIVATIONS,
    EP_ACT_ANY_GATE = EP_ACT_SWIGLU_NUMBERS,
    EP_ACT_ANY_UNGATED = EP_ACT_RELU2
} EpActivation;
EP_HANDLES_ALL(EP_NUM_ACTIVATIONS, 10); /* the two macros below, and ep_gemm_* at the end of this file */
#define EP_ACT_IS_GATED(act) ((act) >= EP_ACT_SWIGLU && (act) <= EP_ACT_GEGLU_TANH)
/* The activation for which the kernels were compiled. */
#define EP_ACT_KERNEL(act) \
    ((act) <= EP_ACT_GPT_OSS ? (act) : (act) <= EP_ACT_GEGLU_TANH ? EP_ACT_ANY_GATE : EP_ACT_ANY_UNGATED)

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
EP_PURE uint32_t ep_gemm_num_blocks(uint32_t size) {
    return size / EP_GEMM_SCALE_BLOCK + (size % EP_GEMM_SCALE_BLOCK != 0);
}

EP_PURE uint32_t ep_gemm_is_gated(uint32_t activation) { return EP_ACT_IS_GATED(activation); }
/* Whether the activation exists and its numbers are valid: GPT_OSS, SWIGLU_NUMBERS and SWIGLU_PLUS_ONE have a
 * finite alpha and a positive limit. The others have none, and ignore them. */
EP_PURE bool ep_gemm_is_activation(uint32_t activation, float alpha, float limit) {
    const bool has_numbers = activation >= EP_ACT_GPT_OSS && activation <= EP_ACT_SWIGLU_PLUS_ONE;
    return activation <= EP_ACT_SILU && (!has_numbers || (alpha - alpha == 0 && limit > 0));
}
/* Set an activation that exists. A GELU with tanh is x * sigmoid(alpha * (x + 0.044715 * x^3)), so kernels
 * compute it as they compute SiLU. */
EP_PURE void ep_gemm_set_activation(EpGemmParams *p, uint32_t activation, float alpha, float limit) {
    const bool is_tanh = activation == EP_ACT_GEGLU_TANH || activation == EP_ACT_GELU_TANH;
    p->activation = (uint8_t)activation;
    p->cols_per_out = 1 + ep_gemm_is_gated(activation);
    p->alpha = is_tanh ? 1.59576912f : activation == EP_ACT_SILU ? 1.0f : alpha; /* 2 * sqrt(2 / pi) */
    p->limit = is_tanh ? INFINITY : limit;
}
/* num_cols: columns of the product, which is divided into tiles. out_cols: columns that are written; half as
 * many if the activation is gated. */
EP_PURE uint32_t ep_gemm_num_cols(const EpGemmParams *p) { return p->kind == EP_GEMM_FORWARD ? p->n : p->k; }
EP_PURE uint32_t ep_gemm_out_cols(const EpGemmParams *p) {
    return ep_gemm_num_cols(p) >> (p->cols_per_out >= 2);
}

#endif /* EP_GEMM_PARAMS_H */
