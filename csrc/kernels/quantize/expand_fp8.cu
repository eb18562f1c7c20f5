/* expand_fp8.cu - the launcher of the kernels that expand weights of 4 bits to e4m3. */
#include "kernels/quantize/expand_fp8.cuh"

#include "kernels/launch.h"

extern "C" int ep_launch_expand(const EpExpandParams *p, void *stream) {
    const uint64_t num_ctas = ep_expand_num_ctas(p);
    if (num_ctas > INT32_MAX) return (int)cudaErrorInvalidConfiguration;
    EpExpandKernel *const kernel = ep_expand_kernel(p->weights.format, p->dtype);
    kernel<<<(uint32_t)num_ctas, EP_EXPAND_THREADS, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
