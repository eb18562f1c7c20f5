/* gemm_int4_f16.cu - the sm_90a kernels of the grouped GEMM of fp16 rows and INT4 weights. */
#include "kernels/gemm/gemm_w4_rows.cuh"

EpGemmW4Kernels ep_gemm_kernels_int4_f16 = {EP_W4_ROWS(false, EP_INT4, true),
                                            EP_W4_ROWS(true, EP_INT4, true)};
