/* test_heap.c - the symmetric heap: allocations, data and signals between ranks, creation, and calls after
 * close. */
#include <signal.h>

#include "harness.h"
#include "runtime/allocator.h"
#include "runtime/world.h"

enum { NUM_OFFS = 24 };

/* Allocate and free at random, with equal random numbers on every rank. */
static bool alloc_and_free_at_random(Rank *me, const EpHeapStats *start) {
    EpHeapStats s;
    uint64_t offs[NUM_OFFS] = {0};
    uint64_t sizes[NUM_OFFS] = {0};
    uint64_t used = 0;
    uint32_t num = 0;
    Rng rng = {test_seed};
    void *mine;
    for (uint32_t i = 0; i < scaled(200) + 20; i++) {
        uint32_t j = rng_below(&rng, NUM_OFFS);
        if (sizes[j]) {
            used -= (sizes[j] + 255) / 256 * 256;
            num--;
            CHECK_CODE(me, 0, ep_heap_free(me->heap, offs[j]));
            sizes[j] = 0;
        } else {
            uint64_t bytes = 1 + rng_below(&rng, 5000), alignment = 1ull << rng_below(&rng, 13);
            CHECK_CODE(me, 0, ep_heap_alloc(me->heap, bytes, alignment, 0, &offs[j]));
            CHECK(me, offs[j] % alignment == 0 && offs[j] % 256 == 0);
            for (uint32_t k = 0; k < NUM_OFFS; k++)
                CHECK(me, k == j || !sizes[k] || offs[k] + sizes[k] <= offs[j] || offs[j] + bytes <= offs[k]);
            CHECK_CODE(me, 0, ep_heap_translate(me->heap, offs[j], me->rank, &mine));
            CHECK(me, all_bytes_are(mine, bytes, 0));
            memset(mine, 0xee, bytes);
            sizes[j] = bytes;
            used += (bytes + 255) / 256 * 256;
            num++;
        }
        ep_heap_stats(me->heap, &s);
        CHECK(me, s.used_bytes == used && s.num_allocations == num &&
                      s.free_bytes == start->free_bytes - used && s.largest_free_bytes <= s.free_bytes);
    }
    for (uint32_t j = 0; j < NUM_OFFS; j++)
        if (sizes[j]) CHECK_CODE(me, 0, ep_heap_free(me->heap, offs[j]));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.used_bytes == 0 && s.largest_free_bytes == start->free_bytes && s.peak_bytes > 0);
    return true;
}

/* Ranks request different allocations, or more memory than the heap has. */
static bool wrong_allocations(Rank *me, const EpHeapStats *start) {
    const bool differs = me->rank == 1;
    uint64_t off, other;
    CHECK_CODE(me, EP_EMISMATCH, alloc_heap(me, differs ? 100 : 200, &off));
    CHECK_CODE(me, EP_EMISMATCH, ep_heap_alloc(me->heap, 100, differs ? 512 : 1024, 0, &off));
    CHECK_CODE(me, EP_ENOMEM, alloc_heap(me, start->free_bytes + 1, &off));
    CHECK(me, strstr(ep_error_text(), "exhausted"));
    CHECK_CODE(me, EP_ENOMEM, alloc_heap(me, 1ull << 62, &off));
    CHECK_CODE(me, differs ? EP_ETYPE : EP_EPEER,
               ep_heap_alloc(me->heap, 100, 64, differs ? EP_ETYPE : 0, &off));
    CHECK_CODE(me, differs ? EP_EINVAL : EP_EPEER, ep_heap_alloc(me->heap, 100, differs ? 3 : 64, 0, &off));
    CHECK_CODE(me, 0, alloc_heap(me, start->largest_free_bytes, &off));
    CHECK_CODE(me, EP_ENOMEM, alloc_heap(me, 1, &other));
    CHECK_CODE(me, differs ? EP_EINVAL : EP_EPEER, ep_heap_free(me->heap, differs ? off + 256 : off));
    CHECK_CODE(me, 0, ep_heap_free(me->heap, off));
    CHECK_CODE(me, EP_EINVAL, ep_heap_free(me->heap, off));
    return true;
}

/* Ranks free different allocations. An allocation of 0 bytes has offset 0 and uses no memory. */
static bool wrong_frees(Rank *me) {
    const bool differs = me->rank == 1;
    EpHeapStats s;
    uint64_t off, offs[2];
    CHECK_CODE(me, 0, alloc_heap(me, 0, &off));
    CHECK(me, off == 0);
    /* Offset 0 also has the heap's own words. Freeing an allocation of 0 bytes must leave them. */
    CHECK_CODE(me, 0, ep_heap_free(me->heap, off));
    CHECK_CODE(me, 0, alloc_heap(me, 256, &off));
    CHECK_CODE(me, EP_EMISMATCH, ep_heap_free(me->heap, differs ? 0 : off));
    CHECK_CODE(me, 0, ep_heap_free(me->heap, off));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.used_bytes == 0 && s.num_allocations == 0);
    CHECK_CODE(me, 0, alloc_heap(me, 256, &offs[0]));
    CHECK_CODE(me, 0, alloc_heap(me, 256, &offs[1]));
    CHECK_CODE(me, EP_EMISMATCH, ep_heap_free(me->heap, offs[differs]));
    if (differs) CHECK_CODE(me, EP_EMISMATCH, ep_heap_free(me->heap, offs[0]));
    else CHECK_CODE(me, EP_EMISMATCH, alloc_heap(me, 256, &off));
    CHECK_CODE(me, 0, ep_heap_free(me->heap, offs[0]));
    CHECK_CODE(me, 0, ep_heap_free(me->heap, offs[1]));
    return true;
}

static bool addresses_and_offsets(Rank *me) {
    uint64_t off;
    void *at;
    CHECK_CODE(me, EP_EINVAL, ep_heap_translate(me->heap, 0, 3, &at));
    CHECK_CODE(me, EP_EINVAL, ep_heap_translate(me->heap, 1ull << 40, 0, &at));
    CHECK_CODE(me, 0, ep_heap_translate(me->heap, 512, me->rank, &at));
    CHECK_CODE(me, 0, ep_heap_offset(me->heap, at, 100, &off));
    CHECK(me, off == 512);
    CHECK_CODE(me, EP_EINVAL, ep_heap_offset(me->heap, (char *)at - 513, 1, &off));
    CHECK_CODE(me, EP_EINVAL, ep_heap_offset(me->heap, at, 1ull << 40, &off));
    CHECK_CODE(me, EP_EINVAL, ep_heap_offset(me->heap, &off, 8, &off));
    return true;
}

static bool heap_alloc_body(Rank *me, void *arg) {
    EpHeapStats start;
    (void)arg;
    ep_heap_stats(me->heap, &start);
    CHECK(me, start.used_bytes == 0 && start.num_allocations == 0 && start.free_bytes == start.total_bytes);
    return alloc_and_free_at_random(me, &start) && wrong_allocations(me, &start) && wrong_frees(me) &&
           addresses_and_offsets(me);
}
bool test_heap_alloc(void) {
    Setup setup = {.num_ranks = 3, .heap_bytes = 256 << 10};
    return run_team(&setup, heap_alloc_body, NULL);
}

/* Rounding up a huge size must not overflow and give a small size. */
/* Layers that are dropped and not closed, in another order on each rank. Their memory is free in the next
 * allocation after all ranks have dropped them, and then it is the same on all ranks. */
static bool dropped_layers_body(Rank *me, void *arg) {
    enum { NUM_LAYERS = 5 };
    EpLayer *layers[NUM_LAYERS];
    EpHeapStats stats;
    uint64_t off;
    (void)arg;
    for (uint32_t i = 0; i < NUM_LAYERS; i++)
        CHECK_CODE(me, 0, ep_layer_create(me->heap, &me->setup->config, &layers[i]));
    CHECK_CODE(me, EP_ENOMEM, ep_layer_create(me->heap, &me->setup->config, &me->layer));
    ep_heap_stats(me->heap, &stats);
    const uint64_t used = stats.used_bytes, one = used / NUM_LAYERS;
    for (uint32_t i = 0; i < NUM_LAYERS; i++) {
        /* In round i, rank 0 drops layer i, and the others drop the next one. */
        ep_layer_release(layers[(i + (me->rank != 0)) % NUM_LAYERS]);
        CHECK_CODE(me, 0, alloc_heap(me, 0, &off));
        ep_heap_stats(me->heap, &stats);
        /* Layer 0 is dropped by all in the last round, and layer i by all in round i. */
        CHECK(me, stats.used_bytes == used - (i + 1 < NUM_LAYERS ? i : NUM_LAYERS) * one);
    }
    CHECK(me, stats.num_allocations == 0);
    CHECK_CODE(me, 0, ep_layer_create(me->heap, &me->setup->config, &me->layer));
    return true;
}
bool test_dropped_layers(void) {
    Setup setup = {.num_ranks = 3, .config = small_config(3), .own_layer = true};
    uint64_t layer_bytes;
    CHECK_CODE(NULL, 0, ep_layer_check_config(&setup.config, &layer_bytes));
    setup.heap_bytes = 4 * layer_bytes;
    return run_team(&setup, dropped_layers_body, NULL);
}

static bool heap_huge_body(Rank *me, void *arg) {
    uint64_t off;
    (void)arg;
    for (uint64_t less = 0; less < 600; less += 50)
        CHECK_CODE(me, EP_ENOMEM, alloc_heap(me, UINT64_MAX - less, &off));
    return true;
}
bool test_heap_huge(void) {
    Setup setup = {.num_ranks = 2};
    return run_team(&setup, heap_huge_body, NULL);
}

/* When the creation of a layer fails because the heap is too small, no allocation is left in the heap. */
static bool layer_exceeds_heap_body(Rank *me, void *arg) {
    EpLayerConfig config = small_config(2);
    EpHeapStats s;
    EpLayer *layer = NULL;
    (void)arg;
    config.num_buffers = 16;
    CHECK_CODE(me, EP_ENOMEM, ep_layer_create(me->heap, &config, &layer));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.used_bytes == 0 && s.num_allocations == 0);
    config.num_buffers = 2;
    CHECK_CODE(me, 0, ep_layer_create(me->heap, &config, &me->layer));
    return true;
}
bool test_layer_exceeds_heap(void) {
    EpLayerConfig config = small_config(2);
    uint64_t bytes;
    config.num_buffers = 2;
    CHECK_CODE(NULL, 0, ep_layer_check_config(&config, &bytes));
    Setup setup = {.num_ranks = 2, .heap_bytes = bytes};
    return run_team(&setup, layer_exceeds_heap_body, NULL);
}

/* put, get, signal and wait. In a ring, each rank puts data to the next rank. */
static bool put_get_signal_body(Rank *me, void *arg) {
    uint32_t next = (me->rank + 1) % 3, before = (me->rank + 2) % 3;
    uint64_t off, word, i;
    unsigned char data[300], seen[300];
    void *mine;
    (void)arg;
    CHECK_CODE(me, 0, alloc_heap(me, 4096, &off));
    CHECK_CODE(me, 0, alloc_heap(me, 64, &word));
    CHECK_CODE(me, 0, ep_heap_translate(me->heap, off, me->rank, &mine));
    for (i = 1; i <= scaled(60); i++) {
        /* Two places, because the next rank may still read the data of the previous round. */
        uint32_t at = (uint32_t)(i % 2) * 2048;
        memset(data, (int)(i * 3 + me->rank) & 255, sizeof data);
        CHECK_CODE(me, 0, ep_heap_put(me->heap, off + at, data, sizeof data, next, NULL));
        CHECK_CODE(me, 0, ep_heap_signal(me->heap, word, i % 3 ? 1 : i, i % 3 != 0, next, NULL));
        CHECK_CODE(me, 0, ep_heap_wait(me->heap, word, i, i % 2, NULL));
        CHECK(me, all_bytes_are((char *)mine + at, sizeof data, (unsigned char)(i * 3 + before)));
        CHECK_CODE(me, 0, ep_heap_get(me->heap, seen, off + at, sizeof seen, me->rank, NULL));
        CHECK(me, all_bytes_are(seen, sizeof seen, (unsigned char)(i * 3 + before)));
        CHECK_CODE(me, 0, ep_heap_barrier(me->heap, NULL));
    }
    for (i = 0; i < scaled(40); i++) { /* A barrier without a signal also publishes the puts before it. */
        memset(data, (int)i, sizeof data);
        CHECK_CODE(me, 0, ep_heap_put(me->heap, off + 300 * me->rank, data, sizeof data, next, NULL));
        CHECK_CODE(me, 0, ep_heap_barrier(me->heap, NULL));
        CHECK(me, all_bytes_are((char *)mine + 300 * before, sizeof data, (unsigned char)i));
        CHECK_CODE(me, 0, ep_heap_get(me->heap, seen, off + 300 * before, sizeof seen, before, NULL) ? 1 : 0);
        CHECK_CODE(me, 0, ep_heap_barrier(me->heap, NULL));
    }
    CHECK_CODE(me, EP_EINVAL, ep_heap_put(me->heap, off, data, 1ull << 40, next, NULL));
    CHECK_CODE(me, EP_EINVAL, ep_heap_put(me->heap, UINT64_MAX - 8, data, 16, next, NULL));
    CHECK_CODE(me, EP_EINVAL, ep_heap_get(me->heap, data, off, 8, 3, NULL));
    CHECK_CODE(me, EP_EINVAL, ep_heap_signal(me->heap, word + 4, 1, false, next, NULL));
    CHECK_CODE(me, EP_EINVAL, ep_heap_wait(me->heap, word + 4, 1, false, NULL));
    CHECK_CODE(me, 0, ep_heap_sync(me->heap, NULL));
    return true;
}
bool test_heap_put_get_signal(void) {
    Setup setup = {.num_ranks = 3, .heap_bytes = 64 << 10};
    return run_team(&setup, put_get_signal_body, NULL);
}

/* All ranks, or one rank, create a heap with wrong arguments. Then they create a second heap. */
static bool heap_create_body(Rank *me, void *arg) {
    EpHeap *heap = NULL;
    uint64_t off;
    (void)arg;
    for (uint32_t i = 0; i < 3; i++) {
        bool differs = me->rank == i;
        CHECK_CODE(me, EP_EMISMATCH, ep_heap_create(me->world, EP_CPU, 0, differs ? 5000 : 6000, 0, &heap));
        CHECK_CODE(me, differs ? EP_EINVAL : EP_EPEER,
                   ep_heap_create(me->world, EP_CPU, 0, differs ? 0 : 6000, 0, &heap));
        CHECK_CODE(me, differs ? EP_ETYPE : EP_EPEER,
                   ep_heap_create(me->world, EP_CPU, 0, 6000, differs ? EP_ETYPE : 0, &heap));
        CHECK_CODE(me, EP_EINVAL, ep_heap_create(me->world, EP_CUDA, 0, 6000, 0, &heap));
    }
    CHECK_CODE(me, 0, ep_heap_create(me->world, EP_CPU, 0, 1, 0, &heap));
    CHECK_CODE(me, 0, ep_heap_alloc(heap, 1, 1, 0, &off));
    CHECK_CODE(me, 0, ep_heap_barrier(heap, NULL));
    CHECK_CODE(me, 0, ep_heap_barrier(me->heap, NULL));
    CHECK_CODE(me, 0, ep_heap_close(heap));
    ep_heap_release(heap);
    return true;
}
bool test_heap_create(void) {
    Setup setup = {.num_ranks = 3};
    return run_team(&setup, heap_create_body, NULL);
}

/* A thread of rank 1 aborts the world at a random time, while the ranks create, use and close heaps. */
typedef struct {
    useconds_t delay;
    EpWorld *world;
} Abort;
static void *abort_main(void *arg) {
    Abort *a = (Abort *)arg;
    usleep(a->delay);
    ep_world_abort(a->world, EP_ECUDA, 1, "the test aborts the world");
    return NULL;
}
static bool abort_during_create_body(Rank *me, void *arg) {
    Abort abort_later = {*(const useconds_t *)arg, me->world};
    pthread_t thread;
    unsigned char none = 0, nones[EP_MAX_RANKS];
    /* After this all-gather, every rank has created the heap of the team. */
    int code = ep_world_all_gather(me->world, &none, 1, nones);
    if (me->rank == 1 && pthread_create(&thread, NULL, abort_main, &abort_later)) abort();
    while (!code) {
        EpHeap *heap = NULL;
        code = ep_heap_create(me->world, EP_CPU, 0, 6000, 0, &heap);
        if (!code) code = ep_heap_barrier(heap, NULL);
        if (!code) code = ep_heap_close(heap);
        ep_heap_release(heap);
    }
    if (me->rank == 1) pthread_join(thread, NULL);
    /* EP_EPEERDIED: a peer may have left before its reason has arrived. */
    CHECK(me, code == EP_ECUDA || code == EP_EPEERDIED);
    return true;
}
bool test_abort_during_heap_create(void) {
    Rng rng = {test_seed};
    for (uint32_t i = 0; i < scaled(40); i++) {
        useconds_t delay = rng_below(&rng, 2000);
        Setup setup = {.num_ranks = 3, .world_ends = true};
        TRY(run_team(&setup, abort_during_create_body, &delay));
    }
    return true;
}

/* The number of allocations of a heap and the number of buffers of a world are limited. A call that exceeds a
 * limit fails with an error, and no memory is lost. */
static bool heap_full_body(Rank *me, void *arg) {
    EpLayerConfig config = {
        .shape = {2, 2, 1, 1, 4, EP_F32, EP_COMBINE_LOCAL, 2}, .num_buffers = 16, .num_sm = 1};
    EpLayer *layers[20];
    uint32_t num_layers = 0, num_allocations = 0;
    uint64_t offs[EP_MAX_ALLOCATIONS + 1], used;
    EpHeapStats s;
    int code = 0;
    (void)arg;
    sigset_t
        blocked; /* The creation of the heap blocked all signals only meanwhile (test_posix_fallocate). */
    pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    CHECK(me, !sigismember(&blocked, SIGINT) && !sigismember(&blocked, SIGALRM));
    while (num_layers < 20 && !(code = ep_layer_create(me->heap, &config, &layers[num_layers]))) num_layers++;
    CHECK_CODE(me, EP_ENOMEM, code);
    CHECK(me, strstr(ep_error_text(), "communication buffers"));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.num_allocations == 16ull * num_layers);
    used = s.used_bytes;
    while (num_allocations <= EP_MAX_ALLOCATIONS && !(code = alloc_heap(me, 1, &offs[num_allocations])))
        num_allocations++;
    CHECK_CODE(me, EP_ENOMEM, code);
    CHECK(me, strstr(ep_error_text(), "allocations"));
    CHECK(me, num_allocations + 16 * num_layers == EP_MAX_ALLOCATIONS);
    while (num_allocations) CHECK_CODE(me, 0, ep_heap_free(me->heap, offs[--num_allocations]));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.used_bytes == used);
    while (num_layers) {
        CHECK_CODE(me, 0, ep_layer_close(layers[--num_layers]));
        ep_layer_release(layers[num_layers]);
    }
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.used_bytes == 0 && s.num_allocations == 0);
    return true;
}
bool test_heap_full(void) {
    Setup setup = {.num_ranks = 2, .heap_bytes = 4 << 20};
    return run_team(&setup, heap_full_body, NULL);
}

static bool calls_after_close_body(Rank *me, void *arg) {
    EpHeapStats s;
    uint64_t off;
    void *at;
    (void)arg;
    CHECK_CODE(me, 0, ep_layer_close(me->layer));
    CHECK_CODE(me, 0, ep_layer_close(me->layer));
    CHECK_CODE(me, EP_ECLOSED, ep_layer_barrier(me->layer, 0, NULL));
    CHECK_CODE(me, EP_ECLOSED, ep_layer_sync(me->layer, NULL));
    CHECK_CODE(me, 0, ep_heap_close(me->heap));
    CHECK_CODE(me, EP_ECLOSED, alloc_heap(me, 8, &off));
    CHECK_CODE(me, EP_ECLOSED, ep_heap_translate(me->heap, 0, 0, &at));
    CHECK_CODE(me, EP_ECLOSED, ep_heap_offset(me->heap, &off, 8, &off));
    CHECK_CODE(me, EP_ECLOSED, ep_heap_stats(me->heap, &s));
    CHECK_CODE(me, EP_ECLOSED, ep_heap_sync(me->heap, NULL));
    CHECK_CODE(me, EP_ECLOSED, ep_heap_barrier(me->heap, NULL));
    CHECK_CODE(me, 0, ep_world_close(me->world, true));
    CHECK_CODE(me, EP_ECLOSED, ep_world_check(me->world));
    CHECK_CODE(me, EP_ECLOSED, ep_world_all_gather(me->world, &off, 8, &off));
    return true;
}
bool test_calls_after_close(void) {
    Setup setup = {.num_ranks = 2, .config = small_config(2), .world_ends = true};
    EpWorld *worlds[EP_MAX_RANKS];
    CHECK_CODE(NULL, EP_EINVAL, ep_world_create_threads(0, 1, worlds));
    CHECK_CODE(NULL, EP_EINVAL, ep_world_create_threads(EP_MAX_RANKS + 1, 1, worlds));
    CHECK_CODE(NULL, EP_EINVAL, ep_world_create_threads(2, 0, worlds));
    return run_team(&setup, calls_after_close_body, NULL);
}
