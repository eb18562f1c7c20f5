/* world.h - what heap.c and layer.c need of a world beyond epmoe.h. */
#ifndef EP_WORLD_H
#define EP_WORLD_H
#include "record.h"

EpWorld *ep_world_retain(EpWorld *world);
/* As ep_world_exchange, and a descriptor to every peer: fd_out is -1 or mine, fds_in NULL or (from -1 on) theirs. */
int ep_world_exchange_fd(EpWorld *world, const void *mine, uint32_t num_bytes, void *all, int fd_out,
                         int *fds_in);
/* Collective, behind what each rank does alone: 0, or the error of this rank, or of the first that "could not" do it. */
int ep_world_agree(EpWorld *world, int code, const char *what);
/* True when peer lives in this process: its heap is reached by its own addresses. */
bool ep_world_is_threads(const EpWorld *world);
uint64_t ep_world_timeout_ns(const EpWorld *world);
/* Look after this buffer's host words: their abort word is set when the world ends, and the world ends for all
 * when a wait in them has timed out. */
int ep_world_watch(EpWorld *world, const EpCommBuffer *buffer);
void ep_world_unwatch(EpWorld *world, const EpCommBuffer *buffer);
/* For the flight record (record.h).  This rank enters an operation: its number for ep_world_noted when it is
 * over, or 0 inside of another one. */
uint64_t ep_world_note(EpWorld *world, const EpNote *note);
void ep_world_noted(EpWorld *world, uint64_t note, int code);
/* An operation has failed: the last num were nothing, and are not counted. */
void ep_world_unnote(EpWorld *world, uint64_t num);
/* This rank's count need not be the others' any more (ep_ring_blur). */
void ep_world_blur(EpWorld *world);
/* A number for a new heap or layer: the same on every rank. */
uint16_t ep_world_number_heap(EpWorld *world);
uint16_t ep_world_number_layer(EpWorld *world);
/* Do this when nobody holds the world any more, the newest first.  False: there is no memory to remember it. */
bool ep_world_at_release(EpWorld *world, void (*action)(void *), void *argument);
/* True in a process that was forked from the one that made the world. */
bool ep_world_is_forked(const EpWorld *world);

#endif /* EP_WORLD_H */
