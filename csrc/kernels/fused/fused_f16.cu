/* fused_f16.cu - the megakernels in fp16; a file of their own, to compile in parallel. */
#include "kernels/fused/fused.cuh"

#define EP_ROW(OP, KERNEL, BN, ACT) EP_MEGA_ROW(OP, KERNEL, EP_GEMM_FORWARD, BN, ACT, true)
#define EP_BACKWARD_ROW(OP, KERNEL, BN) EP_MEGA_ROW(OP, KERNEL, EP_GEMM_DGRAD, BN, EP_ACT_NONE, true)
EpClusterKernel ep_mega_kernels_f16[] = {EP_MEGA_VARIANTS(EP_ROW)
                                             EP_MEGA_BACKWARD_VARIANTS(EP_BACKWARD_ROW){}};

#define EP_SAVE_ROW(ACT) EP_MEGA_SAVE_ROW(ACT, true)
EpClusterKernel ep_mega_save_kernels_f16[] = {EP_MEGA_SAVE_VARIANTS(EP_SAVE_ROW){}};

EpClusterKernel ep_mega_low_rank_kernels_f16[] = {EP_MEGA_LOW_RANK_ROW(EP_GEMM_FORWARD, true)
                                                      EP_MEGA_LOW_RANK_ROW(EP_GEMM_DGRAD, true){}};
