/* gemm_params.h - the parameters of the grouped GEMM. Exports EpGemmParams, EpGemmKind, EpActivation and
 * ep_gemm_*: what follows from the parameters, the same for every kernel.
 *
 * The rows are grouped by expert, the weights are [L][N][K], and the groups' sizes are on the device:
 *   FORWARD  out[r] = act(a[r] * w[e(r)]^T)       a [M][K], b = w, out [M][N] (gated: [M][N / 2])
 *   DGRAD    out[r] = a[r] * w[e(r)]              a [M][N], b = w, out [M][K]
 *   WGRAD    out[e] = sum of a[r]^T b[r] over e's rows   a [M][N], b [M][K], out [L][N][K]
 *
 * Inputs are bf16 or fp16, sums are fp32. Invariant: rows from offsets[L] on are neither used nor written. */
#ifndef EP_GEMM_PARAMS_H
#define EP_GEMM_PARAMS_H
#include "protocol/port.h"

typedef enum { EP_GEMM_FORWARD = 0, EP_GEMM_DGRAD = 1, EP_GEMM_WGRAD = 2 } EpGemmKind;
/* SWIGLU: all gate rows of w, then all up rows. GPT_OSS: interleaved and clamped, with two parameters. See
 * reference.py's activate. */
typedef enum { EP_ACT_NONE = 0, EP_ACT_GELU = 1, EP_ACT_SWIGLU = 2, EP_ACT_GPT_OSS = 3 } EpActivation;

typedef struct {
    const void *a, *b;
    void *out;
    const int32_t *offsets;  /* [L + 1] first row of each expert */
    const void *bias;        /* FORWARD: [L][N] or NULL */
    const float *row_weight; /* FORWARD: [M] or NULL; multiplies the result of the activation */
    uint64_t *tile_counter;  /* one number: tiles drawn; 0 before and after a launch */
    uint64_t limit_ns;       /* limit of waits within the kernel; see ep_mbar_wait */
    uint32_t num_rows;       /* M: rows of a and out */
    uint32_t num_experts;    /* L */
    uint32_t n, k;           /* N, K of the weights: multiples of 16 */
    uint32_t kind;           /* EpGemmKind */
    uint32_t activation;     /* EpActivation */
    float alpha, limit;      /* of GPT_OSS; alpha is finite, limit is positive */
    uint32_t is_f16;         /* fp16, otherwise bf16 */
    uint32_t is_portable;    /* use the portable kernel even if there is a faster one */
} EpGemmParams;

/* Whether the activation exists and its parameters are valid. */
EP_PURE bool ep_gemm_is_activation(uint32_t activation, float alpha, float limit) {
    return activation < EP_ACT_GPT_OSS || (activation == EP_ACT_GPT_OSS && alpha - alpha == 0 && limit > 0);
}
EP_PURE uint32_t ep_gemm_is_gated(uint32_t activation) { return activation >= EP_ACT_SWIGLU; }
/* num_cols: columns of the product, which is divided into tiles. out_cols: columns that are written; half as
 * many if the activation is gated. */
EP_PURE uint32_t ep_gemm_num_cols(const EpGemmParams *p) { return p->kind == EP_GEMM_FORWARD ? p->n : p->k; }
EP_PURE uint32_t ep_gemm_out_cols(const EpGemmParams *p) {
    return ep_gemm_num_cols(p) >> ep_gemm_is_gated(p->activation);
}

#endif /* EP_GEMM_PARAMS_H */
