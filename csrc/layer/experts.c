/* experts.c - the experts of a layer from tokens to tokens: the calls of several operations.
 *
 * Exports ep_layer_experts, ep_layer_experts_down, ep_layer_experts_up and ep_layer_ll_experts.
 * Between two operations of a call only this rank's own kernels are launched. If one of them cannot be
 * launched, this rank reports the error to the others in the operation that they enter next.
 * Invariant: a call holds the lock of its buffer from its first operation to its last. */
#include "layer/layer_state.h"
#include "layer/prepare.h"
#include "protocol/flags.h"
#include "protocol/plan.h"
#include "runtime/error.h"
#include "runtime/tensor.h"
#include "runtime/world.h"

/* The frame of a call. */
typedef struct {
    EpLayer *layer;
    uint32_t buffer;
    void *stream;
    EpTensor offsets; /* where the rows of each local expert begin: a part of the plan, or of a handle */
} Call;

static int run(const Call *c, uint32_t op, const void *args, EpRan *ran) {
    return ep_layer_run_locked(c->layer, c->buffer, op, args, NULL, c->stream, ran);
}

/* Report this rank's error, if there is one, in the operation that the other ranks enter next. */
static int report(const Call *c, uint32_t next_op, int code) {
    return code ? ep_layer_fail(c->layer, c->buffer, next_op, code, c->stream) : 0;
}

static int set_offsets(Call *c, const char *name, const EpTensor *words, uint64_t at) {
    const EpLayer *l = c->layer;
    const int64_t num = (int64_t)ep_num_local_experts(&l->config.shape) + 1;
    EP_TRY(ep_layer_check_tensor(l, name, words, EP_I32, 1, -1, -1));
    if (words->shape[0] < (int64_t)at + num)
        return ep_error(EP_EINVAL, "a %s of %lld words: wanted at least %lld", name,
                        (long long)words->shape[0], (long long)at + (long long)num);
    c->offsets = *words;
    c->offsets.data = (int32_t *)words->data + at;
    c->offsets.shape[0] = num;
    return 0;
}
static int set_offsets_of_plan(Call *c, const EpTensor *plan) {
    return set_offsets(c, "plan", plan, ep_plan_layout(&c->layer->config.shape, 0).expert_row_off);
}

/* Launch a product of rows that no communication accompanies. It counts its tiles where the fused kernels
 * count theirs: the operations of a buffer and the products between them do not overlap, also in a replayed
 * graph. A product after the last operation of a call needs order_products. */
static int multiply(const Call *c, EpGemm g) {
    EpTensor counter = {.data = &ep_local(&c->layer->buffers[c->buffer].comm)->queue_tiles,
                        .kind = g.a->kind,
                        .device = g.a->device,
                        .dtype = EP_I64,
                        .element_bytes = 8,
                        .num_dims = 1,
                        .shape = {1},
                        .stride = {1}};
    g.offsets = &c->offsets;
    g.tile_counter = &counter;
    g.expected_rows = ep_layer_expected_rows(&c->layer->config.shape);
    return ep_grouped_gemm(&g, c->stream);
}

/* The next operation on the buffer may be on another stream, and sets the count of tiles to 0. Let it come
 * after the products that this call has launched. */
static int order_products(const Call *c) {
    const EpHeap *h = c->layer->heap;
    const EpBackend *backend = ep_heap_backend(h);
    return backend->order ? backend->order(ep_heap_device(h), &c->layer->buffers[c->buffer].comm, c->stream)
                          : 0;
}

/* LoRA beside a weight: the rows times `in` go to `rows`, whose product with `out` is added. in NULL: there
 * is none. row_tag: NULL, or of the rows of a mixture, in which an adapter has of_adapter columns. */
typedef struct {
    const EpTensor *in, *out, *rows, *row_tag;
    uint32_t of_adapter;
} Low;
#define LOW_OF(a, name) ((Low){(a)->name##_low_in, (a)->name##_low_out, (a)->name##_low_rows, NULL, 0})
#define MIXED_LOW_OF(a, name) \
    ((Low){(a)->name##_low_in, (a)->name##_low_out, (a)->name##_low_rows, (a)->row_tag, (a)->adapter_columns})

static bool has_low(Low low) { return low.in || low.out || low.rows; }

/* Launch the product of rows with LoRA's first factors, if there is LoRA. */
static int multiply_low(const Call *c, uint32_t kind, const EpTensor *rows, Low low) {
    if (!has_low(low)) return 0;
    if (!low.in || !low.out || !low.rows)
        return ep_error(EP_EINVAL, "LoRA: low_in, low_out and low_rows must be all there, or none");
    return multiply(c, (EpGemm){.kind = kind,
                                .a = rows,
                                .b = low.in,
                                .out = low.rows,
                                .row_tag = low.row_tag,
                                .of_adapter = low.of_adapter});
}

/* Launch a product of rows with a weight, and LoRA's beside it. */
static int multiply_with(const Call *c, EpGemm g, Low low) {
    EP_TRY(multiply_low(c, g.kind, g.a, low));
    g.low_a = low.rows;
    g.low_b = low.out;
    return multiply(c, g);
}

/* Whether both products of experts share a launch with the communication beside them. up, down: tensors
 * whose dimension up_dim has the rows of the gate and up weights, and down_dim the columns of the down
 * weights. */
static bool fuses(const Call *c, const EpTensor *up, uint32_t up_dim, const EpTensor *down, uint32_t down_dim,
                  bool has_four_bits, bool trains) {
    const EpLayer *l = c->layer;
    if (up->num_dims <= up_dim || down->num_dims <= down_dim) return false; /* the checks refuse them */
    const int64_t columns = up->shape[up_dim], inner = down->shape[down_dim];
    const uint32_t H = l->config.shape.hidden, n = (uint32_t)columns, k = (uint32_t)inner;
    const EpProduct first = {.n = n, .k = H, .columns = n, .has_four_bits = has_four_bits, .trains = trains};
    const EpProduct second = {.n = H, .k = k, .columns = n, .has_four_bits = has_four_bits, .trains = trains};
    return columns < UINT32_MAX && inner < UINT32_MAX && ep_layer_fuses(&l->config, l->has_fused, &first) &&
           ep_layer_fuses(&l->config, l->has_fused, &second);
}

/* ---- checks ---- */

/* The weights of the experts. With scales they have 4 bits, and two are a byte. */
typedef struct {
    const EpTensor *gate_up, *gate_up_bias, *gate_up_scale, *gate_up_zero;
    const EpTensor *down, *down_bias, *down_scale, *down_zero;
    EpActivation activation;
} Weights;
#define WEIGHTS_OF(a)                                                                     \
    {(a)->gate_up,   (a)->gate_up_bias, (a)->gate_up_scale, (a)->gate_up_zero, (a)->down, \
     (a)->down_bias, (a)->down_scale,   (a)->down_zero,     (a)->activation}

/* Check the weights, under the names that users of EPMoE know. The products check scales and zeros. */
static int check_weights(const Call *c, const Weights *w) {
    const EpShape *s = &c->layer->config.shape;
    const EpBackendKind kind = ep_heap_kind(c->layer->heap);
    const int64_t L = ep_num_local_experts(s), H = s->hidden, in_number = w->down_scale ? 2 : 1;
    const uint32_t dtype = w->down_scale ? EP_U8 : s->dtype;
    if (!w->gate_up_scale != !w->down_scale)
        return ep_error(EP_EINVAL, "gate_up_proj and down_proj: must both have 4 bits, or neither");
    if (w->down->num_dims != 3)
        return ep_error(EP_EINVAL, "down_proj: wanted 3 dimensions, got %u", w->down->num_dims);
    const int64_t inner = w->down->shape[2] * in_number,
                  columns = EP_ACT_IS_GATED(w->activation.kind) ? 2 * inner : inner;
    const EpWanted wanted[] = {
        {"down_proj", w->down, dtype, 3, {L, H, inner / in_number}},
        {"gate_up_proj", w->gate_up, dtype, 3, {L, columns, H / in_number}},
        {"gate_up_proj_bias", w->gate_up_bias, s->dtype, 2, {L, columns, -1}},
        {"down_proj_bias", w->down_bias, s->dtype, 2, {L, H, -1}},
    };
    for (uint32_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        EP_TRY(ep_tensor_check(&wanted[i], kind, ep_heap_device(c->layer->heap), kind == EP_CUDA ? 16 : 2));
    return 0;
}

/* Check tokens, their choices and weights. indices: NULL if there is a plan already. */
static int check_tokens(const Call *c, const EpTensor *x, const EpTensor *indices, const EpTensor *weight) {
    const EpLayer *l = c->layer;
    EP_TRY(ep_layer_check_num_tokens(l, "x", x));
    EP_TRY(ep_layer_check_rows(l, "x", x, -1));
    if (indices && indices->dtype != EP_I64 && indices->dtype != EP_I32)
        return ep_error(EP_ETYPE, "topk_idx: wanted int32 or int64, got %s", ep_dtype_name(indices->dtype));
    if (indices)
        EP_TRY(ep_layer_check_tensor(l, "topk_idx", indices, indices->dtype, 2, x->shape[0],
                                     l->config.shape.num_topk));
    return ep_layer_check_tensor(l, "topk_weights", weight, EP_F32, 2, x->shape[0], l->config.shape.num_topk);
}

/* Check a mixture of adapters. The operations check the tags themselves. */
static int check_mixture(const EpTensor *tag, const EpTensor *row_tag, uint32_t of_adapter) {
    if (!tag != !row_tag || !tag != !of_adapter || of_adapter % 8)
        return ep_error(EP_EINVAL,
                        "a mixture of adapters: wanted tag, row_tag and adapter_columns, a multiple of 8, or "
                        "none of them; got %u columns",
                        of_adapter);
    return 0;
}

static int check_balance(const Call *c, const EpBalance *b, const EpTensor *moved, const EpTensor *held) {
    const EpLayerConfig *config = &c->layer->config;
    const uint32_t L = ep_num_local_experts(&config->shape);
    const EpWanted table = {"held", held, EP_I32, 2, {(int64_t)config->shape.num_experts + 1, 2, -1, -1}};
    if (b->num_slots >= L)
        return ep_error(EP_EINVAL, "helper_slots %u: must be fewer than the %u experts of a rank",
                        b->num_slots, L);
    if (b->num_slots && (!config->host_counts || !moved))
        return ep_error(EP_EINVAL, "helper_slots %u: wanted a layer with host_counts, and moved",
                        b->num_slots);
    return ep_tensor_check(&table, EP_CPU, 0, 4);
}

/* ---- forward ---- */

static int multiply_up(const Call *c, const Weights *w, const EpTensor *rows, const EpTensor *out,
                       const EpTensor *saved, Low low) {
    return multiply_with(c,
                         (EpGemm){.kind = EP_GEMM_FORWARD,
                                  .activation = w->activation,
                                  .a = rows,
                                  .b = w->gate_up,
                                  .b_scale = w->gate_up_scale,
                                  .b_zero = w->gate_up_zero,
                                  .bias = w->gate_up_bias,
                                  .out = out,
                                  .saved = saved},
                         low);
}
static int multiply_down(const Call *c, const Weights *w, const EpTensor *rows, const EpTensor *out,
                         Low low) {
    return multiply_with(c,
                         (EpGemm){.kind = EP_GEMM_FORWARD,
                                  .a = rows,
                                  .b = w->down,
                                  .b_scale = w->down_scale,
                                  .b_zero = w->down_zero,
                                  .bias = w->down_bias,
                                  .out = out},
                         low);
}

/* After the first plan: find who helps whom, let the weights travel, and make a plan of the moved choices.
 * code: becomes what the next operation has to report. */
static int help(Call *c, const EpExpertsArgs *a, const EpBalance *balance, EpRan *ran, int *code) {
    EpMoveChoicesParams *moves = &c->layer->moves[c->buffer];
    const EpPlanArgs plan = {.indices = a->moved, .plan = a->plan};
    EpTravels travels = {.num = 0};
    moves->num = 0;
    if (!balance->num_slots) return 0;
    EP_TRY(ep_layer_find_helps(c->layer, c->buffer, balance, a->plan, a->held ? a->held->data : NULL,
                               c->stream, &ran->num_rows, &travels));
    if (!moves->num) return 0;
    const EpHelpedWeights w = {
        travels.num, travels.expert, travels.slot, {a->gate_up, a->gate_up_bias, a->down, a->down_bias}};
    /* Each rank has entered the first plan after it last read its staging. */
    *code = ep_layer_send_weights(c->layer, &w, c->stream);
    if (!*code) *code = ep_layer_move_choices(c->layer, c->buffer, a->plan, a->moved, c->stream);
    EP_TRY(report(c, EP_OP_PLAN, *code));
    EP_TRY(run(c, EP_OP_PLAN, &plan, NULL));
    *code = ep_layer_receive_weights(c->layer, &w, c->stream);
    return 0;
}

static int experts(Call *c, const EpExpertsArgs *a, EpRan *ran) {
    const Low low_up = MIXED_LOW_OF(a, gate_up), low_down = MIXED_LOW_OF(a, down);
    const bool is_fused = fuses(c, a->gate_up, 1, a->down, 2, a->gate_up_scale != NULL, a->h != NULL);
    /* LoRA's first factors multiply rows that have arrived. Dispatch + GEMM has no launch between the two. */
    const bool is_first_fused = is_fused && !a->row_tag && !has_low(low_up);
    const EpPlanArgs plan = {.indices = a->indices, .plan = a->plan, .balance_key = a->balance_key};
    const EpDispatchArgs dispatch = {.x = a->x,
                                     .weight = a->weight,
                                     .plan = a->plan,
                                     .rows = a->rows,
                                     .row_weight = a->row_weight,
                                     .recv = a->recv,
                                     .tag = a->tag,
                                     .row_tag = a->row_tag,
                                     .requires_grad = a->requires_grad};
    const EpDispatchGemmArgs dispatch_gemm = {.x = a->x,
                                              .weight = a->weight,
                                              .plan = a->plan,
                                              .rows = a->rows,
                                              .row_weight = a->row_weight,
                                              .recv = a->recv,
                                              .gemm_weight = a->gate_up,
                                              .bias = a->gate_up_bias,
                                              .out = a->a,
                                              .saved = a->h,
                                              .activation = a->activation,
                                              .requires_grad = a->requires_grad,
                                              .kind = EP_GEMM_FORWARD};
    const EpCombineArgs combine = {.rows = a->out_rows,
                                   .row_weight = a->row_weight,
                                   .plan = a->plan,
                                   .recv = a->recv,
                                   .out = a->out,
                                   .requires_grad = a->requires_grad};
    const EpGemmCombineArgs gemm_combine = {.a = a->a,
                                            .gemm_weight = a->down,
                                            .bias = a->down_bias,
                                            .low_a = a->down_low_rows,
                                            .low_b = a->down_low_out,
                                            .rows = a->out_rows,
                                            .row_weight = a->row_weight,
                                            .plan = a->plan,
                                            .recv = a->recv,
                                            .out = a->out,
                                            .requires_grad = a->requires_grad,
                                            .kind = EP_GEMM_FORWARD};

    const Weights weights = WEIGHTS_OF(a);
    const EpBalance balance = {a->helper_slots, a->min_helped_rows};
    const EpAwaited awaited = ep_awaited(a->plan, a->x, a->requires_grad, a->gate_up);
    const uint32_t room = a->rows->num_dims ? (uint32_t)a->rows->shape[0] : 0;
    bool awaits = a->awaits_rows != 0;
    int code = set_offsets_of_plan(c, a->plan);
    if (!code) code = check_tokens(c, a->x, a->indices, a->weight);
    if (!code) code = check_weights(c, &weights);
    if (!code) code = check_balance(c, &balance, a->moved, a->held);
    if (!code) code = check_mixture(a->tag, a->row_tag, a->adapter_columns);
    if (!code && a->gate_up_scale && a->h)
        code = ep_error(EP_EINVAL, "h: must be absent, because weights of 4 bits have no gradients");
    if (!code && !a->is_planned && !a->indices)
        code = ep_error(EP_EINVAL, "topk_idx: missing, but there is no plan yet");
    if (!a->is_planned) {
        EP_TRY(report(c, EP_OP_PLAN, code));
        EP_TRY(run(c, EP_OP_PLAN, &plan, NULL));
        EP_TRY(help(c, a, &balance, ran, &code));
        if (code == 0 && c->layer->moves[c->buffer].num) {
            /* The host knows the number of rows. */
            const bool fits = awaits ? ep_layer_fits_room(c->layer, &awaited.of, room, ran->num_rows)
                                     : ran->num_rows <= room;
            if (!fits) return 0;
            awaits = false;
        }
    } else if (code && awaits && !ep_layer_check_plan(c->layer, a->plan)) {
        /* If the plan has failed, no rank enters the dispatch. */
        EP_TRY(ep_layer_rows_locked(c->layer, c->buffer, a->plan, c->stream, &ran->num_rows));
    }
    EP_TRY(report(c, EP_OP_DISPATCH, code));
    EP_TRY(ep_layer_run_locked(c->layer, c->buffer, is_first_fused ? EP_OP_DISPATCH_GEMM : EP_OP_DISPATCH,
                               is_first_fused ? (const void *)&dispatch_gemm : &dispatch,
                               awaits ? &awaited : NULL, c->stream, ran));
    if (!ran->is_launched) return 0;
    if (!is_first_fused) code = multiply_up(c, &weights, a->rows, a->a, a->h, low_up);
    if (is_fused) {
        if (!code) code = multiply_low(c, EP_GEMM_FORWARD, a->a, low_down);
        EP_TRY(report(c, EP_OP_GEMM_COMBINE, code));
        return run(c, EP_OP_GEMM_COMBINE, &gemm_combine, ran);
    }
    if (!code) code = multiply_down(c, &weights, a->a, a->out_rows, low_down);
    EP_TRY(report(c, EP_OP_COMBINE, code));
    return run(c, EP_OP_COMBINE, &combine, ran);
}

/* ---- backward ---- */

static int experts_down(Call *c, const EpExpertsDownArgs *a, EpRan *ran) {
    const bool is_fused = !has_low(LOW_OF(a, down)) && fuses(c, a->h, 1, a->down, 2, false, true);
    const EpDispatchArgs dispatch = {.x = a->dy, .plan = a->plan, .rows = a->g, .recv = a->recv};
    const EpDispatchGemmArgs dispatch_gemm = {.x = a->dy,
                                              .plan = a->plan,
                                              .rows = a->g,
                                              .recv = a->recv,
                                              .gemm_weight = a->down,
                                              .out = a->weighted,
                                              .kind = EP_GEMM_DGRAD};

    EP_TRY(report(c, EP_OP_DISPATCH, set_offsets_of_plan(c, a->plan)));
    EP_TRY(is_fused ? run(c, EP_OP_DISPATCH_GEMM, &dispatch_gemm, ran)
                    : run(c, EP_OP_DISPATCH, &dispatch, ran));
    int code = 0;
    if (!is_fused)
        code = multiply_with(c, (EpGemm){.kind = EP_GEMM_DGRAD, .a = a->g, .b = a->down, .out = a->weighted},
                             LOW_OF(a, down));
    if (!is_fused && !code) code = order_products(c); /* another thread may call before experts_up */
    /* The weighted rows take the place of the product, which nothing else needs. */
    if (!code)
        code = ep_activation(&(EpActivationArgs){.activation = a->activation,
                                                 .h = a->h,
                                                 .d = a->weighted,
                                                 .offsets = &c->offsets,
                                                 .row_weight = a->row_weight,
                                                 .d_h = a->d_h,
                                                 .weighted = a->weighted,
                                                 .dots = a->dots},
                             c->stream);
    return report(c, EP_OP_COMBINE, code);
}

static int experts_up(Call *c, const EpExpertsUpArgs *a, EpRan *ran) {
    const bool is_fused = fuses(c, a->gate_up, 1, a->weighted, 1, false, true);
    const EpCombineArgs combine = {.rows = a->out_rows,
                                   .row_scalar = a->dots,
                                   .plan = a->plan,
                                   .recv = a->recv,
                                   .out = a->dx,
                                   .out_scalar = a->d_weight};
    const EpGemmCombineArgs gemm_combine = {.a = a->d_h,
                                            .gemm_weight = a->gate_up,
                                            .low_a = a->gate_up_low_rows,
                                            .low_b = a->gate_up_low_out,
                                            .rows = a->out_rows,
                                            .row_scalar = a->dots,
                                            .plan = a->plan,
                                            .recv = a->recv,
                                            .out = a->dx,
                                            .out_scalar = a->d_weight,
                                            .kind = EP_GEMM_DGRAD};

    int code = set_offsets_of_plan(c, a->plan);
    if (!code && a->d_down)
        code = multiply(c, (EpGemm){.kind = EP_GEMM_WGRAD, .a = a->g, .b = a->weighted, .out = a->d_down});
    if (!code && is_fused) code = multiply_low(c, EP_GEMM_DGRAD, a->d_h, LOW_OF(a, gate_up));
    if (!code && !is_fused)
        code = multiply_with(
            c, (EpGemm){.kind = EP_GEMM_DGRAD, .a = a->d_h, .b = a->gate_up, .out = a->out_rows},
            LOW_OF(a, gate_up));
    EP_TRY(report(c, is_fused ? EP_OP_GEMM_COMBINE : EP_OP_COMBINE, code));
    EP_TRY(is_fused ? run(c, EP_OP_GEMM_COMBINE, &gemm_combine, ran) : run(c, EP_OP_COMBINE, &combine, ran));
    if (!a->d_gate_up) return 0;
    EP_TRY(multiply(c, (EpGemm){.kind = EP_GEMM_WGRAD, .a = a->d_h, .b = a->rows, .out = a->d_gate_up}));
    return order_products(c);
}

/* ---- few tokens ---- */

static int ll_experts(Call *c, const EpLlExpertsArgs *a, EpRan *ran) {
    const EpLlDispatchArgs dispatch = {.x = a->x,
                                       .indices = a->indices,
                                       .weight = a->weight,
                                       .handle = a->handle,
                                       .rows = a->rows,
                                       .counts = a->counts,
                                       .tag = a->tag,
                                       .row_tag = a->row_tag,
                                       .parts = EP_LL_BOTH};
    const EpLlCombineArgs combine = {
        .rows = a->out_rows, .handle = a->handle, .out = a->out, .parts = EP_LL_BOTH};
    uint64_t at;
    ep_layer_ll_handle_words(&c->layer->config, &at);

    const Weights weights = WEIGHTS_OF(a);
    int code = set_offsets(c, "handle", a->handle, at);
    if (!code) code = check_tokens(c, a->x, a->indices, a->weight);
    if (!code) code = check_weights(c, &weights);
    if (!code) code = check_mixture(a->tag, a->row_tag, a->adapter_columns);
    EP_TRY(report(c, EP_OP_LL_DISPATCH, code));
    EP_TRY(run(c, EP_OP_LL_DISPATCH, &dispatch, ran));
    code = multiply_up(c, &weights, a->rows, a->a, NULL, MIXED_LOW_OF(a, gate_up));
    if (!code) code = multiply_down(c, &weights, a->a, a->out_rows, MIXED_LOW_OF(a, down));
    EP_TRY(report(c, EP_OP_LL_COMBINE, code));
    return run(c, EP_OP_LL_COMBINE, &combine, ran);
}

#define C(name, Type, NAME)                                                                               \
    int ep_layer_##name(EpLayer *l, uint32_t buffer, const Ep##Type##Args *a, void *stream, EpRan *ran) { \
        Call c = {.layer = l, .buffer = buffer, .stream = stream};                                        \
        *ran = (EpRan){0};                                                                                \
        EP_TRY(ep_layer_lock(l, buffer));                                                                 \
        return ep_layer_unlock(l, buffer, name(&c, a, ran));                                              \
    }
EP_CALLS(C)
#undef C
