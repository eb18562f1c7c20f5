/* cpu/low_latency.c - the low-latency dispatch and combine in plain C; protocol/low_latency.h has the
 * protocol.
 *
 * Worker i takes the tokens i, i + num_workers, ... of every rank. Each worker reads all routes by itself, so
 * workers need not wait for each other.
 * Invariant: a worker waits for a peer only after it has sent all its rows. A number from a peer is clamped
 * before it becomes an offset. */
#include <string.h>

#include "cpu/ops.h"
#include "cpu/rows.h"

/* ---- words of slots ---- */

/* Store num_bytes at byte `at` of a peer's slot, as words. All are multiples of 4. */
static void put_words(unsigned char *slot, uint64_t at, const void *from, uint64_t num_bytes) {
    uint32_t *to = (uint32_t *)(slot + at), value;
    for (uint64_t i = 0; i < num_bytes / 4; i++) {
        memcpy(&value, (const unsigned char *)from + 4 * i, 4);
        ep_st_relaxed_sys_u32(to + i, ep_ll_word(value));
    }
}

/* A slot of a token from another rank: where it is, and what to record if its words do not come. */
typedef struct {
    const EpComm *c;
    unsigned char *slot;
    EpFaultRecord fault;
} Arriving;
static Arriving arriving(const EpComm *c, uint32_t op, uint32_t of_rank, uint32_t token, uint64_t epoch) {
    return (Arriving){c, ep_ll_slot(c, c->my_rank, of_rank, token, epoch),
                      ep_fault_at(op, of_rank, EP_WORD_SLOT, epoch)};
}
/* Wait for num_bytes at byte `at` of a slot, and take them out of it. False: the operation must end. */
static bool take_words(const Arriving *a, uint64_t at, void *to, uint64_t num_bytes) {
    uint32_t *from = (uint32_t *)(a->slot + at);
    ep_chaos(EP_CHAOS_FLAG_READ);
    for (uint64_t i = 0; i < num_bytes / 4; i++) {
        EpBackoff w = {0, 0, 0};
        uint32_t word;
        while ((word = ep_ld_relaxed_sys_u32(from + i)) == 0 && !EP_FAULT(NO_FLAG_WAIT))
            if (!ep_wait_on(a->c, &w, a->c->timeout_ns, &a->fault, 1, 0)) return false;
        if (!EP_FAULT(NO_ZERO)) ep_st_relaxed_sys_u32(from + i, 0);
        const uint32_t value = ep_ll_value(word);
        memcpy((unsigned char *)to + 4 * i, &value, 4);
    }
    return true;
}

/* ---- dispatch ---- */

/* The ranks that hold an expert of token t of this rank, a bit for each. */
static uint32_t targets_of(const EpLlDispatchParams *p, uint32_t t) {
    const EpShape *s = &p->comm.shape;
    uint32_t mask = 0;
    for (uint32_t k = 0; k < s->num_topk; k++) {
        const uint32_t e = ep_ll_route_of(p, (uint64_t)t * s->num_topk + k);
        if (e < s->num_experts) mask |= 1u << e / ep_num_local_experts(s);
    }
    return mask;
}

/* Write a row in FP8: e4m3 numbers, then their scales. */
static void quantize_row(const EpComm *c, uint32_t fp8, const unsigned char *from, unsigned char *to) {
    for (uint32_t g = 0; g < c->shape.hidden / EP_FP8_GROUP; g++) {
        const float scale =
            ep_cpu_quantize(to + g * EP_FP8_GROUP, from + 2ull * g * EP_FP8_GROUP, c->shape.dtype, fp8);
        memcpy(to + ep_ll_scales_at(c) + 4ull * g, &scale, 4);
    }
}

/* The weights [K] of token t of this rank. */
static void my_weights(const EpLlDispatchParams *p, uint32_t t, float *to) {
    const uint32_t K = p->comm.shape.num_topk;
    for (uint32_t k = 0; k < K; k++) to[k] = p->weight ? p->weight[(uint64_t)t * K + k] : 1.0f;
}
/* Where the tag of a token is, and the bytes of its weights and its tag. */
static uint64_t tag_at(const EpComm *c) { return ep_ll_weights_at(c) + 4ull * c->shape.num_topk; }
static uint64_t weight_bytes(const EpComm *c) { return 4ull * ep_ll_num_weight_words(&c->shape); }

/* Write token t as a slot has it, but without words: its row, or e4m3 numbers and their scales; then its
 * weights and its tag. */
static void pack_token(const EpLlDispatchParams *p, uint32_t t, unsigned char *to) {
    const EpComm *c = &p->comm;
    const unsigned char *from = (const unsigned char *)p->x + t * c->layout.row_bytes;
    if (p->fp8) quantize_row(c, p->fp8, from, to);
    else memcpy(to, from, c->layout.row_bytes);
    float weights[EP_MAX_TOPK];
    my_weights(p, t, weights);
    memcpy(to + ep_ll_weights_at(c), weights, 4ull * c->shape.num_topk);
    const uint32_t tag = ep_ll_caller_tag(p->tag ? (uint32_t)p->tag[t] : 0);
    if (c->shape.num_topk < EP_MAX_TOPK) memcpy(to + tag_at(c), &tag, 4);
}

/* Bytes of a token's numbers and scales in a slot. The weights and the tag come later. */
static uint64_t travel_bytes(const EpLlDispatchParams *p) {
    const EpComm *c = &p->comm;
    return p->fp8 ? ep_ll_scales_at(c) + 4ull * (c->shape.hidden / EP_FP8_GROUP) : c->layout.row_bytes;
}
static void send_token(const EpLlDispatchParams *p, uint32_t t, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const uint32_t K = c->shape.num_topk, targets = targets_of(p, t);
    unsigned char *own = ep_ll_slot(c, c->my_rank, c->my_rank, t, epoch); /* no other rank uses it */
    if (targets & ~(1u << c->my_rank)) pack_token(p, t, own);
    for (uint32_t r = 0; r < c->shape.num_ranks; r++) {
        for (uint32_t k = 0; k < K; k++)
            ep_st_relaxed_sys_u64(ep_ll_route(c, r, c->my_rank, t, epoch) + k,
                                  ep_ll_cell(epoch, ep_ll_route_of(p, (uint64_t)t * K + k)));
        if (r == c->my_rank || !(targets >> r & 1u)) continue;
        unsigned char *to = ep_ll_slot(c, r, c->my_rank, t, epoch);
        ep_chaos(EP_CHAOS_FLAG_PUBLISH);
        put_words(to, 0, own, travel_bytes(p));
        put_words(to, ep_ll_weights_at(c), own + ep_ll_weights_at(c), weight_bytes(c));
    }
}

/* Read the routes of all tokens of all ranks. next[e] becomes the number of rows of local expert e. False: a
 * wait has failed, or an index is wrong, which this function records. */
static bool read_routes(const EpLlDispatchParams *p, const EpLlHead *heads, uint32_t *next, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const uint32_t K = c->shape.num_topk, L = ep_num_local_experts(&c->shape), first = c->my_rank * L;
    memset(next, 0, L * sizeof *next);
    for (uint32_t w = 0; w < c->shape.num_ranks; w++) {
        const EpFaultRecord f = ep_fault_at(EP_OP_LL_DISPATCH, w, EP_WORD_ROUTE, epoch);
        for (uint32_t i = 0; i < heads[w].number * K; i++) {
            const uint64_t *cell = ep_ll_route(c, c->my_rank, w, i / K, epoch);
            uint32_t e, is_new = 1;
            if (!ep_ll_cell_await(c, cell + i % K, epoch, &f, &e)) return false;
            if (e == EP_ROUTE_WRONG) {
                ep_ll_wrong_index(
                    c, w, i,
                    w == c->my_rank ? ep_read_index(p->indices, p->index_bytes, i) : EP_INDEX_UNKNOWN, epoch);
                return false;
            }
            if (e < first || e >= first + L) continue;
            for (uint32_t k = 0; k < i % K; k++)
                is_new &= ((uint32_t)ep_ld_relaxed_sys_u64(cell + k) & 0xffffu) != e;
            next[e - first] += is_new;
        }
    }
    return true;
}

/* Copy a token, packed as pack_token does it, to its row. */
static void place_row(const EpLlDispatchParams *p, const unsigned char *from, uint32_t expert, uint32_t first,
                      uint32_t i) {
    const EpComm *c = &p->comm;
    const uint64_t row = ep_ll_row(&c->shape, p->is_masked, expert, first, i);
    const uint64_t num_bytes = p->fp8 ? c->shape.hidden : c->layout.row_bytes;
    const uint64_t lines = ep_ll_scale_lines(&c->shape, p->fp8);
    if (row >= ep_ll_num_rows(&c->shape, p->is_masked)) return;
    memcpy((unsigned char *)p->rows + row * num_bytes, from, num_bytes);
    if (p->row_tag) {
        uint32_t tag;
        memcpy(&tag, from + tag_at(c), 4);
        p->row_tag[row] = (int32_t)ep_ll_caller_tag(tag);
    }
    for (uint32_t g = 0; p->fp8 && g < c->shape.hidden / EP_FP8_GROUP; g++) {
        uint32_t bits;
        memcpy(&bits, from + ep_ll_scales_at(c) + 4ull * g, 4);
        ep_ll_put_scale(p, p->is_masked ? expert * lines * p->scale_line + i : row, g, bits);
    }
}

/* Token t of source w, packed, in the slot of this rank's own token with the same number. No other rank uses
 * that slot, and this worker alone uses it, for one token after the other. NULL: the token does not
 * arrive. */
static const unsigned char *token_of(const EpLlDispatchParams *p, uint32_t w, uint32_t t, uint64_t epoch) {
    const EpComm *c = &p->comm;
    unsigned char *own = ep_ll_slot(c, c->my_rank, c->my_rank, t, epoch);
    const Arriving a = arriving(c, EP_OP_LL_DISPATCH, w, t, epoch);
    if (w == c->my_rank) pack_token(p, t, own);
    else if (!take_words(&a, 0, own, travel_bytes(p)) ||
             !take_words(&a, ep_ll_weights_at(c), own + ep_ll_weights_at(c), weight_bytes(c)))
        return NULL;
    return own;
}

/* Place token t of source w, and note it for combine. mine: this worker does so; otherwise it only counts
 * the rows. */
static bool place_token(const EpLlDispatchParams *p, uint32_t w, uint32_t t, const uint32_t *first,
                        uint32_t *next, bool mine, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const EpLlHandle h = ep_ll_handle(&c->shape);
    const uint32_t K = c->shape.num_topk, L = ep_num_local_experts(&c->shape);
    const uint64_t *route = ep_ll_route(c, c->my_rank, w, t, epoch);
    int32_t *rows = p->handle + h.rows_off + ep_ll_choices_at(&c->shape, w, t);
    const unsigned char *from = NULL;
    for (uint32_t k = 0; k < K; k++) {
        const uint32_t e = ((uint32_t)ep_ld_relaxed_sys_u64(route + k) & 0xffffu) - c->my_rank * L;
        uint32_t before = k;
        if (mine) rows[k] = ep_ll_row_elsewhere(&c->shape, w == c->my_rank, e + c->my_rank * L);
        if (e >= L) continue;
        for (uint32_t j = 0; j < k; j++)
            if (((uint32_t)ep_ld_relaxed_sys_u64(route + j) & 0xffffu) == e + c->my_rank * L && before == k)
                before = j;
        if (before < k) { /* a duplicate: the token has one row at this expert */
            if (mine) rows[k] = rows[before];
            continue;
        }
        const uint32_t i = next[e]++;
        if (!mine) continue;
        if (!from && !(from = token_of(p, w, t, epoch))) return false;
        place_row(p, from, e, first[e], i);
        rows[k] = (int32_t)ep_ll_row(&c->shape, p->is_masked, e, first[e], i);
    }
    float *weights = (float *)(p->handle + h.weights_off + ep_ll_choices_at(&c->shape, w, t));
    if (from) memcpy(weights, from + ep_ll_weights_at(c), 4ull * K);
    else if (mine && w == c->my_rank) my_weights(p, t, weights);
    return true;
}

static bool receive_tokens(const EpLlDispatchParams *p, uint32_t worker, uint32_t num_workers,
                           uint64_t epoch) {
    const EpComm *c = &p->comm;
    const uint32_t L = ep_num_local_experts(&c->shape);
    const EpLlHandle h = ep_ll_handle(&c->shape);
    EpLlHead heads[EP_MAX_RANKS];
    uint32_t first[EP_MAX_EXPERTS], next[EP_MAX_EXPERTS], sum = 0;
    const bool ok = ep_ll_enter_await(c, EP_OP_LL_DISPATCH, ep_ll_dispatch_head(p), epoch, heads);
    ep_ll_clear_void(c, ep_ll_void_epoch(c), worker, num_workers, epoch);
    if (!ok) return false;
    if (!read_routes(p, heads, next, epoch)) return false;
    for (uint32_t e = 0; e < L; e++) {
        if (worker == 0) p->counts[e] = (int32_t)next[e];
        first[e] = sum;
        if (worker == 0) p->handle[h.offsets_off + e] = (int32_t)sum;
        sum += next[e];
        next[e] = 0;
    }
    if (worker == 0) p->handle[h.offsets_off + L] = (int32_t)sum;
    for (uint32_t w = 0; w < c->shape.num_ranks; w++)
        for (uint32_t t = 0; t < heads[w].number; t++)
            if (!place_token(p, w, t, first, next, t % num_workers == worker, epoch)) return false;
    for (uint32_t t = worker; t < p->num_tokens; t += num_workers)
        p->handle[h.targets_off + t] = (int32_t)targets_of(p, t);
    if (worker) return true;
    p->handle[EP_LL_STATUS] = 0;
    p->handle[EP_LL_NUM_TOKENS] = (int32_t)p->num_tokens;
    p->handle[EP_LL_ID] = (int32_t)(epoch & 0xffffu);
    for (uint32_t w = 0; w < c->shape.num_ranks; w++) p->handle[EP_LL_SOURCES + w] = (int32_t)heads[w].number;
    return true;
}

/* Poison the outputs of a failed dispatch. */
static void poison_dispatch(const EpLlDispatchParams *p) {
    const EpShape *s = &p->comm.shape;
    const uint64_t num_rows = ep_ll_num_rows(s, p->is_masked);
    ep_cpu_fill_nan(p->rows, num_rows * (p->fp8 ? s->hidden : p->comm.layout.row_bytes));
    memset(p->counts, 0, 4ull * ep_num_local_experts(s));
    p->handle[EP_LL_STATUS] = EP_EPEER;
}

void ep_cpu_ll_dispatch(const EpLlDispatchParams *p, uint32_t worker, uint32_t num_workers) {
    const EpComm *c = &p->comm;
    const uint64_t epoch = ep_begin(c);
    if (epoch && p->parts & EP_LL_SEND) {
        if (worker == 0) ep_ll_enter(c, ep_ll_dispatch_head(p), epoch);
        for (uint32_t t = worker; t < p->num_tokens; t += num_workers) send_token(p, t, epoch);
    }
    if (!(p->parts & EP_LL_RECEIVE)) return;
    if (epoch) (void)receive_tokens(p, worker, num_workers, epoch);
    if (ep_leave_unqueued(c, num_workers, epoch) == EP_LEFT_LAST_FAILED) {
        if (epoch) ep_ll_note_void(c, epoch);
        poison_dispatch(p);
    }
}

/* ---- combine ---- */

/* The row that this rank has for choice k of a source's token, or NULL. */
static const unsigned char *row_of(const EpLlCombineParams *p, uint32_t source, uint32_t token, uint32_t k) {
    const EpShape *s = &p->comm.shape;
    const int32_t row = p->handle[ep_ll_handle(s).rows_off + ep_ll_choices_at(s, source, token) + k];
    if (row < 0 || (uint64_t)row >= ep_ll_num_rows(s, p->is_masked)) return NULL;
    return (const unsigned char *)p->rows + (uint64_t)row * p->comm.layout.row_bytes;
}

/* dst = the sum of the rows that this rank has for a source's token, in the order of its choices. */
static void sum_choices(const EpLlCombineParams *p, uint32_t source, uint32_t token, void *dst) {
    const EpComm *c = &p->comm;
    const EpLlHandle h = ep_ll_handle(&c->shape);
    const uint64_t at = ep_ll_choices_at(&c->shape, source, token);
    const void *rows[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];
    uint32_t num = 0;
    for (uint32_t k = 0; k < c->shape.num_topk; k++) {
        if ((rows[num] = row_of(p, source, token, k)) == NULL) continue;
        memcpy(&weights[num++], &p->handle[h.weights_off + at + k], 4);
    }
    ep_cpu_sum_rows(dst, rows, weights, num, c->shape.dtype, c->shape.hidden);
}

/* Whether this rank has a row for a source's token. */
static bool has_row(const EpLlCombineParams *p, uint32_t source, uint32_t token) {
    const EpShape *s = &p->comm.shape;
    const int32_t *rows = p->handle + ep_ll_handle(s).rows_off + ep_ll_choices_at(s, source, token);
    for (uint32_t k = 0; k < s->num_topk; k++)
        if (rows[k] >= 0) return true;
    return false;
}

static void return_token(const EpLlCombineParams *p, uint32_t source, uint32_t token, uint64_t epoch) {
    const EpComm *c = &p->comm;
    if (!has_row(p, source, token)) return;
    unsigned char *to = ep_ll_slot(c, source, c->my_rank, token, epoch);
    /* The slot of this rank's own token with the same number holds the sum. No other rank uses that slot, and
     * only this worker uses it again, in finish_token. */
    unsigned char *sum = ep_ll_slot(c, c->my_rank, c->my_rank, token, epoch);
    ep_chaos(EP_CHAOS_FLAG_PUBLISH);
    sum_choices(p, source, token, sum);
    if (!p->fp8) put_words(to, 0, sum, c->layout.row_bytes);
    for (uint32_t g = 0; p->fp8 && g < c->shape.hidden / EP_FP8_GROUP; g++) {
        uint8_t numbers[EP_FP8_GROUP];
        const float scale = ep_cpu_quantize(numbers, sum + 2ull * g * EP_FP8_GROUP, c->shape.dtype, p->fp8);
        put_words(to, (uint64_t)g * EP_FP8_GROUP, numbers, EP_FP8_GROUP);
        put_words(to, ep_ll_scales_at(c) + 4ull * g, &scale, 4);
    }
}

/* Mode SCATTER: return each row that this rank has for a source's token. */
static void return_choices(const EpLlCombineParams *p, uint32_t source, uint32_t token, uint64_t epoch) {
    const EpComm *c = &p->comm;
    for (uint32_t k = 0; k < c->shape.num_topk; k++) {
        const unsigned char *row = row_of(p, source, token, k);
        ep_chaos(EP_CHAOS_FLAG_PUBLISH);
        if (row)
            put_words(ep_ll_slot(c, source, c->shape.num_ranks + k, token, epoch), 0, row,
                      c->layout.row_bytes);
    }
}

/* Numbers of a row that finish_token adds up at a time. A multiple of EP_FP8_GROUP. */
enum { BLOCK = 512 };

/* Add up a block of token t of this rank, in the order of the ranks: n numbers, the first of them `at`. */
static bool finish_block(const EpLlCombineParams *p, uint32_t t, uint32_t at, uint32_t n, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const uint32_t targets = (uint32_t)p->handle[ep_ll_handle(&c->shape).targets_off + t];
    const uint64_t size = ep_dtype_bytes(c->shape.dtype);
    float numbers[EP_MAX_RANKS][BLOCK]; /* of any dtype */
    float scale[EP_MAX_RANKS][BLOCK / EP_FP8_GROUP];
    const void *sums[EP_MAX_RANKS];
    const float *scales[EP_MAX_RANKS];
    uint32_t num = 0;
    for (uint32_t r = 0; r < c->shape.num_ranks; r++) {
        if (!(targets >> r & 1u)) continue;
        const Arriving a = arriving(c, EP_OP_LL_COMBINE, r, t, epoch);
        sums[num] = numbers[num];
        scales[num] = NULL;
        if (r == c->my_rank) {
            sums[num] = a.slot + at * size;
        } else if (!p->fp8) {
            if (!take_words(&a, at * size, numbers[num], n * size)) return false;
        } else {
            scales[num] = scale[num];
            if (!take_words(&a, at, numbers[num], n)) return false;
            if (!take_words(&a, ep_ll_scales_at(c) + 4ull * (at / EP_FP8_GROUP), scale[num],
                            4ull * (n / EP_FP8_GROUP)))
                return false;
        }
        num++;
    }
    unsigned char *out = (unsigned char *)p->out + t * c->layout.row_bytes + at * size;
    if (p->fp8) ep_cpu_sum_fp8(out, sums, scales, num, c->shape.dtype, n);
    else ep_cpu_sum_rows(out, sums, NULL, num, c->shape.dtype, n);
    return true;
}

/* Mode SCATTER: the same for the rows of token t, in the order of the choices. */
static bool finish_choices(const EpLlCombineParams *p, uint32_t t, uint32_t at, uint32_t n, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const EpShape *s = &c->shape;
    const EpLlHandle h = ep_ll_handle(s);
    const uint64_t size = ep_dtype_bytes(s->dtype), choices = ep_ll_choices_at(s, c->my_rank, t);
    float numbers[EP_MAX_TOPK][BLOCK], weights[EP_MAX_TOPK];
    const void *rows[EP_MAX_TOPK];
    uint32_t num = 0;
    for (uint32_t k = 0; k < s->num_topk; k++) {
        const unsigned char *row = row_of(p, c->my_rank, t, k);
        const uint32_t rank = ep_ll_rank_of(s, p->handle[h.rows_off + choices + k]);
        if (!row && rank == EP_MAX_RANKS) continue;
        const Arriving a = {c, ep_ll_slot(c, c->my_rank, s->num_ranks + k, t, epoch),
                            ep_fault_at(EP_OP_LL_COMBINE, rank, EP_WORD_SLOT, epoch)};
        if (!row && !take_words(&a, at * size, numbers[num], n * size)) return false;
        rows[num] = row ? row + at * size : (const void *)numbers[num];
        memcpy(&weights[num++], &p->handle[h.weights_off + choices + k], 4);
    }
    ep_cpu_sum_rows((unsigned char *)p->out + t * c->layout.row_bytes + at * size, rows, weights, num,
                    s->dtype, n);
    return true;
}

/* Add up token t of this rank. */
static bool finish_token(const EpLlCombineParams *p, uint32_t t, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const uint32_t H = c->shape.hidden, me = c->my_rank;
    const bool by_choice = c->shape.combine_mode == EP_LOW_LATENCY_SCATTER;
    if (!by_choice && (uint32_t)p->handle[ep_ll_handle(&c->shape).targets_off + t] >> me & 1u)
        sum_choices(p, me, t, ep_ll_slot(c, me, me, t, epoch));
    for (uint32_t at = 0; at < H; at += BLOCK)
        if (!(by_choice ? finish_choices : finish_block)(p, t, at, H - at < BLOCK ? H - at : BLOCK, epoch))
            return false;
    return true;
}

void ep_cpu_ll_combine(const EpLlCombineParams *p, uint32_t worker, uint32_t num_workers) {
    const EpComm *c = &p->comm;
    const uint64_t epoch = ep_begin(c);
    const EpLlHead mine = ep_ll_combine_head(p);
    const bool is_good = (mine.call & 0xffu) == 0,
               by_choice = c->shape.combine_mode == EP_LOW_LATENCY_SCATTER;
    if (epoch && p->parts & EP_LL_SEND) {
        if (worker == 0) ep_ll_enter(c, mine, epoch);
        for (uint32_t w = 0; w < c->shape.num_ranks && is_good; w++)
            for (uint32_t t = worker; t < ep_ll_tokens_of(p, w) && w != c->my_rank; t += num_workers)
                (by_choice ? return_choices : return_token)(p, w, t, epoch);
    }
    if (!(p->parts & EP_LL_RECEIVE)) return;
    EpLlHead heads[EP_MAX_RANKS];
    bool ok = epoch && ep_ll_enter_await(c, EP_OP_LL_COMBINE, mine, epoch, heads);
    if (epoch) ep_ll_clear_void(c, ep_ll_void_epoch(c), worker, num_workers, epoch);
    for (uint32_t t = worker; t < p->num_tokens && ok; t += num_workers) ok = finish_token(p, t, epoch);
    if (ep_leave_unqueued(c, num_workers, epoch) == EP_LEFT_LAST_FAILED) {
        if (epoch) ep_ll_note_void(c, epoch);
        ep_cpu_fill_nan(p->out, p->num_tokens * c->layout.row_bytes);
    }
}
