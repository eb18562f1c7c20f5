/* gemm.cu - the launcher of the grouped GEMM: which kernel, and how many CTAs. */
#include <cuda_runtime_api.h>

#include "kernels/gemm/gemm_portable.cuh"
#include "kernels/gemm/gemm_tune.h"

int ep_launch_gemm_bf16(const EpGemmParams *p, uint32_t tile_cols, uint32_t num_blocks, cudaStream_t stream);
int ep_launch_gemm_f16(const EpGemmParams *p, uint32_t tile_cols, uint32_t num_blocks, cudaStream_t stream);

template <bool F16> static void launch_portable(const EpGemmParams *p, uint32_t num_blocks,
                                                cudaStream_t stream) {
#define EP_CASE(ACT) \
    if (p->activation == ACT) simple_gemm_kernel<ACT, F16><<<num_blocks, EP_SIMPLE_THREADS, 0, stream>>>(*p)
    EP_CASE(EP_ACT_NONE);
    EP_CASE(EP_ACT_GELU);
    EP_CASE(EP_ACT_SWIGLU);
    EP_CASE(EP_ACT_GPT_OSS);
#undef EP_CASE
}

/* Whether the Hopper kernels have code for this device. If the module contains only PTX of an older
 * architecture, a Hopper GPU runs that PTX, in which the Hopper kernels have no body. All files are
 * compiled for the same architectures, so any kernel can tell. */
extern "C" int ep_has_hopper(uint32_t *has) {
    static int ptx_version; /* queried once: it is the same for all Hopper GPUs */
    int device = 0, major = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (e == cudaSuccess && major == 9 && ptx_version == 0) {
        cudaFuncAttributes a;
        e = cudaFuncGetAttributes(&a, simple_gemm_kernel<EP_ACT_NONE, false>);
        if (e == cudaSuccess) ptx_version = a.ptxVersion;
    }
    *has = major == 9 && ptx_version >= 90;
    return (int)e;
}

extern "C" int ep_launch_gemm(const EpGemmParams *p, void *stream) {
    int device, num_sm;
    uint32_t is_hopper;
    cudaError_t e = (cudaError_t)ep_has_hopper(&is_hopper);
    if (e == cudaSuccess) e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&num_sm, cudaDevAttrMultiProcessorCount, device);
    if (e != cudaSuccess) return (int)e;
    if ((p->num_rows == 0 && p->kind != EP_GEMM_WGRAD) || p->num_experts == 0) return 0;
    if (is_hopper && p->num_rows > 0 && !p->is_portable) { /* a tensor map cannot have a dimension of 0 */
        const uint32_t tile_cols = ep_gemm_has_few_rows(p) ? 64 : ep_gemm_tile_cols(p);
        EpGemmParams q = *p;
        q.limit_ns = EP_GEMM_MIN_LIMIT_NS;
        return p->is_f16 ? ep_launch_gemm_f16(&q, tile_cols, (uint32_t)num_sm, (cudaStream_t)stream)
                         : ep_launch_gemm_bf16(&q, tile_cols, (uint32_t)num_sm, (cudaStream_t)stream);
    }
    if (p->is_f16) launch_portable<true>(p, 4 * (uint32_t)num_sm, (cudaStream_t)stream);
    else launch_portable<false>(p, 4 * (uint32_t)num_sm, (cudaStream_t)stream);
    return (int)cudaGetLastError();
}
