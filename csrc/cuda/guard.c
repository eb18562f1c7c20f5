/* guard.c - CUDA errors, and the current device of the calling thread. guard.h describes the functions. */
#include "cuda/guard.h"

#include <cudaTypedefs.h>
#include <pthread.h>
#include <string.h>

#include "cuda/capabilities.h"

int ep_cuda_error(cudaError_t e, const char *call) {
    /* Clear the error if it is not sticky, so that the next caller does not receive it. */
    cudaGetLastError();
    if (e == cudaErrorMemoryAllocation) return ep_error(EP_ENOMEM, "%s: %s", call, cudaGetErrorString(e));
    return ep_error(EP_ECUDA, "%s: %s", call, cudaGetErrorString(e));
}

int ep_cuda_check(cudaError_t e, const char *call) { return e == cudaSuccess ? 0 : ep_cuda_error(e, call); }

/* ---- contexts, which only the driver can be asked for ---- */

/* A CUdevice is the number of the device. The driver's functions are looked up by name, because the library
 * must also load without a driver. */
static struct {
    PFN_cuDevicePrimaryCtxGetState_v7000 get_state;
    PFN_cuDevicePrimaryCtxRetain_v7000 retain;
    PFN_cuCtxPushCurrent_v4000 push;
    PFN_cuCtxPopCurrent_v4000 pop;
    bool is_known;
} driver;

static bool find(const char *name, unsigned version, void *function) {
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    void *f = NULL;
    const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault, &result);
    memcpy(function, &f, sizeof f);
    return e == cudaSuccess && result == cudaDriverEntryPointSuccess && f;
}
static void find_driver(void) {
    driver.is_known = find("cuDevicePrimaryCtxGetState", 7000, &driver.get_state) &&
                      find("cuDevicePrimaryCtxRetain", 7000, &driver.retain) &&
                      find("cuCtxPushCurrent", 4000, &driver.push) &&
                      find("cuCtxPopCurrent", 4000, &driver.pop);
}

/* False if the device has no context in this process: cudaSetDevice would make one. */
static bool has_context(int device) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    unsigned flags = 0;
    int active = 1;
    pthread_once(&once, find_driver);
    if (!driver.is_known || driver.get_state(device, &flags, &active) != CUDA_SUCCESS) return true;
    return active;
}

/* Make the device's primary context current. The runtime uses this context too. The reference is kept until
 * the process ends, as the runtime keeps its own: heaps live in the context. */
static cudaError_t push_context(int device) {
    static CUcontext contexts[EP_MAX_DEVICES]; /* all threads get the same one for a device */
    if (device < 0 || device >= EP_MAX_DEVICES) return cudaErrorInvalidDevice;
    CUcontext context = __atomic_load_n(&contexts[device], __ATOMIC_RELAXED);
    if (!context) {
        const CUresult r = driver.retain(&context, device);
        if (r != CUDA_SUCCESS) return (cudaError_t)r; /* the same numbers */
        __atomic_store_n(&contexts[device], context, __ATOMIC_RELAXED);
    }
    return (cudaError_t)driver.push(context);
}

/* ---- the guard ---- */

int ep_guard(int device, EpGuard *g) {
    g->device = device;
    g->has_pushed = false;
    EP_CUDA_TRY(cudaGetDevice(&g->before));
    if (g->before == device) return 0;
    if (has_context(g->before)) return ep_cuda_check(cudaSetDevice(device), "cudaSetDevice");
    g->has_pushed = true;
    return ep_cuda_check(push_context(device), "making a context current");
}

int ep_unguard(const EpGuard *g, int code) {
    CUcontext context;
    if (g->has_pushed) driver.pop(&context);
    else if (g->before != g->device) cudaSetDevice(g->before);
    return code;
}
