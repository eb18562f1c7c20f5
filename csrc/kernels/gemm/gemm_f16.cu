/* gemm_f16.cu - the sm_90a kernels of the grouped GEMM in fp16; a separate file, to compile in parallel. */
#include "kernels/gemm/gemm_hopper.cuh"

#define EP_ROW(KIND, BN, ACT) gemm_row<KIND, BN, ACT, true>(),
EpClusterKernel ep_gemm_kernels_f16[] = {EP_GEMM_VARIANTS(EP_ROW) EP_GEMM_SMALL_M_VARIANTS(EP_ROW){}};
