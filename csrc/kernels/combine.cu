/* combine.cu - combine by itself; combine.cuh says how. */
#include "combine.cuh"
#include "launch.h"

template <int DTYPE> __global__ void __launch_bounds__(32 * EP_WARPS, 1) combine_kernel(const __grid_constant__ EpCombineParams p) {
    typedef EpCombineConfig<DTYPE, EP_OP_COMBINE> C;
    const uint64_t epoch = ep_begin(&p.comm);
    if (epoch && ep_block_enter(&p.comm, EP_OP_COMBINE, p.plan, p.layout.num_tokens, p.num_rows, p.has_weight, p.has_scalar, epoch))
        bring_home<C>(p, epoch, {true, true}, ep_warp_fifo<typename C::Fifo>());
    if (ep_block_leave(&p.comm, epoch) == EP_LEFT_LAST_FAILED) spoil_combine(p);
}

enum { SMEM_BYTES = EP_WARPS * EpCombineConfig<EP_BF16, EP_OP_COMBINE>::Fifo::BYTES }; /* of any dtype */
typedef void (*CombineKernel)(EpCombineParams);
static CombineKernel kernel_of(uint32_t dtype) {
    return dtype == EP_F32 ? combine_kernel<EP_F32> : dtype == EP_F16 ? combine_kernel<EP_F16> : combine_kernel<EP_BF16>;
}

extern "C" int ep_launch_combine(const EpCombineParams *p, uint32_t num_blocks, void *stream) {
    return (int)ep_launch_resident(kernel_of(p->comm.shape.dtype), num_blocks, EP_WARPS, SMEM_BYTES, stream, *p);
}
extern "C" int ep_preload_combine(void) {
    cudaError_t e = cudaSuccess;
    for (uint32_t dtype : {EP_F32, EP_F16, EP_BF16})
        if (e == cudaSuccess) e = ep_allow_smem(kernel_of(dtype), SMEM_BYTES);
    return (int)e;
}
