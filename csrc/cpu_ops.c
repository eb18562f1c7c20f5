/* cpu_ops.c - plan, dispatch and combine in plain C; see cpu_ops.h. */
#include "cpu_ops.h"

#include <string.h>

/* ---- rows of numbers ---- */

__extension__ typedef _Float16 EpF16;

static float bf16_to_f32(uint16_t v) {
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint16_t f32_to_bf16(float f) { /* round to nearest even; NaN stays NaN */
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* acc += w * src, product and sum each rounded to fp32; without a weight acc += src. */
static void row_add(float *acc, const void *src, uint32_t dtype, uint32_t n, const float *weight) {
#define ADD(load)                                                  \
    do {                                                           \
        if (weight) {                                              \
            float w = *weight;                                     \
            for (uint32_t i = 0; i < n; i++) acc[i] += w * (load); \
        } else {                                                   \
            for (uint32_t i = 0; i < n; i++) acc[i] += (load);     \
        }                                                          \
    } while (0)
    const float *f = (const float *)src;
    const uint16_t *b = (const uint16_t *)src;
    const EpF16 *h = (const EpF16 *)src;
    if (dtype == EP_F32) ADD(f[i]);
    if (dtype == EP_BF16) ADD(bf16_to_f32(b[i]));
    if (dtype == EP_F16) ADD((float)h[i]);
#undef ADD
}
static void row_store(void *dst, const float *acc, uint32_t dtype, uint32_t n) {
    if (dtype == EP_F32) memcpy(dst, acc, 4ull * n);
    if (dtype == EP_BF16)
        for (uint32_t i = 0; i < n; i++) ((uint16_t *)dst)[i] = f32_to_bf16(acc[i]);
    if (dtype == EP_F16)
        for (uint32_t i = 0; i < n; i++) ((EpF16 *)dst)[i] = (EpF16)acc[i];
}

/* dst = the rows, times their weights where there are any, added in their order. */
static void sum_rows(void *dst, const void *const *rows, const float *weights, uint32_t num, uint32_t dtype, uint32_t hidden) {
    float acc[1024];
    const uint32_t most = sizeof acc / sizeof acc[0], size = ep_dtype_bytes(dtype);
    for (uint32_t at = 0; at < hidden; at += most) {
        uint32_t n = hidden - at < most ? hidden - at : most;
        memset(acc, 0, sizeof acc);
        for (uint32_t i = 0; i < num; i++)
            row_add(acc, (const unsigned char *)rows[i] + (uint64_t)at * size, dtype, n, weights ? &weights[i] : NULL);
        row_store((unsigned char *)dst + (uint64_t)at * size, acc, dtype, n);
    }
}

/* ---- plan ---- */

void ep_cpu_enter(const EpComm *c, uint32_t op) {
    uint64_t epoch = ep_begin(c);
    if (epoch == 0) return;
    EpHeader h = ep_make_header(c, op, NULL, 0);
    ep_enter(c, &h, epoch);
    ep_enter_await(c, op, epoch);
    ep_leave(c, 1, epoch);
}

/* What is wrong with my indices: 0, or 1 + the lowest bad position. */
static uint32_t count_choices(const EpPlanParams *p, uint32_t *cells) {
    const EpShape *s = &p->comm.shape;
    int32_t *expert = p->plan + p->layout.token_expert_off;
    uint32_t bad = 0, L = ep_num_local_experts(s), K = s->num_topk;
    for (uint32_t t = 0; t < p->num_tokens; t++) {
        uint32_t seen = 0;
        for (uint32_t k = 0; k < K; k++) {
            uint64_t i = (uint64_t)t * K + k;
            int32_t e = ep_read_expert(p->exp_indices, p->index_bytes, i, s->num_experts);
            if (e == -2 && bad == 0) bad = (uint32_t)i + 1;
            expert[i] = e < 0 ? -1 : e;
            if (e < 0) continue;
            cells[e]++;
            if (!(seen >> (uint32_t)e / L & 1u)) cells[s->num_experts + (uint32_t)e / L]++;
            seen |= 1u << (uint32_t)e / L;
        }
    }
    return bad;
}

/* The first wrong thing that all ranks told each other, in rank order. */
static int32_t judge_counts(const EpPlanParams *p, const int32_t *counts, const uint32_t *bad, uint64_t epoch) {
    const EpShape *s = &p->comm.shape;
    EpFaultRecord f = {0, 0, EP_OP_PLAN, 0, EP_WORD_INDEX, 0, 0, epoch, 0, 0};
    uint32_t L = ep_num_local_experts(s);
    for (uint32_t w = 0; w < s->num_ranks && !f.code; w++) {
        if (bad[w] == EP_BAD_SCATTER) f.code = EP_EINVAL, f.word = EP_WORD_SCATTER, f.peer = w;
        else if (bad[w]) f.code = EP_EINDEX, f.peer = w, f.got = bad[w] - 1, f.want = s->num_experts;
    }
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        uint64_t rows = 0;
        for (uint32_t e = w * L; e < (w + 1) * L; e++) rows += ep_expert_rows(s, counts, e);
        if (rows > s->capacity && !f.code) {
            f.code = EP_EOVERFLOW, f.word = EP_WORD_ROWS, f.peer = w, f.want = s->capacity, f.got = rows;
        }
        p->plan[EP_HEAD_RANK_ROWS + w] = (int32_t)(rows < s->capacity ? rows : s->capacity);
    }
    if (f.code) ep_fault(&p->comm, &f);
    return f.code;
}

/* Tell all ranks my cells, wait for theirs.  False: the operation is void. */
static bool exchange_counts(const EpPlanParams *p, const uint32_t *my_cells, uint32_t *bad, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const EpShape *s = &c->shape;
    uint32_t num_cells = c->layout.num_count_cells;
    int32_t *counts = p->plan + p->layout.counts_off;
    for (uint32_t r = 0; r < s->num_ranks; r++)
        for (uint32_t i = 0; i < num_cells; i++)
            ep_st_relaxed_sys_u64(ep_count_cell(c, r, c->my_rank, i), ep_cell(EP_FAULT(10) ? 1 : epoch, my_cells[i]));
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        EpFaultRecord f = {0, 0, EP_OP_PLAN, w, EP_WORD_COUNTS, 0, 0, epoch, 0, 0};
        for (uint32_t i = 0; i < num_cells; i++) {
            const uint64_t *cell = ep_count_cell(c, c->my_rank, w, i);
            if (!ep_wait_u64(c, cell, EP_CMP_EPOCH, ep_cell_tag(EP_FAULT(10) ? 1 : epoch), &f)) return false;
            uint32_t v = ep_clamp_count(s, i, (uint32_t)ep_ld_relaxed_sys_u64(cell));
            if (i < s->num_experts) counts[(uint64_t)w * s->num_experts + i] = (int32_t)v;
            else if (i == s->num_experts + c->my_rank) p->plan[EP_HEAD_NUM_RECV + w] = (int32_t)v;
            else if (i == s->num_experts + s->num_ranks) bad[w] = v;
        }
    }
    return true;
}

/* Rows, slots and the sorted order of my choices; false when a scatter index points nowhere. */
static bool place_choices(const EpPlanParams *p, const int32_t *scatter, uint32_t *next_row, uint32_t *next_sorted) {
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
            if (row[i] < 0 || row[i] >= p->plan[EP_HEAD_RANK_ROWS + r]) ok = false, row[i] = -1;
            next_row[e]++;
            sorted[next_sorted[e]++] = (int32_t)i;
            if (slot[(uint64_t)t * s->num_ranks + r] >= 0) continue;
            slot[(uint64_t)t * s->num_ranks + r] = (int32_t)next_slot[r];
            send_token[(uint64_t)r * T + next_slot[r]++] = (int32_t)t;
        }
    }
    return ok;
}

static void list_tiles(const EpPlanParams *p) {
    const EpShape *s = &p->comm.shape;
    uint32_t L = ep_num_local_experts(s), n = 0;
    const int32_t *first = p->plan + p->layout.expert_row_off;
    for (uint32_t l = 0; l < L; l++)
        for (int32_t row = first[l]; row < first[l + 1] && n < p->layout.max_tiles; row += EP_TILE_ROWS, n++) {
            p->plan[p->layout.tile_expert_off + n] = (int32_t)l;
            p->plan[p->layout.tile_row_off + n] = row;
        }
    p->plan[EP_HEAD_NUM_TILES] = (int32_t)n;
}

/* From everyone's counts to my plan; the code with which it failed, or 0. */
static int32_t make_plan(const EpPlanParams *p, uint32_t *cells, uint32_t *sorted_from, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const EpShape *s = &c->shape;
    uint32_t L = ep_num_local_experts(s), bad[EP_MAX_RANKS] = {0}, sum = 0, start = 0;
    uint64_t tokens_before = 0, num_tokens = 0;
    int32_t *counts = p->plan + p->layout.counts_off, *expert_row = p->plan + p->layout.expert_row_off;
    const int32_t *scatter = p->scatter_indices;
    if (!ep_enter_await(c, EP_OP_PLAN, epoch)) return EP_EPEER;
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        num_tokens += ep_header(c, c->my_rank, w, epoch)->num_tokens;
        if (w < c->my_rank) tokens_before = num_tokens;
    }
    if (scatter && p->num_scatter_tokens != p->num_tokens) {
        if (p->num_scatter_tokens != num_tokens) cells[s->num_experts + s->num_ranks] = EP_BAD_SCATTER;
        scatter = tokens_before + p->num_tokens <= p->num_scatter_tokens ? scatter + tokens_before * s->num_topk : NULL;
    }
    if (!exchange_counts(p, cells, bad, epoch)) return EP_EPEER;
    int32_t code = judge_counts(p, counts, bad, epoch);
    if (code) return code;
    for (uint32_t r = 0; r < s->num_ranks; r++) p->plan[EP_HEAD_NUM_SEND + r] = (int32_t)cells[s->num_experts + r];
    p->plan[EP_HEAD_NUM_RECV + c->my_rank] =
        p->plan[EP_HEAD_NUM_SEND + c->my_rank]; /* my own word, not one that a peer may have written over */
    for (uint32_t e = 0; e < s->num_experts; e++) {
        if (e % L == 0) start = 0;
        if (e / L == c->my_rank) expert_row[e % L] = (int32_t)start;
        sorted_from[e] = sum, sum += cells[e];
        cells[e] = start + ep_rows_before_rank(s, counts, e, c->my_rank); /* from here on: the next row */
        start += ep_expert_rows(s, counts, e);
        if (e / L == c->my_rank) expert_row[e % L + 1] = (int32_t)start;
    }
    p->plan[EP_HEAD_NUM_ROWS] = p->plan[EP_HEAD_RANK_ROWS + c->my_rank];
    if (!place_choices(p, scatter, cells, sorted_from)) {
        EpFaultRecord f = {0, EP_EINVAL, EP_OP_PLAN, c->my_rank, EP_WORD_SCATTER, 0, 0, epoch, 1, 0}; /* 1: only here */
        ep_fault(c, &f);
        return EP_EINVAL;
    }
    list_tiles(p);
    return 0;
}

void ep_cpu_plan(const EpPlanParams *p) {
    const EpComm *c = &p->comm;
    uint64_t epoch = ep_begin(c);
    if (epoch == 0) {
        p->plan[EP_HEAD_STATUS] = EP_EPEER;
        return;
    }
    EpHeader h = ep_make_header(c, EP_OP_PLAN, NULL, p->num_tokens);
    if (!(EP_FAULT(11) && p->num_tokens == 0)) ep_enter(c, &h, epoch);
    uint32_t cells[EP_MAX_EXPERTS + EP_MAX_RANKS + 1] = {0}, sorted_from[EP_MAX_EXPERTS];
    memset(p->plan, 0, EP_HEAD_WORDS * sizeof *p->plan);
    p->plan[EP_HEAD_PLAN_IDX] = (int32_t)epoch;
    p->plan[EP_HEAD_NUM_TOKENS] = (int32_t)p->num_tokens;
    cells[c->shape.num_experts + c->shape.num_ranks] = count_choices(p, cells);
    int32_t code = make_plan(p, cells, sorted_from, epoch);
    if (code) { /* no plan: no rows anywhere */
        memset(p->plan, 0, (p->layout.expert_row_off + ep_num_local_experts(&c->shape) + 1) * sizeof *p->plan);
        p->plan[EP_HEAD_PLAN_IDX] = (int32_t)epoch;
        p->plan[EP_HEAD_STATUS] = code;
    }
    c->host->plan.num_rows = (uint32_t)p->plan[EP_HEAD_NUM_ROWS];
    c->host->plan.status = code;
    ep_st_relaxed_sys_u64(&c->host->plan.epoch, epoch);
    ep_leave(c, 1, epoch);
    ep_st_release_sys_u64(&c->host->plan.ticket, p->ticket); /* publishes the result to the host */
}

/* ---- dispatch ---- */

/* Where a rank keeps the slots that of_rank sent it. */
static unsigned char *slot_at(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint32_t slot) {
    return c->base[at_rank] + c->layout.stage_off + ((uint64_t)of_rank * c->shape.max_tokens + slot) * c->layout.slot_stride;
}

/* Where on rank r the choices of my token t go: row of each choice, -1 when it goes elsewhere. */
static void rows_at_rank(const EpDispatchParams *p, uint32_t t, uint32_t r, int32_t *rows) {
    uint32_t L = ep_num_local_experts(&p->comm.shape), K = p->comm.shape.num_topk;
    for (uint32_t k = 0; k < K; k++) {
        int32_t e = p->plan[p->layout.token_expert_off + (uint64_t)t * K + k];
        rows[k] = e >= 0 && (uint32_t)e / L == r ? p->plan[p->layout.token_row_off + (uint64_t)t * K + k] : -1;
    }
}

static void send_slot(const EpDispatchParams *p, uint32_t r, uint32_t slot) {
    const EpComm *c = &p->comm;
    uint32_t K = c->shape.num_topk, t = (uint32_t)p->plan[p->layout.send_token_off + (uint64_t)r * p->layout.num_tokens + slot];
    unsigned char *to = slot_at(c, r, c->my_rank, slot), *trailer = to + c->layout.row_bytes;
    int32_t meta[1 + EP_MAX_TOPK];
    memcpy(to, (const unsigned char *)p->x + t * c->layout.row_bytes, c->layout.row_bytes);
    meta[0] = (int32_t)t;
    rows_at_rank(p, t, r, meta + 1);
    memcpy(trailer, meta, 4ull * (1 + K));
    if (p->weight) memcpy(trailer + 4ull * (1 + K), p->weight + (uint64_t)t * K, 4ull * K);
}

/* Copy a slot to its rows.  meta and weight are the sender's words: nothing past num_rows is written. */
static void place_slot(const EpDispatchParams *p, uint32_t s, uint32_t slot, const void *row, const int32_t *meta, const float *weight) {
    const EpComm *c = &p->comm;
    uint32_t K = c->shape.num_topk;
    int32_t *keep = p->recv + ((uint64_t)s * c->shape.max_tokens + slot) * (1 + K);
    keep[0] = (uint32_t)meta[0] < c->shape.max_tokens ? meta[0] : 0;
    for (uint32_t k = 0; k < K; k++) {
        int32_t at = meta[1 + k];
        if ((uint32_t)at >= p->num_rows && !EP_FAULT(12)) at = -1;
        keep[1 + k] = at;
        if (at < 0) continue;
        memcpy((unsigned char *)p->rows + (uint64_t)at * c->layout.row_bytes, row, c->layout.row_bytes);
        if (p->row_weight) p->row_weight[at] = weight[k];
    }
}

static bool receive_chunk(const EpDispatchParams *p, EpTask task, uint64_t epoch) {
    const EpComm *c = &p->comm;
    uint32_t K = c->shape.num_topk, T = p->layout.num_tokens, first = task.chunk * EP_CHUNK_SLOTS;
    uint32_t n = ep_chunk_slots((uint32_t)p->plan[EP_HEAD_NUM_RECV + task.rank], task.chunk);
    int32_t meta[1 + EP_MAX_TOPK];
    float weight[EP_MAX_TOPK];
    if (n == 0) return true;
    if (task.rank != c->my_rank && !ep_flag_await(c, EP_OP_DISPATCH, task.rank, task.chunk, epoch)) return false;
    for (uint32_t slot = first; slot < first + n; slot++) {
        const unsigned char *row = slot_at(c, c->my_rank, task.rank, slot);
        if (task.rank == c->my_rank) { /* my own tokens: straight from the input */
            uint32_t t = (uint32_t)p->plan[p->layout.send_token_off + (uint64_t)c->my_rank * T + slot];
            row = (const unsigned char *)p->x + t * c->layout.row_bytes;
            meta[0] = (int32_t)t;
            rows_at_rank(p, t, c->my_rank, meta + 1);
            if (p->weight) memcpy(weight, p->weight + (uint64_t)t * K, 4ull * K);
        } else { /* copy, then check: a peer may write while we read */
            memcpy(meta, row + c->layout.row_bytes, 4ull * (1 + K));
            memcpy(weight, row + c->layout.row_bytes + 4ull * (1 + K), 4ull * K);
        }
        place_slot(p, task.rank, slot, row, meta, weight);
    }
    return true;
}

/* Rows that an operation could not make are NaN, so that nobody mistakes them for a result. */
static void fill_nan(void *at, uint64_t num_bytes) {
    if (at && num_bytes) memset(at, EP_FILL_NAN, num_bytes);
}

void ep_cpu_dispatch(const EpDispatchParams *p, uint32_t worker, uint32_t num_workers) {
    const EpComm *c = &p->comm;
    uint32_t W = c->shape.num_ranks;
    uint64_t epoch = ep_begin(c), n, num_tasks;
    bool ok = epoch != 0;
    EpLocal *l = ep_local(c);
    if (ok && worker == 0) {
        EpHeader h = ep_make_header(c, EP_OP_DISPATCH, p->plan, p->layout.num_tokens);
        h.has_weight = p->has_weight;
        ep_enter(c, &h, epoch);
    }
    ok = ok && ep_enter_await(c, EP_OP_DISPATCH, epoch);
    num_tasks = ok ? ep_num_tasks(p->plan + EP_HEAD_NUM_SEND, W) : 0;
    while (ok && (n = ep_queue_pop(&l->queue_send)) < num_tasks) {
        EpTask task = ep_task_at(n, c->my_rank, W);
        uint32_t num = ep_chunk_slots((uint32_t)p->plan[EP_HEAD_NUM_SEND + task.rank], task.chunk);
        if (task.rank == c->my_rank || num == 0) continue;
        if (EP_FAULT(13)) ep_flag_publish(c, task.rank, task.chunk, epoch);
        for (uint32_t i = 0; i < num; i++) send_slot(p, task.rank, task.chunk * EP_CHUNK_SLOTS + i);
        ep_flag_publish(c, task.rank, task.chunk, epoch);
    }
    num_tasks = ok ? ep_num_tasks(p->plan + EP_HEAD_NUM_RECV, W) : 0;
    while (ok && (n = ep_queue_pop(&l->queue_recv)) < num_tasks) ok = receive_chunk(p, ep_task_at(n, c->my_rank, W), epoch);
    if (ok) {
        uint64_t m = (uint64_t)p->plan[EP_HEAD_NUM_ROWS], rest = p->num_rows > m ? p->num_rows - m : 0;
        if (worker == 0 && rest) memset((unsigned char *)p->rows + m * c->layout.row_bytes, 0, rest * c->layout.row_bytes);
        if (worker == 0 && rest && p->row_weight) memset(p->row_weight + m, 0, rest * 4);
    }
    if (ep_leave(c, num_workers, epoch) == EP_LEFT_LAST_FAILED) {
        fill_nan(p->rows, p->num_rows * c->layout.row_bytes);
        fill_nan(p->row_weight, p->num_rows * 4ull);
        memset(p->recv, 0xff, 4ull * W * c->shape.max_tokens * (1 + c->shape.num_topk)); /* -1: nothing came from there */
    }
}

/* ---- combine ---- */

static unsigned char *choice_at(const EpComm *c, uint32_t at_rank, uint64_t idx) {
    return c->base[at_rank] + c->layout.stage_off + idx * c->layout.choice_stride;
}
static const void *row_of(const EpCombineParams *p, int32_t row) {
    return (const unsigned char *)p->rows + (uint64_t)row * p->comm.layout.row_bytes;
}
static void put_choice(const EpCombineParams *p, unsigned char *to, int32_t row) {
    float trailer[2] = {p->has_weight ? p->row_weight[row] : 1.0f, p->has_scalar ? p->row_scalar[row] : 0.0f};
    memcpy(to, row_of(p, row), p->comm.layout.row_bytes);
    memcpy(to + p->comm.layout.row_bytes, trailer, sizeof trailer);
}

/* Send home what this rank made of one slot of rank s. */
static void return_slot(const EpCombineParams *p, uint32_t s, uint32_t slot) {
    const EpComm *c = &p->comm;
    uint32_t K = c->shape.num_topk, num = 0;
    const int32_t *meta = p->recv + ((uint64_t)s * c->shape.max_tokens + slot) * (1 + K);
    const void *rows[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK], scalar[EP_MAX_TOPK] = {0};
    for (uint32_t k = 0; k < K; k++) {
        int32_t row = meta[1 + k];
        if (row < 0 || (uint32_t)row >= p->num_rows || (uint32_t)meta[0] >= c->shape.max_tokens) continue;
        if (c->shape.combine_mode == EP_COMBINE_SCATTER) {
            put_choice(p, choice_at(c, s, (uint64_t)(uint32_t)meta[0] * K + k), row);
            continue;
        }
        if (p->has_weight) weights[num] = p->row_weight[row];
        if (p->has_scalar) scalar[k] = p->row_scalar[row];
        rows[num++] = row_of(p, row);
    }
    if (c->shape.combine_mode != EP_COMBINE_LOCAL) return;
    unsigned char *to = slot_at(c, s, c->my_rank, slot);
    sum_rows(to, rows, p->has_weight ? weights : NULL, num, c->shape.dtype, c->shape.hidden);
    if (p->has_scalar) memcpy(to + c->layout.row_bytes, scalar, 4ull * K);
}

/* One token of mine from what the ranks returned.  Sums go by rank (LOCAL) or by choice: a fixed order. */
static bool finish_token(const EpCombineParams *p, uint32_t t, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const EpShape *s = &c->shape;
    uint32_t K = s->num_topk, L = ep_num_local_experts(s), num = 0;
    const int32_t *slot = p->plan + p->layout.token_slot_off + (uint64_t)t * s->num_ranks;
    const int32_t *expert = p->plan + p->layout.token_expert_off + (uint64_t)t * K;
    const int32_t *row = p->plan + p->layout.token_row_off + (uint64_t)t * K;
    float *scalar = p->out_scalar ? p->out_scalar + (uint64_t)t * K : NULL, weights[EP_MAX_TOPK];
    const void *rows[EP_MAX_TOPK];
    bool local = s->combine_mode == EP_COMBINE_LOCAL, pull = s->combine_mode == EP_COMBINE_GATHER;
    for (uint32_t r = 0; r < s->num_ranks && !pull; r++) {
        if (slot[r] < 0) continue;
        if (!ep_flag_await(c, EP_OP_COMBINE, r, (uint32_t)slot[r] / EP_CHUNK_SLOTS, epoch)) return false;
        if (local) rows[num++] = slot_at(c, c->my_rank, r, (uint32_t)slot[r]);
    }
    for (uint32_t k = 0; k < K; k++) {
        uint32_t r = expert[k] < 0 ? 0 : (uint32_t)expert[k] / L;
        float trailer[2] = {1, 0};
        if (expert[k] >= 0 && local) {
            memcpy(&trailer[1], slot_at(c, c->my_rank, r, (uint32_t)slot[r]) + c->layout.row_bytes + 4ull * k, 4);
        } else if (expert[k] >= 0) {
            rows[num] = pull ? choice_at(c, r, (uint32_t)row[k]) : choice_at(c, c->my_rank, (uint64_t)t * K + k);
            memcpy(trailer, (const unsigned char *)rows[num] + c->layout.row_bytes, sizeof trailer);
            weights[num++] = trailer[0];
        }
        if (scalar) scalar[k] = trailer[1];
    }
    sum_rows((unsigned char *)p->out + t * c->layout.row_bytes, rows, !local && p->has_weight ? weights : NULL, num, s->dtype, s->hidden);
    return true;
}

/* GATHER: put my rows where peers can pull them, and tell everyone when all of them stand there. */
static void stage_rows(const EpCombineParams *p, uint64_t epoch) {
    const EpComm *c = &p->comm;
    EpLocal *l = ep_local(c);
    uint32_t m = (uint32_t)p->plan[EP_HEAD_NUM_ROWS];
    if (m > p->num_rows) m = p->num_rows;
    uint32_t num_chunks = ep_ceil_div_u32(m, EP_CHUNK_SLOTS);
    uint64_t n, done = 0;
    while ((n = ep_queue_pop(&l->queue_send)) < num_chunks) {
        uint32_t first = (uint32_t)n * EP_CHUNK_SLOTS, num = ep_chunk_slots(m, (uint32_t)n);
        for (uint32_t i = first; i < first + num; i++) put_choice(p, choice_at(c, c->my_rank, i), (int32_t)i);
        done = ep_add_acq_rel_gpu_u64(&l->num_copied, 1) + 1;
        if (done == num_chunks) break;
    }
    /* acq_rel above: the last copier's flag publishes every worker's rows. */
    if (num_chunks == 0 ? n == 0 : done == num_chunks)
        for (uint32_t r = 0; r < c->shape.num_ranks; r++) ep_flag_publish(c, r, 0, epoch);
}

static void return_chunks(const EpCombineParams *p, uint64_t epoch) {
    const EpComm *c = &p->comm;
    uint64_t n, num_tasks = ep_num_tasks(p->plan + EP_HEAD_NUM_RECV, c->shape.num_ranks);
    while ((n = ep_queue_pop(&ep_local(c)->queue_send)) < num_tasks) {
        EpTask task = ep_task_at(n, c->my_rank, c->shape.num_ranks);
        uint32_t num = ep_chunk_slots((uint32_t)p->plan[EP_HEAD_NUM_RECV + task.rank], task.chunk);
        for (uint32_t i = 0; i < num; i++) return_slot(p, task.rank, task.chunk * EP_CHUNK_SLOTS + i);
        if (num) ep_flag_publish(c, task.rank, task.chunk, epoch);
    }
}

void ep_cpu_combine(const EpCombineParams *p, uint32_t worker, uint32_t num_workers) {
    const EpComm *c = &p->comm;
    uint64_t epoch = ep_begin(c), n;
    uint32_t T = p->layout.num_tokens, num_chunks = ep_ceil_div_u32(T, EP_CHUNK_SLOTS);
    bool ok = epoch != 0;
    if (epoch && worker == 0) {
        EpHeader h = ep_make_header(c, EP_OP_COMBINE, p->plan, T);
        h.has_weight = p->has_weight, h.has_scalar = p->has_scalar;
        ep_enter(c, &h, epoch);
    }
    ok = ok && ep_enter_await(c, EP_OP_COMBINE, epoch);
    if (ok && c->shape.combine_mode == EP_COMBINE_GATHER) {
        stage_rows(p, epoch);
        for (uint32_t r = 0; r < c->shape.num_ranks; r++) ok = ok && ep_flag_await(c, EP_OP_COMBINE, r, 0, epoch);
    } else if (ok) {
        return_chunks(p, epoch);
    }
    while (ok && (n = ep_queue_pop(&ep_local(c)->queue_recv)) < num_chunks)
        for (uint32_t i = 0; i < ep_chunk_slots(T, (uint32_t)n) && ok; i++) ok = finish_token(p, (uint32_t)n * EP_CHUNK_SLOTS + i, epoch);
    if (ep_leave(c, num_workers, epoch) == EP_LEFT_LAST_FAILED) {
        fill_nan(p->out, T * c->layout.row_bytes);
        fill_nan(p->out_scalar, 4ull * T * c->shape.num_topk);
    }
}
