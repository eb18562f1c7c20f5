/* plan.cu - the plan kernel and its launcher: one launch, without help from the host; plan.cuh has a CTA's
 * part. */
#include "kernels/launch.h"
#include "kernels/stage/plan.cuh"

/* OPTIONS: padding rows and counts for the host. A kernel of its own, so that a plan without them has no part
 * of it. */
template <bool OPTIONS> __global__ void __launch_bounds__(32 * (EP_WARPS + 1), 1)
    plan_kernel(const __grid_constant__ Params p) {
    __shared__ Verdict v;
    __shared__ uint32_t bad;
    const bool sorts = ep_plan_sorts(&p);
    Smem m(ep_dynamic_smem(), p.comm.shape, sorts);
    if (OPTIONS) m.padding = p.padding;
    const Range range(p.num_tokens);
    const uint64_t epoch = ep_begin(&p.comm);
    if (threadIdx.x == 0) bad = UINT32_MAX, v.code = EP_EPEER, v.mine = {{0, 0, 0}};
    for (uint32_t i = threadIdx.x; i < EP_WARPS * m.warp_cells; i += blockDim.x) m.warp_count[i] = 0;
    __syncthreads();
    if (epoch && blockIdx.x == 0 && is_control_warp()) {
        EpHeader h = ep_make_header(&p.comm, EP_OP_PLAN, NULL, NULL, p.num_tokens, 0);
        h.balance_key = p.balance_key;
        ep_enter(&p.comm, &h, epoch);
    }
    Choice first_rounds[2];
    if (epoch) count(p, range, sorts, m.warp_count + threadIdx.x / 32 * m.warp_cells, &bad, first_rounds);
    __syncthreads();
    if (epoch) scan_warps(p, m, bad);
    EpWaits waits; /* of the control warp of CTA 0 */
    const bool ok = epoch && agree(p, m, &v, epoch, &waits);
    if (!ok && blockIdx.x == 0) invalidate_plan(p);
    if (OPTIONS && ok && p.host_counts && blockIdx.x == 0 && is_control_warp())
        write_host_counts(p, m, epoch);
    if (ok && blockIdx.x == 0 && is_control_warp()) {
        ep_count_waits(&p.comm, &waits);
        ep_publish_waits(&p.comm);
        ep_warp_sync(); /* who sees the result of the plan sees its waiting times */
    }
    if (blockIdx.x == 0 && is_control_warp() && ep_lane() == 0)
        publish_to_host(p, ok ? 0 : v.code, ok ? (uint32_t)v.rank_rows[p.comm.my_rank] : 0, epoch);
    if (ok && is_control_warp()) write_tables(p, m, v);
    if (ok && !is_control_warp()) {
        const int32_t *scatter = p.scatter_indices;
        /* A peer may report a wrong number of tokens. Then there is a plan, but without these indices. */
        if (scatter && p.num_scatter_tokens != p.num_tokens)
            scatter = v.tokens_before + p.num_tokens <= p.num_scatter_tokens
                          ? scatter + v.tokens_before * p.comm.shape.num_topk
                          : NULL;
        place(p, m, range, v, scatter, epoch, first_rounds);
    }
    /* A scatter index was wrong after num_rows had been published to the host: mark the plan as failed. */
    if (ep_cta_leave(&p.comm, epoch) == EP_LEFT_LAST_FAILED && threadIdx.x == 0 &&
        p.plan[EP_HEAD_STATUS] == 0)
        p.plan[EP_HEAD_STATUS] = EP_EINVAL;
}

static size_t smem_of(const EpPlanParams *p) {
    uint32_t nowhere;
    return 4ul * Smem(&nowhere, p->comm.shape, ep_plan_sorts(p)).num_words(p->comm.shape);
}
enum { STATIC_BYTES = 1024 }; /* upper limit of the kernel's static shared memory */
static cudaError_t max_smem(uint32_t *num_bytes) {
    EpCapabilities c;
    const cudaError_t e = (cudaError_t)ep_capabilities(&c);
    if (e == cudaSuccess) *num_bytes = c.smem_bytes - STATIC_BYTES;
    return e;
}

extern "C" int ep_launch_plan(const EpPlanParams *p, void *stream) {
    EpPlanParams q = *p;
    uint32_t most, num_blocks;
    cudaError_t e = max_smem(&most);
    if (e == cudaSuccess)
        e = ep_resident_blocks(num_plan_ctas((uint64_t)q.num_tokens * q.comm.shape.num_topk),
                               q.comm.reserve_sms, &num_blocks);
    if (e != cudaSuccess) return (int)e;
    /* Sorting counts a CTA's tokens per expert in 16 bits. */
    if (EP_WARPS * (uint64_t)ep_ceil_div_u32(q.num_tokens, num_blocks * EP_WARPS) > UINT16_MAX)
        q.sort_slots = 0;
    if (smem_of(&q) > most)
        /* With many experts, a smaller GPU may not have enough shared memory for sorting. */
        q.sort_slots = 0;
    if (smem_of(&q) > most) return (int)cudaErrorLaunchOutOfResources;
    const bool options = q.padding.alignment || q.host_counts;
    return (int)ep_launch_resident(options ? plan_kernel<true> : plan_kernel<false>, num_blocks, EP_WARPS + 1,
                                   smem_of(&q), stream, q);
}
extern "C" int ep_preload_plan(void) {
    uint32_t most;
    cudaError_t e = max_smem(&most);
    if (e == cudaSuccess) e = ep_allow_smem(plan_kernel<false>, most);
    return (int)(e == cudaSuccess ? ep_allow_smem(plan_kernel<true>, most) : e);
}
