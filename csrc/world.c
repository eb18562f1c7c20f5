/* world.c - the ranks of a world: creation, a socket to each peer, exchanges, and leaving.  watchdog.c has
 * the thread that reads the sockets and ends the world. */
#include "world.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "error.h"
#include "world_state.h"

#define INTERRUPT_NS 100000000ull /* how often a wait asks whether it is wanted any more */

/* A forked child must not hold the parent's sockets: peers see a death by their end.  All worlds of this
 * process; the handler runs in the child, alone, and only closes. */
#define MAX_WORLDS 256u
static EpWorld *_Atomic worlds_here[MAX_WORLDS];

static void close_in_child(void) {
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *w = atomic_load(&worlds_here[i]);
        for (uint32_t r = 0; w && r < EP_MAX_RANKS; r++) {
            if (w->sockets[r] >= 0) close(w->sockets[r]);
            w->sockets[r] = -1;
        }
        if (w && w->wake_fd >= 0) close(w->wake_fd), w->wake_fd = -1;
    }
}
static void register_handler(void) { pthread_atfork(NULL, NULL, close_in_child); }

static int enlist(EpWorld *w) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_handler);
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *nobody = NULL;
        if (atomic_compare_exchange_strong(&worlds_here[i], &nobody, w)) return 0;
    }
    return ep_error(EP_ENOMEM, "a process holds at most %u worlds", MAX_WORLDS);
}
static void delist(EpWorld *w) {
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *it = w;
        atomic_compare_exchange_strong(&worlds_here[i], &it, (EpWorld *)NULL);
    }
}

static uint64_t deadline(const EpWorld *w) { return ep_now_ns() + atomic_load(&w->timeout_ns); }

/* ---- creation ---- */

static int make_world(uint32_t rank, uint32_t num_ranks, double timeout_s, EpWorld **out) {
    if (num_ranks < 1 || num_ranks > EP_MAX_RANKS || rank >= num_ranks)
        return ep_error(EP_EINVAL, "rank %u of %u: a world has 1 to %u ranks", rank, num_ranks, EP_MAX_RANKS);
    EpWorld *w = (EpWorld *)calloc(1, sizeof *w);
    if (!w) return ep_error(EP_ENOMEM, "no memory for a world");
    w->rank = rank, w->num_ranks = num_ranks, w->pid = getpid(), w->wake_fd = -1;
    w->record.rank = rank, w->record.num_ranks = num_ranks, w->record.end_text = w->end_text;
    w->stuck.num_ranks = num_ranks;
    w->record.buffers = w->watched, w->record.num_buffers = EP_MAX_WATCHED;
    const char *folder = getenv("EPMOE_FLIGHT_RECORD");
    if (folder && *folder) w->record_folder = strdup(folder);
    atomic_init(&w->num_refs, 1);
    for (uint32_t r = 0; r < EP_MAX_RANKS; r++) w->sockets[r] = -1;
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_t attributes; /* deadlines are on the monotonic clock */
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    int code = ep_world_set_timeout(w, timeout_s);
    if (!code) code = enlist(w);
    if (code) ep_world_release(w);
    else *out = w;
    return code;
}

static int start_watchdog(EpWorld *w) {
    w->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (w->wake_fd < 0) return ep_error(EP_ESYS, "eventfd: %s", strerror(errno));
    int e = pthread_create(&w->watchdog, NULL, ep_world_watch_main, w);
    if (e) return ep_error(EP_ESYS, "no thread for the watchdog: %s", strerror(e));
    w->has_watchdog = true;
    pthread_setname_np(w->watchdog, "epmoe watchdog"); /* for debuggers and top -H */
    return 0;
}

int ep_world_create(const EpWorldConfig *config, EpWorld **out) {
    EpWorld *w = NULL;
    int code = make_world(config->rank, config->num_ranks, config->timeout_s, &w);
    uint64_t limit = code ? 0 : atomic_load(&w->timeout_ns);
    if (limit > 30000000000ull) limit = 30000000000ull; /* meeting is quick or broken */
    if (!code) code = ep_wire_connect(config, w->sockets, ep_now_ns() + limit);
    if (config->listen_fd >= 0) close(config->listen_fd);
    if (!code) code = start_watchdog(w);
    if (code && w) ep_world_release(w);
    else if (!code) *out = w;
    return code;
}

int ep_world_create_threads(uint32_t num_ranks, double timeout_s, EpWorld *worlds[]) {
    int code = 0, pair[2];
    uint32_t made = 0;
    if (num_ranks == 0) return ep_error(EP_EINVAL, "a world has 1 to %u ranks", EP_MAX_RANKS);
    for (; made < num_ranks; made++) {
        EP_TRY_GOTO(code, make_world(made, num_ranks, timeout_s, &worlds[made]), fail);
        worlds[made]->is_threads = true;
        for (uint32_t r = 0; r < made; r++) {
            if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) {
                code = ep_error(EP_ESYS, "socketpair: %s", strerror(errno));
                made++;
                goto fail;
            }
            worlds[made]->sockets[r] = pair[0], worlds[r]->sockets[made] = pair[1];
        }
    }
    for (uint32_t r = 0; r < num_ranks; r++) EP_TRY_GOTO(code, start_watchdog(worlds[r]), fail);
    return 0;
fail:
    for (uint32_t r = 0; r < made; r++) ep_world_release(worlds[r]);
    return code;
}

/* ---- exchange ---- */

static int check_locked(EpWorld *w) {
    if (w->end_code) return ep_error(w->end_code, "%s", w->end_text);
    if (w->closed) return ep_error(EP_ECLOSED, "this world is closed");
    return 0;
}

bool ep_world_is_forked(const EpWorld *w) { return w->pid != getpid(); }

int ep_world_check(EpWorld *w) {
    if (ep_world_is_forked(w)) return ep_error(EP_ECLOSED, "this world belongs to process %d; a forked child cannot use it", (int)w->pid);
    pthread_mutex_lock(&w->lock);
    int code = check_locked(w);
    pthread_mutex_unlock(&w->lock);
    return code;
}

static bool (*_Atomic interrupt_wanted)(void);
void ep_world_set_interrupt(bool (*wanted)(void)) { atomic_store(&interrupt_wanted, wanted); }

/* The lock is held, and let go of meanwhile: who answers may need what the holder of the lock waits for. */
static bool is_interrupted(EpWorld *w) {
    bool (*wanted)(void) = atomic_load(&interrupt_wanted);
    if (!wanted) return false;
    pthread_mutex_unlock(&w->lock);
    bool yes = wanted();
    pthread_mutex_lock(&w->lock);
    return yes;
}

/* Wait for peer r's frame of this exchange; the lock is held. */
static int await_frame(EpWorld *w, uint32_t r, uint64_t seq, uint64_t until_ns) {
    EpInbox *from = &w->inbox[r][seq % EP_NUM_INBOX];
    bool is_late = false;
    while (!from->full) {
        char text[96];
        EP_TRY(check_locked(w));
        uint64_t now = ep_now_ns(), next = until_ns < now + INTERRUPT_NS ? until_ns : now + INTERRUPT_NS;
        struct timespec t = {(time_t)(next / 1000000000u), (long)(next % 1000000000u)};
        bool is_timeout = pthread_cond_timedwait(&w->changed, &w->lock, &t) == ETIMEDOUT;
        now = ep_now_ns();
        if (now > next + INTERRUPT_NS) until_ns += now - next, next = 0; /* nobody ran here, nor perhaps anywhere: it does not count */
        if (!is_timeout || from->full) continue;
        if (next == until_ns && !is_late) { /* this process may have been stopped, and the frame be there unread */
            is_late = true, until_ns = ep_now_ns() + INTERRUPT_NS;
        } else if (next == until_ns) {
            snprintf(text, sizeof text, "rank %u waited in vain for rank %u in exchange %llu", w->rank, r, (unsigned long long)seq);
            ep_world_end(w, EP_ETIMEOUT, r, text);
        } else if (is_interrupted(w)) { /* the peer's frame may still come, and belong to no exchange */
            snprintf(text, sizeof text, "rank %u was interrupted while it waited for rank %u", w->rank, r);
            ep_world_end(w, EP_ECLOSED, w->rank, text);
            return check_locked(w); /* whether the frame has come meanwhile or not: an exception waits */
        }
    }
    return 0;
}

/* status: 0, or why this rank has nothing to give (mine and all may be NULL then). */
static int exchange(EpWorld *w, const void *mine, uint32_t num_bytes, int status, void *all, int fd_out, int *fds_in) {
    uint64_t until = deadline(w);
    EpFrame f = {.kind = EP_FRAME_EXCHANGE, .rank = w->rank, .num_bytes = num_bytes, .code = status};
    int verdict = 0;
    EP_TRY(ep_world_check(w));
    if (num_bytes > EP_EXCHANGE_BYTES) return ep_error(EP_EINVAL, "an exchange carries at most %u bytes", EP_EXCHANGE_BYTES);
    EpNote note = {.what = EP_DID_EXCHANGE, .size = num_bytes};
    uint64_t noted = ep_ring_begin(&w->ring, &note);
    if (num_bytes) memcpy(f.bytes, mine, num_bytes), memcpy((unsigned char *)all + (uint64_t)w->rank * num_bytes, mine, num_bytes);
    pthread_mutex_lock(&w->lock);
    int code = check_locked(w);
    f.seq = ++w->seq;
    f.about = ep_ring_exchange(&w->ring, f.seq);
    for (uint32_t r = 0; r < w->num_ranks && !code; r++)
        if (r != w->rank && w->sockets[r] >= 0) ep_wire_send(w->sockets[r], &f, fd_out, until); /* an end is seen by the watchdog */
    for (uint32_t r = 0; r < w->num_ranks && !code; r++) {
        if (r == w->rank) continue;
        EpInbox *from = &w->inbox[r][f.seq % EP_NUM_INBOX];
        code = await_frame(w, r, f.seq, until);
        if (code) break;
        from->full = false;
        if (fds_in) fds_in[r] = from->fd;
        else if (from->fd >= 0) close(from->fd);
        if (from->frame.seq != f.seq) { /* out of step for good */
            char text[128];
            snprintf(text, sizeof text, "rank %u is in exchange %llu, rank %u in %llu", r, (unsigned long long)from->frame.seq, w->rank,
                     (unsigned long long)f.seq);
            ep_world_end(w, EP_ECORRUPT, r, text);
            code = check_locked(w);
        } else if (verdict || status) { /* the others' frames are taken all the same, so that the next exchange works */
        } else if (from->frame.code) {
            verdict = ep_error(EP_EPEER, "rank %u could not take part in the exchange: %s", r, ep_error_name(from->frame.code));
        } else if (from->frame.about != f.about && from->frame.about && f.about) {
            char its[64], my[64];
            ep_about_name(from->frame.about, its, sizeof its), ep_about_name(f.about, my, sizeof my);
            verdict = ep_error(EP_EMISMATCH, "ranks meet in different calls: rank %u in %s, rank %u in %s", r, its, w->rank, my);
        } else if (from->frame.num_bytes != num_bytes) {
            verdict = ep_error(EP_EMISMATCH, "ranks disagree in an exchange: rank %u gives %u bytes, rank %u gives %u", r,
                               from->frame.num_bytes, w->rank, num_bytes);
        } else if (num_bytes) {
            memcpy((unsigned char *)all + (uint64_t)r * num_bytes, from->frame.bytes, num_bytes);
        }
    }
    pthread_mutex_unlock(&w->lock);
    code = code ? code : verdict;
    ep_ring_end(&w->ring, noted, code ? code : status);
    for (uint32_t r = 0; r < w->num_ranks && code && fds_in; r++) {
        if (fds_in[r] >= 0) close(fds_in[r]);
        fds_in[r] = -1;
    }
    return code;
}

int ep_world_exchange_fd(EpWorld *w, const void *mine, uint32_t num_bytes, void *all, int fd_out, int *fds_in) {
    return exchange(w, mine, num_bytes, 0, all, fd_out, fds_in);
}

int ep_world_refuse(EpWorld *w, int code) {
    if (code >= 0) return ep_error(EP_EINVAL, "a refusal needs a negative code");
    return exchange(w, NULL, 0, code, NULL, -1, NULL);
}

int ep_world_exchange(EpWorld *w, const void *mine, uint32_t num_bytes, void *all) {
    return ep_world_exchange_fd(w, mine, num_bytes, all, -1, NULL);
}

int ep_world_agree(EpWorld *w, int code, const char *what) {
    int32_t mine = code, all[EP_MAX_RANKS];
    char why[256];
    snprintf(why, sizeof why, "%s", ep_error_text());
    EP_TRY(ep_world_exchange(w, &mine, sizeof mine, all));
    if (code) return ep_error(code, "%s", why);
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (all[r]) return ep_error(all[r], "rank %u could not %s", r, what);
    return 0;
}

/* ---- end ---- */

static atomic_bool are_settled; /* the process is about to end: nothing is looked after any more */

/* No thread and no descriptor is left. */
static void tidy(EpWorld *w) {
    if (w->has_watchdog) pthread_join(w->watchdog, NULL);
    w->has_watchdog = false;
    for (uint32_t r = 0; r < w->num_ranks; r++) {
        if (w->sockets[r] >= 0) close(w->sockets[r]);
        w->sockets[r] = -1;
        for (uint32_t i = 0; i < EP_NUM_INBOX; i++)
            if (w->inbox[r][i].full && w->inbox[r][i].fd >= 0) close(w->inbox[r][i].fd), w->inbox[r][i].fd = -1;
    }
    if (w->wake_fd >= 0) close(w->wake_fd);
    w->wake_fd = -1;
}

int ep_world_close(EpWorld *w, bool collective) {
    int code = 0;
    unsigned char mine = 0, all[EP_MAX_RANKS];
    char why[256];
    if (ep_world_is_forked(w)) return 0; /* the parent's sockets and thread are not ours to end */
    pthread_mutex_lock(&w->lock);
    bool was_closed = w->closed;
    pthread_mutex_unlock(&w->lock);
    if (was_closed) return 0;
    EpNote note = {.what = EP_DID_CLOSE};
    uint64_t noted = collective ? ep_ring_begin(&w->ring, &note) : 0;
    if (collective) code = ep_world_exchange(w, &mine, 1, all);
    ep_ring_end(&w->ring, noted, code);
    snprintf(why, sizeof why, "%s", ep_error_text()); /* a goodbye to a dead peer fails too, and is not the reason */
    if ((code == EP_EMISMATCH || code == EP_EPEER) && !ep_world_check(w)) return ep_error(code, "%s", why); /* all close again */
    EpFrame goodbye = {.kind = EP_FRAME_GOODBYE, .rank = w->rank};
    bool is_busy = false;
    pthread_mutex_lock(&w->lock);
    ep_world_await_record(w);
    w->closing = w->closed = true;
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (w->sockets[r] >= 0) ep_wire_send(w->sockets[r], &goodbye, -1, ep_now_ns());
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++) is_busy |= w->watched[i] != NULL;
    is_busy = is_busy && (!collective || code) && !w->end_code && !atomic_load(&are_settled); /* an end has ended all waits */
    if (is_busy) w->left_ns = ep_now_ns();
    pthread_mutex_unlock(&w->lock);
    if (w->has_watchdog) {
        uint64_t one = 1;
        ssize_t written = write(w->wake_fd, &one, sizeof one);
        (void)written; /* an eventfd of a fresh counter takes one write */
    }
    if (!is_busy) tidy(w); /* else when the last heap lets go of the world: until then the watchdog looks after what is on its way */
    return code ? ep_error(code, "%s", why) : 0;
}

void ep_world_settle_all(void) {
    atomic_store(&are_settled, true);
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *w = atomic_load(&worlds_here[i]);
        if (!w || ep_world_is_forked(w)) continue;
        pthread_mutex_lock(&w->lock);
        bool is_busy = w->left_ns != 0;
        w->in_haste = true;
        pthread_mutex_unlock(&w->lock);
        if (is_busy) tidy(w);
    }
}

EpWorld *ep_world_retain(EpWorld *w) {
    atomic_fetch_add(&w->num_refs, 1);
    return w;
}

void ep_world_release(EpWorld *w) {
    if (!w || atomic_fetch_sub(&w->num_refs, 1) != 1) return;
    if (ep_world_is_forked(w)) return; /* its memory belongs to the parent's threads; leave it alone */
    ep_world_close(w, false);
    tidy(w);
    delist(w);
    for (EpAction *a = w->at_release, *next; a; a = next) {
        next = a->next;
        a->action(a->argument);
        free(a);
    }
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w->record_folder);
    free(w);
}

/* ---- small things ---- */

uint64_t ep_world_note(EpWorld *w, const EpNote *note) { return ep_ring_begin(&w->ring, note); }
void ep_world_noted(EpWorld *w, uint64_t note, int code) { ep_ring_end(&w->ring, note, code); }
void ep_world_blur(EpWorld *w) { ep_ring_blur(&w->ring); }
void ep_world_unnote(EpWorld *w, uint64_t num) {
    ep_ring_blur(&w->ring);
    atomic_fetch_sub_explicit(&w->ring.step, num, memory_order_relaxed);
}
uint16_t ep_world_number_heap(EpWorld *w) { return (uint16_t)atomic_fetch_add(&w->num_heaps, 1); }
uint16_t ep_world_number_layer(EpWorld *w) { return (uint16_t)atomic_fetch_add(&w->num_layers, 1); }

uint32_t ep_world_rank(const EpWorld *w) { return w->rank; }
uint32_t ep_world_size(const EpWorld *w) { return w->num_ranks; }
bool ep_world_is_threads(const EpWorld *w) { return w->is_threads; }
uint64_t ep_world_timeout_ns(const EpWorld *w) { return atomic_load(&w->timeout_ns); }

int ep_world_set_timeout(EpWorld *w, double timeout_s) {
    if (!(timeout_s > 0 && timeout_s < 1e6))
        return ep_error(EP_EINVAL, "timeout of %g s: must be more than 0 and less than 1e6", timeout_s);
    atomic_store(&w->timeout_ns, (uint64_t)(timeout_s * 1e9));
    return 0;
}

bool ep_world_at_release(EpWorld *w, void (*action)(void *), void *argument) {
    EpAction *a = (EpAction *)malloc(sizeof *a);
    if (!a) return false;
    a->action = action, a->argument = argument;
    pthread_mutex_lock(&w->lock);
    a->next = w->at_release, w->at_release = a;
    pthread_mutex_unlock(&w->lock);
    return true;
}

int ep_world_watch(EpWorld *w, const EpCommBuffer *buffer) {
    int code = EP_ENOMEM;
    pthread_mutex_lock(&w->lock);
    if (w->end_code) ep_st_relaxed_sys_u64(&buffer->comm.host->abort, 1);
    for (uint32_t i = 0; i < EP_MAX_WATCHED && code; i++)
        if (!w->watched[i]) w->watched[i] = buffer, code = 0;
    pthread_mutex_unlock(&w->lock);
    return code ? ep_error(code, "a world holds at most %u communication buffers", EP_MAX_WATCHED) : 0;
}

void ep_world_unwatch(EpWorld *w, const EpCommBuffer *buffer) {
    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++)
        if (w->watched[i] == buffer) w->watched[i] = NULL;
    pthread_mutex_unlock(&w->lock);
}
