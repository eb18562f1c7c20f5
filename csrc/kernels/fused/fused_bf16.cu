/* fused_bf16.cu - the megakernels in bf16; a file of their own, to compile in parallel. */
#include "kernels/fused/fused.cuh"

#define EP_ROW(OP, KERNEL, BN, ACT) EP_MEGA_ROW(OP, KERNEL, BN, ACT, false)
EpClusterKernel ep_mega_kernels_bf16[] = {EP_MEGA_VARIANTS(EP_ROW){}};
