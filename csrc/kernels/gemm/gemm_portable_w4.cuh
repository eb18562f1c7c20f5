/* gemm_portable_w4.cuh - the grouped GEMM with weights of 4 bits for any GPU from compute capability 8.0 on:
 * that of gemm_portable.cuh, which expands each weight as it loads it. Correct, not fast. */
#ifndef EP_GEMM_PORTABLE_W4_CUH
#define EP_GEMM_PORTABLE_W4_CUH
#include "kernels/gemm/gemm_portable.cuh"
#include "kernels/gemm/gemm_w4.cuh"

template <int ACT, bool F16> struct EpSimpleW4Gemm : EpSimpleGemm<ACT, F16, false> {
    using Base = EpSimpleGemm<ACT, F16, false>;
    using T = typename Base::T;

    static __device__ T load_b(const EpGemmW4Params *q, const EpGemmTile *t, uint32_t n, uint32_t c) {
        const EpGemmParams *p = &q->gemm;
        const EpFourBit *w = &q->weights;
        const uint32_t col = t->col0 + n;
        if (col >= p->n || c >= t->num_k) return T(0.0f);
        const uint32_t row = Base::weight_row(p, col);
        const uint64_t group = ep_four_bit_scale(w, p->n, p->k, t->expert, row, c);
        const uint8_t *codes = (const uint8_t *)p->b + (uint64_t)t->expert * p->n * (p->k / 2);
        const uint32_t code = ep_four_bit_code(w, codes, p->k, row, c);
        if (w->format == EP_MXFP4) return T(ep_four_bit_mxfp4(code, ((const uint8_t *)w->scales)[group]));
        const int zero = w->zeros ? w->zeros[group] : 8;
        return T((float)((int)code - zero) * (float)((const T *)w->scales)[group]);
    }
};

template <int ACT, bool F16> __global__ void __launch_bounds__(EP_SIMPLE_THREADS)
    simple_w4_gemm_kernel(const __grid_constant__ EpGemmW4Params q) {
    simple_gemm<EpSimpleW4Gemm<ACT, F16>>(q.gemm, q);
}

#endif /* EP_GEMM_PORTABLE_W4_CUH */
