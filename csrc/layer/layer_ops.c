/* layer_ops.c - the operations of a layer: check the arguments, fill in the parameters, call the backend.
 *
 * Exports ep_layer_run, ep_layer_num_rows and ep_layer_trace. Each operation has a function prepare_NAME.
 * Invariant: an argument that this rank cannot accept never leaves the other ranks waiting. After a failed
 * check, this rank still enters the operation with its code in the header (ep_layer_fail). The operation is
 * then void on every rank, every rank raises an error, and the layer can be used again. */
#include <stddef.h>
#include <string.h>

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

static int prepare_plan(EpLayer *l, const EpCommBuffer *b, const EpPlanArgs *a, EpPlanParams *p) {
    const EpShape *s = &l->config.shape;
    const EpTensor *indices = a->indices, *scatter = a->scatter;
    if (indices->num_dims != 2)
        return ep_error(EP_EINVAL, "exp_indices: wanted 2 dimensions [T, %u], got %u", s->num_topk,
                        indices->num_dims);
    EP_TRY(check_num_tokens(l, "exp_indices", indices));
    if (indices->dtype != EP_I64 && indices->dtype != EP_I32)
        return ep_error(EP_ETYPE, "exp_indices: wanted int32 or int64, got %s",
                        ep_dtype_name(indices->dtype));
    EP_TRY(check_tensor(l, "exp_indices", indices, indices->dtype, 2, -1, s->num_topk));
    if (scatter) EP_TRY(check_tensor(l, "full_scatter_indices", scatter, EP_I32, 2, -1, s->num_topk));
    EP_TRY(check_plan_tensor(l, a->plan, (uint32_t)indices->shape[0], &p->layout));
    p->comm = b->comm;
    p->exp_indices = indices->data;
    p->index_bytes = indices->dtype == EP_I64 ? 8 : 4;
    p->num_tokens = (uint32_t)indices->shape[0];
    p->plan = (int32_t *)a->plan->data;
    p->scatter_indices = scatter ? (const int32_t *)scatter->data : NULL;
    p->num_scatter_tokens = scatter ? (uint32_t)scatter->shape[0] : 0;
    p->sort_slots = a->sort_slots != 0;
    /* The host asks for the rows of the newest plan by its ticket. */
    p->ticket = ++l->ticket[b->buffer];
    l->newest[b->buffer] = p->plan;
    return 0;
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

/* Check the arguments of a dispatch, and fill in p. x has one row for every num_copies tokens. */
static int check_dispatch(const EpLayer *l, const EpDispatchArgs *a, uint32_t num_copies,
                          EpDispatchParams *p) {
    const EpShape *s = &l->config.shape;
    const EpTensor *x = a->x, *rows = a->rows;
    if (num_copies < 1)
        return ep_error(EP_EINVAL, "num_copies 0: must be at least 1 token for each row of the input");
    if (x->num_dims < 1 || x->shape[0] > (int64_t)(s->max_tokens / num_copies))
        return ep_error(EP_EINVAL, "input has %lld tokens: must be at most max_tokens, %u",
                        x->num_dims ? (long long)x->shape[0] : -1ll, s->max_tokens / num_copies);
    EP_TRY(check_rows(l, "input", x, -1));
    const int64_t T = x->shape[0] * num_copies;
    if (a->weight) EP_TRY(check_tensor(l, "weight", a->weight, EP_F32, 2, T, s->num_topk));
    EP_TRY(check_plan_tensor(l, a->plan, (uint32_t)T, &p->layout));
    EP_TRY(check_rows(l, "output", rows, -1));
    if ((a->weight != NULL) != (a->row_weight != NULL))
        return ep_error(EP_EINVAL, "weight and output weight: give both or neither");
    if (a->row_weight) EP_TRY(check_tensor(l, "output weight", a->row_weight, EP_F32, 1, rows->shape[0], -1));
    EP_TRY(check_recv_tensor(l, a->recv));
    if (rows->shape[0] > INT32_MAX)
        return ep_error(EP_EINVAL, "output has %lld rows: must be less than 2^31", (long long)rows->shape[0]);
    p->x = x->data;
    p->weight = a->weight ? (const float *)a->weight->data : NULL;
    p->plan = (const int32_t *)a->plan->data;
    p->recv = (int32_t *)a->recv->data;
    p->rows = rows->data;
    p->row_weight = a->row_weight ? (float *)a->row_weight->data : NULL;
    p->num_rows = (uint32_t)rows->shape[0];
    p->has_weight = a->weight != NULL;
    p->num_copies = num_copies;
    return 0;
}

static int prepare_dispatch(EpLayer *l, const EpCommBuffer *b, const EpDispatchArgs *a, EpDispatchParams *p) {
    p->comm = b->comm;
    p->comm.requires_grad = a->requires_grad != 0;
    return check_dispatch(l, a, 1, p);
}

static int check_combine(const EpLayer *l, const EpCombineArgs *a, EpCombineParams *p) {
    const EpShape *s = &l->config.shape;
    const EpTensor *rows = a->rows, *out = a->out;
    EP_TRY(check_num_tokens(l, "output", out));
    EP_TRY(check_rows(l, "output", out, -1));
    EP_TRY(check_rows(l, "input", rows, -1));
    if (a->row_weight) EP_TRY(check_tensor(l, "weight", a->row_weight, EP_F32, 1, rows->shape[0], -1));
    if (a->row_scalar) EP_TRY(check_tensor(l, "scalar", a->row_scalar, EP_F32, 1, rows->shape[0], -1));
    if ((a->row_scalar != NULL) != (a->out_scalar != NULL))
        return ep_error(EP_EINVAL, "scalar and output scalar: give both or neither");
    if (a->out_scalar)
        EP_TRY(check_tensor(l, "output scalar", a->out_scalar, EP_F32, 2, out->shape[0], s->num_topk));
    EP_TRY(check_plan_tensor(l, a->plan, (uint32_t)out->shape[0], &p->layout));
    EP_TRY(check_recv_tensor(l, a->recv));
    if (rows->shape[0] > INT32_MAX)
        return ep_error(EP_EINVAL, "input has %lld rows: must be less than 2^31", (long long)rows->shape[0]);
    p->rows = rows->data;
    p->row_weight = a->row_weight ? (const float *)a->row_weight->data : NULL;
    p->row_scalar = a->row_scalar ? (const float *)a->row_scalar->data : NULL;
    p->plan = (const int32_t *)a->plan->data;
    p->recv = (const int32_t *)a->recv->data;
    p->out = out->data;
    p->out_scalar = a->out_scalar ? (float *)a->out_scalar->data : NULL;
    p->num_rows = (uint32_t)rows->shape[0];
    p->has_weight = a->row_weight != NULL;
    p->has_scalar = a->row_scalar != NULL;
    return 0;
}

static int prepare_combine(EpLayer *l, const EpCommBuffer *b, const EpCombineArgs *a, EpCombineParams *p) {
    p->comm = b->comm;
    p->comm.requires_grad = a->requires_grad != 0;
    return check_combine(l, a, p);
}

/* ---- fused kernels ---- */

/* The grouped GEMM of a fused kernel: a [M][K] times w [L][N][K] gives out [M][N]. out has half as many
 * columns if the activation is gated. */
typedef struct {
    const EpTensor *a, *w, *bias, *out;
    uint32_t activation;
    double alpha, limit;
} Product;

/* Check a product, and fill in p except its offsets. */
static int check_product(const EpLayer *l, const Product *product, EpGemmParams *p) {
    const EpTensor *a = product->a, *w = product->w;
    const uint32_t activation = product->activation;
    const float alpha = (float)product->alpha, limit = (float)product->limit;
    const EpShape *s = &l->config.shape;
    const EpBackendKind kind = ep_heap_kind(l->heap);
    const int device = ep_heap_device(l->heap);
    if (!ep_heap_backend(l->heap)->dispatch_gemm)
        return ep_error(EP_EINVAL, "the fused kernels run on CUDA only, but this layer is on the CPU");
    if (s->dtype == EP_F32)
        return ep_error(EP_ETYPE,
                        "the fused kernels multiply bfloat16 and float16, but this layer has float32");
    if (!ep_gemm_is_activation(activation, alpha, limit))
        return ep_error(EP_EINVAL,
                        "activation %u (alpha %g, limit %g): must be an EpActivation with valid numbers",
                        activation, (double)alpha, (double)limit);
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
        {"bias", product->bias, s->dtype, 2, {L, N, -1}},
        {"output", product->out, s->dtype, 2, {M, ep_gemm_is_gated(activation) ? N / 2 : N, -1}},
    };
    for (uint32_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        EP_TRY(ep_tensor_check(&wanted[i], kind, device, 16));
    p->a = a->data;
    p->b = w->data;
    p->out = product->out->data;
    p->bias = product->bias ? product->bias->data : NULL;
    p->alpha = alpha;
    p->limit = limit;
    p->num_rows = (uint32_t)M;
    p->num_experts = (uint32_t)L;
    p->n = (uint32_t)N;
    p->k = (uint32_t)K;
    p->kind = EP_GEMM_FORWARD;
    p->activation = activation;
    p->is_f16 = s->dtype == EP_F16;
    return 0;
}

static int prepare_dispatch_gemm(EpLayer *l, const EpCommBuffer *b, const EpDispatchGemmArgs *a,
                                 EpDispatchGemmParams *p) {
    const EpDispatchArgs first = {a->x,          a->weight, a->plan,         a->rows,
                                  a->row_weight, a->recv,   a->requires_grad};
    const Product product = {a->rows, a->gemm_weight, a->bias, a->out, a->activation, a->alpha, a->limit};
    p->dispatch.comm = b->comm;
    p->dispatch.comm.requires_grad = a->requires_grad != 0;
    EP_TRY(check_dispatch(l, &first, a->num_copies, &p->dispatch));
    EP_TRY(check_product(l, &product, &p->gemm));
    if (a->num_tail && a->num_tail >= a->num_move)
        return ep_error(EP_EINVAL, "num_tail_sms %u: must be fewer than num_sm, %u", a->num_tail,
                        a->num_move);
    if (a->num_move < 1)
        return ep_error(EP_EINVAL, "num_sm 0: must be at least 1, so that a thread block moves tokens");
    p->gemm.offsets = p->dispatch.plan + p->dispatch.layout.expert_row_off;
    p->num_move_blocks = a->num_move;
    p->num_tail_blocks = a->num_tail;
    p->waits_for_expert = a->waits_for_expert != 0;
    return 0;
}

static int prepare_gemm_combine(EpLayer *l, const EpCommBuffer *b, const EpGemmCombineArgs *a,
                                EpGemmCombineParams *p) {
    const EpCombineArgs last = {a->rows, a->row_weight, NULL, a->plan,
                                a->recv, a->out,        NULL, a->requires_grad};
    const Product product = {a->a, a->gemm_weight, a->bias, a->rows, EP_ACT_NONE, 0, 0};
    p->combine.comm = b->comm;
    p->combine.comm.requires_grad = a->requires_grad != 0;
    EP_TRY(check_combine(l, &last, &p->combine));
    EP_TRY(check_product(l, &product, &p->gemm));
    if (a->num_move < 1 || a->num_reduce < 1)
        return ep_error(EP_EINVAL,
                        "num_sm %u, num_reduce_sms %u: both must be at least 1, so that thread blocks send "
                        "rows and add them up",
                        a->num_move, a->num_reduce);
    p->gemm.offsets = p->combine.plan + p->combine.layout.expert_row_off;
    p->num_move_blocks = a->num_move;
    p->num_reduce_blocks = a->num_reduce;
    p->is_serial = a->is_serial != 0;
    return 0;
}

/* ---- run ---- */

/* The parameters of any operation. */
typedef union {
    EpPlanParams plan;
    EpDispatchParams dispatch;
    EpCombineParams combine;
    EpDispatchGemmParams dispatch_gemm;
    EpGemmCombineParams gemm_combine;
} Params;

/* Check the arguments of an operation and fill in its parameters, which are zeroed. */
static int prepare(EpLayer *l, const EpCommBuffer *b, uint32_t op, const void *args, Params *p) {
    switch (op) {
#define X(NAME, name, Type, text) \
    case EP_OP_##NAME: return prepare_##name(l, b, (const Ep##Type##Args *)args, &p->name);
#define B(NAME, name, Type, text)
        EP_OPERATIONS(X, B)
#undef X
#undef B
    default: return ep_error(EP_EINVAL, "operation %u: must be an EpOpKind with arguments", op);
    }
}

static uint32_t num_tokens_of(uint32_t op, const Params *p) {
    switch (op) {
    case EP_OP_PLAN: return p->plan.num_tokens;
    case EP_OP_COMBINE: return p->combine.layout.num_tokens;
    case EP_OP_GEMM_COMBINE: return p->gemm_combine.combine.layout.num_tokens;
    default: return p->dispatch.layout.num_tokens; /* dispatch is the first member of dispatch_gemm */
    }
}

static int launch(const EpLayer *l, uint32_t op, const Params *p, void *stream) {
    const EpBackend *backend = ep_heap_backend(l->heap);
    const int device = ep_heap_device(l->heap);
    switch (op) {
    case EP_OP_PLAN: return backend->plan(device, &p->plan, stream);
    case EP_OP_DISPATCH: return backend->dispatch(device, &p->dispatch, l->config.num_sm, stream);
    case EP_OP_COMBINE: return backend->combine(device, &p->combine, l->config.num_sm, stream);
    case EP_OP_DISPATCH_GEMM: return backend->dispatch_gemm(device, &p->dispatch_gemm, stream);
    default: return backend->gemm_combine(device, &p->gemm_combine, stream);
    }
}

int ep_layer_run(EpLayer *l, uint32_t buffer, uint32_t op, const void *args, void *stream) {
    EpCommBuffer *b;
    Params p;
    memset(&p, 0, sizeof p);
    EP_TRY(ep_layer_begin(l, buffer, stream, &b));
    int code = prepare(l, b, op, args, &p);
    if (code) return ep_layer_fail(l, buffer, op, code, stream);
    const uint64_t record = ep_comm_begin_call(b, op, num_tokens_of(op, &p), 0, stream);
    code = launch(l, op, &p, stream);
    return ep_layer_end(l, b, op, record, code, stream);
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
