/* prepare_fused.c - check the arguments of the fused kernels; see prepare.h. */
#include "layer/prepare.h"

#include <stddef.h>

#include "layer/layer_state.h"
#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/tensor.h"
#include "runtime/world.h"

/* The grouped GEMM of a fused kernel: a [M][K] times w [L][N][K] gives out [M][N]. out has half as many
 * columns if the activation is gated. DGRAD: a [M][N] gives out [M][K]. */
typedef struct {
    const EpTensor *a, *w, *bias, *out, *saved;
    const EpTensor *w_scale; /* FP8: a and w are bytes */
    uint32_t kind;
    EpActivation activation;
} Product;

/* Check the scales of the weights of a product, which is checked, and fill in theirs. */
static int check_gemm_scale(const EpLayer *l, const EpTensor *gemm_scale, const EpGemmParams *g,
                            EpGemmScales *scales) {
    const uint32_t num_n = ep_gemm_num_blocks(g->n), num_k = ep_gemm_num_blocks(g->k);
    const EpWanted wanted = {"gemm_scale", gemm_scale, EP_F32, 3, {g->num_experts, num_n, num_k}};
    EP_TRY(ep_tensor_check(&wanted, ep_heap_kind(l->heap), ep_heap_device(l->heap), 4));
    if (EP_ACT_IS_GATED(g->activation.kind) && !EP_ACT_IS_MIXED(g->activation.kind) && g->n % 128)
        return ep_error(EP_EINVAL,
                        "gemm_weight of %u rows in FP8, gates in front of ups: must be a multiple of 128",
                        g->n);
    scales->b = (const float *)gemm_scale->data;
    scales->b_expert = (uint64_t)num_n * num_k;
    scales->b_n = num_k;
    scales->b_k = 1;
    return 0;
}

/* Check a product in the dtype of the operation, and fill in p except its offsets, and the scales of the
 * weights. */
static int check_product(const EpLayer *l, const Product *product, EpGemmParams *p, EpScales *scales) {
    const bool is_fp8 = scales->dtype == EP_IN_FP8;
    const EpTensor *a = product->a, *w = product->w;
    const uint32_t activation = product->activation.kind;
    const EpShape *s = &l->config.shape;
    const EpBackendKind kind = ep_heap_kind(l->heap);
    const int device = ep_heap_device(l->heap);
    if (is_fp8 != (product->w_scale != NULL))
        return ep_error(EP_EINVAL, "gemm_scale: give it if the rows have scales, and only then");
    if (!ep_multiplies(kind, scales->dtype))
        return ep_error(EP_EINVAL, "the fused kernels of FP8 run on CUDA only, but this layer is on the CPU");
    if (s->dtype == EP_F32)
        return ep_error(EP_ETYPE,
                        "the fused kernels multiply bfloat16 and float16, but this layer has float32");
    EP_TRY(ep_check_activation(product->activation));
    const bool is_forward = product->kind == EP_GEMM_FORWARD;
    if (!is_forward && (product->kind != EP_GEMM_DGRAD || activation || product->bias))
        return ep_error(EP_EINVAL,
                        "kind %u: must be forward, or dgrad, which has neither a bias nor an activation",
                        product->kind);
    if (product->saved && !activation)
        return ep_error(EP_EINVAL,
                        "saved: must be absent without an activation, because it would be the output");
    if (is_fp8 && (!is_forward || product->saved))
        return ep_error(EP_EINVAL,
                        "kind %u, saved: must be forward, and absent, because a product in FP8 has "
                        "no gradient",
                        product->kind);
    if (w->num_dims != 3 || a->num_dims != 2)
        return ep_error(EP_EINVAL, "wanted gemm_weight of 3 dimensions and rows of 2, got %u and %u",
                        w->num_dims, a->num_dims);
    const int64_t L = ep_num_local_experts(s), N = w->shape[1], K = w->shape[2], M = a->shape[0];
    if (N < 16 || K < 16 || N % 16 || K % 16 || N > 1 << 24 || K > 1 << 24)
        return ep_error(EP_EINVAL,
                        "gemm_weight of %lld by %lld: both sizes must be multiples of 16, at most 2^24",
                        (long long)N, (long long)K);
    const uint32_t dtype = is_fp8 ? EP_U8 : s->dtype;
    const int64_t of_forward = EP_ACT_IS_GATED(activation) ? N / 2 : N;
    const EpWanted wanted[] = {
        {"rows", a, dtype, 2, {M, is_forward ? K : N, -1}},
        {"gemm_weight", w, dtype, 3, {L, N, K}},
        {"bias", product->bias, s->dtype, 2, {L, N, -1}},
        {"output", product->out, s->dtype, 2, {M, is_forward ? of_forward : K, -1}},
        {"saved", product->saved, s->dtype, 2, {M, N, -1}},
    };
    for (uint32_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        EP_TRY(ep_tensor_check(&wanted[i], kind, device, 16));
    p->a = a->data;
    p->b = w->data;
    p->out = product->out->data;
    p->bias = product->bias ? product->bias->data : NULL;
    p->saved = product->saved ? product->saved->data : NULL;
    p->saves = product->saved != NULL;
    p->num_rows = (uint32_t)M;
    p->num_experts = (uint32_t)L;
    p->n = (uint32_t)N;
    p->k = (uint32_t)K;
    p->kind = product->kind;
    ep_gemm_set_activation(p, product->activation);
    p->is_f16 = s->dtype == EP_F16;
    return is_fp8 ? check_gemm_scale(l, product->w_scale, p, &scales->gemm) : 0;
}

/* The fused kernels count the rows of a row block that have arrived. Padding rows never arrive. */
static int check_has_fused(const EpLayer *l) {
    if (ep_layer_padding(l).alignment)
        return ep_error(EP_EINVAL,
                        "a layer with an expert_alignment or an expert_capacity has no fused operations");
    if (!l->config.num_move)
        return ep_error(EP_EINVAL, "this layer has no fused operations: EpAll2AllFusedOp has them");
    return 0;
}

/* On the CPU the communication of a fused operation has the workers of an operation without a product. */
static uint32_t num_workers(const EpLayer *l, uint32_t num_blocks) {
    return ep_heap_kind(l->heap) == EP_CPU ? l->config.num_sm : num_blocks;
}

int ep_prepare_dispatch_gemm(EpLayer *l, const EpCommBuffer *b, const EpDispatchGemmArgs *a,
                             EpOpParams *params) {
    const EpDispatchArgs first = {.x = a->x,
                                  .x_scale = a->x_scale,
                                  .weight = a->weight,
                                  .plan = a->plan,
                                  .rows = a->rows,
                                  .row_scale = a->row_scale,
                                  .row_weight = a->row_weight,
                                  .recv = a->recv,
                                  .requires_grad = a->requires_grad};
    const Product product = {.a = a->rows,
                             .w = a->gemm_weight,
                             .bias = a->bias,
                             .out = a->out,
                             .saved = a->saved,
                             .w_scale = a->gemm_scale,
                             .kind = a->kind,
                             .activation = a->activation};
    EpDispatchGemmParams *p = &params->dispatch_gemm;
    EpScales *s = &params->scales;
    s->dtype = a->x_scale ? EP_IN_FP8 : EP_IN_LAYER_DTYPE;
    EP_TRY(check_has_fused(l));
    EP_TRY(ep_layer_check_dispatch(l, b, &first, ep_layer_num_copies(&l->config), &p->dispatch, s));
    EP_TRY(check_product(l, &product, &p->gemm, s));
    s->gemm.a = s->rows.rows;
    s->gemm.a_row = (uint64_t)s->rows.row_step;
    s->gemm.a_k = (uint64_t)s->rows.group_step;
    p->gemm.offsets = p->dispatch.plan + p->dispatch.layout.expert_row_off;
    p->num_move_blocks = num_workers(l, l->config.num_move);
    p->num_tail_blocks = l->config.num_tail;
    p->waits_for_expert = l->config.waits_for_expert != 0;
    return 0;
}

int ep_prepare_gemm_combine(EpLayer *l, const EpCommBuffer *b, const EpGemmCombineArgs *a,
                            EpOpParams *params) {
    const EpCombineArgs last = {.rows = a->rows,
                                .row_weight = a->row_weight,
                                .row_scalar = a->row_scalar,
                                .plan = a->plan,
                                .recv = a->recv,
                                .out = a->out,
                                .out_scalar = a->out_scalar};
    const Product product = {.a = a->a,
                             .w = a->gemm_weight,
                             .bias = a->bias,
                             .out = a->rows,
                             .w_scale = a->gemm_scale,
                             .kind = a->kind};
    EpGemmCombineParams *p = &params->gemm_combine;
    EpScales *s = &params->scales;
    s->dtype = a->a_scale ? EP_IN_FP8 : EP_IN_LAYER_DTYPE;
    p->combine.comm = b->comm;
    p->combine.comm.requires_grad = a->requires_grad != 0;
    EP_TRY(check_has_fused(l));
    EP_TRY(ep_layer_check_combine(l, &last, &p->combine));
    EP_TRY(check_product(l, &product, &p->gemm, s));
    if ((a->low_a || a->low_b) && a->a_scale)
        return ep_error(EP_EINVAL, "a product of low rank: needs weights of 16 bits");
    if (a->low_a || a->low_b)
        EP_TRY(ep_check_low_rank(a->low_a, a->low_b, &p->gemm, ep_heap_kind(l->heap), ep_heap_device(l->heap),
                                 &p->low));
    if (a->row_scalar && a->kind != EP_GEMM_DGRAD && !a->a_scale)
        return ep_error(EP_EINVAL, "row_scalar: must be absent, because in 16 bits only kind dgrad returns "
                                   "scalars");
    if (a->a_scale) {
        EP_TRY(
            ep_layer_check_scale(l, "a_scale", a->a_scale, p->gemm.num_rows, ep_gemm_num_blocks(p->gemm.k)));
        s->gemm.a = (const float *)a->a_scale->data;
        s->gemm.a_row = (uint64_t)a->a_scale->stride[0];
        s->gemm.a_k = (uint64_t)a->a_scale->stride[1];
    }
    p->gemm.offsets = p->combine.plan + p->combine.layout.expert_row_off;
    p->num_move_blocks = num_workers(l, l->config.num_move);
    p->num_reduce_blocks = l->config.num_reduce;
    p->is_serial = l->config.is_serial != 0;
    return 0;
}
