/* gemm_epilogue.cuh - bias and activation of accumulators, and what a training step saves of them. */
#ifndef EP_GEMM_EPILOGUE_CUH
#define EP_GEMM_EPILOGUE_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/arch/ptx.cuh"
#include "protocol/activation_math.h"

/* Apply the activation to two neighbouring columns of two rows. d: four products; or four
 * gate values and then the four up values. out may be d, or precede it in memory. */
template <int ACT> EP_PTX void ep_gemm_activate(const EpGemmParams *p, const float *d, float *out) {
    static_assert(ACT == EP_ACT_KERNEL(ACT), "the others are read from the parameters");
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        ep_act_pair(ACT, p, d + i, d + 4 + i, out + i);
    }
}

/* Load two consecutive numbers, the first at an even index. */
template <bool F16> EP_PTX float2 ep_load_pair(const void *p, uint64_t i) {
    return F16 ? __half22float2(((const __half2 *)p)[i / 2])
               : __bfloat1622float2(((const __nv_bfloat162 *)p)[i / 2]);
}
/* Add the bias of output columns c (even) and c + 1, in two rows. d: four products; or four
 * gate values and then the four up values. */
template <int ACT, bool F16> EP_PTX void ep_gemm_add_bias(const EpGemmParams *p, uint32_t e, uint32_t c,
                                                          float *d) {
    const uint64_t base = (uint64_t)e * p->n;
    float2 v, u = {0, 0};
    if (EP_ACT_IS_MIXED(ACT)) { /* the weights are interleaved: gate, up, gate, up */
        const float2 a = ep_load_pair<F16>(p->bias, base + 2 * c);
        const float2 b = ep_load_pair<F16>(p->bias, base + 2 * c + 2);
        v.x = a.x;
        u.x = a.y;
        v.y = b.x;
        u.y = b.y;
    } else v = ep_load_pair<F16>(p->bias, base + c);
    if (EP_ACT_IS_GATED(ACT) && !EP_ACT_IS_MIXED(ACT)) u = ep_load_pair<F16>(p->bias, base + c + p->n / 2);
    d[0] += v.x;
    d[1] += v.y;
    d[2] += v.x;
    d[3] += v.y;
    if (EP_ACT_IS_GATED(ACT)) {
        d[4] += u.x;
        d[5] += u.y;
        d[6] += u.x;
        d[7] += u.y;
    }
}

/* Save what belongs to output columns c (even) and c + 1 of a row: two products; or two gates d[0], d[1] and
 * their ups d[4], d[5]. */
template <int ACT, bool F16> EP_PTX void ep_gemm_save_pair(const EpGemmParams *p, uint64_t row, uint32_t c,
                                                           const float *d) {
    uint32_t *to = (uint32_t *)((uint16_t *)p->saved + row * p->n);
    if (EP_ACT_IS_MIXED(ACT)) { /* gate, up, gate, up */
        to[c] = ep_pack<F16>(d[0], d[4]);
        to[c + 1] = ep_pack<F16>(d[1], d[5]);
    } else {
        to[c / 2] = ep_pack<F16>(d[0], d[1]);
        if (EP_ACT_IS_GATED(ACT)) to[(p->n / 2 + c) / 2] = ep_pack<F16>(d[4], d[5]);
    }
}

#endif /* EP_GEMM_EPILOGUE_CUH */
