/* gemm_fp8.cu - the sm_90a kernels of the grouped GEMM of FP8, with results in bf16 and in fp16. */
#include "kernels/gemm/gemm_hopper.cuh"

/* The kernels with pieces have the most accumulators. */
template <typename C> struct EpGemmFp8Hooks : EpGemmNoHooks {
    static constexpr bool MANY = C::BY_BLOCK && C::NUM_PIECES == 2;
    static constexpr int PRODUCER_REGS = MANY ? 40 : 56, MMA_REGS = MANY ? 232 : 224;
    const EpGemmScales *scales;
};

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    fp8_gemm_kernel(const __grid_constant__ EpGemmFp8Params p, const __grid_constant__ CUtensorMap map_a,
                    const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    EpGemmFp8Hooks<C> hooks;
    hooks.scales = &p.scales;
    ep_gemm_body<C>(&p.gemm, hooks, &map_a, &map_b);
#endif
}

template <int BN, bool BY_BLOCK, int ACT, bool F16> static EpClusterKernel fp8_row() {
    typedef EpGemmFp8Config<BN, BY_BLOCK, ACT, F16> C;
    return {(const void *)fp8_gemm_kernel<C>, 0, C::KIND, C::BN, ACT, EP_GEMM_THREADS, C::SMEM_BYTES, {}};
}
#define EP_ROWS(BN, BY_BLOCK, F16)                                                                 \
    fp8_row<BN, BY_BLOCK, EP_ACT_NONE, F16>(), fp8_row<BN, BY_BLOCK, EP_ACT_GELU, F16>(),          \
        fp8_row<BN, BY_BLOCK, EP_ACT_SWIGLU, F16>(), fp8_row<BN, BY_BLOCK, EP_ACT_GPT_OSS, F16>(), \
        fp8_row<BN, BY_BLOCK, EP_ACT_ANY_GATE, F16>(), fp8_row<BN, BY_BLOCK, EP_ACT_ANY_UNGATED, F16>()
EpClusterKernel ep_gemm_kernels_fp8_bf16[] = {EP_ROWS(256, true, false), EP_ROWS(64, true, false), {}};
EpClusterKernel ep_gemm_kernels_fp8_f16[] = {EP_ROWS(256, true, true), EP_ROWS(64, true, true), {}};
/* One scale of each row, or of all, and one of each expert. */
EpClusterKernel ep_gemm_kernels_sum_scaled_bf16[] = {EP_ROWS(256, false, false), {}};
EpClusterKernel ep_gemm_kernels_sum_scaled_f16[] = {EP_ROWS(256, false, true), {}};
