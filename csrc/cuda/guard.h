/* guard.h - CUDA errors, and the current device of the calling thread.
 *
 * Exports ep_cuda_error, ep_cuda_check, EP_CUDA_TRY, ep_guard and ep_unguard.
 * Invariants: a thread leaves the backend with the current device with which it came, and the backend makes
 * no context on another device than its own. A thread that has not chosen a device has device 0. To restore
 * that with cudaSetDevice would make a context on GPU 0, of some hundred MiB for each rank of another GPU.
 * So where the caller's device has no context, the primary context is pushed, and popped again. */
#ifndef EP_GUARD_H
#define EP_GUARD_H
#include <cuda_runtime_api.h>
#include <stdbool.h>

#include "runtime/error.h"

/* Set the error text for a failed call of the CUDA runtime, and return the code. */
int ep_cuda_error(cudaError_t e, const char *call);
/* The same; 0 if the call succeeded. */
int ep_cuda_check(cudaError_t e, const char *call);
/* EP_TRY for a call of the CUDA runtime. */
#define EP_CUDA_TRY(call)                                      \
    do {                                                       \
        cudaError_t ep_error_ = (cudaError_t)(call);           \
        if (ep_error_) return ep_cuda_error(ep_error_, #call); \
    } while (0)

typedef struct {
    int before, device;
    bool has_pushed; /* a context, which ep_unguard pops */
} EpGuard;
/* Make `device` the current device of the calling thread, until ep_unguard restores the previous one. After
 * an error there is nothing to restore. */
int ep_guard(int device, EpGuard *g);
/* Returns `code`, so that a caller can end with: return ep_unguard(&g, work()). */
int ep_unguard(const EpGuard *g, int code);

#endif /* EP_GUARD_H */
