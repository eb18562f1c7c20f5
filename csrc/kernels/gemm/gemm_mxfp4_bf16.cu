/* gemm_mxfp4_bf16.cu - the sm_90a kernels of the grouped GEMM of bf16 rows and MXFP4 weights. */
#include "kernels/gemm/gemm_w4_rows.cuh"

EpGemmW4Kernels ep_gemm_kernels_mxfp4_bf16 = {EP_W4_ROWS(false, EP_MXFP4, false),
                                              EP_W4_ROWS(true, EP_MXFP4, false)};
