/* module.c - the module epmoe._C: its constants, its functions, and where it can be imported.
 *
 * A function parses its arguments, releases the interpreter lock and calls the C library. If the library
 * fails, the function raises an exception. Python holds a C object (for example a world) in a capsule, which
 * has the name of its type. The module does not link against torch and is built without it.
 * Invariant: only the main interpreter of a process has the module, because some of its state is of the whole
 * process: the exception classes, the interrupt function, and the exchange API of one tensor type. */
#include "python/module.h"

#include "protocol/gemm_params.h"
#include "protocol/layout.h"
#include "protocol/low_latency.h"
#include "protocol/trace.h"

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
    {"MAX_TOPK", EP_MAX_TOPK},
    {"LL_ID", EP_LL_ID},
    {"NAME_BYTES", EP_NAME_BYTES},
    {"NONCE_BYTES", EP_NONCE_BYTES},
    {"ALL_GATHER_BYTES", EP_ALL_GATHER_BYTES},
    {"TRACE_WARPS", EP_TRACE_WARPS},
    {"CPU", EP_CPU},
    {"CUDA", EP_CUDA},
#define X(NAME, value, num_bytes, text) {#NAME, EP_##NAME},
    EP_DTYPES(X)
#undef X
        {"COMBINE_LOCAL", EP_COMBINE_LOCAL},
    {"COMBINE_SCATTER", EP_COMBINE_SCATTER},
    {"COMBINE_GATHER", EP_COMBINE_GATHER},
    {"LOW_LATENCY", EP_LOW_LATENCY},
    {"LOW_LATENCY_SCATTER", EP_LOW_LATENCY_SCATTER},
#define X(NAME, name, Type, text) {"OP_" #NAME, EP_OP_##NAME},
    EP_OPERATIONS(X, X)
#undef X
        {"EINVAL", EP_EINVAL},
    {"ENOMEM", EP_ENOMEM},
    {"NO_ROOM", EP_NO_ROOM},
    {"BALANCE_HOLDS", EP_BALANCE_HOLDS},
    {"EPEERDIED", EP_EPEERDIED},
    {"EOVERFLOW", EP_EOVERFLOW},
    {"EINDEX", EP_EINDEX},
    {"ESYS", EP_ESYS},
    {"ETIMEOUT", EP_ETIMEOUT},
    {"EMISMATCH", EP_EMISMATCH},
    {"ECLOSED", EP_ECLOSED},
    {"ETYPE", EP_ETYPE},
    {"ERUNTIME", EP_ERUNTIME},
    {"HEAD_STATUS", EP_HEAD_STATUS},
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

/* The names of a list, for Python: the fields of a configuration, the spans from number 1 on, and the
 * activations. */
#define AGREED(field, name, kind) name,
#define LOCAL(field, name) name,
#define SPAN(NAME, text) text,
#define ACTIVATION(NAME, name, COLUMNS, alpha) name,
static const char *const config_fields[] = {EP_CONFIG_FIELDS(AGREED, LOCAL) NULL};
static const char *const spans[] = {EP_SPANS(SPAN) NULL};
static const char *const activation_names[] = {EP_ACTIVATIONS(ACTIVATION)};
#undef AGREED
#undef LOCAL
#undef SPAN
#undef ACTIVATION

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

/* Add a tuple (name, is_gated, has_numbers) for each activation, in the order of their numbers. */
static int add_activations(PyObject *m) {
    PyObject *tuple = PyTuple_New(EP_NUM_ACTIVATIONS);
    int code = tuple ? 0 : -1;
    for (uint32_t i = 0; !code && i < EP_NUM_ACTIVATIONS; i++) {
        PyObject *one = Py_BuildValue("(sNN)", activation_names[i], PyBool_FromLong((long)EP_ACT_IS_GATED(i)),
                                      PyBool_FromLong(ep_act_has_numbers(i)));
        code = one ? PyTuple_SetItem(tuple, (Py_ssize_t)i, one) : -1;
    }
    if (!code) code = PyModule_AddObjectRef(m, "ACTIVATIONS", tuple);
    Py_XDECREF(tuple);
    return code;
}

/* The exception classes and the interrupt function exist once per process, and PyGILState_Ensure, which
 * is_interrupted calls, finds only the main interpreter. So any other interpreter gets an ImportError. */
static int check_interpreter(void) {
    const int64_t id = PyInterpreterState_GetID(PyInterpreterState_Get());
    if (id > 0)
        PyErr_Format(PyExc_ImportError,
                     "epmoe works only in the main interpreter of a process, but this is interpreter %lld: "
                     "use a process instead",
                     (long long)id);
    return id == 0 ? 0 : -1;
}

static int set_up(PyObject *m) {
    if (check_interpreter()) return -1;
    if (add_names(m, "CONFIG_FIELDS", config_fields) || add_names(m, "SPANS", spans) || add_activations(m))
        return -1;
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++)
        if (PyModule_AddIntConstant(m, constants[i].name, constants[i].value)) return -1;
    PyMethodDef *const all[] = {ep_args_methods,  ep_world_methods, ep_heap_methods,
                                ep_layer_methods, ep_gemm_methods,  ep_wgrad_fp8_methods};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (PyModule_AddFunctions(m, all[i])) return -1;
    ep_world_set_interrupt(is_interrupted);
    return 0;
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, __extension__(void *) set_up}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", NULL, 0, NULL, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
