/* open_chunks.cuh - in a megakernel: the chunks that the warps of a CTA are returning.
 *
 * The GEMM multiplies one expert after the other, and the rows of a chunk belong to several experts. So most
 * chunks are complete only near the end of the GEMM. But a slot of two rows is often complete in the middle.
 * Therefore the warps of a CTA have EP_OPEN_CHUNKS chunks open at the same time, and return the slots of each
 * chunk as they become complete. A warp takes an open chunk, returns its complete slots, and puts the chunk
 * back. The warp that returns the last slot publishes the chunk and frees its place.
 *
 * Exports clear_open_chunks, return_some and first_turn. Not for GATHER, which stages rows in their order.
 * Invariant: only the warp that has taken a chunk changes its word or returns its slots. It takes the chunk
 * with an acquire and puts it back with a release. So the publisher's release also covers the slots that
 * other warps of the CTA have returned. */
#ifndef EP_OPEN_CHUNKS_CUH
#define EP_OPEN_CHUNKS_CUH
#include "kernels/arch/trace.cuh"
#include "kernels/stage/returns.cuh"

/* The word of an open chunk; 0: the place is free.
 *   bits 0 to 27    for each slot seven bits: in which 128th of the row blocks its last row is
 *   bits 28 to 31   the slots that are still to be returned
 *   bit 32          whether a warp has taken the chunk
 *   from bit 34 on  the chunk, as a task number: below 2^30, because ranks * max_tokens < 2^31 */
enum { EP_OPEN_CHUNKS = 64, EP_OPEN_SLOTS_BIT = 28, EP_OPEN_TASK_BIT = 34 };
#define EP_OPEN_TAKEN (1ull << 32)
static_assert(7 * EP_CHUNK_SLOTS <= EP_OPEN_SLOTS_BIT && EP_OPEN_SLOTS_BIT + EP_CHUNK_SLOTS <= 32,
              "room for every slot of a chunk");
__shared__ uint64_t ep_open_chunks[EP_OPEN_CHUNKS];
/* How many row blocks, from the first one on, are known to be complete, and how many 128ths of all row blocks
 * that is. The second number follows from the first, but computing it would need the number of rows, which is
 * in global memory. Both are hints: a warp may store older numbers over newer ones. */
__shared__ uint32_t ep_open_blocks, ep_open_parts;

EP_FN void clear_open_chunks(void) {
    for (uint32_t i = threadIdx.x; i < EP_OPEN_CHUNKS; i += blockDim.x) ep_open_chunks[i] = 0;
    if (threadIdx.x == 0) ep_open_blocks = ep_open_parts = 0;
}
EP_PURE uint32_t slots_to_return(uint64_t word) {
    return (uint32_t)(word >> EP_OPEN_SLOTS_BIT) % (1u << EP_CHUNK_SLOTS);
}
EP_PURE uint32_t task_of(uint64_t word) { return (uint32_t)(word >> EP_OPEN_TASK_BIT); }

EP_FN uint32_t num_row_blocks(const EpCombineParams &p) {
    return ep_ceil_div_u32((uint32_t)p.plan[EP_HEAD_NUM_ROWS], EP_TILE_ROWS);
}
/* By how many bits a block number is shifted to get its 128th. */
EP_PURE uint32_t shift_of(uint32_t num_blocks) {
    uint32_t shift = 0;
    while (num_blocks >> shift > 127) shift++;
    return shift;
}

/* Whether the lane's row is ready: whether its row block is complete. In a megakernel different tiles store
 * the row_pieces pieces of a row. A row of -1, or not below M, does not exist and counts as ready. */
EP_FN bool row_is_made(const EpCombineParams &p, int32_t row) {
    const uint32_t m = (uint32_t)p.plan[EP_HEAD_NUM_ROWS], block = (uint32_t)row / EP_TILE_ROWS;
    return row < 0 || (uint32_t)row >= m ||
           ep_ld_acquire_gpu_u64(ep_ready_word(&p.comm, block)) >=
               ep_ready_count(block, m, p.row_pieces); /* the row is now readable */
}

/* Return those slots of the mask `slots` whose rows are all ready. Bit i is the slot first + i, which rank s
 * has sent. mine: the result of lane_row with at = 0. A load that acquires waits until the one before it has
 * ended. So each lane checks another row, and with up to 8 choices one load checks a whole chunk. */
EP_FN uint32_t made_slots(const EpCombineParams &p, uint32_t s, uint32_t first, uint32_t slots,
                          LaneRow mine) {
    const uint32_t lanes = lanes_of_slot(p);
    for (uint32_t at = 0; at < EP_CHUNK_SLOTS; at += 32 / lanes) {
        if (at) mine = lane_row(p, s, first, slots, at);
        const uint32_t missing = ~__ballot_sync(EP_FULL, row_is_made(p, mine.row));
        for (uint32_t j = 0; j < 32 / lanes; j++)
            if (missing >> lanes * j & EP_FULL >> (32 - lanes)) slots &= ~(1u << (at + j));
    }
    ep_warp_sync(); /* what any lane has acquired is now readable by all lanes */
    return slots;
}

/* Look at the counters of the next 32 row blocks. Returns whether more parts of the blocks are complete than
 * the warps of the CTA knew. */
EP_FN bool look_at_blocks(const EpCombineParams &p) {
    const uint32_t num = num_row_blocks(p), m = (uint32_t)p.plan[EP_HEAD_NUM_ROWS];
    const uint32_t first = __shfl_sync(EP_FULL, ep_ld_relaxed_shared(&ep_open_blocks), 0);
    const uint32_t known = __shfl_sync(EP_FULL, ep_ld_relaxed_shared(&ep_open_parts), 0);
    const uint32_t block = first + ep_lane();
    const bool made = block < num && ep_ld_relaxed_gpu_u64(ep_ready_word(&p.comm, block)) >=
                                         ep_ready_count(block, m, p.row_pieces);
    const uint32_t missing = ~__ballot_sync(EP_FULL, made);
    const uint32_t now = first + (missing ? (uint32_t)__ffs((int)missing) - 1 : 32);
    const uint32_t parts = now < num ? now >> shift_of(num) : 128;
    if (ep_lane() == 0) {
        ep_st_relaxed_shared(&ep_open_blocks, now);
        ep_st_relaxed_shared(&ep_open_parts, parts);
    }
    return parts > known;
}
/* Whether a slot of an open chunk is probably complete. */
EP_PURE bool is_promising(uint64_t word, uint32_t num_parts) {
    bool any = false;
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++)
        any |= (slots_to_return(word) >> i & 1) && (uint32_t)(word >> 7 * i) % 128 < num_parts;
    return any;
}

/* Where a warp looks for work. It draws chunks from the queue of one peer, `turn`, until that queue is empty,
 * then from the next; `left` queues are not yet known to be empty. It looks at the open chunks from number
 * `at` on. */
typedef struct {
    uint32_t turn, left, at;
} EpReturnTurn;
EP_FN EpReturnTurn first_turn(uint32_t num_ranks) {
    const uint32_t warp = threadIdx.x / 32;
    return {(blockIdx.x * (blockDim.x / 32) + warp) % num_ranks, num_ranks, 5 * warp % EP_OPEN_CHUNKS};
}

/* Draw the next chunk to return, as a task number (queue.h). num_send, or more: there is none. */
EP_FN uint32_t next_of_peers(const EpCombineParams &p, EpReturnTurn *at, uint32_t num_send) {
    const uint32_t W = p.comm.shape.num_ranks;
    EpLocal *l = ep_local(&p.comm);
    for (; at->left; at->left--, at->turn = (at->turn + 1) % W) {
        const uint32_t send = (uint32_t)ep_queue_pop(l->queue_send + at->turn) * W + at->turn;
        if (send < num_send) return send;
    }
    return num_send;
}

/* Open the next chunk. Returns its word, or 0 if there is none. */
EP_FN uint64_t open_chunk(const EpCombineParams &p, EpReturnTurn *turn, uint32_t num_send) {
    const uint32_t shift = shift_of(num_row_blocks(p));
    uint32_t send, num;
    EpTask task;
    do {
        send = next_of_peers(p, turn, num_send);
        if (send >= num_send) return 0;
        task = ep_task_at(send, p.comm.my_rank, p.comm.shape.num_ranks);
        num = num_to_return(p, task);
    } while (num == 0);
    const uint32_t m = (uint32_t)p.plan[EP_HEAD_NUM_ROWS], lanes = lanes_of_slot(p);
    uint64_t word = (uint64_t)send << EP_OPEN_TASK_BIT | (uint64_t)all_slots(num) << EP_OPEN_SLOTS_BIT;
    for (uint32_t at = 0; at < EP_CHUNK_SLOTS; at += 32 / lanes) {
        const int32_t row = lane_row(p, task.rank, task.chunk * EP_CHUNK_SLOTS, all_slots(num), at).row;
        const uint32_t block = row >= 0 && (uint32_t)row < m ? (uint32_t)row / EP_TILE_ROWS : 0;
        for (uint32_t j = 0; j < 32 / lanes; j++) {
            const uint32_t part = ep_lane() / lanes == j ? block >> shift : 0;
            word |= (uint64_t)__reduce_max_sync(EP_FULL, part) << 7 * (at + j);
        }
    }
    return word;
}

/* Return the complete slots of a chunk that this warp has taken. Returns the chunk's new word. */
template <typename C, typename E>
EP_FN uint64_t return_slots(const EpCombineParams &p, uint64_t word, E epoch, uint32_t fifo) {
    const EpTask task = ep_task_at(task_of(word), p.comm.my_rank, p.comm.shape.num_ranks);
    const uint32_t first = task.chunk * EP_CHUNK_SLOTS;
    const LaneRow mine = lane_row(p, task.rank, first, slots_to_return(word), 0);
    const uint32_t slots = made_slots(p, task.rank, first, slots_to_return(word), mine);
    if (slots == 0) return word;
    const uint64_t begin = ep_trace_now(&p.comm);
    return_part<C>(p, task.rank, mine, ep_whole_chunk(task.chunk, EP_CHUNK_SLOTS, ep_row_vecs(&p.comm)),
                   slots, fifo);
    ep_trace_span(&p.comm, EP_SPAN_RETURN, task.rank, begin);
    word &= ~((uint64_t)slots << EP_OPEN_SLOTS_BIT);
    if (slots_to_return(word)) return word;
    ep_warp_sync(); /* all lanes' stores come before lane 0's release */
    if (ep_lane() == 0) ep_flag_publish(&p.comm, task.rank, task.chunk, epoch);
    return 0;
}

/* What a call of return_some has found: progress, its own or that of the GEMM; chunks whose rows are missing;
 * or nothing: every chunk has been returned, or another warp has it. */
typedef enum { EP_DID_RETURN, EP_ROWS_MISSING, EP_NOTHING_LEFT } EpReturned;

/* Open a chunk, or return slots of one. Only a warp that finds no work looks at the GEMM's counters. */
template <typename C, typename E> EP_FN EpReturned return_some(const EpCombineParams &p, EpReturnTurn *turn,
                                                               uint32_t num_send, E epoch, uint32_t fifo) {
    const uint32_t num_parts = ep_ld_relaxed_shared(&ep_open_parts);
    bool any_open = false;
    for (uint32_t half = 0; half < EP_OPEN_CHUNKS; half += 32) {
        uint32_t at = (turn->at + half + ep_lane()) % EP_OPEN_CHUNKS;
        uint64_t word = ep_ld_relaxed_shared(&ep_open_chunks[at]);
        const bool is_open = word && !(word & EP_OPEN_TAKEN);
        any_open |= __ballot_sync(EP_FULL, is_open) != 0;
        const uint32_t lanes =
            __ballot_sync(EP_FULL, word ? is_open && is_promising(word, num_parts) : turn->left != 0);
        if (lanes == 0) continue;
        const int from = __ffs((int)lanes) - 1;
        at = __shfl_sync(EP_FULL, at, from);
        word = __shfl_sync(EP_FULL, word, from);
        turn->at = at + 1;
        uint64_t has_taken = 0;
        if (ep_lane() == 0) has_taken = ep_take_shared(&ep_open_chunks[at], word, word | EP_OPEN_TAKEN);
        if (!ep_warp_bcast_u64(has_taken)) return EP_DID_RETURN; /* another warp has taken it: look again */
        const uint64_t left = word ? return_slots<C>(p, word, epoch, fifo) : open_chunk(p, turn, num_send);
        ep_warp_sync(); /* all lanes' stores come before lane 0's release */
        if (ep_lane() == 0) ep_st_release_shared(&ep_open_chunks[at], left);
        return left == word ? EP_ROWS_MISSING : EP_DID_RETURN;
    }
    if (!any_open) return EP_NOTHING_LEFT;
    return look_at_blocks(p) ? EP_DID_RETURN : EP_ROWS_MISSING;
}

#endif /* EP_OPEN_CHUNKS_CUH */
