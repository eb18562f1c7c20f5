/* world.h - what heap.c and layer.c need of a world beyond epmoe.h. */
#ifndef EP_WORLD_H
#define EP_WORLD_H
#include "epmoe.h"

EpWorld *ep_world_retain(EpWorld *world);
/* As ep_world_exchange, and a descriptor to every peer: fd_out is -1 or mine, fds_in NULL or theirs. */
int ep_world_exchange_fd(EpWorld *world, const void *mine, uint32_t num_bytes, void *all, int fd_out, int *fds_in);
/* True when peer lives in this process: its heap is reached by its own addresses. */
bool ep_world_is_threads(const EpWorld *world);
uint64_t ep_world_timeout_ns(const EpWorld *world);
/* Look after these words: their abort word is set when the world ends, and the world ends for all when
 * a wait in them has timed out. */
int ep_world_watch(EpWorld *world, EpHostWords *words);
void ep_world_unwatch(EpWorld *world, EpHostWords *words);
/* True in a process that was forked from the one that made the world. */
bool ep_world_is_forked(const EpWorld *world);

#endif /* EP_WORLD_H */
