/* memory.h - reference counts for the memory of heaps, and memory that is retained until its world ends.
 *
 * Ranks that are threads of one process use each other's memory at the same addresses. So each rank's memory
 * has a count of the heaps that use it, and the heap that drops the last reference frees it.
 * Exports: add, find and drop for the counts; retain and retained_bytes for memory that is left to a
 * world. */
#ifndef EP_MEMORY_H
#define EP_MEMORY_H
#include "backend.h"

typedef struct EpMemory {
    struct EpMemory *next;
    uint32_t num_refs;
    void *address;
} EpMemory;

/* Register the memory of a heap, with one reference. NULL: the registration could not be allocated. */
EpMemory *ep_memory_add(void *address);
/* The EpMemory that another rank of this process has registered, with one more reference. handle_address: the
 * address of that EpMemory, from the rank's heap_handle. NULL: it has been freed already. */
EpMemory *ep_memory_find(uint64_t handle_address);
/* Release a reference. True: it was the last one. The caller must free the heap memory and the EpMemory. */
bool ep_memory_drop(EpMemory *memory);
/* Leave the memory of a heap to the world, which frees it when the last reference to the world is released.
 * heap.c says why this is needed. */
void ep_memory_retain(EpWorld *world, const EpBackend *backend, int device, void *address,
                      uint64_t num_bytes);
/* The number of bytes that all worlds of this process retain. */
uint64_t ep_memory_retained_bytes(void);

#endif /* EP_MEMORY_H */
