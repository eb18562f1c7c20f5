/* tensor.h - check that a tensor is what a call expects. Exports ep_tensor_check and ep_dtype_name.
 * Invariant: after a successful check, a kernel may use the tensor's address and sizes as they are. */
#ifndef EP_TENSOR_H
#define EP_TENSOR_H
#include "epmoe.h"

typedef struct {
    const char *name;
    const EpTensor *tensor; /* NULL: an optional tensor is absent, and the check succeeds */
    uint32_t dtype, num_dims;
    int64_t size[3]; /* expected size of each dimension; -1: any */
} EpWanted;

/* 0, or an error: device, dtype, sizes, strides (contiguous), alignment of the address. */
int ep_tensor_check(const EpWanted *wanted, EpBackendKind kind, int device, uint32_t alignment);
const char *ep_dtype_name(uint32_t dtype);

#endif /* EP_TENSOR_H */
