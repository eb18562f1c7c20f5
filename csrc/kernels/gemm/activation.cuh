/* activation.cuh - the gradient of an activation: a warp's part; see protocol/activation_gradient.h.
 *
 * A warp computes one row at a time, and a lane eight neighbouring columns of 256. The gradient moves six
 * numbers for each column of a gated activation, or four, and is limited by DRAM. QUANTIZES: the results are
 * quantised at once, for a training step in FP8, and not read again: of a row, 16 lanes have a group of 128
 * columns, or 8 lanes where gates and ups are mixed. */
#ifndef EP_ACTIVATION_CUH
#define EP_ACTIVATION_CUH
#include "kernels/quantize/e4m3.cuh"
#include "protocol/activation_gradient.h"
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

/* Quantise 8 * NUM numbers of each lane, rounded to 16 bits, in groups of 128: those of LANES lanes. They
 * begin at column `col` of a row of num_cols; col >= num_cols: this lane has none. */
template <int DTYPE, int NUM> EP_FN void ep_act_quantize(const EpActivationParams &p, const float *numbers,
                                                         uint32_t row, uint32_t col, uint32_t num_cols,
                                                         uint8_t *to, float *scales) {
    constexpr uint32_t LANES = 16 / NUM;
    typedef EpVec<DTYPE> Vec;
    float f[8 * NUM], most = EP_QUANTIZE_LEAST;
#pragma unroll
    for (int i = 0; i < NUM; i++) Vec::unpack(Vec::pack(numbers + 8 * i), f + 8 * i);
#pragma unroll
    for (int i = 0; i < 8 * NUM; i++) most = fmaxf(most, fabsf(f[i]));
#pragma unroll
    for (uint32_t j = LANES / 2; j > 0; j /= 2) most = fmaxf(most, __shfl_xor_sync(EP_FULL, most, (int)j));
    const float scale = ep_quantize_scale(most, true), inverse = __frcp_rn(scale);
    if (col >= num_cols) return;
    if (ep_lane() % LANES == 0) scales[(uint64_t)(col / EP_QUANTIZE_GROUP) * p.num_rows + row] = scale;
#pragma unroll
    for (int i = 0; i < NUM; i++)
        *(uint2 *)(to + (uint64_t)row * num_cols + col + 8 * i) = ep_quantize_pack(f + 8 * i, inverse);
}

/* Quantise the results of a lane: y, the weighted rows, and h. A lane without columns takes part. */
template <int ACT, int DTYPE>
EP_FN void ep_act_quantize_all(const EpActivationParams &p, const EpGates<ACT, DTYPE> &h, const float *y,
                               uint32_t row, uint32_t c) {
    typedef EpGates<ACT, DTYPE> Gates;
    const uint32_t num_cols = p.num_cols;
    ep_act_quantize<DTYPE, 1>(p, y, row, c, num_cols, p.weighted8, p.weighted_scales);
    if constexpr (Gates::MIXED) {
        ep_act_quantize<DTYPE, 2>(p, h.v, row, 2 * c, 2 * num_cols, p.d_h8, p.d_h_scales);
    } else {
        const uint32_t all = Gates::GATED ? 2 * num_cols : num_cols, none = all;
        ep_act_quantize<DTYPE, 1>(p, h.v, row, c < num_cols ? c : none, all, p.d_h8, p.d_h_scales);
        if (Gates::GATED)
            ep_act_quantize<DTYPE, 1>(p, h.v + 8, row, c < num_cols ? num_cols + c : none, all, p.d_h8,
                                      p.d_h_scales);
    }
}

/* Row `row`: all lanes of a warp. The activations that share kernels are read from the parameters. */
template <int ACT, int DTYPE, bool QUANTIZES> EP_FN void ep_act_row(const EpActivationParams &p,
                                                                    uint32_t row) {
    static_assert(ACT == EP_ACT_KERNEL(ACT), "the others are read from the parameters");
    typedef EpGates<ACT, DTYPE> Gates;
    const bool is_shared = ACT == EP_ACT_ANY_GATE || ACT == EP_ACT_ANY_UNGATED;
    EpActivation act = p.activation;
    if (!is_shared) act.kind = ACT;
    if (ACT == EP_ACT_SWIGLU) act = ep_act_with_numbers(act); /* constants */
    const uint32_t num_cols = p.num_cols;
    const uint64_t at = (uint64_t)row * num_cols, of_h = Gates::GATED ? 2 * at : at;
    const float w = p.row_weight ? p.row_weight[row] : 1.0f;
    float dot = 0;
    /* QUANTIZES: all lanes stay together, because groups of lanes share a scale. */
    for (uint32_t c = 8 * ep_lane(); QUANTIZES ? c < num_cols + 8 * ep_lane() : c < num_cols;
         c += 8 * EP_DOT_PARTS) {
        Gates h = {};
        float d[8] = {};
        if (!QUANTIZES || c < num_cols) {
            Gates::Vec::unpack(*(const uint4 *)((const uint16_t *)p.d + at + c), d);
            h.load((const uint16_t *)p.h, of_h, c, num_cols);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float u = Gates::GATED ? h.v[Gates::at_up(i)] : 0.0f;
                const EpActivated y = ep_act_gradient(&act, h.v[Gates::at_gate(i)], u);
                const float wd = w * d[i];
                dot = fmaf(d[i], y.value, dot);
                h.v[Gates::at_gate(i)] = wd * y.of_gate;
                if (Gates::GATED) h.v[Gates::at_up(i)] = wd * y.of_up;
                d[i] = w * y.value;
            }
        }
        if constexpr (QUANTIZES) {
            ep_act_quantize_all<ACT, DTYPE>(p, h, d, row, c);
        } else {
            h.store((uint16_t *)p.d_h, of_h, c, num_cols);
            *(uint4 *)((uint16_t *)p.weighted + at + c) = Gates::Vec::pack(d);
        }
    }
#pragma unroll
    for (int half = EP_DOT_PARTS / 2; half; half /= 2) dot += __shfl_xor_sync(EP_FULL, dot, half);
    if (ep_lane() == 0) p.dots[row] = dot;
}

/* All rows of the experts, one warp after the other over the whole grid. */
template <int ACT, int DTYPE, bool QUANTIZES> EP_FN void ep_act_all_rows(const EpActivationParams &p) {
    const uint32_t num_warps = blockDim.x / 32;
    uint32_t begin, end;
    ep_act_rows(&p, &begin, &end);
    for (uint32_t row = begin + blockIdx.x * num_warps + threadIdx.x / 32; row < end;
         row += gridDim.x * num_warps)
        ep_act_row<ACT, DTYPE, QUANTIZES>(p, row);
}

#endif /* EP_ACTIVATION_CUH */
