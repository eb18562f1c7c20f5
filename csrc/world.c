/* world.c - the ranks of a world: creation, a socket to each peer, and leaving.  exchange.c has what they tell each other,
 * watchdog.c the thread that reads the sockets and ends the world. */
#include "world.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "error.h"
#include "world_state.h"

/* A forked child must not hold the parent's sockets: peers see a death by their end.  All worlds of this
 * process; the handler runs in the child, alone, and only closes. */
#define MAX_WORLDS 256u
static EpWorld *_Atomic worlds_here[MAX_WORLDS];
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER; /* what is listed is not freed */
static void lock_list(void) { pthread_mutex_lock(&list_lock); }
static void unlock_list(void) { pthread_mutex_unlock(&list_lock); }

static void close_in_child(void) {
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *w = atomic_load(&worlds_here[i]);
        for (uint32_t r = 0; w && r < EP_MAX_RANKS; r++) {
            if (w->sockets[r] >= 0) close(w->sockets[r]);
            w->sockets[r] = -1;
        }
        if (w && w->wake_fd >= 0) close(w->wake_fd), w->wake_fd = -1;
    }
    unlock_list();
}
static void register_handler(void) { pthread_atfork(lock_list, unlock_list, close_in_child); }

static int enlist(EpWorld *w) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_handler);
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *nobody = NULL;
        if (atomic_compare_exchange_strong(&worlds_here[i], &nobody, w)) return 0;
    }
    return ep_error(EP_ENOMEM, "a process holds at most %u worlds: close some", MAX_WORLDS);
}
static void delist(EpWorld *w) {
    lock_list();
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *it = w;
        atomic_compare_exchange_strong(&worlds_here[i], &it, (EpWorld *)NULL);
    }
    unlock_list();
}
/* The world at a place, with a reference more; or NULL, also where the last one is about to be gone. */
static EpWorld *listed(uint32_t i) {
    lock_list();
    EpWorld *w = atomic_load(&worlds_here[i]);
    int n = w ? atomic_load(&w->num_refs) : 0;
    while (n > 0 && !atomic_compare_exchange_weak(&w->num_refs, &n, n + 1)) {
    }
    unlock_list();
    return n > 0 ? w : NULL;
}

/* ---- creation ---- */

static int make_world(uint32_t rank, uint32_t num_ranks, double timeout_s, EpWorld **out) {
    if (num_ranks < 1 || num_ranks > EP_MAX_RANKS || rank >= num_ranks)
        return ep_error(EP_EINVAL, "rank %u of %u: a world has 1 to %u ranks, numbered from 0", rank,
                        num_ranks, EP_MAX_RANKS);
    EpWorld *w = (EpWorld *)calloc(1, sizeof *w);
    if (!w) return ep_error(EP_ENOMEM, "cannot allocate a world: this process is out of memory");
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
    if (w->wake_fd < 0) return ep_error(EP_ESYS, "cannot create an event descriptor: %s", strerror(errno));
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL}; /* whose they are, who made them hears */
    sigset_t others, before; /* signals are for the program's own threads */
    sigfillset(&others);
    for (uint32_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&others, faults[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    int e = pthread_create(&w->watchdog, NULL, ep_world_watch_main, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (e) return ep_error(EP_ESYS, "cannot start the watchdog thread: %s", strerror(e));
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
    if (num_ranks == 0) return ep_error(EP_EINVAL, "a world has 1 to %u ranks, not 0", EP_MAX_RANKS);
    for (; made < num_ranks; made++) {
        EP_TRY_GOTO(code, make_world(made, num_ranks, timeout_s, &worlds[made]), fail);
        worlds[made]->is_threads = true;
        for (uint32_t r = 0; r < made; r++) {
            if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) {
                code = ep_error(EP_ESYS, "cannot create a socket pair: %s", strerror(errno));
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
            if (w->inbox[r][i].full && w->inbox[r][i].fd >= 0)
                close(w->inbox[r][i].fd), w->inbox[r][i].fd = -1;
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
    snprintf(why, sizeof why, "%s",
             ep_error_text()); /* a goodbye to a dead peer fails too, and is not the reason */
    if ((code == EP_EMISMATCH || code == EP_EPEER) && !ep_world_check(w))
        return ep_error(code, "%s", why); /* all close again */
    EpFrame goodbye = {.kind = EP_FRAME_GOODBYE, .rank = w->rank};
    bool is_busy = false, on_gpu = false;
    pthread_mutex_lock(&w->lock);
    ep_world_await_record(w);
    w->closing = w->closed = true;
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (w->sockets[r] >= 0) ep_wire_send(w->sockets[r], &goodbye, -1, ep_now_ns());
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++)
        is_busy |= w->watched[i] != NULL, on_gpu |= w->watched[i] && w->watched[i]->on_stream;
    if (w->end_code || (collective && !code)) is_busy = on_gpu = false; /* an end has ended all waits */
    if (is_busy || on_gpu) w->left_ns = ep_now_ns();
    if (atomic_load(&are_settled)) is_busy = false; /* tidy waits for what is on a GPU, in haste */
    pthread_mutex_unlock(&w->lock);
    if (w->has_watchdog) {
        uint64_t one = 1;
        ssize_t written = write(w->wake_fd, &one, sizeof one);
        (void)written; /* an eventfd of a fresh counter takes one write */
    }
    if (!is_busy)
        tidy(
            w); /* else when the last heap lets go of the world: until then the watchdog looks after what is on its way */
    return code ? ep_error(code, "%s", why) : 0;
}

void ep_world_settle_all(void) {
    atomic_store(&are_settled, true);
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *w = listed(i);
        if (w && !ep_world_is_forked(w)) {
            pthread_mutex_lock(&w->lock);
            bool is_busy = w->left_ns != 0;
            w->in_haste = true;
            pthread_mutex_unlock(&w->lock);
            if (is_busy) tidy(w);
        }
        ep_world_release(w);
    }
}

EpWorld *ep_world_retain(EpWorld *w) {
    atomic_fetch_add(&w->num_refs, 1);
    return w;
}

void ep_world_release(EpWorld *w) {
    if (!w || atomic_fetch_sub(&w->num_refs, 1) != 1) return;
    if (ep_world_is_forked(w)) return; /* its memory belongs to the parent's threads; leave it alone */
    char why
        [512]; /* who lets go of what could not be made says what that was, not to whom a goodbye could not be said */
    snprintf(why, sizeof why, "%s", ep_error_text());
    ep_world_close(w, false);
    ep_error(0, "%s", why);
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
uint32_t ep_world_lost_ranks(EpWorld *w) {
    if (ep_world_is_forked(w)) return 0; /* the lock may be held for good */
    pthread_mutex_lock(&w->lock);
    uint32_t lost = w->lost_ranks;
    pthread_mutex_unlock(&w->lock);
    return lost;
}
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
    return code ? ep_error(code,
                           "a world holds at most %u communication buffers: finalize layers or close heaps",
                           EP_MAX_WATCHED)
                : 0;
}

void ep_world_unwatch(EpWorld *w, const EpCommBuffer *buffer) {
    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++)
        if (w->watched[i] == buffer) w->watched[i] = NULL;
    pthread_mutex_unlock(&w->lock);
}
