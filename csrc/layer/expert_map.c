/* expert_map.c - the physical experts of choices. Exports ep_map_choices, which is local to a rank. */
#include "backend.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

int ep_map_choices(const EpMapChoices *a, void *stream) {
    const EpBackend *backend = ep_backend(a->indices->kind);
    const EpTensor *in = a->indices, *table = a->table;
    if (!backend) return EP_EINVAL;
    if (in->dtype != EP_I32 && in->dtype != EP_I64)
        return ep_error(EP_ETYPE, "topk_idx: wanted int32 or int64, got %s", ep_dtype_name(in->dtype));
    if (in->num_dims != 2) return ep_error(EP_EINVAL, "topk_idx: wanted 2 dimensions, got %u", in->num_dims);
    if (table->num_dims != 2 || table->shape[0] < 5 || table->shape[0] > INT32_MAX || table->shape[1] < 2 ||
        table->shape[1] > INT32_MAX || in->shape[1] > INT32_MAX)
        return ep_error(EP_EINVAL, "table: wanted [E + 4, 1 + R] for E experts of R replicas, 1 or more");
    const EpWanted wanted[] = {
        {"topk_idx", in, in->dtype, 2, {-1, -1}},
        {"table", table, EP_I32, 2, {-1, -1}},
        {"output", a->out, EP_I32, 2, {in->shape[0], in->shape[1]}},
    };
    for (uint32_t i = 0; i < 3; i++) EP_TRY(ep_tensor_check(&wanted[i], in->kind, in->device, 1));
    const EpOperand operands[] = {{"output", a->out, true}, {"topk_idx", in, false}, {"table", table, false}};
    EP_TRY(ep_tensors_apart(operands, 3));
    const EpMapChoicesParams p = {.indices = in->data,
                                  .table = (const int32_t *)table->data,
                                  .out = (int32_t *)a->out->data,
                                  .num_choices = (uint64_t)in->shape[0] * (uint64_t)in->shape[1],
                                  .index_bytes = in->dtype == EP_I64 ? 8 : 4,
                                  .num_topk = (uint32_t)in->shape[1],
                                  .num_experts = (uint32_t)table->shape[0] - 4,
                                  .most_replicas = (uint32_t)table->shape[1] - 1,
                                  .rank = a->rank};
    return p.num_choices ? backend->map_choices(in->device, &p, stream) : 0;
}
