/* tensor.h - check that tensors are what a call expects. Exports ep_tensor_check, ep_tensors_apart and
 * ep_dtype_name.
 * Invariant: after a successful check, a kernel may use the tensor's address and sizes as they are. */
#ifndef EP_TENSOR_H
#define EP_TENSOR_H
#include "epmoe.h"

typedef struct {
    const char *name;
    const EpTensor *tensor; /* NULL: an optional tensor is absent, and the check succeeds */
    uint32_t dtype, num_dims;
    int64_t size[4]; /* expected size of each dimension; -1: any */
} EpWanted;

/* 0, or an error: device, dtype, sizes, strides (contiguous), alignment of the address. */
int ep_tensor_check(const EpWanted *wanted, EpBackendKind kind, int device, uint32_t alignment);

/* A tensor of a call; NULL: an optional tensor is absent. */
typedef struct {
    const char *name;
    const EpTensor *tensor;
    bool is_output;
} EpOperand;
/* 0, or EP_EINVAL if an output shares memory with another tensor of the call. Workers write outputs while
 * they still read inputs, so the result would be wrong. What counts are the bytes from the first to the last
 * element of a tensor. num is at most EP_MAX_OPERANDS. */
#define EP_MAX_OPERANDS 16u
int ep_tensors_apart(const EpOperand *operands, uint32_t num);

const char *ep_dtype_name(uint32_t dtype);

#endif /* EP_TENSOR_H */
