/* world_end.c - how a world ends, and the flight record that it leaves.
 *
 * ep_world_end keeps the first reason. It sets the abort word of every communication buffer, which every wait
 * on any backend polls. It sends the reason and this rank's call records to every peer.
 *
 * Exports: ep_world_end, _abort, _check, _check_caller, _reason, _set_place, _is_forked, and the functions
 * that make the flight record.
 * Invariant: nothing here takes a Python lock or makes a CUDA call, so neither can delay the end. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/fork.h"
#include "runtime/world_state.h"

/* How long a rank waits for its peers' call records after the end of the world. */
#define RECORDS_NS 200000000ull

/* The reason of the end, for people. On one of several nodes it says so, because the numbers of ranks in it
 * count the ranks of this node. */
static void complete_text(const EpWorld *w, int code, uint32_t rank, const char *text,
                          char out[EP_END_BYTES]) {
    if (!w->has_place || rank == EP_NO_RANK) snprintf(out, EP_END_BYTES, "%s", text);
    else if (code == EP_EPEERDIED && rank < w->num_ranks)
        snprintf(out, EP_END_BYTES, "rank %u (rank %u of node %u): %s", w->first_rank + rank, rank, w->node,
                 text);
    else
        snprintf(out, EP_END_BYTES, "node %u (its rank 0 is rank %u of all): %s", w->node, w->first_rank,
                 text);
}

void ep_world_end_wait(EpWorld *w, int code, uint32_t rank, uint32_t word, const char *text) {
    char completed[EP_END_BYTES];
    complete_text(w, code, rank, text, completed);
    ep_world_end_reported(w, code, rank, word, completed);
}

void ep_world_end_reported(EpWorld *w, int code, uint32_t rank, uint32_t word, const char *text) {
    if (w->end_code) return;
    w->end_code = code;
    /* The reason may come from a peer's abort frame, before this rank's own socket shows the death. */
    if (code == EP_EPEERDIED && rank < w->num_ranks) w->lost_ranks |= 1u << rank;
    snprintf(w->end_text, sizeof w->end_text, "%s", text);
    EpRankCalls *mine = &w->record.ranks[w->rank];
    w->record.end_code = code;
    w->record.end_rank = rank < w->num_ranks ? rank : w->rank;
    w->record.is_elsewhere = rank == EP_NO_RANK;
    w->record.end_word = word;
    w->record.end_ns = ep_now_ns();
    ep_ring_newest(&w->ring, &mine->records);
    mine->has_records = true;
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++)
        if (w->watched[i]) ep_st_relaxed_sys_u64(&w->watched[i]->comm.host->abort, 1);
    EpFrame f = {.kind = EP_FRAME_ABORT, .code = code, .rank = rank, .about = word};
    f.num_bytes = (uint32_t)snprintf((char *)f.bytes, sizeof w->end_text, "%s", w->end_text);
    EpFrame records = {.kind = EP_FRAME_RECORDS, .rank = w->rank, .num_bytes = sizeof mine->records};
    memcpy(records.bytes, &mine->records, sizeof mine->records);
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (w->sockets[r] >= 0 && ep_wire_send(w->sockets[r], &f, -1, ep_now_ns()) == 0)
            ep_wire_send(w->sockets[r], &records, -1, ep_now_ns());
    pthread_cond_broadcast(&w->changed);
}

void ep_world_end(EpWorld *w, int code, uint32_t rank, const char *text) {
    ep_world_end_wait(w, code, rank, EP_WORD_NONE, text);
}

void ep_world_abort_wait(EpWorld *w, int code, uint32_t rank, uint32_t word, const char *text) {
    if (ep_world_is_forked(w)) return;
    pthread_mutex_lock(&w->lock);
    ep_world_end_wait(w, code, rank, word, text);
    pthread_mutex_unlock(&w->lock);
}
void ep_world_abort(EpWorld *w, int code, uint32_t rank, const char *text) {
    ep_world_abort_wait(w, code, rank, EP_WORD_NONE, text);
}

int ep_world_reason(EpWorld *w, char text[EP_END_BYTES]) {
    if (ep_world_is_forked(w)) return 0; /* the lock may have been held during the fork, and stays locked */
    pthread_mutex_lock(&w->lock);
    int code = w->end_code;
    if (code) memcpy(text, w->end_text, sizeof w->end_text);
    pthread_mutex_unlock(&w->lock);
    return code;
}

void ep_world_set_place(EpWorld *w, uint32_t node, uint32_t first_rank) {
    if (ep_world_is_forked(w)) return;
    pthread_mutex_lock(&w->lock);
    w->has_place = true;
    w->node = node;
    w->first_rank = first_rank;
    pthread_mutex_unlock(&w->lock);
}

bool ep_world_is_forked(const EpWorld *w) { return w->num_forks != ep_fork_count(); }

int ep_world_check_locked(EpWorld *w) {
    if (w->end_code) return ep_error(w->end_code, "%s", w->end_text);
    if (w->closed) return ep_error(EP_ECLOSED, "this world is closed: create a new one");
    return 0;
}

int ep_world_check(EpWorld *w) {
    if (ep_world_is_forked(w))
        return ep_error(
            EP_ECLOSED,
            "this world belongs to process %d: a forked child cannot use it, and must create its own",
            (int)w->pid);
    pthread_mutex_lock(&w->lock);
    int code = ep_world_check_locked(w);
    pthread_mutex_unlock(&w->lock);
    return code;
}

int ep_world_check_caller(EpWorld *w) {
    if (ep_world_is_forked(w)) return ep_world_check(w);
    return ep_world_check_handler();
}

/* ---- the flight record ---- */

bool ep_world_record_is_due(const EpWorld *w) {
    if (!w->end_code || w->record_state != RECORD_OPEN) return false;
    if (ep_now_ns() - w->record.end_ns > RECORDS_NS) return true;
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (!w->record.ranks[r].has_records && w->sockets[r] >= 0) return false;
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
        pthread_mutex_unlock(&w->lock); /* the file system may be slow; the write takes at most 2 s */
        ep_record_write(w->record_folder, w->rank, w->page);
        pthread_mutex_lock(&w->lock);
    }
    w->record_state = RECORD_DONE;
    pthread_cond_broadcast(&w->changed);
}

void ep_world_await_record(EpWorld *w) {
    uint64_t until = w->record.end_ns + 2 * RECORDS_NS;
    struct timespec t = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    while (w->end_code && w->has_watchdog && w->record_state == RECORD_OPEN)
        if (pthread_cond_timedwait(&w->changed, &w->lock, &t) == ETIMEDOUT) break;
    ep_world_finish_record(w);
    /* This wait needs no deadline. The thread that has set RECORD_WRITING makes the page and waits at most
     * 2 s for the file (ep_record_write). It holds no lock during that time, and waits for nothing else. */
    while (w->record_state == RECORD_WRITING) pthread_cond_wait(&w->changed, &w->lock);
}

int ep_world_flight_record(EpWorld *w, char page[EP_PAGE_BYTES]) {
    if (ep_world_is_forked(w)) return ep_world_check(w);
    pthread_mutex_lock(&w->lock);
    ep_world_await_record(w);
    if (w->end_code) {
        memcpy(page, w->page, EP_PAGE_BYTES);
    } else {
        EpRankCalls *mine = &w->record.ranks[w->rank];
        ep_ring_newest(&w->ring, &mine->records);
        mine->has_records = true;
        w->record.end_ns = ep_now_ns();
        ep_record_page(&w->record, page);
    }
    pthread_mutex_unlock(&w->lock);
    return 0;
}
