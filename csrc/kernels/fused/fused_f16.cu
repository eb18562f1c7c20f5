/* fused_f16.cu - the megakernels in f16; a file of their own, to compile in parallel. */
#include "kernels/fused/fused.cuh"

int ep_launch_dispatch_gemm_f16(const EpDispatchGemmParams *p, cudaStream_t stream) {
    return (int)launch_dispatch_gemm_of<true>(p, stream);
}
int ep_launch_gemm_combine_f16(const EpGemmCombineParams *p, cudaStream_t stream) {
    return (int)launch_gemm_combine_of<true>(p, stream);
}
int ep_preload_fused_f16(void) { return (int)preload_fused<true>(); }
