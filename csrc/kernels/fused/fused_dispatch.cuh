/* fused_dispatch.cuh - what dispatch + GEMM adds to the grouped GEMM; see fused.cuh.
 *
 * Exports EpDispatchHooks and EpDispatchFp8Hooks. */
#ifndef EP_FUSED_DISPATCH_CUH
#define EP_FUSED_DISPATCH_CUH
#include "kernels/fused/fused_params.h"
#include "kernels/fused/fused_shared.cuh"
#include "kernels/stage/dispatch.cuh"

/* SAVES: the kernel of a training step, which also stores the product. OP: the EP_OP_WORD in headers and in
 * errors. */
template <bool SAVES, uint32_t OP = EP_OP_DISPATCH_GEMM> struct EpDispatchHooks {
    static constexpr bool FUSED = true;
    static constexpr int PRODUCER_REGS = EP_FUSED_COMM_REGS, MMA_REGS = EP_FUSED_MMA_REGS;
    typedef EpDispatchGemmParams Params;
    const Params &p;
    /* The operation is valid, as far as this thread knows. */
    bool ok;
    uint32_t awaited;

    __device__ EpDispatchHooks(const Params &params, bool is_valid)
        : p(params), ok(is_valid), awaited(UINT32_MAX) {}
    static __device__ void save_verdict(bool) {}
    static __device__ const EpDispatchParams &stage(const Params &p) { return p.dispatch; }
    static __device__ bool enter(const Params &p, uint64_t epoch) {
        const EpDispatchParams &d = p.dispatch;
        return ep_cta_enter(&d.comm, OP, d.plan, NULL, d.layout.num_tokens, d.num_rows, d.has_weight, 0,
                            epoch);
    }
    static __device__ void poison(const Params &p) {
        poison_dispatch(p.dispatch);
        ep_cta_fill(p.gemm.out, 2ull * p.gemm.num_rows * ep_gemm_out_cols(&p.gemm), EP_NAN_WORD);
        if (SAVES) ep_cta_fill(p.gemm.saved, 2ull * p.gemm.num_rows * p.gemm.n, EP_NAN_WORD);
    }

    /* first_warp: the first communication warp */
    template <typename S> __device__ void move(uint32_t smem, uint32_t first_warp, const S &scales) {
        if (!ok || blockIdx.x >= p.num_move_blocks) return;
        const EpMoveWhat what = p.num_tail_blocks == 0           ? EP_MOVE_ALL
                                : blockIdx.x < p.num_tail_blocks ? EP_MOVE_RECEIVES
                                                                 : EP_MOVE_SENDS;
        move_tokens<true>(p.dispatch, OP, EpSharedEpoch(), what, fifo_at<EpFusedFifo>(smem, first_warp),
                          scales);
    }
    __device__ void comm(uint32_t smem) { move(smem, 1, NoScales()); }
    __device__ void await_rows(const EpGemmTile &t) {
        const uint32_t m = (uint32_t)p.dispatch.plan[EP_HEAD_NUM_ROWS];
        uint32_t first = t.row0, num = min(t.num_rows, (uint32_t)EP_GEMM_BM);
        if (p.waits_for_expert) {
            if (t.expert == awaited) return;
            awaited = t.expert;
            first = ep_gemm_clamp_row(&p.gemm, p.gemm.offsets[t.expert]);
            num = t.row0 + t.num_rows - first;
        }
        const uint64_t begin = ep_trace_now(&p.dispatch.comm);
        EpBackoff w = {0, 0, 0};
        ep_chaos(EP_CHAOS_ROWS_AWAIT);
        for (uint32_t b = first / EP_TILE_ROWS; ok && b <= (first + num - 1) / EP_TILE_ROWS; b++)
            ok = ep_ready_await(&p.dispatch.comm, OP, b, ep_ready_count(b, m, 1), EpSharedEpoch(), &w);
        ep_fence_proxy_async_global();
        ep_trace_span(&p.dispatch.comm, EP_SPAN_WAIT_ROWS, t.expert, begin);
    }
    __device__ uint64_t tile_started() { return ep_trace_now(&p.dispatch.comm); }
    __device__ void tile_written(const EpGemmTile &t, uint32_t, uint64_t begun) {
        if (threadIdx.x / 32 % 4 == 0) ep_trace_span(&p.dispatch.comm, EP_SPAN_GEMM, t.expert, begun);
    }
    __device__ void mma_in_flight() {}
    __device__ void after_last_tile(uint32_t) {}
};

/* Dispatch + GEMM in FP8: the first communication warp loads the GEMM's scales instead. */
struct EpDispatchFp8Hooks : EpDispatchHooks<false, EP_FP8_DISPATCH_GEMM> {
    static constexpr int PRODUCER_REGS = EP_FUSED_FP8_COMM_REGS, MMA_REGS = EP_FUSED_FP8_MMA_REGS;
    typedef EpMegaFp8Params Params;
    const EpGemmScales *scales;

    __device__ EpDispatchFp8Hooks(const Params &params, bool is_valid)
        : EpDispatchHooks(params, is_valid), scales(&params.scales) {}
    static __device__ void poison(const Params &p) {
        EpDispatchHooks::poison(p);
        poison_scales(p.row_scales, p.dispatch.num_rows);
    }
    __device__ void comm(uint32_t smem) {
        if (threadIdx.x / 32 > 1) move(smem, 2, ((const Params &)p).row_scales);
    }
};

#endif /* EP_FUSED_DISPATCH_CUH */
