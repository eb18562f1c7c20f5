/* fused_bf16.cu - the megakernels in bf16; a file of their own, to compile in parallel. */
#include "kernels/fused/fused.cuh"

int ep_launch_dispatch_gemm_bf16(const EpDispatchGemmParams *p, cudaStream_t stream) {
    return (int)launch_dispatch_gemm_of<false>(p, stream);
}
int ep_launch_gemm_combine_bf16(const EpGemmCombineParams *p, cudaStream_t stream) {
    return (int)launch_gemm_combine_of<false>(p, stream);
}
int ep_preload_fused_bf16(void) { return (int)preload_fused<false>(); }
