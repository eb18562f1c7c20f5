/* memory_limit.c - reads the memory limits of the machine and of the process's control groups.
 * Exports: ep_free_bytes. A limit that is missing or cannot be parsed counts as "no limit". */
#include "runtime/memory_limit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PATH 4096

/* The number after the word `key` in a file of lines "key number" or "key: number"; with key "", the number
 * at the start of the file. The unit is that of the file. Returns `otherwise` if the file cannot be read, has
 * no such line, or has no number there: a control group without a limit says "max". */
static uint64_t read_number(const char *path, const char *key, uint64_t otherwise) {
    char line[256];
    uint64_t value = otherwise;
    size_t n = strlen(key);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        const char *number = line + n;
        if (strncmp(line, key, n) != 0 || (n && *number != ' ' && *number != ':')) continue;
        number += strspn(number, ": \t");
        if (*number >= '0' && *number <= '9') value = strtoull(number, NULL, 10);
        break;
    }
    if (file) fclose(file);
    return value;
}

/* What a control group leaves: its limit minus its usage. Cached files do not count as usage, because the
 * kernel can reclaim them. UINT64_MAX if the group has no limit. */
static uint64_t group_free_bytes(const char *folder, const char *limit, const char *usage,
                                 const char *prefix) {
    char path[MAX_PATH + 64], key[64];
    snprintf(path, sizeof path, "%s/%s", folder, limit);
    uint64_t most = read_number(path, "", UINT64_MAX), files = 0;
    if (most == UINT64_MAX) return most;
    snprintf(path, sizeof path, "%s/%s", folder, usage);
    uint64_t used = read_number(path, "", 0);
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    for (uint32_t active = 0; active < 2; active++) {
        snprintf(key, sizeof key, "%s%s_file", prefix, active ? "active" : "inactive");
        files += read_number(path, key, 0);
    }
    used -= files < used ? files : used;
    return used < most ? most - used : 0;
}

/* The minimum that a control group and its parents leave; the limit of each of them applies. In a container,
 * /proc/self/cgroup may show a path of the host. Then only the root of the path exists here; the other
 * folders give no limit. */
static uint64_t groups_free_bytes(char *folder, size_t root_length, const char *limit, const char *usage,
                                  const char *prefix) {
    uint64_t least = UINT64_MAX;
    for (;;) {
        uint64_t num_free = group_free_bytes(folder, limit, usage, prefix);
        if (num_free < least) least = num_free;
        char *slash = strrchr(folder, '/');
        if (strlen(folder) <= root_length || !slash) return least;
        *slash = 0;
    }
}

uint64_t ep_free_bytes(const char *root) {
    char path[MAX_PATH], line[MAX_PATH / 2], folder[MAX_PATH];
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    uint64_t num_free = read_number(path, "MemAvailable", UINT64_MAX / 1024);
    num_free = num_free == UINT64_MAX / 1024 ? UINT64_MAX : num_free * 1024;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) { /* "0::/path" is version 2, "7:memory:/path" version 1 */
        const char *names = strchr(line, ':'), *at = names ? strchr(names + 1, ':') : NULL;
        if (!at) continue;
        line[strcspn(line, "\n")] = 0;
        bool is_v2 = at == names + 1, is_v1 = !is_v2 && strncmp(names, ":memory:", 8) == 0;
        if (!is_v2 && !is_v1) continue;
        const char *mount = is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        size_t root_length = (size_t)snprintf(folder, sizeof folder, "%s%s", root, mount);
        snprintf(folder, sizeof folder, "%s%s%s", root, mount, strcmp(at + 1, "/") == 0 ? "" : at + 1);
        uint64_t left = is_v2 ? groups_free_bytes(folder, root_length, "memory.max", "memory.current", "")
                              : groups_free_bytes(folder, root_length, "memory.limit_in_bytes",
                                                  "memory.usage_in_bytes", "total_");
        if (left < num_free) num_free = left;
    }
    if (file) fclose(file);
    return num_free;
}
