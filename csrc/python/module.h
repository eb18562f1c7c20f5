/* module.h - what the files of the Python module epmoe._C share: parse arguments, call, raise.
 *
 * module.c         the module itself: constants, and the functions of the other files
 * module_args.c    errors, numbers and other arguments
 * module_tensor.c  tensors and streams, read through the C exchange API of a tensor's type
 * module_world.c, module_heap.c, module_layer.c, module_gemm.c, module_wgrad_fp8.c  the functions for worlds,
 *                  heaps, layers, the grouped GEMM and devices, and the gradient of weights in FP8
 *
 * Invariant: a function that can wait for a peer, a stream or a lock releases the interpreter lock
 * (WITHOUT_LOCK). */
#ifndef EP_MODULE_H
#define EP_MODULE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "epmoe.h"

/* Names of the capsules. They are checked, so that a heap cannot be passed as a layer. */
#define WORLD "epmoe.World"
#define HEAP "epmoe.Heap"
#define LAYER "epmoe.Layer"
/* The attribute of an exception of which the peers know. epmoe/comm/error_propagation.py reads it. */
#define EP_REPORTED "_epmoe_reported"

/* FAST defines a function of the module; WANT(n) checks its number of arguments and returns on an error. */
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
extern PyMethodDef ep_args_methods[], ep_world_methods[], ep_heap_methods[], ep_layer_methods[],
    ep_gemm_methods[], ep_wgrad_fp8_methods[];

/* Set the exception for a code. Always returns NULL. */
PyObject *ep_raise(int code);
/* None for code 0; otherwise NULL, with the exception for the code set. */
PyObject *ep_done(int code);
/* The code for the pending Python exception. It is sent to the peers. */
int ep_pending_code(void);
/* Note on the pending Python exception that the peers know of it: epmoe must not propagate it once more. */
void ep_mark_reported(void);

/* Convert an argument to a C value, or return false with an exception set. A number that does not fit
 * raises ValueError. */
bool ep_get_u64(PyObject *o, uint64_t *out);
bool ep_get_u32(PyObject *o, uint32_t *out);
bool ep_get_int(PyObject *o, int *out);
bool ep_get_double(PyObject *o, double *out);
/* A tuple or list: the kind of an activation, and then its numbers. */
bool ep_get_activation(PyObject *o, EpActivation *out);
bool ep_get_bytes(PyObject *o, void *out, Py_ssize_t n);
bool ep_get_stream(PyObject *o, void **stream);
void *ep_get_object(PyObject *o, const char *name);
/* Read a tensor. If may_be_none is true, None is accepted and gives *out = NULL. ep_get_own_tensor is for
 * tensors that epmoe has allocated: it does not ask whether the tensor is a lazily negated view, which takes
 * a call into Python. */
bool ep_get_tensor(PyObject *o, bool may_be_none, EpTensor *t, const EpTensor **out);
bool ep_get_own_tensor(PyObject *o, bool may_be_none, EpTensor *t, const EpTensor **out);
/* The current stream of the tensor's framework, on a device; ep_current_stream: on the heap's device. */
void *ep_stream_of(EpBackendKind kind, int device, PyObject *tensor);
void *ep_current_stream(EpHeap *heap, PyObject *tensor);

#endif /* EP_MODULE_H */
