/* all_gather.c - the host all-gather: each rank sends a few bytes to all others, and waits for theirs.
 *
 * Exports: ep_world_all_gather, _all_gather_fd, _propagate_error and _agree; the calls of a rank:
 * ep_world_enter_call,
 * _leave_call, _begin_call, _end_call, _interrupt, _order_unknown and _uncount_calls.
 * In Python it is World.exchange. So error texts and the flight record call it an exchange.
 * A frame names the collective call that the all-gather is part of. So ranks that are in different calls get
 * EP_EMISMATCH. A rank that failed before the all-gather sends its error code instead of data.
 * Invariants:
 *   (1) All-gather number n of a rank meets all-gather number n of every other rank, also if it fails. So the
 *       next all-gather works after an error of this one, as long as the world has not ended.
 *   (2) An all-gather succeeds on all ranks or on none, as long as the world has not ended. Every rank
 *       compares the same frames, and frames belong together only if the call and the number of bytes are
 *       equal. If not all are equal, then every rank finds one that differs from its own. No value stands for
 *       "any call": with one, a rank that sends it would agree with two ranks that do not agree with each
 *       other.
 *   (3) A call may have several all-gathers. At most one thread of a rank is in such a call. So the
 *       all-gathers of two calls of a rank never mix, and (2) holds for whole calls. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "runtime/world_state.h"

/* True if the user has interrupted the program. The caller holds the lock. The function releases it during
 * the callback, to avoid a deadlock: the callback may need a lock (Python's, for example) that another thread
 * holds while it waits for this world's lock. */
static bool is_interrupted(EpWorld *w) {
    pthread_mutex_unlock(&w->lock);
    bool yes = ep_ask_interrupt();
    pthread_mutex_lock(&w->lock);
    return yes;
}

/* ---- calls ---- */

uint64_t ep_world_begin_call(EpWorld *w, const EpCallRecord *record) {
    return ep_ring_begin(&w->ring, record);
}
void ep_world_end_call(EpWorld *w, uint64_t record, int code) {
    ep_ring_end(&w->ring, record, code);
    if (ep_take_interrupt()) ep_world_interrupt(w);
}
int ep_world_interrupt(EpWorld *w) {
    char text[80];
    snprintf(text, sizeof text, "rank %u was interrupted in an operation", w->rank);
    ep_world_abort(w, EP_ECLOSED, w->rank, text);
    return ep_world_check(w);
}
void ep_world_order_unknown(EpWorld *w) { ep_ring_order_unknown(&w->ring); }
void ep_world_uncount_calls(EpWorld *w, uint64_t num) {
    ep_ring_order_unknown(&w->ring);
    atomic_fetch_sub_explicit(&w->ring.step, num, memory_order_relaxed);
}

int ep_world_enter_call(EpWorld *w, const EpCallRecord *call, uint64_t *record) {
    EP_TRY(ep_world_check_caller(w));
    *record = 0;
    if (ep_ring_is_in_call(&w->ring)) return 0; /* a part of a call that has this world already */
    int code = 0;
    pthread_mutex_lock(&w->lock);
    /* The wait has no limit of its own: every wait of the thread that is in a call has one. */
    while (w->in_call && !code) {
        const uint64_t next = ep_now_ns() + EP_INTERRUPT_NS;
        const struct timespec t = {(time_t)(next / 1000000000u), (long)(next % 1000000000u)};
        if (pthread_cond_timedwait(&w->changed, &w->lock, &t) == ETIMEDOUT && is_interrupted(w)) {
            char text[80];
            snprintf(text, sizeof text, "rank %u was interrupted before a collective call", w->rank);
            ep_world_end(w, EP_ECLOSED, w->rank, text);
            code = ep_world_check_locked(w);
        }
    }
    if (!code) w->in_call = true;
    pthread_mutex_unlock(&w->lock);
    if (!code) *record = ep_world_begin_call(w, call);
    return code;
}

void ep_world_leave_call(EpWorld *w, uint64_t record, int code) {
    ep_world_end_call(w, record, code);
    if (!record) return; /* this thread is still in the call of which this one was a part */
    pthread_mutex_lock(&w->lock);
    w->in_call = false;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* ---- all-gathers ---- */

/* For so long, an all-gather reads the sockets itself before it sleeps. Where the ranks call at about the
 * same time, a frame then waits for no thread that has to wake up: not for the watchdog thread, and not for
 * this one. Ranks that share cores sleep at once: a thread that looks would take the core of the rank that
 * is late. */
#define LOOK_NS 200000u
static void look_for_frame(EpWorld *w, uint32_t r, uint64_t seq, uint64_t until_ns) {
    const EpInbox *from = &w->inbox[r][seq % EP_NUM_INBOX];
    for (uint32_t polls = 0; !from->full && !w->end_code && w->sockets[r] >= 0; polls++) {
        ep_world_read_peer(w, r);
        if (ep_now_ns() >= until_ns) return;
        pthread_mutex_unlock(&w->lock);
        ep_pause(polls);
        pthread_mutex_lock(&w->lock);
    }
}

/* Wait for peer r's frame of this all-gather. Returns 0, or the error with which the world ended. The caller
 * holds the world's lock, which the wait releases while it sleeps. A timeout or Ctrl-C ends the world.
 * *limit_ns: when the all-gather times out, as a time of the monotonic clock; time during which the process
 * was suspended is added to it. look_ns: until when it looks for the frame itself. */
static int await_frame(EpWorld *w, uint32_t r, uint64_t seq, uint64_t look_ns, uint64_t *limit_ns) {
    EpInbox *from = &w->inbox[r][seq % EP_NUM_INBOX];
    const uint64_t begin_ns = ep_now_ns();
    if (begin_ns < look_ns) look_for_frame(w, r, seq, look_ns);
    const uint64_t took_ns = ep_now_ns() - begin_ns;
    if (took_ns > LOOK_NS + EP_INTERRUPT_NS) *limit_ns += took_ns; /* suspended; see below */
    uint64_t until_ns = *limit_ns;
    bool is_late = false;
    while (!from->full) {
        char text[160];
        EP_TRY(ep_world_check_locked(w));
        uint64_t now = ep_now_ns(),
                 next = until_ns < now + EP_INTERRUPT_NS ? until_ns : now + EP_INTERRUPT_NS;
        struct timespec t = {(time_t)(next / 1000000000u), (long)(next % 1000000000u)};
        bool is_timeout = pthread_cond_timedwait(&w->changed, &w->lock, &t) == ETIMEDOUT;
        now = ep_now_ns();
        if (now > next + EP_INTERRUPT_NS) {
            /* This thread woke up much too late: the process, perhaps the whole job, was suspended. That time
             * does not count toward the timeout. */
            *limit_ns += now - next;
            until_ns += now - next;
            next = 0;
        }
        if (!is_timeout || from->full) continue;
        if (next == until_ns && !is_late) {
            /* The process may have been suspended just now, and the watchdog thread may not have read a frame
             * that has arrived. Give it one more interval. */
            is_late = true;
            until_ns = ep_now_ns() + EP_INTERRUPT_NS;
        } else if (next == until_ns) {
            snprintf(text, sizeof text,
                     "rank %u timed out waiting for rank %u in exchange %llu. All ranks must make the same "
                     "calls in the same order. See world.flight_record().",
                     w->rank, r, (unsigned long long)seq);
            ep_world_end(w, EP_ETIMEOUT, r, text);
        } else if (is_interrupted(w)) {
            /* End the world, because the peer's frame may still arrive, and would belong to no all-gather. */
            snprintf(text, sizeof text, "rank %u was interrupted while waiting for rank %u", w->rank, r);
            ep_world_end(w, EP_ECLOSED, w->rank, text);
            return ep_world_check_locked(
                w); /* fail even if the frame has arrived: the user's exception is pending */
        }
    }
    return 0;
}

/* Compare rank r's frame with this rank's. If they belong together, copy its data to block r of all. */
static int check_frame(uint32_t r, const EpFrame *its, const EpFrame *mine, void *all) {
    char its_call[64], my_call[64];
    if (its->code)
        return ep_error(EP_EPEER,
                        "rank %u could not take part in the exchange: %s. See the error that it raised.", r,
                        ep_error_name(its->code));
    if (its->about != mine->about) {
        ep_about_name(its->about, its_call, sizeof its_call);
        ep_about_name(mine->about, my_call, sizeof my_call);
        return ep_error(EP_EMISMATCH,
                        "ranks are in different collective calls: rank %u in %s, rank %u in %s. Use the same "
                        "order on all ranks.",
                        r, its_call, mine->rank, my_call);
    }
    if (its->num_bytes != mine->num_bytes)
        return ep_error(EP_EMISMATCH,
                        "ranks disagree in an exchange: rank %u gives %u bytes, rank %u gives %u. Give "
                        "equally many on all ranks.",
                        r, its->num_bytes, mine->rank, mine->num_bytes);
    if (mine->num_bytes)
        memcpy((unsigned char *)all + (uint64_t)r * mine->num_bytes, its->bytes, mine->num_bytes);
    return 0;
}

/* Send this rank's frame to rank r. The caller holds the lock of the world's sockets.
 * If rank r has died, the thread that reads its socket ends the world. If rank r hangs, it neither reads its
 * socket nor sends its own frame, and this rank's wait for that frame ends with a timeout. So neither is an
 * error here. But if this rank cannot send (EP_ESYS), rank r would wait for the frame until its timeout. So
 * this function ends the world, and rank r learns the reason at once. */
static int send_frame(EpWorld *w, uint32_t r, const EpFrame *f, int fd, uint64_t until_ns) {
    char text[160];
    if (ep_wire_send(w->sockets[r], f, fd, until_ns) != EP_ESYS) return 0;
    snprintf(text, sizeof text, "rank %u, in an exchange with rank %u: %.100s", w->rank, r, ep_error_text());
    ep_world_end(w, EP_ESYS, w->rank, text);
    return ep_world_check_locked(w);
}

/* Send num_bytes at `mine` to all ranks, and receive those of all ranks in `all`. status: 0, or the code with
 * which this rank propagates its error; then num_bytes is 0, and mine and all may be NULL. Returns 0, the
 * error that ended the world (`code` below), or else the disagreement with the lowest rank that disagrees
 * (`verdict`). If this rank propagates an error, or a rank disagrees, this function still takes the frames of
 * all ranks, so that the next all-gather works. */
static int all_gather(EpWorld *w, const void *mine, uint32_t num_bytes, int status, void *all, int fd_out,
                      int *fds_in) {
    uint64_t until = ep_now_ns() + atomic_load(&w->timeout_ns), look = 0;
    char why[256]; /* of the verdict: reading further sockets may set another text */
    EpFrame f = {.kind = EP_FRAME_ALL_GATHER, .rank = w->rank, .num_bytes = num_bytes, .code = status};
    int verdict = 0;
    EP_TRY(ep_world_check(w));
    if (num_bytes > EP_ALL_GATHER_BYTES)
        return ep_error(EP_EINVAL, "an exchange carries at most %u bytes, not %u", EP_ALL_GATHER_BYTES,
                        num_bytes);
    uint64_t record;
    EP_TRY(ep_world_enter_call(w, &(EpCallRecord){.what = EP_CALL_ALL_GATHER, .size = num_bytes}, &record));
    if (num_bytes) {
        memcpy(f.bytes, mine, num_bytes);
        memcpy((unsigned char *)all + (uint64_t)w->rank * num_bytes, mine, num_bytes);
    }
    pthread_mutex_lock(&w->lock);
    int code = ep_world_check_locked(w);
    f.seq = ++w->seq;
    f.about = ep_ring_all_gather(&w->ring, f.seq);
    for (uint32_t r = 0; r < w->num_ranks && !code; r++)
        if (r != w->rank && w->sockets[r] >= 0) code = send_frame(w, r, &f, fd_out, until);
    if (w->has_cores) look = ep_now_ns() + LOOK_NS;
    for (uint32_t r = 0; r < w->num_ranks && !code; r++) {
        if (r == w->rank) continue;
        EpInbox *from = &w->inbox[r][f.seq % EP_NUM_INBOX];
        code = await_frame(w, r, f.seq, look, &until);
        if (code) break;
        from->full = false;
        if (fds_in) fds_in[r] = from->fd;
        else if (from->fd >= 0) close(from->fd);
        if (from->frame.seq != f.seq) { /* the ranks cannot get back into step */
            char text[128];
            snprintf(text, sizeof text, "ranks are out of step: rank %u is in exchange %llu, rank %u in %llu",
                     r, (unsigned long long)from->frame.seq, w->rank, (unsigned long long)f.seq);
            ep_world_end(w, EP_ECORRUPT, r, text);
            code = ep_world_check_locked(w);
        } else if (!verdict && !status) {
            verdict = check_frame(r, &from->frame, &f, all);
            if (verdict) snprintf(why, sizeof why, "%s", ep_error_text());
        }
    }
    pthread_mutex_unlock(&w->lock);
    if (!code && verdict) code = ep_error(verdict, "%s", why);
    ep_world_leave_call(w, record, code ? code : status);
    for (uint32_t r = 0; r < w->num_ranks && code && fds_in; r++) {
        if (fds_in[r] >= 0) close(fds_in[r]);
        fds_in[r] = -1;
    }
    return code;
}

int ep_world_all_gather_fd(EpWorld *w, const void *mine, uint32_t num_bytes, void *all, int fd_out,
                           int *fds_in) {
    return all_gather(w, mine, num_bytes, 0, all, fd_out, fds_in);
}

int ep_world_propagate_error(EpWorld *w, int code) {
    if (code >= 0) return ep_error(EP_EINVAL, "code %d: must be negative, an EpCode", code);
    return all_gather(w, NULL, 0, code, NULL, -1, NULL);
}

int ep_world_all_gather(EpWorld *w, const void *mine, uint32_t num_bytes, void *all) {
    return ep_world_all_gather_fd(w, mine, num_bytes, all, -1, NULL);
}

int ep_world_agree(EpWorld *w, int code, const char *what) {
    int32_t mine = code, all[EP_MAX_RANKS];
    char why[256];
    snprintf(why, sizeof why, "%s", ep_error_text());
    EP_TRY(ep_world_all_gather(w, &mine, sizeof mine, all));
    if (code) return ep_error(code, "%s", why);
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (all[r]) return ep_error(all[r], "rank %u could not %s. See the error that it raised.", r, what);
    return 0;
}
