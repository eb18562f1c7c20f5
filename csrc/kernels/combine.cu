/* combine.cu - combine by itself; combine.cuh says how. */
#include "combine.cuh"
#include "launch.h"

template <int DTYPE> __global__ void __launch_bounds__(32 * EP_COMBINE_WARPS, 1) combine_kernel(const __grid_constant__ EpCombineParams p) {
    const uint64_t epoch = ep_begin(&p.comm);
    if (epoch && ep_block_enter(&p.comm, EP_OP_COMBINE, p.plan, p.layout.num_tokens, p.num_rows, p.has_weight, p.has_scalar, epoch))
        bring_home<EpCombineConfig<DTYPE, EP_OP_COMBINE, false>>(p, epoch, {true, true}, 0);
    if (ep_block_leave(&p.comm, epoch) == EP_LEFT_LAST_FAILED) spoil_combine(p);
}

extern "C" int ep_launch_combine(const EpCombineParams *p, uint32_t num_blocks, void *stream) {
    if (p->comm.shape.dtype == EP_F32) return (int)ep_launch_resident(combine_kernel<EP_F32>, num_blocks, EP_COMBINE_WARPS, 0, stream, *p);
    if (p->comm.shape.dtype == EP_F16) return (int)ep_launch_resident(combine_kernel<EP_F16>, num_blocks, EP_COMBINE_WARPS, 0, stream, *p);
    return (int)ep_launch_resident(combine_kernel<EP_BF16>, num_blocks, EP_COMBINE_WARPS, 0, stream, *p);
}
extern "C" int ep_preload_combine(void) {
    cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, combine_kernel<EP_F32>);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, combine_kernel<EP_F16>);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, combine_kernel<EP_BF16>);
    return (int)e;
}
