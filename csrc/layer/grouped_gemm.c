/* grouped_gemm.c - the grouped GEMM by itself: check the arguments, fill in the parameters, launch.
 *
 * Exports ep_grouped_gemm, ep_check_low_rank and ep_gemm_has_counter. The operation is local to a rank, and
 * no peer takes part. So a wrong argument is an error on this rank only. */
#include "layer/prepare.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

static bool has_four_bits(const EpGemm *g) { return g->b_scale && !g->a_scale; }

/* Read the sizes M, N, K and L from the tensors, and check them. Which tensor has which size depends on
 * the kind; see protocol/gemm_params.h. */
static int check_sizes(const EpGemm *g, EpGemmParams *p) {
    const EpTensor *a = g->a, *b = g->b, *offsets = g->offsets;
    const bool is_wgrad = g->kind == EP_GEMM_WGRAD;
    EP_TRY(ep_check_activation(g->activation));
    if (g->kind > EP_GEMM_WGRAD || (g->activation.kind && g->kind != EP_GEMM_FORWARD))
        return ep_error(EP_EINVAL,
                        "kind %u, activation %u: must be an EpGemmKind, and only the forward GEMM has an "
                        "activation",
                        g->kind, g->activation.kind);
    if ((g->a_scale || g->b_scale || g->b_zero) && (!g->b_scale || g->kind != EP_GEMM_FORWARD))
        return ep_error(
            EP_EINVAL,
            "scales for kind %u: a_scale and b_scale for FP8, or b_scale, and perhaps b_zero, for "
            "weights of 4 bits, in the forward GEMM only",
            g->kind);
    const uint32_t type = g->a_scale ? g->out->dtype : a->dtype;
    if (g->a_scale && type != EP_BF16 && type != EP_F16)
        return ep_error(EP_ETYPE, "output: wanted bfloat16 or float16, got %s", ep_dtype_name(type));
    if (type != EP_BF16 && type != EP_F16)
        return ep_error(EP_ETYPE, "rows: wanted bfloat16 or float16, got %s", ep_dtype_name(a->dtype));
    if (a->num_dims != 2 || b->num_dims != (is_wgrad ? 2 : 3) || offsets->num_dims != 1 ||
        offsets->shape[0] < 1)
        return ep_error(EP_EINVAL,
                        "wanted rows of 2 dimensions, weights of 3 and offsets of 1; got %u, %u and %u",
                        a->num_dims, b->num_dims, offsets->num_dims);
    const int64_t L = offsets->shape[0] - 1, M = a->shape[0], N = is_wgrad ? a->shape[1] : b->shape[1],
                  K = b->shape[is_wgrad ? 1 : 2] * (has_four_bits(g) ? 2 : 1);
    if (L >= INT32_MAX || M > INT32_MAX)
        return ep_error(EP_EINVAL, "%lld experts, %lld rows: both must be less than 2^31", (long long)L,
                        (long long)M);
    const int64_t unit = a->kind == EP_CUDA ? 16 : 1, k_unit = has_four_bits(g) ? EP_FOUR_BIT_UNIT : unit;
    const bool is_halved = EP_ACT_IS_GATED(g->activation.kind) && !EP_ACT_IS_MIXED(g->activation.kind);
    const int64_t n_unit = a->kind == EP_CUDA && is_halved ? 2 * EP_FOUR_BIT_UNIT : EP_FOUR_BIT_UNIT;
    if (has_four_bits(g) && (K % k_unit || N % n_unit))
        return ep_error(EP_EINVAL,
                        "weights of %lld by %lld in 4 bits: sizes must be multiples of %lld and of %lld",
                        (long long)N, (long long)K, (long long)n_unit, (long long)k_unit);
    if (N < unit || K < unit || N % unit || K % unit || N > EP_GEMM_MAX_COLS || K > EP_GEMM_MAX_COLS)
        return ep_error(EP_EINVAL,
                        "weights of %lld by %lld: both sizes must be positive multiples of %lld, at most %u",
                        (long long)N, (long long)K, (long long)unit, EP_GEMM_MAX_COLS);
    if (EP_ACT_IS_GATED(g->activation.kind) && N % 2)
        return ep_error(EP_EINVAL, "weights of %lld rows: a gated activation needs an even number",
                        (long long)N);
    p->num_rows = (uint32_t)M;
    p->num_experts = (uint32_t)L;
    p->n = (uint32_t)N;
    p->k = (uint32_t)K;
    p->kind = g->kind;
    ep_gemm_set_activation(p, g->activation);
    p->scale = (float)g->scale;
    p->is_f16 = type == EP_F16;
    p->is_portable = g->is_portable;
    const uint64_t most = (uint64_t)M, expected = g->expected_rows ? g->expected_rows : most;
    p->is_small_m = g->kind == EP_GEMM_FORWARD &&
                    (expected < most ? expected : most) <= (uint64_t)EP_GEMM_FEW_ROWS * (uint64_t)L;
    p->accumulates = g->kind == EP_GEMM_WGRAD && g->out->dtype == EP_F32;
    p->clears = g->clears && !is_wgrad;
    return 0;
}

/* Check the scales of a tensor of FP8, and read their strides. They may have any: low-latency dispatch gives
 * those of a block next to each other, and tensors with one scale have strides of 0. */
static int read_strides(const EpWanted *w, int device, uint64_t *stride) {
    EpTensor t = *w->tensor;
    EpWanted contiguous = *w;
    contiguous.tensor = &t;
    int64_t num = 1;
    for (uint32_t i = t.num_dims; i-- > 0; num *= t.shape[i]) {
        stride[i] = t.shape[i] > 1 ? (uint64_t)t.stride[i] : 0;
        t.stride[i] = num;
    }
    return ep_tensor_check(&contiguous, EP_CUDA, device, 4);
}
static int read_scales(const EpGemm *g, const EpGemmParams *p, EpGemmScales *scales) {
    const int64_t num_n = ep_gemm_num_blocks(p->n), num_k = ep_gemm_num_blocks(p->k);
    const EpWanted rows = {"scales of the rows", g->a_scale, EP_F32, 2, {p->num_rows, num_k, -1}};
    const EpWanted weights = {"scales of the weights", g->b_scale, EP_F32, 3, {p->num_experts, num_n, num_k}};
    uint64_t a[4], b[4];
    EP_TRY(read_strides(&rows, g->a->device, a));
    EP_TRY(read_strides(&weights, g->a->device, b));
    /* One row with a scale of its own is multiplied as many are. */
    if (p->num_rows == 1) a[0] = (uint64_t)g->a_scale->stride[0];
    const EpGemmScales s = {
        (const float *)g->a_scale->data, (const float *)g->b_scale->data, a[0], a[1], b[0], b[1], b[2]};
    *scales = s;
    return 0;
}

int ep_check_low_rank(const EpTensor *low_a, const EpTensor *low_b, const EpGemmParams *p, EpBackendKind kind,
                      int device, EpLowRank *low) {
    const uint32_t dtype = p->is_f16 ? EP_F16 : EP_BF16;
    if (!low_a || !low_b || p->kind == EP_GEMM_WGRAD)
        return ep_error(EP_EINVAL,
                        "a product of low rank: needs both low_a and low_b, and weights of 16 bits, "
                        "in a forward GEMM or that of the gradient of its rows");
    const bool is_forward = p->kind == EP_GEMM_FORWARD;
    const int64_t L = p->num_experts, R = low_a->num_dims == 2 ? low_a->shape[1] : 0,
                  unit = kind == EP_CUDA ? 16 : 1;
    if (R < unit || R % unit || R > EP_GEMM_MAX_COLS)
        return ep_error(EP_EINVAL,
                        "rows of low rank %lld: the rank must be a positive multiple of %lld, at most %u",
                        (long long)R, (long long)unit, EP_GEMM_MAX_COLS);
    const EpWanted wanted[] = {
        {"rows of low rank", low_a, dtype, 2, {p->num_rows, R, -1}},
        {"weights of low rank", low_b, dtype, 3, {L, is_forward ? p->n : R, is_forward ? R : p->k}},
    };
    for (uint32_t i = 0; i < 2; i++)
        EP_TRY(ep_tensor_check(&wanted[i], kind, device, kind == EP_CUDA ? 16 : 2));
    low->a = low_a->data;
    low->b = low_b->data;
    low->r = (uint32_t)R;
    return 0;
}

/* Check which columns the rows of a mixture keep. */
static int read_own_columns(const EpGemm *g, const EpGemmParams *p, EpOwnColumns *own) {
    if (g->kind != EP_GEMM_FORWARD || g->activation.kind || g->bias || g->row_weight || g->b_scale ||
        g->low_a)
        return ep_error(EP_EINVAL, "adapters of rows: wanted a plain forward GEMM of 16 bits");
    if (g->of_adapter == 0 || g->of_adapter % 8 || g->of_adapter > p->n)
        return ep_error(
            EP_EINVAL, "%u columns of each adapter: must be a positive multiple of 8, at most all %u columns",
            g->of_adapter, p->n);
    const EpWanted wanted = {"adapters of rows", g->row_tag, EP_I32, 1, {p->num_rows, -1, -1}};
    EP_TRY(ep_tensor_check(&wanted, g->a->kind, g->a->device, 4));
    own->row_tag = (const int32_t *)g->row_tag->data;
    own->of_adapter = g->of_adapter;
    return 0;
}

int ep_grouped_gemm(const EpGemm *g, void *stream) {
    const EpBackendKind where = g->a->kind;
    const EpBackend *backend = ep_backend(where);
    EpGemmParams p = {0};
    EpGemmScales scales;
    EpFourBit four_bit;
    EpLowRank low_rank;
    EpOwnColumns own;
    const bool has_low_rank = g->low_a || g->low_b;
    if (!backend) return EP_EINVAL;
    EP_TRY(check_sizes(g, &p));
    if (has_four_bits(g)) {
        const EpFourBitSizes sizes = {p.num_experts, p.n, p.k, g->a->dtype};
        EP_TRY(ep_read_four_bit(g->b_scale, g->b_zero, &sizes, g->a, &four_bit));
    }
    if (g->a_scale && !ep_multiplies(where, EP_IN_FP8))
        return ep_error(EP_EINVAL, "rows in FP8 on the CPU: the grouped GEMM of FP8 runs on CUDA only");
    if (g->a_scale) EP_TRY(read_scales(g, &p, &scales));
    if (has_low_rank && g->b_scale)
        return ep_error(EP_EINVAL, "a product of low rank: needs weights of 16 bits");
    if (has_low_rank) EP_TRY(ep_check_low_rank(g->low_a, g->low_b, &p, where, g->a->device, &low_rank));
    if (g->row_tag) EP_TRY(read_own_columns(g, &p, &own));
    const int64_t L = p.num_experts, M = p.num_rows, N = p.n, K = p.k, out_cols = ep_gemm_out_cols(&p);
    const bool is_forward = g->kind == EP_GEMM_FORWARD, is_wgrad = g->kind == EP_GEMM_WGRAD;
    const uint32_t dtype = g->a_scale ? EP_U8 : g->a->dtype;
    const uint32_t bias_dtype = p.is_f16 ? EP_F16 : EP_BF16, out_dtype = p.accumulates ? EP_F32 : bias_dtype;
    const EpWanted wanted[] = {
        {"rows", g->a, dtype, 2, {M, is_forward ? K : N, -1}},
        {is_wgrad ? "input" : "weights",
         g->b,
         has_four_bits(g) ? EP_U8 : dtype,
         is_wgrad ? 2 : 3,
         {is_wgrad ? M : L, is_wgrad ? K : N, has_four_bits(g) ? K / 2 : K}},
        {"offsets", g->offsets, EP_I32, 1, {L + 1, -1, -1}},
        {"tile counter", g->tile_counter, EP_I64, 1, {1, -1, -1}},
        {"output", g->out, out_dtype, is_wgrad ? 3 : 2, {is_wgrad ? L : M, is_wgrad ? N : out_cols, K}},
        {"bias", g->bias, bias_dtype, 2, {L, N, -1}},
        {"row weight", g->row_weight, EP_F32, 1, {M, -1, -1}},
        {"saved", g->saved, bias_dtype, 2, {M, N, -1}},
    };
    for (uint32_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        EP_TRY(ep_tensor_check(&wanted[i], where, g->a->device, where == EP_CUDA ? 16 : 2));
    if (!is_forward && (g->bias || g->row_weight))
        return ep_error(EP_EINVAL,
                        "bias and row_weight: must be absent, because only the forward GEMM applies them");
    if (g->saved && (!is_forward || !g->activation.kind || g->row_weight || g->b_scale))
        return ep_error(EP_EINVAL,
                        "saved: must be absent without an activation, with row_weight, and with scales");
    if (has_low_rank && g->activation.kind && g->row_weight)
        return ep_error(EP_EINVAL,
                        "row_weight: must be absent, because an activation follows a product of low "
                        "rank");
    const EpOperand operands[] = {
        {"output", g->out, true},
        {"saved", g->saved, true},
        {"tile counter", g->tile_counter, true},
        {"rows", g->a, false},
        {is_wgrad ? "input" : "weights", g->b, false},
        {"offsets", g->offsets, false},
        {"bias", g->bias, false},
        {"row weight", g->row_weight, false},
        {"scales of the rows", g->a_scale, false},
        {"scales of the weights", g->b_scale, false},
        {"zeros of the weights", g->b_zero, false},
        {"rows of low rank", g->low_a, false},
        {"weights of low rank", g->low_b, false},
        {"adapters of rows", g->row_tag, false},
    };
    EP_TRY(ep_tensors_apart(operands, sizeof operands / sizeof operands[0]));
    p.a = g->a->data;
    p.b = g->b->data;
    p.out = g->out->data;
    p.offsets = (const int32_t *)g->offsets->data;
    if (g->tile_counter) p.tile_counter = (uint64_t *)g->tile_counter->data;
    else if (backend->tile_counter) EP_TRY(backend->tile_counter(g->a->device, stream, &p.tile_counter));
    if (backend->tile_counter && !p.tile_counter)
        return ep_error(EP_EINVAL, "tile counter: the library has none for this stream, which is captured or "
                                   "came after many others: pass one");
    p.bias = g->bias ? g->bias->data : NULL;
    p.row_weight = g->row_weight ? (const float *)g->row_weight->data : NULL;
    if (g->saved) p.saved = g->saved->data;
    p.saves = g->saved != NULL;
    return backend->gemm(g->a->device, &p, g->a_scale ? &scales : NULL, has_four_bits(g) ? &four_bit : NULL,
                         has_low_rank ? &low_rank : NULL, g->row_tag ? &own : NULL, stream);
}

int ep_gemm_has_counter(int device, void *stream, bool *has) {
    const EpBackend *backend = ep_backend(EP_CUDA);
    uint64_t *counter = NULL;
    if (!backend) return EP_EINVAL;
    EP_TRY(backend->tile_counter(device, stream, &counter));
    *has = counter != NULL;
    return 0;
}
