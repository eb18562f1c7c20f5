/* comm_buffer.c - communication buffers: open one in a heap, and convert its fault record into an error.
 *
 * Exports ep_comm_alloc, _open, _close, _begin_call, _check and _give_up (backend.h).
 * Invariant: the watchdog knows an open buffer until its operations have finished, so the end of the world
 * always reaches their waits. */
#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/world.h"

int ep_comm_alloc(EpHeap *heap, const EpShape *shape, EpCommBuffer *b) {
    return ep_heap_alloc(heap, ep_comm_layout(shape).num_bytes, EP_LINE, 0, &b->off);
}

int ep_comm_open(EpHeap *heap, const EpShape *shape, EpCommBuffer *b) {
    EpWorld *world = ep_heap_world(heap);
    const EpBackend *backend = ep_heap_backend(heap);
    void *host = NULL, *address;
    EpCommLayout layout = ep_comm_layout(shape);
    EP_TRY(backend->host_alloc(ep_heap_device(heap), sizeof(EpHostWords), &host));
    memset(host, 0, sizeof(EpHostWords));
    b->comm.shape = *shape;
    b->comm.layout = layout;
    b->comm.my_rank = ep_world_rank(world);
    b->comm.host = (EpHostWords *)host;
    b->on_stream = ep_heap_kind(heap) == EP_CUDA;
    b->comm.timeout_ns = ep_world_timeout_ns(world);
    b->comm.reserve_sms = ep_heap_reserved_sms(heap);
    b->comm.launch_lane = ep_world_is_threads(world) ? b->comm.my_rank : 0;
    for (uint32_t r = 0; r < shape->num_ranks; r++) {
        ep_heap_translate(heap, b->off, r, &address);
        b->comm.base[r] = (unsigned char *)address;
    }
    int code = ep_world_watch(world, b);
    if (code) {
        backend->host_free(ep_heap_device(heap), host, sizeof(EpHostWords));
        b->comm.host = NULL;
    }
    return code;
}

void ep_comm_close(EpHeap *heap, EpCommBuffer *b) {
    if (!b->comm.host) return;
    /* Wait for the kernels while the watchdog can still end their waits. */
    if (b->on_stream) ep_heap_backend(heap)->sync_all(ep_heap_device(heap));
    ep_world_unwatch(ep_heap_world(heap), b);
    ep_heap_backend(heap)->host_free(ep_heap_device(heap), b->comm.host, sizeof(EpHostWords));
    b->comm.host = NULL;
}

uint64_t ep_comm_begin_call(EpHeap *heap, EpCommBuffer *b, uint32_t op, uint64_t num_tokens, int code,
                            void *stream) {
    EpCallRecord record = {.seq = ++b->num_ops,
                           .size = num_tokens,
                           .what = (uint8_t)(b->is_heaps ? EP_CALL_HEAP_BARRIER : op),
                           .on_stream = b->on_stream,
                           .of = b->of,
                           .buffer = b->buffer,
                           .code = (int16_t)code};
    if (b->on_stream && ep_heap_backend(heap)->is_captured(stream))
        ep_world_order_unknown(ep_heap_world(heap));
    return ep_world_begin_call(ep_heap_world(heap), &record);
}

static const char *op_name(uint32_t op) {
    static const char *const names[EP_NUM_OPS] = {[EP_OP_NONE] = "wait",
#define X(NAME, name, Type, text) [EP_OP_##NAME] = text,
                                                  EP_OPERATIONS(X, X)
#undef X
    };
    return names[op < EP_NUM_OPS ? op : EP_OP_NONE];
}
static const char *field_name(uint32_t field) {
    static const char *const names[] = {"",
#define X(name) #name,
                                        EP_HEADER_FIELDS(X)
#undef X
    };
    return names[field <= EP_NUM_HEADER_FIELDS ? field : 0];
}

/* The timeout of a wait. The record of a wait for a signal has neither the signalling rank nor the word's
 * offset, because any rank may signal any word. */
static int timeout_error(const EpFaultRecord *f, uint32_t my_rank) {
    unsigned long long want = f->want, got = f->got;
    if (f->word == EP_WORD_SIGNAL)
        return ep_error(
            EP_ETIMEOUT,
            "rank %u timed out: no rank signalled the word on which it waits (expected value %llu, "
            "found %llu). Check that a rank calls signal() for this word. See world.flight_record().",
            my_rank, want, got);
    return ep_error(EP_ETIMEOUT,
                    "rank %u timed out waiting for rank %u in its %s (word %s, epoch %llu: wanted %llu, saw "
                    "%llu). All ranks must make the same calls in the same order. See world.flight_record().",
                    my_rank, f->peer, op_name(f->op), ep_word_name(f->word), (unsigned long long)f->epoch,
                    want, got);
}

/* Convert a fault record into an error of this thread. */
static int fault_error(const EpFaultRecord *f, const EpShape *s, uint32_t my_rank) {
    unsigned long long want = f->want, got = f->got;
    switch (f->code) {
    case EP_EPEER:
        if (f->peer == my_rank && (int)(int64_t)got == EP_EINVAL) /* see ep_make_header */
            return ep_error(EP_EINVAL,
                            "rank %u: %s cannot use this layout: its plan or dispatch failed, or its T or "
                            "its number of rows does not "
                            "match the tensors. Make a new layout with preprocess or dispatch.",
                            my_rank, op_name(f->op));
        return ep_error(EP_EPEER, "rank %u failed before its %s: %s. See the error that it raised.", f->peer,
                        op_name(f->op),
                        (int)(int64_t)got == EP_ENOMEM ? "no memory" : ep_error_name((int)(int64_t)got));
    case EP_EMISMATCH:
        if (f->field == 1 + EP_FIELD_op) /* the order of calls differs */
            return ep_error(EP_EMISMATCH,
                            "ranks disagree in op: rank %u called %s, rank 0 called %s. All ranks must make "
                            "the same calls in the same order.",
                            f->peer, op_name((uint32_t)got), op_name((uint32_t)want));
        return ep_error(EP_EMISMATCH,
                        "ranks disagree in %s: rank %u has %llu, rank 0 has %llu (in %s). It must be the "
                        "same on all ranks.",
                        field_name(f->field), f->peer, got, want, op_name(f->op));
    case EP_EINDEX:
        return ep_error(EP_EINDEX,
                        "rank %u: expert index %lld of token %u, choice %u is outside [-1, %llu]. Use -1 to "
                        "drop a choice.",
                        f->peer, (long long)got, f->field / (s->num_topk ? s->num_topk : 1),
                        f->field % (s->num_topk ? s->num_topk : 1), want);
    case EP_EOVERFLOW:
        return ep_error(EP_EOVERFLOW,
                        "rank %u would receive %llu rows; its capacity is %llu. Increase capacity or balance "
                        "the routing.",
                        f->peer, got, want);
    case EP_EINVAL:
        return ep_error(EP_EINVAL,
                        "rank %u: full_scatter_indices must have one line for each token of this rank (or of "
                        "all ranks), and each index "
                        "of a choice that is not dropped must be in [0, M) of the expert's rank",
                        f->peer);
    case EP_ETIMEOUT: return timeout_error(f, my_rank);
    default:
        return ep_error(f->code, "%s failed (word %s, rank %u). See world.flight_record().", op_name(f->op),
                        ep_word_name(f->word), f->peer);
    }
}

void ep_comm_give_up(EpHeap *heap, int code, void *stream) {
    char why[512], text[256];
    const uint32_t me = ep_world_rank(ep_heap_world(heap));
    /* A CPU operation has entered and told its peers. A captured operation does not run, so no peer waits. */
    if (ep_heap_kind(heap) == EP_CPU || ep_heap_backend(heap)->is_captured(stream)) return;
    snprintf(why, sizeof why, "%s", ep_error_text());
    snprintf(text, sizeof text, "rank %u: %.200s", me, why);
    ep_world_abort(ep_heap_world(heap), code, me, text);
    ep_error(code, "%s", why);
}

/* True if the stream is the default stream and the ranks are threads of one process. The default stream is
 * NULL or cudaStreamLegacy, which is 1. */
static bool is_default_stream_of_threads(const EpHeap *heap, const void *stream) {
    const EpWorld *world = ep_heap_world(heap);
    return ep_heap_kind(heap) == EP_CUDA && ep_world_is_threads(world) && ep_world_size(world) > 1 &&
           (uintptr_t)stream <= 1;
}

int ep_comm_check(EpHeap *heap, EpCommBuffer *b, void *stream) {
    EpWorld *world = ep_heap_world(heap);
    const EpBackend *backend = ep_heap_backend(heap);
    EpHostWords *host = b->comm.host;
    if (ep_world_is_forked(world)) return ep_world_check(world);
    if (is_default_stream_of_threads(heap, stream)) {
        ep_error(EP_EINVAL, "ranks that are threads share the default stream, so each would wait there for "
                            "the next: give each rank a "
                            "stream of its own (with torch.cuda.stream(torch.cuda.Stream()):)");
        ep_comm_give_up(heap, EP_EINVAL, stream);
        return EP_EINVAL;
    }
    if (ep_ld_acquire_sys_u64(&host->fault.state)) { /* the record is now readable */
        const EpFaultRecord f = host->fault;
        int code = fault_error(&f, &b->comm.shape, b->comm.my_rank);
        if (code == EP_ETIMEOUT || code == EP_ECORRUPT) {
            /* The ranks are no longer at the same operation and cannot be resynchronised. */
            char text[256];
            snprintf(text, sizeof text, "%s", ep_error_text());
            ep_world_abort(world, code, f.peer, text);
            return ep_error(code, "%s", text);
        }
        /* A captured operation does not run now. The next operation that runs clears the fault. */
        if (b->on_stream && backend->is_captured(stream)) return code;
        /* The operation was void on all ranks, and later ones in this buffer did nothing. So they do not
         * count. */
        EP_TRY(backend->clear(ep_heap_device(heap), &b->comm, stream));
        ep_st_relaxed_sys_u64(&host->fault.state, 0);
        ep_world_uncount_calls(world, b->num_ops > f.epoch ? b->num_ops - f.epoch : 0);
        b->num_ops = f.epoch;
        if (f.word == EP_WORD_SCATTER && f.want == 1) {
            /* Only this rank knows of the fault. The others will enter dispatch, so refuse dispatch. */
            EpComm comm = b->comm;
            comm.status = code;
            ep_world_end_call(world, ep_comm_begin_call(heap, b, EP_OP_DISPATCH, 0, code, stream), code);
            int entered = backend->enter(ep_heap_device(heap), &comm, EP_OP_DISPATCH, stream);
            if (entered) ep_comm_give_up(heap, entered, stream);
        }
        return fault_error(&f, &b->comm.shape, b->comm.my_rank);
    }
    return ep_world_check(world);
}
