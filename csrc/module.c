/* module.c - epmoe._C: parse, let go of the interpreter lock, call, raise.  Nothing else.
 *
 * Objects are capsules with a name each, so a heap cannot be taken for a layer.  Tensors are read through
 * the C exchange API that their type carries, which also names the stream that is current: the module
 * links against no torch, and is built without one. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dlpack.h"
#include "error.h"

#define WORLD "epmoe.World"
#define HEAP "epmoe.Heap"
#define LAYER "epmoe.Layer"
#define FAST(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
#define WANT(n)                                                                                                   \
    do {                                                                                                          \
        (void)self, (void)args;                                                                                   \
        if (num_args != (n)) return PyErr_Format(PyExc_TypeError, "wanted %d arguments, got %zd", (n), num_args); \
    } while (0)

/* ---- errors ---- */

static PyObject *exceptions; /* name -> class, given by epmoe.errors */

static PyObject *raise_code(int code) {
    const char *name = ep_error_name(code);
    PyObject *class = exceptions ? PyDict_GetItemString(exceptions, name) : NULL;
    PyErr_SetString(class ? class : PyExc_RuntimeError, ep_error_text());
    return NULL;
}
static PyObject *done(int code) {
    if (code) return raise_code(code);
    Py_RETURN_NONE;
}
/* A pending Python exception as a code, for the peers. */
static int pending_code(void) {
    if (PyErr_ExceptionMatches(PyExc_TypeError)) return EP_ETYPE;
    return EP_EINVAL;
}

FAST(set_exceptions) {
    WANT(1);
    if (!PyDict_Check(args[0])) return PyErr_Format(PyExc_TypeError, "wanted a dict of exceptions");
    Py_INCREF(args[0]);
    Py_XDECREF(exceptions);
    exceptions = args[0];
    Py_RETURN_NONE;
}

/* ---- arguments ---- */

/* A number that does not fit is a wrong value, not an arithmetic accident. */
static bool out_of_range(PyObject *o) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError)) return false;
    PyErr_Format(PyExc_ValueError, "%R is out of range", o);
    return false;
}
static bool get_u64(PyObject *o, uint64_t *out) {
    *out = PyLong_AsUnsignedLongLong(o);
    return *out == (uint64_t)-1 && PyErr_Occurred() ? out_of_range(o) : true;
}
static bool get_u32(PyObject *o, uint32_t *out) {
    uint64_t v = 0;
    if (!get_u64(o, &v)) return false;
    if (v > UINT32_MAX) return out_of_range(o);
    *out = (uint32_t)v;
    return true;
}
static bool get_int(PyObject *o, int *out) {
    long v = PyLong_AsLong(o);
    if ((v == -1 && PyErr_Occurred()) || v > INT32_MAX || v < INT32_MIN) return out_of_range(o);
    *out = (int)v;
    return true;
}
static bool get_double(PyObject *o, double *out) {
    *out = PyFloat_AsDouble(o);
    return !(*out == -1.0 && PyErr_Occurred());
}
static bool get_bytes(PyObject *o, void *out, Py_ssize_t n) {
    char *from;
    Py_ssize_t got;
    if (PyBytes_AsStringAndSize(o, &from, &got)) return false;
    if (got != n) return PyErr_Format(PyExc_ValueError, "wanted %zd bytes, got %zd", n, got), false;
    memcpy(out, from, (size_t)n);
    return true;
}
static void *get_object(PyObject *o, const char *name) { return PyCapsule_GetPointer(o, name); }

static const EpDLExchangeAPI *exchange_api(PyObject *o) {
    static PyTypeObject *last_type; /* almost always torch.Tensor; types are not freed while torch is loaded */
    static const EpDLExchangeAPI *last_api;
    if (Py_TYPE(o) == last_type) return last_api;
    PyObject *capsule = PyObject_GetAttrString((PyObject *)Py_TYPE(o), "__dlpack_c_exchange_api__");
    if (!capsule) return PyErr_Format(PyExc_TypeError, "wanted a torch.Tensor, got %R", (PyObject *)Py_TYPE(o)), NULL;
    const EpDLExchangeAPI *api = (const EpDLExchangeAPI *)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (!api) return NULL;
    if (api->version.major != 1 || !api->dltensor_from_py_object_no_sync)
        return PyErr_Format(PyExc_TypeError, "this torch speaks DLPack %u; epmoe speaks 1", api->version.major), NULL;
    last_type = Py_TYPE(o), last_api = api;
    return api;
}

static uint32_t dtype_of(EpDLDataType d) {
    if (d.lanes != 1) return EP_OTHER;
    if (d.code == EP_DL_FLOAT) return d.bits == 32 ? EP_F32 : d.bits == 16 ? EP_F16 : EP_OTHER;
    if (d.code == EP_DL_BFLOAT && d.bits == 16) return EP_BF16;
    if (d.code == EP_DL_INT) return d.bits == 32 ? EP_I32 : d.bits == 64 ? EP_I64 : EP_OTHER;
    return EP_OTHER;
}

/* None gives *out = NULL where that is allowed. */
static bool get_tensor(PyObject *o, bool may_be_none, EpTensor *t, const EpTensor **out) {
    EpDLTensor d;
    *out = NULL;
    if (o == Py_None && may_be_none) return true;
    const EpDLExchangeAPI *api = exchange_api(o);
    if (!api || api->dltensor_from_py_object_no_sync(o, &d)) return false;
    if (d.ndim > 4) return PyErr_Format(PyExc_ValueError, "a tensor of %d dimensions", d.ndim), false;
    if (d.device.device_type != EP_DL_CPU && d.device.device_type != EP_DL_CUDA && d.device.device_type != EP_DL_CUDA_HOST)
        return PyErr_Format(PyExc_ValueError, "a tensor that is neither on the CPU nor on a CUDA device"), false;
    t->data = (char *)d.data + (d.data ? d.byte_offset : 0);
    t->dtype = dtype_of(d.dtype), t->num_dims = (uint32_t)d.ndim, t->element_bytes = d.dtype.bits / 8u * d.dtype.lanes;
    t->kind = d.device.device_type == EP_DL_CUDA ? EP_CUDA : EP_CPU, t->device = d.device.device_id;
    for (int32_t i = 0, n = d.ndim; i < n; i++) {
        t->shape[i] = d.shape[i], t->stride[i] = 1;
        for (int32_t j = i + 1; j < n && !d.strides; j++) t->stride[i] *= d.shape[j];
        if (d.strides) t->stride[i] = d.strides[i];
    }
    *out = t;
    return true;
}

/* The stream that is current on the heap's device. */
static void *current_stream(EpHeap *heap, PyObject *tensor) {
    void *stream = NULL;
    if (ep_heap_kind(heap) != EP_CUDA) return NULL;
    const EpDLExchangeAPI *api = tensor ? exchange_api(tensor) : NULL;
    if (api && api->current_work_stream) api->current_work_stream(EP_DL_CUDA, ep_heap_device(heap), &stream);
    PyErr_Clear();
    return stream;
}
static bool get_stream(PyObject *o, void **stream) {
    uint64_t v;
    if (!get_u64(o, &v)) return false;
    *stream = (void *)(uintptr_t)v;
    return true;
}

#define WITHOUT_LOCK(statement) \
    do {                        \
        Py_BEGIN_ALLOW_THREADS  \
        statement;              \
        Py_END_ALLOW_THREADS    \
    } while (0)

/* ---- world ---- */

static void free_world(PyObject *c) {
    EpWorld *w = (EpWorld *)PyCapsule_GetPointer(c, WORLD);
    WITHOUT_LOCK(ep_world_release(w));
}

FAST(world_listen) {
    unsigned char name[EP_NAME_BYTES], nonce[EP_NONCE_BYTES];
    int fd;
    WANT(0);
    int code = ep_world_listen(&fd, name, nonce);
    if (code) return raise_code(code);
    return Py_BuildValue("iy#y#", fd, name, (Py_ssize_t)sizeof name, nonce, (Py_ssize_t)sizeof nonce);
}

/* (rank, num_ranks, timeout_s, listen_fd, nonce, names) */
FAST(world_create) {
    EpWorldConfig c = {0};
    EpWorld *w = NULL;
    int code;
    WANT(6);
    if (!get_u32(args[0], &c.rank) || !get_u32(args[1], &c.num_ranks) || !get_double(args[2], &c.timeout_s) ||
        !get_int(args[3], &c.listen_fd) || !get_bytes(args[4], c.nonce, sizeof c.nonce))
        return NULL;
    if (c.num_ranks < 1 || c.num_ranks > EP_MAX_RANKS)
        return PyErr_Format(PyExc_ValueError, "a world has 1 to %u ranks, not %u", EP_MAX_RANKS, c.num_ranks);
    if (!get_bytes(args[5], c.names, (Py_ssize_t)c.num_ranks * EP_NAME_BYTES)) return NULL;
    WITHOUT_LOCK(code = ep_world_create(&c, &w));
    return code ? raise_code(code) : PyCapsule_New(w, WORLD, free_world);
}

FAST(world_threads) {
    EpWorld *worlds[EP_MAX_RANKS];
    uint32_t n;
    double timeout_s;
    WANT(2);
    if (!get_u32(args[0], &n) || !get_double(args[1], &timeout_s)) return NULL;
    if (n < 1 || n > EP_MAX_RANKS) return PyErr_Format(PyExc_ValueError, "a world has 1 to %u ranks, not %u", EP_MAX_RANKS, n);
    int code = ep_world_create_threads(n, timeout_s, worlds);
    if (code) return raise_code(code);
    PyObject *list = PyList_New(n);
    for (uint32_t i = 0; list && i < n; i++) PyList_SetItem(list, i, PyCapsule_New(worlds[i], WORLD, free_world));
    return list;
}

FAST(world_check) {
    WANT(1);
    EpWorld *w = (EpWorld *)get_object(args[0], WORLD);
    return w ? done(ep_world_check(w)) : NULL;
}

FAST(world_set_timeout) {
    double timeout_s;
    WANT(2);
    EpWorld *w = (EpWorld *)get_object(args[0], WORLD);
    return w && get_double(args[1], &timeout_s) ? done(ep_world_set_timeout(w, timeout_s)) : NULL;
}

FAST(world_close) {
    int code;
    WANT(2);
    EpWorld *w = (EpWorld *)get_object(args[0], WORLD);
    if (!w) return NULL;
    int collective = PyObject_IsTrue(args[1]);
    WITHOUT_LOCK(code = ep_world_close(w, collective == 1));
    return done(code);
}

FAST(world_flight_record) {
    char page[EP_PAGE_BYTES];
    int code;
    WANT(1);
    EpWorld *w = (EpWorld *)get_object(args[0], WORLD);
    if (!w) return NULL;
    WITHOUT_LOCK(code = ep_world_flight_record(w, page));
    return code ? raise_code(code) : PyUnicode_DecodeUTF8(page, (Py_ssize_t)strlen(page), "replace");
}

FAST(world_exchange) {
    char *mine;
    Py_ssize_t n;
    int code;
    unsigned char all[EP_MAX_RANKS * EP_EXCHANGE_BYTES];
    WANT(2);
    EpWorld *w = (EpWorld *)get_object(args[0], WORLD);
    if (!w || PyBytes_AsStringAndSize(args[1], &mine, &n)) return NULL;
    if (n > EP_EXCHANGE_BYTES) return PyErr_Format(PyExc_ValueError, "an exchange carries at most %u bytes", EP_EXCHANGE_BYTES);
    WITHOUT_LOCK(code = ep_world_exchange(w, mine, (uint32_t)n, all));
    return code ? raise_code(code) : PyBytes_FromStringAndSize((const char *)all, n * (Py_ssize_t)ep_world_size(w));
}

/* ---- heap ---- */

static void free_heap(PyObject *c) {
    EpHeap *h = (EpHeap *)PyCapsule_GetPointer(c, HEAP);
    WITHOUT_LOCK(ep_heap_release(h));
}

/* (world, kind, device, num_bytes, status) */
FAST(heap_create) {
    uint32_t kind;
    int device, status, code;
    uint64_t num_bytes;
    EpHeap *h = NULL;
    WANT(5);
    EpWorld *w = (EpWorld *)get_object(args[0], WORLD);
    if (!w || !get_u32(args[1], &kind) || !get_int(args[2], &device) || !get_u64(args[3], &num_bytes) || !get_int(args[4], &status))
        return NULL;
    if (status) ep_error(status, "failed before");
    WITHOUT_LOCK(code = ep_heap_create(w, (EpBackendKind)kind, device, num_bytes, status, &h));
    return code ? raise_code(code) : PyCapsule_New(h, HEAP, free_heap);
}

/* (heap, num_bytes, alignment, status) */
FAST(heap_alloc) {
    uint64_t num_bytes, alignment, off;
    int status, code;
    WANT(4);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h || !get_u64(args[1], &num_bytes) || !get_u64(args[2], &alignment) || !get_int(args[3], &status)) return NULL;
    if (status) ep_error(status, "failed before");
    WITHOUT_LOCK(code = ep_heap_alloc(h, num_bytes, alignment, status, &off));
    return code ? raise_code(code) : PyLong_FromUnsignedLongLong(off);
}

FAST(heap_free) {
    uint64_t off;
    int code;
    WANT(2);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h || !get_u64(args[1], &off)) return NULL;
    WITHOUT_LOCK(code = ep_heap_free(h, off));
    return done(code);
}

FAST(heap_translate) {
    uint64_t off;
    uint32_t peer;
    void *address;
    WANT(3);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h || !get_u64(args[1], &off) || !get_u32(args[2], &peer)) return NULL;
    int code = ep_heap_translate(h, off, peer, &address);
    return code ? raise_code(code) : PyLong_FromVoidPtr(address);
}

FAST(heap_offset) {
    uint64_t address, num_bytes, off;
    WANT(3);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h || !get_u64(args[1], &address) || !get_u64(args[2], &num_bytes)) return NULL;
    int code = ep_heap_offset(h, (const void *)(uintptr_t)address, num_bytes, &off);
    return code ? raise_code(code) : PyLong_FromUnsignedLongLong(off);
}

FAST(heap_stats) {
    EpHeapStats s;
    WANT(1);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h) return NULL;
    ep_heap_stats(h, &s);
    return Py_BuildValue("{sKsKsKsKsKsK}", "total", s.total_bytes, "used", s.used_bytes, "free", s.free_bytes, "largest_free",
                         s.largest_free_bytes, "peak", s.peak_bytes, "num_allocations", s.num_allocations);
}

typedef struct {
    EpDLManagedTensor managed;
    EpHeap *heap;
    int64_t shape[8], strides[8];
} View;
static void delete_view(EpDLManagedTensor *m) { /* torch calls it from any thread, with or without the lock */
    View *v = (View *)m->manager_ctx;
    ep_heap_release(v->heap);
    free(v);
}
static void free_capsule(PyObject *c) { /* nobody took it */
    EpDLManagedTensor *m = (EpDLManagedTensor *)PyCapsule_GetPointer(c, "dltensor");
    if (m) m->deleter(m);
    else PyErr_Clear();
}

/* (heap, off, peer, shape, dl_code, dl_bits) -> a DLPack capsule that holds the heap */
FAST(heap_tensor) {
    static int64_t one = 1;
    uint64_t off, n = 1;
    uint32_t peer, dl_code, bits;
    void *address, *end;
    WANT(6);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h || !get_u64(args[1], &off) || !get_u32(args[2], &peer) || !get_u32(args[4], &dl_code) || !get_u32(args[5], &bits)) return NULL;
    Py_ssize_t num_dims = PyTuple_Check(args[3]) ? PyTuple_Size(args[3]) : -1;
    if (num_dims < 0 || num_dims > 8) return PyErr_Format(PyExc_ValueError, "a shape is a tuple of at most 8 sizes");
    View *v = (View *)calloc(1, sizeof *v);
    if (!v) return PyErr_NoMemory();
    for (Py_ssize_t i = num_dims; i-- > 0;) {
        uint64_t d;
        if (!get_u64(PyTuple_GetItem(args[3], i), &d)) return free(v), NULL;
        v->shape[i] = (int64_t)d, v->strides[i] = (int64_t)(n ? n : 1);
        if (__builtin_mul_overflow(n, d, &n) || n > 1ull << 46) return free(v), PyErr_Format(PyExc_ValueError, "the shape is too large");
    }
    int code = ep_heap_translate(h, off, peer, &address);
    if (!code) code = ep_heap_translate(h, off + n * (bits / 8), peer, &end);
    if (code) return free(v), raise_code(code);
    v->heap = ep_heap_retain(h);
    v->managed.dl_tensor =
        (EpDLTensor){address,
                     {ep_heap_kind(h) == EP_CUDA ? EP_DL_CUDA : EP_DL_CPU, ep_heap_kind(h) == EP_CUDA ? ep_heap_device(h) : 0},
                     (int32_t)num_dims,
                     {(uint8_t)dl_code, (uint8_t)bits, 1},
                     num_dims ? v->shape : &one,
                     num_dims ? v->strides : &one,
                     0};
    v->managed.manager_ctx = v, v->managed.deleter = delete_view;
    PyObject *capsule = PyCapsule_New(&v->managed, "dltensor", free_capsule);
    if (!capsule) delete_view(&v->managed);
    return capsule;
}

/* (heap, off, tensor, peer): put copies the tensor to off of peer, get the other way */
static PyObject *move(PyObject *const *args, Py_ssize_t num_args, bool is_put) {
    uint64_t off;
    uint32_t peer;
    EpTensor t;
    const EpTensor *tensor;
    int code;
    if (num_args != 4) return PyErr_Format(PyExc_TypeError, "wanted 4 arguments, got %zd", num_args);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h || !get_u64(args[1], &off) || !get_tensor(args[2], false, &t, &tensor) || !get_u32(args[3], &peer)) return NULL;
    uint64_t bytes = t.element_bytes;
    for (uint32_t i = 0; i < t.num_dims; i++) bytes *= (uint64_t)t.shape[i];
    void *stream = current_stream(h, args[2]);
    WITHOUT_LOCK(code = is_put ? ep_heap_put(h, off, t.data, bytes, peer, stream) : ep_heap_get(h, t.data, off, bytes, peer, stream));
    return done(code);
}
FAST(heap_put) {
    (void)self;
    return move(args, num_args, true);
}
FAST(heap_get) {
    (void)self;
    return move(args, num_args, false);
}

/* (heap, off, value, add, peer, stream) */
FAST(heap_signal) {
    uint64_t off, value;
    uint32_t add, peer;
    void *stream;
    WANT(6);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h || !get_u64(args[1], &off) || !get_u64(args[2], &value) || !get_u32(args[3], &add) || !get_u32(args[4], &peer) ||
        !get_stream(args[5], &stream))
        return NULL;
    return done(ep_heap_signal(h, off, value, add != 0, peer, stream));
}

/* (heap, off, value, exact, stream) */
FAST(heap_wait) {
    uint64_t off, value;
    uint32_t exact;
    void *stream;
    int code;
    WANT(5);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h || !get_u64(args[1], &off) || !get_u64(args[2], &value) || !get_u32(args[3], &exact) || !get_stream(args[4], &stream))
        return NULL;
    WITHOUT_LOCK(code = ep_heap_wait(h, off, value, exact != 0, stream));
    return done(code);
}

#define HEAP_STREAM(name, call)                               \
    FAST(name) {                                              \
        void *stream;                                         \
        int code;                                             \
        WANT(2);                                              \
        EpHeap *h = (EpHeap *)get_object(args[0], HEAP);      \
        if (!h || !get_stream(args[1], &stream)) return NULL; \
        WITHOUT_LOCK(code = call(h, stream));                 \
        return done(code);                                    \
    }
HEAP_STREAM(heap_barrier, ep_heap_barrier)
HEAP_STREAM(heap_sync, ep_heap_sync)

FAST(heap_close) {
    int code;
    WANT(1);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h) return NULL;
    WITHOUT_LOCK(code = ep_heap_close(h));
    return done(code);
}

/* ---- layer ---- */

static void free_layer(PyObject *c) {
    EpLayer *l = (EpLayer *)PyCapsule_GetPointer(c, LAYER);
    WITHOUT_LOCK(ep_layer_release(l));
}

/* (W, E, K, max_tokens, hidden, dtype, combine_mode, capacity, num_buffers, num_sm) */
static bool get_config(PyObject *o, EpLayerConfig *c) {
    uint32_t *const fields[] = {&c->shape.num_ranks, &c->shape.num_experts,  &c->shape.num_topk, &c->shape.max_tokens, &c->shape.hidden,
                                &c->shape.dtype,     &c->shape.combine_mode, &c->shape.capacity, &c->num_buffers,      &c->num_sm};
    if (!PyTuple_Check(o) || PyTuple_Size(o) != 10) return PyErr_Format(PyExc_TypeError, "a configuration is a tuple of 10 numbers"), false;
    for (Py_ssize_t i = 0; i < 10; i++)
        if (!get_u32(PyTuple_GetItem(o, i), fields[i])) return false;
    return true;
}

FAST(layer_bytes) {
    EpLayerConfig c;
    uint64_t num_bytes;
    WANT(1);
    if (!get_config(args[0], &c)) return NULL;
    int code = ep_layer_check_config(&c, &num_bytes);
    return code ? raise_code(code) : PyLong_FromUnsignedLongLong(num_bytes);
}

FAST(layer_create) {
    EpLayerConfig c;
    EpLayer *l = NULL;
    int code;
    WANT(2);
    EpHeap *h = (EpHeap *)get_object(args[0], HEAP);
    if (!h || !get_config(args[1], &c)) return NULL;
    WITHOUT_LOCK(code = ep_layer_create(h, &c, &l));
    return code ? raise_code(code) : PyCapsule_New(l, LAYER, free_layer);
}

FAST(layer_close) {
    int code;
    WANT(1);
    EpLayer *l = (EpLayer *)get_object(args[0], LAYER);
    if (!l) return NULL;
    WITHOUT_LOCK(code = ep_layer_close(l));
    return done(code);
}

/* (config, num_tokens) -> offsets of the plan's parts, in int32 elements, and its length */
FAST(plan_layout) {
    EpLayerConfig c;
    uint32_t num_tokens;
    uint64_t unused;
    WANT(2);
    if (!get_config(args[0], &c) || !get_u32(args[1], &num_tokens)) return NULL;
    int code = ep_layer_check_config(&c, &unused);
    if (code) return raise_code(code);
    EpPlanLayout l = ep_plan_layout(&c.shape, num_tokens);
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsI}", "counts", l.counts_off, "expert_row", l.expert_row_off, "token_expert",
                         l.token_expert_off, "token_row", l.token_row_off, "token_slot", l.token_slot_off, "sort", l.sort_off, "send_token",
                         l.send_token_off, "tile_expert", l.tile_expert_off, "tile_row", l.tile_row_off, "num_words", l.num_words,
                         "max_tiles", l.max_tiles);
}

/* A tensor argument that cannot be read: the peers must hear of it before Python does. */
static PyObject *refuse_pending(EpLayer *l, uint32_t buffer, uint32_t op, PyObject *any_tensor) {
    PyObject *type, *value, *trace;
    int code = pending_code();
    PyErr_Fetch(&type, &value, &trace);
    void *stream = current_stream(ep_layer_heap(l), any_tensor);
    WITHOUT_LOCK(ep_layer_refuse(l, buffer, op, code, stream));
    PyErr_Restore(type, value, trace);
    return NULL;
}

/* Read tensors[i] from args[i + 2]; those whose bit is set in may_be_none may be None. */
static bool get_tensors(PyObject *const *args, int n, uint32_t may_be_none, EpTensor *t, const EpTensor **out) {
    for (int i = 0; i < n; i++)
        if (!get_tensor(args[i + 2], may_be_none >> i & 1u, &t[i], &out[i])) return false;
    return true;
}

/* (layer, buffer, indices, scatter, plan) */
FAST(layer_plan) {
    uint32_t buffer;
    EpTensor t[3];
    const EpTensor *a[3];
    int code;
    WANT(5);
    EpLayer *l = (EpLayer *)get_object(args[0], LAYER);
    if (!l || !get_u32(args[1], &buffer)) return NULL;
    if (!get_tensors(args, 3, 2, t, a)) return refuse_pending(l, buffer, EP_OP_PLAN, args[4]);
    void *stream = current_stream(ep_layer_heap(l), args[4]);
    WITHOUT_LOCK(code = ep_layer_plan(l, buffer, a[0], a[1], a[2], stream));
    return done(code);
}

/* (layer, buffer, any tensor of the device) */
FAST(layer_num_rows) {
    uint32_t buffer, num_rows;
    int code;
    WANT(3);
    EpLayer *l = (EpLayer *)get_object(args[0], LAYER);
    if (!l || !get_u32(args[1], &buffer)) return NULL;
    void *stream = current_stream(ep_layer_heap(l), args[2]);
    WITHOUT_LOCK(code = ep_layer_num_rows(l, buffer, stream, &num_rows));
    return code ? raise_code(code) : PyLong_FromUnsignedLong(num_rows);
}

/* (layer, buffer, x, weight, plan, rows, row_weight, recv) */
FAST(layer_dispatch) {
    uint32_t buffer;
    EpTensor t[6];
    const EpTensor *a[6];
    int code;
    WANT(8);
    EpLayer *l = (EpLayer *)get_object(args[0], LAYER);
    if (!l || !get_u32(args[1], &buffer)) return NULL;
    if (!get_tensors(args, 6, 2 | 16, t, a)) return refuse_pending(l, buffer, EP_OP_DISPATCH, args[4]);
    void *stream = current_stream(ep_layer_heap(l), args[4]);
    WITHOUT_LOCK(code = ep_layer_dispatch(l, buffer, a[0], a[1], a[2], a[3], a[4], a[5], stream));
    return done(code);
}

/* (layer, buffer, rows, row_weight, row_scalar, plan, recv, out, out_scalar) */
FAST(layer_combine) {
    uint32_t buffer;
    EpTensor t[7];
    const EpTensor *a[7];
    int code;
    WANT(9);
    EpLayer *l = (EpLayer *)get_object(args[0], LAYER);
    if (!l || !get_u32(args[1], &buffer)) return NULL;
    if (!get_tensors(args, 7, 2 | 4 | 64, t, a)) return refuse_pending(l, buffer, EP_OP_COMBINE, args[5]);
    void *stream = current_stream(ep_layer_heap(l), args[5]);
    WITHOUT_LOCK(code = ep_layer_combine(l, buffer, a[0], a[1], a[2], a[3], a[4], a[5], a[6], stream));
    return done(code);
}

/* (layer, buffer, op, code, stream) */
FAST(layer_refuse) {
    uint32_t buffer, op;
    int why, code;
    void *stream;
    WANT(5);
    EpLayer *l = (EpLayer *)get_object(args[0], LAYER);
    if (!l || !get_u32(args[1], &buffer) || !get_u32(args[2], &op) || !get_int(args[3], &why) || !get_stream(args[4], &stream)) return NULL;
    WITHOUT_LOCK(code = ep_layer_refuse(l, buffer, op, why, stream));
    return done(code);
}

/* (layer, buffer, stream) */
FAST(layer_barrier) {
    uint32_t buffer;
    void *stream;
    int code;
    WANT(3);
    EpLayer *l = (EpLayer *)get_object(args[0], LAYER);
    if (!l || !get_u32(args[1], &buffer) || !get_stream(args[2], &stream)) return NULL;
    WITHOUT_LOCK(code = ep_layer_barrier(l, buffer, stream));
    return done(code);
}

/* (layer, stream) */
FAST(layer_sync) {
    void *stream;
    int code;
    WANT(2);
    EpLayer *l = (EpLayer *)get_object(args[0], LAYER);
    if (!l || !get_stream(args[1], &stream)) return NULL;
    WITHOUT_LOCK(code = ep_layer_sync(l, stream));
    return done(code);
}

/* (layer, buffer, epoch, stream) */
FAST(layer_set_epoch) {
    uint32_t buffer;
    uint64_t epoch;
    void *stream;
    WANT(4);
    EpLayer *l = (EpLayer *)get_object(args[0], LAYER);
    if (!l || !get_u32(args[1], &buffer) || !get_u64(args[2], &epoch) || !get_stream(args[3], &stream)) return NULL;
    return done(ep_layer_set_epoch(l, buffer, epoch, stream));
}

/* ---- the module ---- */

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    METHOD(set_exceptions),    METHOD(world_listen), METHOD(world_create),   METHOD(world_threads),       METHOD(world_check),
    METHOD(world_set_timeout), METHOD(world_close),  METHOD(world_exchange), METHOD(world_flight_record), METHOD(heap_create),
    METHOD(heap_alloc),        METHOD(heap_free),    METHOD(heap_translate), METHOD(heap_offset),         METHOD(heap_stats),
    METHOD(heap_tensor),       METHOD(heap_put),     METHOD(heap_get),       METHOD(heap_signal),         METHOD(heap_wait),
    METHOD(heap_barrier),      METHOD(heap_sync),    METHOD(heap_close),     METHOD(layer_bytes),         METHOD(layer_create),
    METHOD(layer_close),       METHOD(plan_layout),  METHOD(layer_plan),     METHOD(layer_num_rows),      METHOD(layer_dispatch),
    METHOD(layer_combine),     METHOD(layer_refuse), METHOD(layer_barrier),  METHOD(layer_sync),          METHOD(layer_set_epoch),
    {NULL, NULL, 0, NULL}};

static int set_up(PyObject *m) {
    const struct {
        const char *name;
        long value;
    } constants[] = {
        {"MAX_RANKS", EP_MAX_RANKS},
        {"MAX_TOPK", EP_MAX_TOPK},
        {"MAX_EXPERTS", EP_MAX_EXPERTS},
        {"TILE_ROWS", EP_TILE_ROWS},
        {"NAME_BYTES", EP_NAME_BYTES},
        {"NONCE_BYTES", EP_NONCE_BYTES},
        {"CPU", EP_CPU},
        {"CUDA", EP_CUDA},
        {"F32", EP_F32},
        {"F16", EP_F16},
        {"BF16", EP_BF16},
        {"COMBINE_LOCAL", EP_COMBINE_LOCAL},
        {"COMBINE_SCATTER", EP_COMBINE_SCATTER},
        {"COMBINE_GATHER", EP_COMBINE_GATHER},
        {"OP_PLAN", EP_OP_PLAN},
        {"OP_DISPATCH", EP_OP_DISPATCH},
        {"OP_COMBINE", EP_OP_COMBINE},
        {"EINVAL", EP_EINVAL},
        {"ETYPE", EP_ETYPE},
        {"HEAD_STATUS", EP_HEAD_STATUS},
        {"HEAD_NUM_ROWS", EP_HEAD_NUM_ROWS},
        {"HEAD_NUM_TILES", EP_HEAD_NUM_TILES},
        {"HEAD_NUM_SEND", EP_HEAD_NUM_SEND},
        {"HEAD_NUM_RECV", EP_HEAD_NUM_RECV},
        {"HEAD_RANK_ROWS", EP_HEAD_RANK_ROWS},
#ifdef EP_HAVE_CUDA
        {"HAS_CUDA", 1},
#else
        {"HAS_CUDA", 0},
#endif
    };
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++)
        if (PyModule_AddIntConstant(m, constants[i].name, constants[i].value)) return -1;
    return 0;
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, __extension__(void *) set_up}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
