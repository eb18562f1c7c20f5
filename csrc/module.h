/* module.h - the parts of epmoe._C: what they share to parse, call and raise.
 *
 * module.c       errors, numbers, the world, and the module itself
 * module_tensor.c  tensors and streams, read through the C exchange API that a tensor's type carries
 * module_heap.c, module_layer.c, module_gemm.c  their functions */
#ifndef EP_MODULE_H
#define EP_MODULE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "epmoe.h"

/* Names of capsules: a heap cannot be taken for a layer. */
#define WORLD "epmoe.World"
#define HEAP "epmoe.Heap"
#define LAYER "epmoe.Layer"

#define FAST(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
#define WANT(n)                                                                                  \
    do {                                                                                         \
        (void)self, (void)args;                                                                  \
        if (num_args != (n))                                                                     \
            return PyErr_Format(PyExc_TypeError, "wanted %d arguments, got %zd", (n), num_args); \
    } while (0)

#define WITHOUT_LOCK(statement) \
    do {                        \
        Py_BEGIN_ALLOW_THREADS  \
        statement;              \
        Py_END_ALLOW_THREADS    \
    } while (0)

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
extern PyMethodDef ep_heap_methods[], ep_layer_methods[], ep_gemm_methods[];

/* Set the exception of a code; NULL. */
PyObject *ep_raise(int code);
/* None, or the exception of a code. */
PyObject *ep_done(int code);
/* A pending Python exception as a code, for the peers. */
int ep_pending_code(void);

/* An argument as a C value, or false with an exception set.  A number that does not fit is a ValueError. */
bool ep_get_u64(PyObject *o, uint64_t *out);
bool ep_get_u32(PyObject *o, uint32_t *out);
bool ep_get_int(PyObject *o, int *out);
bool ep_get_double(PyObject *o, double *out);
bool ep_get_bytes(PyObject *o, void *out, Py_ssize_t n);
bool ep_get_stream(PyObject *o, void **stream);
void *ep_get_object(PyObject *o, const char *name);
/* None gives *out = NULL where that is allowed. */
bool ep_get_tensor(PyObject *o, bool may_be_none, EpTensor *t, const EpTensor **out);
/* The stream that is current on a device, by the tensor's framework; on the heap's device. */
void *ep_stream_of(EpBackendKind kind, int device, PyObject *tensor);
void *ep_current_stream(EpHeap *heap, PyObject *tensor);

#endif /* EP_MODULE_H */
