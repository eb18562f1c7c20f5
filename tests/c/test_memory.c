/* test_memory.c - the allocator without a heap, and the amount of available memory. */
#include <sys/stat.h>

#include "harness.h"
#include "runtime/allocator.h"
#include "runtime/memory_limit.h"

enum { UNITS = 400, INTERNAL = 3, NUM_OWNERS = 40 };

/* Whether the allocator knows exactly the allocations of the map, also after it has merged blocks. */
static bool finds_what_is_allocated(const EpAllocator *a, const unsigned char *owner, const uint64_t *offs) {
    for (uint32_t j = 0; j < NUM_OWNERS; j++) {
        const uint32_t of = owner[offs[j] / 256]; /* 1 + the index of the owner; offs may be of a freed one */
        const bool begins = of && of <= NUM_OWNERS && offs[of - 1] == offs[j];
        if (ep_allocator_check(a, offs[j]) != (begins ? 0 : EP_EINVAL)) return false;
    }
    return true;
}

/* Compare the allocator with a map that has the owner of each unit of 256 bytes. */
bool test_allocator(void) {
    static EpAllocator a;
    unsigned char owner[UNITS] = {0}; /* 0: free */
    uint64_t internal, off, offs[NUM_OWNERS] = {0}, units[NUM_OWNERS] = {0};
    Rng rng = {test_seed};
    EpHeapStats s;
    Rank *me = NULL;
    ep_allocator_open(&a, UNITS * 256ull);
    CHECK_CODE(me, 0, ep_allocator_take(&a, INTERNAL * 256, 1, &internal));
    CHECK_CODE(me, 0, ep_allocator_check(&a, internal)); /* the first block of all */
    ep_allocator_mark_internal(&a);
    CHECK_CODE(me, EP_EINVAL, ep_allocator_give_back(&a, internal));
    memset(owner, 255, INTERNAL);
    for (uint32_t i = 0; i < 4000; i++) {
        uint32_t j = rng_below(&rng, NUM_OWNERS), longest = 0, run = 0, free_units = 0;
        if (units[j]) {
            CHECK_CODE(me, 0, ep_allocator_give_back(&a, offs[j]));
            CHECK_CODE(me, EP_EINVAL, ep_allocator_check(&a, offs[j]));
            memset(owner + offs[j] / 256, 0, units[j]);
            units[j] = 0;
        } else {
            uint64_t n = 1 + rng_below(&rng, 24), align = 1 + rng_below(&rng, 8),
                     bytes = n * 256 - rng_below(&rng, 256);
            while (align & (align - 1)) align--;
            int64_t want = -1; /* the first position at which the allocation fits */
            for (uint64_t at = 0; at + n <= UNITS && want < 0; at += align)
                if (all_bytes_are(owner + at, n, 0)) want = (int64_t)at * 256;
            CHECK_CODE(me, want < 0 ? EP_ENOMEM : 0, ep_allocator_take(&a, bytes, align * 256, &off));
            if (want < 0) continue;
            CHECK(me, off == (uint64_t)want);
            offs[j] = off;
            units[j] = n;
            memset(owner + off / 256, (int)(1 + j), n);
        }
        CHECK(me, finds_what_is_allocated(&a, owner, offs));
        for (uint32_t u = 0; u < UNITS; u++) {
            run = owner[u] ? 0 : run + 1;
            free_units += !owner[u];
            if (run > longest) longest = run;
        }
        ep_allocator_stats(&a, &s);
        CHECK(me, s.free_bytes == free_units * 256ull && s.largest_free_bytes == longest * 256ull);
        CHECK(me,
              s.total_bytes == (UNITS - INTERNAL) * 256ull && s.used_bytes == s.total_bytes - s.free_bytes);
    }
    return true;
}

/* ---- the amount of available memory, read from files that this test creates ---- */

static bool put_file(const char *root, const char *path, const char *text) {
    char full[4096];
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
    if (system(command)) fprintf(stderr, "cannot remove %s\n", root);
}

bool test_available_memory(void) {
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
        /* cgroup v2. The limit of a parent group applies too. Cached files do not count as used memory. */
        {700,
         {{"/proc/meminfo", "MemAvailable: 2000 kB\n"},
          {"/proc/self/cgroup", "0::/a/b\n"},
          {"/sys/fs/cgroup/a/b/memory.max", "max\n"},
          {"/sys/fs/cgroup/a/b/memory.current", "5000\n"},
          {"/sys/fs/cgroup/a/memory.max", "6000\n"},
          {"/sys/fs/cgroup/a/memory.current", "5600\n"},
          {"/sys/fs/cgroup/a/memory.stat", "anon 5000\ninactive_file 200\nactive_file 100\n"}}},
        /* In a container, the group is the root of the mount. */
        {0,
         {{"/proc/self/cgroup", "0::/\n"},
          {"/sys/fs/cgroup/memory.max", "100"},
          {"/sys/fs/cgroup/memory.current", "101"}}},
        /* cgroup v1, with the group's path on the host. */
        {900,
         {{"/proc/self/cgroup", "3:cpu:/x\n4:memory:/docker/123\n0::/\n"},
          {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000"},
          {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "500"},
          {"/sys/fs/cgroup/memory/memory.stat",
           "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 100\n"}}},
    };
    Rank *me = NULL;
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        char root[] = "/tmp/epmoe-memory-XXXXXX";
        bool ok = mkdtemp(root);
        for (uint32_t j = 0; j < 8 && machines[i].files[j].path; j++)
            ok = ok && put_file(root, machines[i].files[j].path, machines[i].files[j].text);
        uint64_t got = ok ? ep_free_bytes(root) : 0;
        remove_tree(root);
        if (got != machines[i].want)
            fprintf(stderr, "machine %zu: %llu bytes are available, expected %llu\n", i,
                    (unsigned long long)got, (unsigned long long)machines[i].want);
        CHECK(me, ok && got == machines[i].want);
    }
    CHECK(me, ep_free_bytes("") > 1 << 20);
    return true;
}

/* Nested containers have control groups with long paths. A path that is cut off names another group, and then
 * the limit of the process's own group is lost. */
bool test_memory_of_deep_group(void) {
    static const char folder[] = "/a-folder-of-one-container-in-another-one";
    char root[] = "/tmp/epmoe-memory-XXXXXX", path[2200], text[2048];
    size_t n = (size_t)snprintf(text, sizeof text, "0::");
    Rank *me = NULL;
    while (n < 1900) n += (size_t)snprintf(text + n, sizeof text - n, "%s", folder);
    CHECK(me, mkdtemp(root));
    bool ok = put_file(root, "/proc/self/cgroup", text);
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", text + 3);
    ok = ok && put_file(root, path, "1000\n");
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.current", text + 3);
    ok = ok && put_file(root, path, "300\n");
    const uint64_t got = ok ? ep_free_bytes(root) : 0;
    remove_tree(root);
    CHECK(me, got == 700);
    return true;
}
