/* gemm.h - a grouped GEMM as its launcher sees it.
 *
 * Rows of expert after expert, weights [L][N][K], sizes on the device:
 *   FORWARD  out[r] = act(a[r] * w[e(r)]^T)       a [M][K], b = w, out [M][N] (gated: [M][N / 2])
 *   DGRAD    out[r] = a[r] * w[e(r)]              a [M][N], b = w, out [M][K]
 *   WGRAD    out[e] = sum of a[r]^T b[r] over e's rows   a [M][N], b [M][K], out [L][N][K]
 * Products are of bf16 or fp16 numbers, sums are fp32.  Rows at and behind offsets[L] are not touched. */
#ifndef EP_GEMM_H
#define EP_GEMM_H
#include "protocol/port.h"

typedef enum { EP_GEMM_FORWARD = 0, EP_GEMM_DGRAD = 1, EP_GEMM_WGRAD = 2 } EpGemmKind;
/* SWIGLU: gate rows of w first, then up rows.  GPT_OSS: interleaved, clamped, with two numbers.  See reference.py's activate. */
typedef enum { EP_ACT_NONE = 0, EP_ACT_GELU = 1, EP_ACT_SWIGLU = 2, EP_ACT_GPT_OSS = 3 } EpActivation;

typedef struct {
    const void *a, *b;
    void *out;
    const int32_t *offsets;  /* [L + 1] first row of each expert */
    const void *bias;        /* FORWARD: [L][N] or NULL */
    const float *row_weight; /* FORWARD: [M] or NULL; multiplies what the activation gave */
    uint64_t *tile_counter;  /* one number, 0 before and behind: tiles that were handed out */
    uint64_t limit_ns;       /* see ep_mbar_wait */
    uint32_t num_rows;       /* M: rows that a and out have */
    uint32_t num_experts;    /* L */
    uint32_t n, k;           /* N, K of the weights: multiples of 16 */
    uint32_t kind;           /* EpGemmKind */
    uint32_t activation;     /* EpActivation */
    float alpha, limit;      /* of GPT_OSS: finite, and positive */
    uint32_t is_f16;         /* fp16, else bf16 */
    uint32_t is_portable;    /* use the kernel for any GPU, also where there is a better one */
} EpGemmParams;

#ifdef __cplusplus
extern "C" {
#endif
/* Launch on the current device; a cudaError_t. */
int ep_launch_gemm(const EpGemmParams *p, void *stream);
/* Whether the current device has the kernels for Hopper, the megakernels too; a cudaError_t. */
int ep_has_hopper(uint32_t *has);
#ifdef __cplusplus
}
#endif

/* Whether there is such an activation, with such numbers. */
EP_PURE bool ep_gemm_is_activation(uint32_t activation, float alpha, float limit) {
    return activation < EP_ACT_GPT_OSS || (activation == EP_ACT_GPT_OSS && alpha - alpha == 0 && limit > 0);
}
EP_PURE uint32_t ep_gemm_is_gated(uint32_t activation) { return activation >= EP_ACT_SWIGLU; }
/* Columns that a tile of the product counts, and columns that are written. */
EP_PURE uint32_t ep_gemm_num_cols(const EpGemmParams *p) { return p->kind == EP_GEMM_FORWARD ? p->n : p->k; }
EP_PURE uint32_t ep_gemm_out_cols(const EpGemmParams *p) {
    return ep_gemm_num_cols(p) >> ep_gemm_is_gated(p->activation);
}

#endif /* EP_GEMM_H */
