/* gemm_hopper.cuh - the kernels of the grouped GEMM for sm_90a, their tensor maps and their launch. */
#ifndef EP_GEMM_HOPPER_CUH
#define EP_GEMM_HOPPER_CUH
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "kernels/gemm/gemm.cuh"
#include "kernels/gemm/gemm_maps.h"
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

/* ---- tensor maps ---- */

/* Look up the driver function by name, because the library must also load on a machine without a driver. */
static PFN_cuTensorMapEncodeTiled_v12000 find_encoder(void) {
    static PFN_cuTensorMapEncodeTiled_v12000 found;
    void *f = NULL;
    enum cudaDriverEntryPointQueryResult result;
    if (!found &&
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result) ==
            cudaSuccess &&
        result == cudaDriverEntryPointSuccess)
        found = (PFN_cuTensorMapEncodeTiled_v12000)f;
    return found;
}

/* Encode a tensor map. The driver requires a current context in this thread: the caller has made a call of
 * the runtime that creates one. */
static cudaError_t encode(EpTensorMap s, CUtensorMap *map) {
    PFN_cuTensorMapEncodeTiled_v12000 encode_tiled = find_encoder();
    cuuint64_t dims[5], strides[4];
    cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    if (!encode_tiled) return cudaErrorNotSupported;
    for (uint32_t i = 0; i < s.num_dims; i++) dims[i] = s.dims[i];
    for (uint32_t i = 0; i + 1 < s.num_dims; i++) strides[i] = 2 * s.strides[i];
    CUresult r = encode_tiled(
        map, s.is_f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, s.num_dims,
        (void *)s.base, dims, strides, s.box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return (cudaError_t)r; /* both enumerations have the same numbers */
}

/* ---- launch ---- */

template <int KIND, int BN, int ACT, bool F16>
static cudaError_t launch(const EpGemmParams *p, uint32_t num_blocks, cudaStream_t stream) {
    typedef EpGemmConfig<KIND, BN, ACT, F16> C;
    CUtensorMap a, b;
    cudaError_t e =
        cudaFuncSetAttribute(gemm_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM_BYTES);
    if (e == cudaSuccess) e = encode(ep_map_a(p, BN), &a);
    if (e == cudaSuccess) e = encode(ep_map_b(p, BN), &b);
    if (e != cudaSuccess) return e;
    cudaLaunchAttribute cluster = {}; /* the pair */
    cudaLaunchConfig_t config = {
        dim3(num_blocks / 2 * 2), dim3(EP_GEMM_THREADS), C::SMEM_BYTES, stream, &cluster, 1};
    cluster.id = cudaLaunchAttributeClusterDimension, cluster.val.clusterDim = {2, 1, 1};
    return cudaLaunchKernelEx(&config, gemm_kernel<C>, *p, a, b);
}

template <bool F16> static cudaError_t launch_of(const EpGemmParams *p, uint32_t tile_cols,
                                                 uint32_t num_blocks, cudaStream_t stream) {
#define EP_CASE(KIND, BN, ACT)                                      \
    if (p->kind == KIND && p->activation == ACT && tile_cols == BN) \
        return launch<KIND, BN, ACT, F16>(p, num_blocks, stream);
    EP_GEMM_VARIANTS(EP_CASE)
    EP_GEMM_FEW_VARIANTS(EP_CASE)
#undef EP_CASE
    return cudaErrorInvalidValue;
}

#endif /* EP_GEMM_HOPPER_CUH */
