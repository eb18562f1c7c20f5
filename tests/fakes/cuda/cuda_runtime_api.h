/* cuda_runtime_api.h - a fake: the part of the runtime's header that cluster_launch.c, tile_counters.c,
 * launch_order.c and what they call use. tests/c/test_launch.c, test_counters.c and test_lanes.c have the
 * functions. */
#ifndef FAKE_CUDA_RUNTIME_API_H
#define FAKE_CUDA_RUNTIME_API_H
#include <stddef.h>

#define CUDART_VERSION 13000
typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidDevice = 101,
    cudaErrorCooperativeLaunchTooLarge = 720,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureImplicit = 906
} cudaError_t;
typedef struct FakeStream *cudaStream_t;
typedef struct FakeEvent *cudaEvent_t;
enum { cudaEventDisableTiming = 2 };
typedef struct {
    unsigned x, y, z;
} dim3;
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
typedef enum {
    cudaLaunchAttributeCooperative = 2,
    cudaLaunchAttributeClusterDimension = 4
} cudaLaunchAttributeID;
typedef struct {
    cudaLaunchAttributeID id;
    union {
        dim3 clusterDim;
        int cooperative;
    } val;
} cudaLaunchAttribute;
typedef struct {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
} cudaLaunchConfig_t;
enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
};

/* What the tests say of a stream and of an event. */
struct FakeStream {
    unsigned long long number;
    enum cudaStreamCaptureStatus status;
    cudaError_t error;        /* of the question whether it is captured */
    unsigned long long graph; /* for which it is captured */
    struct FakeEvent *waited; /* the newest event for which it waits, or NULL */
};
struct FakeEvent {
    struct FakeStream *stream; /* where it was recorded */
    unsigned long long graph;
};

cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *graph, void *no_graph, void *no_nodes,
                                     void *no_edges, size_t *no_number);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaGetLastError(void);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status);
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *number);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int device);
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute what, int value);
cudaError_t cudaOccupancyMaxActiveClusters(int *num_clusters, const void *function,
                                           const cudaLaunchConfig_t *config);
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments);
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result);

#endif /* FAKE_CUDA_RUNTIME_API_H */
