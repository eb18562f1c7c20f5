/* resident.cuh - launch a kernel whose CTAs all run at once, and give it dynamic shared memory.
 *
 * Exports ep_dynamic_smem, ep_allow_smem, ep_resident_blocks and ep_launch_resident, which starts at most one
 * CTA for each SM that is not reserved, so perhaps fewer than the caller asked for. On Hopper,
 * ep_launch_resident_early may start a kernel while the previous one of the stream still runs; such a kernel
 * begins with ep_await_previous_kernel.
 * Invariant: the launch is cooperative, so either all CTAs of the grid are resident or the launch fails. */
#ifndef EP_RESIDENT_CUH
#define EP_RESIDENT_CUH
#include <cuda_runtime_api.h>

#include "cuda/capabilities.h"

static __device__ __forceinline__ uint32_t *ep_dynamic_smem(void) {
    extern __shared__ uint32_t smem[];
    return smem;
}

/* Load a kernel now (see launch.h), and allow it this much dynamic shared memory. */
template <typename P> static cudaError_t ep_allow_smem(void (*kernel)(P), uint32_t smem_bytes) {
    cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, kernel);
    return e == cudaSuccess
               ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem_bytes)
               : e;
}

/* The number of CTAs that may run at once, at most `wanted`. A CTA occupies a whole SM, and reserved SMs
 * are not used. */
static cudaError_t ep_resident_blocks(uint32_t wanted, uint32_t reserve_sms, uint32_t *num_blocks) {
    EpCapabilities c;
    const cudaError_t e = (cudaError_t)ep_capabilities(&c);
    const uint32_t most = e == cudaSuccess && c.num_sms > reserve_sms ? c.num_sms - reserve_sms : 1;
    *num_blocks = wanted < most ? wanted : most;
    return e;
}

/* Launch with all CTAs resident at once, or fail. One CTA enters for all CTAs, and CTAs wait for each
 * other. If one CTA could not start, the others would wait for it without end: a deadlock. */
template <typename P>
static cudaError_t ep_launch_resident(void (*kernel)(P), uint32_t num_blocks, uint32_t num_warps,
                                      size_t smem_bytes, void *stream, const P &p, bool is_early = false) {
    const cudaError_t e = ep_resident_blocks(num_blocks, p.comm.reserve_sms, &num_blocks);
    if (e != cudaSuccess) return e;
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(num_blocks);
    config.blockDim = dim3(32 * num_warps);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    config.numAttrs = is_early ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, p);
}

/* As ep_launch_resident, but with programmatic dependent launch, for a kernel that begins with
 * ep_await_previous_kernel. Its CTAs start when each CTA of the previous kernel of the stream has exited, or
 * has allowed it, which only kernels of others do. So they need not wait until the stores of that kernel are
 * flushed. That saves 0.3 us for each launch in a CUDA graph (docs/experiments, E-078). At that time all CTAs
 * of the previous kernel have their SMs, so a CTA that waits cannot keep one of them from running. */
template <typename P>
static cudaError_t ep_launch_resident_early(void (*kernel)(P), uint32_t num_blocks, uint32_t num_warps,
                                            size_t smem_bytes, void *stream, const P &p) {
    EpCapabilities c;
    const cudaError_t e = (cudaError_t)ep_capabilities(&c);
    return e == cudaSuccess
               ? ep_launch_resident(kernel, num_blocks, num_warps, smem_bytes, stream, p, c.has_hopper)
               : e;
}
/* Wait until all earlier kernels of the stream are complete and what they wrote is readable. Before it, a
 * kernel may use only its parameters. All threads call it. */
static __device__ __forceinline__ void ep_await_previous_kernel(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif /* EP_RESIDENT_CUH */
