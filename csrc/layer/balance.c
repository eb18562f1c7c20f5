/* balance.c - ranks with few rows help those with many: who helps whom, the choices that move, and the
 * weights that travel.
 *
 * Exports for experts.c ep_layer_find_helps, ep_layer_move_choices, ep_layer_send_weights and
 * ep_layer_receive_weights; and ep_layer_helps, ep_layer_set_staging and ep_layer_restore_weights.
 * protocol/balance.h has the arithmetic.
 * Invariant: moves[buffer] belongs to the latest call of ep_layer_experts on the buffer. */
#include <string.h>

#include "backend.h"
#include "layer/layer_state.h"
#include "layer/prepare.h"
#include "protocol/plan.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

enum { ALIGNMENT = 256 }; /* of each weight in a slot of the staging, in bytes */

static uint64_t aligned(uint64_t num_bytes) { return (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
/* The bytes of one expert's part of a weight [L][..]. */
static uint64_t bytes_of_expert(const EpTensor *t) {
    uint64_t num_bytes = t->element_bytes;
    for (uint32_t d = 1; d < t->num_dims; d++) num_bytes *= (uint64_t)t->shape[d];
    return num_bytes;
}

/* ---- helps ---- */

/* The first row of an expert at its rank, in the plan that has these choices of all experts. */
static uint32_t first_row(const EpLayer *l, const int32_t *choices, uint32_t expert) {
    const EpPadding padding = ep_layer_padding(l);
    const uint32_t L = ep_num_local_experts(&l->config.shape);
    uint32_t row = 0;
    for (uint32_t e = expert / L * L; e < expert; e++) row += ep_padded_rows(&padding, (uint32_t)choices[e]);
    return row;
}

int ep_layer_find_helps(EpLayer *l, uint32_t buffer, const EpBalance *b, const EpTensor *plan, EpHeld *held,
                        void *stream, uint32_t *num_rows, EpTravels *travels) {
    EpMoveChoicesParams *moves = &l->moves[buffer];
    int32_t choices[EP_MAX_EXPERTS];
    EpHelps helps;
    EP_TRY(ep_layer_rows_locked(l, buffer, plan, stream, num_rows));
    const EpComm *c = &l->buffers[buffer].comm;
    const uint32_t L = ep_num_local_experts(&c->shape), first = c->my_rank * L;
    if (!c->host->balance_key) return 0;
    if (held && !(c->host->balance_key & EP_BALANCE_HOLDS)) { /* begin anew, as all ranks do in this call */
        memset(held, 0, (c->shape.num_experts + 1) * sizeof *held);
        held[c->shape.num_experts].expert = 1;
    }
    for (uint32_t e = 0; e < c->shape.num_experts; e++) choices[e] = c->host->expert_choices[e];
    ep_find_helps(&c->shape, b, held, choices, &helps);
    if (!helps.num) return 0;
    *num_rows = first_row(l, choices, first + L - 1);
    const EpPadding padding = ep_layer_padding(l);
    *num_rows += ep_padded_rows(&padding, (uint32_t)choices[first + L - 1]);
    for (uint32_t i = 0; i < helps.num; i++) {
        const EpHelp *h = &helps.help[i];
        const uint32_t from = first_row(l, c->host->expert_choices, h->expert) + h->first;
        moves->expert[i] = h->expert;
        moves->slot[i] = h->slot;
        moves->from[i] = (int32_t)from;
        moves->end[i] = (int32_t)(from + h->num);
        if (h->is_held) continue;
        travels->expert[travels->num] = h->expert;
        travels->slot[travels->num++] = h->slot;
    }
    moves->num = helps.num;
    return 0;
}

int ep_layer_helps(EpLayer *l, uint32_t buffer, EpHelps *helps) {
    EP_TRY(ep_layer_lock(l, buffer));
    const EpMoveChoicesParams *moves = &l->moves[buffer];
    helps->num = moves->num;
    for (uint32_t i = 0; i < moves->num; i++)
        helps->help[i] =
            (EpHelp){moves->expert[i], moves->slot[i], 0, (uint32_t)(moves->end[i] - moves->from[i]), false};
    return ep_layer_unlock(l, buffer, 0);
}

int ep_layer_move_choices(EpLayer *l, uint32_t buffer, const EpTensor *plan, const EpTensor *indices,
                          void *stream) {
    const EpShape *s = &l->config.shape;
    if (indices->num_dims != 2)
        return ep_error(EP_EINVAL, "indices: wanted 2 dimensions [T, %u], got %u", s->num_topk,
                        indices->num_dims);
    EP_TRY(ep_layer_check_num_tokens(l, "indices", indices));
    EP_TRY(ep_layer_check_tensor(l, "indices", indices, EP_I32, 2, -1, s->num_topk));
    const EpPlanLayout layout = ep_plan_layout(s, (uint32_t)indices->shape[0]);
    EP_TRY(ep_layer_check_tensor(l, "plan", plan, EP_I32, 1, (int64_t)layout.num_words, -1));
    EpMoveChoicesParams p = l->moves[buffer];
    p.token_expert = (const int32_t *)plan->data + layout.token_expert_off;
    p.token_row = (const int32_t *)plan->data + layout.token_row_off;
    p.indices = (int32_t *)indices->data;
    p.num_choices = (uint64_t)indices->shape[0] * s->num_topk;
    return ep_heap_backend(l->heap)->move_choices(ep_heap_device(l->heap), &p, stream);
}

/* ---- weights ---- */

int ep_layer_set_staging(EpLayer *l, EpHeap *heap, uint64_t off, uint64_t slot_bytes, uint32_t num_slots) {
    if (off % ALIGNMENT || slot_bytes % ALIGNMENT)
        return ep_error(EP_EINVAL, "a staging at %llu, slots of %llu bytes: must be multiples of %u",
                        (unsigned long long)off, (unsigned long long)slot_bytes, ALIGNMENT);
    if (!num_slots || num_slots >= ep_num_local_experts(&l->config.shape))
        return ep_error(EP_EINVAL,
                        "a staging of %u helper slots: must be fewer than the %u experts of a rank",
                        num_slots, ep_num_local_experts(&l->config.shape));
    EP_TRY(ep_layer_lock_all(l));
    EpHeap *const before = l->staging.heap;
    l->staging = (EpStaging){ep_heap_retain(heap), off, slot_bytes, num_slots};
    for (uint32_t b = 0; b < l->config.num_buffers; b++) ep_layer_unlock(l, b, 0);
    if (before) ep_heap_release(before);
    return 0;
}

/* at: a physical expert of this rank. Copy its part of each weight to a slot in the staging of rank `to`. If
 * `to` is this rank, copy it from the slot in this rank's own staging instead. */
static int copy(const EpLayer *l, const EpHelpedWeights *w, uint32_t at, uint32_t slot, uint32_t to,
                void *stream) {
    const EpStaging *s = &l->staging;
    const uint32_t L = ep_num_local_experts(&l->config.shape), me = l->buffers[0].comm.my_rank;
    uint64_t off = s->off + (slot % L - (L - s->num_slots)) * s->slot_bytes;
    for (uint32_t i = 0; i < EP_NUM_WEIGHTS; i++) {
        const EpTensor *t = w->weights[i];
        if (!t) continue;
        const uint64_t num_bytes = bytes_of_expert(t);
        char *own = (char *)t->data + at % L * num_bytes;
        EP_TRY(to == me ? ep_heap_get(s->heap, own, off, num_bytes, me, stream)
                        : ep_heap_put(s->heap, off, own, num_bytes, to, stream));
        off += aligned(num_bytes);
    }
    return 0;
}

static int check_slots(const EpLayer *l, const EpHelpedWeights *w) {
    const uint32_t L = ep_num_local_experts(&l->config.shape), E = l->config.shape.num_experts;
    uint64_t num_bytes = 0;
    for (uint32_t i = 0; i < EP_NUM_WEIGHTS; i++)
        if (w->weights[i]) num_bytes += aligned(bytes_of_expert(w->weights[i]));
    if (!l->staging.heap)
        return ep_error(EP_EINVAL, "helper slots: this layer has no staging for their weights");
    if (num_bytes > l->staging.slot_bytes)
        return ep_error(EP_EINVAL, "helper slots: the weights of an expert have %llu bytes, and a slot %llu",
                        (unsigned long long)num_bytes, (unsigned long long)l->staging.slot_bytes);
    for (uint32_t i = 0; i < w->num; i++)
        if (w->expert[i] >= E || w->slot[i] >= E || w->slot[i] % L < L - l->staging.num_slots ||
            w->expert[i] / L == w->slot[i] / L)
            return ep_error(EP_EINVAL,
                            "helper slot %u for expert %u: of %u experts, the last %u of each %u "
                            "are slots, for experts of other ranks",
                            w->slot[i], w->expert[i], E, l->staging.num_slots, L);
    return 0;
}

int ep_layer_send_weights(const EpLayer *l, const EpHelpedWeights *w, void *stream) {
    const uint32_t L = ep_num_local_experts(&l->config.shape);
    EP_TRY(check_slots(l, w));
    for (uint32_t i = 0; i < w->num; i++)
        if (w->expert[i] / L == l->buffers[0].comm.my_rank)
            EP_TRY(copy(l, w, w->expert[i], w->slot[i], w->slot[i] / L, stream));
    return 0;
}

int ep_layer_receive_weights(const EpLayer *l, const EpHelpedWeights *w, void *stream) {
    const uint32_t L = ep_num_local_experts(&l->config.shape), me = l->buffers[0].comm.my_rank;
    EP_TRY(check_slots(l, w));
    for (uint32_t i = 0; i < w->num; i++)
        if (w->slot[i] / L == me) EP_TRY(copy(l, w, w->slot[i], w->slot[i], me, stream));
    return 0;
}

static int check_weights(const EpLayer *l, const EpHelpedWeights *w) {
    const EpBackendKind kind = ep_heap_kind(l->heap);
    const int64_t L = ep_num_local_experts(&l->config.shape);
    for (uint32_t i = 0; i < EP_NUM_WEIGHTS; i++) {
        const EpTensor *t = w->weights[i];
        const EpWanted wanted = {"weights", t, l->config.shape.dtype, i % 2 ? 2 : 3, {L, -1, -1, -1}};
        EP_TRY(ep_tensor_check(&wanted, kind, ep_heap_device(l->heap), 1));
    }
    return check_slots(l, w);
}

static int restore(EpLayer *l, uint32_t buffer, const EpHelpedWeights *w, void *stream) {
    int code = check_weights(l, w);
    if (code) return ep_layer_fail(l, buffer, EP_OP_BARRIER, code, stream);
    EP_TRY(ep_layer_barrier_locked(l, buffer, stream));
    code = ep_layer_send_weights(l, w, stream);
    if (code) return ep_layer_fail(l, buffer, EP_OP_BARRIER, code, stream);
    EP_TRY(ep_layer_barrier_locked(l, buffer, stream));
    code = ep_layer_receive_weights(l, w, stream);
    return code ? ep_layer_fail(l, buffer, EP_OP_DISPATCH, code, stream) : 0;
}

int ep_layer_restore_weights(EpLayer *l, uint32_t buffer, uint32_t num, const uint32_t *expert,
                             const uint32_t *slot, const EpTensor *const weights[4], void *stream) {
    EpHelpedWeights w = {.num = num, .expert = expert, .slot = slot};
    for (uint32_t i = 0; i < EP_NUM_WEIGHTS; i++) w.weights[i] = weights[i];
    EP_TRY(ep_layer_lock(l, buffer));
    return ep_layer_unlock(l, buffer, restore(l, buffer, &w, stream));
}
