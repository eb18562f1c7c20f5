/* heap_state.h - the fields of a symmetric heap, for the two files that implement it. heap_create.c creates a
 * heap; heap.c allocates in it, accesses peers through it, closes and releases it.
 * Invariant: num_bytes, the allocator's state and the offset of `control` are the same on all ranks. */
#ifndef EP_HEAP_STATE_H
#define EP_HEAP_STATE_H
#include <pthread.h>
#include <stdatomic.h>

#include "backend.h"
#include "runtime/allocator.h"
#include "runtime/deferred_free.h"
#include "runtime/memory.h"

struct EpHeap {
    EpWorld *world;
    const EpBackend *backend;
    EpBackendKind kind;
    int device;
    atomic_int num_refs;
    bool closed;
    uint64_t num_bytes;
    void *base[EP_MAX_RANKS];       /* each rank's memory, as this process has mapped it */
    EpMemory *memory[EP_MAX_RANKS]; /* this rank's; also the peers' if ranks are threads, otherwise NULL */
    EpAllocator allocator;
    /* The offsets of allocations whose owner was dropped on this rank; see ep_heap_drop. Destructors add to
     * them at any time, so the lock guards the two fields. */
    pthread_mutex_t drop_lock;
    uint64_t dropped[EP_MAX_ALLOCATIONS];
    uint32_t num_dropped;
    EpCommBuffer control;         /* for ep_heap_barrier, and for the faults of ep_heap_wait */
    pthread_mutex_t barrier_lock; /* one thread of a rank is in a barrier at a time */
    bool has_control;
    atomic_uint num_views, num_peer_views; /* tensors over this rank's memory, and over that of its peers */
    bool is_mapped; /* after the collective close: a peer has not unmapped this rank's memory */
    EpDeferredFree deferred_free;
    EpDeferredFrees layers; /* layers of this heap whose free is deferred */
    /* SMs that this rank leaves to other ranks on the same GPU; 0 if it has the GPU to itself. */
    uint32_t reserved_sms;
};

#endif /* EP_HEAP_STATE_H */
