/* prepare_stages.c - check the arguments of plan, dispatch and combine; see prepare.h. */
#include "layer/prepare.h"

#include <stddef.h>

#include "layer/layer_state.h"
#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/tensor.h"
#include "runtime/world.h"

int ep_layer_check_tensor(const EpLayer *l, const char *name, const EpTensor *t, uint32_t dtype,
                          uint32_t num_dims, int64_t d0, int64_t d1) {
    const EpWanted wanted = {name, t, dtype, num_dims, {d0, d1, -1}};
    return ep_tensor_check(&wanted, ep_heap_kind(l->heap), ep_heap_device(l->heap), 1);
}

static int check_rows(const EpLayer *l, const char *name, const EpTensor *t, uint32_t dtype,
                      int64_t num_rows) {
    const EpWanted wanted = {name, t, dtype, 2, {num_rows, l->config.shape.hidden, -1}};
    return ep_tensor_check(&wanted, ep_heap_kind(l->heap), ep_heap_device(l->heap), 16);
}
int ep_layer_check_rows(const EpLayer *l, const char *name, const EpTensor *t, int64_t num_rows) {
    return check_rows(l, name, t, l->config.shape.dtype, num_rows);
}

/* ---- stages ---- */

static int check_plan_tensor(const EpLayer *l, const EpTensor *plan, uint32_t num_tokens,
                             EpPlanLayout *layout) {
    *layout = ep_plan_layout(&l->config.shape, num_tokens);
    return ep_layer_check_tensor(l, "plan", plan, EP_I32, 1, (int64_t)layout->num_words, -1);
}

static int check_recv_tensor(const EpLayer *l, const EpTensor *recv) {
    const EpShape *s = &l->config.shape;
    return ep_layer_check_tensor(l, "recv", recv, EP_I32, 1, (int64_t)ep_recv_words(s), -1);
}

int ep_layer_check_num_tokens(const EpLayer *l, const char *name, const EpTensor *t) {
    if (t->num_dims < 1 || t->shape[0] > (int64_t)l->config.shape.max_tokens)
        return ep_error(EP_EINVAL, "%s has %lld tokens: must be at most max_tokens, %u", name,
                        t->num_dims ? (long long)t->shape[0] : -1ll, l->config.shape.max_tokens);
    return 0;
}

EpPadding ep_layer_padding(const EpLayer *l) {
    const EpLayerConfig *c = &l->config;
    if (c->expert_capacity) return (EpPadding){c->expert_capacity, 1};
    return (EpPadding){c->expert_alignment > 1 ? c->expert_alignment : 0, 0};
}

int ep_prepare_plan(EpLayer *l, const EpCommBuffer *b, const EpPlanArgs *a, EpOpParams *params) {
    EpPlanParams *p = &params->plan;
    const EpShape *s = &l->config.shape;
    const EpTensor *indices = a->indices, *scatter = a->scatter;
    if (indices->num_dims != 2)
        return ep_error(EP_EINVAL, "exp_indices: wanted 2 dimensions [T, %u], got %u", s->num_topk,
                        indices->num_dims);
    EP_TRY(ep_layer_check_num_tokens(l, "exp_indices", indices));
    if (indices->dtype != EP_I64 && indices->dtype != EP_I32)
        return ep_error(EP_ETYPE, "exp_indices: wanted int32 or int64, got %s",
                        ep_dtype_name(indices->dtype));
    EP_TRY(ep_layer_check_tensor(l, "exp_indices", indices, indices->dtype, 2, -1, s->num_topk));
    if (scatter && ep_layer_padding(l).alignment)
        return ep_error(EP_EINVAL,
                        "full_scatter_indices: must be None in a layer with an expert_alignment or an "
                        "expert_capacity, because the plan chooses the rows");
    if (scatter)
        EP_TRY(ep_layer_check_tensor(l, "full_scatter_indices", scatter, EP_I32, 2, -1, s->num_topk));
    EP_TRY(check_plan_tensor(l, a->plan, (uint32_t)indices->shape[0], &p->layout));
    p->comm = b->comm;
    p->exp_indices = indices->data;
    p->index_bytes = indices->dtype == EP_I64 ? 8 : 4;
    p->num_tokens = (uint32_t)indices->shape[0];
    p->plan = (int32_t *)a->plan->data;
    /* Without lines it has no address, but it was given: then nothing is read, and T must be 0. */
    p->scatter_indices = !scatter            ? NULL
                         : scatter->shape[0] ? (const int32_t *)scatter->data
                                             : (const int32_t *)a->plan->data;
    p->balance_key = a->balance_key;
    p->num_scatter_tokens = scatter ? (uint32_t)scatter->shape[0] : 0;
    p->sort_slots = l->config.sort_slots != 0;
    p->padding = ep_layer_padding(l);
    p->host_counts = l->config.host_counts != 0;
    /* The host asks for the rows of the newest plan by its ticket. */
    p->ticket = ++l->ticket[b->buffer];
    l->newest[b->buffer] = p->plan;
    return 0;
}

int ep_layer_check_scale(const EpLayer *l, const char *name, const EpTensor *scale, int64_t rows,
                         int64_t groups) {
    EpTensor dense = *scale;
    if (dense.num_dims == 2) {
        dense.stride[0] = groups;
        dense.stride[1] = 1;
    }
    return ep_layer_check_tensor(l, name, &dense, EP_F32, 2, rows, groups);
}
static int check_scales(const EpLayer *l, const EpDispatchArgs *a, EpRowScales *s) {
    const int64_t groups = ep_ceil_div_u32(l->config.shape.hidden, EP_FP8_GROUP);
    EP_TRY(ep_layer_check_scale(l, "input scales", a->x_scale, a->x->shape[0], groups));
    EP_TRY(ep_layer_check_scale(l, "output scales", a->row_scale, a->rows->shape[0], groups));
    s->x = (const float *)a->x_scale->data;
    s->x_row = a->x_scale->stride[0];
    s->x_group = a->x_scale->stride[1];
    s->rows = (float *)a->row_scale->data;
    s->row_step = a->row_scale->stride[0];
    s->group_step = a->row_scale->stride[1];
    s->num_groups = (uint32_t)groups;
    return 0;
}

int ep_layer_check_dispatch(const EpLayer *l, const EpCommBuffer *b, const EpDispatchArgs *a,
                            uint32_t num_copies, EpDispatchParams *p, EpScales *scales) {
    const EpShape *s = &l->config.shape;
    const EpTensor *x = a->x, *rows = a->rows;
    const bool is_fp8 = a->x_scale != NULL;
    const uint32_t dtype = is_fp8 ? EP_U8 : s->dtype;
    scales->dtype = is_fp8 ? EP_IN_FP8 : EP_IN_LAYER_DTYPE;
    p->comm = b->comm;
    p->comm.requires_grad = a->requires_grad != 0;
    if (is_fp8 != (a->row_scale != NULL))
        return ep_error(EP_EINVAL, "input scales and output scales: give both or neither");
    if (is_fp8 && s->hidden % 16)
        return ep_error(EP_EINVAL, "a dispatch in FP8 needs a hidden size that is a multiple of 16, not %u",
                        s->hidden);
    if (is_fp8) p->comm.layout.row_bytes = s->hidden;
    if (x->num_dims < 1 || x->shape[0] > (int64_t)(s->max_tokens / num_copies))
        return ep_error(EP_EINVAL, "input has %lld tokens: must be at most max_tokens, %u",
                        x->num_dims ? (long long)x->shape[0] : -1ll, s->max_tokens / num_copies);
    EP_TRY(check_rows(l, "input", x, dtype, -1));
    const int64_t T = x->shape[0] * num_copies;
    if (a->weight) EP_TRY(ep_layer_check_tensor(l, "weight", a->weight, EP_F32, 2, T, s->num_topk));
    EP_TRY(check_plan_tensor(l, a->plan, (uint32_t)T, &p->layout));
    EP_TRY(check_rows(l, "output", rows, dtype, -1));
    if ((a->weight != NULL) != (a->row_weight != NULL))
        return ep_error(EP_EINVAL, "weight and output weight: give both or neither");
    if (a->row_weight)
        EP_TRY(ep_layer_check_tensor(l, "output weight", a->row_weight, EP_F32, 1, rows->shape[0], -1));
    if (a->tag) EP_TRY(ep_layer_check_tensor(l, "tag", a->tag, EP_I32, 1, x->shape[0], -1));
    if (a->row_tag) EP_TRY(ep_layer_check_tensor(l, "output tag", a->row_tag, EP_I32, 1, rows->shape[0], -1));
    EP_TRY(check_recv_tensor(l, a->recv));
    if (rows->shape[0] > INT32_MAX)
        return ep_error(EP_EINVAL, "output has %lld rows: must be less than 2^31", (long long)rows->shape[0]);
    p->x = x->data;
    p->weight = a->weight ? (const float *)a->weight->data : NULL;
    p->tag = a->tag ? (const int32_t *)a->tag->data : NULL;
    p->plan = (const int32_t *)a->plan->data;
    p->recv = (int32_t *)a->recv->data;
    p->rows = rows->data;
    p->row_weight = a->row_weight ? (float *)a->row_weight->data : NULL;
    p->row_tag = a->row_tag ? (int32_t *)a->row_tag->data : NULL;
    p->num_rows = (uint32_t)rows->shape[0];
    p->has_weight = a->weight != NULL;
    p->num_copies = num_copies;
    p->has_padding = ep_layer_padding(l).alignment != 0;
    return is_fp8 ? check_scales(l, a, &scales->rows) : 0;
}

int ep_prepare_dispatch(EpLayer *l, const EpCommBuffer *b, const EpDispatchArgs *a, EpOpParams *params) {
    return ep_layer_check_dispatch(l, b, a, 1, &params->dispatch, &params->scales);
}

int ep_layer_check_combine(const EpLayer *l, const EpCombineArgs *a, EpCombineParams *p) {
    const EpShape *s = &l->config.shape;
    const EpTensor *rows = a->rows, *out = a->out;
    EP_TRY(ep_layer_check_num_tokens(l, "output", out));
    EP_TRY(ep_layer_check_rows(l, "output", out, -1));
    EP_TRY(ep_layer_check_rows(l, "input", rows, -1));
    if (a->row_weight)
        EP_TRY(ep_layer_check_tensor(l, "weight", a->row_weight, EP_F32, 1, rows->shape[0], -1));
    if (a->row_scalar)
        EP_TRY(ep_layer_check_tensor(l, "scalar", a->row_scalar, EP_F32, 1, rows->shape[0], -1));
    if ((a->row_scalar != NULL) != (a->out_scalar != NULL))
        return ep_error(EP_EINVAL, "scalar and output scalar: give both or neither");
    if (a->out_scalar)
        EP_TRY(
            ep_layer_check_tensor(l, "output scalar", a->out_scalar, EP_F32, 2, out->shape[0], s->num_topk));
    EP_TRY(check_plan_tensor(l, a->plan, (uint32_t)out->shape[0], &p->layout));
    EP_TRY(check_recv_tensor(l, a->recv));
    const EpTensor *biases[EP_MAX_BIASES] = {a->bias_0, a->bias_1};
    if (a->bias_1 && !a->bias_0) return ep_error(EP_EINVAL, "bias_1: give bias_0, too");
    for (uint32_t i = 0; i < EP_MAX_BIASES && biases[i]; i++) {
        EP_TRY(ep_layer_check_rows(l, i ? "bias_1" : "bias_0", biases[i], out->shape[0]));
        p->bias[p->num_biases++] = biases[i]->data;
    }
    p->by_choice = a->by_choice && s->combine_mode == EP_COMBINE_LOCAL;
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

int ep_prepare_combine(EpLayer *l, const EpCommBuffer *b, const EpCombineArgs *a, EpOpParams *params) {
    EpCombineParams *p = &params->combine;
    p->comm = b->comm;
    p->comm.requires_grad = a->requires_grad != 0;
    return ep_layer_check_combine(l, a, p);
}
