/* test_heap.c - the symmetric heap: the allocator, data and signals between ranks, and calls after close. */
#include "runtime/allocator.h"
#include <sys/stat.h>

#include "harness.h"
#include "runtime/memory_limit.h"
#include "runtime/world.h"

static bool heap_alloc_body(Rank *me, void *arg) {
    EpHeapStats start, s;
    uint64_t off, offs[24] = {0}, sizes[24] = {0}, used = 0;
    uint32_t num = 0;
    Rng rng = {test_seed};
    void *at, *mine;
    (void)arg;
    ep_heap_stats(me->heap, &start);
    CHECK(me, start.used_bytes == 0 && start.num_allocations == 0 && start.free_bytes == start.total_bytes);
    for (uint32_t i = 0; i < scaled(200) + 20; i++) { /* the same random walk on every rank */
        uint32_t j = rng_below(&rng, 24);
        if (sizes[j]) {
            used -= (sizes[j] + 255) / 256 * 256, num--;
            WANT(me, 0, ep_heap_free(me->heap, offs[j]));
            sizes[j] = 0;
        } else {
            uint64_t bytes = 1 + rng_below(&rng, 5000), alignment = 1ull << rng_below(&rng, 13);
            WANT(me, 0, ep_heap_alloc(me->heap, bytes, alignment, 0, &offs[j]));
            CHECK(me, offs[j] % alignment == 0 && offs[j] % 256 == 0);
            for (uint32_t k = 0; k < 24; k++)
                CHECK(me, k == j || !sizes[k] || offs[k] + sizes[k] <= offs[j] || offs[j] + bytes <= offs[k]);
            WANT(me, 0, ep_heap_translate(me->heap, offs[j], me->rank, &mine));
            CHECK(me, all_bytes_are(mine, bytes, 0));
            memset(mine, 0xee, bytes);
            sizes[j] = bytes;
            used += (bytes + 255) / 256 * 256;
            num++;
        }
        ep_heap_stats(me->heap, &s);
        CHECK(me, s.used_bytes == used && s.num_allocations == num &&
                      s.free_bytes == start.free_bytes - used && s.largest_free_bytes <= s.free_bytes);
    }
    for (uint32_t j = 0; j < 24; j++)
        if (sizes[j]) WANT(me, 0, ep_heap_free(me->heap, offs[j]));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.used_bytes == 0 && s.largest_free_bytes == start.free_bytes && s.peak_bytes > 0);
    /* Ranks that disagree, and ranks that ask for too much memory. */
    WANT(me, EP_EMISMATCH, take_heap(me, me->rank == 1 ? 100 : 200, &off));
    WANT(me, EP_EMISMATCH, ep_heap_alloc(me->heap, 100, me->rank == 1 ? 512 : 1024, 0, &off));
    WANT(me, EP_ENOMEM, take_heap(me, start.free_bytes + 1, &off));
    CHECK(me, strstr(ep_error_text(), "exhausted"));
    WANT(me, EP_ENOMEM, take_heap(me, 1ull << 62, &off));
    WANT(me, me->rank == 1 ? EP_ETYPE : EP_EPEER,
         ep_heap_alloc(me->heap, 100, 64, me->rank == 1 ? EP_ETYPE : 0, &off));
    WANT(me, me->rank == 1 ? EP_EINVAL : EP_EPEER,
         ep_heap_alloc(me->heap, 100, me->rank == 1 ? 3 : 64, 0, &off));
    WANT(me, 0, take_heap(me, start.largest_free_bytes, &off));
    WANT(me, EP_ENOMEM, take_heap(me, 1, &offs[0]));
    WANT(me, me->rank == 1 ? EP_EINVAL : EP_EPEER, ep_heap_free(me->heap, me->rank == 1 ? off + 256 : off));
    WANT(me, 0, ep_heap_free(me->heap, off));
    WANT(me, EP_EINVAL, ep_heap_free(me->heap, off));
    WANT(me, 0, take_heap(me, 0, &off));
    CHECK(me, off == 0); /* the heap's own words are there, which freeing 0 bytes must not touch */
    WANT(me, 0, ep_heap_free(me->heap, off));
    WANT(me, 0, take_heap(me, 256, &off));
    WANT(me, EP_EMISMATCH, ep_heap_free(me->heap, me->rank == 1 ? 0 : off));
    WANT(me, 0, ep_heap_free(me->heap, off));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.used_bytes == 0 && s.num_allocations == 0); /* an allocation of 0 bytes takes nothing */
    WANT(me, 0, take_heap(me, 256, &offs[0]));
    WANT(me, 0, take_heap(me, 256, &offs[1]));
    WANT(me, EP_EMISMATCH, ep_heap_free(me->heap, offs[me->rank == 1]));
    if (me->rank == 1) WANT(me, EP_EMISMATCH, ep_heap_free(me->heap, offs[0]));
    else WANT(me, EP_EMISMATCH, take_heap(me, 256, &off));
    WANT(me, 0, ep_heap_free(me->heap, offs[0]));
    WANT(me, 0, ep_heap_free(me->heap, offs[1]));
    /* Addresses. */
    WANT(me, EP_EINVAL, ep_heap_translate(me->heap, 0, 3, &at));
    WANT(me, EP_EINVAL, ep_heap_translate(me->heap, 1ull << 40, 0, &at));
    WANT(me, 0, ep_heap_translate(me->heap, 512, me->rank, &at));
    WANT(me, 0, ep_heap_offset(me->heap, at, 100, &off));
    CHECK(me, off == 512);
    WANT(me, EP_EINVAL, ep_heap_offset(me->heap, (char *)at - 513, 1, &off));
    WANT(me, EP_EINVAL, ep_heap_offset(me->heap, at, 1ull << 40, &off));
    WANT(me, EP_EINVAL, ep_heap_offset(me->heap, &off, 8, &off));
    return true;
}
bool test_heap_alloc(void) {
    Setup setup = {.num_ranks = 3, .heap_bytes = 256 << 10};
    return run_team(&setup, heap_alloc_body, NULL);
}

/* The allocator alone, compared with a map of the owner of each unit of 256 bytes. */
bool test_allocator(void) {
    enum { UNITS = 400, KEPT = 3 };
    static EpAllocator a;
    unsigned char owner[UNITS] = {0}; /* 0: free */
    uint64_t kept, off, offs[40] = {0}, units[40] = {0};
    Rng rng = {test_seed};
    EpHeapStats s;
    Rank *me = NULL;
    ep_allocator_open(&a, UNITS * 256ull);
    WANT(me, 0, ep_allocator_take(&a, KEPT * 256, 1, &kept));
    ep_allocator_keep(&a);
    WANT(me, EP_EINVAL, ep_allocator_give_back(&a, kept));
    memset(owner, 255, KEPT);
    for (uint32_t i = 0; i < 4000; i++) {
        uint32_t j = rng_below(&rng, 40), longest = 0, run = 0, free_units = 0;
        if (units[j]) {
            WANT(me, 0, ep_allocator_give_back(&a, offs[j]));
            WANT(me, EP_EINVAL, ep_allocator_check(&a, offs[j]));
            memset(owner + offs[j] / 256, 0, units[j]);
            units[j] = 0;
        } else {
            uint64_t n = 1 + rng_below(&rng, 24), align = 1 + rng_below(&rng, 8),
                     bytes = n * 256 - rng_below(&rng, 256);
            while (align & (align - 1)) align--;
            int64_t want = -1; /* the first position where it fits */
            for (uint64_t at = 0; at + n <= UNITS && want < 0; at += align)
                if (all_bytes_are(owner + at, n, 0)) want = (int64_t)at * 256;
            WANT(me, want < 0 ? EP_ENOMEM : 0, ep_allocator_take(&a, bytes, align * 256, &off));
            if (want < 0) continue;
            CHECK(me, off == (uint64_t)want);
            offs[j] = off;
            units[j] = n;
            memset(owner + off / 256, (int)(1 + j), n);
        }
        for (uint32_t u = 0; u < UNITS; u++) {
            run = owner[u] ? 0 : run + 1;
            free_units += !owner[u];
            if (run > longest) longest = run;
        }
        ep_allocator_stats(&a, &s);
        CHECK(me, s.free_bytes == free_units * 256ull && s.largest_free_bytes == longest * 256ull);
        CHECK(me, s.total_bytes == (UNITS - KEPT) * 256ull && s.used_bytes == s.total_bytes - s.free_bytes);
    }
    return true;
}

/* ---- how much memory there is, in file systems made for this test ---- */

static bool put_file(const char *root, const char *path, const char *text) {
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = full + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        mkdir(full, 0700);
    }
    FILE *file = fopen(full, "w");
    bool ok = file && fputs(text, file) >= 0;
    return (!file || fclose(file) == 0) && ok;
}
static void remove_tree(const char *root) {
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    if (system(command)) fprintf(stderr, "%s is left\n", root);
}

bool test_room(void) {
    typedef struct {
        const char *path, *text;
    } File;
    const struct {
        uint64_t want;
        File files[8];
    } machines[] = {
        {UINT64_MAX, {{0}}},
        {2000 * 1024,
         {{"/proc/meminfo", "MemTotal: 9000 kB\nMemAvailableX: 1 kB\nMemAvailable:    2000 kB\nX: 1 kB\n"}}},
        /* v2: the limit of a parent group also counts; files in its cache do not. */
        {700,
         {{"/proc/meminfo", "MemAvailable: 2000 kB\n"},
          {"/proc/self/cgroup", "0::/a/b\n"},
          {"/sys/fs/cgroup/a/b/memory.max", "max\n"},
          {"/sys/fs/cgroup/a/b/memory.current", "5000\n"},
          {"/sys/fs/cgroup/a/memory.max", "6000\n"},
          {"/sys/fs/cgroup/a/memory.current", "5600\n"},
          {"/sys/fs/cgroup/a/memory.stat", "anon 5000\ninactive_file 200\nactive_file 100\n"}}},
        /* In a container: the group is the root of the mount. */
        {0,
         {{"/proc/self/cgroup", "0::/\n"},
          {"/sys/fs/cgroup/memory.max", "100"},
          {"/sys/fs/cgroup/memory.current", "101"}}},
        /* v1, with a path of the host. */
        {900,
         {{"/proc/self/cgroup", "3:cpu:/x\n4:memory:/docker/123\n0::/\n"},
          {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000"},
          {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "500"},
          {"/sys/fs/cgroup/memory/memory.stat",
           "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 100\n"}}},
    };
    Rank *me = NULL;
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        char root[] = "/tmp/epmoe-room-XXXXXX";
        bool ok = mkdtemp(root);
        for (uint32_t j = 0; j < 8 && machines[i].files[j].path; j++)
            ok = ok && put_file(root, machines[i].files[j].path, machines[i].files[j].text);
        uint64_t got = ok ? ep_room_bytes(root) : 0;
        remove_tree(root);
        if (got != machines[i].want) fprintf(stderr, "machine %zu: %llu bytes\n", i, (unsigned long long)got);
        CHECK(me, ok && got == machines[i].want);
    }
    CHECK(me, ep_room_bytes("") > 1 << 20);
    return true;
}

/* A size that rounding must not turn into a small one. */
static bool heap_huge_body(Rank *me, void *arg) {
    uint64_t off;
    (void)arg;
    for (uint64_t less = 0; less < 600; less += 50)
        WANT(me, EP_ENOMEM, take_heap(me, UINT64_MAX - less, &off));
    return true;
}
bool test_heap_huge(void) {
    Setup setup = {.num_ranks = 2};
    return run_team(&setup, heap_huge_body, NULL);
}

/* A layer that does not fit leaves no allocation in the heap. */
static bool heap_layer_body(Rank *me, void *arg) {
    EpLayerConfig config = small_config(2);
    EpHeapStats s;
    EpLayer *layer = NULL;
    (void)arg;
    config.num_buffers = 16;
    WANT(me, EP_ENOMEM, ep_layer_create(me->heap, &config, &layer));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.used_bytes == 0 && s.num_allocations == 0);
    config.num_buffers = 2;
    WANT(me, 0, ep_layer_create(me->heap, &config, &me->layer));
    return true;
}
bool test_heap_layer(void) {
    EpLayerConfig config = small_config(2);
    uint64_t bytes;
    config.num_buffers = 2;
    WANT(NULL, 0, ep_layer_check_config(&config, &bytes));
    Setup setup = {.num_ranks = 2, .heap_bytes = bytes};
    return run_team(&setup, heap_layer_body, NULL);
}

/* put, get, signal, wait: a ring in which each rank passes data to the next. */
static bool heap_words_body(Rank *me, void *arg) {
    uint32_t next = (me->rank + 1) % 3, before = (me->rank + 2) % 3;
    uint64_t off, word, i;
    unsigned char data[300], seen[300];
    void *mine;
    (void)arg;
    WANT(me, 0, take_heap(me, 4096, &off));
    WANT(me, 0, take_heap(me, 64, &word));
    WANT(me, 0, ep_heap_translate(me->heap, off, me->rank, &mine));
    for (i = 1; i <= scaled(60); i++) {
        uint32_t at = (uint32_t)(i % 2) * 2048; /* the next rank may be one round late */
        memset(data, (int)(i * 3 + me->rank) & 255, sizeof data);
        WANT(me, 0, ep_heap_put(me->heap, off + at, data, sizeof data, next, NULL));
        WANT(me, 0, ep_heap_signal(me->heap, word, i % 3 ? 1 : i, i % 3 != 0, next, NULL));
        WANT(me, 0, ep_heap_wait(me->heap, word, i, i % 2, NULL));
        CHECK(me, all_bytes_are((char *)mine + at, sizeof data, (unsigned char)(i * 3 + before)));
        WANT(me, 0, ep_heap_get(me->heap, seen, off + at, sizeof seen, me->rank, NULL));
        CHECK(me, all_bytes_are(seen, sizeof seen, (unsigned char)(i * 3 + before)));
        WANT(me, 0, ep_heap_barrier(me->heap, NULL));
    }
    for (i = 0; i < scaled(40); i++) { /* a barrier alone also publishes what was put */
        memset(data, (int)i, sizeof data);
        WANT(me, 0, ep_heap_put(me->heap, off + 300 * me->rank, data, sizeof data, next, NULL));
        WANT(me, 0, ep_heap_barrier(me->heap, NULL));
        CHECK(me, all_bytes_are((char *)mine + 300 * before, sizeof data, (unsigned char)i));
        WANT(me, 0, ep_heap_get(me->heap, seen, off + 300 * before, sizeof seen, before, NULL) ? 1 : 0);
        WANT(me, 0, ep_heap_barrier(me->heap, NULL));
    }
    WANT(me, EP_EINVAL, ep_heap_put(me->heap, off, data, 1ull << 40, next, NULL));
    WANT(me, EP_EINVAL, ep_heap_put(me->heap, UINT64_MAX - 8, data, 16, next, NULL));
    WANT(me, EP_EINVAL, ep_heap_get(me->heap, data, off, 8, 3, NULL));
    WANT(me, EP_EINVAL, ep_heap_signal(me->heap, word + 4, 1, false, next, NULL));
    WANT(me, EP_EINVAL, ep_heap_wait(me->heap, word + 4, 1, false, NULL));
    WANT(me, 0, ep_heap_sync(me->heap, NULL));
    return true;
}
bool test_heap_words(void) {
    Setup setup = {.num_ranks = 3, .heap_bytes = 64 << 10};
    return run_team(&setup, heap_words_body, NULL);
}

/* Impossible heaps, on all ranks; and a second heap in addition to the first. */
static bool heap_create_body(Rank *me, void *arg) {
    EpHeap *heap = NULL;
    uint64_t off;
    (void)arg;
    for (uint32_t i = 0; i < 3; i++) {
        bool odd = me->rank == i;
        WANT(me, EP_EMISMATCH, ep_heap_create(me->world, EP_CPU, 0, odd ? 5000 : 6000, 0, &heap));
        WANT(me, odd ? EP_EINVAL : EP_EPEER, ep_heap_create(me->world, EP_CPU, 0, odd ? 0 : 6000, 0, &heap));
        WANT(me, odd ? EP_ETYPE : EP_EPEER,
             ep_heap_create(me->world, EP_CPU, 0, 6000, odd ? EP_ETYPE : 0, &heap));
        WANT(me, EP_EINVAL, ep_heap_create(me->world, EP_CUDA, 0, 6000, 0, &heap));
    }
    WANT(me, 0, ep_heap_create(me->world, EP_CPU, 0, 1, 0, &heap));
    WANT(me, 0, ep_heap_alloc(heap, 1, 1, 0, &off));
    WANT(me, 0, ep_heap_barrier(heap, NULL));
    WANT(me, 0, ep_heap_barrier(me->heap, NULL));
    WANT(me, 0, ep_heap_close(heap));
    ep_heap_release(heap);
    return true;
}
bool test_heap_create(void) {
    Setup setup = {.num_ranks = 3};
    return run_team(&setup, heap_create_body, NULL);
}

/* The world ends at a random time while its ranks create, use and release heaps. */
typedef struct {
    useconds_t delay;
    EpWorld *world;
} Ending;
static void *end_main(void *arg) {
    Ending *e = (Ending *)arg;
    usleep(e->delay);
    ep_world_abort(e->world, EP_ECUDA, 1, "the test says so");
    return NULL;
}
static bool heap_abort_body(Rank *me, void *arg) {
    Ending ending = {*(const useconds_t *)arg, me->world};
    pthread_t thread;
    unsigned char none = 0, nones[EP_MAX_RANKS];
    /* before this a rank may still be creating the team's own heap */
    int code = ep_world_exchange(me->world, &none, 1, nones);
    if (me->rank == 1 && pthread_create(&thread, NULL, end_main, &ending)) abort();
    while (!code) {
        EpHeap *heap = NULL;
        code = ep_heap_create(me->world, EP_CPU, 0, 6000, 0, &heap);
        if (!code) code = ep_heap_barrier(heap, NULL);
        if (!code) code = ep_heap_close(heap);
        ep_heap_release(heap);
    }
    if (me->rank == 1) pthread_join(thread, NULL);
    CHECK(me,
          code == EP_ECUDA || code == EP_EPEERDIED); /* a peer may be gone before its reason has arrived */
    return true;
}
bool test_heap_abort(void) {
    Rng rng = {test_seed};
    for (uint32_t i = 0; i < scaled(40); i++) {
        useconds_t delay = rng_below(&rng, 2000);
        Setup setup = {.num_ranks = 3, .dies = true};
        TRY(run_team(&setup, heap_abort_body, &delay));
    }
    return true;
}

/* As many allocations as a heap can list, and as many buffers as a world can watch: then an error, and
 * nothing is lost. */
static bool heap_full_body(Rank *me, void *arg) {
    EpLayerConfig config = {{2, 2, 1, 1, 4, EP_F32, EP_COMBINE_LOCAL, 2}, 16, 1, 0};
    EpLayer *layers[20];
    uint32_t num_layers = 0, num_blocks = 0;
    uint64_t offs[1100], used;
    EpHeapStats s;
    int code = 0;
    (void)arg;
    while (num_layers < 20 && !(code = ep_layer_create(me->heap, &config, &layers[num_layers]))) num_layers++;
    WANT(me, EP_ENOMEM, code);
    CHECK(me, strstr(ep_error_text(), "communication buffers"));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.num_allocations == 16ull * num_layers);
    used = s.used_bytes;
    while (num_blocks < 1100 && !(code = take_heap(me, 1, &offs[num_blocks]))) num_blocks++;
    WANT(me, EP_ENOMEM, code);
    CHECK(me, strstr(ep_error_text(), "allocations") && num_blocks > 500);
    while (num_blocks) WANT(me, 0, ep_heap_free(me->heap, offs[--num_blocks]));
    ep_heap_stats(me->heap, &s);
    CHECK(me, s.used_bytes == used);
    while (num_layers) {
        WANT(me, 0, ep_layer_close(layers[--num_layers]));
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

static bool closed_body(Rank *me, void *arg) {
    uint64_t off;
    void *at;
    (void)arg;
    WANT(me, 0, ep_layer_close(me->layer));
    WANT(me, 0, ep_layer_close(me->layer));
    WANT(me, EP_ECLOSED, ep_layer_barrier(me->layer, 0, NULL));
    WANT(me, EP_ECLOSED, ep_layer_sync(me->layer, NULL));
    WANT(me, 0, ep_heap_close(me->heap));
    WANT(me, EP_ECLOSED, take_heap(me, 8, &off));
    WANT(me, EP_ECLOSED, ep_heap_translate(me->heap, 0, 0, &at));
    WANT(me, EP_ECLOSED, ep_heap_barrier(me->heap, NULL));
    WANT(me, 0, ep_world_close(me->world, true));
    WANT(me, EP_ECLOSED, ep_world_check(me->world));
    WANT(me, EP_ECLOSED, ep_world_exchange(me->world, &off, 8, &off));
    return true;
}
bool test_closed(void) {
    Setup setup = {.num_ranks = 2, .config = small_config(2), .dies = true};
    EpWorld *worlds[EP_MAX_RANKS];
    WANT(NULL, EP_EINVAL, ep_world_create_threads(0, 1, worlds));
    WANT(NULL, EP_EINVAL, ep_world_create_threads(EP_MAX_RANKS + 1, 1, worlds));
    WANT(NULL, EP_EINVAL, ep_world_create_threads(2, 0, worlds));
    return run_team(&setup, closed_body, NULL);
}
