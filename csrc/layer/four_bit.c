/* four_bit.c - weights of 4 bits: check their scales, and expand them to FP8.
 *
 * Exports ep_read_four_bit and ep_expand. ep_expand is local to a rank, and no peer takes part. So a wrong
 * argument is an error on this rank only. */
#include "layer/prepare.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

int ep_read_four_bit(const EpTensor *scale, const EpTensor *zero, const EpFourBitSizes *sizes,
                     const EpTensor *first, EpFourBit *four_bit) {
    const bool is_mxfp4 = scale->dtype == EP_U8;
    const int64_t in_block = scale->num_dims == 4 ? scale->shape[3] / EP_FOUR_BIT_UNIT : 0;
    const int64_t group = in_block > 0 ? EP_FOUR_BIT_BLOCK / in_block : 0;
    if (group * in_block != EP_FOUR_BIT_BLOCK || !ep_four_bit_is_group(is_mxfp4 ? EP_MXFP4 : EP_INT4, group))
        return ep_error(
            EP_EINVAL,
            "scales of weights of 4 bits: wanted 4 dimensions, and the last one %s, got %u and %lld",
            is_mxfp4 ? "512" : "512, 256 or 128", scale->num_dims,
            scale->num_dims == 4 ? (long long)scale->shape[3] : 0);
    if (is_mxfp4 && zero) return ep_error(EP_EINVAL, "b_zero: must be absent, because MXFP4 has no zeros");
    const int64_t L = sizes->num, num_rows = sizes->n / EP_FOUR_BIT_UNIT;
    const int64_t num_blocks = ep_four_bit_num_blocks(sizes->k), last = EP_FOUR_BIT_UNIT * in_block;
    const EpWanted wanted[] = {
        {"scales of the weights", scale, is_mxfp4 ? EP_U8 : sizes->dtype, 4, {L, num_rows, num_blocks, last}},
        {"zeros of the weights", zero, EP_U8, 4, {L, num_rows, num_blocks, last}}};
    for (uint32_t i = 0; i < 2; i++)
        EP_TRY(ep_tensor_check(&wanted[i], first->kind, first->device, first->kind == EP_CUDA ? 16 : 2));
    four_bit->scales = scale->data;
    four_bit->zeros = zero ? (const uint8_t *)zero->data : NULL;
    four_bit->format = is_mxfp4 ? EP_MXFP4 : EP_INT4;
    four_bit->group = (uint32_t)group;
    return 0;
}

int ep_expand(const EpExpand *a, void *stream) {
    const EpTensor *numbers = a->numbers;
    const EpBackend *backend = ep_backend(numbers->kind);
    EpExpandParams p = {.dtype = a->dtype};
    if (!backend) return EP_EINVAL;
    if (a->dtype != EP_BF16 && a->dtype != EP_F16)
        return ep_error(EP_ETYPE, "dtype: wanted bfloat16 or float16, got %s", ep_dtype_name(a->dtype));
    if (numbers->num_dims != 3 || numbers->shape[0] > INT32_MAX)
        return ep_error(EP_EINVAL, "weights: wanted 3 dimensions, the first below 2^31, got %u dimensions",
                        numbers->num_dims);
    const int64_t L = numbers->shape[0], N = numbers->shape[1], K = 2 * numbers->shape[2];
    if (N <= 0 || K <= 0 || N % EP_FOUR_BIT_UNIT || K % EP_FOUR_BIT_UNIT || N > EP_GEMM_MAX_COLS ||
        K > EP_GEMM_MAX_COLS)
        return ep_error(EP_EINVAL,
                        "weights of %lld by %lld: both must be positive multiples of %u, at most %u",
                        (long long)N, (long long)K, EP_FOUR_BIT_UNIT, EP_GEMM_MAX_COLS);
    p.num = (uint32_t)L;
    p.n = (uint32_t)N;
    p.k = (uint32_t)K;
    const EpFourBitSizes sizes = {p.num, p.n, p.k, p.dtype};
    const EpWanted wanted[] = {
        {"weights", numbers, EP_U8, 3, {L, N, K / 2}},
        {"output", a->q, EP_U8, 3, {L, N, K}},
        {"scales", a->q_scales, EP_F32, 3, {L, ep_gemm_num_blocks(p.n), ep_gemm_num_blocks(p.k)}},
        {"scales of the experts", a->to, EP_F32, 1, {L, -1, -1}}};
    for (uint32_t i = 0; i < 4; i++) EP_TRY(ep_tensor_check(&wanted[i], numbers->kind, numbers->device, 16));
    EP_TRY(ep_read_four_bit(a->scales, a->zeros, &sizes, numbers, &p.weights));
    const EpOperand operands[] = {{"output", a->q, true},
                                  {"scales", a->q_scales, true},
                                  {"weights", numbers, false},
                                  {"scales of the weights", a->scales, false},
                                  {"zeros of the weights", a->zeros, false},
                                  {"scales of the experts", a->to, false}};
    EP_TRY(ep_tensors_apart(operands, sizeof operands / sizeof operands[0]));
    p.numbers = (const uint8_t *)numbers->data;
    p.q = (uint8_t *)a->q->data;
    p.q_scales = (float *)a->q_scales->data;
    p.to = a->to ? (const float *)a->to->data : NULL;
    return L ? backend->expand(numbers->device, &p, stream) : 0;
}
