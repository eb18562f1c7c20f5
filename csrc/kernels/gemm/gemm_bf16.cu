/* gemm_bf16.cu - the sm_90a kernels of the grouped GEMM in bf16; a separate file, to compile in parallel. */
#include "kernels/gemm/gemm_hopper.cuh"

#define EP_ROW(KIND, BN, ACT) gemm_row<KIND, BN, ACT, false>(),
EpClusterKernel ep_gemm_kernels_bf16[] = {EP_GEMM_VARIANTS(EP_ROW) EP_GEMM_SMALL_M_VARIANTS(EP_ROW){}};
