/* watchdog.c - the watchdog thread of a world.
 *
 * The watchdog thread reads the sockets, at any time. It puts all-gather frames into the inbox. It ends the
 * world when an abort frame arrives, when a peer's socket closes, or when a wait on the device has timed out.
 * A rank that is stuck sends its call records to the peers. So ranks that wait for each other in different
 * operations are detected after seconds, not at the timeout. A host thread that begins to wait for a frame
 * also reads the sockets. Whoever reads holds the lock, so frames keep their order.
 *
 * Exports: ep_world_watch_main and ep_world_read_peer.
 * Invariant: the thread takes no Python lock and makes no CUDA call, so neither can delay it. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/fork.h"
#include "runtime/world_state.h"

/* Longest interval at which the thread reads the watched host words. */
#define POLL_MS 20
/* After a rank has left in order but alone, its peers have this time to finish operations in which it took
 * part. Then its absence ends the world for them. */
#define LEAVE_GRACE_NS 2000000000ull
/* The same time on the side of the leaving rank, if its process is about to end. */
#define HASTE_NS 500000000ull
/* A GPU that is stuck reports it every millisecond. Without a report for this time, it is no longer stuck. */
#define STUCK_GRACE_NS 100000000ull
/* A disagreement must last this long before it ends the world. Meanwhile other stuck ranks report their
 * calls, so that the error names the right ranks. */
#define DISORDER_NS 300000000ull

/* ---- frames from the peers ---- */

/* Store a peer's call records for the page. Their content is not validated here: flight_record.c does not
 * use a number of a peer as an index before it has compared it. */
static void take_records(EpWorld *w, uint32_t r, const EpFrame *f) {
    EpRankCalls *its = &w->record.ranks[r];
    if (f->num_bytes != sizeof its->records || w->record_state != RECORD_OPEN) return;
    memcpy(&its->records, f->bytes, sizeof its->records);
    its->has_records = true;
}

/* Peer r reports the step in which it is stuck (0: it is no longer stuck), and its own call records. Store
 * both. */
static void take_stuck(EpWorld *w, uint32_t r, const EpFrame *f) {
    EpRankCalls *its = &w->stuck.ranks[r];
    if (f->num_bytes != sizeof its->records) return;
    memcpy(&its->records, f->bytes, sizeof its->records);
    w->stuck_step[r] = f->seq;
}

/* Peer r has closed its end of the socket. This ends the world, unless the peer has said goodbye before
 * or this rank is closing the world. */
static void peer_ended(EpWorld *w, uint32_t r) {
    char text[96];
    shutdown(w->sockets[r], SHUT_RDWR);
    ep_fork_close(w->sockets[r]);
    w->sockets[r] = -1;
    if (w->left_at_ns[r]) return;
    w->lost_ranks |= 1u << r;
    if (w->closing) return;
    snprintf(text, sizeof text, "rank %u died (seen by rank %u)", r, w->rank);
    ep_world_end(w, EP_EPEERDIED, r, text);
}

/* Process one frame of peer r. fd: the descriptor that came with it, or -1. */
static void take_frame(EpWorld *w, uint32_t r, const EpFrame *f, int fd) {
    EpInbox *to = &w->inbox[r][f->seq % EP_NUM_INBOX];
    if (f->kind == EP_FRAME_ALL_GATHER) {
        w->record.ranks[r].heard_seq = f->seq;
        w->record.ranks[r].heard_ns = ep_now_ns();
    }
    if (f->kind == EP_FRAME_ALL_GATHER && !to->full) {
        to->frame = *f;
        to->fd = fd;
        to->full = true;
        pthread_cond_broadcast(&w->changed);
        return;
    }
    if (fd >= 0) close(fd);
    if (f->kind == EP_FRAME_GOODBYE) w->left_at_ns[r] = ep_now_ns();
    if (f->kind == EP_FRAME_ABORT) {
        char text[256];
        snprintf(text, sizeof text, "%.*s", (int)f->num_bytes, (const char *)f->bytes);
        const bool is_valid = f->rank < w->num_ranks || f->rank == EP_NO_RANK;
        ep_world_end_reported(w, f->code < 0 ? f->code : EP_ECORRUPT, is_valid ? f->rank : r, f->about, text);
    }
    if (f->kind == EP_FRAME_RECORDS) take_records(w, r, f);
    if (f->kind == EP_FRAME_STUCK) take_stuck(w, r, f);
    if (f->kind == EP_FRAME_ALL_GATHER)
        ep_world_end(w, EP_ECORRUPT, r, "a peer is too far ahead in its exchanges");
}

void ep_world_read_peer(EpWorld *w, uint32_t r) {
    EpFrame f;
    int fd, got = 0;
    while (w->sockets[r] >= 0 && (got = ep_wire_receive(w->sockets[r], &f, &fd)) > 0)
        take_frame(w, r, &f, fd);
    if (got == EP_ECORRUPT) ep_world_end(w, EP_ECORRUPT, r, ep_error_text());
    if (got < 0) peer_ended(w, r);
}

/* ---- detection of stuck ranks and of mismatched calls ---- */

/* Returns the step of this rank's oldest stuck call, and copies the call records before and after it to
 * records. Returns 0, which is no step, if no call is stuck, or if this rank may number its steps differently
 * than the other ranks (is_order_unknown). A synchronous call is stuck if it began more than EP_STUCK_NS ago
 * and has not returned. An operation on a stream is stuck if its kernel, which has waited for long, has
 * written its epoch to host->stuck. */
static uint64_t stuck_step(EpWorld *w, uint64_t now, EpCallRecords *records) {
    EpCallRecords about;
    uint64_t step = 0, on_gpu = 0;
    if (atomic_load_explicit(&w->ring.is_order_unknown, memory_order_relaxed)) return 0;
    ep_ring_newest(&w->ring, records);
    const EpCallRecord *last = records->num ? &records->at[records->num - 1] : NULL;
    if (last && ep_call_is_counted(last) && !last->end_ns && now > last->begin_ns + EP_STUCK_NS)
        step = last->step;
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++) {
        const EpCommBuffer *b = w->watched[i];
        uint64_t epoch = b && b->on_stream ? ep_ld_relaxed_sys_u64(&b->comm.host->stuck) : 0;
        if (!epoch) continue;
        /* Clear the report. A wait that continues writes it again within a millisecond. */
        ep_st_relaxed_sys_u64(&b->comm.host->stuck, 0);
        uint64_t at = ep_ring_about(&w->ring, b, epoch, &about);
        if (at && (!on_gpu || at < on_gpu)) {
            on_gpu = at;
            w->on_gpu_records = about;
        }
    }
    if (on_gpu) {
        w->on_gpu_step = on_gpu;
        w->on_gpu_ns = now;
    } else if (now - w->on_gpu_ns > STUCK_GRACE_NS) {
        w->on_gpu_step = 0;
    }
    if (w->on_gpu_step && (!step || w->on_gpu_step < step)) {
        step = w->on_gpu_step;
        *records = w->on_gpu_records;
    }
    return step;
}

/* Send the peers the step in which this rank is stuck (0: it no longer is), and its call records. */
static void tell_stuck(EpWorld *w, uint64_t step) {
    const EpCallRecords *records = &w->stuck.ranks[w->rank].records;
    EpFrame f = {.kind = EP_FRAME_STUCK, .rank = w->rank, .seq = step, .num_bytes = sizeof *records};
    memcpy(f.bytes, records, sizeof *records);
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (w->sockets[r] >= 0) ep_wire_send(w->sockets[r], &f, -1, ep_now_ns());
    w->stuck_step[w->rank] = step;
}

/* Detect ranks that wait for each other in calls that cannot meet, for example of two buffers: a deadlock,
 * which would last until the timeout. Each rank numbers its collective calls; the number of a call is its
 * step. A rank that is stuck in a call sends its step and its call records to the other ranks. This rank
 * compares itself with each other stuck rank at the smaller of the two steps, because both have made that
 * call. If the records show two calls that cannot meet, this rank ends the world.
 *
 * For a correct program there is no false alarm:
 *   (1) A step is the same call on all ranks. A rank whose numbers may differ from those of the other ranks
 *       reports nothing (is_order_unknown).
 *   (2) After an operation has failed on all ranks, a rank that has seen the failure may number its calls
 *       differently. From then on it reports nothing. The ranks that have not seen the failure yet have made
 *       the same calls as each other. */
static void check_call_order(EpWorld *w) {
    char text[256];
    uint32_t odd, me = w->rank;
    bool is_disorder = false;
    uint64_t now = ep_now_ns();
    /* Frames can wake this thread more often than POLL_MS. A GPU may then not have written its cleared word
     * again. */
    if (now - w->looked_ns < POLL_MS * 1000000ull) return;
    w->looked_ns = now;
    uint64_t step = stuck_step(w, now, &w->stuck.ranks[me].records);
    if (step != w->stuck_step[me]) tell_stuck(w, step);
    for (uint32_t r = 0; r < w->num_ranks; r++) w->stuck.ranks[r].has_records = w->stuck_step[r] != 0;
    for (uint32_t r = 0; r < w->num_ranks && step && !is_disorder; r++)
        is_disorder = w->stuck_step[r] &&
                      ep_record_disagrees(&w->stuck, w->stuck_step[r] < step ? w->stuck_step[r] : step, &odd,
                                          text, sizeof text);
    if (!is_disorder) w->disorder_ns = 0;
    else if (!w->disorder_ns) w->disorder_ns = now;
    else if (now - w->disorder_ns > DISORDER_NS) ep_world_end(w, EP_EMISMATCH, odd, text);
}

/* ---- the thread ---- */

/* End the world for reasons that arrive on no socket: a wait on the device has timed out, or a peer has left
 * alone and its grace time has passed. */
static void check_timeouts(EpWorld *w) {
    char text[128];
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++) {
        const EpComm *c = w->watched[i] ? &w->watched[i]->comm : NULL;
        if (!c || !ep_ld_acquire_sys_u64(&c->host->fault.state) || c->host->fault.code != EP_ETIMEOUT)
            continue;
        const EpFaultRecord f = c->host->fault;
        ep_fault_error(&f, &c->shape, w->rank);
        ep_world_end_wait(w, EP_ETIMEOUT, f.peer, f.word, ep_error_text());
    }
    for (uint32_t r = 0; r < w->num_ranks; r++) {
        if (w->closing || !w->left_at_ns[r] || ep_now_ns() - w->left_at_ns[r] < LEAVE_GRACE_NS) continue;
        snprintf(text, sizeof text,
                 "rank %u left the world alone: close() is collective, and all ranks must call it", r);
        ep_world_end(w, EP_EPEERDIED, r, text);
    }
}

/* After this rank has closed the world alone (left_ns): wait for its operations that are still in flight. A
 * peer may still enter them, or may have left as well. The wait ends when no peer is connected, when no
 * buffer is watched, or after LEAVE_GRACE_NS (HASTE_NS if the process is about to end). Then the abort words
 * end the operations that remain. Finally, close all sockets. */
static void drain(EpWorld *w) {
    pthread_mutex_lock(&w->lock);
    for (bool is_over = !w->left_ns; !is_over;) {
        uint32_t num_peers = 0, num_watched = 0;
        pthread_mutex_unlock(&w->lock);
        poll(NULL, 0, POLL_MS / 4);
        pthread_mutex_lock(&w->lock);
        for (uint32_t r = 0; r < w->num_ranks; r++) {
            struct pollfd p = {w->sockets[r], 0, 0}; /* poll reports POLLHUP even if no event is requested */
            if (p.fd >= 0 && poll(&p, 1, 0) > 0) {
                ep_fork_close(w->sockets[r]);
                w->sockets[r] = -1;
            }
            num_peers += w->sockets[r] >= 0;
        }
        for (uint32_t i = 0; i < EP_MAX_WATCHED; i++) num_watched += w->watched[i] != NULL;
        is_over = !num_peers || !num_watched ||
                  ep_now_ns() - w->left_ns > (w->in_haste ? HASTE_NS : LEAVE_GRACE_NS);
        for (uint32_t i = 0; i < EP_MAX_WATCHED && is_over; i++)
            if (w->watched[i]) ep_st_relaxed_sys_u64(&w->watched[i]->comm.host->abort, 1);
    }
    for (uint32_t r = 0; r < w->num_ranks; r++) {
        ep_fork_close(w->sockets[r]);
        w->sockets[r] = -1;
    }
    pthread_mutex_unlock(&w->lock);
}

void *ep_world_watch_main(void *arg) {
    EpWorld *w = (EpWorld *)arg;
    struct pollfd p[EP_MAX_RANKS + 1];
    uint32_t rank_of[EP_MAX_RANKS + 1];
    for (;;) {
        nfds_t n = 1;
        pthread_mutex_lock(&w->lock);
        for (uint32_t r = 0; r < w->num_ranks; r++)
            if (w->sockets[r] >= 0) {
                p[n] = (struct pollfd){w->sockets[r], POLLIN, 0};
                rank_of[n++] = r;
            }
        pthread_mutex_unlock(&w->lock);
        p[0] = (struct pollfd){w->wake_fd, POLLIN, 0};
        poll(p, n, POLL_MS);
        if (p[0].revents) {
            drain(w);
            return NULL;
        }
        pthread_mutex_lock(&w->lock);
        for (nfds_t i = 1; i < n; i++)
            if (p[i].revents && w->sockets[rank_of[i]] == p[i].fd) ep_world_read_peer(w, rank_of[i]);
        check_timeouts(w);
        if (!w->end_code && !w->closing) check_call_order(w);
        if (ep_world_record_is_due(w)) ep_world_finish_record(w);
        pthread_mutex_unlock(&w->lock);
    }
}
