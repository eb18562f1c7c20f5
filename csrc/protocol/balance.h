/* balance.h - which ranks help others with the rows of their experts: arithmetic, the same on all ranks.
 *
 * The last experts of each rank are its helper slots. The router chooses none of them. When a plan has the
 * rows of all experts, ep_find_helps gives rows of the fullest ranks to the slots of the emptiest. A slot
 * takes rows of one expert. Every rank computes the same list from the same counts, so ranks need not talk
 * about it.
 *
 * Slots keep the weights that they got. While nobody changes a weight, a slot that holds an expert gets rows
 * of it without a copy (EpHeld). What slots hold decides which slot of a rank helps, and never which rank: so
 * the results of a call do not depend on earlier calls.
 *
 * Letters as in shape.h.
 * Invariant: the choices keep their order, and each belongs to exactly one physical expert. */
#ifndef EP_BALANCE_H
#define EP_BALANCE_H
#include "protocol/flags.h"

#define EP_MAX_HELPS 64u /* in one plan */

/* Slot `slot` computes num rows of expert `expert`: the choices first .. first + num - 1 of it, in the order
 * of the plan's rows. Both are physical experts. is_held: the slot holds the expert already. */
typedef struct {
    uint32_t expert, slot, first, num;
    bool is_held;
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

/* What slots hold, in a table [E + 1], of which an entry of a slot is used. The last entry has in `expert` 1
 * if the table is the same on all ranks, and in `call` the number of calls. */
typedef struct {
    int32_t expert; /* the physical expert, + 1; 0: none */
    uint32_t call;  /* the latest one in which the slot helped */
} EpHeld;
/* A bit of a rank's balance_key: its table is that of the other ranks, if they say so too, and it has changed
 * no weight since. */
#define EP_BALANCE_HOLDS 0x80000000u

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

/* Choose a slot for each help, of the rank that its `slot` is: the one that holds the expert, else the one
 * that has not helped for the longest time. rows [E]: becomes the rows of the slots. */
static inline void ep_place_helps(const EpShape *s, const EpBalance *b, EpHeld *held, int32_t *rows,
                                  EpHelps *helps) {
    const uint32_t E = s->num_experts, L = ep_num_local_experts(s);
    const uint32_t now = held ? ++held[E].call : 0;
    bool is_used[EP_MAX_EXPERTS] = {false};
    for (uint32_t pass = 0; pass < 2; pass++) /* first those that are held: no other help takes their slot */
        for (uint32_t i = 0; i < helps->num; i++) {
            EpHelp *h = &helps->help[i];
            if (h->is_held) continue;
            const uint32_t end = (h->slot / L + 1) * L;
            uint32_t best = end;
            for (uint32_t slot = end - b->num_slots; slot < end; slot++) {
                if (is_used[slot]) continue;
                if (pass == 0 ? held && held[slot].expert == (int32_t)h->expert + 1
                              : best == end || (held && now - held[slot].call > now - held[best].call))
                    best = slot;
            }
            if (best == end) continue;
            is_used[best] = true;
            rows[best] = (int32_t)h->num;
            h->slot = best;
            h->is_held = pass == 0;
            const EpHeld entry = {(int32_t)h->expert + 1, now};
            if (held) held[best] = entry;
        }
}

/* Find who helps whom. rows [E]: the choices of each physical expert, of all ranks; they become those after
 * the help. held: NULL, or what the slots hold, which becomes what they hold in this call. Each step moves
 * the most rows that bring neither rank across the mean: from the end of the largest expert of the fullest
 * rank, to the emptiest rank. */
static inline void ep_find_helps(const EpShape *s, const EpBalance *b, EpHeld *held, int32_t *rows,
                                 EpHelps *helps) {
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
        if (from == W || to == W || load[from] <= mean || load[to] >= mean) break;
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
        used[to]++;
        const EpHelp help = {largest, to * L, (uint32_t)rows[largest], (uint32_t)num, false};
        helps->help[helps->num++] = help;
    }
    if (helps->num) ep_place_helps(s, b, held, rows, helps);
}

/* The balance_key of all ranks in a plan that all have entered, with EP_BALANCE_HOLDS if all have that, or 0
 * if the rest is not equal. A rank's key says of which weights it will have gradients. It is 0 where a rank
 * cannot help, for example because a compiler or a profiler must see its operations. */
EP_FN uint32_t ep_agreed_balance_key(const EpComm *c, uint64_t epoch) {
    uint32_t key = ep_header(c, c->my_rank, 0, epoch)->balance_key;
    for (uint32_t r = 1; r < c->shape.num_ranks; r++) {
        const uint32_t other = ep_header(c, c->my_rank, r, epoch)->balance_key;
        if ((other ^ key) & ~EP_BALANCE_HOLDS) return 0;
        key &= other | ~EP_BALANCE_HOLDS;
    }
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
