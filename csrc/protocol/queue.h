/* queue.h - the task queue of an operation, and which task number means what.
 *
 * Workers take numbers from an atomic counter; the last worker out of the operation resets it
 * (flags.h, ep_leave).  There are two queues.  Send tasks wait for nothing but enter.  Receive tasks
 * wait for chunks that peers send.  A worker may do a receive task whose chunk is there already at any
 * time, but it waits for one only when the send queue is empty.  So whoever waits, has no send task
 * left to do, on any rank: the wait-for graph goes receive -> a peer's send -> nothing.  It has no
 * cycle, on any number of resident workers from one on.  (A megakernel has more queues, and other
 * tasks: fused.cuh argues for it.) */
#ifndef EP_QUEUE_H
#define EP_QUEUE_H
#include "flags.h"

/* The next task number; all lanes get it.  Numbers at or past the last task mean: done. */
EP_FN uint64_t ep_queue_pop(uint64_t *counter) {
    uint64_t n = 0;
    if (ep_lane() == 0) n = EP_FAULT(9) ? *counter : ep_add_relaxed_gpu_u64(counter, 1);
    if (EP_FAULT(9) && ep_lane() == 0) *counter = n + 1;
    return ep_warp_bcast_u64(n);
}

/* Chunks are taken chunk-major, peers in rotation from my_rank on: so all links are busy at once
 * and no two ranks begin with the same target.  Task n is a chunk to (or from) peer *rank. */
typedef struct {
    uint32_t rank, chunk;
} EpTask;
EP_PURE EpTask ep_task_at(uint64_t n, uint32_t my_rank, uint32_t num_ranks) {
    EpTask t;
    t.rank = (uint32_t)((my_rank + n % num_ranks) % num_ranks);
    t.chunk = (uint32_t)(n / num_ranks);
    return t;
}
/* Tasks for slots[r] slots of each rank r. */
EP_FN uint64_t ep_num_tasks(const int32_t *num_slots, uint32_t num_ranks) {
    uint32_t most = 0;
    for (uint32_t r = 0; r < num_ranks; r++)
        if ((uint32_t)num_slots[r] > most) most = (uint32_t)num_slots[r];
    return (uint64_t)ep_ceil_div_u32(most, EP_CHUNK_SLOTS) * num_ranks;
}
/* Slots of a chunk: first and how many; 0 for a chunk that this rank does not have. */
EP_PURE uint32_t ep_chunk_slots(uint32_t num_slots, uint32_t chunk) {
    uint32_t first = chunk * EP_CHUNK_SLOTS;
    if (first >= num_slots) return 0;
    return num_slots - first < EP_CHUNK_SLOTS ? num_slots - first : EP_CHUNK_SLOTS;
}

#endif /* EP_QUEUE_H */
