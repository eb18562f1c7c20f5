/* flags.h - how ranks meet, publish data and wait. The table lists every word that orders data, between ranks
 * and within one. Written elsewhere are: counts (plan), signals (epmoe_device.h) and open (open_chunks.cuh).
 * A publisher writes its data, then the word (release). A reader reads the word (acquire), then the data.
 *
 * word         | writer  | reader  | written with    | read with      | publishes           | overwritten
 * -------------+---------+---------+-----------------+----------------+---------------------+----------------
 * enter[b][w]  | rank w  | owner   | st.release.sys  | acquire.sys >= | header[b][w]; w has | in op e + 2. w
 *  (b = e % 2) |         |         |                 |                | left op e - 1, so   | enters that
 *              |         |         |                 |                | its counts and      | after the owner
 *              |         |         |                 |                | staging are free    | entered e + 1
 * counts[w][]  | rank w  | owner   | st.relaxed.sys  | relaxed.sys    | {epoch tag, count}  | by next plan,
 *              |         |         |                 |                | and nothing else    | after enter
 * flag[w][c]   | rank w  | owner   | st.release.sys  | acquire.sys == | slots of chunk c in | in op e + 1,
 *              |         |         |                 |                | the owner's staging | after enter
 * head[b][w]   | rank w  | owner   | call: st        | call: acquire  | {epoch tag, value}; | in op e + 2,
 *  (ll: low    |         |         | .release.sys    | .sys; number:  | w has left op e - 1,| after w saw the
 *  latency)    |         |         | number: relaxed | relaxed.sys    | so may get op e + 1 | head of e + 1
 * route[b][w]  | rank w  | owner   | st.relaxed.sys  | relaxed.sys    | {epoch tag, expert} | as head
 *  [t][k]      |         |         |                 |                | and nothing else    |
 * word of a    | rank w, | owner   | st.relaxed.sys  | relaxed.sys    | itself, and nothing | in op e + 3;
 *  slot (ll)   | owner: 0|         |                 | != 0           | else                | reader: 0
 * signal       | any     | owner   | st or add       | acquire.sys    | what the writer has | by the caller
 *              | rank    |         | .release.sys    | >= or ==       | put before          |
 * barrier      is an operation without data: it uses enter and nothing else
 * ready[b]     | owner's | owner's | fence.acq_rel   | acquire.gpu >= | rows of row block b | zeroed by the
 *              | workers | workers | .gpu, then      | (next op:      | (dispatch: placed,  | last CTA out
 *              |         |         | red.relaxed.gpu | stream order)  | GEMM: stored)       |
 * open[i] of a | warps of| warps of| st.release.cta  | cas.acquire.cta| slots of the chunk  | by the warp
 *  CTA         | the CTA | the CTA | (shared memory) |                | that are returned   | that took it
 * num_left     | owner's | the     | add.acq_rel.gpu | the same add   | all that workers of | zeroed by the
 *              | workers | last    |                 |                | the operation did   | last worker out
 *  ep_ll_leave | owner's | the     | add.relaxed.gpu | the same add,  | nothing; if void:   | zeroed by the
 *              | workers | last    | void: acq_rel   | or one of 0    | the claims (faults) | last worker out
 * num_copied   | owner's | the     | add.acq_rel.gpu | the same add   | GATHER: staged rows | zeroed by the
 *              | workers | last    |                 |                | (flag[w][0] is next)| last worker out
 * grid_arrived | owner's | owner's | add.acq_rel.gpu | acquire.sys >= | plan: scratch, the  | zeroed by the
 *              | CTAs    | CTAs    |                 |                | counts of a CTA     | last worker out
 * rest of      | owner's | owner's | relaxed.gpu     | relaxed.gpu    | nothing else; next  | by the last;
 *  EpLocal     | workers | workers |                 |                | op: stream order    | checked: always
 * host->abort  | host    | owner   | relaxed         | relaxed        | nothing else        | never
 * host->fault  | owner's | host    | st.release.sys  | acquire.sys    | the fault record    | after the host
 *  .state      | workers |         |                 |                |                     | has cleared it
 * host->plan   | owner's | host    | st.release.sys  | acquire.sys == | the plan's result   | by next plan
 *  .ticket     | workers |         |                 |                |                     |
 * host->stuck  | owner   | host    | relaxed         | relaxed        | nothing else        | any time
 * host->waited | owner   | host    | relaxed         | relaxed        | nothing else        | any time
 *  _ns[w]      |         |         |                 |                |                     |
 *
 * Epochs number the operations of a buffer. They are 64-bit, live in device memory (EpLocal), grow by one
 * with each operation and are never reset. A rank is at most one operation ahead of a peer, because each
 * operation begins with a handshake: it waits until enter has reached its epoch from all ranks. Therefore
 * two banks of enter and header are enough, and one of everything else. A low-latency operation sends before
 * it waits, so its cells have two banks and its slots three (low_latency.h). A flag can be compared for
 * equality, because it cannot be overtaken. Every rank enters every operation, also with zero tokens. Every
 * wait ends: by its word, by the abort word, or by its timeout. */
#ifndef EP_FLAGS_H
#define EP_FLAGS_H
#include "protocol/comm.h"

typedef enum { EP_CMP_GE, EP_CMP_EQ, EP_CMP_EPOCH } EpCmp; /* EPOCH: compare the upper half of the word */

EP_FN EpLocal *ep_local(const EpComm *c) { return EP_AT(EpLocal, c, c->my_rank, c->layout.local_off); }
EP_FN uint64_t *ep_enter_word(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint64_t epoch) {
    return EP_AT(uint64_t, c, at_rank, c->layout.enter_off) +
           ((epoch % (EP_FAULT(ONE_BANK) ? 1 : 2)) * c->shape.num_ranks + of_rank) * (EP_LINE / 8);
}
/* The newest operation that of_rank has told this rank that it entered. For the flight record. */
EP_FN uint64_t ep_entered(const EpComm *c, uint32_t of_rank) {
    uint64_t even = ep_ld_relaxed_sys_u64(ep_enter_word(c, c->my_rank, of_rank, 0));
    uint64_t odd = ep_ld_relaxed_sys_u64(ep_enter_word(c, c->my_rank, of_rank, 1));
    return even > odd ? even : odd;
}
EP_FN EpHeader *ep_header(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint64_t epoch) {
    return EP_AT(EpHeader, c, at_rank, c->layout.header_off) +
           (epoch % (EP_FAULT(ONE_BANK) ? 1 : 2)) * c->shape.num_ranks + of_rank;
}
EP_FN uint64_t *ep_flag(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint32_t chunk) {
    return EP_AT(uint64_t, c, at_rank, c->layout.flag_off) + (uint64_t)of_rank * c->layout.num_chunks + chunk;
}
EP_FN uint64_t *ep_count_cell(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint32_t cell) {
    return EP_AT(uint64_t, c, at_rank, c->layout.counts_off) + (uint64_t)of_rank * c->layout.num_count_cells +
           cell;
}

/* The epoch of the operation that begins. 0 if this buffer is faulted: the operation then does nothing,
 * until the host has raised the fault as an error and cleared it. */
EP_FN uint64_t ep_begin(const EpComm *c) {
    const EpLocal *l = ep_local(c);
    /* Both loads are issued before either is used. */
    const uint64_t faulted = ep_ld_relaxed_gpu_u64(&l->faulted), epoch = ep_ld_relaxed_gpu_u64(&l->epoch);
    return faulted ? 0 : epoch + 1;
}

/* A fault record without a code: what a wait needs to know, to record its timeout. */
EP_FN EpFaultRecord ep_fault_at(uint32_t op, uint32_t peer, uint32_t word, uint64_t epoch) {
    EpFaultRecord f;
    f.state = 0;
    f.code = 0;
    f.op = op;
    f.peer = peer;
    f.word = word;
    f.field = 0;
    f.pad = 0;
    f.epoch = epoch;
    f.want = 0;
    f.got = 0;
    return f;
}
/* Record the first fault of an operation. Later faults are consequences of it and are dropped. */
EP_FN void ep_fault(const EpComm *c, const EpFaultRecord *f) {
    EpFaultRecord *to = &c->host->fault;
    if (ep_swap_relaxed_gpu_u64(&ep_local(c)->claim, 1)) return;
    /* If c->status is set, this rank's host has already raised an error. It does not know of a timeout. */
    if (c->status && f->code != EP_ETIMEOUT) return;
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

/* True if another worker of this rank has recorded a fault, so that waiting is useless. */
EP_FN bool ep_must_leave(const EpComm *c) { return ep_ld_relaxed_gpu_u64(&ep_local(c)->claim) != 0; }

/* True if the world has ended or the user interrupts, so that the worker must leave. On a GPU this reads host
 * memory across PCIe, and hundreds of warps wait. If all of them read it, they slow down the GEMM: GEMM +
 * combine of dsv3 took 3 % longer with a read per warp and millisecond (H100, 2026-11-25). So in each tick of
 * EP_CHECK_NS one worker reads it for all. The others see its claim. */
#define EP_CHECK_NS (1u << 20)
EP_FN bool ep_world_ended(const EpComm *c, uint32_t tick) {
    EpLocal *l = ep_local(c);
    if (ep_interrupted()) ep_st_relaxed_sys_u64(&c->host->abort, 1);
    else if (ep_ld_relaxed_gpu_u64(&l->checked) == tick) return false;
    ep_st_relaxed_gpu_u64(&l->checked, tick); /* two workers may come at once: then both read */
    if (!ep_ld_relaxed_sys_u64(&c->host->abort)) return false;
    ep_st_relaxed_gpu_u64(&l->claim, 1); /* no fault record: the world knows the cause */
    return true;
}

/* A wait that lasts longer writes its epoch to host->stuck. The watchdog then asks the other ranks. */
#define EP_STUCK_NS 1000000000u

/* The state of one wait: when it began, when it last checked what may end it, and the number of polls.
 * Both times are in units of EP_CHECK_NS modulo 2^32: 32-bit fields, to save registers of a warp that
 * works between two polls. Initialise with zeros. */
typedef struct {
    uint32_t start, checked, polls;
} EpBackoff;

/* Back off after an unsuccessful poll. One lane of a worker calls it. False: the wait must end, because of a
 * fault of another worker, the end of the world, or its own timeout, which this function records. */
EP_FN bool ep_wait_on(const EpComm *c, EpBackoff *w, uint64_t limit_ns, const EpFaultRecord *what,
                      uint64_t want, uint64_t got) {
    if (ep_time_to_check(w->polls)) {
        const uint32_t ticks = (uint32_t)(ep_now_ns() / EP_CHECK_NS);
        const uint32_t now = ticks ? ticks : 1; /* start == 0 means that the wait has not begun */
        if (ep_must_leave(c)) return false;
        if (w->start == 0) w->start = w->checked = now;
        if (now != w->checked) {
            if (now - w->checked > EP_MAX_COUNTED_GAP_NS / EP_CHECK_NS)
                w->start += now - w->checked - EP_MAX_COUNTED_GAP_NS / EP_CHECK_NS;
            w->checked = now;
            if (ep_world_ended(c, now)) return false;
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

/* Wait until *word compares with want. One lane calls it. False: the caller must leave the operation. */
EP_FN bool ep_wait_u64(const EpComm *c, const uint64_t *word, EpCmp cmp, uint64_t want,
                       const EpFaultRecord *what) {
    EpBackoff w = {0, 0, 0};
    for (;;) {
        uint64_t got = ep_ld_acquire_sys_u64(word); /* what the word publishes is now readable */
        if (cmp == EP_CMP_GE ? got >= want : cmp == EP_CMP_EQ ? got == want : got >> 32 == want) return true;
        if (!ep_wait_on(c, &w, c->timeout_ns, what, want, got)) return false;
    }
}

/* True if recv is poisoned, as a failed dispatch leaves it: -1 everywhere, although slots of this plan
 * must be there. All lanes call it. The loads are issued together. */
EP_FN bool ep_recv_is_void(const EpShape *s, const int32_t *plan, const int32_t *recv) {
    uint32_t is_void = 0;
    EP_FOR_LANES(r, s->num_ranks) {
        const int32_t num = plan[EP_HEAD_NUM_RECV + r];
        const int32_t token = recv[ep_record_at(s, r, 0) + EP_RECORD_TOKEN];
        is_void |= num > 0 && token < 0;
    }
    return ep_warp_min_u32(is_void ? 0 : 1) == 0;
}

/* Returns the header with which this rank enters an operation. plan, and recv (the records that dispatch has
 * saved for combine), are NULL for operations that do not take them. Both are in device memory, which the
 * host does not read: it has checked only their lengths. So this function checks, before any kernel follows
 * the plan, that the plan is for num_tokens tokens and for at most num_rows rows, and that recv belongs to a
 * dispatch that worked. If not, this rank propagates an error: its header has status EP_EINVAL. */
EP_FN EpHeader ep_make_header(const EpComm *c, uint32_t op, const int32_t *plan, const int32_t *recv,
                              uint32_t num_tokens, uint32_t num_rows) {
    const EpShape *s = &c->shape;
    EpHeader h;
    h.abi = EP_ABI_VERSION;
    h.op = op;
    h.dtype = s->dtype;
    h.hidden = s->hidden;
    h.num_topk = s->num_topk;
    h.num_experts = s->num_experts;
    h.max_tokens = s->max_tokens;
    h.combine_mode = s->combine_mode;
    h.capacity = s->capacity;
    h.has_weight = 0;
    h.has_scalar = 0;
    h.plan_idx = 0;
    h.requires_grad = c->requires_grad;
    h.status = c->status;
    h.num_tokens = num_tokens;
    h.balance_key = 0;
    const bool is_void = recv && ep_recv_is_void(s, plan, recv);
    if (plan) h.plan_idx = (uint32_t)plan[EP_HEAD_PLAN_IDX];
    if (plan && !h.status) h.status = plan[EP_HEAD_STATUS];
    if (plan && !h.status &&
        ((uint32_t)plan[EP_HEAD_NUM_TOKENS] != num_tokens || (uint32_t)plan[EP_HEAD_NUM_ROWS] > num_rows))
        h.status = EP_EINVAL;
    if (is_void && !h.status) h.status = EP_EINVAL;
    return h;
}

/* Tell all ranks that this rank has entered. One worker of the rank calls it. */
EP_FN void ep_enter(const EpComm *c, const EpHeader *header, uint64_t epoch) {
    ep_chaos(EP_CHAOS_ENTER);
    EP_FOR_LANES(r, c->shape.num_ranks) {
        EpHeader *to = ep_header(c, r, c->my_rank, epoch);
        if (EP_FAULT(ENTER_FIRST)) ep_st_release_sys_u64(ep_enter_word(c, r, c->my_rank, epoch), epoch);
        *to = *header;
        ep_st_release_sys_u64(ep_enter_word(c, r, c->my_rank, epoch), epoch); /* publishes the header */
    }
}

/* 1 + index of the first field in which two headers differ, or 0. No early exit, so the loads overlap. */
EP_PURE uint32_t ep_header_diff(const EpHeader *a, const EpHeader *b) {
    const uint32_t *x = &a->abi, *y = &b->abi;
    uint32_t field = 0;
    for (uint32_t i = EP_NUM_HEADER_FIELDS; i-- > 0;)
        if (x[i] != y[i]) field = i + 1;
    return field;
}

/* How long each rank has let this one wait in one operation. A lane has the time of its own ranks. */
typedef struct {
    uint64_t ns[EP_LANE_ROOM(EP_MAX_RANKS)];
} EpWaits;

/* Wait for the headers of all ranks and compare them. Every worker calls it before it touches a peer's
 * memory. All lanes of all workers of all ranks get the same verdict, because they judge the same W headers.
 * is_first: this is the worker that has entered for its rank; only then *waits becomes the time of each rank.
 * False: the operation is void. */
EP_FN bool ep_enter_await(const EpComm *c, uint32_t op, uint64_t epoch, bool is_first, EpWaits *waits) {
    const EpHeader *first = ep_header(c, c->my_rank, 0, epoch);
    const uint64_t begin = is_first ? ep_now_ns() : 0;
    uint32_t stuck = 0, seen = 0, bad = c->shape.num_ranks;
    EpBackoff backoff = {0, 0, 0};
    EpFaultRecord f = ep_fault_at(op, 0, EP_WORD_ENTER, epoch);
    ep_chaos(EP_CHAOS_ENTER_AWAIT);
    if (EP_FAULT(NO_ENTER_WAIT)) EP_FOR_LANES(r, c->shape.num_ranks) waits->ns[EP_LANE_AT(r)] = 0;
    for (bool is_late = !EP_FAULT(NO_ENTER_WAIT); is_late && !stuck;) {
        uint64_t got = 0;
        is_late = false;
        EP_FOR_LANES(r, c->shape.num_ranks) {
            if (seen >> r & 1u) continue;
            const uint64_t entered =
                ep_ld_acquire_sys_u64(ep_enter_word(c, c->my_rank, r, epoch)); /* the header is readable */
            if (entered >= epoch) {
                seen |= 1u << r;
                if (is_first) waits->ns[EP_LANE_AT(r)] = ep_now_ns() - begin;
            } else if (!is_late) {
                is_late = true;
                f.peer = r;
                got = entered;
            }
        }
        if (is_late && !ep_wait_on(c, &backoff, c->timeout_ns, &f, epoch, got)) stuck = 1;
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
            }
        }
        ep_fault(c, &f);
    }
    return false;
}

/* Add the time of an operation that all ranks have entered to this rank's sums. The worker that has entered
 * for the rank calls it, all lanes. A GPU's host gets the sums from the next plan or barrier
 * (ep_publish_waits): a release by this worker would have to wait for stores to host memory. */
EP_FN void ep_count_waits(const EpComm *c, const EpWaits *waits) {
    EP_FOR_LANES(r, c->shape.num_ranks) {
        if (r == c->my_rank) continue;
        uint64_t *sum = &ep_local(c)->waited_ns[r];
        ep_st_relaxed_gpu_u64(sum, ep_ld_relaxed_gpu_u64(sum) + waits->ns[EP_LANE_AT(r)]);
    }
}
/* Write the sums to host->waited_ns. The lanes that call it are those of ep_count_waits. */
EP_FN void ep_publish_waits(const EpComm *c) {
    EP_FOR_LANES(r, c->shape.num_ranks)
    ep_st_relaxed_sys_u64(&c->host->waited_ns[r], ep_ld_relaxed_gpu_u64(&ep_local(c)->waited_ns[r]));
}

/* The ready word of a row block: how many of its rows are placed (dispatch) or how many pieces of its rows
 * are stored (GEMM). Workers of this rank count it up in a fused operation. It is 0 between operations. */
EP_FN uint64_t *ep_ready_word(const EpComm *c, uint32_t block) {
    /* A plan that the caller has overwritten may name row blocks beyond the last one. */
    const uint32_t last = c->layout.num_row_blocks - 1;
    return EP_AT(uint64_t, c, c->my_rank, c->layout.ready_off) + (block < last ? block : last);
}
/* The count at which a row block is complete, if the plan has num_rows rows of `pieces` pieces each. */
EP_PURE uint64_t ep_ready_count(uint32_t block, uint32_t num_rows, uint32_t pieces) {
    const uint32_t left = num_rows - block * EP_TILE_ROWS;
    return (uint64_t)(left < EP_TILE_ROWS ? left : EP_TILE_ROWS) * pieces;
}
/* The limit of a wait for other workers of this rank: twice timeout_ns. If those wait for a peer, for at most
 * timeout_ns, the worker that records its timeout first is one whose record names the peer. */
EP_FN uint64_t ep_local_limit_ns(const EpComm *c) {
    return c->timeout_ns < UINT64_MAX / 2 ? 2 * c->timeout_ns : UINT64_MAX;
}
/* Wait for a row block. Waits that pass the same *w have one limit together: *w has the start. */
EP_FN bool ep_ready_await(const EpComm *c, uint32_t op, uint32_t block, uint64_t count, uint64_t epoch,
                          EpBackoff *w) {
    const EpFaultRecord f = ep_fault_at(op, c->my_rank, EP_WORD_READY, epoch);
    for (;;) {
        const uint64_t got = ep_ld_acquire_gpu_u64(ep_ready_word(c, block)); /* its rows are readable */
        if (got >= count) return true;
        if (!ep_wait_on(c, w, ep_local_limit_ns(c), &f, count, got)) return false;
    }
}

/* Publish a chunk of slots that this rank has written to at_rank's staging buffer. One thread calls it, after
 * ep_warp_sync() or a barrier of the CTA, so that the release covers the stores of all. */
EP_FN void ep_flag_publish(const EpComm *c, uint32_t at_rank, uint32_t chunk, uint64_t epoch) {
    ep_chaos(EP_CHAOS_FLAG_PUBLISH);
    ep_st_release_sys_u64(ep_flag(c, at_rank, c->my_rank, chunk), epoch); /* publishes the chunk */
}
/* Wait for a chunk of of_rank. All lanes call it. If true, all lanes may then read the chunk. */
EP_FN bool ep_flag_await(const EpComm *c, uint32_t op, uint32_t of_rank, uint32_t chunk, uint64_t epoch) {
    EpFaultRecord f = ep_fault_at(op, of_rank, EP_WORD_FLAG, epoch);
    uint64_t ok = 1;
    ep_chaos(EP_CHAOS_FLAG_READ);
    if (ep_lane() == 0 && !EP_FAULT(NO_FLAG_WAIT))
        ok = ep_wait_u64(c, ep_flag(c, c->my_rank, of_rank, chunk), EP_CMP_EQ, epoch, &f); /* readable */
    return ep_warp_bcast_u64(ok) != 0;
}
/* Poll a chunk once, by one lane. If true, all lanes may read it after the next ep_warp_sync(). */
EP_FN bool ep_flag_seen(const EpComm *c, uint32_t of_rank, uint32_t chunk, uint64_t epoch) {
    return ep_ld_acquire_sys_u64(ep_flag(c, c->my_rank, of_rank, chunk)) == epoch; /* readable */
}
/* Poll a chunk once, by all lanes. If true, all lanes may read it. */
EP_FN bool ep_flag_ready(const EpComm *c, uint32_t of_rank, uint32_t chunk, uint64_t epoch) {
    uint64_t ok = 1;
    ep_chaos(EP_CHAOS_FLAG_READ);
    if (ep_lane() == 0) ok = ep_flag_seen(c, of_rank, chunk, epoch);
    return ep_warp_bcast_u64(ok) != 0;
}
/* Back off after an unsuccessful poll of a chunk, as ep_wait_on does. One lane calls it. */
EP_FN bool ep_flag_wait_on(const EpComm *c, uint32_t op, uint32_t of_rank, uint32_t chunk, uint64_t epoch,
                           EpBackoff *w) {
    const EpFaultRecord f = ep_fault_at(op, of_rank, EP_WORD_FLAG, epoch);
    return ep_wait_on(c, w, c->timeout_ns, &f, epoch,
                      ep_ld_relaxed_sys_u64(ep_flag(c, c->my_rank, of_rank, chunk)));
}

/* Poll a cell of of_rank's counts once, by one lane: the epoch's tag and the count, in one word. */
EP_FN uint64_t ep_count_seen(const EpComm *c, uint32_t of_rank, uint32_t cell) {
    return ep_ld_relaxed_sys_u64(ep_count_cell(c, c->my_rank, of_rank, cell));
}

/* Leave the operation. The last of num_workers resets the local words for the next operation. Its result
 * also tells whether the operation failed, because only the last worker may then write where the others
 * wrote. ep_leave_unqueued: the same for an operation that has no queues. */
typedef enum { EP_LEFT, EP_LEFT_LAST, EP_LEFT_LAST_FAILED } EpLeft;
EP_FN EpLeft ep_leave_unqueued(const EpComm *c, uint32_t num_workers, uint64_t epoch) {
    EpLocal *l = ep_local(c);
    ep_chaos(EP_CHAOS_LEAVE);
    /* acq_rel: publishes all that this worker did, and makes readable to the last worker what all others
     * did. So the resets below come after every use of these words. */
    if (ep_add_acq_rel_gpu_u64(&l->num_left, 1) + 1 != (EP_FAULT(EARLY_LAST) ? 1 : num_workers))
        return EP_LEFT;
    bool failed = ep_ld_relaxed_gpu_u64(&l->claim) != 0;
    ep_st_relaxed_gpu_u64(&l->num_left, 0);
    if (epoch == 0) return EP_LEFT_LAST_FAILED;
    if (failed && !c->status) ep_st_relaxed_gpu_u64(&l->faulted, 1);
    ep_st_relaxed_gpu_u64(&l->claim, 0);
    ep_st_relaxed_gpu_u64(&l->epoch, epoch);
    return failed ? EP_LEFT_LAST_FAILED : EP_LEFT_LAST;
}
EP_FN EpLeft ep_leave(const EpComm *c, uint32_t num_workers, uint64_t epoch) {
    EpLocal *l = ep_local(c);
    const EpLeft left = ep_leave_unqueued(c, num_workers, epoch);
    if (left == EP_LEFT || epoch == 0) return left;
    for (uint32_t i = 0; i < EP_MAX_RANKS; i++) ep_st_relaxed_gpu_u64(&l->queue_send[i], 0);
    ep_st_relaxed_gpu_u64(&l->queue_recv, 0);
    ep_st_relaxed_gpu_u64(&l->num_copied, 0);
    ep_st_relaxed_gpu_u64(&l->grid_arrived, 0);
    ep_st_relaxed_gpu_u64(&l->queue_tiles, 0);
    return left;
}

#endif /* EP_FLAGS_H */
