/* gemm_save_f16.cu - the kernels of the grouped GEMM in fp16 that save the product for a backward; a file of
 * its own, to compile in parallel. */
#include "kernels/gemm/gemm_hopper.cuh"

#define EP_ROW(KIND, BN, ACT) gemm_save_row<BN, ACT, true>(),
EpClusterKernel ep_gemm_save_kernels_f16[] = {EP_GEMM_SAVE_VARIANTS(EP_ROW){}};
