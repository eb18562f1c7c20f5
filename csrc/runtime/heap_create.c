/* heap_create.c - creates a symmetric heap (ep_heap_create). The steps:
 *   1. All ranks compare size and backend. On the host in the CPU backend, and on a GPU that several ranks
 *      share, they check that there is memory for the heaps of all.
 *   2. Each rank allocates its memory and sends a handle, with which others can map it, to all others.
 *   3. Each rank maps the memory of all others. It also loads its kernels, so that a failure is known here.
 *   4. Each rank tests reads and writes of every rank's memory.
 *   5. Each rank allocates the control buffer in its heap: the words that barrier and wait use.
 *
 * Invariant: each step ends with an all-gather of the results. All ranks judge the same results. So a failure
 * of one rank makes the step fail on all. If a rank dies, the all-gather fails. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/error.h"
#include "runtime/heap_state.h"
#include "runtime/sharing.h"
#include "runtime/world.h"

#define MAX_HEAP_BYTES (1ull << 46)

/* The word that rank `from` writes into the heap of rank `to`: "epMOE" in ASCII, then the two ranks, so that
 * a word in the wrong heap, or from the wrong rank, is noticed. */
static uint64_t self_test_value(uint32_t from, uint32_t to) { return 0x65704d4f45000000ull | from << 8 | to; }

/* Test every pair of ranks. Each rank writes a word into every heap and reads it back through the link. After
 * an all-gather it checks that the words of all ranks have arrived in its own heap. */
static int self_test(EpHeap *h) {
    uint32_t me = ep_world_rank(h->world), W = ep_world_size(h->world);
    struct {
        int32_t code;
        uint32_t peer;
    } mine = {0, 0}, all[EP_MAX_RANKS];
    unsigned char none = 0, nones[EP_MAX_RANKS];
    uint64_t value, seen;
    for (uint32_t r = 0; r < W && !mine.code; r++) {
        value = self_test_value(me, r);
        seen = 0;
        uint64_t *word = (uint64_t *)h->base[r] + me;
        if (h->backend->copy(h->device, word, &value, 8, NULL) ||
            h->backend->copy(h->device, &seen, word, 8, NULL) ||
            h->backend->sync(h->device, NULL, h->world) || seen != value) {
            mine.code = EP_ESYS;
            mine.peer = r;
        }
    }
    EP_TRY(ep_world_all_gather(h->world, &none, 1, nones));
    for (uint32_t r = 0; r < W && !mine.code; r++) {
        seen = 0;
        if (h->backend->copy(h->device, &seen, (uint64_t *)h->base[me] + r, 8, NULL) ||
            h->backend->sync(h->device, NULL, h->world) || seen != self_test_value(r, me)) {
            mine.code = EP_ESYS;
            mine.peer = r;
        }
    }
    EP_TRY(ep_world_all_gather(h->world, &mine, sizeof mine, all));
    for (uint32_t r = 0; r < W; r++)
        if (all[r].code)
            return ep_error(EP_ESYS, "rank %u cannot write and read the heap of rank %u", r, all[r].peer);
    return 0;
}

/* What a rank sends to all others after a step: its memory handle, the free memory of its device, the
 * requested size and backend, and the result of the step. */
typedef struct {
    EpHeapHandle heap_handle;
    EpHeapDevice device;
    uint64_t wanted_bytes; /* the size that the caller has requested */
    int32_t code, kind;    /* 0 or an EpCode; EpBackendKind */
    char text[192];        /* the error text of code */
} Offer;
_Static_assert(sizeof(Offer) <= EP_ALL_GATHER_BYTES, "an offer fits into one all-gather");

/* Map the memory of all peers. After an error (mine->code), only close the descriptors that have arrived. */
static void import_peers(EpHeap *h, const Offer *all, int *fds, Offer *mine) {
    uint32_t me = ep_world_rank(h->world), W = ep_world_size(h->world);
    for (uint32_t r = 0; r < W; r++) {
        if (r == me) continue;
        if (mine->code) {
            if (fds[r] >= 0) close(fds[r]);
        } else if (ep_world_is_threads(h->world)) {
            if (fds[r] >= 0) close(fds[r]);
            h->memory[r] = ep_memory_find(all[r].heap_handle.address);
            if (h->memory[r]) h->base[r] = h->memory[r]->address;
            else mine->code = ep_error(EP_EPEERDIED, "rank %u left while its heap was being mapped", r);
        } else {
            mine->code = h->backend->heap_import(h->device, &all[me].heap_handle, &all[r].heap_handle, fds[r],
                                                 &h->base[r]);
            if (mine->code)
                snprintf(mine->text, sizeof mine->text, "the heap of rank %u: %.90s", r, ep_error_text());
        }
    }
}

static const char *kind_name(int32_t kind) {
    return kind == EP_CPU ? "CPU" : kind == EP_CUDA ? "CUDA" : "unknown";
}

/* The first error in the offers of all ranks. All ranks judge the same offers, so all fail or none. */
static int judge_offers(Offer *all, uint32_t W, uint32_t me) {
    for (uint32_t r = 0; r < W; r++)
        all[r].text[sizeof all[r].text - 1] = 0; /* a peer's text may lack its terminating zero */
    /* This rank's own error first: the caller must see what is wrong on its rank. */
    if (all[me].code) return ep_error(all[me].code, "rank %u: %s", me, all[me].text);
    for (uint32_t r = 0; r < W; r++) {
        if (all[r].code == EP_EINVAL || all[r].code == EP_ETYPE || all[r].code == EP_ERUNTIME)
            return ep_error(EP_EPEER, "rank %u could not make its heap (%s): %s", r,
                            ep_error_name(all[r].code), all[r].text);
        if (all[r].code) return ep_error(all[r].code, "rank %u: %s", r, all[r].text);
        if (all[r].wanted_bytes != all[0].wanted_bytes)
            return ep_error(EP_EMISMATCH, "heap of %llu bytes on rank %u, of %llu on rank 0",
                            (unsigned long long)all[r].wanted_bytes, r,
                            (unsigned long long)all[0].wanted_bytes);
        if (all[r].kind != all[0].kind)
            return ep_error(EP_EMISMATCH,
                            "rank %u creates a heap of the %s backend, rank 0 one of the %s backend. Use the "
                            "same on all ranks.",
                            r, kind_name(all[r].kind), kind_name(all[0].kind));
    }
    return 0;
}

/* The control buffer has no rows. Its memory is added to the size that the caller has requested, so that the
 * caller can allocate all of that. */
static EpShape control_shape(uint32_t W) {
    return (EpShape){.num_ranks = W, .num_experts = W, .num_topk = 1};
}
static uint64_t control_bytes(uint32_t W) {
    const EpShape shape = control_shape(W);
    return ep_align_u64(ep_comm_layout(&shape).num_bytes, EP_HEAP_ALIGN);
}

/* Collective: open the allocator, and the control buffer that the heap itself needs. */
static int open_control(EpHeap *h) {
    uint32_t W = ep_world_size(h->world);
    const EpShape shape = control_shape(W);
    ep_allocator_open(&h->allocator, h->num_bytes);
    h->control.is_heaps = true;
    h->control.of = ep_world_number_heap(h->world);
    /* Clear the words that the self test has written. */
    int cleared = h->backend->zero(h->device, h->base[ep_world_rank(h->world)], 8ull * W, NULL);
    EP_TRY(ep_heap_alloc_buffer(h, &shape, &h->control));
    int code = cleared ? cleared : ep_heap_open_buffer(h, &shape, &h->control);
    h->has_control = !code;
    EP_TRY(ep_world_agree(h->world, code, "make its heap"));
    ep_allocator_mark_internal(&h->allocator); /* statistics count only what the caller allocates */
    return 0;
}

/* Step 2 on this rank: allocate its memory, and complete its offer with the handle or with the error.
 * *fd: the descriptor for the peers, or -1. */
static void open_memory(EpHeap *h, Offer *mine, int *fd) {
    const uint32_t me = ep_world_rank(h->world);
    mine->code = h->backend->heap_open(h->device, h->num_bytes, &h->base[me], &mine->heap_handle, fd);
    if (mine->code && ep_memory_retained_bytes()) {
        memcpy(mine->text, ep_error_text(), sizeof mine->text - 1);
        ep_error(mine->code, "heaps that were dropped without close keep %llu bytes; %s",
                 (unsigned long long)ep_memory_retained_bytes(), mine->text);
    }
    h->memory[me] = ep_memory_add(h->base[me]);
    if (!h->memory[me] && h->base[me]) {
        h->backend->heap_close(h->device, h->base[me], h->num_bytes);
        h->base[me] = NULL;
    }
    if (!mine->code && !h->memory[me])
        mine->code = ep_error(EP_ENOMEM, "cannot allocate a heap: this process is out of memory");
    mine->heap_handle.address = (uint64_t)(uintptr_t)h->memory[me];
    if (mine->code) memcpy(mine->text, ep_error_text(), sizeof mine->text - 1);
}

static int create(EpWorld *world, EpBackendKind kind, int device, uint64_t num_bytes, int status,
                  EpHeap **out) {
    uint32_t me = ep_world_rank(world), W = ep_world_size(world);
    Offer mine, all[EP_MAX_RANKS];
    EpHeapDevice devices[EP_MAX_RANKS];
    int fd = -1, fds[EP_MAX_RANKS], code = 0;
    EpHeap *h = (EpHeap *)calloc(1, sizeof *h);
    if (!h) {
        ep_world_propagate_error(world, EP_ENOMEM); /* the other ranks will wait in the first all-gather */
        return ep_error(EP_ENOMEM, "cannot allocate a heap: this process is out of memory");
    }
    memset(&mine, 0, sizeof mine);
    for (uint32_t r = 0; r < EP_MAX_RANKS; r++) fds[r] = -1;
    h->world = ep_world_retain(world);
    h->kind = kind;
    h->device = device;
    h->backend = ep_backend(kind);
    atomic_init(&h->num_refs, 1);
    pthread_mutex_init(&h->drop_lock, NULL);
    pthread_mutex_init(&h->barrier_lock, NULL);
    mine.wanted_bytes = num_bytes;
    mine.kind = (int32_t)kind;
    if (status) mine.code = status;
    else if (!h->backend) mine.code = EP_EINVAL;
    else if (num_bytes == 0 || num_bytes > MAX_HEAP_BYTES)
        mine.code = ep_error(EP_EINVAL, "a heap of %llu bytes: must be 1 to %llu bytes",
                             (unsigned long long)num_bytes, MAX_HEAP_BYTES);
    h->num_bytes = ep_align_u64(num_bytes, EP_HEAP_ALIGN) + control_bytes(W);
    if (!mine.code) mine.code = h->backend->heap_device(device, &mine.device);
    if (mine.code) memcpy(mine.text, ep_error_text(), sizeof mine.text - 1);
    /* No rank allocates before all ranks know that they agree and that there is memory for all heaps. */
    EP_TRY_GOTO(code, ep_world_all_gather(world, &mine, sizeof mine, all), fail);
    EP_TRY_GOTO(code, judge_offers(all, W, me), fail);
    for (uint32_t r = 0; r < W; r++) devices[r] = all[r].device;
    EP_TRY_GOTO(code, ep_sharing_check(devices, W, h->num_bytes, ep_world_is_threads(world)), fail);
    h->reserved_sms = ep_sharing_reserved_sms(devices, W, me);
    open_memory(h, &mine, &fd);
    EP_TRY_GOTO(code, ep_world_all_gather_fd(world, &mine, sizeof mine, all, fd, fds), fail);
    code = judge_offers(all, W, me);
    if (code) mine.code = code; /* a rank failed: import_peers then only closes the descriptors */
    import_peers(h, all, fds, &mine);
    if (code) goto fail;
    if (!mine.code) {
        mine.code = h->backend->preload(device, h->reserved_sms > 0);
        if (mine.code) snprintf(mine.text, sizeof mine.text, "%.120s", ep_error_text());
    }
    EP_TRY_GOTO(code, ep_world_all_gather(world, &mine, sizeof mine, all), fail);
    EP_TRY_GOTO(code, judge_offers(all, W, me), fail);
    EP_TRY_GOTO(code, self_test(h), fail);
    EP_TRY_GOTO(code, open_control(h), fail);
    if (fd >= 0) close(fd);
    *out = h;
    return 0;
fail:
    if (fd >= 0) close(fd);
    /* Creation fails on all ranks, and no rank has put work on a stream yet. So free the memory now. */
    h->closed = true;
    ep_heap_release(h);
    return code;
}

int ep_heap_create(EpWorld *world, EpBackendKind kind, int device, uint64_t num_bytes, int status,
                   EpHeap **out) {
    const EpCallRecord call = {.what = EP_CALL_HEAP_CREATE, .size = num_bytes, .code = (int16_t)status};
    uint64_t record;
    EP_TRY(ep_world_check(world));
    EP_TRY(ep_world_enter_call(world, &call, &record));
    ep_run_deferred_frees(ep_world_deferred_frees(world)); /* the new heap may need their memory */
    int code = create(world, kind, device, num_bytes, status, out);
    ep_world_leave_call(world, record, code);
    if (code) ep_run_deferred_frees(ep_world_deferred_frees(world)); /* the heap that could not be made */
    return code;
}
