/* balance.h - which ranks help others with the rows of their experts: arithmetic, the same on all ranks.
 *
 * The last experts of each rank are its helper slots. The router chooses none of them. When a plan has the
 * rows of all experts, ep_find_helps gives rows of the fullest ranks to the slots of the emptiest. A slot
 * takes rows of one expert. Every rank computes the same list from the same counts, so ranks need not talk
 * about it.
 *
 * Letters as in shape.h.
 * Invariant: the choices keep their order, and each belongs to exactly one physical expert. */
#ifndef EP_BALANCE_H
#define EP_BALANCE_H
#include "protocol/flags.h"

#define EP_MAX_HELPS 64u /* in one plan */

/* Slot `slot` computes num rows of expert `expert`: the choices first .. first + num - 1 of it, in the order
 * of the plan's rows. Both are physical experts. */
typedef struct {
    uint32_t expert, slot, first, num;
} EpHelp;
typedef struct {
    uint32_t num;
    EpHelp help[EP_MAX_HELPS];
} EpHelps;

/* How many helper slots a rank has, and the fewest rows with which an expert goes to one: its weights must
 * travel, which takes as long as to multiply so many rows. */
typedef struct {
    uint32_t num_slots, min_rows;
} EpBalance;

/* The fullest rank that is not in the mask `done`, or W. */
static inline uint32_t ep_fullest_rank(const uint64_t *load, uint32_t num_ranks, uint32_t done) {
    uint32_t best = num_ranks;
    for (uint32_t r = 0; r < num_ranks; r++)
        if (!(done >> r & 1u) && (best == num_ranks || load[r] > load[best])) best = r;
    return best;
}
/* The emptiest rank with a free slot, or W. */
static inline uint32_t ep_emptiest_rank(const uint64_t *load, const uint32_t *used, uint32_t num_ranks,
                                        uint32_t num_slots) {
    uint32_t best = num_ranks;
    for (uint32_t r = 0; r < num_ranks; r++)
        if (used[r] < num_slots && (best == num_ranks || load[r] < load[best])) best = r;
    return best;
}

/* Find who helps whom. rows [E]: the choices of each physical expert, of all ranks; they become those after
 * the help. Each step moves the most rows that bring neither rank across the mean: from the end of the
 * largest expert of the fullest rank, to the emptiest rank. */
static inline void ep_find_helps(const EpShape *s, const EpBalance *b, int32_t *rows, EpHelps *helps) {
    const uint32_t L = ep_num_local_experts(s), W = s->num_ranks;
    uint64_t load[EP_MAX_RANKS] = {0}, total = 0;
    uint32_t used[EP_MAX_RANKS] = {0}, done = 0;
    helps->num = 0;
    for (uint32_t e = 0; e < W * L; e++) {
        load[e / L] += (uint32_t)rows[e];
        total += (uint32_t)rows[e];
    }
    const uint64_t mean = total / W + (total % W != 0);
    while (helps->num < EP_MAX_HELPS && b->num_slots < L) {
        const uint32_t from = ep_fullest_rank(load, W, done);
        const uint32_t to = ep_emptiest_rank(load, used, W, b->num_slots);
        if (from == W || to == W || load[from] <= mean || load[to] >= mean) return;
        uint32_t largest = from * L;
        for (uint32_t e = from * L; e < (from + 1) * L - b->num_slots; e++)
            if (rows[e] > rows[largest]) largest = e;
        uint64_t num = (uint32_t)rows[largest];
        if (num > load[from] - mean) num = load[from] - mean;
        if (num > mean - load[to]) num = mean - load[to];
        if (num == 0 || num < b->min_rows) {
            done |= 1u << from;
            continue;
        }
        rows[largest] -= (int32_t)num;
        load[from] -= num;
        load[to] += num;
        const uint32_t slot = (to + 1) * L - b->num_slots + used[to]++;
        rows[slot] = (int32_t)num;
        const EpHelp help = {largest, slot, (uint32_t)rows[largest], (uint32_t)num};
        helps->help[helps->num++] = help;
    }
}

/* The balance_key of all ranks in a plan that all have entered, or 0 if it is not equal. A rank's key says
 * of which weights it will have gradients. It is 0 where a rank cannot help, for example because a
 * compiler or a profiler must see its operations. */
EP_FN uint32_t ep_agreed_balance_key(const EpComm *c, uint64_t epoch) {
    const uint32_t key = ep_header(c, c->my_rank, 0, epoch)->balance_key;
    for (uint32_t r = 1; r < c->shape.num_ranks; r++)
        if (ep_header(c, c->my_rank, r, epoch)->balance_key != key) return 0;
    return key;
}

/* Move the choices of a plan to the slots that compute them. The row numbers of a choice are those at its
 * expert's rank: help i takes the choices of its expert whose rows are from[i] .. end[i] - 1. */
typedef struct {
    const int32_t *token_expert, *token_row; /* [T][K], of the plan */
    int32_t *indices;                        /* [T][K]: becomes the physical expert of each choice, or -1 */
    uint64_t num_choices;
    uint32_t num;
    uint32_t expert[EP_MAX_HELPS], slot[EP_MAX_HELPS];
    int32_t from[EP_MAX_HELPS], end[EP_MAX_HELPS];
} EpMoveChoicesParams;
EP_FN int32_t ep_moved_choice(const EpMoveChoicesParams *p, uint64_t i) {
    const int32_t e = p->token_expert[i], row = p->token_row[i];
    int32_t to = e;
    for (uint32_t k = 0; k < p->num; k++)
        if (e == (int32_t)p->expert[k] && row >= p->from[k] && row < p->end[k]) to = (int32_t)p->slot[k];
    return to;
}

#endif /* EP_BALANCE_H */
