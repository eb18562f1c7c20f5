/* test_deferred_free.c - when a GPU heap calls its backend: never in a destructor, and no memory is freed
 * before all peers have unmapped it.
 *
 * The heaps are those of the CPU backend, as threads. Their table of functions is replaced by one that counts
 * the calls, and they map each other's memory as processes do. */
#include "backend.h"
#include "harness.h"
#include "layer/layer_state.h"
#include "runtime/heap_state.h"
#include "runtime/world.h"

enum { NUM_RANKS = 3, HEAP_BYTES = 256 << 10 };
static EpBackend fake;
static _Thread_local uint32_t num_calls, num_freed_words, num_unmapped, num_freed;
/* The times at which the memory of a rank was freed, and at which a peer unmapped it last; 0: not yet. */
static _Atomic uint32_t now, freed_at[NUM_RANKS], unmapped_at[NUM_RANKS];
static void *_Atomic memory_of[NUM_RANKS];

/* Note the time at the owner of the memory, if that is the newest heap. */
static void note(_Atomic uint32_t *times, const void *memory) {
    const uint32_t time = ++now;
    for (uint32_t r = 0; r < NUM_RANKS; r++)
        if (atomic_load(&memory_of[r]) == memory) atomic_store(&times[r], time);
}
static int fake_sync_all(int device) {
    (void)device;
    num_calls++;
    return 0;
}
static void fake_host_free(int device, void *memory, uint64_t num_bytes) {
    num_calls++;
    num_freed_words++;
    ep_cpu_backend.host_free(device, memory, num_bytes);
}
static void fake_unimport(int device, void *memory, uint64_t num_bytes) {
    (void)device, (void)num_bytes;
    num_calls++;
    num_unmapped++;
    note(unmapped_at, memory);
}
static void fake_heap_close(int device, void *memory, uint64_t num_bytes) {
    num_calls++;
    num_freed++;
    note(freed_at, memory);
    ep_cpu_backend.heap_close(device, memory, num_bytes);
}

/* Make a buffer like one on a GPU. The watchdog thread reads buffers, but not while they are not watched. */
static bool make_like_gpu(Rank *me, EpCommBuffer *b) {
    ep_world_unwatch(me->world, b);
    b->backend = &fake;
    b->on_stream = true;
    CHECK_CODE(me, 0, ep_world_watch(me->world, b));
    return true;
}
/* Collective: create a heap that is like one on a GPU. */
static bool open_like_gpu(Rank *me, EpHeap **heap) {
    const unsigned char mine = 0;
    unsigned char all[EP_MAX_RANKS];
    CHECK_CODE(me, 0, ep_heap_create(me->world, EP_CPU, 0, HEAP_BYTES, 0, heap));
    EpHeap *h = *heap;
    h->kind = EP_CUDA;
    h->backend = &fake;
    TRY(make_like_gpu(me, &h->control));
    CHECK_CODE(me, 0, ep_world_all_gather(me->world, &mine, 1, all));
    for (uint32_t r = 0; r < NUM_RANKS; r++)
        if (r != me->rank) {
            ep_memory_drop(h->memory[r]);
            h->memory[r] = NULL;
        }
    atomic_store(&memory_of[me->rank], h->base[me->rank]);
    atomic_store(&freed_at[me->rank], 0);
    atomic_store(&unmapped_at[me->rank], 0);
    CHECK_CODE(me, 0, ep_world_all_gather(me->world, &mine, 1, all));
    num_calls = num_freed_words = num_unmapped = num_freed = 0;
    return true;
}
static bool open_layer(Rank *me, EpHeap *heap, EpLayer **layer) {
    const EpLayerConfig config = small_config(NUM_RANKS);
    heap->kind = EP_CPU; /* its operations are those of the CPU */
    CHECK_CODE(me, 0, ep_layer_create(heap, &config, layer));
    heap->kind = EP_CUDA;
    for (uint32_t i = 0; i < config.num_buffers; i++) TRY(make_like_gpu(me, &(*layer)->buffers[i]));
    num_calls = num_freed_words = 0;
    return true;
}
/* The memory of a rank was freed after all its peers had unmapped it. */
static bool is_freed_last(uint32_t r) {
    return freed_at[r] && unmapped_at[r] && freed_at[r] > unmapped_at[r];
}
/* Run body, which closes the world. */
static bool run_like_gpu(Body *body, void *arg) {
    const Setup setup = {.num_ranks = NUM_RANKS, .world_ends = true};
    fake = ep_cpu_backend;
    fake.sync_all = fake_sync_all;
    fake.host_free = fake_host_free;
    fake.heap_unimport = fake_unimport;
    fake.heap_close = fake_heap_close;
    return run_team(&setup, body, arg);
}

/* Layers and heaps that are dropped without a close wait for the next creation. */
static bool drop_body(Rank *me, void *arg) {
    EpHeap *heap = NULL, *next = NULL;
    EpLayer *layer = NULL, *other = NULL;
    (void)arg;
    TRY(open_like_gpu(me, &heap));
    TRY(open_layer(me, heap, &layer));
    ep_layer_release(layer);
    CHECK(me, num_calls == 0);
    TRY(open_layer(me, heap, &other)); /* the creation destroys the first layer */
    CHECK(me, atomic_load(&heap->layers) == NULL);
    ep_heap_retain_view(heap, 0);
    ep_heap_release(heap);
    ep_layer_release(other);
    ep_heap_release_view(heap, 0); /* the last reference */
    CHECK(me, num_calls == 0 && atomic_load(ep_world_deferred_frees(me->world)) == &heap->deferred_free);
    TRY(open_like_gpu(me, &next)); /* it clears the counts; so look at the list */
    CHECK(me, atomic_load(ep_world_deferred_frees(me->world)) == NULL && ep_memory_retained_bytes() > 0);
    ep_heap_release(next);
    CHECK(me, num_calls == 0);
    /* A close of the world destroys the rest. Peers may use the memory: it is freed with the world. */
    CHECK_CODE(me, 0, ep_world_close(me->world, true));
    CHECK(me, num_freed_words == 1 && num_unmapped == NUM_RANKS - 1 && num_freed == 0);
    return true;
}
bool test_deferred_free_dropped_heap(void) {
    const uint64_t retained = ep_memory_retained_bytes();
    TRY(run_like_gpu(drop_body, NULL));
    CHECK(NULL, ep_memory_retained_bytes() == retained);
    return true;
}

/* A collective close leaves nothing for the destructor. A rank frees its memory after its peers unmap it. */
static bool close_body(Rank *me, void *arg) {
    EpHeap *heap = NULL;
    EpLayer *layer = NULL, *dropped = NULL;
    (void)arg;
    TRY(open_like_gpu(me, &heap));
    TRY(open_layer(me, heap, &dropped));
    TRY(open_layer(me, heap, &layer));
    ep_layer_release(dropped);
    ep_heap_retain_view(heap, 0); /* a tensor that is dropped before the close keeps no memory */
    ep_heap_release_view(heap, 0);
    CHECK_CODE(me, 0, ep_layer_close(layer));
    CHECK(me, num_freed_words == 2 && atomic_load(&heap->layers) == NULL);
    if (me->rank == 1) usleep(20000); /* a slow peer, which still has mapped all */
    CHECK_CODE(me, 0, ep_heap_close(heap));
    CHECK(me, num_freed_words == 3 && num_unmapped == NUM_RANKS - 1 && num_freed == 1);
    for (uint32_t r = 0; r < NUM_RANKS; r++) CHECK(me, !freed_at[r] || is_freed_last(r));
    num_calls = 0;
    CHECK_CODE(me, EP_ECLOSED, ep_layer_sync(layer, NULL));
    CHECK_CODE(me, EP_ECLOSED, ep_heap_sync(heap, NULL));
    ep_layer_release(layer);
    ep_heap_release(heap);
    CHECK(me, num_calls == 0 && atomic_load(ep_world_deferred_frees(me->world)) == NULL);
    CHECK_CODE(me, 0, ep_world_close(me->world, true));
    return true;
}
bool test_deferred_free_closed_heap(void) {
    TRY(run_like_gpu(close_body, NULL));
    for (uint32_t r = 0; r < NUM_RANKS; r++) CHECK(NULL, is_freed_last(r));
    return true;
}

/* Tensors keep memory mapped after the close: role 0 has one of role 1, and role 2 has one of its own. Every
 * rank has every role once. */
static bool views_body(Rank *me, void *arg) {
    const uint32_t shift = *(const uint32_t *)arg, role = (me->rank + NUM_RANKS - shift) % NUM_RANKS;
    EpHeap *heap = NULL;
    EpLayer *layer = NULL;
    TRY(open_like_gpu(me, &heap));
    TRY(open_layer(me, heap, &layer));
    const uint32_t peer = ((role == 0 ? 1 : 2) + shift) % NUM_RANKS;
    if (role != 1) ep_heap_retain_view(heap, peer);
    CHECK_CODE(me, 0, ep_heap_close(heap));
    CHECK_CODE(me, EP_ECLOSED, ep_layer_barrier(layer, 0, NULL)); /* it would use what is unmapped */
    CHECK(me, num_unmapped == (role == 0 ? 0 : NUM_RANKS - 1));
    /* Role 0 may free: its peers have unmapped. Role 1 may not, because of role 0, and leaves its memory to
     * the world. Role 2 needs its own. */
    CHECK(me, num_freed == (role == 0));
    num_calls = 0;
    ep_layer_release(layer);
    ep_heap_release(heap);
    if (role != 1) ep_heap_release_view(heap, peer);
    CHECK(me, num_calls == 0 && atomic_load(ep_world_deferred_frees(me->world)) == &heap->deferred_free);
    CHECK_CODE(me, 0, ep_world_close(me->world, true));
    CHECK(me, num_unmapped == NUM_RANKS - 1 && num_freed == (role == 0));
    return true;
}
bool test_deferred_free_viewed_heap(void) {
    const uint64_t retained = ep_memory_retained_bytes();
    for (uint32_t shift = 0; shift < NUM_RANKS; shift++) {
        TRY(run_like_gpu(views_body, &shift));
        for (uint32_t r = 0; r < NUM_RANKS; r++) CHECK(NULL, is_freed_last(r));
    }
    CHECK(NULL, ep_memory_retained_bytes() == retained);
    return true;
}
