/* module.c - epmoe._C: the functions of worlds, the conversion of errors and arguments, the constants, and
 * the module itself.
 *
 * A function parses its arguments, releases the interpreter lock and calls the C library. If the library
 * fails, the function raises an exception. Python holds a C object (for example a world) in a capsule, which
 * has the name of its type. The module does not link against torch and is built without it.
 * Process-wide state: the exception classes and the interrupt function. */
#include "python/module.h"

#include <string.h>

#include "protocol/layout.h"
#include "runtime/error.h"

/* ---- errors ---- */

/* name -> class; epmoe.errors sets it. One for the process, because ep_raise knows no module object. */
static PyObject *exceptions;

PyObject *ep_raise(int code) {
    /* A signal handler has raised it during a wait, for example KeyboardInterrupt. */
    if (PyErr_Occurred()) return NULL;
    const char *name = ep_error_name(code);
    PyObject *class = exceptions ? PyDict_GetItemString(exceptions, name) : NULL;
    PyErr_SetString(class ? class : PyExc_RuntimeError, ep_error_text());
    return NULL;
}
PyObject *ep_done(int code) {
    if (code) return ep_raise(code);
    Py_RETURN_NONE;
}
int ep_pending_code(void) {
    if (PyErr_ExceptionMatches(PyExc_TypeError)) return EP_ETYPE;
    return EP_EINVAL;
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

/* ---- world ---- */

static void free_world(PyObject *c) {
    EpWorld *w = (EpWorld *)PyCapsule_GetPointer(c, WORLD);
    WITHOUT_LOCK(ep_world_release(w));
}
static PyObject *world_capsule(EpWorld *w) {
    PyObject *c = PyCapsule_New(w, WORLD, free_world);
    if (!c) WITHOUT_LOCK(ep_world_release(w));
    return c;
}

FAST(world_listen) {
    unsigned char name[EP_NAME_BYTES], nonce[EP_NONCE_BYTES];
    int fd;
    WANT(0);
    int code = ep_world_listen(&fd, name, nonce);
    if (code) return ep_raise(code);
    return Py_BuildValue("iy#y#", fd, name, (Py_ssize_t)sizeof name, nonce, (Py_ssize_t)sizeof nonce);
}

/* (rank, num_ranks, timeout_s, listen_fd, nonce, names) */
FAST(world_create) {
    EpWorldConfig c = {0};
    EpWorld *w = NULL;
    int code;
    WANT(6);
    if (!ep_get_u32(args[0], &c.rank) || !ep_get_u32(args[1], &c.num_ranks) ||
        !ep_get_double(args[2], &c.timeout_s) || !ep_get_int(args[3], &c.listen_fd) ||
        !ep_get_bytes(args[4], c.nonce, sizeof c.nonce))
        return NULL;
    if (c.num_ranks < 1 || c.num_ranks > EP_MAX_RANKS)
        return PyErr_Format(PyExc_ValueError, "a world has 1 to %u ranks, not %u", EP_MAX_RANKS, c.num_ranks);
    if (!ep_get_bytes(args[5], c.names, (Py_ssize_t)c.num_ranks * EP_NAME_BYTES)) return NULL;
    WITHOUT_LOCK(code = ep_world_create(&c, &w));
    return code ? ep_raise(code) : world_capsule(w);
}

FAST(world_threads) {
    EpWorld *worlds[EP_MAX_RANKS];
    uint32_t n;
    double timeout_s;
    WANT(2);
    if (!ep_get_u32(args[0], &n) || !ep_get_double(args[1], &timeout_s)) return NULL;
    if (n < 1 || n > EP_MAX_RANKS)
        return PyErr_Format(PyExc_ValueError, "a world has 1 to %u ranks, not %u", EP_MAX_RANKS, n);
    int code = ep_world_create_threads(n, timeout_s, worlds);
    if (code) return ep_raise(code);
    PyObject *list = PyList_New(n);
    for (uint32_t i = 0; i < n; i++) {
        PyObject *c = list ? world_capsule(worlds[i]) : NULL;
        if (c) PyList_SetItem(list, i, c);
        else if (list) Py_CLEAR(list);
        else WITHOUT_LOCK(ep_world_release(worlds[i]));
    }
    return list;
}

FAST(world_check) {
    WANT(1);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    return w ? ep_done(ep_world_check(w)) : NULL;
}

FAST(world_lost_ranks) {
    WANT(1);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    return w ? PyLong_FromUnsignedLong(ep_world_lost_ranks(w)) : NULL;
}

FAST(world_set_timeout) {
    double timeout_s;
    WANT(2);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    return w && ep_get_double(args[1], &timeout_s) ? ep_done(ep_world_set_timeout(w, timeout_s)) : NULL;
}

FAST(world_close) {
    int code;
    WANT(2);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w) return NULL;
    int collective = PyObject_IsTrue(args[1]);
    if (collective < 0) return NULL;
    WITHOUT_LOCK(code = ep_world_close(w, collective == 1));
    return ep_done(code);
}

FAST(worlds_settle) {
    WANT(0);
    (void)args;
    WITHOUT_LOCK(ep_world_settle_all());
    return ep_done(0);
}

FAST(world_flight_record) {
    char page[EP_PAGE_BYTES];
    int code;
    WANT(1);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w) return NULL;
    WITHOUT_LOCK(code = ep_world_flight_record(w, page));
    return code ? ep_raise(code) : PyUnicode_DecodeUTF8(page, (Py_ssize_t)strlen(page), "replace");
}

FAST(world_exchange) {
    char *mine;
    Py_ssize_t n;
    int code;
    unsigned char all[EP_MAX_RANKS * EP_EXCHANGE_BYTES];
    WANT(2);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w || PyBytes_AsStringAndSize(args[1], &mine, &n)) return NULL;
    if (n > EP_EXCHANGE_BYTES)
        return PyErr_Format(PyExc_ValueError, "an exchange carries at most %u bytes, not %zd",
                            EP_EXCHANGE_BYTES, n);
    WITHOUT_LOCK(code = ep_world_exchange(w, mine, (uint32_t)n, all));
    return code ? ep_raise(code)
                : PyBytes_FromStringAndSize((const char *)all, n * (Py_ssize_t)ep_world_size(w));
}

/* (world, code) */
FAST(world_refuse) {
    int why, code;
    WANT(2);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w || !ep_get_int(args[1], &why)) return NULL;
    WITHOUT_LOCK(code = ep_world_refuse(w, why));
    return ep_done(code);
}

/* ---- the module ---- */

static PyMethodDef methods[] = {METHOD(set_exceptions),      METHOD(world_listen),   METHOD(world_create),
                                METHOD(world_threads),       METHOD(world_check),    METHOD(world_lost_ranks),
                                METHOD(world_set_timeout),   METHOD(world_close),    METHOD(worlds_settle),
                                METHOD(world_flight_record), METHOD(world_exchange), METHOD(world_refuse),
                                {NULL, NULL, 0, NULL}};

/* True if a signal handler has raised an exception, for example after Ctrl-C. Python handles signals only
 * in its main thread. */
static bool is_interrupted(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    bool yes = PyErr_CheckSignals() != 0;
    PyGILState_Release(state);
    return yes;
}

static const struct {
    const char *name;
    long value;
} constants[] = {
    {"ABI_VERSION", EP_ABI_VERSION},
    {"MAX_RANKS", EP_MAX_RANKS},
    {"NAME_BYTES", EP_NAME_BYTES},
    {"NONCE_BYTES", EP_NONCE_BYTES},
    {"EXCHANGE_BYTES", EP_EXCHANGE_BYTES},
    {"TRACE_WARPS", EP_TRACE_WARPS},
    {"CPU", EP_CPU},
    {"CUDA", EP_CUDA},
#define X(NAME, value, num_bytes, text) {#NAME, EP_##NAME},
    EP_DTYPES(X)
#undef X
        {"COMBINE_LOCAL", EP_COMBINE_LOCAL},
    {"COMBINE_SCATTER", EP_COMBINE_SCATTER},
    {"COMBINE_GATHER", EP_COMBINE_GATHER},
#define X(NAME, name, Type, text) {"OP_" #NAME, EP_OP_##NAME},
    EP_OPERATIONS(X, X)
#undef X
        {"EINVAL", EP_EINVAL},
    {"ENOMEM", EP_ENOMEM},
    {"ETYPE", EP_ETYPE},
    {"HEAD_NUM_ROWS", EP_HEAD_NUM_ROWS},
    {"HEAD_NUM_TILES", EP_HEAD_NUM_TILES},
    {"HEAD_NUM_SEND", EP_HEAD_NUM_SEND},
    {"HEAD_NUM_RECV", EP_HEAD_NUM_RECV},
    {"HEAD_RANK_ROWS", EP_HEAD_RANK_ROWS},
#ifdef EP_CHAOS
    {"CHAOS", EP_CHAOS},
#else
    {"CHAOS", 0},
#endif
#ifdef EP_TRACE
    {"TRACE", 1},
#else
    {"TRACE", 0},
#endif
#ifdef EP_HAVE_CUDA
    {"HAS_CUDA", 1},
#else
    {"HAS_CUDA", 0},
#endif
};

/* The names of a list, for Python: the fields of a configuration, and the spans from number 1 on. */
#define AGREED(field, name, kind) name,
#define LOCAL(field, name) name,
#define SPAN(NAME, text) text,
static const char *const config_fields[] = {EP_CONFIG_FIELDS(AGREED, LOCAL) NULL};
static const char *const spans[] = {EP_SPANS(SPAN) NULL};
#undef AGREED
#undef LOCAL
#undef SPAN

/* Add a tuple of names, which NULL ends. */
static int add_names(PyObject *m, const char *attribute, const char *const *names) {
    PyObject *list = PyList_New(0);
    for (; list && *names; names++) {
        PyObject *name = PyUnicode_FromString(*names);
        if (!name || PyList_Append(list, name)) Py_CLEAR(list);
        Py_XDECREF(name);
    }
    PyObject *tuple = list ? PyList_AsTuple(list) : NULL;
    const int code = tuple ? PyModule_AddObjectRef(m, attribute, tuple) : -1;
    Py_XDECREF(list);
    Py_XDECREF(tuple);
    return code;
}

static int set_up(PyObject *m) {
    ep_world_set_interrupt(is_interrupted);
    if (add_names(m, "CONFIG_FIELDS", config_fields) || add_names(m, "SPANS", spans)) return -1;
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++)
        if (PyModule_AddIntConstant(m, constants[i].name, constants[i].value)) return -1;
    return PyModule_AddFunctions(m, ep_heap_methods) || PyModule_AddFunctions(m, ep_layer_methods) ||
                   PyModule_AddFunctions(m, ep_gemm_methods)
               ? -1
               : 0;
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, __extension__(void *) set_up}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_C", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
