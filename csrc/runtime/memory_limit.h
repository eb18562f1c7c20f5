/* memory_limit.h - how much memory this process may still allocate on its machine or in its container. */
#ifndef EP_MEMORY_LIMIT_H
#define EP_MEMORY_LIMIT_H
#include <stdbool.h>
#include <stdint.h>

/* The number of bytes that this process may allocate before the kernel's OOM killer ends a process. It is the
 * minimum of the available memory in /proc/meminfo and of what the process's control groups (v2 or v1) leave.
 * UINT64_MAX if neither gives a limit. root: "", or for tests a folder that replaces the root of the file
 * system. */
uint64_t ep_free_bytes(const char *root);

#endif /* EP_MEMORY_LIMIT_H */
