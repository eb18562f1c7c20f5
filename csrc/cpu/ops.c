/* cpu/ops.c - dispatch and combine in plain C; see cpu/ops.h.
 *
 * Invariants: sums are in float32 and in a fixed order, so that results are bit-identical to the kernels'.
 * A number from a peer is clamped or checked before it becomes an offset. A worker waits for a peer's chunk
 * only after the send queue is empty. */
#include "cpu/ops.h"

#include <string.h>

#include "cpu/rows.h"

void ep_cpu_enter(const EpComm *c, uint32_t op) {
    uint64_t epoch = ep_begin(c);
    if (epoch == 0) return;
    if (ep_is_low_latency(&c->shape)) {
        EpLlHead heads[EP_MAX_RANKS];
        ep_ll_propagate_error(c, op, epoch, heads);
    } else {
        EpHeader h = ep_make_header(c, op, NULL, NULL, 0, 0);
        ep_enter(c, &h, epoch);
        EpWaits waits;
        if (ep_enter_await(c, op, epoch, true, &waits)) ep_count_waits(c, &waits);
        ep_publish_waits(c);
    }
    ep_leave(c, 1, epoch);
}

/* ---- dispatch ---- */

/* The rows at rank r of the choices of this rank's token t; -1 for a choice at another rank. */
static void rows_at_rank(const EpDispatchParams *p, uint32_t t, uint32_t r, int32_t *rows) {
    uint32_t L = ep_num_local_experts(&p->comm.shape), K = p->comm.shape.num_topk;
    for (uint32_t k = 0; k < K; k++) {
        int32_t e = p->plan[p->layout.token_expert_off + (uint64_t)t * K + k];
        rows[k] =
            e >= 0 && (uint32_t)e / L == r ? p->plan[p->layout.token_row_off + (uint64_t)t * K + k] : -1;
    }
}

/* The slot in which rank r returns token t. */
static int32_t home_slot(const EpDispatchParams *p, uint32_t t, uint32_t r) {
    return p->plan[p->layout.token_slot_off + (uint64_t)t * p->comm.shape.num_ranks + r];
}

static int32_t tag_of(const EpDispatchParams *p, uint32_t t) {
    return p->tag ? p->tag[t / p->num_copies] : 0;
}

static const unsigned char *input_row(const EpDispatchParams *p, uint32_t t) {
    return (const unsigned char *)p->x + (uint64_t)(t / p->num_copies) * p->comm.layout.row_bytes;
}
static float scale_of_input(const EpRowScales *s, const EpDispatchParams *p, uint32_t t, uint32_t group) {
    return s->x[(int64_t)(t / p->num_copies) * s->x_row + (int64_t)group * s->x_group];
}

/* Write a token and its trailer to its slot in rank r's staging buffer. */
static void send_slot(const EpDispatchParams *p, const EpRowScales *scales, uint32_t r, uint32_t slot) {
    const EpComm *c = &p->comm;
    uint32_t K = c->shape.num_topk,
             t = (uint32_t)p->plan[p->layout.send_token_off + (uint64_t)r * p->layout.num_tokens + slot];
    unsigned char *to = ep_slot_at(c, r, c->my_rank, slot), *trailer = to + c->layout.row_bytes;
    int32_t meta[EP_TRAILER_ROWS + EP_MAX_TOPK];
    memcpy(to, input_row(p, t), c->layout.row_bytes);
    meta[EP_TRAILER_TOKEN] = (int32_t)t;
    meta[EP_TRAILER_RETURN_SLOT] = home_slot(p, t, r);
    meta[EP_TRAILER_TAG] = tag_of(p, t);
    rows_at_rank(p, t, r, meta + EP_TRAILER_ROWS);
    memcpy(trailer, meta, 4ull * ep_trailer_weights(K));
    if (p->weight) memcpy(trailer + 4ull * ep_trailer_weights(K), p->weight + (uint64_t)t * K, 4ull * K);
    for (uint32_t g = 0; scales && g < scales->num_groups; g++) {
        const float scale = scale_of_input(scales, p, t, g);
        memcpy(trailer + 4ull * (ep_trailer_words(K) + g), &scale, 4);
    }
}

/* Copy a slot to its rows. meta and weight come from the sender, so they are checked: nothing outside [0,
 * num_rows) is written. */
static void place_slot(const EpDispatchParams *p, const EpRowScales *scales, uint32_t s,
                       const unsigned char *row, const int32_t *meta, const float *weight) {
    const EpComm *c = &p->comm;
    uint32_t K = c->shape.num_topk;
    const int32_t token = meta[EP_TRAILER_TOKEN];
    const uint32_t return_slot = (uint32_t)meta[EP_TRAILER_RETURN_SLOT];
    int32_t *record =
        p->recv + ep_record_at(&c->shape, s, return_slot < c->shape.max_tokens ? return_slot : 0);
    record[EP_RECORD_TOKEN] = (uint32_t)token < c->shape.max_tokens ? token : 0;
    for (uint32_t k = 0; k < K; k++) {
        int32_t at = meta[EP_TRAILER_ROWS + k];
        if ((uint32_t)at >= p->num_rows && !EP_FAULT(UNCHECKED_ROWS)) at = -1;
        record[EP_RECORD_ROWS + k] = at;
        if (at < 0) continue;
        memcpy((unsigned char *)p->rows + (uint64_t)at * c->layout.row_bytes, row, c->layout.row_bytes);
        if (p->row_weight) p->row_weight[at] = weight[k];
        if (p->row_tag) p->row_tag[at] = meta[EP_TRAILER_TAG];
        for (uint32_t g = 0; scales && g < scales->num_groups; g++) {
            float *to = ep_row_scale(scales, (uint32_t)at, g);
            if (s == c->my_rank) *to = scale_of_input(scales, p, (uint32_t)token, g);
            else memcpy(to, row + c->layout.row_bytes + 4ull * (ep_trailer_words(K) + g), 4);
        }
    }
}

/* Wait for a chunk and place its slots. False: the wait has failed. */
static bool receive_chunk(const EpDispatchParams *p, const EpRowScales *scales, uint32_t op, EpTask task,
                          uint64_t epoch) {
    const EpComm *c = &p->comm;
    uint32_t K = c->shape.num_topk, T = p->layout.num_tokens, first = task.chunk * EP_CHUNK_SLOTS;
    uint32_t n = ep_chunk_slots((uint32_t)p->plan[EP_HEAD_NUM_RECV + task.rank], task.chunk);
    int32_t meta[EP_TRAILER_ROWS + EP_MAX_TOPK];
    float weight[EP_MAX_TOPK];
    if (n == 0) return true;
    if (task.rank != c->my_rank && !ep_flag_await(c, op, task.rank, task.chunk, epoch)) return false;
    for (uint32_t slot = first; slot < first + n; slot++) {
        const unsigned char *row = ep_slot_at(c, c->my_rank, task.rank, slot);
        if (task.rank == c->my_rank) { /* tokens of this rank: read them from the input */
            uint32_t t = (uint32_t)p->plan[p->layout.send_token_off + (uint64_t)c->my_rank * T + slot];
            row = input_row(p, t);
            meta[EP_TRAILER_TOKEN] = (int32_t)t;
            meta[EP_TRAILER_RETURN_SLOT] = home_slot(p, t, c->my_rank);
            meta[EP_TRAILER_TAG] = tag_of(p, t);
            rows_at_rank(p, t, c->my_rank, meta + EP_TRAILER_ROWS);
            if (p->weight) memcpy(weight, p->weight + (uint64_t)t * K, 4ull * K);
        } else { /* copy first, then check: a faulty peer may write at the same time */
            const unsigned char *trailer = row + c->layout.row_bytes;
            memcpy(meta, trailer, 4ull * ep_trailer_weights(K));
            memcpy(weight, trailer + 4ull * ep_trailer_weights(K), 4ull * K);
        }
        place_slot(p, scales, task.rank, row, meta, weight);
    }
    return true;
}

/* Set the bytes of the scales of `num` rows from row `first` on. */
static void fill_scales(const EpRowScales *s, uint64_t first, uint64_t num, int byte) {
    for (uint64_t r = first; r < first + num; r++)
        for (uint32_t g = 0; g < s->num_groups; g++)
            memset(ep_row_scale(s, (uint32_t)r, g), byte, sizeof(float));
}

/* Set `num` rows from row `first` on to zero. */
static void clear_rows(const EpDispatchParams *p, const EpRowScales *scales, uint64_t first, uint64_t num) {
    const uint64_t row_bytes = p->comm.layout.row_bytes;
    if (num == 0) return;
    memset((unsigned char *)p->rows + first * row_bytes, 0, num * row_bytes);
    if (p->row_weight) memset(p->row_weight + first, 0, num * sizeof *p->row_weight);
    if (scales) fill_scales(scales, first, num, 0);
}

/* Set the padding rows of each expert to zero. */
static void clear_padding(const EpDispatchParams *p, const EpRowScales *scales) {
    const EpShape *s = &p->comm.shape;
    const uint32_t L = ep_num_local_experts(s);
    const int32_t *first = p->plan + p->layout.expert_row_off, *counts = p->plan + p->layout.counts_off;
    for (uint32_t l = 0; l < L; l++) {
        const uint32_t from = (uint32_t)first[l] + ep_expert_rows(s, counts, p->comm.my_rank * L + l);
        const uint32_t end = (uint32_t)first[l + 1];
        if (from < end && end <= p->num_rows) clear_rows(p, scales, from, end - from);
    }
}

void ep_cpu_dispatch(const EpDispatchParams *p, const EpScales *s, uint32_t worker, uint32_t num_workers) {
    const EpComm *c = &p->comm;
    const EpRowScales *scales = s->dtype == EP_IN_LAYER_DTYPE ? NULL : &s->rows;
    const uint32_t op = EP_OP_WORD(EP_OP_DISPATCH, s->dtype);
    uint32_t W = c->shape.num_ranks;
    uint64_t epoch = ep_begin(c), n, num_tasks;
    bool ok = epoch != 0;
    EpLocal *l = ep_local(c);
    if (ok && worker == 0) {
        EpHeader h = ep_make_header(c, op, p->plan, NULL, p->layout.num_tokens, p->num_rows);
        h.has_weight = p->has_weight;
        ep_enter(c, &h, epoch);
    }
    EpWaits waits;
    ok = ok && ep_enter_await(c, op, epoch, worker == 0, &waits);
    if (ok && worker == 0) {
        ep_count_waits(c, &waits);
        ep_publish_waits(c);
    }
    num_tasks = ok ? ep_num_tasks(p->plan + EP_HEAD_NUM_SEND, W) : 0;
    while (ok && (n = ep_queue_pop(l->queue_send)) < num_tasks) {
        EpTask task = ep_task_at(n, c->my_rank, W);
        uint32_t num = ep_chunk_slots((uint32_t)p->plan[EP_HEAD_NUM_SEND + task.rank], task.chunk);
        if (task.rank == c->my_rank || num == 0) continue;
        if (EP_FAULT(FLAG_FIRST)) ep_flag_publish(c, task.rank, task.chunk, epoch);
        for (uint32_t i = 0; i < num; i++) send_slot(p, scales, task.rank, task.chunk * EP_CHUNK_SLOTS + i);
        ep_flag_publish(c, task.rank, task.chunk, epoch);
    }
    num_tasks = ok ? ep_num_tasks(p->plan + EP_HEAD_NUM_RECV, W) : 0;
    while (ok && (n = ep_queue_pop(&l->queue_recv)) < num_tasks)
        ok = receive_chunk(p, scales, op, ep_task_at(n, c->my_rank, W), epoch);
    if (ok && worker == 0) {
        uint64_t m = (uint64_t)p->plan[EP_HEAD_NUM_ROWS];
        clear_rows(p, scales, m, p->num_rows > m ? p->num_rows - m : 0);
        if (p->has_padding) clear_padding(p, scales);
    }
    if (ep_leave(c, num_workers, epoch) == EP_LEFT_LAST_FAILED) {
        ep_cpu_fill_nan(p->rows, p->num_rows * c->layout.row_bytes);
        ep_cpu_fill_nan(p->row_weight, p->num_rows * 4ull);
        if (scales) fill_scales(scales, 0, p->num_rows, EP_FILL_NAN);
        memset(p->recv, 0xff,
               /* -1: no slot came from any rank */
               4 * ep_recv_words(&c->shape));
    }
}

/* ---- combine ---- */

/* The address in at_rank's staging buffer of a choice (SCATTER) or of a row (GATHER). */
static const void *row_of(const EpCombineParams *p, int32_t row) {
    return (const unsigned char *)p->rows + (uint64_t)row * p->comm.layout.row_bytes;
}
/* Write a row and its trailer (weight and scalar) to the staging buffer. */
static void put_choice(const EpCombineParams *p, unsigned char *to, int32_t row) {
    float trailer[EP_CHOICE_WORDS];
    trailer[EP_CHOICE_WEIGHT] = p->has_weight ? p->row_weight[row] : 1.0f;
    trailer[EP_CHOICE_SCALAR] = p->has_scalar ? p->row_scalar[row] : 0.0f;
    memcpy(to, row_of(p, row), p->comm.layout.row_bytes);
    memcpy(to + p->comm.layout.row_bytes, trailer, sizeof trailer);
}

/* Return one slot of rank s: the sum of its rows (LOCAL), or each row by itself (SCATTER). */
static void return_slot(const EpCombineParams *p, uint32_t s, uint32_t slot) {
    EP_HANDLES_ALL(EP_NUM_COMBINE_MODES, 5); /* as in the functions below */
    const EpComm *c = &p->comm;
    uint32_t K = c->shape.num_topk, num = 0;
    const int32_t *record = p->recv + ep_record_at(&c->shape, s, slot);
    const uint32_t token = (uint32_t)record[EP_RECORD_TOKEN];
    const void *rows[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK], scalar[EP_MAX_TOPK] = {0};
    for (uint32_t k = 0; k < K; k++) {
        int32_t row = record[EP_RECORD_ROWS + k];
        if (row < 0 || (uint32_t)row >= p->num_rows || token >= c->shape.max_tokens) continue;
        if (c->shape.combine_mode == EP_COMBINE_SCATTER) {
            put_choice(p, ep_choice_at(c, s, (uint64_t)token * K + k), row);
            continue;
        }
        if (p->has_weight) weights[num] = p->row_weight[row];
        if (p->has_scalar) scalar[k] = p->row_scalar[row];
        rows[num++] = row_of(p, row);
    }
    if (c->shape.combine_mode != EP_COMBINE_LOCAL) return;
    unsigned char *to = ep_slot_at(c, s, c->my_rank, slot);
    ep_cpu_sum_rows(to, rows, p->has_weight ? weights : NULL, num, c->shape.dtype, c->shape.hidden);
    if (p->has_scalar) memcpy(to + c->layout.row_bytes, scalar, 4ull * K);
}

/* Whether no later choice of a token is at the rank of its choice k. L: experts of a rank. */
static bool is_last_at_rank(const int32_t *expert, uint32_t k, uint32_t K, uint32_t L) {
    for (uint32_t later = k + 1; later < K; later++)
        if (expert[later] >= 0 && (uint32_t)expert[later] / L == (uint32_t)expert[k] / L) return false;
    return true;
}

/* Add up one token of this rank from its biases and what the ranks returned. The order of the sum is fixed:
 * biases, then by rank (LOCAL without by_choice) or by choice. */
static bool finish_token(const EpCombineParams *p, uint32_t t, uint64_t epoch) {
    const EpComm *c = &p->comm;
    const EpShape *s = &c->shape;
    uint32_t K = s->num_topk, L = ep_num_local_experts(s), num = 0;
    const int32_t *slot = p->plan + p->layout.token_slot_off + (uint64_t)t * s->num_ranks;
    const int32_t *expert = p->plan + p->layout.token_expert_off + (uint64_t)t * K;
    const int32_t *row = p->plan + p->layout.token_row_off + (uint64_t)t * K;
    float *scalar = p->out_scalar ? p->out_scalar + (uint64_t)t * K : NULL;
    float weights[EP_MAX_BIASES + EP_MAX_TOPK];
    const void *rows[EP_MAX_BIASES + EP_MAX_TOPK];
    bool local = s->combine_mode == EP_COMBINE_LOCAL, pull = s->combine_mode == EP_COMBINE_GATHER;
    for (; num < p->num_biases; num++) {
        rows[num] = (const unsigned char *)p->bias[num] + t * c->layout.row_bytes;
        weights[num] = 1;
    }
    for (uint32_t r = 0; r < s->num_ranks && !pull; r++) {
        if (slot[r] < 0) continue;
        if (!ep_flag_await(c, EP_OP_COMBINE, r, (uint32_t)slot[r] / EP_CHUNK_SLOTS, epoch)) return false;
        if (local && !p->by_choice) rows[num++] = ep_slot_at(c, c->my_rank, r, (uint32_t)slot[r]);
    }
    for (uint32_t k = 0; k < K; k++) {
        uint32_t r = expert[k] < 0 ? 0 : (uint32_t)expert[k] / L;
        float trailer[EP_CHOICE_WORDS] = {1, 0}; /* weight, scalar */
        if (expert[k] >= 0 && local) {
            memcpy(&trailer[EP_CHOICE_SCALAR],
                   ep_slot_at(c, c->my_rank, r, (uint32_t)slot[r]) + c->layout.row_bytes + 4ull * k, 4);
            if (p->by_choice && is_last_at_rank(expert, k, K, L))
                rows[num++] = ep_slot_at(c, c->my_rank, r, (uint32_t)slot[r]);
        } else if (expert[k] >= 0) {
            rows[num] = pull ? ep_choice_at(c, r, (uint32_t)row[k])
                             : ep_choice_at(c, c->my_rank, (uint64_t)t * K + k);
            memcpy(trailer, (const unsigned char *)rows[num] + c->layout.row_bytes, sizeof trailer);
            weights[num++] = trailer[EP_CHOICE_WEIGHT];
        }
        if (scalar) scalar[k] = trailer[EP_CHOICE_SCALAR];
    }
    ep_cpu_sum_rows((unsigned char *)p->out + t * c->layout.row_bytes, rows,
                    !local && p->has_weight ? weights : NULL, num, s->dtype, s->hidden);
    return true;
}

/* GATHER: copy this rank's rows to its staging buffer, from which peers read them. After the last row is
 * staged, one worker publishes this to all ranks. */
static void stage_rows(const EpCombineParams *p, uint64_t epoch) {
    const EpComm *c = &p->comm;
    EpLocal *l = ep_local(c);
    uint32_t m = (uint32_t)p->plan[EP_HEAD_NUM_ROWS];
    if (m > p->num_rows) m = p->num_rows;
    uint32_t num_chunks = ep_ceil_div_u32(m, EP_CHUNK_SLOTS);
    uint64_t n, done = 0;
    while ((n = ep_queue_pop(l->queue_send)) < num_chunks) {
        uint32_t first = (uint32_t)n * EP_CHUNK_SLOTS, num = ep_chunk_slots(m, (uint32_t)n);
        for (uint32_t i = first; i < first + num; i++)
            put_choice(p, ep_choice_at(c, c->my_rank, i), (int32_t)i);
        done = ep_add_acq_rel_gpu_u64(&l->num_copied, 1) + 1;
        if (done == num_chunks) break;
    }
    /* The acq_rel addition above orders the rows of all workers before this flag, which publishes them. */
    if (num_chunks == 0 ? n == 0 : done == num_chunks)
        for (uint32_t r = 0; r < c->shape.num_ranks; r++) ep_flag_publish(c, r, 0, epoch);
}

/* Send back the results of all slots that this rank has received from any rank. Set the flag of each chunk
 * after its last slot. */
static void return_chunks(const EpCombineParams *p, uint64_t epoch) {
    const EpComm *c = &p->comm;
    uint64_t n, num_tasks = ep_num_tasks(p->plan + EP_HEAD_NUM_RECV, c->shape.num_ranks);
    while ((n = ep_queue_pop(ep_local(c)->queue_send)) < num_tasks) {
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
        EpHeader h = ep_make_header(c, EP_OP_COMBINE, p->plan, p->recv, T, p->num_rows);
        h.has_weight = p->has_weight;
        h.has_scalar = p->has_scalar;
        ep_enter(c, &h, epoch);
    }
    EpWaits waits;
    ok = ok && ep_enter_await(c, EP_OP_COMBINE, epoch, worker == 0, &waits);
    if (ok && worker == 0) {
        ep_count_waits(c, &waits);
        ep_publish_waits(c);
    }
    if (ok && c->shape.combine_mode == EP_COMBINE_GATHER) {
        stage_rows(p, epoch);
        for (uint32_t r = 0; r < c->shape.num_ranks; r++)
            ok = ok && ep_flag_await(c, EP_OP_COMBINE, r, 0, epoch);
    } else if (ok) {
        return_chunks(p, epoch);
    }
    while (ok && (n = ep_queue_pop(&ep_local(c)->queue_recv)) < num_chunks)
        for (uint32_t i = 0; i < ep_chunk_slots(T, (uint32_t)n) && ok; i++)
            ok = finish_token(p, (uint32_t)n * EP_CHUNK_SLOTS + i, epoch);
    if (ep_leave(c, num_workers, epoch) == EP_LEFT_LAST_FAILED) {
        ep_cpu_fill_nan(p->out, T * c->layout.row_bytes);
        ep_cpu_fill_nan(p->out_scalar, 4ull * T * c->shape.num_topk);
    }
}
