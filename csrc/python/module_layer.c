/* module_layer.c - epmoe._C.layer_*: layers and their operations.
 *
 * Exports ep_layer_methods. Tensors are passed by position; the comment above a function lists its arguments.
 * Invariant: if this rank cannot read a tensor argument of an operation, it first refuses the operation to
 * its peers, then raises the Python exception. */
#include "python/module.h"
#include "runtime/error.h"

static void free_layer(PyObject *c) {
    EpLayer *l = (EpLayer *)PyCapsule_GetPointer(c, LAYER);
    WITHOUT_LOCK(ep_layer_release(l));
}

/* (W, E, K, max_tokens, hidden, dtype, combine_mode, capacity, num_buffers, num_sm, reserve_sms) */
static bool get_config(PyObject *o, EpLayerConfig *c) {
    uint32_t *const fields[] = {&c->shape.num_ranks,    &c->shape.num_experts,
                                &c->shape.num_topk,     &c->shape.max_tokens,
                                &c->shape.hidden,       &c->shape.dtype,
                                &c->shape.combine_mode, &c->shape.capacity,
                                &c->num_buffers,        &c->num_sm,
                                &c->reserve_sms};
    if (!PyTuple_Check(o) || PyTuple_Size(o) != 11)
        return PyErr_Format(PyExc_TypeError, "wanted a configuration, a tuple of 11 numbers, got %R", o),
               false;
    static const char *const names[] = {"ranks",       "num_experts", "topk",         "max_tokens",
                                        "hidden",      "dtype",       "combine_mode", "capacity",
                                        "num_buffers", "num_sm",      "reserve_sms"};
    for (Py_ssize_t i = 0; i < 11; i++) {
        PyObject *value = PyTuple_GetItem(o, i);
        if (ep_get_u32(value, fields[i])) continue;
        if (PyLong_Check(value))
            PyErr_Format(PyExc_ValueError, "%s %R: must be 0 to 4294967295", names[i], value);
        return false;
    }
    return true;
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
    return code ? ep_raise(code) : PyCapsule_New(l, LAYER, free_layer);
}

FAST(layer_close) {
    int code;
    WANT(1);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l) return NULL;
    WITHOUT_LOCK(code = ep_layer_close(l));
    return ep_done(code);
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

/* Refuse an operation because a tensor argument cannot be read. The peers learn it before Python does. */
static PyObject *refuse_pending(EpLayer *l, uint32_t buffer, uint32_t op, PyObject *any_tensor) {
    PyObject *type, *value, *trace;
    int code = ep_pending_code();
    PyErr_Fetch(&type, &value, &trace);
    void *stream = ep_current_stream(ep_layer_heap(l), any_tensor);
    WITHOUT_LOCK(ep_layer_refuse(l, buffer, op, code, stream));
    PyErr_Restore(type, value, trace);
    return NULL;
}

/* Read n tensors from args[2] on. Tensor i may be None if bit i of may_be_none is set. */
static bool get_tensors(PyObject *const *args, int n, uint32_t may_be_none, EpTensor *t,
                        const EpTensor **out) {
    for (int i = 0; i < n; i++)
        if (!ep_get_tensor(args[i + 2], may_be_none >> i & 1u, &t[i], &out[i])) return false;
    return true;
}

/* (layer, buffer, indices, scatter, plan, sort_slots) */
FAST(layer_plan) {
    uint32_t buffer;
    EpTensor t[3];
    const EpTensor *a[3];
    int code;
    WANT(6);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer)) return NULL;
    const int sort_slots = PyObject_IsTrue(args[5]);
    if (sort_slots < 0) return NULL;
    if (!get_tensors(args, 3, 2, t, a)) return refuse_pending(l, buffer, EP_OP_PLAN, args[4]);
    void *stream = ep_current_stream(ep_layer_heap(l), args[4]);
    WITHOUT_LOCK(code = ep_layer_plan(l, buffer, a[0], a[1], sort_slots == 1, a[2], stream));
    return ep_done(code);
}

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
    return code ? ep_raise(code) : PyLong_FromUnsignedLong(num_rows);
}

/* (layer, buffer, x, weight, plan, rows, row_weight, recv, requires_grad) */
FAST(layer_dispatch) {
    uint32_t buffer, requires_grad;
    EpTensor t[6];
    const EpTensor *a[6];
    int code;
    WANT(9);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_u32(args[8], &requires_grad)) return NULL;
    if (!get_tensors(args, 6, 2 | 16, t, a)) return refuse_pending(l, buffer, EP_OP_DISPATCH, args[4]);
    void *stream = ep_current_stream(ep_layer_heap(l), args[4]);
    WITHOUT_LOCK(code =
                     ep_layer_dispatch(l, buffer, a[0], a[1], a[2], a[3], a[4], a[5], requires_grad, stream));
    return ep_done(code);
}

/* (layer, buffer, rows, row_weight, row_scalar, plan, recv, out, out_scalar, requires_grad) */
FAST(layer_combine) {
    uint32_t buffer, requires_grad;
    EpTensor t[7];
    const EpTensor *a[7];
    int code;
    WANT(10);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_u32(args[9], &requires_grad)) return NULL;
    if (!get_tensors(args, 7, 2 | 4 | 64, t, a)) return refuse_pending(l, buffer, EP_OP_COMBINE, args[5]);
    void *stream = ep_current_stream(ep_layer_heap(l), args[5]);
    WITHOUT_LOCK(
        code = ep_layer_combine(l, buffer, a[0], a[1], a[2], a[3], a[4], a[5], a[6], requires_grad, stream));
    return ep_done(code);
}

/* (layer, buffer, x, weight, plan, rows, row_weight, recv, gemm_weight, bias, out, activation, alpha,
 * limit, num_move, num_tail, waits_for_expert, num_copies, requires_grad) */
FAST(layer_dispatch_gemm) {
    uint32_t buffer, waits, requires_grad;
    EpTensor t[9];
    const EpTensor *a[9];
    EpDispatchGemm g;
    int code;
    WANT(19);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_u32(args[11], &g.activation) ||
        !ep_get_double(args[12], &g.alpha) || !ep_get_double(args[13], &g.limit) ||
        !ep_get_u32(args[14], &g.num_move) || !ep_get_u32(args[15], &g.num_tail) ||
        !ep_get_u32(args[16], &waits) || !ep_get_u32(args[17], &g.num_copies) ||
        !ep_get_u32(args[18], &requires_grad))
        return NULL;
    if (!get_tensors(args, 9, 2 | 16 | 128, t, a))
        return refuse_pending(l, buffer, EP_OP_DISPATCH_GEMM, args[4]);
    g.x = a[0];
    g.weight = a[1];
    g.plan = a[2];
    g.rows = a[3];
    g.row_weight = a[4];
    g.recv = a[5];
    g.gemm_weight = a[6];
    g.bias = a[7];
    g.out = a[8];
    g.waits_for_expert = waits != 0;
    g.requires_grad = requires_grad != 0;
    void *stream = ep_current_stream(ep_layer_heap(l), args[4]);
    WITHOUT_LOCK(code = ep_layer_dispatch_gemm(l, buffer, &g, stream));
    return ep_done(code);
}

/* (layer, buffer, a, gemm_weight, bias, rows, row_weight, plan, recv, out, num_move, num_reduce,
 * is_serial, requires_grad) */
FAST(layer_gemm_combine) {
    uint32_t buffer, serial, requires_grad;
    EpTensor t[8];
    const EpTensor *a[8];
    EpGemmCombine g;
    int code;
    WANT(14);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_u32(args[10], &g.num_move) ||
        !ep_get_u32(args[11], &g.num_reduce) || !ep_get_u32(args[12], &serial) ||
        !ep_get_u32(args[13], &requires_grad))
        return NULL;
    if (!get_tensors(args, 8, 4 | 16, t, a)) return refuse_pending(l, buffer, EP_OP_GEMM_COMBINE, args[7]);
    g.a = a[0];
    g.gemm_weight = a[1];
    g.bias = a[2];
    g.rows = a[3];
    g.row_weight = a[4];
    g.plan = a[5];
    g.recv = a[6];
    g.out = a[7];
    g.is_serial = serial != 0;
    g.requires_grad = requires_grad != 0;
    void *stream = ep_current_stream(ep_layer_heap(l), args[7]);
    WITHOUT_LOCK(code = ep_layer_gemm_combine(l, buffer, &g, stream));
    return ep_done(code);
}

/* (layer, buffer, events or None, room) */
FAST(layer_trace) {
    uint32_t buffer, room;
    EpTensor t;
    const EpTensor *events;
    WANT(4);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_tensor(args[2], true, &t, &events) ||
        !ep_get_u32(args[3], &room))
        return NULL;
    return ep_done(ep_layer_trace(l, buffer, events, room));
}

/* (layer, buffer, op, code, stream) */
FAST(layer_refuse) {
    uint32_t buffer, op;
    int why, code;
    void *stream;
    WANT(5);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_u32(args[2], &op) || !ep_get_int(args[3], &why) ||
        !ep_get_stream(args[4], &stream))
        return NULL;
    WITHOUT_LOCK(code = ep_layer_refuse(l, buffer, op, why, stream));
    return ep_done(code);
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
    return ep_done(code);
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

/* (layer, buffer, epoch, stream) */
FAST(layer_set_epoch) {
    uint32_t buffer;
    uint64_t epoch;
    void *stream;
    WANT(4);
    EpLayer *l = (EpLayer *)ep_get_object(args[0], LAYER);
    if (!l || !ep_get_u32(args[1], &buffer) || !ep_get_u64(args[2], &epoch) ||
        !ep_get_stream(args[3], &stream))
        return NULL;
    return ep_done(ep_layer_set_epoch(l, buffer, epoch, stream));
}

PyMethodDef ep_layer_methods[] = {
    METHOD(layer_bytes),   METHOD(layer_agree),         METHOD(layer_create),       METHOD(layer_close),
    METHOD(plan_layout),   METHOD(layer_plan),          METHOD(layer_num_rows),     METHOD(layer_dispatch),
    METHOD(layer_combine), METHOD(layer_dispatch_gemm), METHOD(layer_gemm_combine), METHOD(layer_trace),
    METHOD(layer_refuse),  METHOD(layer_barrier),       METHOD(layer_sync),         METHOD(layer_set_epoch),
    {NULL, NULL, 0, NULL}};
