/* module_tensor.c - read tensors and current streams without linking against torch.
 *
 * Exports ep_get_tensor, ep_get_own_tensor, ep_stream_of and ep_current_stream. They use DLPack's C exchange
 * API, which a tensor's type offers, and which also returns the current stream.
 * Process-wide state: the exchange API of one type, and two names.
 * Invariant: the module takes no reference to a tensor; the caller of a function holds it during the call. */
#include "python/dlpack.h"
#include "python/module.h"

/* The exchange API of an object's type, or NULL with an exception set. */
static const EpDLExchangeAPI *exchange_api(PyObject *o) {
    /* A cache of one type, which is almost always torch.Tensor. It holds a reference to the type, so that no
     * other type can get the same address. */
    static PyTypeObject *last_type;
    static const EpDLExchangeAPI *last_api;
    if (Py_TYPE(o) == last_type) return last_api;
    PyObject *capsule = PyObject_GetAttrString((PyObject *)Py_TYPE(o), "__dlpack_c_exchange_api__");
    if (!capsule)
        return PyErr_Format(PyExc_TypeError, "wanted a torch.Tensor, got %R", (PyObject *)Py_TYPE(o)), NULL;
    const EpDLExchangeAPI *api =
        (const EpDLExchangeAPI *)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (!api) return NULL;
    if (api->version.major != 1 || !api->dltensor_from_py_object_no_sync)
        return PyErr_Format(
                   PyExc_TypeError,
                   "this torch has version %u of DLPack, but epmoe needs version 1: install another torch",
                   api->version.major),
               NULL;
    PyObject *before = (PyObject *)last_type;
    Py_INCREF((PyObject *)Py_TYPE(o));
    last_type = Py_TYPE(o);
    last_api = api;
    Py_XDECREF(before);
    return api;
}

static uint32_t dtype_of(EpDLDataType d) {
    if (d.lanes != 1) return EP_OTHER;
    static const struct {
        uint8_t code, bits, dtype;
    } known[] = {{EP_DL_FLOAT, 32, EP_F32}, {EP_DL_FLOAT, 16, EP_F16}, {EP_DL_BFLOAT, 16, EP_BF16},
                 {EP_DL_INT, 32, EP_I32},   {EP_DL_INT, 64, EP_I64},   {EP_DL_INT, 16, EP_I16},
                 {EP_DL_INT, 8, EP_I8},     {EP_DL_UINT, 8, EP_U8},    {EP_DL_FLOAT, 64, EP_F64}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (d.code == known[i].code && d.bits == known[i].bits) return known[i].dtype;
    return EP_OTHER;
}

/* True, with an exception set, if the tensor is a view whose values are the negative or the conjugate of
 * the memory. DLPack does not report this. */
static bool is_lazy(PyObject *o, const EpTensor *t) {
    static PyObject *is_neg, *is_conj; /* the names of the methods, created once */
    if (!is_neg) is_neg = PyUnicode_InternFromString("is_neg");
    if (!is_conj) is_conj = PyUnicode_InternFromString("is_conj");
    if (!is_neg || !is_conj) return true;
    PyObject *neg = PyObject_CallMethodObjArgs(o, is_neg, NULL);
    /* EP_OTHER: it may be complex. */
    PyObject *conj = neg && t->dtype == EP_OTHER ? PyObject_CallMethodObjArgs(o, is_conj, NULL) : NULL;
    bool lazy = neg == Py_True || conj == Py_True;
    Py_XDECREF(neg);
    Py_XDECREF(conj);
    if (lazy)
        PyErr_SetString(
            PyExc_ValueError,
            "the tensor is a negated or conjugated view: call resolve_neg() or resolve_conj() on it");
    return lazy || PyErr_Occurred();
}

bool ep_get_own_tensor(PyObject *o, bool may_be_none, EpTensor *t, const EpTensor **out) {
    EpDLTensor d;
    *out = NULL;
    if (o == Py_None && may_be_none) return true;
    const EpDLExchangeAPI *api = exchange_api(o);
    if (!api || api->dltensor_from_py_object_no_sync(o, &d)) return false;
    if (d.ndim > 4)
        return PyErr_Format(PyExc_ValueError, "the tensor has %d dimensions: epmoe takes at most 4", d.ndim),
               false;
    if (d.device.device_type != EP_DL_CPU && d.device.device_type != EP_DL_CUDA &&
        d.device.device_type != EP_DL_CUDA_HOST)
        return PyErr_Format(
                   PyExc_ValueError,
                   "the tensor is on another kind of device: epmoe works on the CPU and on CUDA devices"),
               false;
    t->data = (char *)d.data + (d.data ? d.byte_offset : 0);
    t->dtype = dtype_of(d.dtype);
    t->num_dims = (uint32_t)d.ndim;
    t->element_bytes = (uint32_t)d.dtype.bits * d.dtype.lanes / 8u;
    t->kind = d.device.device_type == EP_DL_CUDA ? EP_CUDA : EP_CPU;
    t->device = d.device.device_id;
    bool is_empty = false;
    for (int32_t i = 0, n = d.ndim; i < n; i++) {
        t->shape[i] = d.shape[i];
        t->stride[i] = 1;
        is_empty |= d.shape[i] == 0;
        for (int32_t j = i + 1; j < n && !d.strides; j++) t->stride[i] *= d.shape[j];
        if (d.strides) t->stride[i] = d.strides[i];
    }
    if (!d.data && !is_empty)
        return PyErr_Format(
                   PyExc_ValueError,
                   "the tensor has no memory of its own, as a meta tensor, a fake tensor or a DTensor: pass "
                   "a tensor with data, for example to_local() of a DTensor"),
               false;
    *out = t;
    return true;
}
bool ep_get_tensor(PyObject *o, bool may_be_none, EpTensor *t, const EpTensor **out) {
    return ep_get_own_tensor(o, may_be_none, t, out) && (!*out || !is_lazy(o, *out));
}

void *ep_stream_of(EpBackendKind kind, int device, PyObject *tensor) {
    void *stream = NULL;
    if (kind != EP_CUDA) return NULL;
    const EpDLExchangeAPI *api = tensor ? exchange_api(tensor) : NULL;
    if (api && api->current_work_stream) api->current_work_stream(EP_DL_CUDA, device, &stream);
    PyErr_Clear();
    return stream;
}

void *ep_current_stream(EpHeap *heap, PyObject *tensor) {
    return ep_stream_of(ep_heap_kind(heap), ep_heap_device(heap), tensor);
}
