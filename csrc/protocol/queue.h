/* queue.h - the task queues of an operation: drawing task numbers, and what each number means.
 *
 * Workers draw numbers from an atomic counter. The last worker out of the operation resets it (ep_leave).
 * There are two queues. A send task waits for nothing except enter. A receive task waits for a chunk from a
 * peer.
 *
 * Freedom from deadlock. A worker may execute a receive task at any time if its chunk has arrived. It waits
 * for a chunk only when the send queue is empty. So a waiting worker holds no send task, on any rank. The
 * wait-for graph is receive -> a peer's send -> nothing. It has no cycle, for any number of resident workers
 * (one is enough).
 * few_tokens.cuh has no queue: there all workers must be resident.
 * The megakernels have more queues and other tasks; fused.cuh proves their freedom from deadlock. */
#ifndef EP_QUEUE_H
#define EP_QUEUE_H
#include "protocol/flags.h"

/* Draw the next task number; all lanes get it. A number at or past the last task means that the queue is
 * empty. */
EP_FN uint64_t ep_queue_pop(uint64_t *counter) {
    uint64_t n = 0;
    if (ep_lane() == 0) n = EP_FAULT(SHARED_TASK) ? *counter : ep_add_relaxed_gpu_u64(counter, 1);
    if (EP_FAULT(SHARED_TASK) && ep_lane() == 0) *counter = n + 1;
    return ep_warp_bcast_u64(n);
}

/* The peer and the chunk of task n. Numbers run through all peers for one chunk, then for the next chunk.
 * They start at my_rank, so that all links are busy at once and no two ranks begin with the same peer. */
typedef struct {
    uint32_t rank, chunk;
} EpTask;
EP_PURE EpTask ep_task_at(uint64_t n, uint32_t my_rank, uint32_t num_ranks) {
    EpTask t;
    t.rank = (uint32_t)((my_rank + n % num_ranks) % num_ranks);
    t.chunk = (uint32_t)(n / num_ranks);
    return t;
}
/* The number of tasks, if num_slots[r] slots go to (or come from) each rank r. */
EP_FN uint64_t ep_num_tasks(const int32_t *num_slots, uint32_t num_ranks) {
    uint32_t most = 0;
    for (uint32_t r = 0; r < num_ranks; r++)
        if ((uint32_t)num_slots[r] > most) most = (uint32_t)num_slots[r];
    return (uint64_t)ep_ceil_div_u32(most, EP_CHUNK_SLOTS) * num_ranks;
}
/* The number of slots in a chunk. 0: this rank has no such chunk. */
EP_PURE uint32_t ep_chunk_slots(uint32_t num_slots, uint32_t chunk) {
    uint32_t first = chunk * EP_CHUNK_SLOTS;
    if (first >= num_slots) return 0;
    return num_slots - first < EP_CHUNK_SLOTS ? num_slots - first : EP_CHUNK_SLOTS;
}

#endif /* EP_QUEUE_H */
