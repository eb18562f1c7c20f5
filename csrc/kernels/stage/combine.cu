/* combine.cu - the combine kernel and its launcher; combine.cuh has a warp's part. */
#include "kernels/launch.h"
#include "kernels/stage/few_tokens.cuh"

/* OPTIONS: see EpCombineConfig. A kernel of its own, so that a combine without them has no part of it. */
template <int DTYPE, bool OPTIONS> __global__ void __launch_bounds__(32 * EP_WARPS, 1)
    combine_kernel(const __grid_constant__ EpCombineParams p) {
    typedef EpCombineConfig<DTYPE, EP_OP_COMBINE, true, OPTIONS> C;
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
template <bool OPTIONS> static CombineKernel kernel_of(uint32_t dtype) {
    EP_HANDLES_ALL(EP_NUM_DTYPES, 3);
    return dtype == EP_F32   ? combine_kernel<EP_F32, OPTIONS>
           : dtype == EP_F16 ? combine_kernel<EP_F16, OPTIONS>
                             : combine_kernel<EP_BF16, OPTIONS>;
}

/* How to launch a combine, with or without options. */
typedef struct {
    CombineKernel kernel;
    uint32_t num_warps, smem_bytes;
} Launch;
/* The number of warps is EP_WARPS, or as many as the device has shared memory for. */
template <bool OPTIONS> static cudaError_t launch_of(uint32_t dtype, Launch *launch) {
    typedef EpCombineConfig<EP_BF16, EP_OP_COMBINE, true, OPTIONS> C; /* the same for all dtypes */
    EpCapabilities c;
    const cudaError_t e = (cudaError_t)ep_capabilities(&c);
    if (e != cudaSuccess) return e;
    /* the kernel also has some static shared memory */
    const uint32_t fit = (c.smem_bytes - 1024) / C::Fifo::BYTES;
    const uint32_t num_warps = fit < EP_WARPS ? fit : EP_WARPS;
    *launch = {kernel_of<OPTIONS>(dtype), num_warps, num_warps * C::Fifo::BYTES};
    return cudaSuccess;
}

extern "C" int ep_launch_combine(const EpCombineParams *p, uint32_t num_blocks, void *stream) {
    const uint32_t dtype = p->comm.shape.dtype;
    Launch l;
    const cudaError_t e =
        ep_combine_has_options(p) ? launch_of<true>(dtype, &l) : launch_of<false>(dtype, &l);
    if (e != cudaSuccess) return (int)e;
    return (int)ep_launch_resident(l.kernel, num_blocks, l.num_warps, l.smem_bytes, stream, *p);
}
extern "C" int ep_preload_combine(void) {
    cudaError_t e = cudaSuccess;
    for (uint32_t dtype : {EP_F32, EP_F16, EP_BF16})
        for (bool options : {false, true}) {
            Launch l;
            if (e == cudaSuccess) e = options ? launch_of<true>(dtype, &l) : launch_of<false>(dtype, &l);
            if (e == cudaSuccess) e = ep_allow_smem(l.kernel, l.smem_bytes);
        }
    return (int)e;
}
