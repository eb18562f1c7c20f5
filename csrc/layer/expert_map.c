/* expert_map.c - the physical experts of choices. Exports ep_map_choices and ep_fill_expert_map, which are
 * local to a rank. */
#include "protocol/expert_map.h"
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

int ep_fill_expert_map(const EpExpertMap *a) {
    const int64_t num_physical = a->held->num_dims == 1 ? a->held->shape[0] : 0;
    const int64_t num_experts = a->count->num_dims == 1 ? a->count->shape[0] : 0;
    const int64_t most = num_physical - num_experts + 1;
    if (num_experts < 1 || most < 1 || num_physical >= INT32_MAX)
        return ep_error(EP_EINVAL, "a map of %lld physical experts and %lld logical ones: not possible",
                        (long long)num_physical, (long long)num_experts);
    const EpWanted wanted[] = {
        {"held", a->held, EP_I64, 1, {num_physical}},
        {"replicas", a->replicas, EP_I64, 2, {num_experts, most}},
        {"count", a->count, EP_I64, 1, {num_experts}},
        {"table", a->table, EP_I32, 2, {num_experts + 4, 1 + most}},
    };
    for (uint32_t i = 0; i < 4; i++) EP_TRY(ep_tensor_check(&wanted[i], EP_CPU, 0, i < 3 ? 8 : 4));
    const EpOperand operands[] = {{"replicas", a->replicas, true},
                                  {"count", a->count, true},
                                  {"table", a->table, true},
                                  {"held", a->held, false}};
    EP_TRY(ep_tensors_apart(operands, 4));

    const int64_t *held = (const int64_t *)a->held->data;
    int64_t *replicas = (int64_t *)a->replicas->data, *count = (int64_t *)a->count->data;
    int32_t *table = (int32_t *)a->table->data;
    for (int64_t e = 0; e < num_experts; e++) count[e] = 0;
    for (int64_t i = 0; i < num_experts * most; i++) replicas[i] = -1;
    for (int64_t p = 0; p < num_physical; p++) {
        const int64_t e = held[p];
        if (e == -1) continue;
        if (e < -1 || e >= num_experts || count[e] == most)
            return ep_error(EP_EINVAL, "physical expert %lld holds expert %lld of %lld, or another has none",
                            (long long)p, (long long)e, (long long)num_experts);
        replicas[e * most + count[e]++] = p;
    }
    for (int64_t line = 0; line < num_experts + 4; line++) {
        const int64_t e = line - 2, line_begin = line * (1 + most);
        const bool is_expert = e >= 0 && e < num_experts;
        const int64_t num = is_expert ? count[e] : 1;
        table[line_begin] = (int32_t)num;
        for (int64_t i = 0; i < most; i++)
            table[line_begin + 1 + i] = is_expert ? (int32_t)replicas[e * most + i] : -1;
        if (!num) return ep_error(EP_EINVAL, "no physical expert holds expert %lld", (long long)e);
    }
    table[1] = -2;                                                         /* choices below -1 */
    table[(num_experts + 3) * (1 + most) + 1] = (int32_t)num_physical + 1; /* choices above E */
    return 0;
}
