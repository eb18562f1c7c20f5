/* transpose.cu - the launchers of the kernels that quantise and transpose. */
#include "kernels/quantize/transpose.cuh"

#include "cuda/capabilities.h"
#include "kernels/launch.h"

extern "C" int ep_launch_transpose(const EpTransposeParams *p, void *stream) {
    const uint64_t num_ctas = ep_transpose_num_ctas(p);
    if (num_ctas > INT32_MAX) return (int)cudaErrorInvalidConfiguration;
    expert_scales_kernel<<<p->num_experts * ep_gemm_num_blocks(p->num_cols), EP_EXPERT_SCALES_THREADS, 0,
                           (cudaStream_t)stream>>>(*p);
    transpose_e4m3_kernel<<<(uint32_t)num_ctas, EP_SHIFT_THREADS, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}

extern "C" int ep_launch_quantize_weight(const EpQuantizeWeightParams *p, void *stream) {
    const uint64_t num_ctas = ep_quantize_weight_num_ctas(p);
    if (num_ctas > INT32_MAX) return (int)cudaErrorInvalidConfiguration;
    EpQuantizeWeightKernel *const kernel = ep_quantize_weight_kernel(p->dtype);
    kernel<<<(uint32_t)num_ctas, 32 * ep_quantize_weight_num_warps(p->dtype), 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
