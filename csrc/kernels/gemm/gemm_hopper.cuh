/* gemm_hopper.cuh - the kernels of the grouped GEMM for sm_90a, as rows of a table. */
#ifndef EP_GEMM_HOPPER_CUH
#define EP_GEMM_HOPPER_CUH
#include <cuda.h>

#include "cuda/cluster_launch.h"
#include "kernels/gemm/gemm.cuh"
#include "kernels/gemm/gemm_tune.h"

/* Compiled for sm_90 without its special features, the kernels would have no body and silently write
 * nothing. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "sm_90 without the a: Hopper wants EPMOE_CUDA_ARCH to say -gencode arch=compute_90a,code=sm_90a"
#endif

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    gemm_kernel(const __grid_constant__ EpGemmParams p, const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    EpGemmNoHooks none;
    ep_gemm_body<C>(&p, none, &map_a, &map_b);
#endif
}

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    gemm_low_rank_kernel(const __grid_constant__ EpGemmLowRankParams p,
                         const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                         const __grid_constant__ CUtensorMap low_a,
                         const __grid_constant__ CUtensorMap low_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    EpGemmNoHooks none;
    ep_gemm_body<C>(&p.gemm, none, &map_a, &map_b, &low_a, &low_b, p.low.r);
#endif
}

/* One row of a table of kernels (cluster_launch.h). */
template <int KIND, int BN, int ACT, bool F16> static EpClusterKernel gemm_row() {
    typedef EpGemmConfig<KIND, BN, ACT, F16> C;
    return {(const void *)gemm_kernel<C>, 0, KIND, BN, ACT, EP_GEMM_THREADS, C::SMEM_BYTES, {}};
}

template <int BN, int ACT, bool F16> static EpClusterKernel gemm_save_row() {
    typedef EpGemmSaveConfig<BN, ACT, F16> C;
    return {(const void *)gemm_kernel<C>, 0, EP_GEMM_FORWARD, BN, ACT, EP_GEMM_THREADS, C::SMEM_BYTES, {}};
}

template <int KIND, int BN, int ACT, bool F16> static EpClusterKernel gemm_low_rank_row() {
    typedef EpGemmLowRankConfig<KIND, BN, ACT, F16> C;
    return {(const void *)gemm_low_rank_kernel<C>, 0, KIND, BN, ACT, EP_GEMM_THREADS, C::SMEM_BYTES, {}};
}

#endif /* EP_GEMM_HOPPER_CUH */
