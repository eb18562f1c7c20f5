/* fused.cu - the launchers of the megakernels: choice of the dtype, and the timeout within a CTA. */
#include <cuda_runtime_api.h>

#include "kernels/fused/fused.h"

int ep_launch_dispatch_gemm_bf16(const EpDispatchGemmParams *p, cudaStream_t stream);
int ep_launch_dispatch_gemm_f16(const EpDispatchGemmParams *p, cudaStream_t stream);
int ep_launch_gemm_combine_bf16(const EpGemmCombineParams *p, cudaStream_t stream);
int ep_launch_gemm_combine_f16(const EpGemmCombineParams *p, cudaStream_t stream);
int ep_preload_fused_bf16(void);
int ep_preload_fused_f16(void);

/* The limit of a wait within a CTA. It is longer than the waits that it depends on: those for a peer
 * (timeout_ns), then those for this rank's ready counters (twice that). */
static uint64_t block_limit_ns(const EpComm *c) {
    const uint64_t ns = c->timeout_ns < UINT64_MAX / 4 ? 4 * c->timeout_ns : UINT64_MAX;
    return ns < EP_GEMM_MIN_LIMIT_NS ? EP_GEMM_MIN_LIMIT_NS : ns;
}

static int check_device(void) {
    uint32_t has;
    const int e = ep_has_hopper(&has);
    return e ? e : has ? 0 : (int)cudaErrorNoKernelImageForDevice;
}

extern "C" int ep_launch_dispatch_gemm(const EpDispatchGemmParams *p, void *stream) {
    const int e = check_device();
    if (e) return e;
    EpDispatchGemmParams q = *p;
    q.gemm.limit_ns = block_limit_ns(&p->dispatch.comm);
    q.gemm.tile_counter =
        &EP_AT(EpLocal, &p->dispatch.comm, p->dispatch.comm.my_rank, p->dispatch.comm.layout.local_off)
             ->queue_tiles;
    return q.gemm.is_f16 ? ep_launch_dispatch_gemm_f16(&q, (cudaStream_t)stream)
                         : ep_launch_dispatch_gemm_bf16(&q, (cudaStream_t)stream);
}
extern "C" int ep_launch_gemm_combine(const EpGemmCombineParams *p, void *stream) {
    const int e = check_device();
    if (e) return e;
    EpGemmCombineParams q = *p;
    q.gemm.limit_ns = block_limit_ns(&p->combine.comm);
    q.gemm.tile_counter =
        &EP_AT(EpLocal, &p->combine.comm, p->combine.comm.my_rank, p->combine.comm.layout.local_off)
             ->queue_tiles;
    return q.gemm.is_f16 ? ep_launch_gemm_combine_f16(&q, (cudaStream_t)stream)
                         : ep_launch_gemm_combine_bf16(&q, (cudaStream_t)stream);
}

/* Load the megakernels, if this device has them. */
extern "C" int ep_preload_fused(void) {
    uint32_t has;
    const int e = ep_has_hopper(&has);
    if (e || !has) return e;
    const int first = ep_preload_fused_bf16();
    return first ? first : ep_preload_fused_f16();
}
