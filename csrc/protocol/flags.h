/* flags.h - how ranks meet, publish and wait.  All cross-rank words, and where each is; written elsewhere are only counts,
 * by the plan, and signals, whose words are the caller's (ep_heap_signal, epmoe_device.h).
 *
 * word        | writer    | reader  | release           | acquire           | it publishes                 | overwritten when
 * ------------+-----------+---------+-------------------+-------------------+------------------------------+-----------------------
 * enter[b][w] | rank w    | owner   | st.release.sys    | ld.acquire.sys >= | header[b][w]; w has left op  | op e + 2, which w enters
 *   b = e % 2 |           |         |                   |                   | e - 1, so w's staging and    | only after the owner
 *             |           |         |                   |                   | counts are free              | entered e + 1
 * counts[w][] | rank w    | owner   | st.relaxed.sys    | ld.relaxed.sys    | nothing but itself:          | next plan, after enter
 *             |           |         |                   |                   | {epoch, count}               |
 * flag[w][c]  | rank w    | owner   | st.release.sys    | ld.acquire.sys == | slots of chunk c in staging  | op e + 1, after enter
 * signal      | any rank  | owner   | st or add         | ld.acquire.sys >= | what the writer has put      | by the caller
 *             |           |         | .release.sys      | or ==             | before                       |
 * barrier     | is an operation without data: enter, and nothing else                                           |
 * ready[b]    | owner's   | owner's | add.relaxed.gpu   | ld.acquire.gpu >= | rows of block b, of dispatch | the last worker out,
 *             | workers   | workers | behind a fence    | and the stream's  | or of the product            | behind its leaving: the
 *             |           |         |                   | order             |                              | next kernel sees zeros
 * local.*     | owner's   | owner's | add.acq_rel.gpu   | the same add, and | reads and writes of all      | the last worker out
 *             | workers   | workers | (num_left)        | the stream's order| workers of the operation     |
 * host->abort | host      | owner   | relaxed           | relaxed           | nothing but itself           | never
 * host->fault | owner's   | host    | st.release.sys    | ld.acquire.sys    | the record                   | after the host has
 *   .state    | workers   |         |                   |                   |                              | cleared it
 * host->plan  | owner's   | host    | st.release.sys    | ld.acquire.sys == | the plan's result            | the next plan
 *   .ticket   | workers   |         |                   |                   |                              |
 * host->stuck | owner     | host    | relaxed           | relaxed           | nothing but itself           | any time, by both
 *
 * Epochs are 64-bit, live in the heap's own local words, advance by one an operation and are never reset.
 * A rank is at most one operation ahead of a peer, because every operation begins by waiting for
 * enter == its epoch from all.  Hence two banks of enter and header, one of everything else; and a
 * flag can be compared for equality, for it cannot be overtaken.  Every rank enters every operation,
 * also with no tokens.  Every wait ends: by its word, by the abort word, or at its deadline. */
#ifndef EP_FLAGS_H
#define EP_FLAGS_H
#include "abi.h"

typedef enum { EP_CMP_GE, EP_CMP_EQ, EP_CMP_EPOCH } EpCmp; /* EPOCH: the word's upper half equals */

EP_FN EpLocal *ep_local(const EpComm *c) { return EP_AT(EpLocal, c, c->my_rank, c->layout.local_off); }
EP_FN uint64_t *ep_enter_word(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint64_t epoch) {
    return EP_AT(uint64_t, c, at_rank, c->layout.enter_off) +
           ((epoch % (EP_FAULT(4) ? 1 : 2)) * c->shape.num_ranks + of_rank) * (EP_LINE / 8);
}
/* The newest operation that of_rank has entered, as far as it has told this rank: for the flight record. */
EP_FN uint64_t ep_entered(const EpComm *c, uint32_t of_rank) {
    uint64_t even = ep_ld_relaxed_sys_u64(ep_enter_word(c, c->my_rank, of_rank, 0));
    uint64_t odd = ep_ld_relaxed_sys_u64(ep_enter_word(c, c->my_rank, of_rank, 1));
    return even > odd ? even : odd;
}
EP_FN EpHeader *ep_header(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint64_t epoch) {
    return EP_AT(EpHeader, c, at_rank, c->layout.header_off) +
           (epoch % (EP_FAULT(4) ? 1 : 2)) * c->shape.num_ranks + of_rank;
}
EP_FN uint64_t *ep_flag(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint32_t chunk) {
    return EP_AT(uint64_t, c, at_rank, c->layout.flag_off) + (uint64_t)of_rank * c->layout.num_chunks + chunk;
}
EP_FN uint64_t *ep_count_cell(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint32_t cell) {
    return EP_AT(uint64_t, c, at_rank, c->layout.counts_off) + (uint64_t)of_rank * c->layout.num_count_cells +
           cell;
}

/* The epoch of the operation that begins, or 0 when this buffer is faulted: then the operation is
 * nothing at all, until the host has raised the fault and cleared it. */
EP_FN uint64_t ep_begin(const EpComm *c) {
    const EpLocal *l = ep_local(c);
    if (ep_ld_relaxed_gpu_u64(&l->faulted)) return 0;
    return ep_ld_relaxed_gpu_u64(&l->epoch) + 1;
}

/* Record the first fault of an operation; later ones are consequences. */
EP_FN void ep_fault(const EpComm *c, const EpFaultRecord *f) {
    EpFaultRecord *to = &c->host->fault;
    if (ep_swap_relaxed_gpu_u64(&ep_local(c)->claim, 1)) return;
    if (c->status && f->code != EP_ETIMEOUT)
        return; /* this rank's host has raised already; but who is stuck it does not know */
    to->code = f->code;
    to->op = f->op;
    to->peer = f->peer;
    to->word = f->word;
    to->field = f->field;
    to->epoch = f->epoch;
    to->want = f->want;
    to->got = f->got;
    ep_st_release_sys_u64(&to->state, 1); /* publishes the record to the host */
}

/* True when another worker has met a fault, and there is no point in waiting. */
EP_FN bool ep_must_leave(const EpComm *c) { return ep_ld_relaxed_gpu_u64(&ep_local(c)->claim) != 0; }

/* Leave when the world is at its end.  On a GPU this reads host memory across PCIe, and hundreds of warps
 * that do it in every poll slow down everything else (combine of 8192 x 7168, K 8, two H200, 2026-11-21:
 * 7.8 ms): so a wait looks once a millisecond. */
#define EP_CHECK_NS (1u << 20)
EP_FN bool ep_world_ended(const EpComm *c) {
    if (!ep_ld_relaxed_sys_u64(&c->host->abort)) return false;
    ep_st_relaxed_gpu_u64(&ep_local(c)->claim, 1); /* no record: the world knows why */
    return true;
}

/* A wait that has lasted so long tells the host at each look, which asks the other ranks what they are doing: see watchdog.c. */
#define EP_STUCK_NS 1000000000u

/* So long no wait goes without a look, unless its process was stopped: perhaps with the whole job.  What is longer does not count; so
 * much of it does, that a wait ends also where nobody ever looks more often. */
#define EP_MAX_COUNTED_GAP_NS 500000000u

/* How long a wait has lasted, and when it last looked at what may end it: both in EP_CHECK_NS, modulo 2^32, so that a
 * warp that does something else meanwhile has little to keep.  Begins as zeros. */
typedef struct {
    uint32_t start, looked, polls;
} EpBackoff;

/* After a poll in vain: pause, and say whether there is any point in another.  One lane calls it. */
EP_FN bool ep_wait_on(const EpComm *c, EpBackoff *w, uint64_t limit_ns, const EpFaultRecord *what,
                      uint64_t want, uint64_t got) {
    if (ep_time_to_check(w->polls)) {
        const uint32_t now = (uint32_t)(ep_now_ns() / EP_CHECK_NS) | 1u;
        if (ep_must_leave(c)) return false;
        if (w->start == 0) w->start = w->looked = now;
        if (now != w->looked) {
            if (now - w->looked > EP_MAX_COUNTED_GAP_NS / EP_CHECK_NS)
                w->start += now - w->looked - EP_MAX_COUNTED_GAP_NS / EP_CHECK_NS;
            w->looked = now;
            if (ep_world_ended(c)) return false;
            if (now - w->start > EP_STUCK_NS / EP_CHECK_NS)
                ep_st_relaxed_sys_u64(&c->host->stuck, what->epoch);
        }
        if (now - w->start > limit_ns / EP_CHECK_NS + 1) {
            EpFaultRecord f = *what;
            f.code = EP_ETIMEOUT;
            f.want = want;
            f.got = got;
            ep_fault(c, &f);
            return false;
        }
    }
    ep_pause(w->polls++);
    return true;
}

/* Wait until *word compares with want.  One lane calls it.  False: leave the operation, in order. */
EP_FN bool ep_wait_u64(const EpComm *c, const uint64_t *word, EpCmp cmp, uint64_t want,
                       const EpFaultRecord *what) {
    EpBackoff w = {0, 0, 0};
    for (;;) {
        uint64_t got = ep_ld_acquire_sys_u64(word); /* what the word publishes is now readable */
        if (cmp == EP_CMP_GE ? got >= want : cmp == EP_CMP_EQ ? got == want : got >> 32 == want) return true;
        if (!ep_wait_on(c, &w, c->timeout_ns, what, want, got)) return false;
    }
}

/* Whether recv is what a dispatch that failed has left: -1 everywhere, where slots of this plan should be.  All lanes call it; the loads
 * go out together. */
EP_FN bool ep_recv_is_void(const EpShape *s, const int32_t *plan, const int32_t *recv) {
    uint32_t is_void = 0;
    EP_FOR_LANES(r, s->num_ranks) {
        const int32_t num = plan[EP_HEAD_NUM_RECV + r];
        const int32_t token = recv[(uint64_t)r * s->max_tokens * (1 + s->num_topk)];
        is_void |= num > 0 && token < 0;
    }
    return ep_warp_min_u32(is_void ? 0 : 1) == 0;
}

/* This rank's header of an operation; plan and recv are NULL for the operations that have none.  The host knows the
 * length of a plan, not what it says: that it is of this many tokens and of no more rows than the tensor has
 * is seen here, before any of its offsets is believed, and this rank refuses where it is not. */
EP_FN EpHeader ep_make_header(const EpComm *c, uint32_t op, const int32_t *plan, const int32_t *recv,
                              uint32_t num_tokens, uint32_t num_rows) {
    const EpShape *s = &c->shape;
    EpHeader h = {EP_ABI_VERSION,
                  op,
                  s->dtype,
                  s->hidden,
                  s->num_topk,
                  s->num_experts,
                  s->max_tokens,
                  s->combine_mode,
                  s->capacity,
                  0,
                  0,
                  0,
                  c->requires_grad,
                  c->status,
                  num_tokens,
                  0};
    const bool is_void = recv && ep_recv_is_void(s, plan, recv);
    if (plan) h.plan_idx = (uint32_t)plan[EP_HEAD_PLAN_IDX];
    if (plan && !h.status) h.status = plan[EP_HEAD_STATUS];
    if (plan && !h.status &&
        ((uint32_t)plan[EP_HEAD_NUM_TOKENS] != num_tokens || (uint32_t)plan[EP_HEAD_NUM_ROWS] > num_rows))
        h.status = EP_EINVAL;
    if (is_void && !h.status) h.status = EP_EINVAL;
    return h;
}

/* Tell every peer that this rank has entered; one worker of the rank calls it. */
EP_FN void ep_enter(const EpComm *c, const EpHeader *header, uint64_t epoch) {
    ep_chaos(1);
    EP_FOR_LANES(r, c->shape.num_ranks) {
        EpHeader *to = ep_header(c, r, c->my_rank, epoch);
        if (EP_FAULT(5)) ep_st_release_sys_u64(ep_enter_word(c, r, c->my_rank, epoch), epoch);
        *to = *header;
        ep_st_release_sys_u64(ep_enter_word(c, r, c->my_rank, epoch), epoch); /* publishes the header */
    }
}

/* 1 + the first field in which two headers differ, or 0.  No early exit: the loads go out together. */
EP_PURE uint32_t ep_header_diff(const EpHeader *a, const EpHeader *b) {
    const uint32_t *x = &a->abi, *y = &b->abi;
    uint32_t field = 0;
    for (uint32_t i = EP_NUM_HEADER_FIELDS; i-- > 0;)
        if (x[i] != y[i]) field = i + 1;
    return field;
}

/* Wait for every peer and compare headers.  Every worker calls it before it touches a peer's memory;
 * all lanes get the verdict, and all workers of all ranks get the same one, because they judge the
 * same W headers.  False: the operation is void. */
EP_FN bool ep_enter_await(const EpComm *c, uint32_t op, uint64_t epoch) {
    const EpHeader *first = ep_header(c, c->my_rank, 0, epoch);
    uint32_t stuck = 0, bad = c->shape.num_ranks;
    EpFaultRecord f = {0, 0, op, 0, EP_WORD_ENTER, 0, 0, epoch, 0, 0};
    ep_chaos(2);
    EP_FOR_LANES(r, c->shape.num_ranks) {
        f.peer = r;
        if (!EP_FAULT(6) && !ep_wait_u64(c, ep_enter_word(c, c->my_rank, r, epoch), EP_CMP_GE, epoch, &f))
            stuck = 1;
    }
    ep_warp_sync();
    if (ep_warp_min_u32(stuck ? 0 : 1) == 0) return false;
    EP_FOR_LANES(r, c->shape.num_ranks) {
        const EpHeader *h = ep_header(c, c->my_rank, r, epoch);
        if ((h->status || ep_header_diff(first, h)) && r < bad) bad = r;
    }
    bad = ep_warp_min_u32(bad);
    if (bad == c->shape.num_ranks) return true;
    if (ep_lane() == 0) {
        const EpHeader *h = ep_header(c, c->my_rank, bad, epoch);
        f.peer = bad;
        f.word = EP_WORD_HEADER;
        if (h->status) {
            f.code = EP_EPEER;
            f.got = (uint64_t)(int64_t)h->status;
        } else {
            f.code = EP_EMISMATCH;
            f.field = ep_header_diff(first, h);
            if (f.field) {
                f.want = (&first->abi)[f.field - 1];
                f.got = (&h->abi)[f.field - 1];
            } /* a peer may write while we read */
        }
        ep_fault(c, &f);
    }
    return false;
}

/* How many rows (dispatch) or pieces of rows (the product) of a block of EP_TILE_ROWS stand: counted up by this rank's
 * workers in a fused operation, 0 before and behind it. */
EP_FN uint64_t *ep_ready_word(const EpComm *c, uint32_t block) {
    const uint32_t last = c->layout.num_row_blocks - 1; /* a plan that was written over has rows beyond it */
    return EP_AT(uint64_t, c, c->my_rank, c->layout.ready_off) + (block < last ? block : last);
}
/* The count at which a block of num_rows in all is complete, each row in `pieces`. */
EP_PURE uint64_t ep_ready_count(uint32_t block, uint32_t num_rows, uint32_t pieces) {
    const uint32_t left = num_rows - block * EP_TILE_ROWS;
    return (uint64_t)(left < EP_TILE_ROWS ? left : EP_TILE_ROWS) * pieces;
}
/* A wait for this rank's own workers.  They end in any case, at their own deadline for a peer, so its deadline comes
 * behind theirs.  `w`: one for all blocks of rows that are waited for together. */
EP_FN uint64_t ep_local_limit_ns(const EpComm *c) {
    return c->timeout_ns < UINT64_MAX / 2 ? 2 * c->timeout_ns : UINT64_MAX;
}
EP_FN bool ep_ready_await(const EpComm *c, uint32_t op, uint32_t block, uint64_t count, uint64_t epoch,
                          EpBackoff *w) {
    const EpFaultRecord f = {0, 0, op, c->my_rank, EP_WORD_READY, 0, 0, epoch, 0, 0};
    for (;;) {
        const uint64_t got =
            ep_ld_acquire_gpu_u64(ep_ready_word(c, block)); /* the block's rows are now readable */
        if (got >= count) return true;
        if (!ep_wait_on(c, w, ep_local_limit_ns(c), &f, count, got)) return false;
    }
}

/* A chunk of slots stands in at_rank's staging memory.  Call after ep_warp_sync(), one lane. */
EP_FN void ep_flag_publish(const EpComm *c, uint32_t at_rank, uint32_t chunk, uint64_t epoch) {
    ep_chaos(3);
    ep_st_release_sys_u64(ep_flag(c, at_rank, c->my_rank, chunk), epoch); /* publishes the chunk's slots */
}
/* All lanes call it; afterwards the chunk that of_rank sent here may be read by all lanes. */
EP_FN bool ep_flag_await(const EpComm *c, uint32_t op, uint32_t of_rank, uint32_t chunk, uint64_t epoch) {
    EpFaultRecord f = {0, 0, op, of_rank, EP_WORD_FLAG, 0, 0, epoch, 0, 0};
    uint64_t ok = 1;
    ep_chaos(4);
    if (ep_lane() == 0 && !EP_FAULT(7))
        ok = ep_wait_u64(c, ep_flag(c, c->my_rank, of_rank, chunk), EP_CMP_EQ, epoch,
                         &f); /* the chunk is now readable */
    return ep_warp_bcast_u64(ok) != 0;
}

/* One lane's look at a chunk: true when it is there.  It may be read by all lanes when the warp has met. */
EP_FN bool ep_flag_seen(const EpComm *c, uint32_t of_rank, uint32_t chunk, uint64_t epoch) {
    return ep_ld_acquire_sys_u64(ep_flag(c, c->my_rank, of_rank, chunk)) ==
           epoch; /* the chunk is now readable */
}
/* All lanes call it.  True when a chunk is there already; then it may be read by all lanes. */
EP_FN bool ep_flag_ready(const EpComm *c, uint32_t of_rank, uint32_t chunk, uint64_t epoch) {
    uint64_t ok = 1;
    ep_chaos(4);
    if (ep_lane() == 0) ok = ep_flag_seen(c, of_rank, chunk, epoch);
    return ep_warp_bcast_u64(ok) != 0;
}
/* After a look in vain: see ep_wait_on. */
EP_FN bool ep_flag_wait_on(const EpComm *c, uint32_t op, uint32_t of_rank, uint32_t chunk, uint64_t epoch,
                           EpBackoff *w) {
    const EpFaultRecord f = {0, 0, op, of_rank, EP_WORD_FLAG, 0, 0, epoch, 0, 0};
    return ep_wait_on(c, w, c->timeout_ns, &f, epoch,
                      ep_ld_relaxed_sys_u64(ep_flag(c, c->my_rank, of_rank, chunk)));
}

/* One lane's look at a cell of of_rank's counts: the epoch's tag and the count, in one word. */
EP_FN uint64_t ep_count_seen(const EpComm *c, uint32_t of_rank, uint32_t cell) {
    return ep_ld_relaxed_sys_u64(ep_count_cell(c, c->my_rank, of_rank, cell));
}

/* Leave the operation.  The last of num_workers makes the local words ready for the next one, and is
 * told how the operation went, because it alone may now write where the others wrote. */
typedef enum { EP_LEFT, EP_LEFT_LAST, EP_LEFT_LAST_FAILED } EpLeft;
EP_FN EpLeft ep_leave(const EpComm *c, uint32_t num_workers, uint64_t epoch) {
    EpLocal *l = ep_local(c);
    ep_chaos(5);
    /* acq_rel: the last worker's resets come after everything that any worker did. */
    if (ep_add_acq_rel_gpu_u64(&l->num_left, 1) + 1 != (EP_FAULT(8) ? 1 : num_workers)) return EP_LEFT;
    bool failed = ep_ld_relaxed_gpu_u64(&l->claim) != 0;
    ep_st_relaxed_gpu_u64(&l->num_left, 0);
    if (epoch == 0) return EP_LEFT_LAST_FAILED;
    if (failed && !c->status) ep_st_relaxed_gpu_u64(&l->faulted, 1);
    ep_st_relaxed_gpu_u64(&l->claim, 0);
    for (uint32_t i = 0; i < EP_MAX_RANKS; i++) ep_st_relaxed_gpu_u64(&l->queue_send[i], 0);
    ep_st_relaxed_gpu_u64(&l->queue_recv, 0);
    ep_st_relaxed_gpu_u64(&l->num_copied, 0);
    ep_st_relaxed_gpu_u64(&l->grid_arrived, 0);
    ep_st_relaxed_gpu_u64(&l->queue_tiles, 0);
    ep_st_relaxed_gpu_u64(&l->epoch, epoch);
    return failed ? EP_LEFT_LAST_FAILED : EP_LEFT_LAST;
}

#endif /* EP_FLAGS_H */
