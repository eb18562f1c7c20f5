/* activation.cu - the kernels of the gradient of an activation, and their launcher. */
#include "kernels/gemm/activation.cuh"

#include "kernels/launch.h"

enum { ACT_WARPS = 8, ACT_CTAS_PER_SM = 4 };

template <int ACT, int DTYPE, bool QUANTIZES>
__global__ void __launch_bounds__(32 * ACT_WARPS, ACT_CTAS_PER_SM)
    activation_kernel(const __grid_constant__ EpActivationParams p) {
    ep_act_all_rows<ACT, DTYPE, QUANTIZES>(p);
}

template <int DTYPE, bool QUANTIZES>
static int launch(const EpActivationParams *p, uint32_t num_ctas, cudaStream_t stream) {
#define EP_CASE(ACT)                                                                           \
    if (EP_ACT_KERNEL(p->activation.kind) == ACT) {                                            \
        activation_kernel<ACT, DTYPE, QUANTIZES><<<num_ctas, 32 * ACT_WARPS, 0, stream>>>(*p); \
        return (int)cudaGetLastError();                                                        \
    }
    EP_ACT_KERNELS(EP_CASE)
#undef EP_CASE
    return (int)cudaErrorInvalidValue;
}

extern "C" int ep_launch_activation(const EpActivationParams *p, void *stream) {
    EpCapabilities c;
    const int e = ep_capabilities(&c);
    if (e) return e;
    if (p->num_rows == 0 || p->num_experts == 0) return 0;
    const uint32_t for_rows = ep_ceil_div_u32(p->num_rows, ACT_WARPS), most = ACT_CTAS_PER_SM * c.num_sms;
    const uint32_t num_ctas = for_rows < most ? for_rows : most;
    const auto f = p->d_h8     ? p->is_f16 ? launch<EP_F16, true> : launch<EP_BF16, true>
                       : p->is_f16 ? launch<EP_F16, false>
                               : launch<EP_BF16, false>;
    return f(p, num_ctas, (cudaStream_t)stream);
}
