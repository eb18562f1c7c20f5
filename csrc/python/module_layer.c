/* module_layer.c - epmoe._C.layer_*: layers and their operations.
 *
 * Exports ep_layer_methods. The comment above a function lists its arguments, which are passed by position.
 * Invariant: if this rank cannot read a tensor argument of an operation, it first propagates the error to
 * its peers, then raises the Python exception. An exception of an operation, or of a plan whose rows are
 * read, is marked: the peers have it too, or know of it. */
#include "python/module.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "layer/test_hooks.h"
#include "protocol/layout.h"
#include "runtime/error.h"

/* As ep_done, for what all ranks do together: a failed call has told the peers. */
static PyObject *done_together(int code) {
    PyObject *result = ep_done(code);
    if (!result) ep_mark_reported();
    return result;
}

static void free_layer(PyObject *c) {
    EpLayer *l = (EpLayer *)PyCapsule_GetPointer(c, LAYER);
    WITHOUT_LOCK(ep_layer_release(l));
}

/* A configuration is a tuple of numbers, in the order of EP_CONFIG_FIELDS. */
static const struct {
    const char *name;
    size_t off;
} config_fields[] = {
#define AGREED(field, name, kind) {name, offsetof(EpLayerConfig, field)},
#define LOCAL(field, name) {name, offsetof(EpLayerConfig, field)},
    EP_CONFIG_FIELDS(AGREED, LOCAL)
#undef AGREED
#undef LOCAL
};
enum { NUM_CONFIG_FIELDS = sizeof config_fields / sizeof config_fields[0] };
_Static_assert(sizeof(EpLayerConfig) == NUM_CONFIG_FIELDS * sizeof(uint32_t), "the list has every field");

/* Set the exception for a number that is not a uint32_t. Its range is that of the field, so ask the check of
 * the configuration what it says of the nearest number, whose place in the text the number takes. */
static void wrong_number(const char *name, PyObject *value, const EpLayerConfig *c, uint32_t nearest) {
    char start[64];
    uint64_t num_bytes;
    int n = snprintf(start, sizeof start, "%s %u:", name, nearest);
    const bool is_named = ep_layer_check_config(c, &num_bytes) && !strncmp(ep_error_text(), start, (size_t)n);
    if (is_named) PyErr_Format(PyExc_ValueError, "%s %R:%s", name, value, ep_error_text() + n);
    else PyErr_Format(PyExc_ValueError, "%s %R: must be 0 to 4294967295", name, value);
}

static bool get_config(PyObject *o, EpLayerConfig *c) {
    if (!PyTuple_Check(o) || PyTuple_Size(o) != NUM_CONFIG_FIELDS)
        return PyErr_Format(PyExc_TypeError, "wanted a configuration, a tuple of %d numbers, got %R",
                            NUM_CONFIG_FIELDS, o),
               false;
    Py_ssize_t wrong = NUM_CONFIG_FIELDS; /* the first field whose number does not fit */
    uint32_t nearest = 0;
    for (Py_ssize_t i = 0; i < NUM_CONFIG_FIELDS; i++) {
        PyObject *value = PyTuple_GetItem(o, i);
        uint32_t number;
        if (!ep_get_u32(value, &number)) {
            if (!PyLong_Check(value)) return false;
            PyErr_Clear();
            number = PyLong_AsLong(value) < 0 && !PyErr_Occurred() ? 0 : UINT32_MAX;
            PyErr_Clear();
            if (wrong == NUM_CONFIG_FIELDS) {
                wrong = i;
                nearest = number;
            }
        }
        memcpy((char *)c + config_fields[i].off, &number, sizeof number);
    }
    if (wrong == NUM_CONFIG_FIELDS) return true;
    wrong_number(config_fields[wrong].name, PyTuple_GetItem(o, wrong), c, nearest);
    return false;
}

FAST(layer_bytes) {
    EpLayerConfig c;
    uint64_t num_bytes;
    WANT(1);
    if (!get_config(args[0], &c)) return NULL;
    int code = ep_layer_check_config(&c, &num_bytes);
    return code ? ep_raise(code) : PyLong_FromUnsignedLongLong(num_bytes);
}

/* (world, config, status) */
FAST(layer_agree) {
    EpLayerConfig c;
    int status, code;
    WANT(3);
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w || !get_config(args[1], &c) || !ep_get_int(args[2], &status)) return NULL;
    if (status) ep_error(status, "this rank failed before the call");
    WITHOUT_LOCK(code = ep_layer_agree(w, &c, status));
    return ep_done(code);
}

FAST(layer_create) {
    EpLayerConfig c;
    EpLayer *l = NULL;
    int code;
    WANT(2);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h || !get_config(args[1], &c)) return NULL;
    WITHOUT_LOCK(code = ep_layer_create(h, &c, &l));
    if (code) return ep_raise(code);
    PyObject *capsule = PyCapsule_New(l, LAYER, free_layer);
    if (!capsule) WITHOUT_LOCK(ep_layer_release(l));
    return capsule;
}

FAST(layer_close) {
    int code;
    WANT(1);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l) return NULL;
    WITHOUT_LOCK(code = ep_layer_close(l));
    return ep_done(code);
}

/* (config): whether an expert gets more rows on average than in decoding */
FAST(layer_has_many_rows) {
    EpLayerConfig c;
    WANT(1);
    if (!get_config(args[0], &c)) return NULL;
    return PyBool_FromLong(ep_layer_has_many_rows(&c.shape));
}

/* (config): whether calls without gradients take a low-latency layer of the same shape */
FAST(layer_decodes) {
    EpLayerConfig c;
    WANT(1);
    if (!get_config(args[0], &c)) return NULL;
    return PyBool_FromLong(ep_layer_decodes(&c));
}

/* (config): the rows for which a training step makes room without knowing M, or 0 */
FAST(layer_unread_rows) {
    EpLayerConfig c;
    WANT(1);
    if (!get_config(args[0], &c)) return NULL;
    return PyLong_FromUnsignedLong(ep_layer_unread_rows(&c.shape));
}

/* Read the number of tokens, and kept_for: None, or the address of the weights for whose backward the outputs
 * are kept, 0 without weights. */
static bool get_room_of(PyObject *const *args, EpRoomOf *of) {
    uint64_t address = 0;
    if (!ep_get_u64(args[0], &of->num_tokens)) return false;
    of->is_kept = args[1] != Py_None;
    if (of->is_kept && !ep_get_u64(args[1], &address)) return false;
    of->weight = (const void *)(uintptr_t)address;
    return true;
}
/* (layer, num_tokens, kept_for): the rows to make room for, or NO_ROOM */
FAST(layer_room) {
    EpRoomOf of;
    WANT(3);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !get_room_of(args + 1, &of)) return NULL;
    return PyLong_FromLongLong(ep_layer_room(l, &of));
}
/* (layer, num_tokens, kept_for, num_rows) */
FAST(layer_set_room) {
    EpRoomOf of;
    WANT(4);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !get_room_of(args + 1, &of)) return NULL;
    const long long num_rows = PyLong_AsLongLong(args[3]);
    if (num_rows == -1 && PyErr_Occurred()) return NULL;
    if (num_rows < EP_NO_ROOM)
        return PyErr_Format(PyExc_ValueError, "%lld rows: must be at least -1", num_rows);
    ep_layer_set_room(l, &of, num_rows);
    Py_RETURN_NONE;
}

/* (config, has_kernels, n, k, columns, is_fp8, trains, has_split_gates): see ep_layer_fuses */
FAST(layer_fuses) {
    EpLayerConfig c;
    EpProduct p = {0};
    int has_kernels, is_fp8, trains, has_split_gates;
    WANT(8);
    if (!get_config(args[0], &c) || !ep_get_int(args[1], &has_kernels) || !ep_get_u32(args[2], &p.n) ||
        !ep_get_u32(args[3], &p.k) || !ep_get_u32(args[4], &p.columns) || !ep_get_int(args[5], &is_fp8) ||
        !ep_get_int(args[6], &trains) || !ep_get_int(args[7], &has_split_gates))
        return NULL;
    p.is_fp8 = is_fp8 != 0;
    p.trains = trains != 0;
    p.has_split_gates = has_split_gates != 0;
    return PyBool_FromLong(ep_layer_fuses(&c, has_kernels != 0, &p));
}

/* (config, num_tokens) -> a dict: offsets of the plan's parts in int32 elements, its length, max_tiles */
FAST(plan_layout) {
    EpLayerConfig c;
    uint32_t num_tokens;
    uint64_t unused;
    WANT(2);
    if (!get_config(args[0], &c) || !ep_get_u32(args[1], &num_tokens)) return NULL;
    int code = ep_layer_check_config(&c, &unused);
    if (code) return ep_raise(code);
    EpPlanLayout l = ep_plan_layout(&c.shape, num_tokens);
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsI}", "counts", l.counts_off, "expert_row", l.expert_row_off,
                         "token_expert", l.token_expert_off, "token_row", l.token_row_off, "token_slot",
                         l.token_slot_off, "sort", l.sort_off, "send_token", l.send_token_off, "tile_expert",
                         l.tile_expert_off, "tile_row", l.tile_row_off, "num_words", l.num_words, "max_tiles",
                         l.max_tiles);
}

/* (config) -> the length of the handle of a low-latency layer, and the offset of the expert offsets in it, in
 * int32 elements */
FAST(ll_handle_words) {
    EpLayerConfig c;
    uint64_t unused, num_words, offsets;
    WANT(1);
    if (!get_config(args[0], &c)) return NULL;
    int code = ep_layer_check_config(&c, &unused);
    if (code) return ep_raise(code);
    num_words = ep_layer_ll_handle_words(&c, &offsets);
    return Py_BuildValue("KK", num_words, offsets);
}

/* Propagate an error because a tensor argument cannot be read. The peers learn it before Python does. If the
 * operation waits for its plan, and that has failed, no rank enters the operation, so the error is the
 * plan's. */
static PyObject *propagate_pending_error(EpLayer *l, uint32_t buffer, uint32_t op, PyObject *plan,
                                         bool awaits) {
    PyObject *type, *value, *trace;
    EpTensor t;
    const EpTensor *awaited = NULL;
    uint32_t num_rows;
    int code = ep_pending_code(), of_plan = 0;
    PyErr_Fetch(&type, &value, &trace);
    void *stream = ep_current_stream(ep_layer_heap(l), plan);
    if (awaits && !ep_get_own_tensor(plan, false, &t, &awaited)) PyErr_Clear();
    if (awaited) WITHOUT_LOCK(of_plan = ep_layer_num_rows(l, buffer, awaited, stream, &num_rows));
    if (of_plan == EP_EINVAL || of_plan == EP_ETYPE) of_plan = 0; /* it is no plan, so it has not failed */
    if (!of_plan) WITHOUT_LOCK(ep_layer_propagate_error(l, buffer, op, code, stream));
    if (!of_plan && !PyErr_Occurred()) return PyErr_Restore(type, value, trace), ep_mark_reported(), NULL;
    Py_XDECREF(type); /* the plan's error, or what a signal handler has raised during the wait, goes first */
    Py_XDECREF(value);
    Py_XDECREF(trace);
    if (of_plan) ep_raise(of_plan);
    ep_mark_reported();
    return NULL;
}

/* ---- operations: layer_NAME(layer, buffer, arguments), a tuple as protocol/ops.h lists it, -> (rows of the
 * plan that it awaited, whether it was launched, how many fused operations ran) ---- */

enum {
    TENSOR,
    OPTIONAL,
    OUT,
    OWN,
    OWN_OUT,
    OWN_OUT_OPTIONAL,
    PLAN,
    PLAN_OUT,
    U32,
    ACTIVATION,
    PLANNED,
    AWAITS
};
enum { MAX_ARGS = 40 };
typedef struct {
    uint8_t kind;
    uint16_t off; /* of its field in the struct of the arguments */
} Argument;
typedef struct {
    uint32_t op, num_args; /* op: of a call of several operations, the first */
    const Argument *args;
    int (*call)(EpLayer *l, uint32_t buffer, const void *fields, void *stream, EpRan *ran); /* NULL: run op */
} Operation;

/* Read the numbers, and find the plan and whether the operation waits for it: a call that makes its plan by
 * itself has no plan to wait for before it runs. */
static bool get_numbers(const Operation *op, PyObject *tuple, char *fields, PyObject **plan, bool *awaits) {
    bool is_planned = true;
    for (uint32_t i = 0; i < op->num_args; i++) {
        const Argument *a = &op->args[i];
        PyObject *value = PyTuple_GetItem(tuple, i);
        uint32_t *number = (uint32_t *)(void *)(fields + a->off);
        if (a->kind == PLAN || a->kind == PLAN_OUT) *plan = value;
        const bool is_number = a->kind == U32 || a->kind == PLANNED || a->kind == AWAITS;
        if (is_number && !ep_get_u32(value, number)) return false;
        if (a->kind == PLANNED) is_planned = *number != 0;
        if (a->kind == AWAITS) *awaits = is_planned && *number != 0;
        if (a->kind == ACTIVATION && !ep_get_activation(value, (EpActivation *)(void *)(fields + a->off)))
            return false;
    }
    return true;
}
/* Read the tensors, which come first. */
static bool get_tensors(const Operation *op, PyObject *tuple, EpTensor *tensors, char *fields) {
    for (uint32_t i = 0; i < op->num_args && op->args[i].kind < U32; i++) {
        const uint32_t kind = op->args[i].kind;
        const EpTensor **field = (const EpTensor **)(void *)(fields + op->args[i].off);
        PyObject *tensor = PyTuple_GetItem(tuple, i);
        if (kind <= OUT ? !ep_get_tensor(tensor, kind == OPTIONAL, &tensors[i], field)
                        : !ep_get_own_tensor(tensor, kind == OWN_OUT_OPTIONAL, &tensors[i], field))
            return false;
    }
    return true;
}

static PyObject *run(const Operation *op, void *fields, PyObject *const *args, Py_ssize_t num_args) {
    uint32_t buffer;
    EpTensor tensors[MAX_ARGS];
    PyObject *plan = NULL;
    bool awaits = false;
    int code;
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "wanted 3 arguments, got %zd", num_args);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer)) return NULL;
    if (!PyTuple_Check(args[2]) || PyTuple_Size(args[2]) != (Py_ssize_t)op->num_args)
        return PyErr_Format(PyExc_TypeError, "wanted a tuple of %u arguments, got %R", op->num_args, args[2]);
    if (!get_numbers(op, args[2], (char *)fields, &plan, &awaits)) return NULL;
    if (!get_tensors(op, args[2], tensors, (char *)fields))
        return propagate_pending_error(l, buffer, op->op, plan, awaits);
    void *stream = ep_current_stream(ep_layer_heap(l), plan);
    EpRan ran;
    WITHOUT_LOCK(code = op->call ? op->call(l, buffer, fields, stream, &ran)
                                 : ep_layer_run(l, buffer, op->op, fields, stream, &ran));
    if (code || PyErr_Occurred()) return done_together(code);
    return Py_BuildValue("IOI", ran.num_rows, ran.is_launched ? Py_True : Py_False, ran.num_fused);
}

#define ROW(S, kind, name) {kind, offsetof(S, name)},
#define X(NAME, name, Type, text)                                                                    \
    FAST(layer_##name) {                                                                             \
        static const Argument list[] = {EP_ARGS_##name(ROW, Ep##Type##Args)};                        \
        static const Operation op = {EP_OP_##NAME, sizeof list / sizeof list[0], list, NULL};        \
        _Static_assert(sizeof list / sizeof list[0] <= MAX_ARGS, "run() has room for every tensor"); \
        Ep##Type##Args fields;                                                                       \
        (void)self;                                                                                  \
        return run(&op, &fields, args, num_args);                                                    \
    }
#define B(NAME, name, Type, text)
EP_OPERATIONS(X, B)
#undef X
#undef B

/* ---- calls of several operations: layer_NAME(layer, buffer, arguments) -> what an operation returns ---- */

#define C(name, Type, NAME)                                                                             \
    static int call_##name(EpLayer *l, uint32_t buffer, const void *fields, void *stream, EpRan *ran) { \
        return ep_layer_##name(l, buffer, (const Ep##Type##Args *)fields, stream, ran);                 \
    }                                                                                                   \
    FAST(layer_##name) {                                                                                \
        static const Argument list[] = {EP_ARGS_##name(ROW, Ep##Type##Args)};                           \
        static const Operation op = {EP_OP_##NAME, sizeof list / sizeof list[0], list, call_##name};    \
        _Static_assert(sizeof list / sizeof list[0] <= MAX_ARGS, "run() has room for every tensor");    \
        Ep##Type##Args fields;                                                                          \
        (void)self;                                                                                     \
        return run(&op, &fields, args, num_args);                                                       \
    }
EP_CALLS(C)
#undef C

/* (layer, buffer, plan) */
FAST(layer_num_rows) {
    uint32_t buffer, num_rows;
    EpTensor t;
    const EpTensor *plan;
    int code;
    WANT(3);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_tensor(args[2], false, &t, &plan)) return NULL;
    void *stream = ep_current_stream(ep_layer_heap(l), args[2]);
    WITHOUT_LOCK(code = ep_layer_num_rows(l, buffer, plan, stream, &num_rows));
    return code ? done_together(code) : PyLong_FromUnsignedLong(num_rows);
}

/* (layer, buffer, plan): the rows of each local expert */
FAST(layer_expert_rows) {
    uint32_t buffer, num;
    int32_t rows[EP_MAX_EXPERTS];
    EpTensor t;
    const EpTensor *plan;
    int code;
    WANT(3);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_tensor(args[2], false, &t, &plan)) return NULL;
    void *stream = ep_current_stream(ep_layer_heap(l), args[2]);
    WITHOUT_LOCK(code = ep_layer_expert_rows(l, buffer, plan, stream, rows, &num));
    if (code) return done_together(code);
    PyObject *list = PyList_New(num);
    for (uint32_t i = 0; list && i < num; i++) {
        PyObject *n = PyLong_FromLong(rows[i]);
        if (!n || PyList_SetItem(list, i, n)) Py_CLEAR(list);
    }
    return list;
}

/* (layer): the nanoseconds for which this rank has waited for each rank */
FAST(layer_waited) {
    uint64_t ns[EP_MAX_RANKS];
    uint32_t num;
    int code;
    WANT(1);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l) return NULL;
    WITHOUT_LOCK(code = ep_layer_waited(l, ns, &num));
    if (code) return ep_done(code);
    PyObject *list = PyList_New(num);
    for (uint32_t i = 0; list && i < num; i++) {
        PyObject *n = PyLong_FromUnsignedLongLong(ns[i]);
        if (!n || PyList_SetItem(list, i, n)) Py_CLEAR(list);
    }
    return list;
}

/* (layer, buffer): who helps in the latest layer_experts, a list of (expert, slot, number of rows) */
FAST(layer_helps) {
    uint32_t buffer;
    EpHelps helps;
    int code;
    WANT(2);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer)) return NULL;
    WITHOUT_LOCK(code = ep_layer_helps(l, buffer, &helps));
    if (code) return ep_done(code);
    PyObject *list = PyList_New(helps.num);
    for (uint32_t i = 0; list && i < helps.num; i++) {
        const EpHelp *h = &helps.help[i];
        PyObject *item = Py_BuildValue("III", h->expert, h->slot, h->num);
        if (!item || PyList_SetItem(list, i, item)) Py_CLEAR(list);
    }
    return list;
}

/* (layer, heap, offset, bytes of a slot, number of slots) */
FAST(layer_set_staging) {
    uint64_t off, slot_bytes;
    uint32_t num_slots;
    int code;
    WANT(5);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    EpHeap *h = l ? (EpHeap *)ep_get_object(args[1], HEAP) : NULL;
    if (!h || !ep_get_u64(args[2], &off) || !ep_get_u64(args[3], &slot_bytes) ||
        !ep_get_u32(args[4], &num_slots))
        return NULL;
    WITHOUT_LOCK(code = ep_layer_set_staging(l, h, off, slot_bytes, num_slots));
    return ep_done(code);
}

/* (layer, buffer, plan, helps: a list of tuples that begin with (expert, slot), gate_up, gate_up_bias, down,
 * down_bias): the slots hold the weights of the helped experts again */
FAST(layer_restore_weights) {
    uint32_t buffer, expert[EP_MAX_HELPS], slot[EP_MAX_HELPS];
    EpTensor tensors[4];
    const EpTensor *weights[4];
    int code;
    WANT(8);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer)) return NULL;
    if (!PyList_Check(args[3]) || PyList_Size(args[3]) > EP_MAX_HELPS)
        return PyErr_Format(PyExc_TypeError, "wanted a list of at most %u helps", EP_MAX_HELPS);
    const uint32_t num = (uint32_t)PyList_Size(args[3]);
    for (uint32_t i = 0; i < num; i++) {
        PyObject *help = PyList_GetItem(args[3], i);
        if (!PyTuple_Check(help) || PyTuple_Size(help) < 2)
            return PyErr_Format(PyExc_TypeError, "wanted tuples that begin with (expert, slot), got %R",
                                help);
        if (!ep_get_u32(PyTuple_GetItem(help, 0), &expert[i]) ||
            !ep_get_u32(PyTuple_GetItem(help, 1), &slot[i]))
            return NULL;
    }
    for (uint32_t i = 0; i < 4; i++)
        if (!ep_get_own_tensor(args[4 + i], i % 2, &tensors[i], &weights[i]))
            return propagate_pending_error(l, buffer, EP_OP_BARRIER, args[2], false);
    void *stream = ep_current_stream(ep_layer_heap(l), args[2]);
    WITHOUT_LOCK(code = ep_layer_restore_weights(l, buffer, num, expert, slot, weights, stream));
    return done_together(code);
}

/* (config, helper_slots, min_rows, choices of each physical expert, None or what the slots hold): who helps
 * whom (protocol/balance.h), a list of (expert, slot, first choice, number of choices, is held) */
FAST(find_helps) {
    EpLayerConfig c;
    EpBalance b;
    EpHelps helps;
    uint64_t unused;
    int32_t rows[EP_MAX_EXPERTS];
    EpTensor t;
    const EpTensor *held;
    WANT(5);
    if (!get_config(args[0], &c) || !ep_get_u32(args[1], &b.num_slots) || !ep_get_u32(args[2], &b.min_rows) ||
        !ep_get_tensor(args[4], true, &t, &held))
        return NULL;
    int code = ep_layer_check_config(&c, &unused);
    if (code) return ep_raise(code);
    if (held && (held->kind != EP_CPU || held->num_dims != 2 || held->dtype != EP_I32 ||
                 held->shape[0] != (int64_t)c.shape.num_experts + 1 || held->shape[1] != 2))
        return PyErr_Format(PyExc_ValueError, "held: wanted int32 [%u, 2] on the CPU",
                            c.shape.num_experts + 1);
    if (!PyList_Check(args[3]) || PyList_Size(args[3]) != (Py_ssize_t)c.shape.num_experts)
        return PyErr_Format(PyExc_ValueError, "wanted a list of %u numbers", c.shape.num_experts);
    for (uint32_t e = 0; e < c.shape.num_experts; e++) {
        uint32_t n;
        if (!ep_get_u32(PyList_GetItem(args[3], e), &n)) return NULL;
        rows[e] = (int32_t)(n & INT32_MAX);
    }
    ep_find_helps(&c.shape, &b, held ? held->data : NULL, rows, &helps);
    PyObject *list = PyList_New(helps.num);
    for (uint32_t i = 0; list && i < helps.num; i++) {
        const EpHelp *h = &helps.help[i];
        PyObject *item = Py_BuildValue("IIIIi", h->expert, h->slot, h->first, h->num, (int)h->is_held);
        if (!item || PyList_SetItem(list, i, item)) Py_CLEAR(list);
    }
    return list;
}

/* (layer, buffer, events or None, capacity) */
FAST(layer_trace) {
    uint32_t buffer, capacity;
    EpTensor t;
    const EpTensor *events;
    int code;
    WANT(4);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_tensor(args[2], true, &t, &events) ||
        !ep_get_u32(args[3], &capacity))
        return NULL;
    WITHOUT_LOCK(code = ep_layer_trace(l, buffer, events, capacity));
    return ep_done(code);
}

/* (layer, buffer, op, code, stream) */
FAST(layer_propagate_error) {
    uint32_t buffer, op;
    int why, code;
    void *stream;
    WANT(5);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_u32(args[2], &op) || !ep_get_int(args[3], &why) ||
        !ep_get_stream(args[4], &stream))
        return NULL;
    WITHOUT_LOCK(code = ep_layer_propagate_error(l, buffer, op, why, stream));
    return done_together(code);
}

/* (layer, buffer, stream) */
FAST(layer_barrier) {
    uint32_t buffer;
    void *stream;
    int code;
    WANT(3);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_stream(args[2], &stream)) return NULL;
    WITHOUT_LOCK(code = ep_layer_barrier(l, buffer, stream));
    return done_together(code);
}

/* (layer, stream) */
FAST(layer_sync) {
    void *stream;
    int code;
    WANT(2);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_stream(args[1], &stream)) return NULL;
    WITHOUT_LOCK(code = ep_layer_sync(l, stream));
    return ep_done(code);
}

/* (layer, buffer): the number of the newest call */
FAST(layer_newest_call) {
    uint32_t buffer;
    uint64_t number = 0;
    int code;
    WANT(2);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer)) return NULL;
    WITHOUT_LOCK(code = ep_layer_newest_call(l, buffer, &number));
    return code ? ep_raise(code) : PyLong_FromUnsignedLongLong(number);
}

/* (layer, buffer, number): whether that call was void */
FAST(layer_was_void) {
    uint32_t buffer;
    uint64_t number;
    bool was_void = false;
    int code;
    WANT(3);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_u64(args[2], &number)) return NULL;
    WITHOUT_LOCK(code = ep_layer_was_void(l, buffer, number, &was_void));
    return code ? ep_raise(code) : PyBool_FromLong(was_void);
}

/* (layer, buffer, epoch, stream) */
FAST(layer_set_epoch) {
    uint32_t buffer;
    uint64_t epoch;
    void *stream;
    int code;
    WANT(4);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_u64(args[2], &epoch) ||
        !ep_get_stream(args[3], &stream))
        return NULL;
    WITHOUT_LOCK(code = ep_layer_set_epoch(l, buffer, epoch, stream));
    return ep_done(code);
}

PyMethodDef ep_layer_methods[] = {METHOD(layer_bytes),
                                  METHOD(layer_agree),
                                  METHOD(layer_create),
                                  METHOD(layer_has_many_rows),
                                  METHOD(layer_decodes),
                                  METHOD(layer_unread_rows),
                                  METHOD(layer_room),
                                  METHOD(layer_set_room),
                                  METHOD(layer_fuses),
                                  METHOD(layer_close),
                                  METHOD(plan_layout),
                                  METHOD(ll_handle_words),
                                  METHOD(layer_num_rows),
                                  METHOD(layer_expert_rows),
                                  METHOD(layer_waited),
                                  METHOD(layer_helps),
                                  METHOD(layer_set_staging),
                                  METHOD(layer_restore_weights),
                                  METHOD(find_helps),
                                  METHOD(layer_trace),
                                  METHOD(layer_propagate_error),
                                  METHOD(layer_sync),
                                  METHOD(layer_newest_call),
                                  METHOD(layer_was_void),
                                  METHOD(layer_set_epoch),
#define X(NAME, name, Type, text) METHOD(layer_##name),
                                  EP_OPERATIONS(X, X)
#undef X
#define C(name, Type, NAME) METHOD(layer_##name),
                                      EP_CALLS(C)
#undef C
                                          {NULL, NULL, 0, NULL}};
