/* gemm_low_rank_f16.cu - the kernels of the grouped GEMM in f16 that add a product of low rank; a file of
 * its own, to compile in parallel. */
#include "kernels/gemm/gemm_hopper.cuh"

#define EP_ROW(KIND, BN, ACT) gemm_low_rank_row<KIND, BN, ACT, true>(),
EpClusterKernel ep_gemm_low_rank_kernels_f16[] = {EP_GEMM_LOW_RANK_VARIANTS(EP_ROW){}};
