/* prepare_low_latency.c - check the arguments of the low-latency operations; see prepare.h. */
#include "layer/layer_state.h"
#include "layer/prepare.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

static int check_parts(uint32_t parts) {
    if (parts < EP_LL_SEND || parts > EP_LL_BOTH)
        return ep_error(EP_EINVAL, "parts %u: must be 1 (send), 2 (receive) or 3 (both)", parts);
    return 0;
}

static int check_indices(const EpLayer *l, const EpTensor *indices, int64_t num_tokens) {
    if (indices->dtype != EP_I64 && indices->dtype != EP_I32)
        return ep_error(EP_ETYPE, "topk_idx: wanted int32 or int64, got %s", ep_dtype_name(indices->dtype));
    return ep_layer_check_tensor(l, "topk_idx", indices, indices->dtype, 2, num_tokens,
                                 l->config.shape.num_topk);
}

/* Rows of this dtype: masked [L][W * max_tokens][H], else [capacity][H]. */
static int check_rows(const EpLayer *l, const EpTensor *t, uint32_t dtype, bool is_masked) {
    const EpShape *s = &l->config.shape;
    const int64_t L = ep_num_local_experts(s), H = s->hidden, most = (int64_t)s->num_ranks * s->max_tokens;
    const EpWanted masked = {"rows", t, dtype, 3, {L, most, H}};
    const EpWanted compact = {"rows", t, dtype, 2, {s->capacity, H, -1}};
    return ep_tensor_check(is_masked ? &masked : &compact, ep_heap_kind(l->heap), ep_heap_device(l->heap),
                           16);
}

/* Scales: masked [L][lines][line], else [lines][line]; f32, or for UE8M0 i32. */
static int check_scales(const EpLayer *l, const EpTensor *t, const EpLlDispatchArgs *a, uint32_t *line) {
    const EpShape *s = &l->config.shape;
    const bool is_masked = a->is_masked != 0;
    const int64_t lines = ep_ll_scale_lines(s, a->fp8);
    const uint32_t dtype = a->fp8 == EP_FP8_UE8M0 ? EP_I32 : EP_F32;
    const int64_t num = is_masked ? (int64_t)s->num_ranks * s->max_tokens : s->capacity;
    const int64_t wanted = (num + 3) / 4 * 4;
    const EpWanted masked = {"scales", t, dtype, 3, {ep_num_local_experts(s), lines, wanted}};
    const EpWanted compact = {"scales", t, dtype, 2, {lines, wanted, -1}};
    *line = (uint32_t)wanted;
    return ep_tensor_check(is_masked ? &masked : &compact, ep_heap_kind(l->heap), ep_heap_device(l->heap),
                           16);
}

static int check_fp8(const EpLayer *l, uint32_t fp8, uint32_t most) {
    const EpShape *s = &l->config.shape;
    if (fp8 > most) return ep_error(EP_EINVAL, "fp8 %u: must be 0 to %u", fp8, most);
    if (!fp8) return 0;
    if (s->dtype == EP_F32)
        return ep_error(EP_ETYPE, "fp8 needs a layer of bfloat16 or float16, not float32");
    const uint32_t unit = EP_FP8_GROUP * (fp8 == EP_FP8_UE8M0 ? 4 : 1);
    if (s->hidden % unit)
        return ep_error(EP_EINVAL, "fp8 needs a hidden size that is a multiple of %u, not %u", unit,
                        s->hidden);
    return 0;
}

int ep_prepare_ll_dispatch(EpLayer *l, const EpCommBuffer *b, const EpLlDispatchArgs *a, EpOpParams *params) {
    EpLlDispatchParams *p = &params->ll_dispatch;
    const EpShape *s = &l->config.shape;
    const bool is_masked = a->is_masked != 0;
    EP_TRY(check_parts(a->parts));
    EP_TRY(check_fp8(l, a->fp8, EP_FP8_UE8M0));
    if ((a->fp8 != 0) != (a->scales != NULL))
        return ep_error(EP_EINVAL, "scales: give them with fp8, and not without it");
    EP_TRY(ep_layer_check_num_tokens(l, "x", a->x));
    EP_TRY(ep_layer_check_rows(l, "x", a->x, -1));
    EP_TRY(check_indices(l, a->indices, a->x->shape[0]));
    if (a->weight)
        EP_TRY(ep_layer_check_tensor(l, "topk_weights", a->weight, EP_F32, 2, a->x->shape[0], s->num_topk));
    EP_TRY(ep_layer_check_tensor(l, "handle", a->handle, EP_I32, 1, (int64_t)ep_ll_handle(s).num_words, -1));
    EP_TRY(check_rows(l, a->rows, a->fp8 ? EP_U8 : s->dtype, is_masked));
    if (a->scales) EP_TRY(check_scales(l, a->scales, a, &p->scale_line));
    EP_TRY(ep_layer_check_tensor(l, "counts", a->counts, EP_I32, 1, ep_num_local_experts(s), -1));
    if ((a->tag || a->row_tag) && s->num_topk >= EP_MAX_TOPK)
        return ep_error(EP_EINVAL, "tags: a token with %u choices has no room for one", s->num_topk);
    if (a->tag) EP_TRY(ep_layer_check_tensor(l, "tag", a->tag, EP_I32, 1, a->x->shape[0], -1));
    if (a->row_tag)
        EP_TRY(ep_layer_check_tensor(l, "output tag", a->row_tag, EP_I32, 1,
                                     (int64_t)ep_ll_num_rows(s, is_masked), -1));
    p->comm = b->comm;
    p->x = a->x->data;
    p->indices = a->indices->data;
    p->index_bytes = a->indices->dtype == EP_I64 ? 8 : 4;
    p->weight = a->weight ? (const float *)a->weight->data : NULL;
    p->tag = a->tag ? (const int32_t *)a->tag->data : NULL;
    p->row_tag = a->row_tag ? (int32_t *)a->row_tag->data : NULL;
    p->handle = (int32_t *)a->handle->data;
    p->rows = a->rows->data;
    p->scales = a->scales ? a->scales->data : NULL;
    p->counts = (int32_t *)a->counts->data;
    p->num_tokens = (uint32_t)a->x->shape[0];
    p->is_masked = is_masked;
    p->fp8 = a->fp8;
    p->parts = a->parts;
    return 0;
}

int ep_prepare_ll_combine(EpLayer *l, const EpCommBuffer *b, const EpLlCombineArgs *a, EpOpParams *params) {
    EpLlCombineParams *p = &params->ll_combine;
    const EpShape *s = &l->config.shape;
    EP_TRY(check_parts(a->parts));
    EP_TRY(check_fp8(l, a->fp8, EP_FP8_SCALED));
    /* Rows of this rank itself would not be rounded. */
    if (a->fp8 && s->combine_mode == EP_LOW_LATENCY_SCATTER)
        return ep_error(EP_EINVAL, "fp8 combine: each rank must add up its rows first: create the layer with "
                                   "enable_local_combine=True");
    EP_TRY(ep_layer_check_num_tokens(l, "output", a->out));
    EP_TRY(ep_layer_check_rows(l, "output", a->out, -1));
    EP_TRY(check_rows(l, a->rows, s->dtype, a->is_masked != 0));
    EP_TRY(ep_layer_check_tensor(l, "handle", a->handle, EP_I32, 1, (int64_t)ep_ll_handle(s).num_words, -1));
    p->comm = b->comm;
    p->rows = a->rows->data;
    p->handle = (const int32_t *)a->handle->data;
    p->out = a->out->data;
    p->num_tokens = (uint32_t)a->out->shape[0];
    p->is_masked = a->is_masked != 0;
    p->fp8 = a->fp8;
    p->parts = a->parts;
    return 0;
}
