/* expert_map.h - which physical expert a choice goes to, if experts have replicas: arithmetic. */
#ifndef EP_EXPERT_MAP_H
#define EP_EXPERT_MAP_H
#include "protocol/shape.h"

/* Map the choices of experts [T][K] to physical experts.
 * table [E + 4][1 + R]: the number of replicas of an expert, then its replicas; or 1 and what a wrong or a
 * dropped choice becomes. The lines are those of the choices -2 to E + 1, and a choice beyond these has the
 * line of the nearest one.
 * Of n replicas, token t of rank r gets number (t + r) % n. */
typedef struct {
    const void *indices; /* i32 or i64, by index_bytes */
    const int32_t *table;
    int32_t *out;
    uint64_t num_choices;
    uint32_t index_bytes, num_topk, num_experts, most_replicas, rank; /* R is most_replicas */
} EpMapChoicesParams;
EP_FN int32_t ep_mapped_choice(const EpMapChoicesParams *p, uint64_t i) {
    const int64_t chosen =
        p->index_bytes == 8 ? ((const int64_t *)p->indices)[i] : ((const int32_t *)p->indices)[i];
    const int64_t most = (int64_t)p->num_experts + 1;
    const uint64_t line = (uint64_t)((chosen < -2 ? -2 : chosen > most ? most : chosen) + 2);
    const int32_t *its = p->table + line * (1 + p->most_replicas);
    const uint32_t num = its[0] < 1 || (uint32_t)its[0] > p->most_replicas ? 1 : (uint32_t)its[0];
    return its[1 + (i / p->num_topk + p->rank) % num];
}

#endif /* EP_EXPERT_MAP_H */
