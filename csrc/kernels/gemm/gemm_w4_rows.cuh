/* gemm_w4_rows.cuh - the rows of the tables of gemm_w4.h. */
#ifndef EP_GEMM_W4_ROWS_CUH
#define EP_GEMM_W4_ROWS_CUH
#include "kernels/gemm/gemm_hopper.cuh"
#include "kernels/gemm/gemm_w4.h"

/* The producer computes many addresses. */
template <typename C> struct EpGemmW4Hooks : EpGemmNoHooks {
    static constexpr int PRODUCER_REGS = C::LARGE ? 72 : 56, MMA_REGS = C::LARGE ? 216 : 88;
};

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, C::CTAS_PER_SM)
    w4_gemm_kernel(const __grid_constant__ EpGemmW4Params p, const __grid_constant__ CUtensorMap map_a,
                   const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    EpGemmW4Hooks<C> none;
    ep_gemm_body<C>(&p.gemm, none, &map_a, &map_b);
#endif
}

template <bool LARGE, int FORMAT, int ACT, bool F16> static EpClusterKernel w4_row() {
    typedef EpGemmW4Config<LARGE, FORMAT, ACT, F16> C;
    return {(const void *)w4_gemm_kernel<C>, 0, C::KIND, C::BN, ACT, EP_GEMM_THREADS, C::SMEM_BYTES, {}};
}
#define EP_W4_ROWS(LARGE, FORMAT, F16)                                                                       \
    {                                                                                                        \
        w4_row<LARGE, FORMAT, EP_ACT_NONE, F16>(), w4_row<LARGE, FORMAT, EP_ACT_GELU, F16>(),                \
            w4_row<LARGE, FORMAT, EP_ACT_SWIGLU, F16>(), w4_row<LARGE, FORMAT, EP_ACT_GPT_OSS, F16>(),       \
            w4_row<LARGE, FORMAT, EP_ACT_ANY_GATE, F16>(), w4_row<LARGE, FORMAT, EP_ACT_ANY_UNGATED, F16>(), \
        {}                                                                                                   \
    }

#endif /* EP_GEMM_W4_ROWS_CUH */
