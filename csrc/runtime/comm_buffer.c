/* comm_buffer.c - communication buffers: open and close one, begin its calls, and raise its faults.
 *
 * Exports ep_comm_open, _close, _begin_call, _newest_call, _was_void, _check and _give_up (backend.h). A heap
 * has the buffer's memory, and fills in where that is; this file knows no heap.
 * Invariant: the watchdog knows an open buffer until its operations have finished, so the end of the world
 * always reaches their waits. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "runtime/world.h"

/* Guards voids, num_voids and was_captured of all buffers. A layer's lock is held while an operation waits
 * for peers; who asks what was void must not wait for it. */
static pthread_mutex_t voids_lock = PTHREAD_MUTEX_INITIALIZER;

int ep_comm_open(EpCommBuffer *b, const EpShape *shape) {
    void *host = NULL;
    EP_TRY(b->backend->host_alloc(b->device, sizeof(EpHostWords), &host));
    memset(host, 0, sizeof(EpHostWords));
    b->comm.shape = *shape;
    b->comm.layout = ep_comm_layout(shape);
    b->comm.my_rank = ep_world_rank(b->world);
    b->comm.host = (EpHostWords *)host;
    b->comm.timeout_ns = ep_world_timeout_ns(b->world);
    b->comm.launch_sequence = ep_world_is_threads(b->world) ? b->comm.my_rank : 0;
    int code = ep_world_watch(b->world, b);
    if (code) {
        b->backend->host_free(b->device, host, sizeof(EpHostWords));
        b->comm.host = NULL;
    }
    return code;
}

void ep_comm_close(EpCommBuffer *b) {
    if (!b->comm.host) return;
    /* Wait for the kernels while the watchdog can still end their waits. */
    if (b->on_stream) b->backend->sync_all(b->device);
    ep_world_unwatch(b->world, b);
    b->backend->host_free(b->device, b->comm.host, sizeof(EpHostWords));
    b->comm.host = NULL;
}

uint64_t ep_comm_begin_call(EpCommBuffer *b, uint32_t word, uint64_t num_tokens, int code, void *stream) {
    EpCallRecord record = {.seq = ++b->num_ops,
                           .size = num_tokens,
                           .what = (uint8_t)(b->is_heaps ? EP_CALL_HEAP_BARRIER : ep_op_of(word)),
                           .on_stream = b->on_stream,
                           .of = b->of,
                           .buffer = (uint8_t)b->buffer,
                           .dtype = (uint8_t)ep_op_dtype_of(word),
                           .code = (int16_t)code};
    if (b->on_stream && b->backend->is_captured(stream)) {
        ep_world_order_unknown(b->world);
        pthread_mutex_lock(&voids_lock);
        b->was_captured = true;
        pthread_mutex_unlock(&voids_lock);
    }
    return ep_world_begin_call(b->world, &record);
}

uint64_t ep_comm_newest_call(const EpCommBuffer *b) { return b->num_uncounted + b->num_ops; }

static bool was_void(const EpCommBuffer *b, uint64_t number) {
    const uint64_t num = b->num_voids < EP_NUM_VOIDS ? b->num_voids : EP_NUM_VOIDS;
    if (b->was_captured) return false;
    if (b->num_voids > num && number < b->voids[b->num_voids % EP_NUM_VOIDS].first) return true;
    for (uint64_t i = 0; i < num; i++)
        if (b->voids[i].first <= number && number <= b->voids[i].last) return true;
    return false;
}

bool ep_comm_was_void(const EpCommBuffer *b, uint64_t number) {
    pthread_mutex_lock(&voids_lock);
    const bool found = was_void(b, number);
    pthread_mutex_unlock(&voids_lock);
    return found;
}

/* Stop counting the operations from this epoch on, but the first: it was void on all ranks, and later ones in
 * this buffer did nothing. */
static void uncount_void(EpCommBuffer *b, uint64_t epoch) {
    const uint64_t num_later = b->num_ops > epoch ? b->num_ops - epoch : 0;
    const uint64_t first = b->num_uncounted + epoch;
    pthread_mutex_lock(&voids_lock);
    const uint64_t i = b->num_voids++ % EP_NUM_VOIDS;
    b->voids[i].first = first;
    b->voids[i].last = first + num_later;
    pthread_mutex_unlock(&voids_lock);
    ep_world_uncount_calls(b->world, num_later);
    b->num_uncounted += num_later;
    b->num_ops = epoch;
}

void ep_comm_give_up(EpCommBuffer *b, int code, void *stream) {
    char why[512], text[256];
    const uint32_t me = b->comm.my_rank;
    /* A CPU operation has entered and told its peers. A captured operation does not run, so no peer waits. */
    if (!b->on_stream || b->backend->is_captured(stream)) return;
    snprintf(why, sizeof why, "%s", ep_error_text());
    snprintf(text, sizeof text, "rank %u: %.200s", me, why);
    ep_world_abort(b->world, code, me, text);
    ep_error(code, "%s", why);
}

/* True if the stream is the default stream and the ranks are threads of one process. The default stream is
 * NULL or cudaStreamLegacy, which is 1. */
static bool is_default_stream_of_threads(const EpCommBuffer *b, const void *stream) {
    return b->on_stream && ep_world_is_threads(b->world) && ep_world_size(b->world) > 1 &&
           (uintptr_t)stream <= 1;
}

int ep_comm_check(EpCommBuffer *b, void *stream) {
    EpWorld *world = b->world;
    const EpBackend *backend = b->backend;
    EpHostWords *host = b->comm.host;
    EP_TRY(ep_world_check_caller(world));
    if (!host) return ep_error(EP_ECLOSED, "this heap or layer was closed during the call");
    if (is_default_stream_of_threads(b, stream)) {
        ep_error(EP_EINVAL, "ranks that are threads share the default stream, so each would wait there for "
                            "the next: give each rank a "
                            "stream of its own (with torch.cuda.stream(torch.cuda.Stream()):)");
        ep_comm_give_up(b, EP_EINVAL, stream);
        return EP_EINVAL;
    }
    if (ep_ld_acquire_sys_u64(&host->fault.state)) { /* the record is now readable */
        const EpFaultRecord f = host->fault;
        int code = ep_fault_error(&f, &b->comm.shape, b->comm.my_rank);
        if (code == EP_ETIMEOUT || code == EP_ECORRUPT) {
            /* The ranks are no longer at the same operation and cannot be resynchronised. */
            char text[256];
            snprintf(text, sizeof text, "%s", ep_error_text());
            ep_world_abort_wait(world, code, f.peer, f.word, text);
            return ep_error(code, "%s", text);
        }
        /* A captured operation does not run now. The next operation that runs clears the fault. */
        if (b->on_stream && backend->is_captured(stream)) return code;
        EP_TRY(backend->clear(b->device, &b->comm, stream));
        ep_st_relaxed_sys_u64(&host->fault.state, 0);
        uncount_void(b, f.epoch);
        if (f.word == EP_WORD_SCATTER && f.want == 1) {
            /* Only this rank knows of the fault. The others will enter dispatch, so propagate the error in
             * dispatch. */
            EpComm comm = b->comm;
            comm.status = code;
            ep_world_end_call(world, ep_comm_begin_call(b, EP_OP_DISPATCH, 0, code, stream), code);
            int entered = backend->enter(b->device, &comm, EP_OP_DISPATCH, stream);
            if (entered) ep_comm_give_up(b, entered, stream);
        }
        return ep_fault_error(&f, &b->comm.shape, b->comm.my_rank);
    }
    return ep_world_check(world);
}
