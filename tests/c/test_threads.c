/* test_threads.c - several threads of a rank: in operations and in collective calls, and at a close. */
#include "harness.h"

enum { MAX_CALLS = 200 };
typedef struct {
    Rank *me;
    const Case *c;
    uint32_t num;
    atomic_uint num_done; /* steps, or allocations that succeeded */
    uint64_t num_bytes;
    bool ok;
} Worker;

static void start(pthread_t *thread, void *(*main)(void *), Worker *w) {
    if (pthread_create(thread, NULL, main, w)) abort();
}

/* What each rank has seen. The ranks write it before an all-gather and compare it after the all-gather. */
static uint64_t seen[EP_MAX_RANKS][MAX_CALLS];
static bool all_have_seen_the_same(Rank *me, uint32_t num) {
    unsigned char mine = 0, all[EP_MAX_RANKS];
    CHECK_CODE(me, 0, ep_world_all_gather(me->world, &mine, 1, all));
    for (uint32_t i = 0; i < num; i++) CHECK(me, seen[me->rank][i] == seen[0][i]);
    CHECK_CODE(me, 0, ep_world_all_gather(me->world, &mine, 1, all));
    return true;
}

static void *steps_main(void *arg) {
    Worker *w = (Worker *)arg;
    w->ok = true;
    for (uint32_t i = 0; i < w->num && w->ok; i++) {
        w->ok = run_step(w->me, w->c, 0);
        atomic_fetch_add(&w->num_done, 1);
    }
    return NULL;
}

/* One thread dispatches and combines, the other allocates. Both do the same on all ranks. */
static bool calls_body(Rank *me, void *arg) {
    Worker w = {.me = me, .c = (const Case *)arg, .num = scaled(100)};
    const uint32_t num = scaled(100) < MAX_CALLS ? scaled(100) : MAX_CALLS;
    pthread_t thread;
    start(&thread, steps_main, &w);
    bool ok = true;
    for (uint32_t i = 0; i < num && ok; i++) {
        uint64_t *off = &seen[me->rank][i];
        ok = alloc_heap(me, 64, off) == 0 && (i % 3 == 0 || ep_heap_free(me->heap, *off) == 0);
        if (!ok) report_failure(me, __FILE__, __LINE__, ep_error_text(), 0, 0);
    }
    pthread_join(thread, NULL);
    return ok && w.ok && all_have_seen_the_same(me, num);
}
bool test_calls_beside_operations(void) {
    for (uint32_t num_ranks = 2; num_ranks <= 3; num_ranks++) {
        Setup setup = {.num_ranks = num_ranks, .config = small_config(num_ranks), .heap_bytes = 1 << 18};
        TRY(with_cases_of(&setup, calls_body, 1));
    }
    return true;
}

static void *alloc_main(void *arg) {
    Worker *w = (Worker *)arg;
    w->ok = true;
    for (uint32_t i = 0; i < w->num && w->ok; i++) {
        uint64_t off;
        const int code = alloc_heap(w->me, w->num_bytes, &off);
        atomic_fetch_add(&w->num_done, code == 0);
        w->ok = code == 0 || code == EP_EMISMATCH;
        if (!w->ok) report_failure(w->me, __FILE__, __LINE__, ep_error_text(), code, 0);
    }
    return NULL;
}

/* Two threads allocate, in an order that is another on each rank. So some allocations of different sizes
 * meet. Each is made by all ranks or by none. */
static bool unordered_body(Rank *me, void *arg) {
    Worker w[2] = {{.me = me, .num = scaled(50), .num_bytes = 100},
                   {.me = me, .num = scaled(50), .num_bytes = 1000}};
    EpHeapStats stats;
    pthread_t threads[2];
    (void)arg;
    for (uint32_t i = 0; i < 2; i++) start(&threads[i], alloc_main, &w[i]);
    for (uint32_t i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    TRY(w[0].ok && w[1].ok);
    ep_heap_stats(me->heap, &stats);
    seen[me->rank][0] = w[0].num_done;
    seen[me->rank][1] = w[1].num_done;
    seen[me->rank][2] = stats.used_bytes;
    seen[me->rank][3] = stats.largest_free_bytes;
    return all_have_seen_the_same(me, 4);
}
bool test_unordered_calls_of_threads(void) {
    for (uint32_t num_ranks = 2; num_ranks <= 3; num_ranks++) {
        Setup setup = {.num_ranks = num_ranks, .heap_bytes = 1 << 20};
        TRY(run_team(&setup, unordered_body, NULL));
    }
    return true;
}

/* A rank closes the layer while its other thread still has steps to run. The memory that this frees is
 * overwritten at once. The last rank comes to the close after its steps. */
static bool close_body(Rank *me, void *arg) {
    for (uint32_t i = 0; i < scaled(10) + 1; i++) {
        Worker w = {.me = me, .c = (const Case *)arg + i % 2, .num = 3};
        EpHeapStats stats;
        pthread_t thread;
        uint64_t off;
        void *at;
        CHECK_CODE(me, 0, ep_layer_create(me->heap, &me->setup->config, &me->layer));
        start(&thread, steps_main, &w);
        if (me->rank + 1 == me->setup->num_ranks) pthread_join(thread, NULL);
        int code = ep_layer_close(me->layer);
        ep_heap_stats(me->heap, &stats);
        if (!code) code = alloc_heap(me, stats.largest_free_bytes, &off);
        if (!code) code = ep_heap_translate(me->heap, off, me->rank, &at);
        if (!code) memset(at, 0xee, stats.largest_free_bytes);
        if (me->rank + 1 < me->setup->num_ranks) pthread_join(thread, NULL);
        CHECK_CODE(me, 0, code);
        TRY(w.ok);
        CHECK_CODE(me, EP_ECLOSED, ep_layer_barrier(me->layer, 0, NULL));
        CHECK_CODE(me, 0, ep_layer_close(me->layer));
        CHECK_CODE(me, 0, ep_heap_free(me->heap, off));
        ep_layer_release(me->layer);
        me->layer = NULL;
    }
    return true;
}
bool test_close_beside_operations(void) {
    Setup setup = {.num_ranks = 3, .config = small_config(3), .own_layer = true};
    return with_cases_of(&setup, close_body, 2);
}
