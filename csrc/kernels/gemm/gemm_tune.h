/* gemm_tune.h - the instances of the grouped GEMM's kernel, and the choice among them for a shape. */
#ifndef EP_GEMM_TUNE_H
#define EP_GEMM_TUNE_H
#include "protocol/gemm_params.h"

/* X(kind, columns of a tile, activation): all instances for sm_90a, each for bf16 and fp16. */
#define EP_GEMM_VARIANTS(X)                     \
    X(EP_GEMM_FORWARD, 256, EP_ACT_NONE)        \
    X(EP_GEMM_FORWARD, 192, EP_ACT_NONE)        \
    X(EP_GEMM_FORWARD, 128, EP_ACT_NONE)        \
    X(EP_GEMM_FORWARD, 256, EP_ACT_GELU)        \
    X(EP_GEMM_FORWARD, 128, EP_ACT_GELU)        \
    X(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU)      \
    X(EP_GEMM_FORWARD, 128, EP_ACT_SWIGLU)      \
    X(EP_GEMM_FORWARD, 256, EP_ACT_GPT_OSS)     \
    X(EP_GEMM_FORWARD, 128, EP_ACT_GPT_OSS)     \
    X(EP_GEMM_FORWARD, 256, EP_ACT_ANY_GATE)    \
    X(EP_GEMM_FORWARD, 128, EP_ACT_ANY_GATE)    \
    X(EP_GEMM_FORWARD, 256, EP_ACT_ANY_UNGATED) \
    X(EP_GEMM_FORWARD, 128, EP_ACT_ANY_UNGATED) \
    X(EP_GEMM_DGRAD, 256, EP_ACT_NONE)          \
    X(EP_GEMM_DGRAD, 192, EP_ACT_NONE)          \
    X(EP_GEMM_DGRAD, 128, EP_ACT_NONE)          \
    X(EP_GEMM_WGRAD, 256, EP_ACT_NONE)          \
    X(EP_GEMM_WGRAD, 192, EP_ACT_NONE)          \
    X(EP_GEMM_WGRAD, 128, EP_ACT_NONE)

/* Small M: with few tokens per expert, loading the weights takes most of the time. So a pipeline stage has
 * 512 bytes of each of 64 weight rows, and tiles have 32 rows of tokens. More tokens per expert: correct but
 * slower. */
#define EP_GEMM_SMALL_M_VARIANTS(X)         \
    X(EP_GEMM_FORWARD, 64, EP_ACT_NONE)     \
    X(EP_GEMM_FORWARD, 64, EP_ACT_GELU)     \
    X(EP_GEMM_FORWARD, 64, EP_ACT_SWIGLU)   \
    X(EP_GEMM_FORWARD, 64, EP_ACT_GPT_OSS)  \
    X(EP_GEMM_FORWARD, 64, EP_ACT_ANY_GATE) \
    X(EP_GEMM_FORWARD, 64, EP_ACT_ANY_UNGATED)
/* Those of a training step, which also save the product. */
#define EP_GEMM_SAVE_VARIANTS(X)                \
    X(EP_GEMM_FORWARD, 256, EP_ACT_GELU)        \
    X(EP_GEMM_FORWARD, 64, EP_ACT_GELU)         \
    X(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU)      \
    X(EP_GEMM_FORWARD, 64, EP_ACT_SWIGLU)       \
    X(EP_GEMM_FORWARD, 256, EP_ACT_GPT_OSS)     \
    X(EP_GEMM_FORWARD, 64, EP_ACT_GPT_OSS)      \
    X(EP_GEMM_FORWARD, 256, EP_ACT_ANY_GATE)    \
    X(EP_GEMM_FORWARD, 64, EP_ACT_ANY_GATE)     \
    X(EP_GEMM_FORWARD, 256, EP_ACT_ANY_UNGATED) \
    X(EP_GEMM_FORWARD, 64, EP_ACT_ANY_UNGATED)
/* Those that add a product of low rank. With an activation they can also save the product. */
#define EP_GEMM_LOW_RANK_VARIANTS(X)            \
    X(EP_GEMM_FORWARD, 256, EP_ACT_NONE)        \
    X(EP_GEMM_FORWARD, 64, EP_ACT_NONE)         \
    X(EP_GEMM_FORWARD, 256, EP_ACT_GELU)        \
    X(EP_GEMM_FORWARD, 64, EP_ACT_GELU)         \
    X(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU)      \
    X(EP_GEMM_FORWARD, 64, EP_ACT_SWIGLU)       \
    X(EP_GEMM_FORWARD, 256, EP_ACT_GPT_OSS)     \
    X(EP_GEMM_FORWARD, 64, EP_ACT_GPT_OSS)      \
    X(EP_GEMM_FORWARD, 256, EP_ACT_ANY_GATE)    \
    X(EP_GEMM_FORWARD, 64, EP_ACT_ANY_GATE)     \
    X(EP_GEMM_FORWARD, 256, EP_ACT_ANY_UNGATED) \
    X(EP_GEMM_FORWARD, 64, EP_ACT_ANY_UNGATED)  \
    X(EP_GEMM_DGRAD, 256, EP_ACT_NONE)

/* The number of columns of a tile. A narrower tile reads more per product, so it pays only if it avoids
 * computing columns that do not exist. On an H200, a column in tiles of 192 takes 0.96 to 1.05 of the time
 * of a column in tiles of 256, and in tiles of 128 it takes 1.2 to 1.3 (docs/experiments, E-013). The weights
 * here are 1.05 and 1.25. */
EP_PURE uint32_t ep_gemm_tile_cols(const EpGemmParams *p) {
    const uint32_t cols = ep_gemm_num_cols(p), has_192 = p->activation.kind == EP_ACT_NONE;
    const uint64_t at_256 = (uint64_t)(cols + 255) / 256 * 256 * 100;
    const uint64_t at_192 = (uint64_t)(cols + 191) / 192 * 192 * 105;
    const uint64_t at_128 = (uint64_t)(cols + 127) / 128 * 128 * 125;
    if (p->saves) return 256; /* other tiles would pay for few columns only */
    return has_192 && at_192 < at_256 && at_192 <= at_128 ? 192 : at_128 < at_256 ? 128 : 256;
}
/* The columns of a pass of a product with few columns (gemm_narrow.cuh), or 0 if the product is not one. own:
 * NULL, or the mixture, which may have more columns than one pass. Few rows seldom have more than four
 * adapters, and narrow passes leave room for more stages. More than 64 columns of many rows are faster in the
 * kernels for any number of columns. */
EP_PURE uint32_t ep_gemm_narrow_cols(const EpGemmParams *p, const EpOwnColumns *own) {
    const uint32_t cols = ep_gemm_num_cols(p);
    const bool is_few = p->is_small_m;
    if (p->kind == EP_GEMM_WGRAD || p->activation.kind || p->bias || p->row_weight) return 0;
    if (!own && cols > (is_few ? 128 : 64)) return 0;
    return cols <= 16 ? 16 : cols <= 32 ? 32 : cols <= 64 || (own && is_few) ? 64 : 128;
}
#endif /* EP_GEMM_TUNE_H */
