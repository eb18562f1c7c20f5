/* fused.cuh - the two megakernels.
 *
 * dispatch + GEMM   sends tokens, receives tokens, and multiplies each row block when its rows are there.
 * GEMM + combine    multiplies, and returns each finished row while other tiles are still being computed.
 *
 * Roles. Every CTA runs the grouped GEMM (gemm.cuh): one producer warp and two MMA warpgroups. The producer's
 * warpgroup has three more warps, which the GEMM does not need. They are the communication warps. So
 * communication takes no SM away from the tensor cores.
 *
 * With FP8, scales must be loaded, too. In dispatch + GEMM the first of the three warps does that, and two
 * communicate. In GEMM + combine the producer's warp does it.
 *
 * Coupling. The two halves meet in one counter per row block of 128 rows, ready[b] (flags.h).
 *   dispatch + GEMM: a communication warp adds 1 to ready[b] for each row that it has placed in row block b.
 *                    The producer of a tile waits until all row blocks of the tile are complete.
 *   GEMM + combine:  an MMA warp adds its rows to ready[b] after it has stored its part of a tile.
 *                    A communication warp returns a row after all columns of the row are stored. With FP8
 *                    the MMA warp adds them during its next tile, which waits for no communication.
 *
 * Freedom from deadlock. Tasks have levels: send < receive < multiply, and multiply < return < add up.
 *   (1) A worker waits only for tasks of a lower level than its own task, on this rank or another.
 *   (2) A worker that waits for a task holds no unfinished task of that level or a lower one.
 *       - A communication warp waits for a peer's chunk only if it holds no task to send or return. While the
 *         rows of a chunk that it must return are not ready, it continues to add up tokens. While a chunk in
 *         its CTA's table is open and not taken, the warp continues to look at it (open_chunks.cuh). This has
 *         a model of its own, tests/models/open_chunks.pml.
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
#include "kernels/fused/fused_combine.cuh"
#include "kernels/fused/fused_dispatch.cuh"

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
EP_FN void mega_body(const typename H::Params &p, const CUtensorMap *map_a, const CUtensorMap *map_b,
                     const CUtensorMap *low_a = nullptr, const CUtensorMap *low_b = nullptr,
                     uint32_t low_r = 0) {
    const auto &stage = H::stage(p);
    ep_trace_start(&stage.comm);
    const uint64_t epoch = ep_begin(&stage.comm), begin = ep_trace_now(&stage.comm);
    const bool ok = epoch && H::enter(p, epoch);
    ep_trace_span(&stage.comm, EP_SPAN_ENTER, 0, begin);
    H hooks(p, ok);
    if (threadIdx.x == 0) {
        ep_shared_epoch = epoch;
        H::save_verdict(ok);
    }
    __syncthreads();
    if (epoch) ep_gemm_body<C>(&p.gemm, hooks, map_a, map_b, low_a, low_b, low_r);
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
    mega_body<C, EpDispatchHooks<C::SAVES>>(p, &map_a, &map_b);
#endif
}

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    mega_kernel_moe_grouped_gemm_combine_token(const __grid_constant__ EpGemmCombineParams p,
                                               const __grid_constant__ CUtensorMap map_a,
                                               const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static_assert(C::STAGES * C::STAGE_BYTES >= 8 * EpCombineConfig<EP_BF16, EP_OP_GEMM_COMBINE>::Fifo::BYTES,
                  "after_last_tile has room");
    mega_body<C, EpCombineHooks<C::F16 ? EP_F16 : EP_BF16, C::KIND == EP_GEMM_DGRAD>>(p, &map_a, &map_b);
#endif
}

/* The same with a product of low rank, for the adapters of LoRA. */
template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    mega_kernel_moe_grouped_gemm_combine_token_low_rank(const __grid_constant__ EpGemmCombineParams p,
                                                        const __grid_constant__ CUtensorMap map_a,
                                                        const __grid_constant__ CUtensorMap map_b,
                                                        const __grid_constant__ CUtensorMap low_a,
                                                        const __grid_constant__ CUtensorMap low_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    mega_body<C, EpCombineHooks<C::F16 ? EP_F16 : EP_BF16, C::KIND == EP_GEMM_DGRAD>>(
        p, &map_a, &map_b, &low_a, &low_b, p.low.r);
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

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    mega_kernel_moe_grouped_gemm_combine_token_fp8(const __grid_constant__ EpCombineFp8Params p,
                                                   const __grid_constant__ CUtensorMap map_a,
                                                   const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static_assert(C::STAGES * C::STAGE_BYTES >=
                      8 * EpCombineConfig<EP_BF16, EP_FP8_GEMM_COMBINE>::Fifo::BYTES,
                  "after_last_tile has room");
    mega_body<C, EpCombineFp8Hooks<C::F16 ? EP_F16 : EP_BF16>>(p, &map_a, &map_b);
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

/* X(activation): the instances of dispatch + GEMM that save the product for the backward pass. */
#define EP_MEGA_SAVE_VARIANTS(X) \
    X(EP_ACT_GELU) X(EP_ACT_SWIGLU) X(EP_ACT_GPT_OSS) X(EP_ACT_ANY_GATE) X(EP_ACT_ANY_UNGATED)

/* One row of the table (cluster_launch.h). op: EP_OP_WORD. Dynamic shared memory of a CTA: the GEMM's part,
 * and a part for each communication warp: three, or two where one loads scales. Static shared memory uses at
 * most 1024 bytes more. */
template <typename C, typename... P>
static EpClusterKernel mega_row(uint32_t op, void (*kernel)(P...), uint32_t tile_cols, uint32_t activation) {
    constexpr uint32_t COMM_BYTES =
        C::WARP_PRODUCES ? 3 * EpCombineFp8Fifo::BYTES : (C::SCALE_WARP ? 2 : 3) * EpFusedFifo::BYTES;
    constexpr uint32_t SMEM_BYTES = C::SMEM_BYTES + COMM_BYTES;
    static_assert(SMEM_BYTES + 1024 <= EP_CTA_SMEM_BYTES, "a CTA has this much shared memory");
    return {(const void *)kernel, op, C::KIND, tile_cols, activation, EP_GEMM_THREADS, SMEM_BYTES, {}};
}
#define EP_MEGA_ROW(OP, KERNEL, KIND, BN, ACT, F16) \
    mega_row<EpGemmConfig<KIND, BN, ACT, F16>>(OP, KERNEL<EpGemmConfig<KIND, BN, ACT, F16>>, BN, ACT),

#define EP_MEGA_SAVE_ROW(ACT, F16)                                                                         \
    mega_row<EpGemmSaveConfig<256, ACT, F16>>(                                                             \
        EP_OP_DISPATCH_GEMM, mega_kernel_dispatch_token_moe_grouped_gemm<EpGemmSaveConfig<256, ACT, F16>>, \
        256, ACT),

#define EP_MEGA_LOW_RANK_ROW(KIND, F16)                         \
    mega_row<EpGemmLowRankConfig<KIND, 256, EP_ACT_NONE, F16>>( \
        EP_OP_GEMM_COMBINE,                                     \
        mega_kernel_moe_grouped_gemm_combine_token_low_rank<    \
            EpGemmLowRankConfig<KIND, 256, EP_ACT_NONE, F16>>,  \
        256, EP_ACT_NONE),

#define EP_MEGA_FP8_ROW(ACT, F16)            \
    mega_row<EpGemmMegaFp8Config<ACT, F16>>( \
        EP_FP8_DISPATCH_GEMM,                \
        mega_kernel_dispatch_token_moe_grouped_gemm_fp8<EpGemmMegaFp8Config<ACT, F16>>, 256, ACT),
#define EP_MEGA_COMBINE_FP8_ROW(F16)                                                                      \
    mega_row<EpGemmCombineFp8Config<F16>>(                                                                \
        EP_FP8_GEMM_COMBINE, mega_kernel_moe_grouped_gemm_combine_token_fp8<EpGemmCombineFp8Config<F16>>, \
        256, EP_ACT_NONE),

#endif /* EP_FUSED_CUH */
