/* memory.h - a rank's memory, counted within its process, and what of it is left to worlds.
 *
 * Ranks that are threads reach each other's memory by the same addresses: the last heap over it gives it back. */
#ifndef EP_MEMORY_H
#define EP_MEMORY_H
#include "backend.h"

typedef struct EpMemory {
    struct EpMemory *next;
    uint32_t num_refs;
    void *address;
} EpMemory;

/* NULL without memory for it. */
EpMemory *ep_memory_add(void *address);
/* The one that another rank of this process has named by its address, with a reference more; or NULL. */
EpMemory *ep_memory_find(uint64_t card_address);
/* True when the caller was the last, and has to give back what it stands for, and itself. */
bool ep_memory_drop(EpMemory *memory);
/* Leave a block to the world, which gives it back when nobody holds it any more (heap.c says when). */
void ep_memory_keep(EpWorld *world, const EpBackend *backend, int device, void *address, uint64_t num_bytes);
/* Of all worlds of this process. */
uint64_t ep_memory_kept_bytes(void);

#endif /* EP_MEMORY_H */
