/* capabilities.c - ask a GPU once what it can do. An error is not remembered: the next call asks again. */
#include "capabilities.h"

#include <cuda_runtime_api.h>
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static EpCapabilities known[EP_MAX_DEVICES]; /* num_sms is 0 before the first question */

int ep_current_device(uint32_t *device) {
    int number = 0;
    const cudaError_t e = cudaGetDevice(&number);
    *device = (uint32_t)number;
    return (int)(e == cudaSuccess && *device >= EP_MAX_DEVICES ? cudaErrorInvalidDevice : e);
}

/* If the module contains only PTX of an older architecture, a Hopper GPU runs that PTX. In it the kernels for
 * sm_90a have no body. */
static cudaError_t ask(int device, EpCapabilities *c) {
    int major = 0, num_sms = 0, smem_bytes = 0, version = 0;
    cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess && major == 9) e = (cudaError_t)ep_ptx_version(&version);
    if (e != cudaSuccess) return e;
    c->num_sms = (uint32_t)num_sms;
    c->smem_bytes = (uint32_t)smem_bytes;
    c->has_hopper = major == 9 && version >= 90;
    return cudaSuccess;
}

int ep_capabilities(EpCapabilities *c) {
    uint32_t device;
    int e = ep_current_device(&device);
    if (e) return e;
    pthread_mutex_lock(&lock);
    if (known[device].num_sms == 0) e = (int)ask((int)device, &known[device]);
    *c = known[device];
    pthread_mutex_unlock(&lock);
    return e;
}
