/* layer_ops.c - the operations of a layer: check the arguments, fill in the parameters, call the backend.
 *
 * Exports ep_layer_plan, _num_rows, _dispatch, _combine, _dispatch_gemm, _gemm_combine and _trace.
 * Invariant: an argument that this rank cannot accept never leaves the other ranks waiting. After a failed
 * check, this rank still enters the operation with its code in the header (ep_layer_fail). The operation is
 * then void on every rank, every rank raises an error, and the layer can be used again. */
#include <stddef.h>

#include "layer/layer_state.h"
#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/tensor.h"
#include "runtime/world.h"

/* ---- arguments ---- */

/* Check that t is a contiguous tensor on the layer's device. A size of -1 accepts any size. */
static int check_tensor(const EpLayer *l, const char *name, const EpTensor *t, uint32_t dtype,
                        uint32_t num_dims, int64_t d0, int64_t d1) {
    const EpWanted wanted = {name, t, dtype, num_dims, {d0, d1, -1}};
    return ep_tensor_check(&wanted, ep_heap_kind(l->heap), ep_heap_device(l->heap), 1);
}

/* Check rows [num_rows][H]. Workers copy a row in units of 16 bytes, so the address is aligned to 16. */
static int check_rows(const EpLayer *l, const char *name, const EpTensor *t, int64_t num_rows) {
    const EpWanted wanted = {name, t, l->config.shape.dtype, 2, {num_rows, l->config.shape.hidden, -1}};
    return ep_tensor_check(&wanted, ep_heap_kind(l->heap), ep_heap_device(l->heap), 16);
}

/* ---- stages ---- */

static int check_plan_tensor(const EpLayer *l, const EpTensor *plan, uint32_t num_tokens,
                             EpPlanLayout *layout) {
    *layout = ep_plan_layout(&l->config.shape, num_tokens);
    return check_tensor(l, "plan", plan, EP_I32, 1, (int64_t)layout->num_words, -1);
}

static int check_recv_tensor(const EpLayer *l, const EpTensor *recv) {
    const EpShape *s = &l->config.shape;
    return check_tensor(l, "recv", recv, EP_I32, 1, (int64_t)ep_recv_words(s), -1);
}

static int check_num_tokens(const EpLayer *l, const char *name, const EpTensor *t) {
    if (t->num_dims < 1 || t->shape[0] > (int64_t)l->config.shape.max_tokens)
        return ep_error(EP_EINVAL, "%s has %lld tokens: must be at most max_tokens, %u", name,
                        t->num_dims ? (long long)t->shape[0] : -1ll, l->config.shape.max_tokens);
    return 0;
}

static int check_plan(const EpLayer *l, const EpTensor *indices, const EpTensor *scatter,
                      const EpTensor *plan, EpPlanParams *p) {
    const EpShape *s = &l->config.shape;
    if (indices->num_dims != 2)
        return ep_error(EP_EINVAL, "exp_indices: wanted 2 dimensions [T, %u], got %u", s->num_topk,
                        indices->num_dims);
    EP_TRY(check_num_tokens(l, "exp_indices", indices));
    if (indices->dtype != EP_I64 && indices->dtype != EP_I32)
        return ep_error(EP_ETYPE, "exp_indices: wanted int32 or int64, got %s",
                        ep_dtype_name(indices->dtype));
    EP_TRY(check_tensor(l, "exp_indices", indices, indices->dtype, 2, -1, s->num_topk));
    if (scatter) EP_TRY(check_tensor(l, "full_scatter_indices", scatter, EP_I32, 2, -1, s->num_topk));
    EP_TRY(check_plan_tensor(l, plan, (uint32_t)indices->shape[0], &p->layout));
    p->exp_indices = indices->data;
    p->index_bytes = indices->dtype == EP_I64 ? 8 : 4;
    p->num_tokens = (uint32_t)indices->shape[0];
    p->plan = (int32_t *)plan->data;
    p->scatter_indices = scatter ? (const int32_t *)scatter->data : NULL;
    p->num_scatter_tokens = scatter ? (uint32_t)scatter->shape[0] : 0;
    return 0;
}

int ep_layer_plan(EpLayer *l, uint32_t buffer, const EpTensor *indices, const EpTensor *scatter,
                  bool sort_slots, const EpTensor *plan, void *stream) {
    EpCommBuffer *b;
    EpPlanParams p = {0};
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    int code = check_plan(l, indices, scatter, plan, &p);
    if (code) return ep_layer_fail(l, buffer, EP_OP_PLAN, code, stream);
    p.comm = b->comm;
    p.ticket = ++l->ticket[buffer];
    p.sort_slots = sort_slots;
    l->newest[buffer] = p.plan;
    uint64_t record = ep_comm_begin_call(l->heap, b, EP_OP_PLAN, p.layout.num_tokens, 0, stream);
    int done = ep_heap_backend(l->heap)->plan(ep_heap_device(l->heap), &p, stream);
    return ep_layer_end(l, b, EP_OP_PLAN, record, done, stream);
}

/* A plan that others have followed: it knows, the host does not. */
static int rows_of_older_plan(EpLayer *l, const EpTensor *plan, void *stream, uint32_t *num_rows) {
    int32_t head[EP_HEAD_WORDS];
    const EpBackend *backend = ep_heap_backend(l->heap);
    EP_TRY(check_tensor(l, "plan", plan, EP_I32, 1, -1, -1));
    if (plan->shape[0] < EP_HEAD_WORDS)
        return ep_error(EP_EINVAL, "a plan of %lld words: wanted at least %d", (long long)plan->shape[0],
                        EP_HEAD_WORDS);
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

int ep_layer_num_rows(EpLayer *l, uint32_t buffer, const EpTensor *plan, void *stream, uint32_t *num_rows) {
    if (l->closed) return ep_error(EP_ECLOSED, "this layer is finalized");
    if (buffer >= l->config.num_buffers)
        return ep_error(EP_EINVAL, "buffer %u: must be less than num_buffers, %u", buffer,
                        l->config.num_buffers);
    if (plan && plan->data != l->newest[buffer]) return rows_of_older_plan(l, plan, stream, num_rows);
    EpCommBuffer *b = &l->buffers[buffer];
    const EpPlanResult *result = &b->comm.host->plan;
    /* A plan takes microseconds. After 20 ms, wait for the stream instead. */
    uint64_t until = ep_now_ns() + 20000000u;
    while (ep_ld_acquire_sys_u64(&result->ticket) != l->ticket[buffer]) { /* the result is now readable */
        if (ep_now_ns() < until) continue;
        EP_TRY(ep_heap_backend(l->heap)->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
        if (ep_ld_acquire_sys_u64(&result->ticket) == l->ticket[buffer]) break;
        EP_TRY(ep_comm_check(l->heap, b, stream));
        return ep_error(EP_EINVAL, "there is no plan to read the rows of");
    }
    if (result->status) {
        /* The fault record is complete when the kernel has ended. */
        EP_TRY(ep_heap_backend(l->heap)->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
        EP_TRY(ep_comm_check(l->heap, b, stream));
        return ep_error(
            EP_EPEER,
            "the plan of this layout failed. See the error that preprocess raised, and make a new layout.");
    }
    *num_rows = result->num_rows;
    return 0;
}

/* Check the arguments of a dispatch, and fill in p. x has one row for every num_copies tokens. */
static int check_dispatch(const EpLayer *l, const EpTensor *x, uint32_t num_copies, const EpTensor *weight,
                          const EpTensor *plan, const EpTensor *rows, const EpTensor *row_weight,
                          const EpTensor *recv, EpDispatchParams *p) {
    const EpShape *s = &l->config.shape;
    if (num_copies < 1)
        return ep_error(EP_EINVAL, "num_copies 0: must be at least 1 token for each row of the input");
    if (x->num_dims < 1 || x->shape[0] > (int64_t)(s->max_tokens / num_copies))
        return ep_error(EP_EINVAL, "input has %lld tokens: must be at most max_tokens, %u",
                        x->num_dims ? (long long)x->shape[0] : -1ll, s->max_tokens / num_copies);
    EP_TRY(check_rows(l, "input", x, -1));
    const int64_t T = x->shape[0] * num_copies;
    if (weight) EP_TRY(check_tensor(l, "weight", weight, EP_F32, 2, T, s->num_topk));
    EP_TRY(check_plan_tensor(l, plan, (uint32_t)T, &p->layout));
    EP_TRY(check_rows(l, "output", rows, -1));
    if ((weight != NULL) != (row_weight != NULL))
        return ep_error(EP_EINVAL, "weight and output weight: give both or neither");
    if (row_weight) EP_TRY(check_tensor(l, "output weight", row_weight, EP_F32, 1, rows->shape[0], -1));
    EP_TRY(check_recv_tensor(l, recv));
    if (rows->shape[0] > INT32_MAX)
        return ep_error(EP_EINVAL, "output has %lld rows: must be less than 2^31", (long long)rows->shape[0]);
    p->x = x->data;
    p->weight = weight ? (const float *)weight->data : NULL;
    p->plan = (const int32_t *)plan->data;
    p->recv = (int32_t *)recv->data;
    p->rows = rows->data;
    p->row_weight = row_weight ? (float *)row_weight->data : NULL;
    p->num_rows = (uint32_t)rows->shape[0];
    p->has_weight = weight != NULL;
    p->num_copies = num_copies;
    return 0;
}

int ep_layer_dispatch(EpLayer *l, uint32_t buffer, const EpTensor *x, const EpTensor *weight,
                      const EpTensor *plan, const EpTensor *rows, const EpTensor *row_weight,
                      const EpTensor *recv, bool requires_grad, void *stream) {
    EpCommBuffer *b;
    EpDispatchParams p = {0};
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    int code = check_dispatch(l, x, 1, weight, plan, rows, row_weight, recv, &p);
    if (code) return ep_layer_fail(l, buffer, EP_OP_DISPATCH, code, stream);
    p.comm = b->comm;
    p.comm.requires_grad = requires_grad;
    uint64_t record = ep_comm_begin_call(l->heap, b, EP_OP_DISPATCH, p.layout.num_tokens, 0, stream);
    int done = ep_heap_backend(l->heap)->dispatch(ep_heap_device(l->heap), &p, l->config.num_sm, stream);
    return ep_layer_end(l, b, EP_OP_DISPATCH, record, done, stream);
}

static int check_combine(const EpLayer *l, const EpTensor *rows, const EpTensor *row_weight,
                         const EpTensor *row_scalar, const EpTensor *plan, const EpTensor *recv,
                         const EpTensor *out, const EpTensor *out_scalar, EpCombineParams *p) {
    const EpShape *s = &l->config.shape;
    EP_TRY(check_num_tokens(l, "output", out));
    EP_TRY(check_rows(l, "output", out, -1));
    EP_TRY(check_rows(l, "input", rows, -1));
    if (row_weight) EP_TRY(check_tensor(l, "weight", row_weight, EP_F32, 1, rows->shape[0], -1));
    if (row_scalar) EP_TRY(check_tensor(l, "scalar", row_scalar, EP_F32, 1, rows->shape[0], -1));
    if ((row_scalar != NULL) != (out_scalar != NULL))
        return ep_error(EP_EINVAL, "scalar and output scalar: give both or neither");
    if (out_scalar)
        EP_TRY(check_tensor(l, "output scalar", out_scalar, EP_F32, 2, out->shape[0], s->num_topk));
    EP_TRY(check_plan_tensor(l, plan, (uint32_t)out->shape[0], &p->layout));
    EP_TRY(check_recv_tensor(l, recv));
    if (rows->shape[0] > INT32_MAX)
        return ep_error(EP_EINVAL, "input has %lld rows: must be less than 2^31", (long long)rows->shape[0]);
    p->rows = rows->data;
    p->row_weight = row_weight ? (const float *)row_weight->data : NULL;
    p->row_scalar = row_scalar ? (const float *)row_scalar->data : NULL;
    p->plan = (const int32_t *)plan->data;
    p->recv = (const int32_t *)recv->data;
    p->out = out->data;
    p->out_scalar = out_scalar ? (float *)out_scalar->data : NULL;
    p->num_rows = (uint32_t)rows->shape[0];
    p->has_weight = row_weight != NULL;
    p->has_scalar = row_scalar != NULL;
    return 0;
}

int ep_layer_combine(EpLayer *l, uint32_t buffer, const EpTensor *rows, const EpTensor *row_weight,
                     const EpTensor *row_scalar, const EpTensor *plan, const EpTensor *recv,
                     const EpTensor *out, const EpTensor *out_scalar, bool requires_grad, void *stream) {
    EpCommBuffer *b;
    EpCombineParams p = {0};
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    int code = check_combine(l, rows, row_weight, row_scalar, plan, recv, out, out_scalar, &p);
    if (code) return ep_layer_fail(l, buffer, EP_OP_COMBINE, code, stream);
    p.comm = b->comm;
    p.comm.requires_grad = requires_grad;
    uint64_t record = ep_comm_begin_call(l->heap, b, EP_OP_COMBINE, p.layout.num_tokens, 0, stream);
    int done = ep_heap_backend(l->heap)->combine(ep_heap_device(l->heap), &p, l->config.num_sm, stream);
    return ep_layer_end(l, b, EP_OP_COMBINE, record, done, stream);
}

/* ---- fused kernels ---- */

/* Check the grouped GEMM of a fused kernel, and fill in p: a [M][K] times w [L][N][K] gives out [M][N].
 * out has half as many columns if the activation is gated. */
static int check_product(const EpLayer *l, const EpTensor *a, const EpTensor *w, const EpTensor *bias,
                         const EpTensor *out, uint32_t activation, const int32_t *offsets, EpGemmParams *p) {
    const EpShape *s = &l->config.shape;
    const EpBackendKind kind = ep_heap_kind(l->heap);
    const int device = ep_heap_device(l->heap);
    if (!ep_heap_backend(l->heap)->dispatch_gemm)
        return ep_error(EP_EINVAL, "the fused kernels run on CUDA only, but this layer is on the CPU");
    if (s->dtype == EP_F32)
        return ep_error(EP_ETYPE,
                        "the fused kernels multiply bfloat16 and float16, but this layer has float32");
    if (!ep_gemm_is_activation(activation, p->alpha, p->limit))
        return ep_error(EP_EINVAL,
                        "activation %u (alpha %g, limit %g): must be an EpActivation with valid numbers",
                        activation, (double)p->alpha, (double)p->limit);
    if (w->num_dims != 3 || a->num_dims != 2)
        return ep_error(EP_EINVAL, "wanted gemm_weight of 3 dimensions and rows of 2, got %u and %u",
                        w->num_dims, a->num_dims);
    const int64_t L = ep_num_local_experts(s), N = w->shape[1], K = w->shape[2], M = a->shape[0];
    if (N < 16 || K < 16 || N % 16 || K % 16 || N > 1 << 24 || K > 1 << 24)
        return ep_error(EP_EINVAL,
                        "gemm_weight of %lld by %lld: both sizes must be multiples of 16, at most 2^24",
                        (long long)N, (long long)K);
    const EpWanted wanted[] = {
        {"rows", a, s->dtype, 2, {M, K, -1}},
        {"gemm_weight", w, s->dtype, 3, {L, N, K}},
        {"bias", bias, s->dtype, 2, {L, N, -1}},
        {"output", out, s->dtype, 2, {M, ep_gemm_is_gated(activation) ? N / 2 : N, -1}},
    };
    for (uint32_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        EP_TRY(ep_tensor_check(&wanted[i], kind, device, 16));
    p->a = a->data;
    p->b = w->data;
    p->out = out->data;
    p->offsets = offsets;
    p->bias = bias ? bias->data : NULL;
    p->num_rows = (uint32_t)M;
    p->num_experts = (uint32_t)L;
    p->n = (uint32_t)N;
    p->k = (uint32_t)K;
    p->kind = EP_GEMM_FORWARD;
    p->activation = activation;
    p->is_f16 = s->dtype == EP_F16;
    return 0;
}

int ep_layer_dispatch_gemm(EpLayer *l, uint32_t buffer, const EpDispatchGemm *g, void *stream) {
    EpCommBuffer *b;
    EpDispatchGemmParams p = {0};
    EpDispatchParams *d = &p.dispatch;
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    p.gemm.alpha = (float)g->alpha;
    p.gemm.limit = (float)g->limit;
    int code = check_dispatch(l, g->x, g->num_copies, g->weight, g->plan, g->rows, g->row_weight, g->recv, d);
    if (!code)
        code = check_product(l, g->rows, g->gemm_weight, g->bias, g->out, g->activation,
                             d->plan + d->layout.expert_row_off, &p.gemm);
    if (!code && g->num_tail && g->num_tail >= g->num_move)
        code =
            ep_error(EP_EINVAL, "num_tail_sms %u: must be fewer than num_sm, %u", g->num_tail, g->num_move);
    if (!code && g->num_move < 1)
        code = ep_error(EP_EINVAL, "num_sm 0: must be at least 1, so that a thread block moves tokens");
    if (code) return ep_layer_fail(l, buffer, EP_OP_DISPATCH_GEMM, code, stream);
    d->comm = b->comm;
    d->comm.requires_grad = g->requires_grad;
    p.num_move_blocks = g->num_move;
    p.num_tail_blocks = g->num_tail;
    p.waits_for_expert = g->waits_for_expert;
    uint64_t record = ep_comm_begin_call(l->heap, b, EP_OP_DISPATCH_GEMM, d->layout.num_tokens, 0, stream);
    code = ep_heap_backend(l->heap)->dispatch_gemm(ep_heap_device(l->heap), &p, stream);
    return ep_layer_end(l, b, EP_OP_DISPATCH_GEMM, record, code, stream);
}

int ep_layer_gemm_combine(EpLayer *l, uint32_t buffer, const EpGemmCombine *g, void *stream) {
    EpCommBuffer *b;
    EpGemmCombineParams p = {0};
    EpCombineParams *k = &p.combine;
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    int code = check_combine(l, g->rows, g->row_weight, NULL, g->plan, g->recv, g->out, NULL, k);
    if (!code)
        code = check_product(l, g->a, g->gemm_weight, g->bias, g->rows, EP_ACT_NONE,
                             k->plan + k->layout.expert_row_off, &p.gemm);
    if (!code && (g->num_move < 1 || g->num_reduce < 1))
        code = ep_error(EP_EINVAL,
                        "num_sm %u, num_reduce_sms %u: both must be at least 1, so that thread blocks send "
                        "rows and add them up",
                        g->num_move, g->num_reduce);
    if (code) return ep_layer_fail(l, buffer, EP_OP_GEMM_COMBINE, code, stream);
    k->comm = b->comm;
    k->comm.requires_grad = g->requires_grad;
    p.num_move_blocks = g->num_move;
    p.num_reduce_blocks = g->num_reduce;
    p.is_serial = g->is_serial;
    uint64_t record = ep_comm_begin_call(l->heap, b, EP_OP_GEMM_COMBINE, k->layout.num_tokens, 0, stream);
    code = ep_heap_backend(l->heap)->gemm_combine(ep_heap_device(l->heap), &p, stream);
    return ep_layer_end(l, b, EP_OP_GEMM_COMBINE, record, code, stream);
}

int ep_layer_trace(EpLayer *l, uint32_t buffer, const EpTensor *events, uint32_t room) {
    if (buffer >= l->config.num_buffers)
        return ep_error(EP_EINVAL, "buffer %u: must be less than num_buffers, %u", buffer,
                        l->config.num_buffers);
#ifndef EP_TRACE
    if (events)
        return ep_error(EP_EINVAL, "this module was built without the profiler: build it with EPMOE_TRACE=1");
#endif
    EpComm *c = &l->buffers[buffer].comm;
    if (events) EP_TRY(check_tensor(l, "events", events, EP_I64, 1, -1, -1));
    if (events && room < 1) return ep_error(EP_EINVAL, "room 0: must be at least 1 event for each warp");
    c->trace = events ? (EpTraceEvent *)events->data : NULL;
    c->trace_room = room;
    c->trace_blocks = events ? (uint32_t)((uint64_t)events->shape[0] / 2 / EP_TRACE_WARPS / room) : 0;
    return 0;
}
