/* module_args.c - errors of the library as Python exceptions, and arguments as C values.
 *
 * Exports ep_raise, ep_done, ep_mark_reported, ep_pending_code, the ep_get_* functions for numbers, bytes,
 * objects and streams, and ep_args_methods. Process-wide state: the exception classes. */
#include <string.h>

#include "python/module.h"
#include "runtime/error.h"

/* ---- errors ---- */

/* name -> class; epmoe.errors sets it. One for the process, because ep_raise knows no module object. */
static PyObject *exceptions;

PyObject *ep_raise(int code) {
    /* A signal handler has raised it during a wait, for example KeyboardInterrupt. */
    if (PyErr_Occurred()) return NULL;
    const char *name = ep_error_name(code), *text = ep_error_text();
    PyObject *class = exceptions ? PyDict_GetItemString(exceptions, name) : NULL;
    /* The text may come from a peer, or may have been cut off inside a character, so it may be no UTF-8. */
    PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (message) PyErr_SetObject(class ? class : PyExc_RuntimeError, message);
    Py_XDECREF(message);
    return NULL;
}
PyObject *ep_done(int code) {
    if (code || PyErr_Occurred()) return ep_raise(code);
    Py_RETURN_NONE;
}
void ep_mark_reported(void) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && PyObject_SetAttrString(value, EP_REPORTED, Py_True)) PyErr_Clear();
    PyErr_Restore(type, value, trace);
}
int ep_pending_code(void) {
    if (PyErr_ExceptionMatches(PyExc_TypeError)) return EP_ETYPE;
    return PyErr_ExceptionMatches(PyExc_ValueError) ? EP_EINVAL : EP_ERUNTIME;
}

FAST(set_exceptions) {
    WANT(1);
    PyObject *name, *class, *before = exceptions;
    Py_ssize_t at = 0;
    if (!PyDict_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "wanted a dict of exceptions, got %R",
                            (PyObject *)Py_TYPE(args[0]));
    PyObject *copy = PyDict_Copy(args[0]);
    if (!copy) return NULL;
    while (PyDict_Next(copy, &at, &name, &class))
        if (!PyUnicode_Check(name) || !PyExceptionClass_Check(class)) {
            Py_DECREF(copy);
            return PyErr_Format(PyExc_TypeError, "wanted names and classes of exceptions, got %R",
                                (PyObject *)Py_TYPE(class));
        }
    exceptions = copy;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* ---- arguments ---- */

/* Raise ValueError for a number that does not fit, instead of OverflowError. */
static bool out_of_range(PyObject *o) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError)) return false;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%R is out of the range of this argument", o);
    return false;
}
bool ep_get_u64(PyObject *o, uint64_t *out) {
    *out = PyLong_AsUnsignedLongLong(o);
    return *out == (uint64_t)-1 && PyErr_Occurred() ? out_of_range(o) : true;
}
bool ep_get_u32(PyObject *o, uint32_t *out) {
    uint64_t v = 0;
    if (!ep_get_u64(o, &v)) return false;
    if (v > UINT32_MAX) return out_of_range(o);
    *out = (uint32_t)v;
    return true;
}
bool ep_get_int(PyObject *o, int *out) {
    long v = PyLong_AsLong(o);
    if ((v == -1 && PyErr_Occurred()) || v > INT32_MAX || v < INT32_MIN) return out_of_range(o);
    *out = (int)v;
    return true;
}
bool ep_get_double(PyObject *o, double *out) {
    *out = PyFloat_AsDouble(o);
    return *out == -1.0 && PyErr_Occurred() ? out_of_range(o) : true;
}
bool ep_get_activation(PyObject *o, EpActivation *out) {
#define X(name) &out->name,
    float *const numbers[] = {EP_ACT_NUMBERS(X)};
#undef X
    enum { NUM = sizeof numbers / sizeof numbers[0] };
    const Py_ssize_t size = PyTuple_Check(o) || PyList_Check(o) ? PySequence_Size(o) : -1;
    double kind, number;
    if (size != 1 + NUM)
        return PyErr_Format(PyExc_TypeError, "activation: wanted a tuple of its kind and %d numbers, got %R",
                            NUM, o),
               false;
    for (int i = 0; i <= NUM; i++) {
        PyObject *value = PySequence_GetItem(o, i);
        const bool is_read = value && ep_get_double(value, i ? &number : &kind);
        Py_XDECREF(value);
        if (!is_read) return false;
        if (i) *numbers[i - 1] = (float)number;
    }
    if (!(kind >= 0 && kind <= UINT32_MAX && kind == (uint32_t)kind))
        return PyErr_Format(PyExc_ValueError, "activation %R: its kind must be a whole number", o), false;
    out->kind = (uint32_t)kind;
    return true;
}
bool ep_get_bytes(PyObject *o, void *out, Py_ssize_t n) {
    char *from;
    Py_ssize_t got;
    if (PyBytes_AsStringAndSize(o, &from, &got)) return false;
    if (got != n) return PyErr_Format(PyExc_ValueError, "wanted %zd bytes, got %zd", n, got), false;
    memcpy(out, from, (size_t)n);
    return true;
}
void *ep_get_object(PyObject *o, const char *name) {
    if (PyCapsule_IsValid(o, name)) return PyCapsule_GetPointer(o, name);
    return PyErr_Format(PyExc_TypeError, "wanted an %s, got %R", name, (PyObject *)Py_TYPE(o)), NULL;
}

bool ep_get_stream(PyObject *o, void **stream) {
    uint64_t v;
    if (!ep_get_u64(o, &v)) return false;
    *stream = (void *)(uintptr_t)v;
    return true;
}

PyMethodDef ep_args_methods[] = {METHOD(set_exceptions), {NULL, NULL, 0, NULL}};
