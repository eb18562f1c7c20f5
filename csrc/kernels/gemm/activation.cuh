/* activation.cuh - the gradient of an activation: a warp's part; see protocol/activation.h.
 *
 * A warp computes one row at a time, and a lane eight neighbouring columns of 256. The gradient moves six
 * numbers for each column of a gated activation, or four, and is limited by DRAM. */
#ifndef EP_ACTIVATION_CUH
#define EP_ACTIVATION_CUH
#include "kernels/stage/rows.cuh"
#include "protocol/activation_math.h"

/* The eight gates and the eight ups of a lane's columns, before and after the gradient. */
template <int ACT, int DTYPE> struct EpGates {
    static constexpr bool GATED = EP_ACT_IS_GATED(ACT), MIXED = EP_ACT_IS_MIXED(ACT);
    typedef EpVec<DTYPE> Vec;
    float v[16]; /* MIXED: gate, up, gate, up; otherwise the gates, then the ups */

    static __device__ int at_gate(int i) { return MIXED ? 2 * i : i; }
    static __device__ int at_up(int i) { return MIXED ? 2 * i + 1 : 8 + i; }
    /* Where the two groups of eight numbers begin, in the row that begins with number `row`. */
    static __device__ uint64_t first(uint64_t row, uint32_t c) { return row + (MIXED ? 2 * c : c); }
    static __device__ uint64_t second(uint64_t row, uint32_t c, uint32_t num_cols) {
        return row + (MIXED ? 2 * c + 8 : num_cols + c);
    }
    __device__ void load(const uint16_t *h, uint64_t row, uint32_t c, uint32_t num_cols) {
        Vec::unpack(*(const uint4 *)(h + first(row, c)), v);
        if (GATED) Vec::unpack(*(const uint4 *)(h + second(row, c, num_cols)), v + 8);
    }
    __device__ void store(uint16_t *h, uint64_t row, uint32_t c, uint32_t num_cols) const {
        *(uint4 *)(h + first(row, c)) = Vec::pack(v);
        if (GATED) *(uint4 *)(h + second(row, c, num_cols)) = Vec::pack(v + 8);
    }
};

/* Row `row`: all lanes of a warp. The activations that share kernels are read from the parameters. */
template <int ACT, int DTYPE> EP_FN void ep_act_row(const EpActivationParams &p, uint32_t row) {
    static_assert(ACT == EP_ACT_KERNEL(ACT), "the others are read from the parameters");
    typedef EpGates<ACT, DTYPE> Gates;
    const bool is_shared = ACT == EP_ACT_ANY_GATE || ACT == EP_ACT_ANY_UNGATED;
    const uint32_t act = is_shared ? p.activation : ACT;
    const float alpha = ACT == EP_ACT_SWIGLU ? 1.0f : p.alpha;
    const float limit = ACT == EP_ACT_SWIGLU ? INFINITY : p.limit;
    const uint32_t num_cols = p.num_cols;
    const uint64_t at = (uint64_t)row * num_cols, of_h = Gates::GATED ? 2 * at : at;
    const float w = p.row_weight ? p.row_weight[row] : 1.0f;
    float dot = 0;
    for (uint32_t c = 8 * ep_lane(); c < num_cols; c += 8 * EP_DOT_PARTS) {
        Gates h;
        float d[8];
        Gates::Vec::unpack(*(const uint4 *)((const uint16_t *)p.d + at + c), d);
        h.load((const uint16_t *)p.h, of_h, c, num_cols);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float u = Gates::GATED ? h.v[Gates::at_up(i)] : 0.0f;
            const EpActivated y = ep_act_gradient(act, alpha, limit, h.v[Gates::at_gate(i)], u);
            const float wd = w * d[i];
            dot = fmaf(d[i], y.value, dot);
            h.v[Gates::at_gate(i)] = wd * y.of_gate;
            if (Gates::GATED) h.v[Gates::at_up(i)] = wd * y.of_up;
            d[i] = w * y.value;
        }
        h.store((uint16_t *)p.d_h, of_h, c, num_cols);
        *(uint4 *)((uint16_t *)p.weighted + at + c) = Gates::Vec::pack(d);
    }
#pragma unroll
    for (int half = EP_DOT_PARTS / 2; half; half /= 2) dot += __shfl_xor_sync(EP_FULL, dot, half);
    if (ep_lane() == 0) p.dots[row] = dot;
}

/* All rows of the experts, one warp after the other over the whole grid. */
template <int ACT, int DTYPE> EP_FN void ep_act_all_rows(const EpActivationParams &p) {
    const uint32_t num_warps = blockDim.x / 32;
    uint32_t begin, end;
    ep_act_rows(&p, &begin, &end);
    for (uint32_t row = begin + blockIdx.x * num_warps + threadIdx.x / 32; row < end;
         row += gridDim.x * num_warps)
        ep_act_row<ACT, DTYPE>(p, row);
}

#endif /* EP_ACTIVATION_CUH */
