/* quantize.cu - the launcher of the quantisation: which kernel, and how many CTAs. */
#include "kernels/quantize/quantize.cuh"

#include "cuda/capabilities.h"
#include "kernels/launch.h"

/* A CTA for every task of its warps is 5 % faster than CTAs that stay and loop. But if only the device knows
 * the number of rows, there may be few, and CTAs without a task take time too. */
#define MAX_WAVES 4u

extern "C" int ep_launch_quantize(const EpQuantizeParams *p, void *stream) {
    EpCapabilities c;
    const int e = ep_capabilities(&c);
    if (e) return e;
    const uint32_t wanted = ep_ceil_div_u32(ep_quantize_num_tasks(p, p->max_rows), EP_QUANTIZE_WARPS);
    const uint32_t most = p->num_rows ? MAX_WAVES * EP_QUANTIZE_CTAS * c.num_sms : UINT32_MAX;
    const uint32_t num_ctas = wanted < most ? wanted : most;
    EpQuantizeKernel *const kernel = ep_quantize_kernel(p->dtype, p->activation.kind);
    kernel<<<num_ctas, 32 * EP_QUANTIZE_WARPS, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}

extern "C" int ep_preload_quantize(void) {
    const uint32_t one_of_each[] = {EP_ACT_NONE, EP_ACT_GELU, EP_ACT_SWIGLU, EP_ACT_ANY_GATE,
                                    EP_ACT_ANY_UNGATED};
    cudaFuncAttributes a;
    cudaError_t e = cudaSuccess;
    for (uint32_t dtype = EP_F32; dtype <= EP_BF16; dtype++)
        for (const uint32_t activation : one_of_each)
            if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, ep_quantize_kernel(dtype, activation));
    return (int)e;
}
