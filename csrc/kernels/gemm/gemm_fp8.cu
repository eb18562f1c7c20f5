/* gemm_fp8.cu - the sm_90a kernels of the grouped GEMM of FP8, with results in bf16 and in fp16. */
#include "kernels/gemm/gemm_hopper.cuh"

struct EpGemmFp8Hooks : EpGemmNoHooks {
    const EpGemmScales *scales;
};

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    fp8_gemm_kernel(const __grid_constant__ EpGemmFp8Params p, const __grid_constant__ CUtensorMap map_a,
                    const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    EpGemmFp8Hooks hooks;
    hooks.scales = &p.scales;
    ep_gemm_body<C>(&p.gemm, hooks, &map_a, &map_b);
#endif
}

template <int BN, int ACT, bool F16> static EpClusterKernel fp8_row() {
    typedef EpGemmFp8Config<BN, ACT, F16> C;
    return {(const void *)fp8_gemm_kernel<C>, 0, C::KIND, C::BN, ACT, EP_GEMM_THREADS, C::SMEM_BYTES, {}};
}
#define EP_ROWS(BN, F16)                                                                                 \
    fp8_row<BN, EP_ACT_NONE, F16>(), fp8_row<BN, EP_ACT_GELU, F16>(), fp8_row<BN, EP_ACT_SWIGLU, F16>(), \
        fp8_row<BN, EP_ACT_GPT_OSS, F16>(), fp8_row<BN, EP_ACT_ANY_GATE, F16>(),                         \
        fp8_row<BN, EP_ACT_ANY_UNGATED, F16>()
EpClusterKernel ep_gemm_kernels_fp8_bf16[] = {EP_ROWS(128, false),
                                              EP_ROWS(64, false),
                                              EP_ROWS(256, false),
                                              {}},
                ep_gemm_kernels_fp8_f16[] = {EP_ROWS(128, true), EP_ROWS(64, true), EP_ROWS(256, true), {}};
