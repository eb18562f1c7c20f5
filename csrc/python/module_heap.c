/* module_heap.c - epmoe._C.heap_*: symmetric heaps, and tensors in their memory.
 *
 * Exports ep_heap_methods.
 * Invariant: a tensor made by heap_tensor holds a reference to the heap, so its memory stays mapped. */
#include <stdlib.h>

#include "python/dlpack.h"
#include "python/module.h"
#include "runtime/error.h"

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
    EpWorld *w = (EpWorld *)ep_get_object(args[0], WORLD);
    if (!w || !ep_get_u32(args[1], &kind) || !ep_get_int(args[2], &device) ||
        !ep_get_u64(args[3], &num_bytes) || !ep_get_int(args[4], &status))
        return NULL;
    if (status) ep_error(status, "this rank failed before the call");
    WITHOUT_LOCK(code = ep_heap_create(w, (EpBackendKind)kind, device, num_bytes, status, &h));
    if (code) return ep_raise(code);
    PyObject *c = PyCapsule_New(h, HEAP, free_heap);
    if (!c) WITHOUT_LOCK(ep_heap_release(h));
    return c;
}

/* (heap, num_bytes, alignment, status) */
FAST(heap_alloc) {
    uint64_t num_bytes, alignment, off;
    int status, code;
    WANT(4);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h || !ep_get_u64(args[1], &num_bytes) || !ep_get_u64(args[2], &alignment) ||
        !ep_get_int(args[3], &status))
        return NULL;
    if (status) ep_error(status, "this rank failed before the call");
    WITHOUT_LOCK(code = ep_heap_alloc(h, num_bytes, alignment, status, &off));
    return code ? ep_raise(code) : PyLong_FromUnsignedLongLong(off);
}

FAST(heap_free) {
    uint64_t off;
    int code;
    WANT(2);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h || !ep_get_u64(args[1], &off)) return NULL;
    WITHOUT_LOCK(code = ep_heap_free(h, off));
    return ep_done(code);
}

FAST(heap_translate) {
    uint64_t off;
    uint32_t peer;
    void *address;
    WANT(3);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h || !ep_get_u64(args[1], &off) || !ep_get_u32(args[2], &peer)) return NULL;
    int code = ep_heap_translate(h, off, peer, &address);
    return code ? ep_raise(code) : PyLong_FromVoidPtr(address);
}

FAST(heap_offset) {
    uint64_t address, num_bytes, off;
    WANT(3);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h || !ep_get_u64(args[1], &address) || !ep_get_u64(args[2], &num_bytes)) return NULL;
    int code = ep_heap_offset(h, (const void *)(uintptr_t)address, num_bytes, &off);
    return code ? ep_raise(code) : PyLong_FromUnsignedLongLong(off);
}

FAST(heap_stats) {
    EpHeapStats s;
    WANT(1);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h) return NULL;
    int code = ep_heap_stats(h, &s);
    if (code) return ep_raise(code);
    return Py_BuildValue("{sKsKsKsKsKsK}", "total", s.total_bytes, "used", s.used_bytes, "free", s.free_bytes,
                         "largest_free", s.largest_free_bytes, "peak", s.peak_bytes, "num_allocations",
                         s.num_allocations);
}

typedef struct {
    EpDLManagedTensor managed;
    EpHeap *heap;
    uint32_t peer;
    int64_t shape[8], strides[8];
} View;
/* torch calls this from any thread, with or without the interpreter lock. */
static void delete_view(EpDLManagedTensor *m) {
    View *v = (View *)m->manager_ctx;
    ep_heap_release_view(v->heap, v->peer);
    free(v);
}
/* Delete the view if no framework has taken the capsule. A framework that takes it renames it. */
static void free_capsule(PyObject *c) {
    if (!PyCapsule_IsValid(c, "dltensor")) return;
    EpDLManagedTensor *m = (EpDLManagedTensor *)PyCapsule_GetPointer(c, "dltensor");
    m->deleter(m);
}

/* (heap, off, peer, shape, dl_code, dl_bits) -> a DLPack capsule that holds a reference to the heap */
FAST(heap_tensor) {
    static int64_t one = 1;
    uint64_t off, n = 1;
    uint32_t peer, dl_code, bits;
    void *address, *end;
    WANT(6);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h || !ep_get_u64(args[1], &off) || !ep_get_u32(args[2], &peer) || !ep_get_u32(args[4], &dl_code) ||
        !ep_get_u32(args[5], &bits))
        return NULL;
    Py_ssize_t num_dims = PyTuple_Check(args[3]) ? PyTuple_Size(args[3]) : -1;
    if (num_dims < 0 || num_dims > 8)
        return PyErr_Format(PyExc_ValueError, "shape %R: must be a tuple of at most 8 sizes", args[3]);
    if (dl_code > EP_DL_COMPLEX || bits < 8 || bits > 128 || bits % 8)
        return PyErr_Format(PyExc_ValueError, "DLPack code %u with %u bits: epmoe has no such dtype", dl_code,
                            bits);
    View *v = (View *)calloc(1, sizeof *v);
    if (!v) return PyErr_NoMemory();
    for (Py_ssize_t i = num_dims; i-- > 0;) {
        uint64_t d;
        if (!ep_get_u64(PyTuple_GetItem(args[3], i), &d)) return free(v), NULL;
        v->shape[i] = (int64_t)d;
        v->strides[i] = (int64_t)(n ? n : 1);
        if (d > 1ull << 46 || __builtin_mul_overflow(n, d, &n) || n > 1ull << 46)
            return free(v),
                   PyErr_Format(PyExc_ValueError, "shape %R: must have at most 2^46 elements", args[3]);
    }
    int code = ep_heap_translate(h, off, peer, &address);
    if (!code) code = ep_heap_translate(h, off + n * (bits / 8), peer, &end);
    if (code) return free(v), ep_raise(code);
    v->heap = h;
    v->peer = peer;
    ep_heap_retain_view(h, peer);
    v->managed.dl_tensor = (EpDLTensor){address,
                                        {ep_heap_kind(h) == EP_CUDA ? EP_DL_CUDA : EP_DL_CPU,
                                         ep_heap_kind(h) == EP_CUDA ? ep_heap_device(h) : 0},
                                        (int32_t)num_dims,
                                        {(uint8_t)dl_code, (uint8_t)bits, 1},
                                        num_dims ? v->shape : &one,
                                        num_dims ? v->strides : &one,
                                        0};
    v->managed.manager_ctx = v;
    v->managed.deleter = delete_view;
    PyObject *capsule = PyCapsule_New(&v->managed, "dltensor", free_capsule);
    if (!capsule) delete_view(&v->managed);
    return capsule;
}

/* (heap, off, tensor, peer): put copies the tensor to offset off of peer; get copies in the other
 * direction */
static PyObject *move(PyObject *const *args, Py_ssize_t num_args, bool is_put) {
    uint64_t off;
    uint32_t peer;
    EpTensor t;
    const EpTensor *tensor;
    int code;
    if (num_args != 4) return PyErr_Format(PyExc_TypeError, "wanted 4 arguments, got %zd", num_args);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h || !ep_get_u64(args[1], &off) || !ep_get_tensor(args[2], false, &t, &tensor) ||
        !ep_get_u32(args[3], &peer))
        return NULL;
    uint64_t bytes = t.element_bytes;
    for (uint32_t i = t.num_dims; i-- > 0; bytes *= (uint64_t)t.shape[i])
        if (bytes && t.shape[i] > 1 && (uint64_t)t.stride[i] * t.element_bytes != bytes)
            return PyErr_Format(PyExc_ValueError,
                                "put and get need a contiguous tensor: call contiguous() on it");
    if (t.kind == EP_CUDA && ep_heap_kind(h) == EP_CPU)
        return PyErr_Format(
            PyExc_ValueError,
            "the tensor is on a CUDA device, but the heap is on the CPU: call cpu() on the tensor");
    void *stream = ep_current_stream(h, args[2]);
    WITHOUT_LOCK(code = is_put ? ep_heap_put(h, off, t.data, bytes, peer, stream)
                               : ep_heap_get(h, t.data, off, bytes, peer, stream));
    return ep_done(code);
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
    int code;
    WANT(6);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h || !ep_get_u64(args[1], &off) || !ep_get_u64(args[2], &value) || !ep_get_u32(args[3], &add) ||
        !ep_get_u32(args[4], &peer) || !ep_get_stream(args[5], &stream))
        return NULL;
    WITHOUT_LOCK(code = ep_heap_signal(h, off, value, add != 0, peer, stream));
    return ep_done(code);
}

/* (heap, off, value, exact, stream) */
FAST(heap_wait) {
    uint64_t off, value;
    uint32_t exact;
    void *stream;
    int code;
    WANT(5);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h || !ep_get_u64(args[1], &off) || !ep_get_u64(args[2], &value) || !ep_get_u32(args[3], &exact) ||
        !ep_get_stream(args[4], &stream))
        return NULL;
    WITHOUT_LOCK(code = ep_heap_wait(h, off, value, exact != 0, stream));
    return ep_done(code);
}

#define HEAP_STREAM(name, call)                                  \
    FAST(name) {                                                 \
        void *stream;                                            \
        int code;                                                \
        WANT(2);                                                 \
        EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);      \
        if (!h || !ep_get_stream(args[1], &stream)) return NULL; \
        WITHOUT_LOCK(code = call(h, stream));                    \
        return ep_done(code);                                    \
    }
HEAP_STREAM(heap_barrier, ep_heap_barrier)
HEAP_STREAM(heap_sync, ep_heap_sync)

FAST(heap_handle) {
    EpDeviceHeap handle;
    WANT(1);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h) return NULL;
    int code = ep_heap_handle(h, &handle);
    return code ? ep_raise(code) : PyBytes_FromStringAndSize((const char *)&handle, sizeof handle);
}

FAST(heap_close) {
    int code;
    WANT(1);
    EpHeap *h = (EpHeap *)ep_get_object(args[0], HEAP);
    if (!h) return NULL;
    WITHOUT_LOCK(code = ep_heap_close(h));
    return ep_done(code);
}

PyMethodDef ep_heap_methods[] = {
    METHOD(heap_create), METHOD(heap_alloc),  METHOD(heap_free),   METHOD(heap_translate),
    METHOD(heap_offset), METHOD(heap_stats),  METHOD(heap_tensor), METHOD(heap_put),
    METHOD(heap_get),    METHOD(heap_signal), METHOD(heap_wait),   METHOD(heap_barrier),
    METHOD(heap_sync),   METHOD(heap_close),  METHOD(heap_handle), {NULL, NULL, 0, NULL}};
