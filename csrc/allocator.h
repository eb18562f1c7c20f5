/* allocator.h - which parts of a heap are taken: first fit over a list of blocks in address order.
 *
 * Pure arithmetic on offsets: given the same calls it gives the same offsets on every rank.  It touches no
 * memory but its own, and asks no peer. */
#ifndef EP_ALLOCATOR_H
#define EP_ALLOCATOR_H
#include "epmoe.h"

#define EP_MAX_BLOCKS 1024u
#define EP_HEAP_ALIGN 256u /* of every block; larger alignments are cut from within */

typedef struct {
    uint64_t off, num_bytes;
    bool used, kept; /* kept: the heap's own, neither counted nor given back */
} EpBlock;
typedef struct {
    uint32_t num_blocks;
    EpBlock blocks[EP_MAX_BLOCKS];
    uint64_t used_bytes, peak_bytes;
} EpAllocator;

void ep_allocator_open(EpAllocator *a, uint64_t num_bytes);
/* At least one byte; alignment: a power of two.  EP_ENOMEM says what was needed and what is free. */
int ep_allocator_take(EpAllocator *a, uint64_t num_bytes, uint64_t alignment, uint64_t *off);
/* 0 when an allocation begins here. */
int ep_allocator_check(const EpAllocator *a, uint64_t off);
int ep_allocator_give_back(EpAllocator *a, uint64_t off);
/* What is allocated so far is the heap's own from now on. */
void ep_allocator_keep(EpAllocator *a);
void ep_allocator_stats(const EpAllocator *a, EpHeapStats *stats);

#endif /* EP_ALLOCATOR_H */
