/* fused.cuh - the two megakernels.
 *
 * dispatch + GEMM   sends tokens, receives tokens, and multiplies each row block when its rows are there.
 * GEMM + combine    multiplies, and returns each finished row while other tiles are still being computed.
 *
 * Roles. Every CTA runs the grouped GEMM (gemm.cuh): one producer warp and two MMA warpgroups. The producer's
 * warpgroup has three more warps, which the GEMM does not need. They are the communication warps. So
 * communication takes no SM away from the tensor cores.
 *
 * With FP8, the first of the three loads the scales of the GEMM, and two communicate.
 *
 * Coupling. The two halves meet in one counter per row block of 128 rows, ready[b] (flags.h).
 *   dispatch + GEMM: a communication warp adds 1 to ready[b] for each row that it has placed in row block b.
 *                    The producer of a tile waits until all row blocks of the tile are complete.
 *   GEMM + combine:  an MMA warp adds its rows to ready[b] after it has stored its part of a tile.
 *                    A communication warp returns a row after all columns of the row are stored.
 *
 * Freedom from deadlock. Tasks have levels: send < receive < multiply, and multiply < return < add up.
 *   (1) A worker waits only for tasks of a lower level than its own task, on this rank or another.
 *   (2) A worker that waits for a task holds no unfinished task of that level or a lower one.
 *       - A communication warp waits for a peer's chunk only if it holds no task to send or return. While the
 *         rows of a chunk that it must return are not ready, it continues to add up tokens.
 *       - A warp that only receives waits for other warps that send. The launch ensures that there are some
 *         (num_tail_blocks, num_move_blocks).
 *       - A warp that loads scales waits for the producer of its CTA, which has a tile then, and for nothing
 *         else.
 *       - Producer and MMA warps have a queue of their own, of tiles. MMA warps communicate only after their
 *         last tile is counted.
 *   (3) All CTAs are resident: the launch is cooperative, or it fails with an error.
 *   (4) The two CTAs of a pair wait for each other's half of a pipeline stage. Both process the same tiles in
 *       the same order, and neither leaves early.
 * By (3) and (4) every task that was drawn is being executed. By (1) and (2) a task of the lowest unfinished
 * level waits for nothing. So this level finishes, and then the next. tests/models/fused.pml checks this, and
 * finds what goes wrong if one of the conditions is removed.
 *
 * Faults. After a fault, communication warps leave at once. Producer and MMA warps continue with whatever
 * data is there, because the two CTAs of a pair must process the same tiles. The last CTA out fills the
 * output with NaN. */
#ifndef EP_FUSED_CUH
#define EP_FUSED_CUH
#include "kernels/gemm/gemm_hopper.cuh"
#include "kernels/stage/combine.cuh"
#include "kernels/stage/dispatch.cuh"
#include "protocol/params.h"

/* Registers of a thread of the producer's warpgroup, and of an MMA thread. Together they use all registers
 * of a CTA. */
#ifndef EP_FUSED_COMM_REGS
#define EP_FUSED_COMM_REGS 88
#define EP_FUSED_MMA_REGS 208
#endif

/* The epoch of the operation. It is reloaded from shared memory at each use, to save a register. */
static __shared__ uint64_t ep_shared_epoch;
static __shared__ uint32_t ep_shared_ok; /* whether all ranks have entered the operation */
struct EpSharedEpoch {
    __device__ operator uint64_t() const { return ep_ld_shared_u64(ep_smem(&ep_shared_epoch)); }
};

/* This warp's queue of cells in shared memory, if warp `first` has the first one. */
template <typename F> EP_FN uint32_t fifo_at(uint32_t smem, uint32_t first) {
    return smem + (threadIdx.x / 32 - first) * F::BYTES;
}

/* KEEPS: the kernel of a training step, which also stores gate and up. OP: the operation, in headers and in
 * errors. */
template <bool KEEPS, uint32_t OP = EP_OP_DISPATCH_GEMM> struct EpDispatchHooks {
    static constexpr bool FUSED = true, TILES_ARE_AWAITED = false;
    static constexpr int PRODUCER_REGS = EP_FUSED_COMM_REGS, MMA_REGS = EP_FUSED_MMA_REGS;
    typedef EpDispatchGemmParams Params;
    const Params &p;
    /* The operation is valid, as far as this thread knows. */
    bool ok;
    uint32_t awaited;

    __device__ EpDispatchHooks(const Params &params, bool is_valid)
        : p(params), ok(is_valid), awaited(UINT32_MAX) {}
    static __device__ void keep(bool) {}
    static __device__ const EpDispatchParams &stage(const Params &p) { return p.dispatch; }
    static __device__ bool enter(const Params &p, uint64_t epoch) {
        const EpDispatchParams &d = p.dispatch;
        return ep_cta_enter(&d.comm, OP, d.plan, NULL, d.layout.num_tokens, d.num_rows, d.has_weight, 0,
                            epoch);
    }
    static __device__ void poison(const Params &p) {
        poison_dispatch(p.dispatch);
        ep_cta_fill(p.gemm.out, 2ull * p.gemm.num_rows * ep_gemm_out_cols(&p.gemm), EP_NAN_WORD);
        if (KEEPS) ep_cta_fill(p.gemm.kept, 2ull * p.gemm.num_rows * p.gemm.n, EP_NAN_WORD);
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

/* Registers of the kernels of FP8: an MMA thread has more accumulators. */
#ifndef EP_FUSED_FP8_COMM_REGS
#define EP_FUSED_FP8_COMM_REGS 56
#define EP_FUSED_FP8_MMA_REGS 224
#endif

/* EpDispatchGemmFp8Params, as mega_body wants them: with the members of EpDispatchGemmParams. */
struct EpMegaFp8Params : EpDispatchGemmParams {
    EpRowScales row_scales;
    EpGemmScales scales;
};
static_assert(sizeof(EpMegaFp8Params) == sizeof(EpDispatchGemmFp8Params), "the same members in one order");
/* Dispatch + GEMM in FP8: the first communication warp loads the GEMM's scales instead. */
struct EpDispatchFp8Hooks : EpDispatchHooks<false, EP_OP_DISPATCH_GEMM_FP8> {
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

/* SCALAR: the kernel of the backward pass, which returns a number with each row. */
template <int DTYPE, bool SCALAR> struct EpCombineHooks {
    static constexpr bool FUSED = true, TILES_ARE_AWAITED = true;
    static constexpr int PRODUCER_REGS = EP_FUSED_COMM_REGS, MMA_REGS = EP_FUSED_MMA_REGS;
    typedef EpGemmCombineParams Params;
    const Params &p;
    /* Rows of the last tile that this warp has stored but not yet counted. */
    uint32_t row, num_rows;

    __device__ EpCombineHooks(const Params &params, bool) : p(params), row(0), num_rows(0) {}
    /* One thread stores the verdict for all threads, to save a register of each. */
    static __device__ void keep(bool is_valid) { ep_shared_ok = is_valid; }
    static __device__ const EpCombineParams &stage(const Params &p) { return p.combine; }
    static __device__ bool enter(const Params &p, uint64_t epoch) {
        const EpCombineParams &k = p.combine;
        return ep_cta_enter(&k.comm, EP_OP_GEMM_COMBINE, k.plan, k.recv, k.layout.num_tokens, k.num_rows,
                            k.has_weight, SCALAR ? k.has_scalar : 0, epoch);
    }
    static __device__ void poison(const Params &p) { poison_combine(p.combine); }

    /* Count this warp's part of a tile. The warp does so while its next wgmma is in flight, so that no one
     * waits for the fence. */
    __device__ void count() {
        if (num_rows == 0) return;
        const uint32_t block = row / EP_TILE_ROWS;
        const uint32_t in_first = min(num_rows, (block + 1) * EP_TILE_ROWS - row);
        const uint32_t lane = ep_lane();
        __syncwarp();
        /* orders the stores of all lanes before the counts: publishes the rows of this part */
        ep_fence_acq_rel_gpu();
        ep_chaos(EP_CHAOS_ROWS_COUNT);
        if (lane == 0) ep_red_add_relaxed_gpu(ep_ready_word(&p.combine.comm, block), in_first);
        if (lane == 1 && num_rows > in_first)
            ep_red_add_relaxed_gpu(ep_ready_word(&p.combine.comm, block + 1), num_rows - in_first);
        num_rows = 0;
    }
    __device__ void await_rows(const EpGemmTile &) {}
    __device__ uint64_t tile_started() { return ep_trace_now(&p.combine.comm); }
    __device__ void tile_written(const EpGemmTile &t, uint32_t group, uint64_t begun) {
        if (threadIdx.x / 32 % 4 == 0) ep_trace_span(&p.combine.comm, EP_SPAN_GEMM, t.expert, begun);
        const uint32_t first = 64 * group + threadIdx.x / 32 % 4 * 16;
        if (first >= t.num_rows || t.col0 >= ep_gemm_num_cols(&p.gemm)) return;
        row = t.row0 + first;
        num_rows = min(16u, t.num_rows - first);
    }
    __device__ void mma_in_flight() { count(); }

    template <bool HAS_SMEM> __device__ void combine(uint32_t smem, uint32_t first_warp) {
        typedef EpCombineConfig<DTYPE, EP_OP_GEMM_COMBINE, HAS_SMEM> C;
        const EpCombineParts parts = {blockIdx.x < p.num_move_blocks, blockIdx.x < p.num_reduce_blocks};
        if (ep_ld_shared_u32(ep_smem(&ep_shared_ok)) &&
            (!p.is_serial || await_all_rows(p.combine, EP_OP_GEMM_COMBINE, EpSharedEpoch())))
            combine_tokens<C>(p.combine, EpSharedEpoch(), parts, fifo_at<typename C::Fifo>(smem, first_warp));
    }
    __device__ void comm(uint32_t smem) { combine<false>(smem, 1); }
    __device__ void after_last_tile(uint32_t smem) {
        count();
        combine<true>(smem, 4);
    }
};

/* Reset the ready counters. The last CTA out does so: those of the plan's rows, and after a failure all of
 * them. Later kernels see zeros because of stream order. */
EP_FN void reset_ready(const EpComm *c, const int32_t *plan, EpLeft left) {
    const uint32_t used = ep_ceil_div_u32((uint32_t)plan[EP_HEAD_NUM_ROWS], EP_TILE_ROWS);
    const uint32_t all = c->layout.num_row_blocks;
    const uint32_t num = left == EP_LEFT ? 0 : left == EP_LEFT_LAST && used < all ? used : all;
    for (uint32_t b = threadIdx.x; b < num; b += blockDim.x) *ep_ready_word(c, b) = 0;
}

/* The body of every megakernel: the ranks agree on the operation, the CTA multiplies and communicates, and
 * the last CTA out cleans up. H has what differs between operations. */
template <typename C, typename H>
EP_FN void mega_body(const typename H::Params &p, const CUtensorMap *map_a, const CUtensorMap *map_b) {
    const auto &stage = H::stage(p);
    ep_trace_start(&stage.comm);
    const uint64_t epoch = ep_begin(&stage.comm), begin = ep_trace_now(&stage.comm);
    const bool ok = epoch && H::enter(p, epoch);
    ep_trace_span(&stage.comm, EP_SPAN_ENTER, 0, begin);
    H hooks(p, ok);
    if (threadIdx.x == 0) {
        ep_shared_epoch = epoch;
        H::keep(ok);
    }
    __syncthreads();
    if (epoch) ep_gemm_body<C>(&p.gemm, hooks, map_a, map_b);
    const EpLeft left = ep_cta_leave(&stage.comm, EpSharedEpoch());
    reset_ready(&stage.comm, stage.plan, left);
    if (left == EP_LEFT_LAST_FAILED) H::poison(p);
}

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    mega_kernel_dispatch_token_moe_grouped_gemm(const __grid_constant__ EpDispatchGemmParams p,
                                                const __grid_constant__ CUtensorMap map_a,
                                                const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    mega_body<C, EpDispatchHooks<C::KEEPS>>(p, &map_a, &map_b);
#endif
}

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    mega_kernel_moe_grouped_gemm_combine_token(const __grid_constant__ EpGemmCombineParams p,
                                               const __grid_constant__ CUtensorMap map_a,
                                               const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static_assert(EpCombineConfig<EP_BF16, EP_OP_GEMM_COMBINE, false>::Fifo::BYTES == EpFusedFifo::BYTES,
                  "communication warps have room");
    static_assert(C::STAGES * C::STAGE_BYTES >= 8 * EpCombineConfig<EP_BF16, EP_OP_GEMM_COMBINE>::Fifo::BYTES,
                  "after_last_tile has room");
    mega_body<C, EpCombineHooks<C::F16 ? EP_F16 : EP_BF16, C::KIND == EP_GEMM_DGRAD>>(p, &map_a, &map_b);
#endif
}

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    mega_kernel_dispatch_token_moe_grouped_gemm_fp8(const __grid_constant__ EpMegaFp8Params p,
                                                    const __grid_constant__ CUtensorMap map_a,
                                                    const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    mega_body<C, EpDispatchFp8Hooks>(p, &map_a, &map_b);
#endif
}

/* ---- the table of megakernels ---- */

/* X(operation, kernel, columns of a tile, activation): all instances, each for bf16 and fp16. */
#define EP_MEGA_VARIANTS(X)                                                                      \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 256, EP_ACT_NONE)        \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 192, EP_ACT_NONE)        \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 128, EP_ACT_NONE)        \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 256, EP_ACT_GELU)        \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 128, EP_ACT_GELU)        \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 256, EP_ACT_SWIGLU)      \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 128, EP_ACT_SWIGLU)      \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 256, EP_ACT_GPT_OSS)     \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 128, EP_ACT_GPT_OSS)     \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 256, EP_ACT_ANY_GATE)    \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 128, EP_ACT_ANY_GATE)    \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 256, EP_ACT_ANY_UNGATED) \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 128, EP_ACT_ANY_UNGATED) \
    X(EP_OP_GEMM_COMBINE, mega_kernel_moe_grouped_gemm_combine_token, 256, EP_ACT_NONE)          \
    X(EP_OP_GEMM_COMBINE, mega_kernel_moe_grouped_gemm_combine_token, 192, EP_ACT_NONE)          \
    X(EP_OP_GEMM_COMBINE, mega_kernel_moe_grouped_gemm_combine_token, 128, EP_ACT_NONE)

/* X(operation, kernel, columns of a tile): the instances of the backward pass, which multiply with transposed
 * weights: dispatch of dy + DGRAD, and DGRAD + combine of dx. */
#define EP_MEGA_BACKWARD_VARIANTS(X)                                         \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 256) \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 192) \
    X(EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm, 128) \
    X(EP_OP_GEMM_COMBINE, mega_kernel_moe_grouped_gemm_combine_token, 256)   \
    X(EP_OP_GEMM_COMBINE, mega_kernel_moe_grouped_gemm_combine_token, 192)   \
    X(EP_OP_GEMM_COMBINE, mega_kernel_moe_grouped_gemm_combine_token, 128)

/* X(columns of a tile): the instances of dispatch + GEMM that keep gate and up. */
#define EP_MEGA_KEEP_VARIANTS(X) X(256) X(128)

/* One row of the table (cluster_launch.h). Dynamic shared memory of a CTA: the GEMM's part, and a part for
 * each communication warp: three, or two where one loads scales. Static shared memory uses at most 1024 bytes
 * more. */
template <typename C, typename P>
static EpClusterKernel mega_row(uint32_t op, void (*kernel)(P, CUtensorMap, CUtensorMap), uint32_t tile_cols,
                                uint32_t activation) {
    constexpr uint32_t SMEM_BYTES = C::SMEM_BYTES + (C::BY_BLOCK ? 2 : 3) * EpFusedFifo::BYTES;
    static_assert(SMEM_BYTES + 1024 <= EP_CTA_SMEM_BYTES, "a CTA has this much shared memory");
    return {(const void *)kernel, op, C::KIND, tile_cols, activation, EP_GEMM_THREADS, SMEM_BYTES, {}};
}
#define EP_MEGA_ROW(OP, KERNEL, KIND, BN, ACT, F16) \
    mega_row<EpGemmConfig<KIND, BN, ACT, F16>>(OP, KERNEL<EpGemmConfig<KIND, BN, ACT, F16>>, BN, ACT),

#define EP_MEGA_KEEP_ROW(BN, F16)                                                                        \
    mega_row<EpGemmKeepConfig<BN, F16>>(                                                                 \
        EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm<EpGemmKeepConfig<BN, F16>>, BN, \
        EP_ACT_SWIGLU),

#define EP_MEGA_FP8_ROW(ACT, F16)            \
    mega_row<EpGemmMegaFp8Config<ACT, F16>>( \
        EP_OP_DISPATCH_GEMM_FP8,             \
        mega_kernel_dispatch_token_moe_grouped_gemm_fp8<EpGemmMegaFp8Config<ACT, F16>>, 256, ACT),

#endif /* EP_FUSED_CUH */
