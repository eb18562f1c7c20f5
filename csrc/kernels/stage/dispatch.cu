/* dispatch.cu - the dispatch kernels and their launchers; dispatch.cuh has a warp's part. */
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

/* Do the same with the scales. */
EP_FN void clear_rest(const EpDispatchParams &p, const EpRowScales &s) {
    fill_scales(s, (uint32_t)p.plan[EP_HEAD_NUM_ROWS], p.num_rows, 0,
                (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, (uint64_t)gridDim.x * blockDim.x);
}

EP_FN void clear_scales(const NoScales &, uint32_t) {}
EP_FN void clear_scales(const EpRowScales &s, uint32_t row) {
    for (uint32_t g = ep_lane(); g < s.num_groups; g += 32) *ep_row_scale(&s, row, g) = 0;
}
/* Set the padding rows of each expert to zero. The warps of all CTAs take them in turn. */
template <typename S> EP_FN void clear_padding(const EpDispatchParams &p, const S &scales) {
    const EpShape &s = p.comm.shape;
    const uint32_t L = ep_num_local_experts(&s), num_vec = ep_row_vecs(&p.comm);
    const uint32_t num_warps = gridDim.x * EP_WARPS;
    const int32_t *first = p.plan + p.layout.expert_row_off, *counts = p.plan + p.layout.counts_off;
    /* This warp's next padding row, counted from the first one of the expert. */
    uint32_t at = blockIdx.x * EP_WARPS + threadIdx.x / 32;
    for (uint32_t from = 0; from < L; from += 32) {
        /* Lane i has the padding rows of expert from + i. */
        const uint32_t mine = from + ep_lane();
        uint32_t begin = 0, end = 0;
        if (mine < L) {
            begin = (uint32_t)first[mine] + ep_expert_rows(&s, counts, p.comm.my_rank * L + mine);
            end = (uint32_t)first[mine + 1];
        }
        for (uint32_t i = 0; i < 32 && from + i < L; i++) {
            const uint32_t low = __shfl_sync(EP_FULL, begin, (int)i);
            const uint32_t high = __shfl_sync(EP_FULL, end, (int)i);
            const uint32_t num = low < high && high <= p.num_rows ? high - low : 0;
            for (; at < num; at += num_warps) {
                uint4 *row = (uint4 *)p.rows + (uint64_t)(low + at) * num_vec;
                for (uint32_t vec = ep_lane(); vec < num_vec; vec += 32) row[vec] = make_uint4(0, 0, 0, 0);
                if (p.row_weight && ep_lane() == 0) p.row_weight[low + at] = 0;
                clear_scales(scales, low + at);
            }
            at -= num;
        }
    }
}

/* PADDED: the plan has padding rows. A kernel of its own, so that dispatch without them has no part of it. */
template <bool PADDED> __global__ void __launch_bounds__(32 * EP_WARPS, 1)
    dispatch_kernel(const __grid_constant__ EpDispatchParams p) {
    const uint64_t epoch = ep_begin(&p.comm);
    if (epoch && ep_cta_enter(&p.comm, EP_OP_DISPATCH, p.plan, NULL, p.layout.num_tokens, p.num_rows,
                              p.has_weight, 0, epoch)) {
        if (has_few_tokens(p)) move_few_tokens(p, EP_OP_DISPATCH, epoch, NoScales());
        else move_tokens<false>(p, EP_OP_DISPATCH, epoch, EP_MOVE_ALL, 0, NoScales());
        clear_rest(p);
        if (PADDED) clear_padding(p, NoScales());
    }
    if (ep_cta_leave(&p.comm, epoch) == EP_LEFT_LAST_FAILED) poison_dispatch(p);
}

/* Dispatch of rows in FP8. */
struct Fp8Params : EpDispatchParams {
    EpRowScales scales;
};
static constexpr uint32_t FP8_OP = EP_OP_WORD(EP_OP_DISPATCH, EP_IN_FP8);
template <bool PADDED> __global__ void __launch_bounds__(32 * EP_WARPS, 1)
    dispatch_fp8_kernel(const __grid_constant__ Fp8Params p) {
    const uint64_t epoch = ep_begin(&p.comm);
    if (epoch && ep_cta_enter(&p.comm, FP8_OP, p.plan, NULL, p.layout.num_tokens, p.num_rows, p.has_weight, 0,
                              epoch)) {
        if (has_few_tokens(p)) move_few_tokens(p, FP8_OP, epoch, p.scales);
        else move_tokens<false>(p, FP8_OP, epoch, EP_MOVE_ALL, 0, p.scales);
        clear_rest(p);
        clear_rest(p, p.scales);
        if (PADDED) clear_padding(p, p.scales);
    }
    if (ep_cta_leave(&p.comm, epoch) == EP_LEFT_LAST_FAILED) {
        poison_dispatch(p);
        poison_scales(p.scales, p.num_rows);
    }
}

static int launch_fp8(const EpDispatchParams *p, const EpRowScales *scales, uint32_t num_blocks,
                      void *stream) {
    const Fp8Params q = {*p, *scales};
    return (int)ep_launch_resident(q.has_padding ? dispatch_fp8_kernel<true> : dispatch_fp8_kernel<false>,
                                   num_blocks, EP_WARPS, 0, stream, q);
}
extern "C" int ep_launch_dispatch(const EpDispatchParams *p, const EpScales *scales, uint32_t num_blocks,
                                  void *stream) {
    if (scales->dtype == EP_IN_FP8) return launch_fp8(p, &scales->rows, num_blocks, stream);
    return (int)ep_launch_resident(p->has_padding ? dispatch_kernel<true> : dispatch_kernel<false>,
                                   num_blocks, EP_WARPS, 0, stream, *p);
}
extern "C" int ep_preload_dispatch(void) {
    cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, dispatch_kernel<false>);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, dispatch_kernel<true>);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, dispatch_fp8_kernel<false>);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, dispatch_fp8_kernel<true>);
    return (int)e;
}
