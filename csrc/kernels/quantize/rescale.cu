/* rescale.cu - the launcher of the kernel that gives rows or matrices of e4m3 one scale. */
#include "kernels/quantize/rescale.cuh"

#include "cuda/capabilities.h"
#include "kernels/launch.h"

#define MAX_CTAS_PER_SM 16u /* more rows than their warps take turns */

extern "C" int ep_launch_rescale(const EpRescaleParams *p, void *stream) {
    EpCapabilities c;
    const int e = ep_capabilities(&c);
    if (e) return e;
    const uint64_t wanted = ((uint64_t)p->num * p->n + EP_RESCALE_WARPS - 1) / EP_RESCALE_WARPS;
    const uint32_t most = MAX_CTAS_PER_SM * c.num_sms, num_ctas = wanted < most ? (uint32_t)wanted : most;
    rescale_kernel<<<num_ctas, 32 * EP_RESCALE_WARPS, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
