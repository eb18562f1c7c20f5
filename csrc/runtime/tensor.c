/* tensor.c - the checks of tensor arguments, and the names of dtypes; see tensor.h. */
#include "runtime/tensor.h"

#include "runtime/error.h"

const char *ep_dtype_name(uint32_t dtype) {
    switch (dtype) {
#define ROW(NAME, value, num_bytes, text) \
    case EP_##NAME: return text;
#define OTHER(NAME, text) \
    case EP_##NAME: return text;
        EP_DTYPES(ROW)
        EP_OTHER_DTYPES(OTHER)
#undef ROW
#undef OTHER
    default: return "another dtype";
    }
}

int ep_tensor_check(const EpWanted *w, EpBackendKind kind, int device, uint32_t alignment) {
    const EpTensor *t = w->tensor;
    int64_t stride = 1, num = 1;
    if (!t) return 0;
    if (t->kind != kind || (kind == EP_CUDA && t->device != device)) {
        if (kind == EP_CPU)
            return ep_error(EP_EINVAL, "%s: wanted a tensor on the CPU, got one on CUDA device %d", w->name,
                            t->device);
        return ep_error(EP_EINVAL, "%s: wanted a tensor on CUDA device %d, got one on another device",
                        w->name, device);
    }
    if (t->dtype != w->dtype)
        return ep_error(EP_ETYPE, "%s: wanted %s, got %s", w->name, ep_dtype_name(w->dtype),
                        ep_dtype_name(t->dtype));
    if (t->num_dims != w->num_dims)
        return ep_error(EP_EINVAL, "%s: wanted %u dimensions, got %u", w->name, w->num_dims, t->num_dims);
    for (uint32_t i = 0; i < t->num_dims; num *= t->shape[i++])
        if (w->size[i] >= 0 && t->shape[i] != w->size[i])
            return ep_error(EP_EINVAL, "%s: wanted size %lld in dimension %u, got %lld", w->name,
                            (long long)w->size[i], i, (long long)t->shape[i]);
    /* A tensor without elements (num == 0) is contiguous, whatever its strides. */
    for (uint32_t i = t->num_dims; i-- > 0 && num; stride *= t->shape[i])
        if (t->shape[i] > 1 && t->stride[i] != stride)
            return ep_error(EP_EINVAL, "%s must be contiguous: call contiguous() on it", w->name);
    if (num && (uintptr_t)t->data % alignment)
        return ep_error(EP_EINVAL, "%s: its address must be a multiple of %u bytes: call clone() on it",
                        w->name, alignment);
    return 0;
}

/* The bytes from the first to the last element of a tensor. begin == end: it has none. */
typedef struct {
    uintptr_t begin, end;
} Bytes;
static Bytes bytes_of(const EpTensor *t) {
    Bytes b = {(uintptr_t)t->data, (uintptr_t)t->data};
    int64_t first = 0, last = 0; /* element offsets */
    for (uint32_t i = 0; i < t->num_dims; i++) {
        if (t->shape[i] < 1) return b;
        const int64_t reach = (t->shape[i] - 1) * t->stride[i];
        if (reach < 0) first += reach;
        else last += reach;
    }
    b.end += (uintptr_t)((last + 1) * (int64_t)t->element_bytes);
    b.begin += (uintptr_t)(first * (int64_t)t->element_bytes);
    return b;
}

int ep_tensors_apart(const EpOperand *operands, uint32_t num) {
    Bytes bytes[EP_MAX_OPERANDS];
    for (uint32_t i = 0; i < num; i++)
        bytes[i] = operands[i].tensor ? bytes_of(operands[i].tensor) : (Bytes){0, 0};
    for (uint32_t i = 0; i < num; i++) {
        const Bytes out = bytes[i];
        if (!operands[i].is_output || out.begin == out.end) continue;
        for (uint32_t j = 0; j < num; j++)
            if (j != i && bytes[j].begin < out.end && out.begin < bytes[j].end &&
                bytes[j].begin != bytes[j].end)
                return ep_error(EP_EINVAL,
                                "%s shares memory with %s, but the call writes the first while it uses the "
                                "second: pass a tensor with memory of its own",
                                operands[i].name, operands[j].name);
    }
    return 0;
}
