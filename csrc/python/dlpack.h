/* dlpack.h - the part of DLPack 1.3 that the module uses.
 *
 * The C exchange API (torch 2.10 or newer) reads a framework's tensor without a copy and without a reference.
 * EpDLManagedTensor hands out memory of a heap as a tensor.
 * Invariant: the layouts are DLPack's (github.com/dmlc/dlpack). A test compares them with torch's header. */
#ifndef EP_DLPACK_H
#define EP_DLPACK_H
#include <stdint.h>

enum {
    EP_DL_CPU = 1,
    EP_DL_CUDA = 2,
    EP_DL_CUDA_HOST = 3,
    EP_DL_INT = 0,
    EP_DL_UINT = 1,
    EP_DL_FLOAT = 2,
    EP_DL_BFLOAT = 4,
    EP_DL_COMPLEX = 5
};
typedef struct {
    int32_t device_type, device_id;
} EpDLDevice;
typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} EpDLDataType;
typedef struct {
    void *data;
    EpDLDevice device;
    int32_t ndim;
    EpDLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} EpDLTensor;
typedef struct EpDLManagedTensor {
    EpDLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct EpDLManagedTensor *self);
} EpDLManagedTensor;
typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *prev_api;
    void *managed_tensor_allocator, *managed_tensor_from_py_object_no_sync,
        *managed_tensor_to_py_object_no_sync;
    int (*dltensor_from_py_object_no_sync)(void *py_object, EpDLTensor *out);
    int (*current_work_stream)(int device_type, int32_t device_id, void **out_current_stream);
} EpDLExchangeAPI;

#endif /* EP_DLPACK_H */
