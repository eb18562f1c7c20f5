/* gemm_accumulate.cu - the sm_90a kernels of WGRAD that add to fp32 numbers, of inputs in bf16 and fp16. */
#include "kernels/gemm/gemm_hopper.cuh"

template <int BN, bool F16> static EpClusterKernel accumulate_row() {
    typedef EpGemmAccumulateConfig<BN, F16> C;
    return {(const void *)gemm_kernel<C>, 0, C::KIND, BN, C::ACT, EP_GEMM_THREADS, C::SMEM_BYTES, {}};
}
EpClusterKernel ep_gemm_kernels_accumulate_bf16[] = {
    accumulate_row<256, false>(), accumulate_row<192, false>(), accumulate_row<128, false>(), {}};
EpClusterKernel ep_gemm_kernels_accumulate_f16[] = {
    accumulate_row<256, true>(), accumulate_row<192, true>(), accumulate_row<128, true>(), {}};
