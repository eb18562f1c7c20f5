/* epmoe_device.h - a symmetric heap from inside of a kernel: addresses of peers, put, get, signal, wait, barrier.
 *
 * For kernels of your own: compile with -I of epmoe.include_dir(), take SymmetricHeap.device_handle() by value.  One source
 * serves nvcc and, for a heap on the CPU, a C11 compiler; examples/06_device.py shows both.
 *
 * A worker is a warp, whose 32 lanes make each call together; on the CPU it is a thread.  What a worker has put is readable by
 * whoever has waited for a signal that it has given afterwards: stores, then st.release.sys; ld.acquire.sys, then loads.  Where
 * several warps of a block put what one of them signals, a __syncthreads() stands between.  Every wait ends: by its word, when the
 * world ends, or after timeout_ns; it says which, and SymmetricHeap.synchronize() or World.check() why. */
#ifndef EPMOE_DEVICE_H
#define EPMOE_DEVICE_H
#include <string.h>

#include "protocol/port.h"

#define EP_DEV_MAX_RANKS 8u
#define EP_DEV_CHECK_NS 1000000u /* how often a wait looks at what may end it, which is across PCIe */

typedef struct {
    unsigned char *base[EP_DEV_MAX_RANKS]; /* of every rank's heap, as this rank sees it */
    const uint64_t *world_ended;           /* nonzero when it has, and nobody may come any more */
    uint64_t timeout_ns;                   /* of a wait */
    uint32_t my_rank, num_ranks;
} EpDeviceHeap;

/* Where an address of this rank's heap is in the heap of peer: the same offset from its base. */
EP_FN void *ep_dev_translate(const EpDeviceHeap *h, const void *mine, uint32_t peer) {
    return h->base[peer] + ((const unsigned char *)mine - h->base[h->my_rank]);
}

/* Copy, by all lanes: 8 bytes a lane at a time, single ones where addresses or size are no multiples of 8. */
EP_FN void ep_dev_copy(void *to, const void *from, uint64_t num_bytes) {
    const uint64_t words = ((uint64_t)(uintptr_t)to | (uint64_t)(uintptr_t)from) % 8 ? 0 : num_bytes / 8;
    ep_warp_sync(); /* what any lane has written before may be copied by any other */
    if (EP_LANES == 1) {
        memcpy(to, from, num_bytes);
        return;
    }
    for (uint64_t i = ep_lane(); i < words; i += EP_LANES) ((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
    for (uint64_t i = words * 8 + ep_lane(); i < num_bytes; i += EP_LANES)
        ((char *)to)[i] = ((const char *)from)[i];
    ep_warp_sync();
}
/* num_bytes from this rank's memory to where `to`, an address of this rank's heap, is at peer. */
EP_FN void ep_dev_put(const EpDeviceHeap *h, void *to, const void *from, uint64_t num_bytes, uint32_t peer) {
    ep_dev_copy(ep_dev_translate(h, to, peer), from, num_bytes);
}
/* num_bytes from where `from`, an address of this rank's heap, is at peer. */
EP_FN void ep_dev_get(const EpDeviceHeap *h, void *to, const void *from, uint64_t num_bytes, uint32_t peer) {
    ep_dev_copy(to, ep_dev_translate(h, from, peer), num_bytes);
}

/* Set peer's word, or add to it, behind everything that this worker has put.  word: an address of this rank's heap. */
EP_FN void ep_dev_signal_set(const EpDeviceHeap *h, uint64_t *word, uint64_t value, uint32_t peer) {
    ep_warp_sync();
    if (ep_lane() == 0) ep_st_release_sys_u64((uint64_t *)ep_dev_translate(h, word, peer), value);
}
EP_FN void ep_dev_signal_add(const EpDeviceHeap *h, uint64_t *word, uint64_t value, uint32_t peer) {
    ep_warp_sync();
    if (ep_lane() == 0) ep_add_release_sys_u64((uint64_t *)ep_dev_translate(h, word, peer), value);
}

/* Until this rank's word is at least value: then what was put before its signal is readable.  False: it did not come. */
EP_FN bool ep_dev_wait(const EpDeviceHeap *h, const uint64_t *word, uint64_t value) {
    uint64_t begin = 0, checked = 0;
    bool has_come = false;
    for (uint32_t polls = 0; ep_lane() == 0; ep_pause(polls++)) {
        has_come = ep_ld_acquire_sys_u64(word) >= value;
        if (has_come) break;
        const uint64_t now = ep_time_to_check(polls) ? ep_now_ns() : checked;
        if (begin == 0) begin = checked = now;
        if (now - checked < EP_DEV_CHECK_NS) continue;
        if (EP_LANES == 1 && now - checked > 500000000u)
            begin += now - checked - 500000000u; /* this process was stopped; see EP_MAX_COUNTED_GAP_NS */
        checked = now;
        if (now - begin > h->timeout_ns || ep_ld_relaxed_sys_u64(h->world_ended)) break;
    }
    return ep_warp_bcast_u64(has_come) != 0; /* what lane 0 has seen, all see */
}

/* All ranks' workers have come to their call with this turn; what each had put before, all can read.  words: [num_ranks] in the
 * heap, zero at first; turn: 1, 2, ... with the same words.  One worker of a rank calls it. */
EP_FN bool ep_dev_barrier(const EpDeviceHeap *h, uint64_t *words, uint64_t turn) {
    bool all = true;
    for (uint32_t r = 0; r < h->num_ranks; r++) ep_dev_signal_set(h, &words[h->my_rank], turn, r);
    for (uint32_t r = 0; r < h->num_ranks && all; r++) all = ep_dev_wait(h, &words[r], turn);
    return all;
}

#endif /* EPMOE_DEVICE_H */
