/* layer.c - the life of a layer, and the frame of its operations. layer_ops.c has the operations.
 *
 * Exports creation, agreement, close and release; ep_layer_lock, _begin, _end, _fail and _propagate_error for
 * operations; ep_layer_barrier and _sync; ep_layer_set_epoch for tests.
 * Invariant: all ranks agree on the configuration, and all ranks create a layer or none does. A rank that
 * cannot run an operation still enters it (propagate_error), so that its peers do not wait. */
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend.h"
#include "layer/layer_state.h"
#include "layer/test_hooks.h"
#include "protocol/low_latency.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "runtime/tensor.h"
#include "runtime/world.h"

/* ---- configuration ---- */

/* The numbers of tokens travel in 16 bits. Every CTA has the routes of all tokens in shared memory. */
static int check_low_latency(const EpShape *s) {
    const uint64_t num_bytes = ep_ll_smem_bytes(s);
    if (s->max_tokens > EP_LL_MAX_TOKENS || num_bytes > EP_LL_MAX_SMEM)
        return ep_error(EP_EINVAL,
                        "max_tokens %u: with %u ranks, %u experts and topk %u the routes need %llu bytes of "
                        "shared memory, at most %u are there, and max_tokens is at most %u: use a smaller "
                        "max_tokens",
                        s->max_tokens, s->num_ranks, s->num_experts, s->num_topk,
                        (unsigned long long)num_bytes, EP_LL_MAX_SMEM, EP_LL_MAX_TOKENS);
    return 0;
}

int ep_layer_check_config(const EpLayerConfig *config, uint64_t *num_bytes) {
    const EpShape *s = &config->shape;
    if (s->num_ranks < 1 || s->num_ranks > EP_MAX_RANKS)
        return ep_error(EP_EINVAL, "a world of %u ranks: must have 1 to %u", s->num_ranks, EP_MAX_RANKS);
    if (s->num_experts < 1 || s->num_experts > EP_MAX_EXPERTS || s->num_experts % s->num_ranks)
        return ep_error(EP_EINVAL,
                        "%u experts on %u ranks: must be a multiple of the number of ranks, and at most %u; "
                        "epmoe.ExpertMap is for other numbers",
                        s->num_experts, s->num_ranks, EP_MAX_EXPERTS);
    if (s->num_topk < 1 || s->num_topk > EP_MAX_TOPK)
        return ep_error(EP_EINVAL, "topk %u: must be 1 to %u", s->num_topk, EP_MAX_TOPK);
    if (ep_dtype_bytes(s->dtype) == 0)
        return ep_error(EP_ETYPE, "dtype %s: must be float32, float16 or bfloat16", ep_dtype_name(s->dtype));
    if (s->hidden < 1 || s->hidden > 1u << 20)
        return ep_error(EP_EINVAL, "hidden %u: must be 1 to %u", s->hidden, 1u << 20);
    if ((uint64_t)s->hidden * ep_dtype_bytes(s->dtype) % 16)
        return ep_error(EP_EINVAL, "hidden %u: a row must be a multiple of 16 bytes, but has %llu", s->hidden,
                        (unsigned long long)s->hidden * ep_dtype_bytes(s->dtype));
    if (s->max_tokens < 1 || (uint64_t)s->max_tokens * s->num_topk * s->num_ranks >= 1ull << 31)
        return ep_error(EP_EINVAL, "max_tokens %u: ranks * max_tokens * topk must be in [1, 2^31)",
                        s->max_tokens);
    if (s->combine_mode >= EP_NUM_COMBINE_MODES)
        return ep_error(EP_EINVAL, "combine mode %u: must be at most %u", s->combine_mode,
                        EP_NUM_COMBINE_MODES - 1);
    if (ep_is_low_latency(s)) EP_TRY(check_low_latency(s));
    if (s->capacity < 1 || s->capacity >= 1u << 31)
        return ep_error(EP_EINVAL, "capacity %u: must be 1 to 2^31 - 1 rows", s->capacity);
    const uint64_t L = s->num_experts / s->num_ranks;
    if (L * config->expert_alignment >= 1ull << 31)
        return ep_error(EP_EINVAL,
                        "expert_alignment %u: times the %llu experts of a rank it must be less than 2^31",
                        config->expert_alignment, (unsigned long long)L);
    if (config->expert_capacity && s->capacity != L * config->expert_capacity)
        return ep_error(EP_EINVAL,
                        "expert_capacity %u: the capacity must be that of the %llu experts of a rank, %llu "
                        "rows, not %u",
                        config->expert_capacity, (unsigned long long)L,
                        (unsigned long long)L * config->expert_capacity, s->capacity);
    if (config->expert_capacity && config->expert_alignment > 1)
        return ep_error(EP_EINVAL,
                        "expert_alignment %u: must be 1 with an expert_capacity, which pads all experts",
                        config->expert_alignment);
    if (config->num_buffers < 1 || config->num_buffers > EP_MAX_BUFFERS)
        return ep_error(EP_EINVAL, "num_buffers %u: must be 1 to %u", config->num_buffers, EP_MAX_BUFFERS);
    if (config->num_sm < 1 || config->num_sm > 1024)
        return ep_error(EP_EINVAL, "num_sm %u: must be 1 to 1024", config->num_sm);
    if (config->fused > EP_FUSED_BEST)
        return ep_error(EP_EINVAL, "fused %u: must be at most %u", config->fused, EP_FUSED_BEST);
    if (config->num_move && config->num_tail >= config->num_move)
        return ep_error(EP_EINVAL, "num_tail_sms %u: must be 0, or fewer than the %u blocks that move tokens",
                        config->num_tail, config->num_move);
    if (config->num_move && config->num_reduce < 1)
        return ep_error(EP_EINVAL, "num_reduce_sms 0: must be at least 1, because a thread block must add up "
                                   "the tokens");
    *num_bytes = config->num_buffers * ep_align_u64(ep_comm_layout(s).num_bytes, 256);
    return 0;
}

/* What a rank sends about the layer that it creates. */
typedef struct {
    EpLayerConfig config;
    int32_t status;
} Offer;

/* The fields that must be equal on all ranks. */
typedef enum { NUMBER, DTYPE, MODE } Kind;
static const struct {
    const char *name;
    size_t off;
    Kind kind;
} agreed[] = {
#define AGREED(field, name, kind) {name, offsetof(EpLayerConfig, field), kind},
#define LOCAL(field, name)
    EP_CONFIG_FIELDS(AGREED, LOCAL)
#undef AGREED
#undef LOCAL
};

/* The user's name for a value. */
static const char *value_name(Kind kind, uint32_t value, char text[16]) {
    static const char *const modes[] = {[EP_COMBINE_LOCAL] = "local",
                                        [EP_COMBINE_SCATTER] = "scatter",
                                        [EP_COMBINE_GATHER] = "gather",
                                        [EP_LOW_LATENCY] = "low latency",
                                        [EP_LOW_LATENCY_SCATTER] = "low latency by choice"};
    _Static_assert(sizeof modes / sizeof modes[0] == EP_NUM_COMBINE_MODES, "every mode has a name");
    if (kind == DTYPE) return ep_dtype_name(value);
    if (kind == MODE && value < EP_NUM_COMBINE_MODES) return modes[value];
    snprintf(text, 16, "%u", value);
    return text;
}

/* Compare the offers of all ranks: 0, or an error on all ranks. */
static int agree(EpWorld *world, const EpLayerConfig *config, int status) {
    Offer mine = {*config, status}, all[EP_MAX_RANKS];
    char why[512], a[16], b[16];
    snprintf(why, sizeof why, "%s", ep_error_text());
    EP_TRY(ep_world_all_gather(world, &mine, sizeof mine, all));
    if (status) return ep_error(status, "%s", why);
    for (uint32_t r = 0; r < ep_world_size(world); r++)
        if (all[r].status)
            return ep_error(all[r].status == EP_ENOMEM ? EP_ENOMEM : EP_EPEER,
                            "rank %u could not make its layer (%s). See the error that it raised.", r,
                            ep_error_name(all[r].status));
    for (uint32_t r = 1; r < ep_world_size(world); r++)
        for (uint32_t i = 0; i < sizeof agreed / sizeof agreed[0]; i++) {
            uint32_t its, first;
            memcpy(&its, (const char *)&all[r].config + agreed[i].off, sizeof its);
            memcpy(&first, (const char *)&all[0].config + agreed[i].off, sizeof first);
            if (its != first)
                return ep_error(EP_EMISMATCH,
                                "ranks disagree in %s: rank %u has %s, rank 0 has %s. Create the layer with "
                                "the same arguments on all ranks.",
                                agreed[i].name, r, value_name(agreed[i].kind, its, a),
                                value_name(agreed[i].kind, first, b));
        }
    return 0;
}

/* The CPU runs the stages of a fused operation one after the other. */
static bool has_fused_kernels(EpHeap *heap) {
    EpDevice device;
    if (ep_heap_kind(heap) == EP_CPU) return true;
    return !ep_device_query(ep_heap_device(heap), &device) && device.has_hopper;
}

static int create(EpHeap *heap, const EpLayerConfig *config, EpLayer **out) {
    uint64_t num_bytes;
    uint32_t made = 0;
    int code = ep_layer_check_config(config, &num_bytes);
    if (!code && config->shape.num_ranks != ep_world_size(ep_heap_world(heap)))
        code = ep_error(EP_EINVAL, "a layer for %u ranks in a world of %u ranks: must be the same number",
                        config->shape.num_ranks, ep_world_size(ep_heap_world(heap)));
    EpLayer *l = code ? NULL : (EpLayer *)calloc(1, sizeof *l);
    if (!code && !l) code = ep_error(EP_ENOMEM, "cannot allocate a layer: this process is out of memory");
    code = agree(ep_heap_world(heap), config, code);
    if (code) {
        free(l);
        return code;
    }
    /* Numbered here, because all ranks now create the layer. A layer that failed before takes no number. */
    const uint16_t number = ep_world_number_layer(ep_heap_world(heap));
    l->heap = ep_heap_retain(heap);
    l->config = *config;
    l->has_fused = has_fused_kernels(heap);
    atomic_init(&l->num_refs, 1);
    for (uint32_t i = 0; i < EP_MAX_BUFFERS; i++) pthread_mutex_init(&l->locks[i], NULL);
    pthread_mutex_init(&l->rooms.lock, NULL);
    while (made < config->num_buffers && !code) {
        code = ep_heap_alloc_buffer(heap, &config->shape, &l->buffers[made]);
        if (!code) made++;
    }
    if (!code) {
        for (uint32_t i = 0; i < made && !code; i++) {
            l->buffers[i].of = number;
            l->buffers[i].buffer = (uint16_t)i;
            code = ep_heap_open_buffer(heap, &config->shape, &l->buffers[i]);
            l->buffers[i].comm.reserve_sms += config->reserve_sms;
        }
        code = ep_world_agree(ep_heap_world(heap), code, "make its layer");
    }
    if (code) {
        /* All ranks have failed, so all ranks free the buffers that were allocated. */
        char text[512];
        snprintf(text, sizeof text, "%s", ep_error_text());
        for (uint32_t i = 0; i < made; i++) ep_heap_free(heap, l->buffers[i].off);
        l->num_freed = config->num_buffers;
        ep_layer_release(l);
        return ep_error(code, "%s", text);
    }
    *out = l;
    return 0;
}

/* The spare buffers of the configuration, after the layer and its heap have taken theirs. */
static int check_spare(EpWorld *world, const EpLayerConfig *config) {
    if (!config->spare_buffers) return 0;
    ep_run_deferred_frees(
        ep_world_deferred_frees(world)); /* as the creation of a heap does before it takes a buffer */
    const uint32_t num_free = ep_world_free_buffers(world), num_taken = 1 + config->num_buffers;
    if (num_free >= (uint64_t)config->spare_buffers + num_taken) return 0;
    return ep_error(EP_ENOMEM,
                    "%u communication buffers of the world are free: after this layer takes %u, at least %u "
                    "must be left",
                    num_free, num_taken, config->spare_buffers);
}

int ep_layer_agree(EpWorld *world, const EpLayerConfig *config, int status) {
    const EpCallRecord call = {.what = EP_CALL_LAYER_AGREE, .code = (int16_t)status};
    uint64_t num_bytes, record;
    EP_TRY(ep_world_enter_call(world, &call, &record));
    if (!status) status = ep_layer_check_config(config, &num_bytes);
    if (!status) status = check_spare(world, config);
    int code = agree(world, config, status);
    ep_world_leave_call(world, record, code);
    return code;
}

int ep_layer_create(EpHeap *heap, const EpLayerConfig *config, EpLayer **out) {
    const EpCallRecord call = {.what = EP_CALL_LAYER_CREATE, .of = ep_heap_number(heap)};
    uint64_t record;
    EP_TRY(ep_world_enter_call(ep_heap_world(heap), &call, &record));
    ep_heap_run_deferred_frees(heap); /* the new layer may need their places in the world */
    int code = create(heap, config, out);
    ep_world_leave_call(ep_heap_world(heap), record, code);
    return code;
}

int ep_layer_lock_all(EpLayer *l) {
    int code = 0;
    for (uint32_t i = 0; i < l->config.num_buffers && !code; i++) {
        code = ep_layer_lock(l, i);
        for (uint32_t k = i; code && k-- > 0;) pthread_mutex_unlock(&l->locks[k]);
    }
    return code;
}

/* Free the buffers, which are locked. code: 0, or the reason why this rank frees nothing together with the
 * others: the heap is closed, or the world has ended. */
static int close_locked(EpLayer *l, int code) {
    EpWorld *world = ep_heap_world(l->heap);
    /* Peers may pull from this rank, and this rank from peers, until the last kernel has ended. Only
     * after that may the memory be used for something else. */
    int synced = ep_heap_quiesce(l->heap);
    const bool is_idle = !synced && !ep_world_check(world);
    memset(l->waited_ns, 0, sizeof l->waited_ns);
    for (uint32_t b = 0; b < l->config.num_buffers; b++)
        for (uint32_t r = 0; r < l->config.shape.num_ranks; r++)
            l->waited_ns[r] += ep_ld_relaxed_sys_u64(&l->buffers[b].comm.host->waited_ns[r]);
    while (l->num_freed < l->config.num_buffers && !code) {
        code = ep_heap_free(l->heap, l->buffers[l->num_freed].off);
        if (!code) l->num_freed++;
    }
    if (code == EP_ECLOSED || ep_world_check(world))
        l->num_freed = l->config.num_buffers; /* the heap or the world has freed all buffers */
    /* The freed memory may belong to another allocation now, so the watchdog must not read it. */
    for (uint32_t i = 0; i < l->num_freed; i++) ep_world_unwatch(world, &l->buffers[i]);
    /* The GPU has finished, so that nothing is left for a destructor to wait for. */
    for (uint32_t i = 0; i < l->num_freed && l->buffers[i].on_stream && is_idle; i++)
        ep_comm_close(&l->buffers[i]);
    if (is_idle) ep_heap_run_deferred_frees(l->heap);
    l->closed = l->num_freed > 0;
    return code ? code : synced;
}

/* The close has two steps, because other threads of a rank may be in operations:
 *   1. All ranks come to the close. Meanwhile the operations go on, and new ones begin: a rank that is late
 *      may still be in an operation that this rank's other thread has not entered yet.
 *   2. Each rank waits for the operations of its other threads, by taking the locks of all buffers, and then
 *      frees the memory. Operations that begin later find the layer closed.
 * ep_layer_lock is taken inside of a call here. Never the reverse: an operation, which holds a lock of a
 * buffer, enters no call of ep_world_enter_call. So no deadlock is possible. */
static int close_layer(EpLayer *l) {
    EpWorld *world = ep_heap_world(l->heap);
    unsigned char mine = 0, all[EP_MAX_RANKS];
    char why[512];
    if (l->closed) return 0; /* by another thread, while this one waited to enter the call */
    int code = ep_heap_check_open(l->heap);
    if (!code) code = ep_world_all_gather(world, &mine, 1, all);
    snprintf(why, sizeof why, "%s", ep_error_text());
    /* A rank was in another call. Nothing has happened. */
    if (code && code != EP_ECLOSED && !ep_world_check(world)) return ep_error(code, "%s", why);
    EP_TRY(ep_layer_lock_all(l));
    const int before = code;
    code = close_locked(l, code);
    for (uint32_t i = 0; i < l->config.num_buffers; i++) pthread_mutex_unlock(&l->locks[i]);
    return before ? ep_error(before, "%s", why) : code;
}

int ep_layer_close(EpLayer *l) {
    EpWorld *world = ep_heap_world(l->heap);
    uint64_t record;
    if (l->closed) return 0;
    EP_TRY(ep_world_enter_call(world, &(EpCallRecord){.what = EP_CALL_LAYER_CLOSE, .of = l->buffers[0].of},
                               &record));
    const int code = close_layer(l);
    ep_world_leave_call(world, record, code);
    return code;
}

static void destroy(void *layer) {
    EpLayer *l = (EpLayer *)layer;
    for (uint32_t i = 0; i < l->config.num_buffers; i++) ep_comm_close(&l->buffers[i]);
    /* The heap is still there, perhaps with other layers. */
    for (uint32_t i = l->num_freed; i < l->config.num_buffers; i++) ep_heap_drop(l->heap, l->buffers[i].off);
    for (uint32_t i = 0; i < EP_MAX_BUFFERS; i++) pthread_mutex_destroy(&l->locks[i]);
    pthread_mutex_destroy(&l->rooms.lock);
    free(l);
}

/* On a GPU this is a destructor, which makes no call of CUDA. The heap exists until it has destroyed the
 * layer. */
void ep_layer_release(EpLayer *l) {
    bool has_words = false;
    if (!l || atomic_fetch_sub(&l->num_refs, 1) != 1) return;
    EpHeap *heap = l->heap, *staging = l->staging.heap;
    if (ep_world_is_forked(ep_heap_world(heap))) return;
    for (uint32_t i = 0; i < l->config.num_buffers; i++)
        has_words |= l->buffers[i].on_stream && l->buffers[i].comm.host;
    if (has_words) ep_defer_free(ep_heap_deferred_layers(heap), &l->deferred_free, destroy, l);
    else destroy(l);
    ep_heap_release(heap);
    if (staging) ep_heap_release(staging);
}

EpHeap *ep_layer_heap(EpLayer *l) { return l->heap; }

int ep_layer_plan_words(EpLayer *l, uint64_t num_tokens, uint64_t *num_words) {
    if (num_tokens > l->config.shape.max_tokens)
        return ep_error(EP_EINVAL, "%llu tokens: must be at most max_tokens, %u",
                        (unsigned long long)num_tokens, l->config.shape.max_tokens);
    *num_words = ep_plan_layout(&l->config.shape, (uint32_t)num_tokens).num_words;
    return 0;
}

uint64_t ep_layer_ll_handle_words(const EpLayerConfig *config, uint64_t *offsets) {
    const EpLlHandle h = ep_ll_handle(&config->shape);
    *offsets = h.offsets_off;
    return h.num_words;
}

/* ---- operations ---- */

static int check_buffer(const EpLayer *l, uint32_t buffer) {
    if (buffer < l->config.num_buffers) return 0;
    return ep_error(EP_EINVAL, "buffer %u: must be less than num_buffers, %u", buffer, l->config.num_buffers);
}

int ep_layer_lock(EpLayer *l, uint32_t buffer) {
    EP_TRY(check_buffer(l, buffer));
    return ep_world_lock(ep_heap_world(l->heap), &l->locks[buffer]);
}

int ep_layer_begin(EpLayer *l, uint32_t buffer, void *stream, EpCommBuffer **out) {
    if (l->closed) return ep_error(EP_ECLOSED, "this layer is finalized: create a new one");
    EP_TRY(ep_heap_check_open(l->heap));
    EpCommBuffer *b = &l->buffers[buffer];
    EP_TRY(ep_comm_check(b, stream));
    b->comm.timeout_ns = ep_world_timeout_ns(ep_heap_world(l->heap));
    *out = b;
    return 0;
}

int ep_layer_end(EpLayer *l, EpCommBuffer *b, uint32_t op, uint64_t record, int code, void *stream) {
    ep_world_end_call(ep_heap_world(l->heap), record, code);
    /* A CPU operation that fails has entered, and has propagated the error to its peers. */
    if (code && ep_heap_kind(l->heap) == EP_CPU) return code;
    if (code) {
        /* A CUDA operation that fails was not launched: it does not count, and this rank propagates the error
         * now. */
        b->num_ops--;
        ep_world_uncount_calls(ep_heap_world(l->heap), 1);
        return ep_layer_fail(l, b->buffer, op, code, stream);
    }
    return ep_heap_kind(l->heap) == EP_CPU ? ep_comm_check(b, stream) : 0;
}

static int propagate_error(EpLayer *l, uint32_t buffer, uint32_t op, int code, void *stream) {
    EpCommBuffer *b;
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    EpComm comm = b->comm;
    comm.status = code;
    uint64_t record = ep_comm_begin_call(b, op, 0, code, stream);
    code = ep_heap_backend(l->heap)->enter(ep_heap_device(l->heap), &comm, op, stream);
    ep_world_end_call(ep_heap_world(l->heap), record, comm.status);
    if (code) ep_comm_give_up(b, code, stream);
    return code;
}

int ep_layer_propagate_error(EpLayer *l, uint32_t buffer, uint32_t op, int code, void *stream) {
    if (code >= 0) return ep_error(EP_EINVAL, "code %d: must be negative, an EpCode", code);
    EP_TRY(ep_layer_lock(l, buffer));
    return ep_layer_unlock(l, buffer, propagate_error(l, buffer, op, code, stream));
}

int ep_layer_fail(EpLayer *l, uint32_t buffer, uint32_t op, int code, void *stream) {
    char text[512];
    snprintf(text, sizeof text, "%s", ep_error_text());
    propagate_error(l, buffer, op, code, stream);
    return ep_error(code, "%s", text);
}

int ep_layer_barrier_locked(EpLayer *l, uint32_t buffer, void *stream) {
    EpCommBuffer *b;
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    uint64_t record = ep_comm_begin_call(b, EP_OP_BARRIER, 0, 0, stream);
    int done = ep_heap_backend(l->heap)->enter(ep_heap_device(l->heap), &b->comm, EP_OP_BARRIER, stream);
    return ep_layer_end(l, b, EP_OP_BARRIER, record, done, stream);
}

int ep_layer_barrier(EpLayer *l, uint32_t buffer, void *stream) {
    EP_TRY(ep_layer_lock(l, buffer));
    return ep_layer_unlock(l, buffer, ep_layer_barrier_locked(l, buffer, stream));
}

int ep_layer_sync(EpLayer *l, void *stream) {
    if (l->closed) return ep_error(EP_ECLOSED, "this layer is finalized: create a new one");
    EP_TRY(ep_heap_check_open(l->heap));
    EP_TRY(ep_heap_backend(l->heap)->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
    EP_TRY(ep_world_check_caller(ep_heap_world(l->heap)));
    /* On the CPU a call of another thread may wait for peers now, and returns its error itself. */
    const bool waits = ep_heap_kind(l->heap) != EP_CPU;
    int code = 0;
    for (uint32_t i = 0; i < l->config.num_buffers && !code; i++) {
        if (waits) EP_TRY(ep_layer_lock(l, i));
        else if (pthread_mutex_trylock(&l->locks[i])) continue;
        code = ep_layer_unlock(l, i, ep_comm_check(&l->buffers[i], stream));
    }
    return code;
}

int ep_layer_newest_call(EpLayer *l, uint32_t buffer, uint64_t *number) {
    EP_TRY(ep_layer_lock(l, buffer));
    *number = ep_comm_newest_call(&l->buffers[buffer]);
    return ep_layer_unlock(l, buffer, 0);
}

int ep_layer_was_void(EpLayer *l, uint32_t buffer, uint64_t number, bool *was_void) {
    EP_TRY(check_buffer(l, buffer));
    /* After a fork, nobody may be left to release the lock in the child. A child raises no errors of the
     * buffer. */
    *was_void = !ep_world_is_forked(ep_heap_world(l->heap)) && ep_comm_was_void(&l->buffers[buffer], number);
    return 0;
}

static int set_epoch(EpLayer *l, uint32_t buffer, uint64_t epoch, void *stream) {
    EpCommBuffer *b;
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    if (epoch == 0)
        return ep_error(EP_EINVAL, "epoch 0: must be at least 1, because 0 means that no operation has run");
    uint64_t before = b->num_ops = epoch - 1;
    const EpBackend *backend = ep_heap_backend(l->heap);
    EP_TRY(
        backend->copy(ep_heap_device(l->heap), &ep_local(&b->comm)->epoch, &before, sizeof before, stream));
    return backend->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap));
}

int ep_layer_set_epoch(EpLayer *l, uint32_t buffer, uint64_t epoch, void *stream) {
    EP_TRY(ep_layer_lock(l, buffer));
    return ep_layer_unlock(l, buffer, set_epoch(l, buffer, epoch, stream));
}
