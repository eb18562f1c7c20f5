/* test_alone.c - one rank alone fails or leaves, and how the others take it: missing memory, leaving
 * early, and what a world does after its last reference is gone. */
#include "backend.h"
#include "harness.h"
#include "runtime/world.h"

/* A failure on rank 1 alone fails on all ranks, and the next attempt works. */
static bool no_memory_body(Rank *me, void *arg) {
    EpHeapStats before, after;
    EpHeap *heap = NULL;
    EpLayer *layer = NULL;
    (void)arg;
    ep_heap_stats(me->heap, &before);
    for (uint32_t i = 1; i <= me->setup->config.num_buffers; i++) {
        if (me->rank == 1) test_fail_mmap(i);
        WANT(me, EP_ENOMEM, ep_layer_create(me->heap, &me->setup->config, &layer));
        CHECK(me, me->rank == 1 || strstr(ep_error_text(), "rank 1 could not make its layer"));
        ep_heap_stats(me->heap, &after);
        CHECK(me, after.used_bytes == before.used_bytes && after.num_allocations == before.num_allocations);
    }
    for (uint32_t i = 1; i <= 2;
         i++) { /* the heap's memory, and the words that its kernels share with the host */
        if (me->rank == 1) test_fail_mmap(i);
        WANT(me, EP_ENOMEM, ep_heap_create(me->world, EP_CPU, 0, 6000, 0, &heap));
        CHECK(me, me->rank == 1 || strstr(ep_error_text(),
                                          i == 1 ? "rank 1: cannot map" : "rank 1 could not make its heap"));
    }
    WANT(me, 0, ep_heap_create(me->world, EP_CPU, 0, 6000, 0, &heap));
    WANT(me, 0, ep_heap_barrier(heap, NULL));
    WANT(me, 0, ep_heap_close(heap));
    ep_heap_release(heap);
    WANT(me, 0, ep_layer_create(me->heap, &me->setup->config, &layer));
    WANT(me, 0, ep_layer_barrier(layer, 1, NULL));
    WANT(me, 0, ep_layer_close(layer));
    ep_layer_release(layer);
    return true;
}
bool test_no_memory(void) {
    Setup setup = {.num_ranks = 3, .config = small_config(3), .own_layer = true};
    setup.config.num_buffers = 3;
    return run_team(&setup, no_memory_body, NULL);
}

/* Each rank leaves by itself while its barrier waits for peers that never join. The barrier ends long before
 * its timeout. */
typedef struct {
    EpLayer *layer;
    uint32_t buffer;
    int code;
} Waiting;
static void *wait_main(void *arg) {
    Waiting *w = (Waiting *)arg;
    w->code = ep_layer_barrier(w->layer, w->buffer, NULL);
    return NULL;
}
static bool leave_body(Rank *me, void *arg) {
    Waiting waiting = {me->layer, me->rank, 0};
    pthread_t thread;
    (void)arg;
    WANT(me, 0, ep_layer_barrier(me->layer, 0, NULL));
    if (pthread_create(&thread, NULL, wait_main, &waiting)) abort();
    usleep(20000);
    double begin = seconds_now();
    WANT(me, 0, ep_world_close(me->world, false));
    CHECK(me, is_soon(begin, 1));
    pthread_join(thread, NULL);
    CHECK(me, waiting.code == EP_ECLOSED && is_soon(begin, 4));
    return true;
}
bool test_leave_busy(void) {
    Setup setup = {.num_ranks = 2, .config = small_config(2), .dies = true};
    setup.config.num_buffers = 2;
    return run_team(&setup, leave_body, NULL);
}

static char said[8];
static void say(void *text) { strncat(said, (const char *)text, 1); }
/* Clean-up left to a world runs when its last reference is gone, newest first. */
bool test_world_release(void) {
    EpWorld *w[1];
    said[0] = 0;
    WANT(NULL, 0, ep_world_create_threads(1, 1, w));
    CHECK(NULL, ep_world_at_release(w[0], say, "a") && ep_world_at_release(w[0], say, "b"));
    WANT(NULL, 0, ep_world_close(ep_world_retain(w[0]), true));
    ep_world_release(w[0]);
    CHECK(NULL, !said[0]);
    ep_world_release(w[0]);
    CHECK(NULL, strcmp(said, "ba") == 0);
    return true;
}
