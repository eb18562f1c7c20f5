/* gemm_wgrad_fp8.cu - the sm_90a kernels of the gradient of weights in FP8, and their launcher. */
#include "kernels/gemm/gemm_hopper.cuh"
#include "kernels/gemm/gemm_wgrad_fp8.cuh"
#include "kernels/launch.h"

template <typename C>
__global__ void __launch_bounds__(EP_GEMM_THREADS, 1)
    wgrad_fp8_gemm_kernel(const __grid_constant__ EpWgradFp8Params p,
                          const __grid_constant__ CUtensorMap map_a,
                          const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ep_wgrad_fp8_body<C>(&p, &map_a, &map_b);
#endif
}

template <bool F16, bool ADDS> static EpClusterKernel wgrad_fp8_row() {
    typedef EpWgradFp8Config<F16, ADDS> C;
    return {(const void *)wgrad_fp8_gemm_kernel<C>,
            0,
            C::KIND,
            C::BN,
            C::ACT,
            EP_GEMM_THREADS,
            C::SMEM_BYTES,
            {}};
}
/* By the output: bf16, fp16, or fp32 that is added to. */
static EpClusterKernel kernels[] = {wgrad_fp8_row<false, false>(), wgrad_fp8_row<true, false>(),
                                    wgrad_fp8_row<false, true>()};

extern "C" int ep_launch_wgrad_fp8(const EpWgradFp8Params *p, void *stream) {
    const EpGemmParams *g = &p->gemm;
    EpCapabilities c;
    uint32_t max_ctas;
    int e = ep_capabilities(&c);
    if (e || g->num_experts == 0) return e;
    if (!c.has_hopper) return (int)cudaErrorNotSupported;
    EpClusterKernel *k = &kernels[g->accumulates ? 2 : g->is_f16];
    e = ep_load_kernel(k, &max_ctas);
    if (e) return e;
    EpWgradFp8Params q = *p;
    q.gemm.limit_ns = EP_GEMM_MIN_LIMIT_NS;
    const EpClusterLaunch l = {c.num_sms / 2 * 2, false, &q, ep_map_transposed(p, g->a, g->n, 64),
                               ep_map_transposed(p, g->b, g->k, 128)};
    return ep_launch_clusters(k, &l, stream);
}
