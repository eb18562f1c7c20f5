/* cpu/plan.c - the plan operation in plain C; see cpu/ops.h. It is small, so one worker runs it.
 *
 * Invariants: the plan follows from the counts of all ranks, without atomics, so it is the same in every run
 * and on both backends. All ranks judge the same counts and reach the same verdict. A failed plan is
 * invalidated: it has no rows. */
#include <string.h>

#include "cpu/ops.h"
#include "protocol/balance.h"

/* Count this rank's choices of each expert, and its distinct tokens for each rank, in `cells`. Record the
 * first wrong index. */
static void count_choices(const EpPlanParams *p, uint32_t *cells) {
    const EpShape *s = &p->comm.shape;
    int32_t *expert = p->plan + p->layout.token_expert_off;
    uint32_t *wrong = cells + ep_first_wrong(s), L = ep_num_local_experts(s), K = s->num_topk;
    for (uint32_t t = 0; t < p->num_tokens; t++) {
        uint32_t seen = 0;
        for (uint32_t k = 0; k < K; k++) {
            uint64_t i = (uint64_t)t * K + k;
            int32_t e = ep_read_expert(p->exp_indices, p->index_bytes, i, s->num_experts);
            if (e == -2 && wrong[0] == 0) {
                EpWrong w = ep_wrong_index((uint32_t)i, ep_read_index(p->exp_indices, p->index_bytes, i));
                memcpy(wrong, w.cell, sizeof w.cell);
            }
            expert[i] = e < 0 ? -1 : e;
            if (e < 0) continue;
            cells[e]++;
            if (!(seen >> (uint32_t)e / L & 1u)) cells[s->num_experts + (uint32_t)e / L]++;
            seen |= 1u << (uint32_t)e / L;
        }
    }
}

/* Judge what all ranks reported: record the first error in rank order, or an overflow, and return its
 * code. Store the number of rows of every rank. */
static int32_t judge_counts(const EpPlanParams *p, const int32_t *counts, const EpWrong *wrong,
                            uint64_t epoch) {
    const EpShape *s = &p->comm.shape;
    EpFaultRecord f = ep_fault_at(EP_OP_PLAN, 0, EP_WORD_NONE, epoch);
    uint32_t L = ep_num_local_experts(s);
    for (uint32_t w = 0; w < s->num_ranks && !f.code; w++) ep_wrong_fault(s, w, &wrong[w], &f);
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        uint64_t rows = 0;
        for (uint32_t e = w * L; e < (w + 1) * L; e++)
            rows += ep_padded_rows(&p->padding, ep_expert_rows(s, counts, e));
        if (rows > s->capacity && !f.code) ep_overflow_fault(s, &p->padding, counts, w, rows, &f);
        p->plan[EP_HEAD_RANK_ROWS + w] = (int32_t)(rows < s->capacity ? rows : s->capacity);
    }
    if (f.code) ep_fault(&p->comm, &f);
    return f.code;
}

/* Send this rank's cells to all ranks, and wait for theirs. False: the operation is void. */
static bool all_gather_counts(const EpPlanParams *p, const uint32_t *my_cells, EpWrong *wrong,
                              uint64_t epoch) {
    const EpComm *c = &p->comm;
    const EpShape *s = &c->shape;
    uint32_t num_cells = c->layout.num_count_cells;
    int32_t *counts = p->plan + p->layout.counts_off;
    ep_chaos(EP_CHAOS_COUNTS_WRITE);
    for (uint32_t r = 0; r < s->num_ranks; r++)
        for (uint32_t i = 0; i < num_cells; i++)
            ep_st_relaxed_sys_u64(ep_count_cell(c, r, c->my_rank, i),
                                  ep_cell(EP_FAULT(OLD_COUNTS) ? 1 : epoch, my_cells[i]));
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        const EpFaultRecord f = ep_fault_at(EP_OP_PLAN, w, EP_WORD_COUNTS, epoch);
        ep_chaos(EP_CHAOS_COUNTS_READ);
        for (uint32_t i = 0; i < num_cells; i++) {
            const uint64_t *cell = ep_count_cell(c, c->my_rank, w, i);
            if (!ep_wait_u64(c, cell, EP_CMP_EPOCH, ep_cell_tag(EP_FAULT(OLD_COUNTS) ? 1 : epoch), &f))
                return false;
            uint32_t v = ep_clamp_count(s, i, (uint32_t)ep_ld_relaxed_sys_u64(cell));
            if (i < s->num_experts) counts[(uint64_t)w * s->num_experts + i] = (int32_t)v;
            else if (i == s->num_experts + c->my_rank) p->plan[EP_HEAD_NUM_RECV + w] = (int32_t)v;
            else if (i >= ep_first_wrong(s)) wrong[w].cell[i - ep_first_wrong(s)] = v;
        }
    }
    return true;
}

/* Assign rows, slots and the sorted order to this rank's choices. False if a scatter index is out of
 * range. */
static bool place_choices(const EpPlanParams *p, const int32_t *scatter, uint32_t *next_row,
                          uint32_t *next_sorted) {
    const EpShape *s = &p->comm.shape;
    uint32_t L = ep_num_local_experts(s), K = s->num_topk, T = p->num_tokens, next_slot[EP_MAX_RANKS] = {0};
    const int32_t *expert = p->plan + p->layout.token_expert_off;
    int32_t *row = p->plan + p->layout.token_row_off, *slot = p->plan + p->layout.token_slot_off;
    int32_t *sorted = p->plan + p->layout.sort_off, *send_token = p->plan + p->layout.send_token_off;
    bool ok = true;
    for (uint64_t i = 0; i < (uint64_t)T * K; i++) sorted[i] = -1;
    for (uint32_t t = 0; t < T; t++) {
        for (uint32_t r = 0; r < s->num_ranks; r++) slot[(uint64_t)t * s->num_ranks + r] = -1;
        for (uint32_t k = 0; k < K; k++) {
            uint64_t i = (uint64_t)t * K + k;
            int32_t e = expert[i];
            row[i] = -1;
            if (e < 0) continue;
            uint32_t r = (uint32_t)e / L;
            row[i] = scatter ? scatter[i] : (int32_t)next_row[e];
            if (row[i] < 0 || row[i] >= p->plan[EP_HEAD_RANK_ROWS + r]) {
                ok = false;
                row[i] = -1;
            }
            next_row[e]++;
            sorted[next_sorted[e]++] = (int32_t)i;
            if (slot[(uint64_t)t * s->num_ranks + r] >= 0) continue;
            slot[(uint64_t)t * s->num_ranks + r] = (int32_t)next_slot[r];
            send_token[(uint64_t)r * T + next_slot[r]++] = (int32_t)t;
        }
    }
    return ok;
}

/* The lowest and the highest expert of token t at rank r. */
static void expert_range(const EpPlanParams *p, uint32_t t, uint32_t r, int32_t *low, int32_t *high) {
    const uint32_t L = ep_num_local_experts(&p->comm.shape), K = p->comm.shape.num_topk;
    *low = INT32_MAX;
    *high = -1;
    for (uint32_t k = 0; k < K; k++) {
        const int32_t e = p->plan[p->layout.token_expert_off + (uint64_t)t * K + k];
        if (e < 0 || (uint32_t)e / L != r) continue;
        if (e < *low) *low = e;
        if (e > *high) *high = e;
    }
}

/* Replace the numbers that the slots got in the order of the tokens, for a fused kernel at the receiving
 * rank. Its GEMM processes that rank's experts in ascending order. So a token has two positions:
 *   out    Tokens are sent in the order of their lowest expert at the receiving rank. So the rows of low
 *          experts, with which the GEMM begins, are complete first.
 *   back   Tokens return in the order of their highest expert there, because a token can return when the
 *          last of its rows is ready. */
static void sort_slots(const EpPlanParams *p) {
    const EpShape *s = &p->comm.shape;
    const uint32_t L = ep_num_local_experts(s), T = p->num_tokens;
    uint32_t out[EP_MAX_EXPERTS] = {0}, back[EP_MAX_EXPERTS] = {0};
    int32_t *slot = p->plan + p->layout.token_slot_off, *send_token = p->plan + p->layout.send_token_off, low,
            high;
    for (uint64_t i = 0; i < (uint64_t)T * s->num_ranks; i++) {
        if (slot[i] < 0) continue;
        expert_range(p, (uint32_t)(i / s->num_ranks), (uint32_t)(i % s->num_ranks), &low, &high);
        out[low]++;
        back[high]++;
    }
    /* Replace each count by the first slot of its expert. Slots of lower experts at the rank come first. */
    for (uint32_t e = 0, from_out = 0, from_back = 0; e < s->num_experts; e++) {
        const uint32_t num_out = out[e], num_back = back[e];
        if (e % L == 0) from_out = from_back = 0;
        out[e] = from_out;
        back[e] = from_back;
        from_out += num_out;
        from_back += num_back;
    }
    for (uint64_t i = 0; i < (uint64_t)T * s->num_ranks; i++) {
        const uint32_t t = (uint32_t)(i / s->num_ranks), r = (uint32_t)(i % s->num_ranks);
        if (slot[i] < 0) continue;
        expert_range(p, t, r, &low, &high);
        slot[i] = (int32_t)back[high]++;
        send_token[(uint64_t)r * T + out[low]++] = (int32_t)t;
    }
}

/* List the tiles of this rank: each has up to EP_TILE_ROWS rows of one expert. */
static void list_tiles(const EpPlanParams *p) {
    const EpShape *s = &p->comm.shape;
    uint32_t L = ep_num_local_experts(s), n = 0;
    const int32_t *first = p->plan + p->layout.expert_row_off;
    for (uint32_t l = 0; l < L; l++)
        for (int32_t row = first[l]; row < first[l + 1] && n < p->layout.max_tiles;
             row += EP_TILE_ROWS, n++) {
            p->plan[p->layout.tile_expert_off + n] = (int32_t)l;
            p->plan[p->layout.tile_row_off + n] = row;
        }
    p->plan[EP_HEAD_NUM_TILES] = (int32_t)n;
}

/* Make this rank's plan from the counts of all ranks: 0, or the code with which it failed. */
static int32_t make_plan(const EpPlanParams *p, uint32_t *cells, uint32_t *sorted_from, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const EpShape *s = &c->shape;
    uint32_t L = ep_num_local_experts(s), sum = 0, start = 0;
    EpWrong wrong[EP_MAX_RANKS] = {{{0}}};
    uint64_t tokens_before = 0, num_tokens = 0;
    int32_t *counts = p->plan + p->layout.counts_off, *expert_row = p->plan + p->layout.expert_row_off;
    const int32_t *scatter = p->scatter_indices;
    EpWaits waits;
    if (!ep_enter_await(c, EP_OP_PLAN, epoch, true, &waits)) return EP_EPEER;
    ep_count_waits(c, &waits);
    ep_publish_waits(c);
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        num_tokens += ep_header(c, c->my_rank, w, epoch)->num_tokens;
        if (w < c->my_rank) tokens_before = num_tokens;
    }
    if (scatter && p->num_scatter_tokens != p->num_tokens) {
        if (p->num_scatter_tokens != num_tokens) cells[ep_first_wrong(s)] = EP_BAD_SCATTER;
        scatter = tokens_before + p->num_tokens <= p->num_scatter_tokens
                      ? scatter + tokens_before * s->num_topk
                      : NULL;
    }
    if (!all_gather_counts(p, cells, wrong, epoch)) return EP_EPEER;
    int32_t code = judge_counts(p, counts, wrong, epoch);
    if (code) return code;
    for (uint32_t r = 0; r < s->num_ranks; r++)
        p->plan[EP_HEAD_NUM_SEND + r] = (int32_t)cells[s->num_experts + r];
    /* Taken from this rank's own memory: a faulty peer may have overwritten the cell in the heap. */
    p->plan[EP_HEAD_NUM_RECV + c->my_rank] = p->plan[EP_HEAD_NUM_SEND + c->my_rank];
    for (uint32_t e = 0; e < s->num_experts; e++) {
        if (e % L == 0) start = 0;
        if (e / L == c->my_rank) expert_row[e % L] = (int32_t)start;
        sorted_from[e] = sum;
        sum += cells[e];
        /* From here on, cells[e] is the next row of expert e. */
        cells[e] = start + ep_rows_before_rank(s, counts, e, c->my_rank);
        start += ep_padded_rows(&p->padding, ep_expert_rows(s, counts, e));
        if (e / L == c->my_rank) expert_row[e % L + 1] = (int32_t)start;
    }
    p->plan[EP_HEAD_NUM_ROWS] = p->plan[EP_HEAD_RANK_ROWS + c->my_rank];
    if (!place_choices(p, scatter, cells, sorted_from)) {
        EpFaultRecord f = ep_fault_at(EP_OP_PLAN, c->my_rank, EP_WORD_SCATTER, epoch);
        f.code = EP_EINVAL;
        f.want = 1; /* only this rank knows; see ep_comm_check */
        ep_fault(c, &f);
        return EP_EINVAL;
    }
    if (ep_plan_sorts(p)) sort_slots(p);
    list_tiles(p);
    return 0;
}

/* Clear a failed plan: this rank sends no token and receives no row. An operation that uses the plan before
 * the error is raised then moves nothing. */
static void invalidate_plan(const EpPlanParams *p) {
    memset(p->plan, 0,
           (p->layout.expert_row_off + ep_num_local_experts(&p->comm.shape) + 1) * sizeof *p->plan);
}

/* Write the head of the plan, and publish the result to the host. */
static void publish_to_host(const EpPlanParams *p, int32_t code, uint64_t epoch) {
    EpPlanResult *r = &p->comm.host->plan;
    p->plan[EP_HEAD_STATUS] = code;
    p->plan[EP_HEAD_PLAN_IDX] = (int32_t)epoch;
    p->plan[EP_HEAD_NUM_TOKENS] = (int32_t)p->num_tokens;
    r->num_rows = (uint32_t)p->plan[EP_HEAD_NUM_ROWS];
    if (p->host_counts && !code) p->comm.host->balance_key = ep_agreed_balance_key(&p->comm, epoch);
    for (uint32_t e = 0; p->host_counts && !code && e < p->comm.shape.num_experts; e++)
        p->comm.host->expert_choices[e] =
            (int32_t)ep_expert_rows(&p->comm.shape, p->plan + p->layout.counts_off, e);
    r->status = code;
    ep_st_relaxed_sys_u64(&r->epoch, epoch);
    ep_st_release_sys_u64(&r->ticket, p->ticket); /* publishes the result to the host */
}

void ep_cpu_plan(const EpPlanParams *p) {
    const EpComm *c = &p->comm;
    int32_t code = EP_EPEER;
    uint64_t epoch = ep_begin(c);
    if (epoch) {
        EpHeader h = ep_make_header(c, EP_OP_PLAN, NULL, NULL, p->num_tokens, 0);
        h.balance_key = p->balance_key;
        if (!(EP_FAULT(NO_EMPTY_ENTER) && p->num_tokens == 0)) ep_enter(c, &h, epoch);
        uint32_t cells[EP_MAX_EXPERTS + EP_MAX_RANKS + EP_WRONG_CELLS] = {0}, sorted_from[EP_MAX_EXPERTS];
        memset(p->plan, 0, EP_HEAD_WORDS * sizeof *p->plan);
        count_choices(p, cells);
        code = make_plan(p, cells, sorted_from, epoch);
    }
    if (code) invalidate_plan(p);
    if (epoch) ep_leave(c, 1, epoch);
    publish_to_host(p, code, epoch);
}
