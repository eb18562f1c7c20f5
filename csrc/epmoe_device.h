/* epmoe_device.h - the symmetric heap from inside a kernel: peer addresses, put, get, signal, wait, barrier.
 *
 * For kernels of the user: compile with -I of epmoe.include_dir() and pass SymmetricHeap.device_handle() by
 * value. One source works with nvcc and, for a heap on the CPU, with a C11 compiler. examples/06_device.py
 * shows both. A worker is a warp, whose 32 lanes make each call together; on the CPU it is a thread.
 *
 * Ordering: data that a worker has put before a signal is readable by a worker that has waited for this
 * signal (stores, then st.release.sys; ld.acquire.sys, then loads). If several warps of a CTA put data that
 * one of them signals, they need a __syncthreads() in between.
 *
 * Every wait ends: by its word, by the end of the world, or after timeout_ns. It returns true only for its
 * word. Otherwise SymmetricHeap.synchronize() or World.check() raises the reason. */
#ifndef EPMOE_DEVICE_H
#define EPMOE_DEVICE_H
#include <string.h>

#include "protocol/port.h"

#define EP_DEV_MAX_RANKS 8u
/* How often a wait checks its clock and whether the world has ended, which is a read across PCIe. */
#define EP_DEV_CHECK_NS 1000000u

typedef struct {
    unsigned char *base[EP_DEV_MAX_RANKS]; /* base address of every rank's heap, as mapped by this rank */
    const uint64_t *world_ended; /* nonzero after the end of the world; a peer may then never come */
    uint64_t timeout_ns;         /* limit for each wait */
    uint32_t my_rank, num_ranks;
} EpDeviceHeap;

/* The address in the heap of `peer` that corresponds to `mine` in this rank's heap: the same offset from
 * the base. */
EP_FN void *ep_dev_translate(const EpDeviceHeap *h, const void *mine, uint32_t peer) {
    return h->base[peer] + ((const unsigned char *)mine - h->base[h->my_rank]);
}

/* Copy, with all lanes: 8 bytes per lane at a time; single bytes if an address is not a multiple of 8, and
 * at the end. */
EP_FN void ep_dev_copy(void *to, const void *from, uint64_t num_bytes) {
    const uint64_t words = ((uint64_t)(uintptr_t)to | (uint64_t)(uintptr_t)from) % 8 ? 0 : num_bytes / 8;
    ep_warp_sync(); /* any lane may copy what another lane has written before */
    if (EP_LANES == 1) {
        memcpy(to, from, num_bytes);
        return;
    }
    for (uint64_t i = ep_lane(); i < words; i += EP_LANES) ((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
    for (uint64_t i = words * 8 + ep_lane(); i < num_bytes; i += EP_LANES)
        ((char *)to)[i] = ((const char *)from)[i];
    ep_warp_sync();
}
/* Copy num_bytes from this rank's memory to `peer`. `to` is the corresponding address in this rank's heap. */
EP_FN void ep_dev_put(const EpDeviceHeap *h, void *to, const void *from, uint64_t num_bytes, uint32_t peer) {
    ep_dev_copy(ep_dev_translate(h, to, peer), from, num_bytes);
}
/* Copy num_bytes from `peer` to this rank's memory. `from` is the corresponding address in this rank's
 * heap. */
EP_FN void ep_dev_get(const EpDeviceHeap *h, void *to, const void *from, uint64_t num_bytes, uint32_t peer) {
    ep_dev_copy(to, ep_dev_translate(h, from, peer), num_bytes);
}

/* Set a word in the peer's heap, or add a value to the word. `word` is the address of the same word in this
 * rank's heap. This is a release at system scope: when a worker of the peer has returned from ep_dev_wait for
 * the new value, it sees all data that this worker has put into the peer's heap before. */
EP_FN void ep_dev_signal_set(const EpDeviceHeap *h, uint64_t *word, uint64_t value, uint32_t peer) {
    ep_warp_sync();
    if (ep_lane() == 0) ep_st_release_sys_u64((uint64_t *)ep_dev_translate(h, word, peer), value);
}
EP_FN void ep_dev_signal_add(const EpDeviceHeap *h, uint64_t *word, uint64_t value, uint32_t peer) {
    ep_warp_sync();
    if (ep_lane() == 0) ep_add_release_sys_u64((uint64_t *)ep_dev_translate(h, word, peer), value);
}

/* Wait until this rank's word is at least value. Then the data that was put before the signal is readable.
 * False: the world has ended, or the wait has timed out. */
EP_FN bool ep_dev_wait(const EpDeviceHeap *h, const uint64_t *word, uint64_t value) {
    uint64_t begin = 0, checked = 0;
    bool has_come = false;
    for (uint32_t polls = 0; ep_lane() == 0; ep_pause(polls++)) {
        has_come = ep_ld_acquire_sys_u64(word) >= value;
        if (has_come) break;
        const uint64_t now = ep_time_to_check(polls) ? ep_now_ns() : checked;
        if (begin == 0) begin = checked = now;
        if (now - checked < EP_DEV_CHECK_NS) continue;
        if (EP_LANES == 1 && now - checked > EP_MAX_COUNTED_GAP_NS) /* this process was suspended */
            begin += now - checked - EP_MAX_COUNTED_GAP_NS;
        checked = now;
        if (now - begin > h->timeout_ns || ep_ld_relaxed_sys_u64(h->world_ended)) break;
    }
    return ep_warp_bcast_u64(has_come) != 0; /* all lanes may read what lane 0 has acquired */
}

/* A barrier of all ranks; one worker of each rank calls it. After it, every rank can read what the workers
 * had put before. words: [num_ranks] in the heap, initially zero. turn: 1, 2, ... in successive calls with
 * the same words. False: a wait for a rank has failed. */
EP_FN bool ep_dev_barrier(const EpDeviceHeap *h, uint64_t *words, uint64_t turn) {
    bool all = true;
    for (uint32_t r = 0; r < h->num_ranks; r++) ep_dev_signal_set(h, &words[h->my_rank], turn, r);
    for (uint32_t r = 0; r < h->num_ranks && all; r++) all = ep_dev_wait(h, &words[r], turn);
    return all;
}

#endif /* EPMOE_DEVICE_H */
