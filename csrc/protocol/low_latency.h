/* low_latency.h - the protocol of the low-latency all-to-all, for decoding: few tokens, as few hops as
 * possible.
 *
 * Nothing must be known before data leaves. The slot of a token is its number at its source, so a sender
 * knows every address at once. The header, the routes and the rows of an operation leave together. Every rank
 * then judges the same W headers and the same routes before it gives a row to the caller. So ranks agree
 * without a handshake of their own.
 *
 *   head    what a rank tells every peer about its operation: two cells
 *   route   one cell for each choice of each token, to every peer: the expert
 *   slot    a token's row on its way: the row (or e4m3 numbers, then f32 scales), then f32 weight[K], and
 *           with fewer than 32 choices i32 tag (0 without tags).
 *           On the way back: the sum of its rows at an expert's rank (or e4m3 numbers, then f32 scales);
 *           in mode EP_LOW_LATENCY_SCATTER, which has a slot for each choice too, the row of the choice
 *   piece   EP_PIECE_VECS units of 16 bytes of a row of the layer's dtype. On a GPU, a warp moves one at
 *           a time.
 *
 * A cell is {epoch:48 | value:16} in one word. A reader sees in the cell itself whether it belongs to the
 * operation. flags.h has the lines of these words in its table.
 *
 * A word of a slot has 32 bits, all of them data. So it has no epoch: between operations, all words of all
 * slots are 0. A sender stores the complement of a value, which is never 0 (ep_ll_word). The reader waits
 * until the word is not 0, and stores 0 after it has read it. So each word tells by itself that it has
 * arrived. Words may arrive in any order, and no fence, flag or release is needed: a row takes one hop.
 *
 * Banks of cells. Heads and routes exist twice. Operation e uses bank e % 2. Rank r writes to bank e % 2 of
 * its peer p without a handshake in e. This overwrites nothing that p still reads, in the order of time:
 *   (1) p has finished its operation e - 2, the last one that reads this bank.
 *   (2) p releases its head of e - 1, after (1) in the order of its stream.
 *   (3) r acquires p's head of e - 1. It does so in every operation, also in one that becomes void.
 *   (4) r finishes e - 1, begins e and writes, after (3) in the order of its stream.
 * One bank would not do: nothing orders p's reads in e - 1 before r's stores in e.
 *
 * Banks of slots. Slots exist three times. Operation e uses bank e % 3. If all operations were normal, two
 * banks would do by the argument above, because p's reads and its stores of 0 are complete with (1). But if e
 * is void, p does not read what its peers have sent in e. It clears that bank itself, in e + 1:
 *   (5) p acquires the heads of e + 1 of all peers. Each peer released its head after its stores of e. So all
 *       words of e have arrived.
 *   (6) p clears the bank, in e + 1.
 *   (7) p releases its head of e + 2, which r acquires in e + 2. So r's stores to this bank, in e + 3, come
 *       after (6).
 * With two banks, r stores to the bank in e + 2, and nothing orders (6) before that.
 * tests/models/low_latency.pml checks these arguments, and fails with one bank of cells, with two of slots,
 * and if p clears the bank before (5).
 * Invariant: numbers from a peer are clamped before they become an offset. */
#ifndef EP_LOW_LATENCY_H
#define EP_LOW_LATENCY_H
#include "protocol/flags.h"
#include "protocol/plan.h"

/* ---- the handle ---- */

/* What dispatch saves for combine, in a tensor of the caller: offsets in int32 elements. */
enum {
    EP_LL_STATUS = 0,     /* 0, or the error code with which dispatch failed */
    EP_LL_NUM_TOKENS = 1, /* T of this rank */
    EP_LL_ID = 2,         /* lowest 16 bits of dispatch's epoch */
    EP_LL_SOURCES = 8,    /* [W] T of each rank */
    EP_LL_HEAD_WORDS = 16
};
EP_STATIC_ASSERT(EP_LL_HEAD_WORDS - EP_LL_SOURCES >= EP_MAX_RANKS, "room for every rank in SOURCES");
typedef struct {
    uint64_t offsets_off; /* [L + 1] compact: the first row of each local expert; the last entry is M */
    uint64_t targets_off; /* [max_tokens] bit r: rank r returns a sum for this rank's token */
    /* [W][max_tokens][K] row of a source's choice at this rank. Without one: in mode EP_LOW_LATENCY_SCATTER,
     * for a choice of this rank's own token at rank r, -2 - r, else -1. */
    uint64_t rows_off;
    uint64_t weights_off; /* [W][max_tokens][K] the weight of a row, and of all choices of own tokens, f32 */
    uint64_t num_words;
} EpLlHandle;
EP_PURE EpLlHandle ep_ll_handle(const EpShape *s) {
    EpLlHandle h;
    const uint64_t num = (uint64_t)s->num_ranks * s->max_tokens * s->num_topk;
    uint64_t at = EP_LL_HEAD_WORDS;
    h.offsets_off = ep_take(&at, ep_num_local_experts(s) + 1, 4);
    h.targets_off = ep_take(&at, s->max_tokens, 4);
    h.rows_off = ep_take(&at, num, 4);
    h.weights_off = ep_take(&at, num, 4);
    h.num_words = ep_align_u64(at, 4);
    return h;
}
/* The place of a source's token in rows_off and weights_off, relative to it. */
EP_PURE uint64_t ep_ll_choices_at(const EpShape *s, uint32_t source, uint32_t token) {
    return ((uint64_t)source * s->max_tokens + token) * s->num_topk;
}
/* What rows_off has for a choice whose expert, of all ranks, is e and has no row here. */
EP_PURE int32_t ep_ll_row_elsewhere(const EpShape *s, bool is_own, uint32_t expert) {
    if (s->combine_mode != EP_LOW_LATENCY_SCATTER || !is_own || expert >= s->num_experts) return -1;
    return -2 - (int32_t)(expert / ep_num_local_experts(s));
}
/* The rank that a number of rows_off names, or EP_MAX_RANKS. A handle that was overwritten names no wrong
 * one. */
EP_PURE uint32_t ep_ll_rank_of(const EpShape *s, int32_t row) {
    return row <= -2 && row >= -1 - (int32_t)s->num_ranks ? (uint32_t)(-2 - row) : EP_MAX_RANKS;
}
/* The row of the i-th token of local expert e, whose first row is first[e] without gaps. */
EP_PURE uint64_t ep_ll_row(const EpShape *s, bool is_masked, uint32_t expert, uint32_t first, uint32_t i) {
    return is_masked ? (uint64_t)expert * s->num_ranks * s->max_tokens + i : (uint64_t)first + i;
}
/* Rows of the tensors of rows. */
EP_PURE uint64_t ep_ll_num_rows(const EpShape *s, bool is_masked) {
    return is_masked ? (uint64_t)ep_num_local_experts(s) * s->num_ranks * s->max_tokens : s->capacity;
}

/* EP_LL_MAX_TOKENS limits max_tokens. EP_LL_MAX_SMEM limits what a CTA of dispatch holds in shared memory: 2
 * bytes for each choice of every rank's tokens, and for each local expert a bit for each token and a count of
 * 4 bytes for each 32 tokens. */
#define EP_LL_MAX_TOKENS 4096u
#define EP_LL_MAX_SMEM (200u << 10)
EP_STATIC_ASSERT(EP_LL_MAX_TOKENS <= 0xffff, "a cell holds a number of tokens");
EP_PURE uint32_t ep_ll_mask_words(const EpShape *s) {
    return ep_ceil_div_u32(s->num_ranks * s->max_tokens, 32);
}
EP_PURE uint64_t ep_ll_smem_bytes(const EpShape *s) {
    const uint64_t tokens = (uint64_t)s->num_ranks * s->max_tokens, L = ep_num_local_experts(s);
    return ep_align_u64(2 * tokens * s->num_topk, 4) + 8 * L * ep_ll_mask_words(s) + 4 * (L + 1);
}

/* ---- slots ---- */

/* A slot of token `token`, in the bank of an operation. of: the rank whose token or sum it is; in mode
 * EP_LOW_LATENCY_SCATTER also W + k, for the row of choice k. */
EP_FN unsigned char *ep_ll_slot(const EpComm *c, uint32_t at_rank, uint32_t of, uint32_t token,
                                uint64_t epoch) {
    const uint64_t bank = epoch % (EP_FAULT(ONE_BANK) ? 1 : EP_LL_BANKS);
    const uint64_t line = (bank * c->layout.slots_of_token + of) * c->shape.max_tokens + token;
    return c->base[at_rank] + c->layout.stage_off + line * c->layout.slot_stride;
}
/* A value as a word of a slot, and the value of a word that has arrived. The value with all bits set is NaN
 * in every dtype: one number of 32 bits, two of 16, four of 8. Its complement would be 0, so another NaN
 * travels in its place, without the highest bit. */
EP_PURE uint32_t ep_ll_word(uint32_t value) { return value == 0xffffffffu ? 0x80000000u : ~value; }
EP_PURE uint32_t ep_ll_value(uint32_t word) { return ~word; }
/* Bytes of a row on its way, without weights; and where its scales begin. */
EP_PURE uint64_t ep_ll_scales_at(const EpComm *c) { return c->shape.hidden; }
EP_HANDLES_ALL(EP_NUM_FP8, 4); /* the two functions below */
/* The lines of scales in the output: a float32 for each group, or UE8M0, which packs four groups. */
EP_PURE uint32_t ep_ll_scale_lines(const EpShape *s, uint32_t fp8) {
    return s->hidden / EP_FP8_GROUP / (fp8 == EP_FP8_UE8M0 ? 4 : 1);
}
/* Store the scale of a group of a row: the bits of a float32. row: word of the row in its first line. */
EP_FN void ep_ll_put_scale(const EpLlDispatchParams *p, uint64_t row, uint32_t group, uint32_t bits) {
    if (p->fp8 == EP_FP8_UE8M0)
        ((uint8_t *)p->scales)[4 * (row + (uint64_t)(group / 4) * p->scale_line) + group % 4] =
            (uint8_t)(bits >> 23);
    else ((uint32_t *)p->scales)[row + (uint64_t)group * p->scale_line] = bits;
}
EP_PURE uint64_t ep_ll_weights_at(const EpComm *c) { return c->layout.row_bytes; }
/* A tag as a value of a word, and back. ep_ll_word changes the value with all bits set: this is the tag
 * INT32_MAX then, and not -1. It arrives as -1. */
EP_PURE uint32_t ep_ll_caller_tag(uint32_t tag) { return tag ^ 0x80000000u; }
/* The weights of a token, and its tag if a warp has a lane for it. */
EP_PURE uint32_t ep_ll_num_weight_words(const EpShape *s) {
    return s->num_topk < EP_MAX_TOPK ? s->num_topk + 1 : s->num_topk;
}

/* ---- cells ---- */

/* The bank of an operation, as the number of rank 0's line in it. */
EP_FN uint64_t ep_ll_bank(const EpComm *c, uint64_t epoch) {
    return (epoch % (EP_FAULT(ONE_BANK) ? 1 : 2)) * c->shape.num_ranks;
}

/* The epoch in a cell. It is never 0, the content of a fresh heap: 2^48 has the tag of 2^48 - 1, which is in
 * the other bank. */
EP_PURE uint64_t ep_ll_tag(uint64_t epoch) {
    const uint64_t most = 0xffffffffffffu, tag = epoch & most;
    return tag ? tag : most;
}
EP_PURE uint64_t ep_ll_cell(uint64_t epoch, uint32_t value) {
    return ep_ll_tag(epoch) << 16 | (value & 0xffffu);
}
EP_PURE bool ep_ll_cell_is(uint64_t cell, uint64_t epoch) {
    return EP_FAULT(OLD_COUNTS) ? cell != 0 : cell >> 16 == ep_ll_tag(epoch);
}

enum { EP_LL_HEAD_CALL = 0, EP_LL_HEAD_NUMBER = 1, EP_LL_HEAD_CELLS = 2 };
EP_STATIC_ASSERT(EP_LL_HEAD_CELLS <= EP_LINE / 8, "a head is in one line");
EP_STATIC_ASSERT(EP_NUM_OPS <= 16 && EP_NUM_FP8 <= 16, "ep_ll_call: both have four bits");
/* The call: {fp8:4 | op:4 | -status:8}. The number: T in dispatch; EP_LL_ID in combine. */
EP_PURE uint32_t ep_ll_call(uint32_t op, uint32_t fp8, int32_t status) {
    return fp8 << 12 | op << 8 | ((uint32_t)-status & 0xffu);
}
EP_FN uint64_t *ep_ll_head(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint64_t epoch) {
    return EP_AT(uint64_t, c, at_rank, c->layout.ll_head_off) +
           (ep_ll_bank(c, epoch) + of_rank) * (EP_LINE / 8);
}
/* The value of a route: an expert, or one of these. */
#define EP_ROUTE_NONE 0xffffu  /* the choice is dropped */
#define EP_ROUTE_WRONG 0xfffeu /* the index is not in [-1, E] */
EP_STATIC_ASSERT(EP_MAX_EXPERTS <= EP_ROUTE_WRONG, "no expert is taken for one of these");
EP_FN uint64_t *ep_ll_route(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint32_t token,
                            uint64_t epoch) {
    const uint64_t line = (ep_ll_bank(c, epoch) + of_rank) * c->shape.max_tokens + token;
    return EP_AT(uint64_t, c, at_rank, c->layout.ll_route_off) + line * c->shape.num_topk;
}
EP_PURE uint32_t ep_ll_route_of(const EpLlDispatchParams *p, uint64_t choice) {
    const int32_t e = ep_read_expert(p->indices, p->index_bytes, choice, p->comm.shape.num_experts);
    return e >= 0 ? (uint32_t)e : e == -1 ? EP_ROUTE_NONE : EP_ROUTE_WRONG;
}

/* Wait until a cell belongs to this operation. One lane calls it. False: the operation must end. */
EP_FN bool ep_ll_cell_await(const EpComm *c, const uint64_t *cell, uint64_t epoch, const EpFaultRecord *what,
                            uint32_t *value) {
    EpBackoff w = {0, 0, 0};
    for (;;) {
        const uint64_t got = ep_ld_relaxed_sys_u64(cell);
        if (ep_ll_cell_is(got, epoch)) {
            *value = (uint32_t)got & 0xffffu;
            return true;
        }
        if (!ep_wait_on(c, &w, c->timeout_ns, what, epoch, got >> 16)) return false;
    }
}

/* What a rank's head says. */
typedef struct {
    uint32_t call, number;
} EpLlHead;

/* Read the head of a rank. True: both of its cells belong to this operation. seen: the epoch of its call. The
 * acquire pairs with the release in ep_ll_enter. The number is loaded before it, so that both loads are in
 * flight together. */
EP_FN bool ep_ll_head_read(const uint64_t *head, uint64_t epoch, EpLlHead *to, uint64_t *seen) {
    const uint64_t number = ep_ld_relaxed_sys_u64(head + EP_LL_HEAD_NUMBER);
    const uint64_t call = ep_ld_acquire_sys_u64(head + EP_LL_HEAD_CALL);
    to->call = (uint32_t)call & 0xffffu;
    to->number = (uint32_t)number & 0xffffu;
    *seen = call >> 16;
    return ep_ll_cell_is(call, epoch) && ep_ll_cell_is(number, epoch);
}
/* Wait until the head of a rank belongs to this operation. One lane calls it. False: the operation must
 * end. */
EP_FN bool ep_ll_head_await(const EpComm *c, const uint64_t *head, uint64_t epoch, const EpFaultRecord *what,
                            EpLlHead *to) {
    EpBackoff w = {0, 0, 0};
    uint64_t seen = 0;
    while (!ep_ll_head_read(head, epoch, to, &seen))
        if (!ep_wait_on(c, &w, c->timeout_ns, what, epoch, seen)) return false;
    return true;
}

/* ---- enter ---- */

/* Tell all peers that this rank has entered. One worker of the rank calls it. The release orders everything
 * that this rank has read in earlier operations before the head: a peer that has seen the head of operation e
 * may overwrite what this rank read in operation e - 1. A release waits until the stores before it have
 * crossed the link, about a microsecond. So on a GPU this function stores nothing before the heads. */
EP_FN void ep_ll_enter(const EpComm *c, EpLlHead mine, uint64_t epoch) {
    ep_chaos(EP_CHAOS_ENTER);
    EP_FOR_LANES(r, c->shape.num_ranks) {
        uint64_t *head = ep_ll_head(c, r, c->my_rank, epoch);
        if (r != c->my_rank) {
            ep_st_release_sys_u64(head + EP_LL_HEAD_CALL, ep_ll_cell(epoch, mine.call));
            if (EP_FAULT(ENTER_FIRST)) ep_st_relaxed_sys_u64(head + EP_LL_HEAD_NUMBER, ep_ll_cell(epoch, 0));
            ep_chaos(EP_CHAOS_ENTER);
            ep_st_relaxed_sys_u64(head + EP_LL_HEAD_NUMBER, ep_ll_cell(epoch, mine.number));
        }
        /* For the flight record, and for ep_ll_propagate_error of this rank. */
        ep_st_relaxed_sys_u64(ep_enter_word(c, r, c->my_rank, epoch), epoch);
    }
}

/* Judge the head of a rank: the fault that it causes, with code 0 if it causes none. A head causes a fault if
 * its rank has failed (status); if its operation, fp8 or dispatch differs from that in `first`, the head of
 * rank 0; or if its number of tokens is too large. All ranks judge the same heads, so all get the same
 * fault. */
EP_FN EpFaultRecord ep_ll_judge(const EpComm *c, uint32_t op, EpLlHead first, EpLlHead head, uint32_t rank,
                                uint64_t epoch) {
    EpFaultRecord f = ep_fault_at(op, rank, EP_WORD_HEADER, epoch);
    const uint32_t status = head.call & 0xffu, its_op = head.call >> 8 & 15u,
                   first_op = first.call >> 8 & 15u;
    if (status) {
        f.code = EP_EPEER;
        f.got = (uint64_t)-(int64_t)status;
    } else if (its_op != first_op && !(first.call & 0xffu)) {
        f.code = EP_EMISMATCH;
        f.field = 1 + EP_FIELD_op;
        f.want = first_op;
        f.got = its_op;
    } else if (head.call >> 12 != first.call >> 12 && !(first.call & 0xffu)) {
        f.code = EP_EMISMATCH;
        f.field = 1 + EP_FIELD_fp8;
        f.want = first.call >> 12;
        f.got = head.call >> 12;
    } else if (its_op == EP_OP_LL_COMBINE && head.number != first.number && !(first.call & 0xffu)) {
        f.code = EP_EMISMATCH;
        f.field = 1 + EP_FIELD_handle;
        f.want = first.number;
        f.got = head.number;
    } else if (its_op == EP_OP_LL_DISPATCH && head.number > c->shape.max_tokens) {
        f.code = EP_ECORRUPT;
    }
    return f;
}

/* Wait for the heads of all peers and judge them and `mine`. All lanes call it and get the verdict. heads:
 * [W], in memory that all lanes can read. False: the operation is void, and the fault is recorded. */
EP_FN bool ep_ll_enter_await(const EpComm *c, uint32_t op, EpLlHead mine, uint64_t epoch, EpLlHead *heads) {
    EpFaultRecord f = ep_fault_at(op, 0, EP_WORD_ENTER, epoch);
    uint32_t ok = 1, bad = c->shape.num_ranks;
    ep_chaos(EP_CHAOS_ENTER_AWAIT);
    EP_FOR_LANES(r, c->shape.num_ranks) {
        const uint64_t *head = ep_ll_head(c, c->my_rank, r, epoch);
        f.peer = r;
        if (r == c->my_rank) {
            heads[r] = mine;
            continue;
        }
        uint64_t seen;
        if (EP_FAULT(NO_ENTER_WAIT)) (void)ep_ll_head_read(head, epoch, &heads[r], &seen);
        else if (!ep_ll_head_await(c, head, epoch, &f, &heads[r])) ok = 0;
    }
    ep_warp_sync();
    if (ep_warp_min_u32(ok) == 0) return false;
    EP_FOR_LANES(r, c->shape.num_ranks)
    if (ep_ll_judge(c, op, heads[0], heads[r], r, epoch).code && r < bad) bad = r;
    bad = ep_warp_min_u32(bad);
    if (bad == c->shape.num_ranks) return true;
    if (ep_lane() == 0) {
        f = ep_ll_judge(c, op, heads[0], heads[bad], bad, epoch);
        ep_fault(c, &f);
    }
    return false;
}

/* ---- slots of void operations ---- */

/* Note that this rank leaves the slots of this operation unread. */
EP_FN void ep_ll_note_void(const EpComm *c, uint64_t epoch) {
    ep_st_relaxed_gpu_u64(&ep_local(c)->void_epoch, epoch);
}
/* The newest operation whose slots this rank has left unread. Read it before the operation ends. */
EP_FN uint64_t ep_ll_void_epoch(const EpComm *c) { return ep_ld_relaxed_gpu_u64(&ep_local(c)->void_epoch); }
/* Clear the slots of the operation before this one, if it was void. Worker `worker` of num_workers clears its
 * share. All workers call it in every operation, after they have the verdict about the heads of all peers. */
EP_FN void ep_ll_clear_void(const EpComm *c, uint64_t void_epoch, uint32_t worker, uint32_t num_workers,
                            uint64_t epoch) {
    const uint32_t num_slots = c->layout.slots_of_token * c->shape.max_tokens;
    if (void_epoch + 1 != epoch || EP_FAULT(NO_CLEAR)) return;
    for (uint32_t i = worker; i < num_slots; i += num_workers) {
        uint64_t *slot = (uint64_t *)ep_ll_slot(c, c->my_rank, i / c->shape.max_tokens,
                                                i % c->shape.max_tokens, void_epoch);
        EP_FOR_LANES(at, (uint32_t)(c->layout.slot_stride / 8)) ep_st_relaxed_sys_u64(slot + at, 0);
    }
}

/* Run an operation without data, with the code in c->status. One worker calls it. If this rank has already
 * sent its half, its head stays as it is, because peers may have judged it. Then the operation is void here
 * alone. */
EP_FN void ep_ll_propagate_error(const EpComm *c, uint32_t op, uint64_t epoch, EpLlHead *heads) {
    const EpLlHead mine = {ep_ll_call(op, 0, c->status), 0};
    const uint64_t entered = ep_ld_relaxed_sys_u64(ep_enter_word(c, c->my_rank, c->my_rank, epoch));
    if (entered != epoch) ep_ll_enter(c, mine, epoch);
    const bool ok = ep_ll_enter_await(c, op, mine, epoch, heads);
    ep_ll_clear_void(c, ep_ll_void_epoch(c), 0, 1, epoch);
    if (!ok && ep_lane() == 0) ep_ll_note_void(c, epoch);
}

/* Leave the operation before its rows are moved: from here on, this worker uses no local word. One worker in
 * num_workers is the last, and prepares the words for the next operation, which begins after this launch.
 * is_void: the operation is void on every rank, so every worker that has the verdict passes true. A worker
 * that only sends has none, and passes false. So the number of workers that left a void operation is counted
 * in the high half of the word. A relaxed addition is enough otherwise: it orders nothing but the last
 * worker's stores, which depend on it, after the loads of the epoch, on which every worker's addition
 * depends. If it is void, the additions also order the claims of faults. A wait for a piece may still fail.
 * Then the world has ended, and this buffer is not used again. */
EP_FN void ep_ll_leave(const EpComm *c, uint32_t num_workers, bool is_void, uint64_t epoch) {
    EpLocal *l = ep_local(c);
    ep_chaos(EP_CHAOS_LEAVE);
    const uint64_t before = is_void ? ep_add_acq_rel_gpu_u64(&l->num_left, (1ull << 32) + 1)
                                    : ep_add_relaxed_gpu_u64(&l->num_left, 1);
    if ((uint32_t)before + 1 != num_workers) return;
    if (before >> 32 && !is_void) (void)ep_add_acq_rel_gpu_u64(&l->num_left, 0); /* acquires the claims */
    is_void = is_void || before >> 32;
    ep_st_relaxed_gpu_u64(&l->num_left, 0);
    if (is_void && !c->status) ep_st_relaxed_gpu_u64(&l->faulted, 1);
    if (is_void) ep_st_relaxed_gpu_u64(&l->claim, 0);
    if (is_void) ep_ll_note_void(c, epoch);
    ep_st_relaxed_gpu_u64(&l->epoch, epoch);
}

/* The fault of a wrong index at choice `position` of a source. The source knows the index; the others know
 * only that it is wrong. */
EP_FN void ep_ll_wrong_index(const EpComm *c, uint32_t source, uint32_t position, int64_t index,
                             uint64_t epoch) {
    EpFaultRecord f = ep_fault_at(EP_OP_LL_DISPATCH, source, EP_WORD_INDEX, epoch);
    f.code = EP_EINDEX;
    f.field = position;
    f.want = c->shape.num_experts;
    f.got = (uint64_t)index;
    ep_fault(c, &f);
}
#define EP_INDEX_UNKNOWN (-1) /* drops a choice, so it is never a wrong index */

/* The head with which this rank enters. A handle that dispatch did not complete, or that is for another
 * number of tokens, is refused. */
EP_FN EpLlHead ep_ll_dispatch_head(const EpLlDispatchParams *p) {
    const EpLlHead h = {ep_ll_call(EP_OP_LL_DISPATCH, p->fp8, p->comm.status), p->num_tokens};
    return h;
}
EP_FN EpLlHead ep_ll_combine_head(const EpLlCombineParams *p) {
    const bool is_bad = p->handle[EP_LL_STATUS] || p->handle[EP_LL_NUM_TOKENS] != (int32_t)p->num_tokens;
    const EpLlHead h = {ep_ll_call(EP_OP_LL_COMBINE, p->fp8, is_bad ? EP_EINVAL : p->comm.status),
                        (uint32_t)p->handle[EP_LL_ID] & 0xffffu};
    return h;
}
/* T of a source, as the handle says; a handle that was overwritten cannot lead out of the buffer. */
EP_FN uint32_t ep_ll_tokens_of(const EpLlCombineParams *p, uint32_t source) {
    const uint32_t T = (uint32_t)p->handle[EP_LL_SOURCES + source], most = p->comm.shape.max_tokens;
    return T < most ? T : most;
}

#endif /* EP_LOW_LATENCY_H */
