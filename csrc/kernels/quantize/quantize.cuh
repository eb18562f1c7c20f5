/* quantize.cuh - rows to e4m3 with a scale for each 128 numbers, also after an activation.
 *
 * A task is one group of 128 columns in EP_QUANTIZE_ROWS rows, and a warp takes it. 16 lanes hold a group of
 * a row, each of them 8 numbers, which are 16 bytes of a 16-bit row. All loads of a task are in flight at
 * once. Its scales are next to each other in memory.
 * Invariant: the bits are those of cpu/quantize.c; see protocol/quantize.h. */
#ifndef EP_QUANTIZE_CUH
#define EP_QUANTIZE_CUH
#include "kernels/quantize/e4m3.cuh"
#include "kernels/quantize/eight.cuh"
#include "protocol/activation_math.h"
#include "protocol/quantize.h"

#define EP_QUANTIZE_WARPS 4u /* of a CTA */
#define EP_QUANTIZE_CTAS 7u  /* of an SM, so a thread has 72 registers */
#define EP_QUANTIZE_ROWS 8u  /* of a task */

EP_PURE uint32_t ep_quantize_num_tasks(const EpQuantizeParams *p, uint32_t num_rows) {
    return ep_ceil_div_u32(num_rows, EP_QUANTIZE_ROWS) * ep_quantize_num_groups(p);
}

/* What a lane reads for its 8 numbers of a row: them, or for a gate twice as many. */
template <int DTYPE, bool GATED> struct EpQuantizeInput {
    EpEight<DTYPE> part[1 + GATED];
};
template <int DTYPE, bool GATED, bool WHOLE>
EP_FN EpQuantizeInput<DTYPE, GATED> ep_quantize_read(const EpQuantizeParams &p, uint32_t row, uint32_t col,
                                                     int32_t num) {
    EpQuantizeInput<DTYPE, GATED> in;
    const uint64_t begin = (uint64_t)row * p.k;
    if (!GATED) {
        in.part[0] = ep_read_eight<DTYPE, WHOLE>(p.x, begin + col, num);
    } else if (EP_ACT_IS_MIXED(p.activation.kind)) { /* gate, up, gate, up */
        in.part[0] = ep_read_eight<DTYPE, WHOLE>(p.x, 2 * (begin + col), 2 * num);
        in.part[GATED] = ep_read_eight<DTYPE, WHOLE>(p.x, 2 * (begin + col) + 8, 2 * num - 8);
    } else {
        in.part[0] = ep_read_eight<DTYPE, WHOLE>(p.x, 2 * begin + col, num);
        in.part[GATED] = ep_read_eight<DTYPE, WHOLE>(p.x, 2 * begin + p.k + col, num);
    }
    return in;
}
template <int DTYPE, int ACT, bool GATED>
EP_FN void ep_quantize_unpack(const EpQuantizeParams &p, const EpQuantizeInput<DTYPE, GATED> &in, float *f) {
    enum { NUM = 8 * (1 + GATED) };
    float a[NUM];
    EpEight<DTYPE>::unpack(in.part[0], a);
    if (GATED) EpEight<DTYPE>::unpack(in.part[GATED], a + NUM - 8);
    static_assert(ACT == EP_ACT_KERNEL(ACT), "the others are read from the parameters");
    const uint32_t activation = ACT == EP_ACT_SWIGLU ? EP_ACT_SWIGLU : p.activation.kind;
    const bool mixed = EP_ACT_IS_MIXED(activation);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int gate = 2 * i % NUM, up = (2 * i + 1) % NUM; /* where they are mixed */
        if (ACT == EP_ACT_NONE) f[i] = a[i];
        else if (ACT == EP_ACT_GELU) f[i] = ep_quantize_gelu(a[i]);
        else if (!GATED) f[i] = ep_quantize_ungated(&p, activation, a[i]);
        else f[i] = ep_quantize_gate(&p, activation, mixed ? a[gate] : a[i], mixed ? a[up] : a[i + NUM - 8]);
    }
}

template <bool WHOLE> EP_FN void ep_quantize_write(uint8_t *to, uint2 q, int32_t num) {
    if (WHOLE) {
        if (num > 0) *(uint2 *)to = q;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < num) to[i] = (uint8_t)((i < 4 ? q.x : q.y) >> 8 * (i % 4));
    }
}

/* Quantise group g of 2 * LOADS rows from row0 on. Load i of a lane is of row row0 + 2 * i + half. */
template <int DTYPE, int ACT, bool WHOLE, uint32_t LOADS> EP_FN void
ep_quantize_task(const EpQuantizeParams &p, uint32_t row0, uint32_t num_rows, uint32_t g) {
    constexpr bool GATED = EP_ACT_IS_GATED(ACT);
    const uint32_t lane = ep_lane(), half = lane / 16, col = g * EP_QUANTIZE_GROUP + lane % 16 * 8;
    const int32_t left = (int32_t)p.k - (int32_t)col, num = left < 8 ? left : 8;
    EpQuantizeInput<DTYPE, GATED> in[LOADS];
#pragma unroll
    for (uint32_t i = 0; i < LOADS; i++) {
        const uint32_t row = row0 + 2 * i + half;
        in[i] = ep_quantize_read<DTYPE, GATED, WHOLE>(p, row, col, row < num_rows ? num : 0);
    }
    float f[LOADS][8], my_most = 0;
#pragma unroll
    for (uint32_t i = 0; i < LOADS; i++) {
        float most = EP_QUANTIZE_LEAST;
        ep_quantize_unpack<DTYPE, ACT, GATED>(p, in[i], f[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(f[i][j]));
#pragma unroll
        for (int j = 8; j > 0; j /= 2) most = fmaxf(most, __shfl_xor_sync(EP_FULL, most, j));
        if (lane % 16 == i) my_most = most;
    }
    /* Lane i of a half divides for row i of the half. */
    const float scale = ep_quantize_scale(my_most, p.is_pow2);
    const float inverse = __frcp_rn(scale);
    const uint32_t my_row = row0 + 2 * (lane % 16) + half;
    if (lane % 16 < LOADS && my_row < num_rows) p.scales[(uint64_t)g * p.max_rows + my_row] = scale;
#pragma unroll
    for (uint32_t i = 0; i < LOADS; i++) {
        const uint32_t row = row0 + 2 * i + half;
        const uint2 q = ep_quantize_pack(f[i], __shfl_sync(EP_FULL, inverse, (int)(16 * half + i)));
        ep_quantize_write<WHOLE>(p.q + (uint64_t)row * p.k + col, q, row < num_rows ? num : 0);
    }
}

template <int DTYPE, int ACT> __global__ void __launch_bounds__(32 * EP_QUANTIZE_WARPS, EP_QUANTIZE_CTAS)
    quantize_kernel(const __grid_constant__ EpQuantizeParams p) {
    const uint32_t num_rows = ep_quantize_rows(&p), num_groups = ep_quantize_num_groups(&p);
    const uint32_t num_tasks = ep_quantize_num_tasks(&p, num_rows);
    /* Fewer loads where they or the arithmetic need many registers. */
    constexpr bool is_large = (DTYPE == EP_F32 && EP_ACT_IS_GATED(ACT)) || ACT == EP_ACT_GELU;
    constexpr uint32_t LOADS = is_large ? 2 : EP_QUANTIZE_ROWS / 2;
    const bool whole = p.k % 8 == 0;
    for (uint32_t i = blockIdx.x * EP_QUANTIZE_WARPS + threadIdx.x / 32; i < num_tasks;
         i += gridDim.x * EP_QUANTIZE_WARPS) {
        const uint32_t row0 = i / num_groups * EP_QUANTIZE_ROWS, g = i % num_groups;
#pragma unroll 1
        for (uint32_t r = 0; r < EP_QUANTIZE_ROWS; r += whole ? 2 * LOADS : 2) {
            if (whole) ep_quantize_task<DTYPE, ACT, true, LOADS>(p, row0 + r, num_rows, g);
            else ep_quantize_task<DTYPE, ACT, false, 1>(p, row0 + r, num_rows, g);
        }
    }
}

typedef void EpQuantizeKernel(EpQuantizeParams);
template <int DTYPE> EpQuantizeKernel *ep_quantize_kernel_for(uint32_t activation) {
    const uint32_t act = EP_ACT_KERNEL(activation);
    return act == EP_ACT_NONE     ? quantize_kernel<DTYPE, EP_ACT_NONE>
           : act == EP_ACT_GELU   ? quantize_kernel<DTYPE, EP_ACT_GELU>
           : act == EP_ACT_SWIGLU ? quantize_kernel<DTYPE, EP_ACT_SWIGLU>
           : EP_ACT_IS_GATED(act) ? quantize_kernel<DTYPE, EP_ACT_ANY_GATE>
                                  : quantize_kernel<DTYPE, EP_ACT_ANY_UNGATED>;
}
static EpQuantizeKernel *ep_quantize_kernel(uint32_t dtype, uint32_t activation) {
    EP_HANDLES_ALL(EP_NUM_DTYPES, 3);
    return dtype == EP_F32   ? ep_quantize_kernel_for<EP_F32>(activation)
           : dtype == EP_F16 ? ep_quantize_kernel_for<EP_F16>(activation)
                             : ep_quantize_kernel_for<EP_BF16>(activation);
}

#endif /* EP_QUANTIZE_CUH */
