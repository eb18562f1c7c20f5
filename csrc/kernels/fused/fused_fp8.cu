/* fused_fp8.cu - the megakernels dispatch + GEMM in FP8, with results in bf16 and in fp16. */
#include "kernels/fused/fused.cuh"

#define EP_ROWS(F16)                      \
    EP_MEGA_FP8_ROW(EP_ACT_NONE, F16)     \
    EP_MEGA_FP8_ROW(EP_ACT_GELU, F16)     \
    EP_MEGA_FP8_ROW(EP_ACT_SWIGLU, F16)   \
    EP_MEGA_FP8_ROW(EP_ACT_GPT_OSS, F16)  \
    EP_MEGA_FP8_ROW(EP_ACT_ANY_GATE, F16) \
    EP_MEGA_FP8_ROW(EP_ACT_ANY_UNGATED, F16)
EpClusterKernel ep_mega_kernels_fp8_bf16[] = {EP_ROWS(false) EP_MEGA_COMBINE_FP8_ROW(false){}};
EpClusterKernel ep_mega_kernels_fp8_f16[] = {EP_ROWS(true) EP_MEGA_COMBINE_FP8_ROW(true){}};
