/* layer_ops.c - run the operations of a layer, and ask for the rows of a plan.
 *
 * Exports ep_layer_run, ep_layer_num_rows, ep_layer_expert_rows, ep_layer_waited and
 * ep_layer_trace.
 * Invariant: an argument that this rank cannot accept never leaves the other ranks waiting. After a failed
 * check, this rank still enters the operation with its code in the header (ep_layer_fail). The operation is
 * then void on every rank, every rank raises an error, and the layer can be used again. */
#include <stddef.h>
#include <string.h>

#include "layer/layer_state.h"
#include "layer/prepare.h"
#include "protocol/flags.h"
#include "protocol/plan.h"
#include "runtime/error.h"
#include "runtime/tensor.h"
#include "runtime/world.h"

int ep_layer_check_plan(const EpLayer *l, const EpTensor *plan) {
    EP_TRY(ep_layer_check_tensor(l, "plan", plan, EP_I32, 1, -1, -1));
    if (plan->shape[0] >= EP_HEAD_WORDS) return 0;
    return ep_error(EP_EINVAL, "a plan of %lld words: wanted at least %d", (long long)plan->shape[0],
                    EP_HEAD_WORDS);
}

/* A plan that others have followed: it knows, the host does not. */
static int rows_of_older_plan(EpLayer *l, const EpTensor *plan, void *stream, uint32_t *num_rows) {
    int32_t head[EP_HEAD_WORDS];
    const EpBackend *backend = ep_heap_backend(l->heap);
    EP_TRY(ep_layer_check_plan(l, plan));
    /* A copy to the stack would wait for the stream without a limit. So wait for the stream first: this
     * wait ends when the world ends. */
    EP_TRY(backend->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
    EP_TRY(backend->copy(ep_heap_device(l->heap), head, plan->data, sizeof head, stream));
    EP_TRY(backend->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
    if (head[EP_HEAD_STATUS])
        return ep_error(
            EP_EPEER,
            "the plan of this layout failed. See the error that preprocess raised, and make a new layout.");
    *num_rows = (uint32_t)head[EP_HEAD_NUM_ROWS];
    return 0;
}

int ep_layer_rows_locked(EpLayer *l, uint32_t buffer, const EpTensor *plan, void *stream,
                         uint32_t *num_rows) {
    if (l->closed) return ep_error(EP_ECLOSED, "this layer is finalized");
    if (plan && plan->data != l->newest[buffer]) return rows_of_older_plan(l, plan, stream, num_rows);
    EpCommBuffer *b = &l->buffers[buffer];
    const EpPlanResult *result = &b->comm.host->plan;
    /* A plan takes microseconds. After 20 ms, wait for the stream instead. */
    uint64_t until = ep_now_ns() + 20000000u;
    while (ep_ld_acquire_sys_u64(&result->ticket) != l->ticket[buffer]) { /* the result is now readable */
        if (ep_now_ns() < until) continue;
        EP_TRY(ep_heap_backend(l->heap)->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
        if (ep_ld_acquire_sys_u64(&result->ticket) == l->ticket[buffer]) break;
        EP_TRY(ep_comm_check(b, stream));
        return ep_error(EP_EINVAL, "there is no plan to read the rows of");
    }
    if (result->status) {
        /* The fault record is complete when the kernel has ended. */
        EP_TRY(ep_heap_backend(l->heap)->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
        EP_TRY(ep_comm_check(b, stream));
        return ep_error(
            EP_EPEER,
            "the plan of this layout failed. See the error that preprocess raised, and make a new layout.");
    }
    *num_rows = result->num_rows;
    return 0;
}

int ep_layer_num_rows(EpLayer *l, uint32_t buffer, const EpTensor *plan, void *stream, uint32_t *num_rows) {
    EP_TRY(ep_layer_lock(l, buffer));
    return ep_layer_unlock(l, buffer, ep_layer_rows_locked(l, buffer, plan, stream, num_rows));
}

static int expert_rows_of(EpLayer *l, uint32_t buffer, const EpTensor *plan, void *stream,
                          int32_t *expert_rows, uint32_t *num_experts) {
    const uint32_t num = *num_experts = ep_num_local_experts(&l->config.shape);
    uint32_t num_rows;
    int32_t first[EP_MAX_EXPERTS + 1];
    EP_TRY(ep_layer_rows_locked(l, buffer, plan, stream, &num_rows));
    if (!l->config.host_counts)
        return ep_error(EP_EINVAL, "the host has the rows of experts only in a layer with host_counts: read "
                                   "them on the device");
    if (!plan || plan->data == l->newest[buffer]) {
        const EpPadding padding = ep_layer_padding(l);
        const int32_t *choices =
            l->buffers[buffer].comm.host->expert_choices + l->buffers[buffer].comm.my_rank * num;
        for (uint32_t e = 0; e < num; e++)
            expert_rows[e] = (int32_t)ep_padded_rows(&padding, (uint32_t)choices[e]);
        return 0;
    }
    /* Another thread has made a newer plan. ep_layer_rows_locked has waited for this one. */
    const uint64_t off = ep_plan_layout(&l->config.shape, 0).expert_row_off;
    if ((uint64_t)plan->shape[0] < off + num + 1)
        return ep_error(EP_EINVAL, "a plan of %lld words: wanted at least %llu", (long long)plan->shape[0],
                        (unsigned long long)off + num + 1);
    const EpBackend *backend = ep_heap_backend(l->heap);
    EP_TRY(backend->copy(ep_heap_device(l->heap), first, (const int32_t *)plan->data + off,
                         (num + 1) * sizeof *first, stream));
    EP_TRY(backend->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
    bool is_right = first[0] == 0 && (uint32_t)first[num] == num_rows;
    for (uint32_t e = 0; e < num && is_right; e++) {
        is_right = first[e] <= first[e + 1] && first[e] >= 0;
        expert_rows[e] = is_right ? first[e + 1] - first[e] : 0;
    }
    if (!is_right) return ep_error(EP_EINVAL, "the plan of this layout was overwritten: make a new layout");
    return 0;
}

int ep_layer_expert_rows(EpLayer *l, uint32_t buffer, const EpTensor *plan, void *stream,
                         int32_t *expert_rows, uint32_t *num_experts) {
    EP_TRY(ep_layer_lock(l, buffer));
    return ep_layer_unlock(l, buffer, expert_rows_of(l, buffer, plan, stream, expert_rows, num_experts));
}

int ep_layer_waited(EpLayer *l, uint64_t *ns, uint32_t *num_ranks) {
    const uint32_t W = *num_ranks = l->config.shape.num_ranks;
    memset(ns, 0, W * sizeof *ns);
    for (uint32_t b = 0; b < l->config.num_buffers; b++) {
        EP_TRY(ep_layer_lock(l, b));
        for (uint32_t r = 0; r < W; r++)
            if (l->closed) ns[r] = l->waited_ns[r]; /* of all buffers */
            else ns[r] += ep_ld_relaxed_sys_u64(&l->buffers[b].comm.host->waited_ns[r]);
        ep_layer_unlock(l, b, 0);
    }
    return 0;
}

/* ---- run ---- */

/* The tensors of an operation, as ep_tensors_apart takes them. */
#define INPUT(name) {#name, a->name, false},
#define OUTPUT(name) {#name, a->name, true},
#define OPERANDS_TENSOR INPUT
#define OPERANDS_OPTIONAL INPUT
#define OPERANDS_OUT OUTPUT
#define OPERANDS_OWN INPUT
#define OPERANDS_OWN_OUT OUTPUT
#define OPERANDS_OWN_OUT_OPTIONAL OUTPUT
#define OPERANDS_PLAN INPUT
#define OPERANDS_PLAN_OUT OUTPUT
#define OPERANDS_U32(name)
#define OPERANDS_ACTIVATION(name)
#define OPERANDS_PLANNED(name)
#define OPERANDS_AWAITS(name)
#define OPERANDS(S, kind, name) OPERANDS_##kind(name)

/* Check the arguments of an operation and fill in its parameters, which are zeroed. */
static int prepare(EpLayer *l, const EpCommBuffer *b, uint32_t op, const void *args, EpOpParams *p) {
    switch (op) {
#define X(NAME, name, Type, text)                                                                        \
    case EP_OP_##NAME: {                                                                                 \
        const Ep##Type##Args *a = (const Ep##Type##Args *)args;                                          \
        const EpOperand operands[] = {EP_ARGS_##name(OPERANDS, unused)};                                 \
        _Static_assert(sizeof operands / sizeof operands[0] <= EP_MAX_OPERANDS, "room for all of them"); \
        EP_TRY(ep_tensors_apart(operands, sizeof operands / sizeof operands[0]));                        \
        return ep_prepare_##name(l, b, a, p);                                                            \
    }
#define B(NAME, name, Type, text)
        EP_OPERATIONS(X, B)
#undef X
#undef B
    default: return ep_error(EP_EINVAL, "operation %u: must be an EpOpKind with arguments", op);
    }
}

/* The switches below have no default: the compiler warns of an operation that one of them lacks. */
static uint32_t num_tokens_of(EpOpKind op, const EpOpParams *p) {
    switch (op) {
    case EP_OP_PLAN: return p->plan.num_tokens;
    case EP_OP_DISPATCH: return p->dispatch.layout.num_tokens;
    case EP_OP_DISPATCH_GEMM: return p->dispatch_gemm.dispatch.layout.num_tokens;
    case EP_OP_COMBINE: return p->combine.layout.num_tokens;
    case EP_OP_GEMM_COMBINE: return p->gemm_combine.combine.layout.num_tokens;
    case EP_OP_LL_DISPATCH: return p->ll_dispatch.num_tokens;
    case EP_OP_LL_COMBINE: return p->ll_combine.num_tokens;
    case EP_OP_NONE:
    case EP_OP_BARRIER:
    case EP_NUM_OPS: break; /* `prepare` has returned an error */
    }
    return 0;
}

static int launch(const EpLayer *l, EpOpKind op, const EpOpParams *p, void *stream) {
    const EpBackend *backend = ep_heap_backend(l->heap);
    const int device = ep_heap_device(l->heap);
    switch (op) {
    case EP_OP_PLAN: return backend->plan(device, &p->plan, stream);
    case EP_OP_DISPATCH: return backend->dispatch(device, &p->dispatch, &p->scales, l->config.num_sm, stream);
    case EP_OP_COMBINE: return backend->combine(device, &p->combine, l->config.num_sm, stream);
    case EP_OP_LL_DISPATCH: return backend->ll_dispatch(device, &p->ll_dispatch, l->config.num_sm, stream);
    case EP_OP_LL_COMBINE: return backend->ll_combine(device, &p->ll_combine, l->config.num_sm, stream);
    case EP_OP_DISPATCH_GEMM: return backend->dispatch_gemm(device, &p->dispatch_gemm, &p->scales, stream);
    case EP_OP_GEMM_COMBINE: return backend->gemm_combine(device, &p->gemm_combine, &p->scales, stream);
    case EP_OP_NONE:
    case EP_OP_BARRIER:
    case EP_NUM_OPS: break; /* `prepare` has returned an error */
    }
    return ep_error(EP_EINVAL, "operation %u: must be an EpOpKind with arguments", op);
}

/* A low-latency layer has the low-latency operations, and every other layer the others. */
static int check_kind(const EpLayer *l, uint32_t op) {
    const bool is_ll = op == EP_OP_LL_DISPATCH || op == EP_OP_LL_COMBINE;
    if (is_ll == ep_is_low_latency(&l->config.shape)) return 0;
    return ep_error(EP_EINVAL, "a layer of LowLatencyAll2All has the low-latency operations only, and no "
                               "other layer has them");
}

/* What an operation awaits, if it does. */
static bool get_awaited(EpOpKind op, const void *args, EpAwaited *awaited) {
    const EpDispatchArgs *d = (const EpDispatchArgs *)args;
    const EpDispatchGemmArgs *g = (const EpDispatchGemmArgs *)args;
    switch (op) {
    case EP_OP_DISPATCH:
        *awaited = ep_awaited(d->plan, d->x, d->requires_grad, NULL);
        return d->awaits_rows != 0;
    case EP_OP_DISPATCH_GEMM:
        *awaited = ep_awaited(g->plan, g->x, g->requires_grad, g->gemm_weight);
        return g->awaits_rows != 0;
    case EP_OP_PLAN:
    case EP_OP_COMBINE:
    case EP_OP_GEMM_COMBINE:
    case EP_OP_LL_DISPATCH:
    case EP_OP_LL_COMBINE:
    case EP_OP_NONE:
    case EP_OP_BARRIER:
    case EP_NUM_OPS: break;
    }
    return false;
}
/* `run` reads the rows of any operation that awaits a plan in the parameters of dispatch. */
_Static_assert(!offsetof(EpDispatchGemmParams, dispatch), "the parameters of dispatch come first");

int ep_layer_run_locked(EpLayer *l, uint32_t buffer, uint32_t op, const void *args, const EpAwaited *awaited,
                        void *stream, EpRan *ran) {
    EpCommBuffer *b;
    EpOpParams p;
    uint32_t num_rows = 0;
    memset(&p, 0, sizeof p);
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    int code = check_kind(l, op);
    if (!code) code = prepare(l, b, op, args, &p);
    /* If the plan has failed, no rank enters the operation. So its error goes before a failed check. That a
     * tensor is no plan is one of these checks. */
    const EpTensor *plan = awaited ? awaited->plan : NULL;
    const int no_plan = plan ? ep_layer_check_plan(l, plan) : 0;
    if (no_plan) code = no_plan;
    else if (plan) EP_TRY(ep_layer_rows_locked(l, buffer, plan, stream, &num_rows));
    if (ran && plan) ran->num_rows = num_rows;
    if (plan && !code && !ep_layer_fits_room(l, &awaited->of, p.dispatch.num_rows, num_rows)) return 0;
    const uint32_t word = EP_OP_WORD(op, p.scales.dtype);
    if (code) return ep_layer_fail(l, buffer, word, code, stream);
    if (ran) {
        ran->is_launched = true;
        ran->num_fused += op == EP_OP_DISPATCH_GEMM || op == EP_OP_GEMM_COMBINE;
    }
    const uint64_t record = ep_comm_begin_call(b, word, num_tokens_of((EpOpKind)op, &p), 0, stream);
    code = launch(l, (EpOpKind)op, &p, stream);
    return ep_layer_end(l, b, word, record, code, stream);
}

int ep_layer_run(EpLayer *l, uint32_t buffer, uint32_t op, const void *args, void *stream, EpRan *ran) {
    EpAwaited awaited;
    const bool awaits = get_awaited((EpOpKind)op, args, &awaited);
    *ran = (EpRan){0};
    EP_TRY(ep_layer_lock(l, buffer));
    return ep_layer_unlock(l, buffer,
                           ep_layer_run_locked(l, buffer, op, args, awaits ? &awaited : NULL, stream, ran));
}

static int trace(EpLayer *l, uint32_t buffer, const EpTensor *events, uint32_t capacity) {
#ifndef EP_TRACE
    if (events)
        return ep_error(EP_EINVAL, "this module was built without the profiler: build it with EPMOE_TRACE=1");
#endif
    EpComm *c = &l->buffers[buffer].comm;
    if (events) EP_TRY(ep_layer_check_tensor(l, "events", events, EP_I64, 1, -1, -1));
    if (events && capacity < 1) return ep_error(EP_EINVAL, "room 0: must be at least 1 event for each warp");
    c->trace = events ? (EpTraceEvent *)events->data : NULL;
    c->trace_capacity = capacity;
    c->trace_blocks = events ? (uint32_t)((uint64_t)events->shape[0] / 2 / EP_TRACE_WARPS / capacity) : 0;
    return 0;
}

int ep_layer_trace(EpLayer *l, uint32_t buffer, const EpTensor *events, uint32_t capacity) {
    EP_TRY(ep_layer_lock(l, buffer));
    return ep_layer_unlock(l, buffer, trace(l, buffer, events, capacity));
}
