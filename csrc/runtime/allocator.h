/* allocator.h - the allocator of a symmetric heap: first fit over a list of blocks in the order of their
 * offsets. A block is a range of the heap that is either free or an allocation.
 *
 * Exports: open, take, check, give_back, mark_internal and stats.
 * Invariant: it only computes offsets. It reads and writes no memory except EpAllocator, and communicates
 * with no peer. So the same calls give the same offsets on every rank. */
#ifndef EP_ALLOCATOR_H
#define EP_ALLOCATOR_H
#include "epmoe.h"

#define EP_MAX_ALLOCATIONS 1024u /* besides those of the heap itself, which are at most EP_MAX_INTERNAL */
#define EP_MAX_INTERNAL 8u
/* Between n allocations are at most n + 1 free blocks. */
#define EP_MAX_BLOCKS (2u * (EP_MAX_ALLOCATIONS + EP_MAX_INTERNAL) + 1u)
#define EP_HEAP_ALIGN 256u /* of every block; a larger alignment may leave a free block before it */

typedef struct {
    uint64_t off, num_bytes;
    bool used;     /* an allocation */
    bool internal; /* an allocation of the heap itself: it is in no statistics and cannot be freed */
} EpBlock;
typedef struct {
    uint32_t num_blocks;
    EpBlock blocks[EP_MAX_BLOCKS];
    uint64_t used_bytes, peak_bytes;
} EpAllocator;

void ep_allocator_open(EpAllocator *a, uint64_t num_bytes);
/* Allocate num_bytes (at least 1) at a multiple of alignment, a power of two. EP_ENOMEM: there are
 * EP_MAX_ALLOCATIONS, or the text says how many bytes were needed and how many are free. */
int ep_allocator_take(EpAllocator *a, uint64_t num_bytes, uint64_t alignment, uint64_t *off);
/* 0 if an allocation begins at this offset that give_back would accept; otherwise EP_EINVAL. */
int ep_allocator_check(const EpAllocator *a, uint64_t off);
int ep_allocator_give_back(EpAllocator *a, uint64_t off);
/* From now on, the allocations made so far belong to the heap itself (internal). */
void ep_allocator_mark_internal(EpAllocator *a);
void ep_allocator_stats(const EpAllocator *a, EpHeapStats *stats);

#endif /* EP_ALLOCATOR_H */
