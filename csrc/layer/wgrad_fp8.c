/* wgrad_fp8.c - the gradient of weights in FP8: check the arguments, fill in the parameters, launch.
 *
 * Exports ep_transpose, ep_quantize_weight and ep_wgrad_fp8. The operations are local to a rank, and no peer
 * takes part. So a wrong argument is an error on this rank only. */
#include "protocol/wgrad_fp8.h"
#include "backend.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

static bool is_wide(uint32_t dtype) { return dtype == EP_F32 || dtype == EP_BF16 || dtype == EP_F16; }

/* The number of columns of rows, or a size of weights. Kernels read and write 16 bytes at once. */
static int check_size(const char *name, int64_t size, EpBackendKind where) {
    const int64_t unit = where == EP_CUDA ? 16 : 1;
    if (size >= unit && size % unit == 0 && size <= EP_GEMM_MAX_COLS) return 0;
    return ep_error(EP_EINVAL, "%s: %lld must be a positive multiple of %lld, at most %u", name,
                    (long long)size, (long long)unit, EP_GEMM_MAX_COLS);
}
static int check_all(const EpWanted *wanted, uint32_t num, const EpTensor *first) {
    for (uint32_t i = 0; i < num; i++)
        EP_TRY(ep_tensor_check(&wanted[i], first->kind, first->device, wanted[i].dtype == EP_I32 ? 4 : 16));
    return 0;
}

/* ---- rows ---- */

/* Check the scales of e4m3 rows and read their strides, which may be any. */
static int read_scales(const EpTranspose *a, EpTransposeParams *p) {
    EpTensor t = *a->x_scale;
    const int64_t groups = ep_gemm_num_blocks(p->num_cols);
    const EpWanted wanted = {"scales of the rows", &t, EP_F32, 2, {p->num_rows, groups, -1}};
    if (t.num_dims == 2) {
        p->scale_row = (uint64_t)t.stride[0];
        p->scale_col = (uint64_t)t.stride[1];
        t.stride[1] = 1;
        t.stride[0] = t.shape[1];
    }
    p->x_scale = (const float *)t.data;
    return ep_tensor_check(&wanted, a->x->kind, a->x->device, 4);
}

static int check_rows(const EpTranspose *a, EpTransposeParams *p) {
    const EpTensor *x = a->x, *offsets = a->offsets;
    if (x->dtype != EP_U8)
        return ep_error(EP_ETYPE, "rows: wanted the bytes of e4m3, got %s", ep_dtype_name(x->dtype));
    if (x->num_dims != 2 || offsets->num_dims != 1 || offsets->shape[0] < 1)
        return ep_error(EP_EINVAL, "wanted rows of 2 dimensions and offsets of 1, got %u and %u", x->num_dims,
                        offsets->num_dims);
    if (x->shape[0] > INT32_MAX || offsets->shape[0] > INT32_MAX)
        return ep_error(EP_EINVAL, "%lld rows, %lld offsets: both must be less than 2^31",
                        (long long)x->shape[0], (long long)offsets->shape[0]);
    EP_TRY(check_size("columns of the rows", x->shape[1], x->kind));
    p->num_rows = (uint32_t)x->shape[0];
    p->num_cols = (uint32_t)x->shape[1];
    p->num_experts = (uint32_t)offsets->shape[0] - 1;
    return 0;
}

int ep_transpose(const EpTranspose *a, void *stream) {
    const EpBackend *backend = ep_backend(a->x->kind);
    EpTransposeParams p = {0};
    if (!backend) return EP_EINVAL;
    EP_TRY(check_rows(a, &p));
    EP_TRY(read_scales(a, &p));
    const int64_t M = p.num_rows, C = p.num_cols, L = p.num_experts;
    const int64_t num_blocks = ep_transposed_num_blocks(p.num_rows, p.num_experts);
    const EpWanted wanted[] = {
        {"rows", a->x, EP_U8, 2, {M, C, -1}},
        {"offsets", a->offsets, EP_I32, 1, {L + 1, -1, -1}},
        {"output", a->q, EP_U8, 2, {C, num_blocks * EP_TRANSPOSED_ROWS, -1}},
        {"scales", a->scales, EP_F32, 2, {L, ep_gemm_num_blocks(p.num_cols), -1}},
    };
    EP_TRY(check_all(wanted, sizeof wanted / sizeof wanted[0], a->x));
    const EpOperand operands[] = {{"output", a->q, true},
                                  {"scales", a->scales, true},
                                  {"rows", a->x, false},
                                  {"scales of the rows", a->x_scale, false},
                                  {"offsets", a->offsets, false}};
    EP_TRY(ep_tensors_apart(operands, sizeof operands / sizeof operands[0]));
    p.x = (const uint8_t *)a->x->data;
    p.offsets = (const int32_t *)a->offsets->data;
    p.q = (uint8_t *)a->q->data;
    p.scales = (float *)a->scales->data;
    return M && L ? backend->transpose(a->x->device, &p, stream) : 0;
}

/* ---- weights ---- */

int ep_quantize_weight(const EpQuantizeWeight *a, void *stream) {
    const EpBackend *backend = ep_backend(a->x->kind);
    const EpTensor *x = a->x;
    if (!backend) return EP_EINVAL;
    if (!is_wide(x->dtype))
        return ep_error(EP_ETYPE, "weights: wanted float32, bfloat16 or float16, got %s",
                        ep_dtype_name(x->dtype));
    if (x->num_dims != 3 || x->shape[0] > INT32_MAX)
        return ep_error(EP_EINVAL, "weights: wanted 3 dimensions, the first below 2^31, got %u dimensions",
                        x->num_dims);
    const int64_t L = x->shape[0], N = x->shape[1], K = x->shape[2];
    EP_TRY(check_size("rows of the weights", N, x->kind));
    EP_TRY(check_size("columns of the weights", K, x->kind));
    const int64_t num_n = ep_gemm_num_blocks((uint32_t)N), num_k = ep_gemm_num_blocks((uint32_t)K);
    const EpWanted wanted[] = {
        {"weights", x, x->dtype, 3, {L, N, K}},
        {"output", a->q, EP_U8, 3, {L, N, K}},
        {"transposed output", a->transposed, EP_U8, 3, {L, K, N}},
        {"scales", a->scales, EP_F32, 3, {L, num_n, num_k}},
        {"transposed scales", a->transposed_scales, EP_F32, 3, {L, num_k, num_n}},
    };
    EP_TRY(check_all(wanted, sizeof wanted / sizeof wanted[0], x));
    const EpOperand operands[] = {{"output", a->q, true},
                                  {"transposed output", a->transposed, true},
                                  {"scales", a->scales, true},
                                  {"transposed scales", a->transposed_scales, true},
                                  {"weights", x, false}};
    EP_TRY(ep_tensors_apart(operands, sizeof operands / sizeof operands[0]));
    const EpQuantizeWeightParams p = {.x = x->data,
                                      .q = (uint8_t *)a->q->data,
                                      .transposed = (uint8_t *)a->transposed->data,
                                      .scales = (float *)a->scales->data,
                                      .transposed_scales = (float *)a->transposed_scales->data,
                                      .num = (uint32_t)L,
                                      .n = (uint32_t)N,
                                      .k = (uint32_t)K,
                                      .dtype = x->dtype};
    return L ? backend->quantize_weight(x->device, &p, stream) : 0;
}

/* ---- the product ---- */

static int check_product(const EpWgradFp8 *w, EpGemmParams *g) {
    const uint32_t dtype = w->out->dtype;
    if (!is_wide(dtype))
        return ep_error(EP_ETYPE, "output: wanted bfloat16, float16 or float32, got %s",
                        ep_dtype_name(dtype));
    if (w->a->num_dims != 2 || w->b->num_dims != 2 || w->offsets->num_dims != 1 || w->offsets->shape[0] < 1)
        return ep_error(EP_EINVAL, "wanted operands of 2 dimensions and offsets of 1, got %u, %u and %u",
                        w->a->num_dims, w->b->num_dims, w->offsets->num_dims);
    const int64_t L = w->offsets->shape[0] - 1, P = w->a->shape[1];
    if (P % EP_TRANSPOSED_ROWS || P / EP_TRANSPOSED_ROWS < L || P > INT32_MAX)
        return ep_error(EP_EINVAL,
                        "lines of %lld numbers for %lld experts: must be a multiple of 128, at least 128 for "
                        "each expert, and less than 2^31",
                        (long long)P, (long long)L);
    EP_TRY(check_size("lines of a", w->a->shape[0], w->a->kind));
    EP_TRY(check_size("lines of b", w->b->shape[0], w->a->kind));
    g->num_experts = (uint32_t)L;
    /* the most rows for which lines are that long */
    g->num_rows = (uint32_t)(P - L * (int64_t)EP_TRANSPOSED_ROWS) + EP_TRANSPOSED_ROWS - 1;
    g->n = (uint32_t)w->a->shape[0];
    g->k = (uint32_t)w->b->shape[0];
    g->kind = EP_GEMM_WGRAD;
    g->is_f16 = dtype == EP_F16;
    g->accumulates = dtype == EP_F32;
    ep_gemm_set_activation(g, (EpActivation){.kind = EP_ACT_NONE});
    g->scale = (float)w->scale;
    return 0;
}

int ep_wgrad_fp8(const EpWgradFp8 *w, void *stream) {
    const EpTensor *a = w->a;
    const EpBackend *backend = ep_backend(a->kind);
    EpWgradFp8Params p = {0};
    EpGemmParams *g = &p.gemm;
    if (!backend) return EP_EINVAL;
    EP_TRY(check_product(w, g));
    if (!backend->wgrad_fp8)
        return ep_error(EP_EINVAL, "operands on the CPU: the gradient of weights in FP8 runs on CUDA only");
    const int64_t N = g->n, K = g->k, L = g->num_experts, P = a->shape[1];
    const EpWanted wanted[] = {
        {"a", a, EP_U8, 2, {N, P, -1}},
        {"b", w->b, EP_U8, 2, {K, P, -1}},
        {"scales of a", w->a_scale, EP_F32, 2, {L, ep_gemm_num_blocks(g->n), -1}},
        {"scales of b", w->b_scale, EP_F32, 2, {L, ep_gemm_num_blocks(g->k), -1}},
        {"offsets", w->offsets, EP_I32, 1, {L + 1, -1, -1}},
        {"tile counter", w->tile_counter, EP_I64, 1, {1, -1, -1}},
        {"output", w->out, w->out->dtype, 3, {L, N, K}},
    };
    EP_TRY(check_all(wanted, sizeof wanted / sizeof wanted[0], a));
    const EpOperand operands[] = {{"output", w->out, true},
                                  {"tile counter", w->tile_counter, true},
                                  {"a", a, false},
                                  {"b", w->b, false},
                                  {"scales of a", w->a_scale, false},
                                  {"scales of b", w->b_scale, false},
                                  {"offsets", w->offsets, false}};
    EP_TRY(ep_tensors_apart(operands, sizeof operands / sizeof operands[0]));
    if (w->tile_counter) g->tile_counter = (uint64_t *)w->tile_counter->data;
    else EP_TRY(backend->tile_counter(a->device, stream, &g->tile_counter));
    if (!g->tile_counter)
        return ep_error(EP_EINVAL, "tile counter: the library has none for this stream, which is captured or "
                                   "came after many others: pass one");
    g->a = a->data;
    g->b = w->b->data;
    g->out = w->out->data;
    g->offsets = (const int32_t *)w->offsets->data;
    p.a_scale = (const float *)w->a_scale->data;
    p.b_scale = (const float *)w->b_scale->data;
    return backend->wgrad_fp8(a->device, &p, stream);
}
