/* capabilities.c - ask a GPU once what it can do. An error is not remembered: the next call asks again. */
#include "cuda/capabilities.h"

#include <cuda_runtime_api.h>
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    EpCapabilities capabilities;
    bool is_known, is_shared;
} devices[EP_MAX_DEVICES];

int ep_current_device(uint32_t *device) {
    int number = 0;
    const cudaError_t e = cudaGetDevice(&number);
    *device = (uint32_t)number;
    return (int)(e == cudaSuccess && *device >= EP_MAX_DEVICES ? cudaErrorInvalidDevice : e);
}

/* If the module contains only PTX of an older architecture, a Hopper GPU runs that PTX. In it the kernels for
 * sm_90a have no body. */
static cudaError_t ask(int device, EpCapabilities *c) {
    int major = 0, minor = 0, num_sms = 0, smem_bytes = 0, version = 0;
    cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess && major == 9) e = (cudaError_t)ep_ptx_version(&version);
    if (e != cudaSuccess) return e;
    c->major = (uint32_t)major;
    c->minor = (uint32_t)minor;
    c->num_sms = (uint32_t)num_sms;
    c->smem_bytes = (uint32_t)smem_bytes;
    c->has_hopper = major == 9 && version >= 90;
    return cudaSuccess;
}

/* Copy what is known of a device, or return false. */
static bool find(uint32_t device, EpCapabilities *c) {
    pthread_mutex_lock(&lock);
    const bool is_known = devices[device].is_known;
    if (is_known) *c = devices[device].capabilities;
    c->is_shared = devices[device].is_shared;
    pthread_mutex_unlock(&lock);
    return is_known;
}

/* The lock is not held while the runtime is asked. ep_ptx_version loads a kernel, which may wait for a kernel
 * that runs, and that one may wait for a rank that is another thread of this process. Two threads may both
 * ask: they get the same answer. */
int ep_capabilities(EpCapabilities *c) {
    uint32_t device;
    int e = ep_current_device(&device);
    if (e || find(device, c)) return e;
    e = (int)ask((int)device, c);
    if (e) return e;
    pthread_mutex_lock(&lock);
    devices[device].capabilities = *c;
    devices[device].is_known = true;
    pthread_mutex_unlock(&lock);
    return 0;
}

int ep_share_device(void) {
    uint32_t device;
    const int e = ep_current_device(&device);
    if (e) return e;
    pthread_mutex_lock(&lock);
    devices[device].is_shared = true;
    pthread_mutex_unlock(&lock);
    return 0;
}
