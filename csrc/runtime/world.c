/* world.c - creates, closes and releases a world. all_gather.c implements the all-gathers between the ranks,
 * watchdog.c reads the sockets in a thread of its own, and world_end.c has the end of a world.
 *
 * Exports: the functions ep_world_* of epmoe.h and world.h, except those of the other three files.
 * Invariant: one socket connects each pair of ranks, and no other process holds its ends (fork.h). So a rank
 * learns of a peer's death at once: the operating system closes the peer's end. */
#include "runtime/world.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "runtime/error.h"
#include "runtime/fork.h"
#include "runtime/interrupt.h"
#include "runtime/thread.h"
#include "runtime/world_state.h"

/* All worlds of the process. A world is removed from the list under the fork lock before it is freed. So the
 * holder of the lock may read every world in the list; and fork() holds it too (fork.h). */
#define MAX_WORLDS 256u
static EpWorld *_Atomic worlds_here[MAX_WORLDS];

/* A forked child has closed all sockets of its parent (fork.c). Their numbers may belong to other files soon,
 * so remove them from its copies of the worlds. */
static void forget_in_child(void) {
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *w = atomic_load(&worlds_here[i]);
        for (uint32_t r = 0; w && r < EP_MAX_RANKS; r++) w->sockets[r] = -1;
        if (w) w->wake_fd = -1;
    }
}
static void register_handler(void) { pthread_atfork(NULL, NULL, forget_in_child); }

static int add_to_list(EpWorld *w) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_handler);
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *empty = NULL;
        if (atomic_compare_exchange_strong(&worlds_here[i], &empty, w)) return 0;
    }
    return ep_error(EP_ENOMEM,
                    "a process holds at most %u open worlds: close some, or let layers and heaps share one "
                    "(World.of)",
                    MAX_WORLDS);
}
static void remove_from_list(EpWorld *w) {
    ep_fork_lock();
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *it = w;
        atomic_compare_exchange_strong(&worlds_here[i], &it, (EpWorld *)NULL);
    }
    ep_fork_unlock();
}
/* The world at index i of the list, with one more reference. NULL if the entry is empty, or if the world has
 * no reference left and is about to be freed. */
static EpWorld *acquire_listed(uint32_t i) {
    ep_fork_lock();
    EpWorld *w = atomic_load(&worlds_here[i]);
    int n = w ? atomic_load(&w->num_refs) : 0;
    while (n > 0 && !atomic_compare_exchange_weak(&w->num_refs, &n, n + 1)) {
    }
    ep_fork_unlock();
    return n > 0 ? w : NULL;
}

/* ---- creation ---- */

/* Whether this process may use as many cores as there are ranks. */
static bool has_cores(uint32_t num_ranks) {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) >= (int)num_ranks;
}

static int make_world(uint32_t rank, uint32_t num_ranks, double timeout_s, EpWorld **out) {
    if (num_ranks < 1 || num_ranks > EP_MAX_RANKS || rank >= num_ranks)
        return ep_error(EP_EINVAL, "rank %u of %u: a world has 1 to %u ranks, numbered from 0", rank,
                        num_ranks, EP_MAX_RANKS);
    EpWorld *w = (EpWorld *)calloc(1, sizeof *w);
    if (!w) return ep_error(EP_ENOMEM, "cannot allocate a world: this process is out of memory");
    w->rank = rank;
    w->num_ranks = num_ranks;
    w->has_cores = has_cores(num_ranks);
    w->pid = getpid();
    w->num_forks = ep_fork_count();
    w->wake_fd = -1;
    w->record.rank = rank;
    w->record.num_ranks = num_ranks;
    w->record.end_text = w->end_text;
    w->stuck.num_ranks = num_ranks;
    w->record.buffers = w->watched;
    w->record.num_buffers = EP_MAX_WATCHED;
    const char *folder = getenv("EPMOE_FLIGHT_RECORD");
    if (folder && *folder) w->record_folder = strdup(folder);
    atomic_init(&w->num_refs, 1);
    for (uint32_t r = 0; r < EP_MAX_RANKS; r++) w->sockets[r] = -1;
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_t attributes; /* deadlines are times of the monotonic clock */
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    int code = ep_world_set_timeout(w, timeout_s);
    if (!code) code = add_to_list(w);
    if (code) ep_world_release(w);
    else *out = w;
    return code;
}

static int start_watchdog(EpWorld *w) {
    ep_fork_lock();
    w->wake_fd = ep_fork_guard(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    ep_fork_unlock();
    if (w->wake_fd < 0) return ep_error(EP_ESYS, "cannot create an event descriptor: %s", strerror(errno));
    int e = ep_thread_start(&w->watchdog, ep_world_watch_main, w, "epmoe watchdog");
    if (e) return ep_error(EP_ESYS, "cannot start the watchdog thread: %s", strerror(e));
    w->has_watchdog = true;
    return 0;
}

int ep_world_create(const EpWorldConfig *config, EpWorld **out) {
    EpWorld *w = NULL;
    int code = make_world(config->rank, config->num_ranks, config->timeout_s, &w);
    uint64_t limit = code ? 0 : atomic_load(&w->timeout_ns);
    /* At most 30 s: the ranks have exchanged their socket names, so all of them are here. Connecting is
     * either quick or fails for good. */
    if (limit > 30000000000ull) limit = 30000000000ull;
    if (!code) code = ep_wire_connect(config, w->sockets, ep_now_ns() + limit);
    ep_world_unlisten(config->listen_fd);
    if (!code) code = start_watchdog(w);
    if (code && w) ep_world_release(w);
    else if (!code) *out = w;
    return code;
}

/* A pair of connected sockets. Returns 0, or -1 and errno. */
static int open_pair(int pair[2]) {
    ep_fork_lock();
    int e = socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair);
    for (uint32_t i = 0; i < 2 && !e; i++) pair[i] = ep_fork_guard(pair[i]);
    ep_fork_unlock();
    if (e || (pair[0] >= 0 && pair[1] >= 0)) return e;
    for (uint32_t i = 0; i < 2; i++) ep_fork_close(pair[i]);
    errno = ENOMEM;
    return -1;
}

int ep_world_create_threads(uint32_t num_ranks, double timeout_s, EpWorld *worlds[]) {
    int code = 0, pair[2];
    uint32_t made = 0;
    if (num_ranks == 0) return ep_error(EP_EINVAL, "a world has 1 to %u ranks, not 0", EP_MAX_RANKS);
    for (; made < num_ranks; made++) {
        EP_TRY_GOTO(code, make_world(made, num_ranks, timeout_s, &worlds[made]), fail);
        worlds[made]->is_threads = true;
        for (uint32_t r = 0; r < made; r++) {
            if (open_pair(pair)) {
                code = ep_error(EP_ESYS, "cannot create a socket pair: %s", strerror(errno));
                made++;
                goto fail;
            }
            worlds[made]->sockets[r] = pair[0];
            worlds[r]->sockets[made] = pair[1];
        }
    }
    for (uint32_t r = 0; r < num_ranks; r++) EP_TRY_GOTO(code, start_watchdog(worlds[r]), fail);
    return 0;
fail:
    for (uint32_t r = 0; r < made; r++) ep_world_release(worlds[r]);
    return code;
}

/* ---- end ---- */

/* True after ep_world_settle_all: the process is about to end. From then on, ep_world_close joins the
 * watchdog thread in any case. */
static atomic_bool is_process_ending;

/* Join the watchdog thread and close all descriptors of the world. Of several threads, the first one does
 * it. */
static void join_and_close(EpWorld *w) {
    pthread_mutex_lock(&w->lock);
    const bool is_first = !w->is_settled;
    w->is_settled = true;
    pthread_mutex_unlock(&w->lock);
    if (!is_first) return;
    if (w->has_watchdog) pthread_join(w->watchdog, NULL);
    pthread_mutex_lock(&w->lock); /* another thread may be in an all-gather, which reads the sockets */
    for (uint32_t r = 0; r < w->num_ranks; r++) {
        ep_fork_close(w->sockets[r]);
        w->sockets[r] = -1;
        for (uint32_t i = 0; i < EP_NUM_INBOX; i++)
            if (w->inbox[r][i].full && w->inbox[r][i].fd >= 0) {
                close(w->inbox[r][i].fd);
                w->inbox[r][i].fd = -1;
            }
    }
    pthread_mutex_unlock(&w->lock);
    ep_fork_close(w->wake_fd);
    w->wake_fd = -1;
}

static bool is_closed(EpWorld *w) {
    pthread_mutex_lock(&w->lock);
    const bool yes = w->closed;
    pthread_mutex_unlock(&w->lock);
    return yes;
}
/* Closed by another thread while nothing was wrong: a close that failed for this reason has not failed. */
static bool is_closed_in_order(EpWorld *w) {
    pthread_mutex_lock(&w->lock);
    const bool yes = w->closed && !w->end_code;
    pthread_mutex_unlock(&w->lock);
    return yes;
}

/* Leave the world, unless another thread has done it. have_agreed: all ranks are about to leave. */
static void leave(EpWorld *w, bool have_agreed) {
    EpFrame goodbye = {.kind = EP_FRAME_GOODBYE, .rank = w->rank};
    bool is_busy = false, on_gpu = false;
    pthread_mutex_lock(&w->lock);
    ep_world_await_record(w);
    if (w->closed) {
        pthread_mutex_unlock(&w->lock);
        return;
    }
    w->closing = true;
    w->closed = true;
    for (uint32_t r = 0; r < w->num_ranks; r++)
        if (w->sockets[r] >= 0) ep_wire_send(w->sockets[r], &goodbye, -1, ep_now_ns());
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++) {
        is_busy |= w->watched[i] != NULL;
        on_gpu |= w->watched[i] && w->watched[i]->on_stream;
    }
    /* No wait is left if the world has ended, or if all ranks have agreed to close it. */
    if (w->end_code || have_agreed) is_busy = on_gpu = false;
    if (is_busy || on_gpu) w->left_ns = ep_now_ns();
    /* In a process that is about to end, join the watchdog thread below. Before that thread ends, it waits
     * at most HASTE_NS (watchdog.c) for operations that are still in flight, for example on a GPU. */
    if (atomic_load(&is_process_ending)) is_busy = false;
    if (w->has_watchdog) { /* with the lock: ep_world_settle_all closes the descriptor once left_ns is set */
        uint64_t one = 1;
        ssize_t written = write(w->wake_fd, &one, sizeof one);
        (void)written; /* cannot fail: the counter of the eventfd is 0, so one write fits */
    }
    pthread_mutex_unlock(&w->lock);
    /* If operations are in flight, ep_world_release joins the watchdog thread, after the last heap has
     * released the world. Until then the thread can still end their waits. */
    if (!is_busy) {
        join_and_close(w);
        remove_from_list(w); /* it has no descriptors left, so it does not count */
    }
}

/* The collective part of a close, in a call of ep_world_enter_call. */
static int close_together(EpWorld *w) {
    unsigned char mine = 0, all[EP_MAX_RANKS];
    char why[256];
    if (is_closed(w)) return 0; /* by another thread, while this one waited to enter the call */
    int code = ep_world_all_gather(w, &mine, 1, all);
    /* Keep the text: sending the goodbye to a dead peer also fails, and would overwrite the reason. */
    snprintf(why, sizeof why, "%s", ep_error_text());
    if (code && is_closed_in_order(w)) return 0; /* another thread has left alone meanwhile */
    /* A rank was in another collective call. The world is intact, and all ranks must close it again. */
    const bool is_intact = (code == EP_EMISMATCH || code == EP_EPEER) && !ep_world_check(w);
    if (!is_intact) leave(w, !code);
    return code ? ep_error(code, "%s", why) : 0;
}

int ep_world_close(EpWorld *w, bool collective) {
    uint64_t record;
    if (ep_world_is_forked(w)) return 0;       /* the sockets and the watchdog thread belong to the parent */
    ep_run_deferred_frees(&w->deferred_frees); /* while the watchdog thread can still end their waits */
    if (is_closed(w)) return 0;
    if (!collective) {
        char why[256];
        snprintf(why, sizeof why, "%s", ep_error_text());
        leave(w, false);
        ep_error(0, "%s", why);
        return 0;
    }
    const int code = ep_world_enter_call(w, &(EpCallRecord){.what = EP_CALL_CLOSE}, &record);
    if (code) {
        char why[256];
        snprintf(why, sizeof why, "%s", ep_error_text());
        if (is_closed_in_order(w)) return 0;
        if (code != EP_EINVAL && ep_world_check(w)) leave(w, false); /* the world has ended */
        return ep_error(code, "%s", why);
    }
    /* The call lasts until this rank has left, so that no other thread begins to close meanwhile. */
    const int closed = close_together(w);
    ep_world_leave_call(w, record, closed);
    return closed;
}

void ep_world_settle_all(void) {
    atomic_store(&is_process_ending, true);
    for (uint32_t i = 0; i < MAX_WORLDS; i++) {
        EpWorld *w = acquire_listed(i);
        if (w && !ep_world_is_forked(w)) {
            pthread_mutex_lock(&w->lock);
            bool is_busy = w->left_ns != 0;
            w->in_haste = true;
            pthread_mutex_unlock(&w->lock);
            if (is_busy) join_and_close(w);
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
    if (ep_world_is_forked(w)) return; /* a forked child leaves the parent's object alone */
    /* A creation that failed releases what it had made. Keep its error text: closing may fail as well, for
     * example while sending a goodbye, and would overwrite the text. */
    char why[512];
    snprintf(why, sizeof why, "%s", ep_error_text());
    ep_world_close(w, false);
    ep_error(0, "%s", why);
    join_and_close(w);
    remove_from_list(w);
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

/* ---- locks ---- */

enum { LOCK_STEP_NS = 10000000 }; /* a wait for a lock asks after each step whether it is interrupted */

/* Lock within a step: 0, or ETIMEDOUT. */
static int lock_for_a_step(pthread_mutex_t *lock) {
#ifdef __SANITIZE_THREAD__ /* it does not know pthread_mutex_clocklock */
    const clockid_t clock = CLOCK_REALTIME;
#else
    const clockid_t clock = CLOCK_MONOTONIC;
#endif
    struct timespec until;
    clock_gettime(clock, &until);
    until.tv_sec += (until.tv_nsec + LOCK_STEP_NS) / 1000000000;
    until.tv_nsec = (until.tv_nsec + LOCK_STEP_NS) % 1000000000;
#ifdef __SANITIZE_THREAD__
    return pthread_mutex_timedlock(lock, &until);
#else
    return pthread_mutex_clocklock(lock, clock, &until);
#endif
}

int ep_world_lock(EpWorld *w, pthread_mutex_t *lock) {
    /* Before the wait: in a forked process nothing may release the lock, and a signal handler would wait for
     * the thread that it runs in. */
    EP_TRY(ep_world_check_caller(w));
    if (!pthread_mutex_trylock(lock)) return 0;
    for (;;) {
        if (!lock_for_a_step(lock)) return 0;
        if (ep_interrupted()) return ep_take_interrupt(), ep_world_interrupt(w);
    }
}

/* ---- numbers and settings ---- */

uint16_t ep_world_number_heap(EpWorld *w) { return (uint16_t)atomic_fetch_add(&w->num_heaps, 1); }
uint16_t ep_world_number_layer(EpWorld *w) { return (uint16_t)atomic_fetch_add(&w->num_layers, 1); }

uint32_t ep_world_rank(const EpWorld *w) { return w->rank; }
uint32_t ep_world_size(const EpWorld *w) { return w->num_ranks; }
bool ep_world_is_threads(const EpWorld *w) { return w->is_threads; }
uint32_t ep_world_lost_ranks(EpWorld *w) {
    if (ep_world_is_forked(w)) return 0; /* the lock may have been held during the fork, and stays locked */
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

EpDeferredFrees *ep_world_deferred_frees(EpWorld *w) { return &w->deferred_frees; }

bool ep_world_at_release(EpWorld *w, void (*action)(void *), void *argument) {
    EpAction *a = (EpAction *)malloc(sizeof *a);
    if (!a) return false;
    a->action = action;
    a->argument = argument;
    pthread_mutex_lock(&w->lock);
    a->next = w->at_release;
    w->at_release = a;
    pthread_mutex_unlock(&w->lock);
    return true;
}

int ep_world_watch(EpWorld *w, const EpCommBuffer *buffer) {
    int code = EP_ENOMEM;
    pthread_mutex_lock(&w->lock);
    if (w->end_code) ep_st_relaxed_sys_u64(&buffer->comm.host->abort, 1);
    for (uint32_t i = 0; i < EP_MAX_WATCHED && code; i++)
        if (!w->watched[i]) {
            w->watched[i] = buffer;
            code = 0;
        }
    pthread_mutex_unlock(&w->lock);
    return code
               ? ep_error(code,
                          "a world holds at most %u communication buffers, one for each heap and num_buffers "
                          "for each layer: let modules share a layer (layer=) or layers share a heap "
                          "(heap=), finalize layers or close heaps",
                          EP_MAX_WATCHED)
               : 0;
}

uint32_t ep_world_free_buffers(EpWorld *w) {
    uint32_t num_free = 0;
    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++) num_free += w->watched[i] == NULL;
    pthread_mutex_unlock(&w->lock);
    return num_free;
}

void ep_world_unwatch(EpWorld *w, const EpCommBuffer *buffer) {
    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < EP_MAX_WATCHED; i++)
        if (w->watched[i] == buffer) w->watched[i] = NULL;
    pthread_mutex_unlock(&w->lock);
}
