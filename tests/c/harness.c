/* harness.c - random numbers, random delays, and ranks as threads (see harness.h). */
#include "harness.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

uint64_t test_seed = 1;
double long_timeout_s = 120;
double short_timeout_s = HAVE_TSAN ? 0.8 : 0.5;
uint32_t test_scale = 100;
static atomic_uint num_reported;

double seconds_now(void) { return (double)ep_now_ns() * 1e-9; }

/* The result is the larger of two ratios. The first is elapsed time over CPU time of some work of this
 * thread; it measures the present load. The second is the load average of the last minute per core; it
 * includes load that has just ended. */
double slowness(void) {
    struct timespec t;
    double begin = seconds_now();
    double first = -1;
    double used = 0;
    double load = 0;
    while (used < 0.02) {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        if (first < 0) first = (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
        used = (double)t.tv_sec + (double)t.tv_nsec * 1e-9 - first;
    }
    double ratio = (seconds_now() - begin) / used;
    if (getloadavg(&load, 1) == 1) load /= (double)sysconf(_SC_NPROCESSORS_ONLN);
    if (load > ratio) ratio = load;
    return ratio > 1 ? ratio : 1;
}
bool is_within(double begin, double limit_s) {
    double seconds = seconds_now() - begin;
    return seconds < limit_s || seconds < limit_s * slowness();
}

uint64_t rng_next(Rng *rng) {
    uint64_t z = rng->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
uint32_t rng_below(Rng *rng, uint32_t n) { return n ? (uint32_t)(rng_next(rng) >> 33) % n : 0; }

EpLayerConfig small_config(uint32_t num_ranks) {
    EpLayerConfig config = {
        .shape = {num_ranks, 2 * num_ranks, 3, 16, 16, EP_F32, EP_COMBINE_SCATTER, num_ranks * 16 * 3},
        .num_buffers = 1,
        .num_sm = 2,
    };
    return config;
}
uint32_t scaled(uint32_t steps) { return steps * test_scale / 100 ? steps * test_scale / 100 : 1; }

/* ---- chaos ---- */

static _Atomic uint32_t slow_rank;
#ifdef EP_CHAOS
static _Thread_local uint32_t chaos_rank = EP_MAX_RANKS;
static _Thread_local Rng chaos_rng;

/* Most calls return at once, some yield the core, few sleep. Every thread has one point at which it sleeps
 * more often, and one rank of a team often sleeps at point 1. The atomics are relaxed, because the delays
 * must not order memory accesses that the protocol does not order. */
void ep_chaos(uint32_t point) {
    static _Atomic uint64_t num_threads;
    if (chaos_rng.state == 0)
        chaos_rng.state =
            test_seed * 1000003 + atomic_fetch_add_explicit(&num_threads, 1, memory_order_relaxed) * 7919 + 1;
    uint64_t x = rng_next(&chaos_rng);
    useconds_t sleep_us = (useconds_t)(x >> 40) % 200;
    uint32_t is_slow_rank =
        chaos_rank == atomic_load_explicit(&slow_rank, memory_order_relaxed) && point == 1;
    uint32_t is_slow_point = (uint32_t)(chaos_rng.state >> 61) == point;
    if (x % 256 == 0 || (x % 3 == 0 && is_slow_rank) || (x % 16 == 0 && is_slow_point)) usleep(sleep_us);
    else if (x % 8 == 0) sched_yield();
}
static void chaos_begin(uint32_t rank) { chaos_rank = rank; }
#else
static void chaos_begin(uint32_t rank) { (void)rank; }
#endif

/* cpu.c calls this function instead of pthread_create: run_c_tests.py defines a macro. One call of eleven
 * fails, and the operation must work without that thread. */
int test_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg);
int test_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg) {
    static _Atomic uint32_t num_calls;
    if (atomic_fetch_add_explicit(&num_calls, 1, memory_order_relaxed) % 11 == 10) return EAGAIN;
    return pthread_create(thread, attr, start, arg);
}

/* cpu.c calls this function instead of mmap. See test_fail_mmap. */
static _Thread_local uint32_t mmaps_left;
void test_fail_mmap(uint32_t n) { mmaps_left = n; }
void *test_mmap(void *at, size_t num_bytes, int protection, int flags, int fd, off_t off);
void *test_mmap(void *at, size_t num_bytes, int protection, int flags, int fd, off_t off) {
    if (fd < 0 && mmaps_left && --mmaps_left == 0) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return mmap(at, num_bytes, protection, flags, fd, off);
}

/* cpu.c calls this function instead of posix_fallocate. On some Linux kernels any signal interrupts the
 * allocation and discards its progress. A program with a timer then never gets a heap, unless the caller
 * blocks all signals. */
int test_posix_fallocate(int fd, off_t off, off_t num_bytes);
int test_posix_fallocate(int fd, off_t off, off_t num_bytes) {
    static const int signals[] = {SIGALRM, SIGINT, SIGUSR1, SIGCHLD};
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        if (!sigismember(&blocked, signals[i])) return EINTR;
    return posix_fallocate(fd, off, num_bytes);
}

/* socket.c calls this function instead of geteuid. */
static _Thread_local bool is_another_user;
void test_be_another_user(void) { is_another_user = true; }
uid_t test_geteuid(void);
uid_t test_geteuid(void) { return geteuid() + is_another_user; }

/* ---- ranks ---- */

static const char *code_name(int code) {
    switch (code) {
    case EP_OK: return "EP_OK";
#define X(name, value, exception, text) \
    case name: return #name;
        EP_ERRORS(X)
#undef X
    default: return "an unknown code";
    }
}

bool report_failure(Rank *me, const char *file, int line, const char *what, int got, int want) {
    const char *slash = strrchr(file, '/');
    if (atomic_fetch_add(&num_reported, 1) < 12) {
        fprintf(stderr, "FAILED %s:%d rank %u: %s", slash ? slash + 1 : file, line, me ? me->rank : 0, what);
        if (got != want)
            fprintf(stderr, ": got %s, expected %s (%s)", code_name(got), code_name(want), ep_error_text());
        fprintf(stderr, "\n");
    }
    if (me && me->world) ep_world_abort(me->world, EP_ESYS, me->rank, "a check of the test failed");
    return false;
}

bool open_heap_and_layer(Rank *me) {
    uint64_t layer_bytes = 0;
    const EpLayerConfig *config = &me->setup->config;
    if (config->num_buffers) CHECK_CODE(me, 0, ep_layer_check_config(config, &layer_bytes));
    CHECK_CODE(
        me, 0,
        ep_heap_create(me->world, EP_CPU, 0, layer_bytes + me->setup->heap_bytes + 4096, 0, &me->heap));
    if (config->num_buffers && !me->setup->own_layer)
        CHECK_CODE(me, 0, ep_layer_create(me->heap, config, &me->layer));
    return true;
}

bool close_together(Rank *me) {
    if (me->layer) CHECK_CODE(me, 0, ep_layer_close(me->layer));
    if (me->heap) CHECK_CODE(me, 0, ep_heap_close(me->heap));
    CHECK_CODE(me, 0, ep_world_close(me->world, true));
    return true;
}

int alloc_heap(Rank *me, uint64_t num_bytes, uint64_t *off) {
    return ep_heap_alloc(me->heap, num_bytes, 64, 0, off);
}

static void *rank_main(void *arg) {
    Rank *me = (Rank *)arg;
    chaos_begin(me->rank);
    me->ok =
        open_heap_and_layer(me) && me->body(me, me->arg) && (me->setup->world_ends || close_together(me));
    return NULL;
}

bool run_team(const Setup *setup, Body *body, void *arg) {
    Rank ranks[EP_MAX_RANKS];
    EpWorld *worlds[EP_MAX_RANKS];
    static uint32_t num_teams;
    bool ok = true;
    memset(ranks, 0, sizeof ranks);
    atomic_store(&slow_rank, num_teams++ % (setup->num_ranks + 1));
    CHECK_CODE(NULL, 0,
               ep_world_create_threads(setup->num_ranks,
                                       setup->timeout_s > 0 ? setup->timeout_s : long_timeout_s, worlds));
    for (uint32_t r = 0; r < setup->num_ranks; r++) {
        Rank *me = &ranks[r];
        me->setup = setup;
        me->rank = r;
        me->world = worlds[r];
        me->body = body;
        me->arg = arg;
    }
    for (uint32_t r = 0; r < setup->num_ranks; r++)
        if (pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r])) abort();
    for (uint32_t r = 0; r < setup->num_ranks; r++) pthread_join(ranks[r].thread, NULL);
    for (uint32_t r = 0; r < setup->num_ranks; r++) {
        ok = ok && ranks[r].ok;
        ep_layer_release(ranks[r].layer);
        ep_heap_release(ranks[r].heap);
        ep_world_release(worlds[r]);
    }
    return ok;
}
