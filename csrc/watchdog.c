/* watchdog.c - the end of a world, and the thread that sees it coming.
 *
 * The watchdog owns the reading end of the sockets and sorts what arrives: exchange frames go to the inbox,
 * an abort frame or a peer's end ends the world.  Ending the world means: the first reason is kept, the abort
 * word of every communication buffer is set (every wait, on any backend, looks at it), every other rank is
 * told, with this rank's notes for the flight record.  While the world lives, a rank that is stuck tells the others
 * in what: ranks that wait for each other in different operations would do so until the limit.  The thread holds no
 * Python lock and makes no CUDA call, so neither can keep a death from being seen. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "error.h"
#include "protocol/flags.h"
#include "world_state.h"

#define POLL_MS 20                   /* how often the watched words are looked at */
#define LEAVE_GRACE_NS 2000000000ull /* an orderly leaver's peers may finish what it still took part in */
#define HASTE_NS 500000000ull        /* the same where this process ends */
#define NOTES_NS 200000000ull        /* how long the peers' notes are waited for */
#define STUCK_GRACE_NS 100000000ull  /* a GPU says each millisecond that it is stuck */
#define DISORDER_NS 300000000ull     /* how long ranks that are stuck as well have the time to say so */

void ep_world_end(EpWorld *w, int code, uint32_t rank, const char *text) {
    if (w->end_code) return;
    w->end_code = code;
    if (code == EP_EPEERDIED && rank < w->num_ranks)
        w->lost_ranks |= 1u << rank; /* another rank may have seen it first */
    snprintf(w->end_text, sizeof w->end_text, "%s", text);
    EpRankNotes *mine = &w->record.ranks[w->rank];
    w->record.end_code = code, w->record.end_rank = rank < w->num_ranks ? rank : w->rank,
    w->record.end_ns = ep_now_ns();
    ep_ring_newest(&w->ring, &mine->notes);
    mine->has_notes = true;
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++)
        if (w->watched[i]) ep_st_relaxed_sys_u64(&w->watched[i]->comm.host->abort, 1);
    EpFrame f = {.kind = EP_FRAME_ABORT, .code = code, .rank = rank};
    f.num_bytes = (uint32_t)snprintf((char *)f.bytes, sizeof w->end_text, "%s", w->end_text);
    EpFrame notes = {.kind = EP_FRAME_NOTES, .rank = w->rank, .num_bytes = sizeof mine->notes};
    memcpy(notes.bytes, &mine->notes, sizeof mine->notes);
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (w->sockets[r] >= 0 && ep_wire_send(w->sockets[r], &f, -1, ep_now_ns()) == 0)
            ep_wire_send(w->sockets[r], &notes, -1, ep_now_ns());
    pthread_cond_broadcast(&w->changed);
}

void ep_world_abort(EpWorld *w, int code, uint32_t rank, const char *text) {
    pthread_mutex_lock(&w->lock);
    ep_world_end(w, code, rank, text);
    pthread_mutex_unlock(&w->lock);
}

/* ---- the flight record ---- */

/* Every peer has sent its notes or is gone, or the others had the time to. */
static bool record_is_due(const EpWorld *w) {
    if (!w->end_code || w->record_state != RECORD_OPEN) return false;
    if (ep_now_ns() - w->record.end_ns > NOTES_NS) return true;
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (!w->record.ranks[r].has_notes && w->sockets[r] >= 0) return false;
    return true;
}

void ep_world_finish_record(EpWorld *w) {
    if (!w->end_code || w->record_state != RECORD_OPEN) return;
    w->record_state = RECORD_WRITING;
    for (uint32_t r = 0; r < w->num_ranks; r++) {
        w->record.ranks[r].is_gone = r != w->rank && w->sockets[r] < 0;
        w->record.ranks[r].said_goodbye = w->left_at_ns[r] != 0;
    }
    ep_record_page(&w->record, w->page);
    if (w->record_folder) {
        pthread_mutex_unlock(&w->lock); /* a file system may be slow */
        ep_record_write(w->record_folder, w->rank, w->page);
        pthread_mutex_lock(&w->lock);
    }
    w->record_state = RECORD_DONE;
    pthread_cond_broadcast(&w->changed);
}

void ep_world_await_record(EpWorld *w) {
    uint64_t until = w->record.end_ns + 2 * NOTES_NS;
    struct timespec t = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    while (w->end_code && w->has_watchdog && w->record_state == RECORD_OPEN)
        if (pthread_cond_timedwait(&w->changed, &w->lock, &t) == ETIMEDOUT) break;
    ep_world_finish_record(w);
    while (w->record_state == RECORD_WRITING) pthread_cond_wait(&w->changed, &w->lock);
}

int ep_world_flight_record(EpWorld *w, char page[EP_PAGE_BYTES]) {
    if (ep_world_is_forked(w)) return ep_world_check(w);
    pthread_mutex_lock(&w->lock);
    ep_world_await_record(w);
    if (w->end_code) {
        memcpy(page, w->page, EP_PAGE_BYTES);
    } else {
        EpRankNotes *mine = &w->record.ranks[w->rank];
        ep_ring_newest(&w->ring, &mine->notes);
        mine->has_notes = true, w->record.end_ns = ep_now_ns();
        ep_record_page(&w->record, page);
    }
    pthread_mutex_unlock(&w->lock);
    return 0;
}

/* ---- the thread ---- */

/* A peer's notes; what they say is read with care (record.c). */
static void take_notes(EpWorld *w, uint32_t r, const EpFrame *f) {
    EpRankNotes *its = &w->record.ranks[r];
    if (f->num_bytes != sizeof its->notes || w->record_state != RECORD_OPEN) return;
    memcpy(&its->notes, f->bytes, sizeof its->notes);
    its->has_notes = true;
}

static void take_stuck(EpWorld *w, uint32_t r, const EpFrame *f) {
    EpRankNotes *its = &w->stuck.ranks[r];
    if (f->num_bytes != sizeof its->notes) return;
    memcpy(&its->notes, f->bytes, sizeof its->notes);
    w->stuck_step[r] = f->seq;
}

static void peer_ended(EpWorld *w, uint32_t r) {
    char text[96];
    shutdown(w->sockets[r], SHUT_RDWR);
    close(w->sockets[r]);
    w->sockets[r] = -1;
    if (w->left_at_ns[r]) return;
    w->lost_ranks |= 1u << r;
    if (w->closing) return;
    snprintf(text, sizeof text, "rank %u died (seen by rank %u)", r, w->rank);
    ep_world_end(w, EP_EPEERDIED, r, text);
}

static void take_frame(EpWorld *w, uint32_t r, const EpFrame *f, int fd) {
    EpInbox *to = &w->inbox[r][f->seq % EP_NUM_INBOX];
    if (f->kind == EP_FRAME_EXCHANGE)
        w->record.ranks[r].heard_seq = f->seq, w->record.ranks[r].heard_ns = ep_now_ns();
    if (f->kind == EP_FRAME_EXCHANGE && !to->full) {
        to->frame = *f, to->fd = fd, to->full = true;
        pthread_cond_broadcast(&w->changed);
        return;
    }
    if (fd >= 0) close(fd);
    if (f->kind == EP_FRAME_GOODBYE) w->left_at_ns[r] = ep_now_ns();
    if (f->kind == EP_FRAME_ABORT) {
        char text[256];
        snprintf(text, sizeof text, "%.*s", (int)f->num_bytes, (const char *)f->bytes);
        ep_world_end(w, f->code < 0 ? f->code : EP_ECORRUPT, f->rank < w->num_ranks ? f->rank : r, text);
    }
    if (f->kind == EP_FRAME_NOTES) take_notes(w, r, f);
    if (f->kind == EP_FRAME_STUCK) take_stuck(w, r, f);
    if (f->kind == EP_FRAME_EXCHANGE)
        ep_world_end(w, EP_ECORRUPT, r, "a peer is too far ahead in its exchanges");
}

static void read_peer(EpWorld *w, uint32_t r) {
    EpFrame f;
    int fd, got = 0;
    while (w->sockets[r] >= 0 && (got = ep_wire_receive(w->sockets[r], &f, &fd)) > 0)
        take_frame(w, r, &f, fd);
    if (got == EP_ECORRUPT) ep_world_end(w, EP_ECORRUPT, r, ep_error_text());
    if (got < 0) peer_ended(w, r);
}

/* The first of this rank's newest operations in which it has been stuck for a while, with the notes about it; 0: in none, or it
 * cannot be told.  What is over when it returns is stuck while it has not returned; of what is on a stream, the GPU tells. */
static uint64_t stuck_step(EpWorld *w, uint64_t now, EpNotes *notes) {
    EpNotes about;
    uint64_t step = 0, on_gpu = 0;
    if (atomic_load_explicit(&w->ring.is_vague, memory_order_relaxed)) return 0;
    ep_ring_newest(&w->ring, notes);
    const EpNote *last = notes->num ? &notes->notes[notes->num - 1] : NULL;
    if (last && ep_note_is_counted(last) && !last->end_ns && now > last->begin_ns + EP_STUCK_NS)
        step = last->step;
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++) {
        const EpCommBuffer *b = w->watched[i];
        uint64_t epoch = b && b->on_stream ? ep_ld_relaxed_sys_u64(&b->comm.host->stuck) : 0;
        if (!epoch) continue;
        ep_st_relaxed_sys_u64(&b->comm.host->stuck,
                              0); /* a wait that goes on says so again in a millisecond */
        uint64_t at = ep_ring_about(&w->ring, b, epoch, &about);
        if (at && (!on_gpu || at < on_gpu)) on_gpu = at, w->on_gpu_notes = about;
    }
    if (on_gpu) w->on_gpu_step = on_gpu, w->on_gpu_ns = now;
    else if (now - w->on_gpu_ns > STUCK_GRACE_NS) w->on_gpu_step = 0;
    if (w->on_gpu_step && (!step || w->on_gpu_step < step)) step = w->on_gpu_step, *notes = w->on_gpu_notes;
    return step;
}

/* Tell the others in which operation this rank is stuck, with its notes; 0: in none any more. */
static void tell_stuck(EpWorld *w, uint64_t step) {
    const EpNotes *notes = &w->stuck.ranks[w->rank].notes;
    EpFrame f = {.kind = EP_FRAME_STUCK, .rank = w->rank, .seq = step, .num_bytes = sizeof *notes};
    memcpy(f.bytes, notes, sizeof *notes);
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (w->sockets[r] >= 0) ep_wire_send(w->sockets[r], &f, -1, ep_now_ns());
    w->stuck_step[w->rank] = step;
}

/* Ranks that are in different places where all should meet in one would wait for each other for good.  So who is stuck says so;
 * and where two are that did different things at the step where the one behind is, the world ends.  In a correct program none
 * are: steps are the same calls on all ranks but on those that know better, which say nothing (is_vague).  Where an operation fails on
 * all, those that have not seen it yet have all called the same. */
static void look_for_disorder(EpWorld *w) {
    char text[256];
    uint32_t odd, me = w->rank;
    bool is_disorder = false;
    uint64_t now = ep_now_ns();
    if (now - w->looked_ns < POLL_MS * 1000000ull)
        return; /* frames may come faster, and a GPU's word not be there again */
    w->looked_ns = now;
    uint64_t step = stuck_step(w, now, &w->stuck.ranks[me].notes);
    if (step != w->stuck_step[me]) tell_stuck(w, step);
    for (uint32_t r = 0; r < w->num_ranks; r++) w->stuck.ranks[r].has_notes = w->stuck_step[r] != 0;
    for (uint32_t r = 0; r < w->num_ranks && step && !is_disorder; r++)
        is_disorder = w->stuck_step[r] &&
                      ep_record_disagrees(&w->stuck, w->stuck_step[r] < step ? w->stuck_step[r] : step, &odd,
                                          text, sizeof text);
    if (!is_disorder) w->disorder_ns = 0;
    else if (!w->disorder_ns) w->disorder_ns = now;
    else if (now - w->disorder_ns > DISORDER_NS) ep_world_end(w, EP_EMISMATCH, odd, text);
}

/* Things that no socket tells: a wait that timed out on the device, a peer that left and is missed. */
static void look_around(EpWorld *w) {
    char text[128];
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++) {
        const EpHostWords *h = w->watched[i] ? w->watched[i]->comm.host : NULL;
        if (!h || !ep_ld_acquire_sys_u64(&h->fault.state) || h->fault.code != EP_ETIMEOUT) continue;
        snprintf(text, sizeof text,
                 "rank %u timed out waiting for rank %u (word %s, epoch %llu, wanted %llu, saw %llu)",
                 w->rank, h->fault.peer, ep_word_name(h->fault.word), (unsigned long long)h->fault.epoch,
                 (unsigned long long)h->fault.want, (unsigned long long)h->fault.got);
        ep_world_end(w, EP_ETIMEOUT, h->fault.peer, text);
    }
    for (uint32_t r = 0; r < w->num_ranks; r++) {
        if (w->closing || !w->left_at_ns[r] || ep_now_ns() - w->left_at_ns[r] < LEAVE_GRACE_NS) continue;
        snprintf(text, sizeof text,
                 "rank %u left the world alone: close() is collective, and all ranks must call it", r);
        ep_world_end(w, EP_EPEERDIED, r, text);
    }
}

/* A rank that has left alone may have operations on their way, which peers may still come to, or have left.  They end when no
 * peer is there any more, or after the time that peers give a leaver. */
static void watch_out(EpWorld *w) {
    pthread_mutex_lock(&w->lock);
    for (bool is_over = !w->left_ns; !is_over;) {
        uint32_t num_peers = 0, num_watched = 0;
        pthread_mutex_unlock(&w->lock);
        poll(NULL, 0, POLL_MS / 4);
        pthread_mutex_lock(&w->lock);
        for (uint32_t r = 0; r < w->num_ranks; r++) {
            struct pollfd p = {w->sockets[r], 0, 0}; /* a hangup is told in any case */
            if (p.fd >= 0 && poll(&p, 1, 0) > 0) close(w->sockets[r]), w->sockets[r] = -1;
            num_peers += w->sockets[r] >= 0;
        }
        for (uint32_t i = 0; i < EP_MAX_WATCHED; i++) num_watched += w->watched[i] != NULL;
        is_over = !num_peers || !num_watched ||
                  ep_now_ns() - w->left_ns > (w->in_haste ? HASTE_NS : LEAVE_GRACE_NS);
        for (uint32_t i = 0; i < EP_MAX_WATCHED && is_over; i++)
            if (w->watched[i]) ep_st_relaxed_sys_u64(&w->watched[i]->comm.host->abort, 1);
    }
    for (uint32_t r = 0; r < w->num_ranks; r++) {
        if (w->sockets[r] >= 0) close(w->sockets[r]);
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
            if (w->sockets[r] >= 0) p[n] = (struct pollfd){w->sockets[r], POLLIN, 0}, rank_of[n++] = r;
        pthread_mutex_unlock(&w->lock);
        p[0] = (struct pollfd){w->wake_fd, POLLIN, 0};
        poll(p, n, POLL_MS);
        if (p[0].revents) {
            watch_out(w);
            return NULL;
        }
        pthread_mutex_lock(&w->lock);
        for (nfds_t i = 1; i < n; i++)
            if (p[i].revents && w->sockets[rank_of[i]] == p[i].fd) read_peer(w, rank_of[i]);
        look_around(w);
        if (!w->end_code && !w->closing) look_for_disorder(w);
        if (record_is_due(w)) ep_world_finish_record(w);
        pthread_mutex_unlock(&w->lock);
    }
}
