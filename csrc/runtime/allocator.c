/* allocator.c - first fit over an array of blocks; see allocator.h.
 * Invariant: the blocks are in the order of their offsets and cover the heap without a gap. No two free
 * blocks are neighbours, except between give_back and its call of merge_free. */
#include "runtime/allocator.h"

#include <string.h>

#include "runtime/error.h"

void ep_allocator_open(EpAllocator *a, uint64_t num_bytes) {
    memset(a, 0, sizeof *a);
    a->blocks[0] = (EpBlock){0, num_bytes, false, false};
    a->num_blocks = 1;
}

static void insert_block(EpAllocator *a, uint32_t at, EpBlock b) {
    memmove(&a->blocks[at + 1], &a->blocks[at], (a->num_blocks - at) * sizeof(EpBlock));
    a->blocks[at] = b;
    a->num_blocks++;
}

int ep_allocator_take(EpAllocator *a, uint64_t num_bytes, uint64_t alignment, uint64_t *off) {
    EpHeapStats s;
    ep_allocator_stats(a, &s);
    if (s.num_allocations >= EP_MAX_ALLOCATIONS || a->num_blocks + 2 > EP_MAX_BLOCKS)
        return ep_error(EP_ENOMEM,
                        "a heap holds at most %u allocations, and this one has %llu: free some, make one "
                        "larger allocation instead of several, or make another heap",
                        EP_MAX_ALLOCATIONS, (unsigned long long)s.num_allocations);
    /* Round up only a size that may fit. A larger size fails below, and rounding it up could overflow. */
    if (num_bytes <= s.free_bytes) num_bytes = ep_align_u64(num_bytes, EP_HEAP_ALIGN);
    if (alignment < EP_HEAP_ALIGN) alignment = EP_HEAP_ALIGN;
    for (uint32_t i = 0; i < a->num_blocks; i++) {
        EpBlock b = a->blocks[i];
        uint64_t at = ep_align_u64(b.off, alignment), end = b.off + b.num_bytes;
        if (b.used || at > end || end - at < num_bytes) continue;
        if (at > b.off) insert_block(a, i++, (EpBlock){b.off, at - b.off, false, false});
        a->blocks[i] = (EpBlock){at, num_bytes, true, false};
        if (end > at + num_bytes)
            insert_block(a, i + 1, (EpBlock){at + num_bytes, end - at - num_bytes, false, false});
        a->used_bytes += num_bytes;
        a->peak_bytes = ep_max_u64(a->peak_bytes, a->used_bytes);
        *off = at;
        return 0;
    }
    return ep_error(EP_ENOMEM,
                    "symmetric heap exhausted: needs %llu bytes, %llu free (largest block %llu) of %llu. "
                    "Create it with more bytes.",
                    (unsigned long long)num_bytes, (unsigned long long)s.free_bytes,
                    (unsigned long long)s.largest_free_bytes, (unsigned long long)s.total_bytes);
}

/* The index of the allocation that begins at this offset. Allocations of the heap itself are not found. */
static int find_block(const EpAllocator *a, uint64_t off, uint32_t *at) {
    for (*at = 0; *at < a->num_blocks; (*at)++)
        if (a->blocks[*at].off == off && a->blocks[*at].used && !a->blocks[*at].internal) return 0;
    return ep_error(EP_EINVAL, "no allocation begins at this address of the heap: pass a tensor that "
                               "malloc_symmetric returned, and free it once");
}

int ep_allocator_check(const EpAllocator *a, uint64_t off) {
    uint32_t at;
    return find_block(a, off, &at);
}

/* Merge neighbouring free blocks into one. */
static void merge_free(EpAllocator *a) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < a->num_blocks; i++) {
        if (n && !a->blocks[n - 1].used && !a->blocks[i].used)
            a->blocks[n - 1].num_bytes += a->blocks[i].num_bytes;
        else a->blocks[n++] = a->blocks[i];
    }
    a->num_blocks = n;
}

int ep_allocator_give_back(EpAllocator *a, uint64_t off) {
    uint32_t at;
    EP_TRY(find_block(a, off, &at));
    a->used_bytes -= a->blocks[at].num_bytes;
    a->blocks[at].used = false;
    merge_free(a);
    return 0;
}

void ep_allocator_mark_internal(EpAllocator *a) {
    for (uint32_t i = 0; i < a->num_blocks; i++) a->blocks[i].internal = a->blocks[i].used;
    a->used_bytes = a->peak_bytes = 0;
}

void ep_allocator_stats(const EpAllocator *a, EpHeapStats *s) {
    memset(s, 0, sizeof *s);
    s->used_bytes = a->used_bytes;
    s->peak_bytes = a->peak_bytes;
    for (uint32_t i = 0; i < a->num_blocks; i++) {
        const EpBlock *b = &a->blocks[i];
        if (b->used) {
            s->num_allocations += !b->internal;
            continue;
        }
        s->free_bytes += b->num_bytes;
        s->largest_free_bytes = ep_max_u64(s->largest_free_bytes, b->num_bytes);
    }
    s->total_bytes = s->used_bytes + s->free_bytes;
}
