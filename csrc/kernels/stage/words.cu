/* words.cu - the operations without rows: enter (a barrier, or an operation without data that propagates an
 * error), signal, wait. */
#include "cuda/capabilities.h"
#include "kernels/launch.h"
#include "kernels/stage/rows.cuh"
#include "protocol/low_latency.h"

__global__ void enter_kernel(const __grid_constant__ EpComm c, uint32_t op) {
    const uint64_t epoch = ep_begin(&c);
    if (epoch == 0) return;
    if (ep_is_low_latency(&c.shape)) {
        __shared__ EpLlHead heads[EP_MAX_RANKS];
        ep_ll_propagate_error(&c, op, epoch, heads);
    } else {
        EpHeader h = ep_make_header(&c, op, NULL, NULL, 0, 0);
        ep_enter(&c, &h, epoch);
        EpWaits waits;
        if (ep_enter_await(&c, op, epoch, true, &waits)) ep_count_waits(&c, &waits);
        ep_publish_waits(&c);
    }
    if (ep_lane() == 0) ep_leave(&c, 1, epoch);
}

__global__ void signal_kernel(uint64_t *word, uint64_t value, uint32_t add) {
    /* Publishes everything that earlier work on the stream has put. */
    if (add) ep_add_release_sys_u64(word, value);
    else ep_st_release_sys_u64(word, value);
}

__global__ void wait_kernel(const __grid_constant__ EpComm c, const uint64_t *word, uint64_t value,
                            uint32_t exact) {
    EpFaultRecord f = ep_fault_at(0, c.my_rank, EP_WORD_SIGNAL, 0);
    ep_wait_u64(&c, word, exact ? EP_CMP_EQ : EP_CMP_GE, value,
                &f); /* what the word publishes is now readable */
}

extern "C" int ep_launch_enter(const EpComm *c, uint32_t op, void *stream) {
    enter_kernel<<<1, 32, 0, (cudaStream_t)stream>>>(*c, op);
    return (int)cudaGetLastError();
}
extern "C" int ep_launch_signal(uint64_t *word, uint64_t value, uint32_t add, void *stream) {
    signal_kernel<<<1, 1, 0, (cudaStream_t)stream>>>(word, value, add);
    return (int)cudaGetLastError();
}
extern "C" int ep_launch_wait(const EpComm *c, const uint64_t *word, uint64_t value, uint32_t exact,
                              void *stream) {
    wait_kernel<<<1, 1, 0, (cudaStream_t)stream>>>(*c, word, value, exact);
    return (int)cudaGetLastError();
}
extern "C" int ep_preload_words(void) {
    cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, enter_kernel);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, signal_kernel);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, wait_kernel);
    return (int)e;
}

extern "C" int ep_ptx_version(int *version) {
    cudaFuncAttributes a;
    const cudaError_t e = cudaFuncGetAttributes(&a, signal_kernel);
    *version = e == cudaSuccess ? a.ptxVersion : 0;
    return (int)e;
}
