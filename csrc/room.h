/* room.h - how much memory the machine, or the container, still has. */
#ifndef EP_ROOM_H
#define EP_ROOM_H
#include <stdbool.h>
#include <stdint.h>

/* Bytes that this process may take before somebody is killed for it: what /proc/meminfo and the limits of its
 * control groups (v2 or v1) leave, the least of them; UINT64_MAX where nothing says.  root: "", or a folder
 * that stands for the root of the file system. */
uint64_t ep_room_bytes(const char *root);

#endif /* EP_ROOM_H */
