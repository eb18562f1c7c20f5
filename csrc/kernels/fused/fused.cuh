/* fused.cuh - the two megakernels.
 *
 * dispatch + GEMM   sends tokens, receives tokens, and multiplies each row block when its rows are there.
 * GEMM + combine    multiplies, and returns each finished row while other tiles are still being computed.
 *
 * Roles. Every CTA runs the grouped GEMM (gemm.cuh): one producer warp and two MMA warpgroups. The producer's
 * warpgroup has three more warps, which the GEMM does not need. They are the communication warps. So
 * communication takes no SM away from the tensor cores.
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
#include "kernels/fused/fused.h"
#include "kernels/gemm/gemm_hopper.cuh"
#include "kernels/stage/combine.cuh"
#include "kernels/stage/dispatch.cuh"

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

struct EpDispatchHooks {
    static constexpr bool FUSED = true;
    static constexpr int PRODUCER_REGS = EP_FUSED_COMM_REGS, MMA_REGS = EP_FUSED_MMA_REGS;
    const EpDispatchGemmParams &p;
    /* The operation is valid, as far as this thread knows. */
    bool ok;
    uint32_t awaited;

    __device__ void comm(uint32_t smem) {
        if (!ok || blockIdx.x >= p.num_move_blocks) return;
        const EpMoveWhat what = p.num_tail_blocks == 0           ? EP_MOVE_ALL
                                : blockIdx.x < p.num_tail_blocks ? EP_MOVE_RECEIVES
                                                                 : EP_MOVE_SENDS;
        move_tokens<true>(p.dispatch, EP_OP_DISPATCH_GEMM, EpSharedEpoch(), what,
                          fifo_at<EpFusedFifo>(smem, 1));
    }
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
            ok = ep_ready_await(&p.dispatch.comm, EP_OP_DISPATCH_GEMM, b, ep_ready_count(b, m, 1),
                                EpSharedEpoch(), &w);
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

template <int DTYPE> struct EpCombineHooks {
    static constexpr bool FUSED = true;
    static constexpr int PRODUCER_REGS = EP_FUSED_COMM_REGS, MMA_REGS = EP_FUSED_MMA_REGS;
    const EpGemmCombineParams &p;
    /* Rows of the last tile that this warp has stored but not yet counted. */
    uint32_t row, num_rows;

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

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    mega_kernel_dispatch_token_moe_grouped_gemm(const __grid_constant__ EpDispatchGemmParams p,
                                                const __grid_constant__ CUtensorMap map_a,
                                                const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const EpDispatchParams &d = p.dispatch;
    ep_trace_start(&d.comm);
    const uint64_t epoch = ep_begin(&d.comm), begin = ep_trace_now(&d.comm);
    const bool ok = epoch && ep_cta_enter(&d.comm, EP_OP_DISPATCH_GEMM, d.plan, NULL, d.layout.num_tokens,
                                          d.num_rows, d.has_weight, 0, epoch);
    ep_trace_span(&d.comm, EP_SPAN_ENTER, 0, begin);
    EpDispatchHooks hooks = {p, ok, UINT32_MAX};
    if (threadIdx.x == 0) ep_shared_epoch = epoch;
    __syncthreads();
    if (epoch) ep_gemm_body<C>(&p.gemm, hooks, &map_a, &map_b);
    const EpLeft left = ep_cta_leave(&d.comm, EpSharedEpoch());
    reset_ready(&d.comm, d.plan, left);
    if (left != EP_LEFT_LAST_FAILED) return;
    poison_dispatch(d);
    ep_cta_fill(p.gemm.out, 2ull * p.gemm.num_rows * ep_gemm_out_cols(&p.gemm), EP_NAN_WORD);
#endif
}

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    mega_kernel_moe_grouped_gemm_combine_token(const __grid_constant__ EpGemmCombineParams p,
                                               const __grid_constant__ CUtensorMap map_a,
                                               const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const EpCombineParams &k = p.combine;
    static_assert(EpCombineConfig<EP_BF16, EP_OP_GEMM_COMBINE, false>::Fifo::BYTES == EpFusedFifo::BYTES,
                  "communication warps have room");
    static_assert(C::STAGES * C::STAGE_BYTES >= 8 * EpCombineConfig<EP_BF16, EP_OP_GEMM_COMBINE>::Fifo::BYTES,
                  "after_last_tile has room");
    ep_trace_start(&k.comm);
    const uint64_t epoch = ep_begin(&k.comm), begin = ep_trace_now(&k.comm);
    const bool ok = epoch && ep_cta_enter(&k.comm, EP_OP_GEMM_COMBINE, k.plan, k.recv, k.layout.num_tokens,
                                          k.num_rows, k.has_weight, 0, epoch);
    ep_trace_span(&k.comm, EP_SPAN_ENTER, 0, begin);
    EpCombineHooks<C::F16 ? EP_F16 : EP_BF16> hooks = {p, 0, 0};
    if (threadIdx.x == 0) {
        ep_shared_epoch = epoch;
        ep_shared_ok = ok;
    }
    __syncthreads();
    if (epoch) ep_gemm_body<C>(&p.gemm, hooks, &map_a, &map_b);
    const EpLeft left = ep_cta_leave(&k.comm, EpSharedEpoch());
    reset_ready(&k.comm, k.plan, left);
    if (left == EP_LEFT_LAST_FAILED) poison_combine(k);
#endif
}

/* ---- launch ---- */

/* Dynamic shared memory of a CTA: the GEMM's part, and a part for each of the three communication warps.
 * Static shared memory uses at most 1024 bytes more. */
template <typename C> constexpr uint32_t FUSED_SMEM = C::SMEM_BYTES + 3 * EpFusedFifo::BYTES;

/* Launch one CTA on each SM that is not reserved, in clusters of two, with all CTAs resident at once; or
 * return an error. num_tail is a field of p, or NULL. A rank that shares its GPU has fewer CTAs than the
 * caller may have assumed. If all of them would only receive, half of them receive and the other half
 * sends. */
template <typename C, typename P>
static cudaError_t launch_resident_pairs(void (*kernel)(P, CUtensorMap, CUtensorMap), const P &p,
                                         const EpGemmParams *gemm, uint32_t reserve_sms, uint32_t *num_tail,
                                         cudaStream_t stream) {
    static_assert(FUSED_SMEM<C> + 1024 <= EP_CTA_SMEM_BYTES, "a CTA has this much shared memory");
    CUtensorMap a, b;
    EpGemmParams seen = *gemm;
    int device = 0, num_sm = 0, num_pairs = 0;
    /* A tensor map cannot have a dimension of 0. Nothing is read. */
    if (seen.num_rows == 0) {
        seen.a = seen.b;
        seen.num_rows = 1;
    }
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FUSED_SMEM<C>);
    if (e == cudaSuccess) e = encode(ep_map_a(&seen, C::BN), &a);
    if (e == cudaSuccess) e = encode(ep_map_b(&seen, C::BN), &b);
    if (e == cudaSuccess) e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&num_sm, cudaDevAttrMultiProcessorCount, device);
    const uint32_t most = (uint32_t)num_sm > reserve_sms + 1 ? (uint32_t)num_sm - reserve_sms : 2;
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {
        dim3(most / 2 * 2), dim3(EP_GEMM_THREADS), FUSED_SMEM<C>, stream, attributes, 1};
    attributes[0].id = cudaLaunchAttributeClusterDimension, attributes[0].val.clusterDim = {2, 1, 1};
    attributes[1].id = cudaLaunchAttributeCooperative, attributes[1].val.cooperative = 1;
    if (e == cudaSuccess) e = cudaOccupancyMaxActiveClusters(&num_pairs, kernel, &config);
    if (e == cudaSuccess && num_pairs == 0) e = cudaErrorCooperativeLaunchTooLarge;
    if (e != cudaSuccess) return e;
    if (config.gridDim.x > 2 * (uint32_t)num_pairs) config.gridDim.x = 2 * (uint32_t)num_pairs;
    if (num_tail && *num_tail >= config.gridDim.x) *num_tail = config.gridDim.x / 2;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, p, a, b);
}

template <int BN, int ACT, bool F16> static cudaError_t launch_dispatch_gemm(const EpDispatchGemmParams *p,
                                                                             cudaStream_t stream) {
    typedef EpGemmConfig<EP_GEMM_FORWARD, BN, ACT, F16> C;
    EpDispatchGemmParams q = *p;
    return launch_resident_pairs<C>(mega_kernel_dispatch_token_moe_grouped_gemm<C>, q, &p->gemm,
                                    p->dispatch.comm.reserve_sms, &q.num_tail_blocks, stream);
}
template <int BN, bool F16> static cudaError_t launch_gemm_combine(const EpGemmCombineParams *p,
                                                                   cudaStream_t stream) {
    typedef EpGemmConfig<EP_GEMM_FORWARD, BN, EP_ACT_NONE, F16> C;
    EpGemmCombineParams q = *p;
    q.combine.row_pieces = (ep_gemm_num_cols(&p->gemm) + BN - 1) / BN;
    return launch_resident_pairs<C>(mega_kernel_moe_grouped_gemm_combine_token<C>, q, &p->gemm,
                                    p->combine.comm.reserve_sms, NULL, stream);
}

template <bool F16> static cudaError_t launch_dispatch_gemm_of(const EpDispatchGemmParams *p,
                                                               cudaStream_t stream) {
    const uint32_t tile_cols = ep_gemm_tile_cols(&p->gemm);
#define EP_CASE(KIND, BN, ACT)                                                   \
    if (KIND == EP_GEMM_FORWARD && p->gemm.activation == ACT && tile_cols == BN) \
        return launch_dispatch_gemm < BN, KIND == EP_GEMM_FORWARD ? ACT : 0, F16 > (p, stream);
    EP_GEMM_VARIANTS(EP_CASE)
#undef EP_CASE
    return cudaErrorInvalidValue;
}
template <bool F16> static cudaError_t launch_gemm_combine_of(const EpGemmCombineParams *p,
                                                              cudaStream_t stream) {
    switch (ep_gemm_tile_cols(&p->gemm)) {
    case 256: return launch_gemm_combine<256, F16>(p, stream);
    case 192: return launch_gemm_combine<192, F16>(p, stream);
    default: return launch_gemm_combine<128, F16>(p, stream);
    }
}

/* Load every kernel of a dtype now; see launch.h. */
template <bool F16> static cudaError_t preload_fused(void) {
    cudaFuncAttributes a;
    cudaError_t e = cudaSuccess;
#define EP_CASE(KIND, BN, ACT)                                                                             \
    if (KIND == EP_GEMM_FORWARD && e == cudaSuccess)                                                       \
        e = cudaFuncGetAttributes(                                                                         \
            &a, mega_kernel_dispatch_token_moe_grouped_gemm<EpGemmConfig<EP_GEMM_FORWARD, BN, ACT, F16>>); \
    if (KIND == EP_GEMM_FORWARD && ACT == EP_ACT_NONE && e == cudaSuccess)                                 \
        e = cudaFuncGetAttributes(&a, mega_kernel_moe_grouped_gemm_combine_token<                          \
                                          EpGemmConfig<EP_GEMM_FORWARD, BN, EP_ACT_NONE, F16>>);
    EP_GEMM_VARIANTS(EP_CASE)
#undef EP_CASE
    return e;
}

#endif /* EP_FUSED_CUH */
