/* gemm_narrow.cu - the kernels of the grouped GEMM with few columns. */
#include "cuda/cluster_launch.h"
#include "kernels/gemm/gemm_narrow.cuh"

/* The two CTAs of a cluster know nothing of each other. */
template <typename C> __global__ void __launch_bounds__(C::THREADS, C::CTAS_OF_SM)
    gemm_narrow_kernel(const __grid_constant__ EpGemmNarrowParams p, const __grid_constant__ CUtensorMap rows,
                       const __grid_constant__ CUtensorMap columns,
                       const __grid_constant__ CUtensorMap group) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const EpNarrowMaps maps = {&rows, &columns, &group};
    ep_gemm_narrow_body<C>(&p, &maps);
#endif
}

template <int KIND, int BN, bool FEW, bool F16> static EpClusterKernel row() {
    typedef EpGemmNarrowConfig<KIND, BN, FEW, F16> C;
    return {(const void *)gemm_narrow_kernel<C>, 0, KIND, BN, EP_ACT_NONE, C::THREADS, C::SMEM_BYTES, {}};
}
#define EP_ROWS(KIND, FEW, F16) \
    row<KIND, 16, FEW, F16>(), row<KIND, 32, FEW, F16>(), row<KIND, 64, FEW, F16>()
#define EP_FORWARD_ROWS(FEW, F16) EP_ROWS(EP_GEMM_FORWARD, FEW, F16), row<EP_GEMM_FORWARD, 128, FEW, F16>()
EpClusterKernel ep_gemm_narrow_kernels_bf16[] = {
    EP_FORWARD_ROWS(false, false), EP_ROWS(EP_GEMM_DGRAD, false, false), {}};
EpClusterKernel ep_gemm_narrow_kernels_f16[] = {
    EP_FORWARD_ROWS(false, true), EP_ROWS(EP_GEMM_DGRAD, false, true), {}};
/* for few rows */
EpClusterKernel ep_gemm_narrow_few_kernels_bf16[] = {EP_FORWARD_ROWS(true, false), {}};
EpClusterKernel ep_gemm_narrow_few_kernels_f16[] = {EP_FORWARD_ROWS(true, true), {}};
