/* gemm_w4.h - the kernels of the grouped GEMM with weights of 4 bits: of a format and a dtype, two rows of a
 * table for each activation. */
#ifndef EP_GEMM_W4_H
#define EP_GEMM_W4_H
#include "cuda/cluster_launch.h"

/* [0]: for small M, [1]: for large M. The last row of each has no function. */
typedef EpClusterKernel EpGemmW4Kernels[2][7];
extern EpGemmW4Kernels ep_gemm_kernels_mxfp4_bf16, ep_gemm_kernels_mxfp4_f16;
extern EpGemmW4Kernels ep_gemm_kernels_int4_bf16, ep_gemm_kernels_int4_f16;

#endif /* EP_GEMM_W4_H */
