/* fused_combine.cuh - what GEMM + combine adds to the grouped GEMM; see fused.cuh.
 *
 * Exports EpCombineHooks and EpCombineFp8Hooks. */
#ifndef EP_FUSED_COMBINE_CUH
#define EP_FUSED_COMBINE_CUH
#include "kernels/fused/fused_params.h"
#include "kernels/fused/fused_shared.cuh"
#include "kernels/stage/combine.cuh"

/* SCALAR: the kernel of the backward pass, which returns a number with each row. OP: the EP_OP_WORD in
 * headers and in errors. */
template <int DTYPE, bool SCALAR, uint32_t OP = EP_OP_GEMM_COMBINE> struct EpCombineHooks {
    static constexpr bool FUSED = true;
    static constexpr int PRODUCER_REGS = EP_FUSED_COMM_REGS, MMA_REGS = EP_FUSED_MMA_REGS;
    typedef EpGemmCombineParams Params;
    const Params &p;
    /* Rows of the last tile that this warp has stored but not yet counted. */
    uint32_t row, num_rows;

    __device__ EpCombineHooks(const Params &params, bool) : p(params), row(0), num_rows(0) {
        if (EpCombineConfig<DTYPE, OP>::OPENS) clear_open_chunks();
    }
    /* One thread stores the verdict for all threads, to save a register of each. */
    static __device__ void save_verdict(bool is_valid) { ep_shared_ok = is_valid; }
    static __device__ const EpCombineParams &stage(const Params &p) { return p.combine; }
    static __device__ bool enter(const Params &p, uint64_t epoch) {
        const EpCombineParams &k = p.combine;
        return ep_cta_enter(&k.comm, OP, k.plan, k.recv, k.layout.num_tokens, k.num_rows, k.has_weight,
                            SCALAR ? k.has_scalar : 0, epoch);
    }
    static __device__ void poison(const Params &p) { poison_combine(p.combine); }

    /* Count the rows of a warp's part of a tile. The warp does so while its next wgmma is in flight, so that
     * no one waits for the fence. */
    __device__ void count_rows(uint32_t first, uint32_t num) {
        if (num == 0) return;
        const uint32_t block = first / EP_TILE_ROWS;
        const uint32_t in_first = min(num, (block + 1) * EP_TILE_ROWS - first);
        const uint32_t lane = ep_lane_now();
        __syncwarp();
        /* orders the stores of all lanes before the counts: publishes the rows of this part */
        ep_fence_acq_rel_gpu();
        ep_chaos(EP_CHAOS_ROWS_COUNT);
        if (lane == 0) ep_red_add_relaxed_gpu(ep_ready_word(&p.combine.comm, block), in_first);
        if (lane == 1 && num > in_first)
            ep_red_add_relaxed_gpu(ep_ready_word(&p.combine.comm, block + 1), num - in_first);
    }
    __device__ void count() {
        count_rows(row, num_rows);
        num_rows = 0;
    }
    __device__ void await_rows(const EpGemmTile &) {}
    __device__ uint64_t tile_started() { return ep_trace_now(&p.combine.comm); }
    /* The rows of a warp's part of a tile: .x is the first one, .y is how many. */
    __device__ uint2 rows_of(const EpGemmTile &t, uint32_t group) {
        const uint32_t first = 64 * group + threadIdx.x / 32 % 4 * 16;
        const bool has_rows = first < t.num_rows && t.col0 < ep_gemm_num_cols(&p.gemm);
        return {t.row0 + first, has_rows ? min(16u, t.num_rows - first) : 0};
    }
    __device__ void trace_tile(const EpGemmTile &t, uint64_t begun) {
        if (threadIdx.x / 32 % 4 == 0) ep_trace_span(&p.combine.comm, EP_SPAN_GEMM, t.expert, begun);
    }
    __device__ void tile_written(const EpGemmTile &t, uint32_t group, uint64_t begun) {
        trace_tile(t, begun);
        const uint2 rows = rows_of(t, group);
        row = rows.x;
        num_rows = rows.y;
    }
    __device__ void mma_in_flight() { count(); }

    template <bool HAS_SMEM> __device__ void combine(uint32_t smem, uint32_t first_warp) {
        typedef EpCombineConfig<DTYPE, OP, HAS_SMEM> C;
        const EpCombineParts parts = {blockIdx.x < p.num_move_blocks, blockIdx.x < p.num_reduce_blocks};
        if (ep_ld_shared_u32(ep_smem(&ep_shared_ok)) &&
            (!p.is_serial || await_all_rows(p.combine, OP, EpSharedEpoch())))
            combine_tokens<C>(p.combine, EpSharedEpoch(), parts, fifo_at<typename C::Fifo>(smem, first_warp));
    }
    __device__ void comm(uint32_t smem) { combine<false>(smem, 1); }
    __device__ void after_last_tile(uint32_t smem) {
        count();
        combine<true>(smem, 4);
    }
};

/* The rows of each warp's last tile, which it has not yet counted; MMA warps of FP8 have no registers for
 * them. See rows_of. */
static __shared__ uint2 ep_shared_rows[EP_GEMM_THREADS / 32];
/* GEMM + combine in FP8. A tile's second piece is stored when the next tile has begun, so its rows are
 * counted when that one's last stage has begun. */
template <int DTYPE> struct EpCombineFp8Hooks : EpCombineHooks<DTYPE, true, EP_FP8_GEMM_COMBINE> {
    typedef EpCombineHooks<DTYPE, true, EP_FP8_GEMM_COMBINE> Base;
    static constexpr int PRODUCER_REGS = EP_FUSED_FP8_COMM_REGS, MMA_REGS = EP_FUSED_FP8_MMA_REGS;
    typedef EpCombineFp8Params Params;
    const EpGemmScales *scales;

    __device__ EpCombineFp8Hooks(const Params &params, bool is_valid)
        : Base(params, is_valid), scales(&params.scales) {
        put_rows({0, 0});
    }
    static __device__ void put_rows(uint2 rows) {
        __syncwarp(); /* every lane has read those before */
        if (ep_lane_now() == 0) ep_shared_rows[threadIdx.x / 32] = rows;
        __syncwarp();
    }
    __device__ void tile_written(const EpGemmTile &t, uint32_t group, uint64_t begun) {
        Base::trace_tile(t, begun);
        put_rows(Base::rows_of(t, group));
    }
    __device__ void mma_in_flight() {
        const uint2 rows = ep_shared_rows[threadIdx.x / 32];
        Base::count_rows(rows.x, rows.y);
    }
    __device__ void after_last_tile(uint32_t smem) {
        ep_bar_sync(1, 256); /* no warp of the CTA reads a stage any more, and no load is in flight */
        mma_in_flight();
        Base::template combine<true>(smem, 4);
    }
};

#endif /* EP_FUSED_COMBINE_CUH */
