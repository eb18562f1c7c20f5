/* rescale.c - FP8 with one scale for a row, or for an expert: check the arguments, fill in the parameters,
 * launch.
 *
 * Exports ep_rescale_weight, and ep_rescale_rows for what makes rows of FP8. They are local to a rank, and no
 * peer takes part. So a wrong argument is an error on this rank only. */
#include "layer/prepare.h"
#include "protocol/quantize.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

static int check_columns(const EpTensor *q, int64_t K) {
    if (K >= 1 && K <= EP_GEMM_MAX_COLS && (q->kind != EP_CUDA || K % 16 == 0)) return 0;
    return ep_error(EP_EINVAL, "one scale for %lld columns: must be 1 to %u, and on CUDA a multiple of 16",
                    (long long)K, EP_GEMM_MAX_COLS);
}

int ep_rescale_rows(const EpTensor *q, float *scales, const int32_t *num_rows, void *stream) {
    const EpRescaleParams p = {.q = (uint8_t *)q->data,
                               .scales = scales,
                               .num_rows = num_rows,
                               .scale_row = 1,
                               .scale_col = (uint64_t)q->shape[0],
                               .num = 1,
                               .n = (uint32_t)q->shape[0],
                               .k = (uint32_t)q->shape[1],
                               .rows_of_scale = 1};
    EP_TRY(check_columns(q, q->shape[1]));
    return ep_backend(q->kind)->rescale(q->device, &p, stream);
}

int ep_rescale_weight(const EpRescaleWeight *a, void *stream) {
    const EpTensor *q = a->q;
    const EpBackend *backend = ep_backend(q->kind);
    if (!backend) return EP_EINVAL;
    if (q->num_dims != 3 || a->scales->num_dims != 3)
        return ep_error(EP_EINVAL, "weights and scales: wanted 3 dimensions, got %u and %u", q->num_dims,
                        a->scales->num_dims);
    const int64_t L = q->shape[0], N = q->shape[1], K = q->shape[2];
    if (N > INT32_MAX || L > INT32_MAX)
        return ep_error(EP_EINVAL, "%lld by %lld rows: both must be less than 2^31", (long long)L,
                        (long long)N);
    EP_TRY(check_columns(q, K));
    const uint32_t num_n = ep_gemm_num_blocks((uint32_t)N), num_k = ep_gemm_num_blocks((uint32_t)K);
    EpTensor scales = *a->scales; /* any strides */
    scales.stride[2] = 1;
    scales.stride[1] = num_k;
    scales.stride[0] = (int64_t)num_n * num_k;
    const EpWanted wanted[] = {{"weights", q, EP_U8, 3, {L, N, K}},
                               {"scales", &scales, EP_F32, 3, {L, num_n, num_k}},
                               {"scales of the experts", a->to, EP_F32, 1, {L, -1, -1}}};
    for (uint32_t i = 0; i < 3; i++) EP_TRY(ep_tensor_check(&wanted[i], q->kind, q->device, i ? 4 : 16));
    const EpOperand operands[] = {
        {"weights", q, true}, {"scales", a->scales, false}, {"scales of the experts", a->to, false}};
    EP_TRY(ep_tensors_apart(operands, 3));
    const EpRescaleParams p = {.q = (uint8_t *)q->data,
                               .scales = (float *)a->scales->data,
                               .to = (const float *)a->to->data,
                               .scale_matrix = (uint64_t)a->scales->stride[0],
                               .scale_row = (uint64_t)a->scales->stride[1],
                               .scale_col = (uint64_t)a->scales->stride[2],
                               .num = (uint32_t)L,
                               .n = (uint32_t)N,
                               .k = (uint32_t)K,
                               .rows_of_scale = EP_GEMM_SCALE_BLOCK};
    return L && N ? backend->rescale(q->device, &p, stream) : 0;
}
