/* heap.c - a symmetric heap: allocate, translate, put, get, signal, wait, barrier, close and release.
 *
 * Every rank has memory of the same size, and an allocator that runs identically on all ranks. Invariant: an
 * offset means the same on every rank. So the address of data on a peer is: address - own base + peer's base.
 * All ranks compare each allocation and each free before they execute it.
 * The heap is reference-counted. Tensors hold references. The last release unmaps it, without asking a peer.
 *
 * A peer may still copy to or from memory that this rank releases. On the CPU this is safe: the peer has its
 * own mapping of a file, which exists as long as any rank maps it. GPU memory must not be freed while a peer
 * uses it or has it mapped. So the collective close has two steps: all ranks unmap the memory of their peers,
 * and then each rank frees its own. A rank that still has a tensor over the memory of a peer does not unmap,
 * and tells the others. Their memory, and that of a heap that is released before the close, is left to the
 * world (ep_memory_retain), which frees it at its own release. If a later heap cannot be allocated, the error
 * says how many bytes are retained.
 * The last release of a GPU heap is a destructor, which makes no call of CUDA (deferred_free.h). */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/heap_state.h"
#include "runtime/world.h"

const EpBackend *ep_heap_backend(const EpHeap *h) { return h->backend; }
EpWorld *ep_heap_world(const EpHeap *h) { return h->world; }
EpBackendKind ep_heap_kind(const EpHeap *h) { return h->kind; }
int ep_heap_device(const EpHeap *h) { return h->device; }
uint16_t ep_heap_number(const EpHeap *h) { return h->control.of; }

/* True if this rank may free its memory now. CPU memory: always, because each peer has its own mapping. GPU
 * memory: when no peer can use it, that is after the collective close if all peers have unmapped it, in a
 * world of one rank, or after the world has ended. */
static bool may_free(EpHeap *h) {
    return h->kind == EP_CPU || (h->closed && !h->is_mapped) || ep_world_size(h->world) == 1 ||
           ep_world_check(h->world) != 0;
}

EpHeap *ep_heap_retain(EpHeap *h) {
    atomic_fetch_add(&h->num_refs, 1);
    return h;
}

/* Unmap the memory of rank r, or free this rank's own. Ranks that are threads share the memory; the last one
 * frees it. */
static void drop_memory(EpHeap *h, uint32_t r) {
    EpMemory *m = h->memory[r];
    void *base = h->base[r];
    h->memory[r] = NULL;
    h->base[r] = NULL;
    if (!m && base && r != ep_world_rank(h->world)) h->backend->heap_unimport(h->device, base, h->num_bytes);
    if (!m || !ep_memory_drop(m)) return;
    if (m->address && may_free(h)) h->backend->heap_close(h->device, m->address, h->num_bytes);
    else if (m->address) ep_memory_retain(h->world, h->backend, h->device, m->address, h->num_bytes);
    free(m);
}

static bool has_memory(const EpHeap *h) {
    bool found = h->control.comm.host != NULL || atomic_load(&h->layers) != NULL;
    for (uint32_t r = 0; r < EP_MAX_RANKS; r++) found |= h->base[r] != NULL;
    return found;
}

/* Free all that a heap has. The reference to its world is released already, but the world is still there. */
static void destroy(void *heap) {
    EpHeap *h = (EpHeap *)heap;
    ep_run_deferred_frees(&h->layers);
    if (h->has_control) ep_comm_close(&h->control);
    for (uint32_t r = 0; r < EP_MAX_RANKS; r++) drop_memory(h, r);
    pthread_mutex_destroy(&h->drop_lock);
    pthread_mutex_destroy(&h->barrier_lock);
    free(h);
}

void ep_heap_release(EpHeap *h) {
    if (!h || atomic_fetch_sub(&h->num_refs, 1) != 1) return;
    EpWorld *world = h->world;
    if (ep_world_is_forked(world)) return; /* the memory and its handles belong to the parent process */
    if (h->kind == EP_CUDA && has_memory(h))
        ep_defer_free(ep_world_deferred_frees(world), &h->deferred_free, destroy, h);
    else destroy(h);
    ep_world_release(world);
}

EpDeferredFrees *ep_heap_deferred_layers(EpHeap *h) { return &h->layers; }

void ep_heap_run_deferred_frees(EpHeap *h) {
    ep_run_deferred_frees(&h->layers);
    ep_run_deferred_frees(ep_world_deferred_frees(h->world));
}

void ep_heap_retain_view(EpHeap *h, uint32_t peer) {
    ep_heap_retain(h);
    atomic_fetch_add(peer == ep_world_rank(h->world) ? &h->num_views : &h->num_peer_views, 1);
}
void ep_heap_release_view(EpHeap *h, uint32_t peer) {
    atomic_fetch_sub(peer == ep_world_rank(h->world) ? &h->num_views : &h->num_peer_views, 1);
    ep_heap_release(h);
}

int ep_heap_check_open(const EpHeap *h) {
    return h->closed ? ep_error(EP_ECLOSED, "this heap is closed: create a new heap") : 0;
}

/* Wait until this rank's device has finished all work. After the end of the world, do not wait: no peer waits
 * for this rank, and the kernels of other ranks may never finish. */
int ep_heap_quiesce(EpHeap *h) { return ep_world_check(h->world) ? 0 : h->backend->sync_all(h->device); }

/* After all ranks have come to the close: unmap the memory of the peers, and then free this rank's own. What
 * tensors refer to stays until they are dropped. */
static int give_memory_back(EpHeap *h) {
    const uint32_t me = ep_world_rank(h->world);
    const bool has_peer_views = atomic_load(&h->num_peer_views) != 0;
    unsigned char mine = has_peer_views, all[EP_MAX_RANKS];
    ep_heap_run_deferred_frees(h);
    ep_comm_close(&h->control);
    for (uint32_t r = 0; r < EP_MAX_RANKS; r++)
        if (r != me && !has_peer_views) drop_memory(h, r);
    EP_TRY(ep_world_all_gather(h->world, &mine, 1, all));
    for (uint32_t r = 0; r < ep_world_size(h->world); r++) h->is_mapped |= r != me && all[r];
    if (atomic_load(&h->num_views) == 0) drop_memory(h, me);
    return 0;
}

int ep_heap_close(EpHeap *h) {
    unsigned char mine = 0, all[EP_MAX_RANKS];
    uint64_t record;
    if (h->closed) return 0;
    EP_TRY(ep_world_enter_call(h->world, &(EpCallRecord){.what = EP_CALL_HEAP_CLOSE, .of = h->control.of},
                               &record));
    if (h->closed) { /* by another thread, while this one waited to enter the call */
        ep_world_leave_call(h->world, record, 0);
        return 0;
    }
    int synced = ep_heap_quiesce(h);
    int code = ep_world_all_gather(h->world, &mine, 1, all); /* no rank unmaps before all have quiesced */
    /* If the all-gather failed and the world has not ended, a rank was in another call. All must close
     * again. */
    h->closed = !code || ep_world_check(h->world) != 0;
    if (!code && h->kind == EP_CUDA) code = give_memory_back(h);
    /* On the CPU the memory stays until the heap is released. Its place among the buffers that the world
     * watches is freed here. */
    if (!code && h->kind == EP_CPU) ep_world_unwatch(h->world, &h->control);
    ep_world_leave_call(h->world, record, code);
    return code ? code : synced;
}

/* ---- allocate and free, identically on all ranks ---- */

/* What a rank sends to all others before it allocates or frees. For an allocation: the size that the caller
 * asks for, and the alignment. For a free: the alignment is 0, and num_bytes is not a size but the offset of
 * the allocation to free. status: 0, or the EpCode with which this rank cannot take part. If a rank's status
 * is not 0, or if the ranks have different calls, the call fails on all ranks. */
typedef struct {
    uint64_t num_bytes, alignment;
    int64_t status;
} Call;
/* One bit for each block of the allocator: its owner was dropped on this rank. The blocks are the same on all
 * ranks, so that a bit means the same block. */
#define DROP_WORDS ((EP_MAX_BLOCKS + 63u) / 64u)
typedef struct {
    Call call;
    uint64_t dropped[DROP_WORDS];
} Offer;
_Static_assert(sizeof(Offer) <= EP_ALL_GATHER_BYTES, "an offer fits into one all-gather");

void ep_heap_drop(EpHeap *h, uint64_t off) {
    pthread_mutex_lock(&h->drop_lock);
    if (h->num_dropped < EP_MAX_ALLOCATIONS) h->dropped[h->num_dropped++] = off;
    pthread_mutex_unlock(&h->drop_lock);
}

static void offer_dropped(EpHeap *h, uint64_t bits[DROP_WORDS]) {
    pthread_mutex_lock(&h->drop_lock);
    for (uint32_t i = 0; i < h->allocator.num_blocks && h->num_dropped; i++)
        for (uint32_t k = 0; k < h->num_dropped; k++)
            if (h->allocator.blocks[i].used && h->allocator.blocks[i].off == h->dropped[k])
                bits[i / 64] |= 1ull << i % 64;
    pthread_mutex_unlock(&h->drop_lock);
}

/* Free what was dropped on all ranks. Every rank has the same offers, so all free the same blocks. From the
 * last block to the first, because a free merges blocks and changes the numbers of those behind. */
static void free_dropped(EpHeap *h, const Offer *all) {
    for (uint32_t i = h->allocator.num_blocks; i-- > 0;) {
        const uint64_t off = h->allocator.blocks[i].off;
        bool is_dropped = true;
        for (uint32_t r = 0; r < ep_world_size(h->world); r++)
            is_dropped &= (all[r].dropped[i / 64] >> i % 64 & 1) != 0;
        if (!is_dropped || ep_allocator_give_back(&h->allocator, off)) continue;
        pthread_mutex_lock(&h->drop_lock);
        for (uint32_t k = 0; k < h->num_dropped; k++)
            if (h->dropped[k] == off) h->dropped[k--] = h->dropped[--h->num_dropped];
        pthread_mutex_unlock(&h->drop_lock);
    }
}

static int agree(EpHeap *h, const Call *call) {
    Offer mine = {*call, {0}}, all[EP_MAX_RANKS];
    EP_TRY(ep_heap_check_open(h));
    offer_dropped(h, mine.dropped);
    EP_TRY(ep_world_all_gather(h->world, &mine, sizeof mine, all));
    for (uint32_t r = 0; r < ep_world_size(h->world); r++) {
        const Call *its = &all[r].call, *first = &all[0].call;
        const unsigned long long size = its->num_bytes, first_size = first->num_bytes;
        if (its->status)
            return ep_error(EP_EPEER, "rank %u failed before this %s (%s)", r,
                            call->alignment ? "allocation" : "free", ep_error_name((int)its->status));
        if (memcmp(its, first, sizeof *its) == 0) continue;
        if (call->alignment == 0)
            return ep_error(EP_EMISMATCH, "rank %u frees the allocation at offset %llu, rank 0 at %llu", r,
                            size, first_size);
        return ep_error(
            EP_EMISMATCH, "rank %u allocates %llu bytes (alignment %llu), rank 0 %llu (alignment %llu)", r,
            size, (unsigned long long)its->alignment, first_size, (unsigned long long)first->alignment);
    }
    free_dropped(h, all);
    return 0;
}

static int alloc(EpHeap *h, uint64_t num_bytes, uint64_t alignment, int status, uint64_t *off) {
    Call mine = {num_bytes, alignment, status};
    char why[256];
    if (!status && (alignment == 0 || (alignment & (alignment - 1)) || alignment > 2u << 20))
        status =
            ep_error(EP_EINVAL, "alignment %llu: a power of two up to 2 MiB", (unsigned long long)alignment);
    mine.status = status;
    snprintf(why, sizeof why, "%s", ep_error_text());
    int code = agree(h, &mine);
    /* EP_EPEER may mean this rank's own status. Then its own text says more precisely what is wrong. */
    if (status && code == EP_EPEER) return ep_error(status, "%s", why);
    EP_TRY(code);
    *off = 0;
    if (num_bytes == 0) return 0; /* all ranks have agreed to allocate nothing */
    EP_TRY(ep_allocator_take(&h->allocator, num_bytes, alignment, off));
    code = h->backend->zero(h->device, (unsigned char *)h->base[ep_world_rank(h->world)] + *off, num_bytes,
                            NULL);
    if (!code) code = h->backend->sync(h->device, NULL, h->world);
    /* After this all-gather all ranks have zeroed their part. So no peer writes into it before it is
     * zeroed. */
    code = ep_world_agree(h->world, code, "clear its part of an allocation");
    if (code) ep_allocator_give_back(&h->allocator, *off);
    return code;
}

int ep_heap_alloc(EpHeap *h, uint64_t num_bytes, uint64_t alignment, int status, uint64_t *off) {
    const EpCallRecord call = {
        .what = EP_CALL_ALLOC, .of = h->control.of, .size = num_bytes, .code = (int16_t)status};
    uint64_t record;
    EP_TRY(ep_world_enter_call(h->world, &call, &record));
    int code = alloc(h, num_bytes, alignment, status, off);
    ep_world_leave_call(h->world, record, code);
    return code;
}

static int free_allocation(EpHeap *h, uint64_t off) {
    /* Offset 0 stands for an allocation of 0 bytes: there is nothing to check and nothing to free. */
    int status = off ? ep_allocator_check(&h->allocator, off) : 0;
    Call mine = {off, 0, status};
    int code = agree(h, &mine);
    /* Report this rank's own error: check again, to set its text. */
    if (status && code == EP_EPEER) return ep_allocator_check(&h->allocator, off);
    EP_TRY(code);
    return off ? ep_allocator_give_back(&h->allocator, off) : 0;
}

int ep_heap_free(EpHeap *h, uint64_t off) {
    uint64_t record;
    EP_TRY(
        ep_world_enter_call(h->world, &(EpCallRecord){.what = EP_CALL_FREE, .of = h->control.of}, &record));
    int code = free_allocation(h, off);
    ep_world_leave_call(h->world, record, code);
    return code;
}

int ep_heap_alloc_buffer(EpHeap *h, const EpShape *shape, EpCommBuffer *b) {
    return ep_heap_alloc(h, ep_comm_layout(shape).num_bytes, EP_LINE, 0, &b->off);
}

int ep_heap_open_buffer(EpHeap *h, const EpShape *shape, EpCommBuffer *b) {
    b->world = h->world;
    b->backend = h->backend;
    b->device = h->device;
    b->on_stream = h->kind == EP_CUDA;
    b->comm.reserve_sms = h->reserved_sms;
    for (uint32_t r = 0; r < shape->num_ranks; r++) b->comm.base[r] = (unsigned char *)h->base[r] + b->off;
    return ep_comm_open(b, shape);
}

int ep_heap_stats(EpHeap *h, EpHeapStats *s) {
    EP_TRY(ep_heap_check_open(h));
    ep_allocator_stats(&h->allocator, s);
    return 0;
}

/* ---- translate, put, get, signal, wait ---- */

int ep_heap_offset(EpHeap *h, const void *address, uint64_t num_bytes, uint64_t *off) {
    uintptr_t base = (uintptr_t)h->base[ep_world_rank(h->world)], a = (uintptr_t)address;
    EP_TRY(ep_heap_check_open(h));
    if (a < base || a - base > h->num_bytes || h->num_bytes - (a - base) < num_bytes)
        return ep_error(EP_EINVAL, "the tensor is not in this symmetric heap");
    *off = a - base;
    return 0;
}

int ep_heap_translate(EpHeap *h, uint64_t off, uint32_t peer, void **address) {
    EP_TRY(ep_heap_check_open(h));
    if (peer >= ep_world_size(h->world))
        return ep_error(EP_EINVAL, "rank %u of a world of %u", peer, ep_world_size(h->world));
    if (off > h->num_bytes)
        return ep_error(EP_EINVAL, "offset %llu is outside the heap", (unsigned long long)off);
    *address = (unsigned char *)h->base[peer] + off;
    return 0;
}

_Static_assert(EP_DEV_MAX_RANKS == EP_MAX_RANKS, "a device handle has a base for every rank");
int ep_heap_handle(EpHeap *h, EpDeviceHeap *handle) {
    EP_TRY(ep_heap_check_open(h));
    EP_TRY(ep_world_check(h->world));
    *handle = (EpDeviceHeap){.world_ended = &h->control.comm.host->abort,
                             .timeout_ns = ep_world_timeout_ns(h->world)};
    handle->my_rank = ep_world_rank(h->world);
    handle->num_ranks = ep_world_size(h->world);
    for (uint32_t r = 0; r < handle->num_ranks; r++) handle->base[r] = (unsigned char *)h->base[r];
    return 0;
}

/* Validate an access to num_bytes at an offset of a peer, and compute the address. Also fails if an earlier
 * operation of this heap has failed (ep_comm_check). */
static int locate(EpHeap *h, uint64_t off, uint64_t num_bytes, uint32_t peer, void *stream, void **address) {
    EP_TRY(ep_heap_translate(h, off, peer, address));
    if (h->num_bytes - off < num_bytes)
        return ep_error(EP_EINVAL, "%llu bytes at offset %llu reach past the heap's end",
                        (unsigned long long)num_bytes, (unsigned long long)off);
    return ep_comm_check(&h->control, stream);
}

/* A copy to itself is nothing. The copy of a GPU is undefined if the two overlap in part. */
static int copy(const EpHeap *h, void *dst, const void *src, uint64_t num_bytes, void *stream) {
    const uintptr_t to = (uintptr_t)dst, from = (uintptr_t)src;
    if (to == from) return 0;
    if (to < from + num_bytes && from < to + num_bytes)
        return ep_error(EP_EINVAL, "dst and src share a part of their memory: copy from a clone() of src");
    return h->backend->copy(h->device, dst, src, num_bytes, stream);
}

int ep_heap_put(EpHeap *h, uint64_t dst_off, const void *src, uint64_t num_bytes, uint32_t peer,
                void *stream) {
    void *dst;
    EP_TRY(locate(h, dst_off, num_bytes, peer, stream, &dst));
    return copy(h, dst, src, num_bytes, stream);
}

int ep_heap_get(EpHeap *h, void *dst, uint64_t src_off, uint64_t num_bytes, uint32_t peer, void *stream) {
    void *src;
    EP_TRY(locate(h, src_off, num_bytes, peer, stream, &src));
    return copy(h, dst, src, num_bytes, stream);
}

static int check_word(uint64_t off) {
    if (off % 8 == 0) return 0;
    return ep_error(EP_EINVAL, "offset %llu: a signal word must be at a multiple of 8 bytes",
                    (unsigned long long)off);
}

int ep_heap_signal(EpHeap *h, uint64_t off, uint64_t value, bool add, uint32_t peer, void *stream) {
    void *word;
    EP_TRY(check_word(off));
    EP_TRY(locate(h, off, 8, peer, stream, &word));
    uint64_t record = ep_world_begin_call(
        h->world,
        &(EpCallRecord){.what = EP_CALL_SIGNAL, .on_stream = h->kind == EP_CUDA, .of = h->control.of});
    int code = h->backend->signal(h->device, (uint64_t *)word, value, add, stream);
    ep_world_end_call(h->world, record, code);
    return code;
}

int ep_heap_wait(EpHeap *h, uint64_t off, uint64_t value, bool exact, void *stream) {
    void *word;
    EP_TRY(check_word(off));
    EP_TRY(locate(h, off, 8, ep_world_rank(h->world), stream, &word));
    h->control.comm.timeout_ns = ep_world_timeout_ns(h->world);
    uint64_t record = ep_world_begin_call(
        h->world,
        &(EpCallRecord){.what = EP_CALL_WAIT, .on_stream = h->kind == EP_CUDA, .of = h->control.of});
    int code = h->backend->wait(h->device, &h->control.comm, (const uint64_t *)word, value, exact, stream);
    ep_world_end_call(h->world, record, code);
    EP_TRY(code);
    return h->kind == EP_CPU ? ep_comm_check(&h->control, stream) : 0;
}

static int barrier(EpHeap *h, void *stream) {
    EP_TRY(ep_heap_check_open(h));
    EP_TRY(ep_comm_check(&h->control, stream));
    h->control.comm.timeout_ns = ep_world_timeout_ns(h->world);
    uint64_t record = ep_comm_begin_call(&h->control, EP_OP_BARRIER, 0, 0, stream);
    int code = h->backend->enter(h->device, &h->control.comm, EP_OP_BARRIER, stream);
    ep_world_end_call(h->world, record, code);
    if (code) ep_comm_give_up(&h->control, code, stream);
    EP_TRY(code);
    return h->kind == EP_CPU ? ep_comm_check(&h->control, stream) : 0;
}

int ep_heap_barrier(EpHeap *h, void *stream) {
    /* Two threads would read the same epoch of the buffer, and their two barriers would be one. */
    EP_TRY(ep_world_lock(h->world, &h->barrier_lock));
    const int code = barrier(h, stream);
    pthread_mutex_unlock(&h->barrier_lock);
    return code;
}

int ep_heap_sync(EpHeap *h, void *stream) {
    EP_TRY(ep_heap_check_open(h));
    EP_TRY(h->backend->sync(h->device, stream, h->world));
    return ep_comm_check(&h->control, stream);
}
