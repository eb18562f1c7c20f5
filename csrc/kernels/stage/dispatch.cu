/* dispatch.cu - the dispatch kernel and its launcher; dispatch.cuh has a warp's part. */
#include "kernels/launch.h"
#include "kernels/stage/few_tokens.cuh"

/* With a fixed capacity the tensor has more rows than the plan: set rows M and after to zero. */
EP_FN void clear_rest(const EpDispatchParams &p) {
    const uint64_t m = (uint32_t)p.plan[EP_HEAD_NUM_ROWS], row_vec = p.comm.layout.row_bytes / 16;
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    const uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (uint64_t i = m * row_vec + at; i < p.num_rows * row_vec; i += step)
        ((uint4 *)p.rows)[i] = make_uint4(0, 0, 0, 0);
    for (uint64_t i = m + at; p.row_weight && i < p.num_rows; i += step) p.row_weight[i] = 0;
}

__global__ void __launch_bounds__(32 * EP_WARPS, 1)
    dispatch_kernel(const __grid_constant__ EpDispatchParams p) {
    const uint64_t epoch = ep_begin(&p.comm);
    if (epoch && ep_cta_enter(&p.comm, EP_OP_DISPATCH, p.plan, NULL, p.layout.num_tokens, p.num_rows,
                              p.has_weight, 0, epoch)) {
        if (has_few_tokens(p)) move_few_tokens(p, EP_OP_DISPATCH, epoch);
        else move_tokens<false>(p, EP_OP_DISPATCH, epoch, EP_MOVE_ALL, 0);
        clear_rest(p);
    }
    if (ep_cta_leave(&p.comm, epoch) == EP_LEFT_LAST_FAILED) poison_dispatch(p);
}

extern "C" int ep_launch_dispatch(const EpDispatchParams *p, uint32_t num_blocks, void *stream) {
    return (int)ep_launch_resident(dispatch_kernel, num_blocks, EP_WARPS, 0, stream, *p);
}
extern "C" int ep_preload_dispatch(void) {
    cudaFuncAttributes a;
    return (int)cudaFuncGetAttributes(&a, dispatch_kernel);
}
