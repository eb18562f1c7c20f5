/* balance.c - ranks with few rows help those with many: who helps whom, and the choices that move.
 *
 * Exports ep_layer_find_helps for experts.c, and ep_layer_helps and ep_layer_move_choices. protocol/balance.h
 * has the arithmetic.
 * Invariant: moves[buffer] belongs to the latest call of ep_layer_experts on the buffer. */
#include "backend.h"
#include "layer/layer_state.h"
#include "layer/prepare.h"
#include "protocol/plan.h"
#include "runtime/error.h"

/* The first row of an expert at its rank, in the plan that has these choices of all experts. */
static uint32_t first_row(const EpLayer *l, const int32_t *choices, uint32_t expert) {
    const EpPadding padding = ep_layer_padding(l);
    const uint32_t L = ep_num_local_experts(&l->config.shape);
    uint32_t row = 0;
    for (uint32_t e = expert / L * L; e < expert; e++) row += ep_padded_rows(&padding, (uint32_t)choices[e]);
    return row;
}

int ep_layer_find_helps(EpLayer *l, uint32_t buffer, const EpBalance *b, const EpTensor *plan, void *stream,
                        uint32_t *num_rows) {
    EpMoveChoicesParams *moves = &l->moves[buffer];
    int32_t choices[EP_MAX_EXPERTS];
    EpHelps helps;
    EP_TRY(ep_layer_rows_locked(l, buffer, plan, stream, num_rows));
    const EpComm *c = &l->buffers[buffer].comm;
    const uint32_t L = ep_num_local_experts(&c->shape), first = c->my_rank * L;
    if (!c->host->balance_key) return 0;
    for (uint32_t e = 0; e < c->shape.num_experts; e++) choices[e] = c->host->expert_choices[e];
    ep_find_helps(&c->shape, b, choices, &helps);
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
            (EpHelp){moves->expert[i], moves->slot[i], 0, (uint32_t)(moves->end[i] - moves->from[i])};
    return ep_layer_unlock(l, buffer, 0);
}

static int move_choices(EpLayer *l, uint32_t buffer, const EpTensor *plan, const EpTensor *indices,
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

int ep_layer_move_choices(EpLayer *l, uint32_t buffer, const EpTensor *plan, const EpTensor *indices,
                          void *stream) {
    EP_TRY(ep_layer_lock(l, buffer));
    return ep_layer_unlock(l, buffer, move_choices(l, buffer, plan, indices, stream));
}
