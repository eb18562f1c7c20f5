/* layer.c - route -> plan -> dispatch -> (gemm) -> combine: checks arguments, fills in what a stage needs,
 * calls the backend.
 *
 * An argument that this rank cannot accept must not leave the others waiting.  So a failed check still
 * enters the operation, with its code in the header (ep_layer_refuse): the operation is void on every
 * rank, every rank raises, and the layer goes on with the next call. */
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "error.h"
#include "protocol/flags.h"
#include "tensor.h"
#include "world.h"

#define MAX_BUFFERS 16u

struct EpLayer {
    EpHeap *heap;
    EpLayerConfig config;
    atomic_int num_refs;
    bool closed;
    uint64_t ticket[MAX_BUFFERS]; /* of the newest plan */
    EpCommBuffer buffers[MAX_BUFFERS];
};

/* ---- configuration ---- */

int ep_layer_check_config(const EpLayerConfig *config, uint64_t *num_bytes) {
    const EpShape *s = &config->shape;
    if (s->num_ranks < 1 || s->num_ranks > EP_MAX_RANKS)
        return ep_error(EP_EINVAL, "world of %u ranks: 1 to %u", s->num_ranks, EP_MAX_RANKS);
    if (s->num_experts < 1 || s->num_experts > EP_MAX_EXPERTS || s->num_experts % s->num_ranks)
        return ep_error(EP_EINVAL, "%u experts on %u ranks: must be a multiple of the ranks, at most %u", s->num_experts, s->num_ranks,
                        EP_MAX_EXPERTS);
    if (s->num_topk < 1 || s->num_topk > EP_MAX_TOPK) return ep_error(EP_EINVAL, "topk %u: 1 to %u", s->num_topk, EP_MAX_TOPK);
    if (s->dtype > EP_BF16) return ep_error(EP_ETYPE, "dtype must be float32, float16 or bfloat16");
    if (s->hidden < 1 || s->hidden > 1u << 20) return ep_error(EP_EINVAL, "hidden %u: 1 to %u", s->hidden, 1u << 20);
    if ((uint64_t)s->hidden * ep_dtype_bytes(s->dtype) % 16)
        return ep_error(EP_EINVAL, "hidden %u: a row must be a multiple of 16 bytes, it has %llu", s->hidden,
                        (unsigned long long)s->hidden * ep_dtype_bytes(s->dtype));
    if (s->max_tokens < 1 || (uint64_t)s->max_tokens * s->num_topk * s->num_ranks >= 1ull << 31)
        return ep_error(EP_EINVAL, "max_tokens %u: ranks * max_tokens * topk must be in [1, 2^31)", s->max_tokens);
    if (s->combine_mode > EP_COMBINE_GATHER) return ep_error(EP_EINVAL, "unknown combine mode");
    if (s->capacity < 1 || s->capacity >= 1u << 31) return ep_error(EP_EINVAL, "capacity %u: 1 to 2^31 - 1 rows", s->capacity);
    if (config->num_buffers < 1 || config->num_buffers > MAX_BUFFERS)
        return ep_error(EP_EINVAL, "num_buffers %u: 1 to %u", config->num_buffers, MAX_BUFFERS);
    if (config->num_sm < 1 || config->num_sm > 1024) return ep_error(EP_EINVAL, "num_sm %u: 1 to 1024", config->num_sm);
    *num_bytes = config->num_buffers * ep_align_u64(ep_comm_layout(s).num_bytes, 256);
    return 0;
}

/* What a rank says of the layer it makes: all must say the same, but for num_sm. */
typedef struct {
    EpShape shape;
    uint32_t num_buffers;
    int32_t status;
} Offer;

/* 0, or what is wrong with any rank's offer; all ranks fail, or none. */
static int agree(EpWorld *world, const EpLayerConfig *config, int status) {
    static const char *const names[] = {"ranks", "num_experts",  "topk",     "max_tokens", "hidden",
                                        "dtype", "combine_mode", "capacity", "num_buffers"};
    Offer mine = {config->shape, config->num_buffers, status}, all[EP_MAX_RANKS];
    char why[512];
    strncpy(why, ep_error_text(), sizeof why - 1);
    why[sizeof why - 1] = 0;
    EP_TRY(ep_world_exchange(world, &mine, sizeof mine, all));
    if (status) return ep_error(status, "%s", why);
    for (uint32_t r = 0; r < ep_world_size(world); r++)
        if (all[r].status) return ep_error(EP_EPEER, "rank %u could not make its layer (%s)", r, ep_error_name(all[r].status));
    for (uint32_t r = 1; r < ep_world_size(world); r++) {
        const uint32_t *first = &all[0].shape.num_ranks, *its = &all[r].shape.num_ranks;
        for (uint32_t i = 0; i < sizeof names / sizeof names[0]; i++)
            if (its[i] != first[i])
                return ep_error(EP_EMISMATCH, "ranks disagree in %s: rank %u has %u, rank 0 has %u", names[i], r, its[i], first[i]);
    }
    return 0;
}
_Static_assert(offsetof(Offer, num_buffers) == 8 * sizeof(uint32_t), "agree() walks the fields as one array");

static int create(EpHeap *heap, const EpLayerConfig *config, EpLayer **out) {
    uint64_t num_bytes;
    uint32_t made = 0;
    uint16_t number = ep_world_number_layer(ep_heap_world(heap));
    int code = ep_layer_check_config(config, &num_bytes);
    if (!code && config->shape.num_ranks != ep_world_size(ep_heap_world(heap)))
        code = ep_error(EP_EINVAL, "a layer of %u ranks in a world of %u", config->shape.num_ranks, ep_world_size(ep_heap_world(heap)));
    EpLayer *l = code ? NULL : (EpLayer *)calloc(1, sizeof *l);
    if (!code && !l) code = ep_error(EP_ENOMEM, "no memory for a layer");
    code = agree(ep_heap_world(heap), config, code);
    if (code) {
        free(l);
        return code;
    }
    l->heap = ep_heap_retain(heap), l->config = *config;
    atomic_init(&l->num_refs, 1);
    for (; made < config->num_buffers && !code; made++) {
        l->buffers[made].of = number, l->buffers[made].buffer = (uint16_t)made;
        code = ep_comm_open(heap, &config->shape, &l->buffers[made]);
    }
    if (code) { /* the same on all ranks: so all give back what there was room for */
        char text[512];
        strncpy(text, ep_error_text(), sizeof text - 1);
        text[sizeof text - 1] = 0;
        for (uint32_t i = 0; i < made; i++)
            if (l->buffers[i].comm.host) ep_heap_free(heap, l->buffers[i].off);
        ep_layer_release(l);
        return ep_error(code, "%s", text);
    }
    *out = l;
    return 0;
}

int ep_layer_create(EpHeap *heap, const EpLayerConfig *config, EpLayer **out) {
    uint64_t note = ep_world_note(ep_heap_world(heap), &(EpNote){.what = EP_DID_LAYER_CREATE});
    int code = create(heap, config, out);
    ep_world_noted(ep_heap_world(heap), note);
    return code;
}

int ep_layer_close(EpLayer *l) {
    int code = 0;
    if (l->closed) return 0;
    l->closed = true;
    uint64_t note = ep_world_note(ep_heap_world(l->heap), &(EpNote){.what = EP_DID_LAYER_CLOSE, .of = l->buffers[0].of});
    for (uint32_t i = 0; i < l->config.num_buffers && !code; i++) code = ep_heap_free(l->heap, l->buffers[i].off);
    ep_world_noted(ep_heap_world(l->heap), note);
    return code;
}

void ep_layer_release(EpLayer *l) {
    if (!l || atomic_fetch_sub(&l->num_refs, 1) != 1) return;
    if (ep_world_is_forked(ep_heap_world(l->heap))) return;
    for (uint32_t i = 0; i < l->config.num_buffers; i++) ep_comm_close(l->heap, &l->buffers[i]);
    ep_heap_release(l->heap);
    free(l);
}

EpHeap *ep_layer_heap(EpLayer *l) { return l->heap; }

int ep_layer_plan_words(EpLayer *l, uint64_t num_tokens, uint64_t *num_words) {
    if (num_tokens > l->config.shape.max_tokens)
        return ep_error(EP_EINVAL, "%llu tokens; max_tokens is %u", (unsigned long long)num_tokens, l->config.shape.max_tokens);
    *num_words = ep_plan_layout(&l->config.shape, (uint32_t)num_tokens).num_words;
    return 0;
}

/* ---- arguments ---- */

/* A contiguous tensor on the layer's device; a wanted size of -1 is any. */
static int check_tensor(const EpLayer *l, const char *name, const EpTensor *t, uint32_t dtype, uint32_t num_dims, int64_t d0, int64_t d1) {
    const EpWanted wanted = {name, t, dtype, num_dims, {d0, d1, -1}};
    return ep_tensor_check(&wanted, ep_heap_kind(l->heap), ep_heap_device(l->heap), 1);
}

/* [num_rows][H], each row of which moves 16 bytes at a time. */
static int check_rows(const EpLayer *l, const char *name, const EpTensor *t, int64_t num_rows) {
    const EpWanted wanted = {name, t, l->config.shape.dtype, 2, {num_rows, l->config.shape.hidden, -1}};
    return ep_tensor_check(&wanted, ep_heap_kind(l->heap), ep_heap_device(l->heap), 16);
}

/* Ready for an operation on a buffer: nothing has gone wrong before, and the stream comes in order. */
static int begin(EpLayer *l, uint32_t buffer, void *stream, EpCommBuffer **out) {
    if (l->closed) return ep_error(EP_ECLOSED, "this layer is finalized");
    if (buffer >= l->config.num_buffers) return ep_error(EP_EINVAL, "buffer %u of %u", buffer, l->config.num_buffers);
    EpCommBuffer *b = &l->buffers[buffer];
    EP_TRY(ep_comm_check(l->heap, b, stream));
    if (b->has_stream && b->last_stream != stream) EP_TRY(ep_heap_backend(l->heap)->order(ep_heap_device(l->heap), b->last_stream, stream));
    b->last_stream = stream, b->has_stream = true;
    b->comm.timeout_ns = ep_world_timeout_ns(ep_heap_world(l->heap));
    *out = b;
    return 0;
}

/* On the CPU an operation is over when it returns, and so is its failure known. */
static int end(EpLayer *l, EpCommBuffer *b, uint64_t note, int code, void *stream) {
    ep_world_noted(ep_heap_world(l->heap), note);
    if (code) return code;
    return ep_heap_kind(l->heap) == EP_CPU ? ep_comm_check(l->heap, b, stream) : 0;
}

int ep_layer_refuse(EpLayer *l, uint32_t buffer, uint32_t op, int code, void *stream) {
    EpCommBuffer *b;
    if (code >= 0) return ep_error(EP_EINVAL, "a refusal needs a negative code");
    EP_TRY(begin(l, buffer, stream, &b));
    EpComm comm = b->comm;
    comm.status = code;
    uint64_t note = ep_comm_note(l->heap, b, op, 0, code);
    code = ep_heap_backend(l->heap)->enter(ep_heap_device(l->heap), &comm, op, stream);
    ep_world_noted(ep_heap_world(l->heap), note);
    return code;
}

/* Tell the others, keep this rank's own reason. */
static int refuse(EpLayer *l, uint32_t buffer, uint32_t op, int code, void *stream) {
    char text[512];
    strncpy(text, ep_error_text(), sizeof text - 1);
    text[sizeof text - 1] = 0;
    ep_layer_refuse(l, buffer, op, code, stream);
    return ep_error(code, "%s", text);
}

int ep_layer_barrier(EpLayer *l, uint32_t buffer, void *stream) {
    EpCommBuffer *b;
    EP_TRY(begin(l, buffer, stream, &b));
    uint64_t note = ep_comm_note(l->heap, b, EP_OP_BARRIER, 0, 0);
    int done = ep_heap_backend(l->heap)->enter(ep_heap_device(l->heap), &b->comm, EP_OP_BARRIER, stream);
    return end(l, b, note, done, stream);
}

int ep_layer_sync(EpLayer *l, void *stream) {
    if (l->closed) return ep_error(EP_ECLOSED, "this layer is finalized");
    EP_TRY(ep_heap_backend(l->heap)->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
    for (uint32_t i = 0; i < l->config.num_buffers; i++) EP_TRY(ep_comm_check(l->heap, &l->buffers[i], stream));
    return 0;
}

int ep_layer_set_epoch(EpLayer *l, uint32_t buffer, uint64_t epoch, void *stream) {
    EpCommBuffer *b;
    EP_TRY(begin(l, buffer, stream, &b));
    if (epoch == 0) return ep_error(EP_EINVAL, "epoch 0: it stands for no operation");
    uint64_t before = b->num_ops = epoch - 1;
    const EpBackend *backend = ep_heap_backend(l->heap);
    EP_TRY(backend->copy(ep_heap_device(l->heap), &ep_local(&b->comm)->epoch, &before, sizeof before, stream));
    return backend->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap));
}

/* ---- stages ---- */

static int check_plan_tensor(const EpLayer *l, const EpTensor *plan, uint32_t num_tokens, EpPlanLayout *layout) {
    *layout = ep_plan_layout(&l->config.shape, num_tokens);
    return check_tensor(l, "plan", plan, EP_I32, 1, (int64_t)layout->num_words, -1);
}

static int check_recv_tensor(const EpLayer *l, const EpTensor *recv) {
    const EpShape *s = &l->config.shape;
    return check_tensor(l, "recv", recv, EP_I32, 1, (int64_t)s->num_ranks * s->max_tokens * (1 + s->num_topk), -1);
}

static int check_num_tokens(const EpLayer *l, const char *name, const EpTensor *t) {
    if (t->num_dims < 1 || t->shape[0] > (int64_t)l->config.shape.max_tokens)
        return ep_error(EP_EINVAL, "%s has %lld tokens; max_tokens is %u", name, t->num_dims ? (long long)t->shape[0] : -1ll,
                        l->config.shape.max_tokens);
    return 0;
}

static int check_plan(const EpLayer *l, const EpTensor *indices, const EpTensor *scatter, const EpTensor *plan, EpPlanParams *p) {
    const EpShape *s = &l->config.shape;
    if (indices->num_dims != 2)
        return ep_error(EP_EINVAL, "exp_indices: wanted 2 dimensions [T, %u], got %u", s->num_topk, indices->num_dims);
    EP_TRY(check_num_tokens(l, "exp_indices", indices));
    if (indices->dtype != EP_I64 && indices->dtype != EP_I32)
        return ep_error(EP_ETYPE, "exp_indices: wanted int32 or int64, got %s", ep_dtype_name(indices->dtype));
    EP_TRY(check_tensor(l, "exp_indices", indices, indices->dtype, 2, -1, s->num_topk));
    if (scatter) EP_TRY(check_tensor(l, "full_scatter_indices", scatter, EP_I32, 2, -1, s->num_topk));
    EP_TRY(check_plan_tensor(l, plan, (uint32_t)indices->shape[0], &p->layout));
    p->exp_indices = indices->data, p->index_bytes = indices->dtype == EP_I64 ? 8 : 4;
    p->num_tokens = (uint32_t)indices->shape[0], p->plan = (int32_t *)plan->data;
    p->scatter_indices = scatter ? (const int32_t *)scatter->data : NULL;
    p->num_scatter_tokens = scatter ? (uint32_t)scatter->shape[0] : 0;
    return 0;
}

int ep_layer_plan(EpLayer *l, uint32_t buffer, const EpTensor *indices, const EpTensor *scatter, const EpTensor *plan, void *stream) {
    EpCommBuffer *b;
    EpPlanParams p = {0};
    EP_TRY(begin(l, buffer, stream, &b));
    int code = check_plan(l, indices, scatter, plan, &p);
    if (code) return refuse(l, buffer, EP_OP_PLAN, code, stream);
    p.comm = b->comm, p.ticket = ++l->ticket[buffer];
    uint64_t note = ep_comm_note(l->heap, b, EP_OP_PLAN, p.layout.num_tokens, 0);
    int done = ep_heap_backend(l->heap)->plan(ep_heap_device(l->heap), &p, stream);
    return end(l, b, note, done, stream);
}

int ep_layer_num_rows(EpLayer *l, uint32_t buffer, void *stream, uint32_t *num_rows) {
    if (l->closed) return ep_error(EP_ECLOSED, "this layer is finalized");
    if (buffer >= l->config.num_buffers) return ep_error(EP_EINVAL, "buffer %u of %u", buffer, l->config.num_buffers);
    EpCommBuffer *b = &l->buffers[buffer];
    const EpPlanResult *result = &b->comm.host->plan;
    uint64_t until = ep_now_ns() + 20000000u;                             /* a plan takes microseconds; past this, wait with the stream */
    while (ep_ld_acquire_sys_u64(&result->ticket) != l->ticket[buffer]) { /* the result is now readable */
        if (ep_now_ns() < until) continue;
        EP_TRY(ep_heap_backend(l->heap)->sync(ep_heap_device(l->heap), stream, ep_heap_world(l->heap)));
        if (ep_ld_acquire_sys_u64(&result->ticket) == l->ticket[buffer]) break;
        EP_TRY(ep_comm_check(l->heap, b, stream));
        return ep_error(EP_EINVAL, "there is no plan to read the rows of");
    }
    if (result->status) {
        EP_TRY(ep_heap_backend(l->heap)->sync(ep_heap_device(l->heap), stream,
                                              ep_heap_world(l->heap))); /* the record comes with the kernel's end */
        EP_TRY(ep_comm_check(l->heap, b, stream));
        return ep_error(EP_EPEER, "the plan has failed before");
    }
    *num_rows = result->num_rows;
    return 0;
}

static int check_dispatch(const EpLayer *l, const EpTensor *x, const EpTensor *weight, const EpTensor *plan, const EpTensor *rows,
                          const EpTensor *row_weight, const EpTensor *recv, EpDispatchParams *p) {
    const EpShape *s = &l->config.shape;
    EP_TRY(check_num_tokens(l, "input", x));
    EP_TRY(check_rows(l, "input", x, -1));
    if (weight) EP_TRY(check_tensor(l, "weight", weight, EP_F32, 2, x->shape[0], s->num_topk));
    EP_TRY(check_plan_tensor(l, plan, (uint32_t)x->shape[0], &p->layout));
    EP_TRY(check_rows(l, "output", rows, -1));
    if ((weight != NULL) != (row_weight != NULL)) return ep_error(EP_EINVAL, "weights come in and go out together");
    if (row_weight) EP_TRY(check_tensor(l, "output weight", row_weight, EP_F32, 1, rows->shape[0], -1));
    EP_TRY(check_recv_tensor(l, recv));
    if (rows->shape[0] > INT32_MAX) return ep_error(EP_EINVAL, "output has too many rows");
    p->x = x->data, p->weight = weight ? (const float *)weight->data : NULL, p->plan = (const int32_t *)plan->data;
    p->recv = (int32_t *)recv->data;
    p->rows = rows->data, p->row_weight = row_weight ? (float *)row_weight->data : NULL;
    p->num_rows = (uint32_t)rows->shape[0], p->has_weight = weight != NULL;
    return 0;
}

int ep_layer_dispatch(EpLayer *l, uint32_t buffer, const EpTensor *x, const EpTensor *weight, const EpTensor *plan, const EpTensor *rows,
                      const EpTensor *row_weight, const EpTensor *recv, void *stream) {
    EpCommBuffer *b;
    EpDispatchParams p = {0};
    EP_TRY(begin(l, buffer, stream, &b));
    int code = check_dispatch(l, x, weight, plan, rows, row_weight, recv, &p);
    if (code) return refuse(l, buffer, EP_OP_DISPATCH, code, stream);
    p.comm = b->comm;
    uint64_t note = ep_comm_note(l->heap, b, EP_OP_DISPATCH, p.layout.num_tokens, 0);
    int done = ep_heap_backend(l->heap)->dispatch(ep_heap_device(l->heap), &p, l->config.num_sm, stream);
    return end(l, b, note, done, stream);
}

static int check_combine(const EpLayer *l, const EpTensor *rows, const EpTensor *row_weight, const EpTensor *row_scalar,
                         const EpTensor *plan, const EpTensor *recv, const EpTensor *out, const EpTensor *out_scalar, EpCombineParams *p) {
    const EpShape *s = &l->config.shape;
    EP_TRY(check_num_tokens(l, "output", out));
    EP_TRY(check_rows(l, "output", out, -1));
    EP_TRY(check_rows(l, "input", rows, -1));
    if (row_weight) EP_TRY(check_tensor(l, "weight", row_weight, EP_F32, 1, rows->shape[0], -1));
    if (row_scalar) EP_TRY(check_tensor(l, "scalar", row_scalar, EP_F32, 1, rows->shape[0], -1));
    if ((row_scalar != NULL) != (out_scalar != NULL)) return ep_error(EP_EINVAL, "scalars come in and go out together");
    if (out_scalar) EP_TRY(check_tensor(l, "output scalar", out_scalar, EP_F32, 2, out->shape[0], s->num_topk));
    EP_TRY(check_plan_tensor(l, plan, (uint32_t)out->shape[0], &p->layout));
    EP_TRY(check_recv_tensor(l, recv));
    if (rows->shape[0] > INT32_MAX) return ep_error(EP_EINVAL, "input has too many rows");
    p->rows = rows->data, p->row_weight = row_weight ? (const float *)row_weight->data : NULL;
    p->row_scalar = row_scalar ? (const float *)row_scalar->data : NULL, p->plan = (const int32_t *)plan->data;
    p->recv = (const int32_t *)recv->data, p->out = out->data, p->out_scalar = out_scalar ? (float *)out_scalar->data : NULL;
    p->num_rows = (uint32_t)rows->shape[0], p->has_weight = row_weight != NULL, p->has_scalar = row_scalar != NULL;
    return 0;
}

int ep_layer_combine(EpLayer *l, uint32_t buffer, const EpTensor *rows, const EpTensor *row_weight, const EpTensor *row_scalar,
                     const EpTensor *plan, const EpTensor *recv, const EpTensor *out, const EpTensor *out_scalar, void *stream) {
    EpCommBuffer *b;
    EpCombineParams p = {0};
    EP_TRY(begin(l, buffer, stream, &b));
    int code = check_combine(l, rows, row_weight, row_scalar, plan, recv, out, out_scalar, &p);
    if (code) return refuse(l, buffer, EP_OP_COMBINE, code, stream);
    p.comm = b->comm;
    uint64_t note = ep_comm_note(l->heap, b, EP_OP_COMBINE, p.layout.num_tokens, 0);
    int done = ep_heap_backend(l->heap)->combine(ep_heap_device(l->heap), &p, l->config.num_sm, stream);
    return end(l, b, note, done, stream);
}
