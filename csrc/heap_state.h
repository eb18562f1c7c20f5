/* heap_state.h - a heap from within: heap_create.c makes it, heap.c allocates in it, reaches peers through it and ends it. */
#ifndef EP_HEAP_STATE_H
#define EP_HEAP_STATE_H
#include <stdatomic.h>

#include "allocator.h"
#include "backend.h"
#include "memory.h"

struct EpHeap {
    EpWorld *world;
    const EpBackend *backend;
    EpBackendKind kind;
    int device;
    atomic_int num_refs;
    bool closed;
    uint64_t num_bytes;
    void *base[EP_MAX_RANKS];
    EpMemory *memory[EP_MAX_RANKS]; /* mine; and, of threads, the peers' */
    EpAllocator allocator;
    EpCommBuffer control; /* barrier, and the faults of wait */
    bool has_control;
    uint32_t reserved_sms; /* see ep_heap_reserved_sms */
};

#endif /* EP_HEAP_STATE_H */
