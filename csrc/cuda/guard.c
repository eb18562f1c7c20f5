/* guard.c - CUDA errors, and the current device of the calling thread. guard.h describes the functions. */
#include "cuda/guard.h"

int ep_cuda_error(cudaError_t e, const char *call) {
    /* Clear the error if it is not sticky, so that the next caller does not receive it. */
    cudaGetLastError();
    if (e == cudaErrorMemoryAllocation) return ep_error(EP_ENOMEM, "%s: %s", call, cudaGetErrorString(e));
    return ep_error(EP_ECUDA, "%s: %s", call, cudaGetErrorString(e));
}

int ep_cuda_check(cudaError_t e, const char *call) { return e == cudaSuccess ? 0 : ep_cuda_error(e, call); }

int ep_guard(int device, EpGuard *g) {
    g->device = device;
    EP_CUDA_TRY(cudaGetDevice(&g->before));
    if (g->before != device) EP_CUDA_TRY(cudaSetDevice(device));
    return 0;
}

int ep_unguard(const EpGuard *g, int code) {
    if (g->before != g->device) cudaSetDevice(g->before);
    return code;
}
