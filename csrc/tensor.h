/* tensor.h - is a tensor what a call wants? */
#ifndef EP_TENSOR_H
#define EP_TENSOR_H
#include "epmoe.h"

typedef struct {
    const char *name;
    const EpTensor *tensor; /* NULL: there is none, and nothing to look at */
    uint32_t dtype, num_dims;
    int64_t size[3]; /* -1: any */
} EpWanted;

/* 0, or what is wrong: device, dtype, sizes, strides (contiguous), the alignment of its address. */
int ep_tensor_check(const EpWanted *wanted, EpBackendKind kind, int device, uint32_t alignment);
const char *ep_dtype_name(uint32_t dtype);

#endif /* EP_TENSOR_H */
