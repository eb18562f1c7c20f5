/* test_alone.c - events on one rank: an allocation fails, a rank leaves during a barrier, or a wait for a
 * signal times out. Also the callbacks that a world runs when its last reference is released. */
#include "backend.h"
#include "harness.h"
#include "protocol/port.h"
#include "runtime/world.h"

/* If a memory mapping fails on rank 1, the call fails on all ranks, and the next call works. */
static bool alloc_fails_body(Rank *me, void *arg) {
    EpHeapStats before, after;
    EpHeap *heap = NULL;
    EpLayer *layer = NULL;
    (void)arg;
    ep_heap_stats(me->heap, &before);
    for (uint32_t i = 1; i <= me->setup->config.num_buffers; i++) {
        if (me->rank == 1) test_fail_mmap(i);
        CHECK_CODE(me, EP_ENOMEM, ep_layer_create(me->heap, &me->setup->config, &layer));
        CHECK(me, me->rank == 1 || strstr(ep_error_text(), "rank 1 could not make its layer"));
        ep_heap_stats(me->heap, &after);
        CHECK(me, after.used_bytes == before.used_bytes && after.num_allocations == before.num_allocations);
    }
    /* Mapping 1 is the memory of the heap. Mapping 2 has the words that the kernels share with the host. */
    for (uint32_t i = 1; i <= 2; i++) {
        if (me->rank == 1) test_fail_mmap(i);
        CHECK_CODE(me, EP_ENOMEM, ep_heap_create(me->world, EP_CPU, 0, 6000, 0, &heap));
        CHECK(me, me->rank == 1 || strstr(ep_error_text(),
                                          i == 1 ? "rank 1: cannot map" : "rank 1 could not make its heap"));
    }
    CHECK_CODE(me, 0, ep_heap_create(me->world, EP_CPU, 0, 6000, 0, &heap));
    CHECK_CODE(me, 0, ep_heap_barrier(heap, NULL));
    CHECK_CODE(me, 0, ep_heap_close(heap));
    ep_heap_release(heap);
    CHECK_CODE(me, 0, ep_layer_create(me->heap, &me->setup->config, &layer));
    CHECK_CODE(me, 0, ep_layer_barrier(layer, 1, NULL));
    CHECK_CODE(me, 0, ep_layer_close(layer));
    ep_layer_release(layer);
    return true;
}
bool test_alloc_fails_on_one_rank(void) {
    Setup setup = {.num_ranks = 3, .config = small_config(3), .own_layer = true};
    setup.config.num_buffers = 3;
    return run_team(&setup, alloc_fails_body, NULL);
}

/* Each rank closes its world while one of its threads waits in a barrier, which no other rank enters. The
 * barrier ends long before its timeout. */
typedef struct {
    EpLayer *layer;
    uint32_t buffer;
    int code;
} BarrierCall;
static void *barrier_main(void *arg) {
    BarrierCall *call = (BarrierCall *)arg;
    call->code = ep_layer_barrier(call->layer, call->buffer, NULL);
    return NULL;
}
static bool close_during_barrier_body(Rank *me, void *arg) {
    BarrierCall call = {me->layer, me->rank, 0};
    pthread_t thread;
    (void)arg;
    CHECK_CODE(me, 0, ep_layer_barrier(me->layer, 0, NULL));
    if (pthread_create(&thread, NULL, barrier_main, &call)) abort();
    usleep(20000);
    double begin = seconds_now();
    CHECK_CODE(me, 0, ep_world_close(me->world, false));
    CHECK(me, is_within(begin, 1));
    pthread_join(thread, NULL);
    CHECK(me, call.code == EP_ECLOSED && is_within(begin, 4));
    return true;
}
bool test_close_during_barrier(void) {
    Setup setup = {.num_ranks = 2, .config = small_config(2), .world_ends = true};
    setup.config.num_buffers = 2;
    return run_team(&setup, close_during_barrier_body, NULL);
}

/* The error of a world that ends soon, or 0 if it does not end. */
static int end_of(EpWorld *world) {
    int code = 0;
    for (double begin = seconds_now(); !code && is_within(begin, 5); usleep(5000))
        code = ep_world_check(world);
    return code;
}
/* A GPU waits for a signal until the timeout. Only the watchdog thread sees the fault record. Any rank may
 * signal any word, so neither the error nor the flight record blames a rank. */
bool test_unsent_signal_on_gpu(void) {
    EpWorld *w[2];
    EpHostWords words;
    EpCommBuffer b = {.on_stream = true, .is_heaps = true};
    char page[EP_PAGE_BYTES];
    memset(&words, 0, sizeof words);
    b.comm.host = &words;
    b.comm.shape.num_ranks = 2;
    CHECK_CODE(NULL, 0, ep_world_create_threads(2, long_timeout_s, w));
    CHECK_CODE(NULL, 0, ep_world_watch(w[1], &b));
    const EpCallRecord wait = {.what = EP_CALL_WAIT, .on_stream = true};
    ep_world_end_call(w[1], ep_world_begin_call(w[1], &wait), 0);
    words.fault =
        (EpFaultRecord){.code = EP_ETIMEOUT, .peer = 1, .word = EP_WORD_SIGNAL, .want = 7, .got = 3};
    ep_st_release_sys_u64(&words.fault.state, 1);
    for (uint32_t r = 0; r < 2; r++) {
        CHECK_CODE(NULL, EP_ETIMEOUT, end_of(w[r]));
        CHECK(NULL, strstr(ep_error_text(), "rank 1 timed out: no rank signalled the word on which it waits "
                                            "(expected value 7, found 3)"));
        CHECK_CODE(NULL, 0, ep_world_flight_record(w[r], page));
        CHECK(NULL,
              strstr(page, "culprit: the rank that had to signal rank 1, whose wait timed out\n") == page);
        CHECK(NULL, !strstr(page, "a wait for rank"));
        CHECK(NULL, r == 0 || strstr(page, "heap 0: a wait for a signal wanted 7 and saw 3\n"));
    }
    ep_world_unwatch(w[1], &b);
    for (uint32_t r = 0; r < 2; r++) ep_world_release(w[r]);
    return true;
}

static char letters[8];
static void append_letter(void *letter) { strncat(letters, (const char *)letter, 1); }
/* A world runs its callbacks when its last reference is released, the newest callback first. */
bool test_world_release_callbacks(void) {
    EpWorld *w[1];
    letters[0] = 0;
    CHECK_CODE(NULL, 0, ep_world_create_threads(1, 1, w));
    CHECK(NULL,
          ep_world_at_release(w[0], append_letter, "a") && ep_world_at_release(w[0], append_letter, "b"));
    CHECK_CODE(NULL, 0, ep_world_close(ep_world_retain(w[0]), true));
    ep_world_release(w[0]);
    CHECK(NULL, !letters[0]);
    ep_world_release(w[0]);
    CHECK(NULL, strcmp(letters, "ba") == 0);
    return true;
}
