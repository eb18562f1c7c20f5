/* fused_params.h - the parameters of the megakernels of FP8: those of the others, and the scales.
 *
 * Exports EpMegaFp8Params and EpCombineFp8Params, and the EP_OP_WORD of each kernel. A kernel of the layer's
 * dtype finds its parameters at the same address, so the launcher fills in one struct for both. */
#ifndef EP_FUSED_PARAMS_H
#define EP_FUSED_PARAMS_H
#include "protocol/params.h"

static constexpr uint32_t EP_FP8_DISPATCH_GEMM = EP_OP_WORD(EP_OP_DISPATCH_GEMM, EP_IN_FP8);
static constexpr uint32_t EP_FP8_GEMM_COMBINE = EP_OP_WORD(EP_OP_GEMM_COMBINE, EP_IN_FP8);

struct EpMegaFp8Params : EpDispatchGemmParams {
    EpRowScales row_scales;
    EpGemmScales scales;
};
struct EpCombineFp8Params : EpGemmCombineParams {
    EpGemmScales scales;
};

#endif /* EP_FUSED_PARAMS_H */
