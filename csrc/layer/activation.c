/* activation.c - the gradient of an activation: check the arguments, fill in the parameters, launch.
 *
 * Exports ep_activation and ep_check_activation. The operation is local to a rank, and no peer takes part. */
#include "layer/prepare.h"
#include "protocol/quantize.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

int ep_check_activation(EpActivation a) {
    if (ep_act_is_valid(a)) return 0;
    return ep_error(EP_EINVAL,
                    "activation %u (alpha %g, limit %g): must be one of EP_ACTIVATIONS, with valid numbers",
                    a.kind, (double)a.alpha, (double)a.limit);
}

int ep_activation(const EpActivationArgs *a, void *stream) {
    const EpTensor *y = a->weighted;
    const EpBackendKind kind = y->kind;
    const EpBackend *backend = ep_backend(kind);
    const bool quantizes = a->d_h_scale != NULL;
    const uint32_t dtype = a->d->dtype, out_dtype = quantizes ? EP_U8 : dtype;
    EpActivationParams p = {0};
    if (!backend) return EP_EINVAL;
    EP_TRY(ep_check_activation(a->activation));
    if (dtype != EP_BF16 && dtype != EP_F16)
        return ep_error(EP_ETYPE, "gradient: wanted bfloat16 or float16, got %s", ep_dtype_name(dtype));
    if (y->num_dims != 2 || a->offsets->num_dims != 1 || a->offsets->shape[0] < 1)
        return ep_error(EP_EINVAL, "wanted weighted rows of 2 dimensions and offsets of 1; got %u and %u",
                        y->num_dims, a->offsets->num_dims);
    const int64_t M = y->shape[0], I = y->shape[1], L = a->offsets->shape[0] - 1;
    const int64_t H = EP_ACT_IS_GATED(a->activation.kind) ? 2 * I : I;
    if (M > INT32_MAX || L >= INT32_MAX || I < 1 || I > 1 << 24)
        return ep_error(EP_EINVAL, "%lld rows of %lld columns for %lld experts: too large", (long long)M,
                        (long long)I, (long long)L);
    if (kind == EP_CUDA && I % 8)
        return ep_error(EP_EINVAL,
                        "weighted rows: on CUDA the number of columns must be a multiple of 8, got %lld",
                        (long long)I);
    if (quantizes != (a->weighted_scale != NULL) || (quantizes && I % EP_QUANTIZE_GROUP))
        return ep_error(EP_EINVAL, "scales: give both or neither, for a multiple of %u columns, not for %lld",
                        EP_QUANTIZE_GROUP, (long long)I);
    const EpWanted wanted[] = {
        {"input of the activation", a->h, dtype, 2, {M, H, -1}},
        {"gradient", a->d, dtype, 2, {M, I, -1}},
        {"offsets", a->offsets, EP_I32, 1, {L + 1, -1, -1}},
        {"row weight", a->row_weight, EP_F32, 1, {M, -1, -1}},
        {"gradient of the input", a->d_h, out_dtype, 2, {M, H, -1}},
        {"weighted rows", y, out_dtype, 2, {M, I, -1}},
        {"dot products", a->dots, EP_F32, 1, {M, -1, -1}},
        {"scales of the gradient", a->d_h_scale, EP_F32, 2, {H / EP_QUANTIZE_GROUP, M, -1}},
        {"scales of the weighted rows", a->weighted_scale, EP_F32, 2, {I / EP_QUANTIZE_GROUP, M, -1}},
    };
    for (uint32_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        EP_TRY(ep_tensor_check(&wanted[i], kind, y->device, kind == EP_CUDA ? 16 : 2));
    /* weighted may be d, which is read and written number by number. */
    const bool is_in_place = a->d->data == y->data && !quantizes;
    const EpOperand operands[] = {{"gradient of the input", a->d_h, true},
                                  {"weighted rows", y, true},
                                  {"dot products", a->dots, true},
                                  {"scales of the gradient", a->d_h_scale, true},
                                  {"scales of the weighted rows", a->weighted_scale, true},
                                  {"input of the activation", a->h, false},
                                  {"gradient", is_in_place ? NULL : a->d, false},
                                  {"offsets", a->offsets, false},
                                  {"row weight", a->row_weight, false}};
    EP_TRY(ep_tensors_apart(operands, sizeof operands / sizeof operands[0]));
    p.h = a->h->data;
    p.d = a->d->data;
    p.offsets = (const int32_t *)a->offsets->data;
    p.row_weight = a->row_weight ? (const float *)a->row_weight->data : NULL;
    if (quantizes) {
        p.d_h8 = (uint8_t *)a->d_h->data;
        p.weighted8 = (uint8_t *)y->data;
        p.d_h_scales = (float *)a->d_h_scale->data;
        p.weighted_scales = (float *)a->weighted_scale->data;
    } else {
        p.d_h = a->d_h->data;
        p.weighted = y->data;
    }
    p.dots = (float *)a->dots->data;
    p.num_rows = (uint32_t)M;
    p.num_experts = (uint32_t)L;
    p.num_cols = (uint32_t)I;
    p.is_f16 = dtype == EP_F16;
    p.activation = ep_act_with_numbers(a->activation);
    EP_TRY(backend->activation(y->device, &p, stream));
    return quantizes && a->is_rowwise && M ? ep_rescale_rows(a->d_h, p.d_h_scales, p.offsets + L, stream) : 0;
}
