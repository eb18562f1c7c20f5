/* combine.cu - the combine kernel and its launcher; combine.cuh has a warp's part. */
#include "kernels/launch.h"
#include "kernels/stage/few_tokens.cuh"

template <int DTYPE> __global__ void __launch_bounds__(32 * EP_WARPS, 1)
    combine_kernel(const __grid_constant__ EpCombineParams p) {
    typedef EpCombineConfig<DTYPE, EP_OP_COMBINE> C;
    const uint64_t epoch = ep_begin(&p.comm);
    if (epoch && ep_cta_enter(&p.comm, EP_OP_COMBINE, p.plan, p.recv, p.layout.num_tokens, p.num_rows,
                              p.has_weight, p.has_scalar, epoch)) {
        const uint32_t fifo = ep_warp_fifo<typename C::Fifo>();
        if (has_few_tokens(p)) combine_few_tokens<C>(p, epoch, fifo);
        else combine_tokens<C>(p, epoch, {true, true}, fifo);
    }
    if (ep_cta_leave(&p.comm, epoch) == EP_LEFT_LAST_FAILED) poison_combine(p);
}

typedef void (*CombineKernel)(EpCombineParams);
static CombineKernel kernel_of(uint32_t dtype) {
    EP_HANDLES_ALL(EP_NUM_DTYPES, 3);
    return dtype == EP_F32   ? combine_kernel<EP_F32>
           : dtype == EP_F16 ? combine_kernel<EP_F16>
                             : combine_kernel<EP_BF16>;
}

enum { WARP_BYTES = EpCombineConfig<EP_BF16, EP_OP_COMBINE>::Fifo::BYTES }; /* the same for all dtypes */
/* The number of warps: EP_WARPS, or as many as the device has shared memory for. */
static cudaError_t num_warps_here(uint32_t *num_warps) {
    EpCapabilities c;
    const cudaError_t e = (cudaError_t)ep_capabilities(&c);
    if (e != cudaSuccess) return e;
    /* the kernel also has some static shared memory */
    const uint32_t fit = (c.smem_bytes - 1024) / WARP_BYTES;
    *num_warps = fit < EP_WARPS ? fit : EP_WARPS;
    return cudaSuccess;
}

extern "C" int ep_launch_combine(const EpCombineParams *p, uint32_t num_blocks, void *stream) {
    uint32_t num_warps;
    const cudaError_t e = num_warps_here(&num_warps);
    if (e != cudaSuccess) return (int)e;
    return (int)ep_launch_resident(kernel_of(p->comm.shape.dtype), num_blocks, num_warps,
                                   num_warps * WARP_BYTES, stream, *p);
}
extern "C" int ep_preload_combine(void) {
    uint32_t num_warps;
    cudaError_t e = num_warps_here(&num_warps);
    for (uint32_t dtype : {EP_F32, EP_F16, EP_BF16})
        if (e == cudaSuccess) e = ep_allow_smem(kernel_of(dtype), num_warps * WARP_BYTES);
    return (int)e;
}
