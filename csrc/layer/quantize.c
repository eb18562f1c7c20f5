/* quantize.c - rows to FP8 by themselves: check the arguments, fill in the parameters, launch.
 *
 * Exports ep_quantize. The operation is local to a rank, and no peer takes part. So a wrong argument is an
 * error on this rank only. */
#include "protocol/quantize.h"
#include "layer/prepare.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

static int check_sizes(const EpQuantize *a, EpQuantizeParams *p) {
    EP_TRY(ep_check_activation(a->activation));
    if (a->x->dtype != EP_F32 && a->x->dtype != EP_BF16 && a->x->dtype != EP_F16)
        return ep_error(EP_ETYPE, "rows: wanted float32, bfloat16 or float16, got %s",
                        ep_dtype_name(a->x->dtype));
    if (a->x->num_dims != 2 || a->q->num_dims != 2)
        return ep_error(EP_EINVAL, "rows and output: wanted 2 dimensions, got %u and %u", a->x->num_dims,
                        a->q->num_dims);
    if (a->x->shape[0] > INT32_MAX || a->q->shape[1] > EP_GEMM_MAX_COLS)
        return ep_error(EP_EINVAL, "%lld rows of %lld numbers: must be at most %d rows of %u numbers",
                        (long long)a->x->shape[0], (long long)a->q->shape[1], INT32_MAX, EP_GEMM_MAX_COLS);
    p->max_rows = (uint32_t)a->x->shape[0];
    p->k = (uint32_t)a->q->shape[1];
    p->dtype = a->x->dtype;
    p->is_pow2 = a->is_pow2;
    ep_quantize_set_activation(p, a->activation);
    return 0;
}

int ep_quantize(const EpQuantize *a, void *stream) {
    const EpBackend *backend = ep_backend(a->x->kind);
    EpQuantizeParams p = {0};
    if (!backend) return EP_EINVAL;
    EP_TRY(check_sizes(a, &p));
    const int64_t M = p.max_rows, K = p.k, num_groups = ep_quantize_num_groups(&p);
    const EpWanted wanted[] = {
        {"rows", a->x, p.dtype, 2, {M, EP_ACT_IS_GATED(p.activation.kind) ? 2 * K : K, -1}},
        {"output", a->q, EP_U8, 2, {M, K, -1}},
        {"scales", a->scales, EP_F32, 2, {num_groups, M, -1}},
    };
    for (uint32_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        EP_TRY(ep_tensor_check(&wanted[i], a->x->kind, a->x->device, 16));
    const EpWanted count = {"number of rows", a->num_rows, EP_I32, 1, {1, -1, -1}};
    EP_TRY(ep_tensor_check(&count, a->x->kind, a->x->device, 4));
    const EpOperand operands[] = {{"output", a->q, true},
                                  {"scales", a->scales, true},
                                  {"rows", a->x, false},
                                  {"number of rows", a->num_rows, false}};
    EP_TRY(ep_tensors_apart(operands, sizeof operands / sizeof operands[0]));
    p.x = a->x->data;
    p.q = (uint8_t *)a->q->data;
    p.scales = (float *)a->scales->data;
    p.num_rows = a->num_rows ? (const int32_t *)a->num_rows->data : NULL;
    if (!M || !K) return 0;
    EP_TRY(backend->quantize(a->x->device, &p, stream));
    return a->is_rowwise ? ep_rescale_rows(a->q, p.scales, p.num_rows, stream) : 0;
}
