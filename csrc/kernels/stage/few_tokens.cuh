/* few_tokens.cuh - dispatch and combine of few tokens: the warps of a CTA share each chunk.
 *
 * Exports move_few_tokens and combine_few_tokens, which do what move_tokens and combine_tokens do.
 * If a warp moved a whole chunk, few tokens would use few warps, and each would wait for one row after the
 * other. Here each warp moves a quarter of the row of one slot. The chunks are distributed in turn, so no CTA
 * draws numbers.
 *
 * Each rank decides by itself, because peers see the same slots and flags in both cases.
 * Order of memory: the barrier of the CTA orders the stores of its warps before the flag that thread 0
 * publishes, and what warp 0 has acquired before the loads of the other warps.
 * Freedom from deadlock: a CTA waits for a peer only after it has sent all its chunks. All CTAs are resident.
 * So the argument of queue.h holds, with a CTA as the worker. */
#ifndef EP_FEW_TOKENS_CUH
#define EP_FEW_TOKENS_CUH
#include "kernels/stage/combine.cuh"
#include "kernels/stage/dispatch.cuh"

/* The most chunks for each CTA that count as few. More were not measured (E-068). */
#ifndef EP_FEW_CHUNKS
#define EP_FEW_CHUNKS 8u
#endif
EP_FN bool are_few(uint64_t num_chunks) { return num_chunks <= (uint64_t)EP_FEW_CHUNKS * gridDim.x; }

/* Call move(part) for each part of a chunk that this warp moves. */
template <typename Move>
EP_FN void share_chunk(const EpComm *c, uint32_t chunk, uint32_t num_slots, Move move) {
    for (uint32_t i = threadIdx.x / 32; i < EP_CHUNK_PARTS; i += blockDim.x / 32) {
        const EpPart part = ep_part_of_chunk(i, chunk, num_slots, ep_row_vecs(c));
        if (part.num) move(part);
    }
}

EP_FN bool has_few_tokens(const EpDispatchParams &p) {
    const uint32_t W = p.comm.shape.num_ranks;
    return are_few(ep_num_tasks(p.plan + EP_HEAD_NUM_SEND, W)) &&
           are_few(ep_num_tasks(p.plan + EP_HEAD_NUM_RECV, W));
}

template <typename S>
EP_FN void move_few_tokens(const EpDispatchParams &p, uint32_t op, uint64_t epoch, const S &scales) {
    const EpComm *c = &p.comm;
    const uint32_t W = c->shape.num_ranks;
    const uint64_t num_send = ep_num_tasks(p.plan + EP_HEAD_NUM_SEND, W);
    const uint64_t num_recv = ep_num_tasks(p.plan + EP_HEAD_NUM_RECV, W);
    for (uint64_t n = blockIdx.x; n < num_send; n += gridDim.x) {
        const EpTask task = ep_task_at(n, c->my_rank, W);
        const uint32_t num = num_to_send(p, task);
        if (num == 0) continue;
        share_chunk(c, task.chunk, num,
                    [&](const EpPart &part) { send_part<false>(p, scales, task.rank, part, 0); });
        __syncthreads(); /* the stores of all warps come before thread 0's release */
        if (threadIdx.x == 0) ep_flag_publish(c, task.rank, task.chunk, epoch);
    }
    for (uint64_t n = blockIdx.x; n < num_recv; n += gridDim.x) {
        const EpTask task = ep_task_at(n, c->my_rank, W);
        bool ok = true;
        if (threadIdx.x < 32) ok = chunk_is_here(p, op, task, epoch, true);
        if (!__syncthreads_and(ok)) return;
        share_chunk(c, task.chunk, num_to_receive(p, task),
                    [&](const EpPart &part) { receive_part<false>(p, scales, task.rank, part, 0); });
    }
}

EP_FN bool has_few_tokens(const EpCombineParams &p) {
    return are_few(num_chunks_to_return(p)) && are_few(ep_ceil_div_u32(p.layout.num_tokens, EP_CHUNK_SLOTS));
}

template <typename C> EP_FN void return_few(const EpCombineParams &p, EpTask task, uint64_t epoch,
                                            uint32_t fifo) {
    const uint32_t num = num_to_return(p, task);
    if (num == 0 || returns_nothing(p, task.rank)) return;
    share_chunk(&p.comm, task.chunk, num, [&](const EpPart &part) {
        const LaneRow mine = lane_row(p, task.rank, part.first, all_slots(part.num), 0);
        return_part<C>(p, task.rank, mine, part, all_slots(part.num), fifo);
    });
    __syncthreads(); /* the stores of all warps come before thread 0's release */
    if (threadIdx.x == 0) ep_flag_publish(&p.comm, task.rank, task.chunk, epoch);
}
template <typename C> EP_FN void stage_few(const EpCombineParams &p, uint32_t chunk, uint32_t num_chunks,
                                           uint64_t epoch, uint32_t fifo) {
    share_chunk(&p.comm, chunk, ep_chunk_slots(num_staged_rows(p), chunk),
                [&](const EpPart &part) { stage_part<C>(p, part, fifo); });
    __syncthreads(); /* the stores of all warps come before what thread 0 adds */
    if (threadIdx.x == 0) count_staged(&p.comm, num_chunks, epoch);
}

/* Wait until the slots of a chunk of this rank's tokens have arrived. One warp calls it. */
template <typename C> EP_FN bool await_slots(const EpCombineParams &p, int32_t slot, uint64_t epoch) {
    EpBackoff backoff = {0, 0, 0};
    for (uint32_t lanes; (lanes = missing_slots(p, slot, epoch)) != 0;)
        if (!wait_for_slots<C>(p, lanes, slot, &backoff, epoch)) return false;
    return true;
}

template <typename C> EP_FN void combine_few_tokens(const EpCombineParams &p, uint64_t epoch, uint32_t fifo) {
    const EpComm *c = &p.comm;
    const bool gather = c->shape.combine_mode == EP_COMBINE_GATHER;
    const uint32_t num_send = num_chunks_to_return(p);
    const uint32_t num_recv = ep_ceil_div_u32(p.layout.num_tokens, EP_CHUNK_SLOTS);
    for (uint32_t n = blockIdx.x; n < num_send; n += gridDim.x) {
        if (gather) stage_few<C>(p, n, num_send, epoch, fifo);
        else return_few<C>(p, ep_task_at(n, c->my_rank, c->shape.num_ranks), epoch, fifo);
    }
    for (uint32_t chunk = blockIdx.x; chunk < num_recv; chunk += gridDim.x) {
        const int32_t slot = slot_to_await<C>(p, chunk);
        bool ok = true;
        if (threadIdx.x < 32) ok = await_slots<C>(p, slot, epoch);
        if (!__syncthreads_and(ok)) return;
        share_chunk(c, chunk, ep_chunk_slots(p.layout.num_tokens, chunk),
                    [&](const EpPart &part) { finish_part<C>(p, part, slot, fifo); });
    }
}

#endif /* EP_FEW_TOKENS_CUH */
