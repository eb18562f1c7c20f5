/* world.h - what the heap, the layer and the communication buffers need of a world, beyond epmoe.h.
 * It exports all-gathers that pass file descriptors, the list of buffers that the watchdog thread watches,
 * and the call records of the flight record. */
#ifndef EP_WORLD_H
#define EP_WORLD_H
#include <pthread.h>

#include "runtime/deferred_free.h"
#include "runtime/flight_record.h"

EpWorld *ep_world_retain(EpWorld *world);
/* 0, or an error in a process that was forked, and in a signal handler that runs while this thread waits.
 * Such a handler is not the program's next step: its call would take the place of one that the program has
 * yet to make, and that the other ranks are in. */
int ep_world_check_caller(EpWorld *world);
/* As ep_world_all_gather, and each rank may also send a file descriptor to every peer. fd_out: this rank's
 * descriptor, or -1. fds_in: NULL, or an array of -1 that receives the peers' descriptors. After an error all
 * entries are closed and -1. */
int ep_world_all_gather_fd(EpWorld *world, const void *mine, uint32_t num_bytes, void *all, int fd_out,
                           int *fds_in);
/* Collective. Call it after a step that each rank does alone; code is the result of the step on this rank.
 * Returns 0 if the step succeeded on all ranks. Otherwise it returns this rank's error, or the error of the
 * first rank that failed: "rank 1 could not" followed by what. */
int ep_world_agree(EpWorld *world, int code, const char *what);
/* True if all ranks of the world are threads of this process (ep_world_create_threads). A rank then reaches a
 * peer's heap by the addresses that the peer itself uses. */
bool ep_world_is_threads(const EpWorld *world);
uint64_t ep_world_timeout_ns(const EpWorld *world);
/* As ep_world_abort, because a wait has failed; see ep_world_end_wait (world_state.h). */
void ep_world_abort_wait(EpWorld *world, int code, uint32_t rank, uint32_t word, const char *text);
/* Let the watchdog thread watch the host words of this buffer, until ep_world_unwatch. It sets their abort
 * word when the world ends. It ends the world for all ranks when their fault record reports a timeout. */
int ep_world_watch(EpWorld *world, const EpCommBuffer *buffer);
void ep_world_unwatch(EpWorld *world, const EpCommBuffer *buffer);
uint32_t ep_world_free_buffers(EpWorld *world); /* how many more it can watch */
/* This rank enters an operation: begin its entry among the last calls of the flight record (flight_record.h).
 * Returns the number of the entry, or 0 if this operation is a part of one that has already begun. The caller
 * passes either to ep_world_end_call when the operation is over; 0 ends no entry. */
uint64_t ep_world_begin_call(EpWorld *world, const EpCallRecord *record);
void ep_world_end_call(EpWorld *world, uint64_t record, int code);
/* The same for a collective call that consists of all-gathers. Only one thread of a rank is in such a call;
 * the others wait until it has left (all_gather.c). EP_EINVAL in a signal handler that runs during a wait,
 * and EP_ECLOSED in a forked process or when the user interrupts the wait; then this rank has not entered. */
int ep_world_enter_call(EpWorld *world, const EpCallRecord *call, uint64_t *record);
void ep_world_leave_call(EpWorld *world, uint64_t record, int code);
/* Lock a mutex of an object of this world, for an operation. The wait has no limit of its own: every wait of
 * the thread that holds the lock has one. The user can interrupt it. EP_EINVAL in a signal handler that runs
 * during a wait, and EP_ECLOSED in a forked process. */
int ep_world_lock(EpWorld *world, pthread_mutex_t *lock);
/* The user has interrupted this rank in an operation in which the others still are (interrupt.h). End the
 * world. Returns the reason of its end. ep_world_end_call does it by itself. */
int ep_world_interrupt(EpWorld *world);
/* An operation has failed, and the num operations after it had no effect. Do not count them as steps. */
void ep_world_uncount_calls(EpWorld *world, uint64_t num);
/* From now on, this rank's steps may differ from those of the other ranks (ep_ring_order_unknown). */
void ep_world_order_unknown(EpWorld *world);
/* The number of a new heap or layer. It is the same on every rank, because creation is collective. */
uint16_t ep_world_number_heap(EpWorld *world);
uint16_t ep_world_number_layer(EpWorld *world);
/* Call action(argument) after the last reference to the world was released. The action registered last runs
 * first. False: the registration could not be allocated. */
bool ep_world_at_release(EpWorld *world, void (*action)(void *), void *argument);
/* The heaps of this world whose free is deferred (deferred_free.h). They hold no reference to it. */
EpDeferredFrees *ep_world_deferred_frees(EpWorld *world);
/* True in a process that was forked from the process that created the world. */
bool ep_world_is_forked(const EpWorld *world);

#endif /* EP_WORLD_H */
