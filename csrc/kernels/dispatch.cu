/* dispatch.cu - every token to the ranks that want it, every row to its place.
 *
 * Send: a distinct token goes once to each rank, into the slot that the plan gave it, with its rows and
 * weights behind it; a chunk of slots is then published by one flag.  Receive: copy each slot of a chunk
 * that has come to its rows, reading it once.  Every warp does both: it receives what is there, sends
 * while nothing is, and waits only when there is nothing left to send (queue.h). */
#include "launch.h"
#include "rows.cuh"

typedef EpDispatchParams Params;

/* Lane k's row of token t at rank r, or -1. */
EP_FN int32_t row_at_rank(const Params &p, uint32_t t, uint32_t r) {
    const uint32_t K = p.comm.shape.num_topk, k = ep_lane();
    if (k >= K) return -1;
    const int32_t e = p.plan[p.layout.token_expert_off + (uint64_t)t * K + k];
    return e >= 0 && (uint32_t)e / ep_num_local_experts(&p.comm.shape) == r ? p.plan[p.layout.token_row_off + (uint64_t)t * K + k] : -1;
}

/* Lane i: the token in slot first + i of those that this rank sends to rank r. */
EP_FN uint32_t tokens_to_send(const Params &p, uint32_t r, uint32_t first, uint32_t num) {
    return ep_lane() < num ? (uint32_t)p.plan[p.layout.send_token_off + (uint64_t)r * p.layout.num_tokens + first + ep_lane()] : 0;
}

EP_FN void send_slot(const Params &p, uint32_t r, uint32_t slot, uint32_t t) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk;
    unsigned char *to = ep_slot_at(c, r, c->my_rank, slot);
    int32_t *trailer = (int32_t *)(to + c->layout.row_bytes);
    const int32_t row = row_at_rank(p, t, r);
    const float weight = p.weight && ep_lane() < K ? p.weight[(uint64_t)t * K + ep_lane()] : 0;
    ep_copy_row((uint64_t)to, 1, (const unsigned char *)p.x + t * c->layout.row_bytes, (uint32_t)(c->layout.row_bytes / 16));
    if (ep_lane() == 0) trailer[0] = (int32_t)t; /* behind the row, whose loads need not wait for these */
    if (ep_lane() < K) {
        trailer[1 + ep_lane()] = row;
        if (p.weight) ((float *)trailer)[1 + K + ep_lane()] = weight;
    }
}

EP_FN void send_chunk(const Params &p, EpTask task, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const uint32_t num = ep_chunk_slots((uint32_t)p.plan[EP_HEAD_NUM_SEND + task.rank], task.chunk), first = task.chunk * EP_CHUNK_SLOTS;
    if (task.rank == c->my_rank || num == 0) return;
    const uint32_t tokens = tokens_to_send(p, task.rank, first, num);
    for (uint32_t i = 0; i < num; i++) send_slot(p, task.rank, first + i, __shfl_sync(EP_FULL, tokens, (int)i));
    ep_warp_sync(); /* all lanes' stores come before lane 0's release */
    if (ep_lane() == 0) ep_flag_publish(c, task.rank, task.chunk, epoch);
}

/* Copy a slot to its rows.  Lane 0 has its token, lane k the row and weight of choice k: a peer's numbers,
 * or this rank's own, and nothing past num_rows is written for them. */
EP_FN void place_slot(const Params &p, uint32_t s, uint32_t slot, const void *from, int32_t token, int32_t row, float weight) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk;
    int32_t *keep = p.recv + ((uint64_t)s * c->shape.max_tokens + slot) * (1 + K);
    if ((uint32_t)row >= p.num_rows) row = -1;
    if (ep_lane() == 0) keep[0] = (uint32_t)token < c->shape.max_tokens ? token : 0;
    if (ep_lane() < K) keep[1 + ep_lane()] = row;
    if (ep_lane() < K && row >= 0 && p.row_weight) p.row_weight[row] = weight;
    ep_copy_row((uint64_t)p.rows + (uint64_t)(row < 0 ? 0 : row) * c->layout.row_bytes, __ballot_sync(EP_FULL, ep_lane() < K && row >= 0),
                from, (uint32_t)(c->layout.row_bytes / 16));
}

/* With `wait`: until the chunk is there.  Without: false when it is not. */
EP_FN bool chunk_is_here(const Params &p, EpTask task, uint64_t epoch, bool wait) {
    const EpComm *c = &p.comm;
    if (task.rank == c->my_rank || ep_chunk_slots((uint32_t)p.plan[EP_HEAD_NUM_RECV + task.rank], task.chunk) == 0) return true;
    return wait ? ep_flag_await(c, EP_OP_DISPATCH, task.rank, task.chunk, epoch) : ep_flag_ready(c, task.rank, task.chunk, epoch);
}

/* My own tokens: straight from the input. */
EP_FN void place_own(const Params &p, uint32_t first, uint32_t num) {
    const EpComm *c = &p.comm;
    const uint32_t tokens = tokens_to_send(p, c->my_rank, first, num), K = c->shape.num_topk;
    for (uint32_t i = 0; i < num; i++) {
        const uint32_t t = __shfl_sync(EP_FULL, tokens, (int)i);
        const float weight = p.weight && ep_lane() < K ? p.weight[(uint64_t)t * K + ep_lane()] : 0;
        place_slot(p, c->my_rank, first + i, (const unsigned char *)p.x + t * c->layout.row_bytes, (int32_t)t,
                   row_at_rank(p, t, c->my_rank), weight);
    }
}

EP_FN void receive_chunk(const Params &p, EpTask task) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk, first = task.chunk * EP_CHUNK_SLOTS, r = task.rank;
    const uint32_t num = ep_chunk_slots((uint32_t)p.plan[EP_HEAD_NUM_RECV + r], task.chunk);
    int32_t token[EP_CHUNK_SLOTS], row[EP_CHUNK_SLOTS]; /* of all slots, before the first is worked on */
    float weight[EP_CHUNK_SLOTS];
    if (r == c->my_rank) return place_own(p, first, num);
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++) {
        const int32_t *trailer = (const int32_t *)(ep_slot_at(c, c->my_rank, r, first + i) + c->layout.row_bytes);
        const bool mine = i < num && ep_lane() < K;
        token[i] = i < num ? trailer[0] : 0;
        row[i] = mine ? trailer[1 + ep_lane()] : -1;
        weight[i] = mine && p.has_weight ? ((const float *)trailer)[1 + K + ep_lane()] : 0;
    }
    for (uint32_t i = 0; i < num; i++) {
        place_slot(p, r, first + i, ep_slot_at(c, c->my_rank, r, first + i), token[0], row[0], weight[0]);
#pragma unroll
        for (uint32_t j = 1; j < EP_CHUNK_SLOTS; j++) token[j - 1] = token[j], row[j - 1] = row[j], weight[j - 1] = weight[j];
    }
}

EP_FN void move_tokens(const Params &p, uint64_t epoch) {
    const EpComm *c = &p.comm;
    EpLocal *l = ep_local(c);
    const uint32_t W = c->shape.num_ranks;
    const uint64_t num_send = ep_num_tasks(p.plan + EP_HEAD_NUM_SEND, W), num_recv = ep_num_tasks(p.plan + EP_HEAD_NUM_RECV, W);
    bool may_send = true;
    for (uint64_t recv = ep_queue_pop(&l->queue_recv); may_send || recv < num_recv;) {
        if (recv < num_recv && chunk_is_here(p, ep_task_at(recv, c->my_rank, W), epoch, !may_send)) {
            receive_chunk(p, ep_task_at(recv, c->my_rank, W));
            recv = ep_queue_pop(&l->queue_recv);
        } else if (may_send) {
            const uint64_t send = ep_queue_pop(&l->queue_send);
            may_send = send < num_send;
            if (may_send) send_chunk(p, ep_task_at(send, c->my_rank, W), epoch);
        } else {
            return; /* the wait has failed */
        }
    }
}

/* Fixed capacity: the rows behind M are zero. */
EP_FN void clear_rest(const Params &p) {
    const uint64_t m = (uint32_t)p.plan[EP_HEAD_NUM_ROWS], row_vec = p.comm.layout.row_bytes / 16;
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x, at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (uint64_t i = m * row_vec + at; i < p.num_rows * row_vec; i += step) ((uint4 *)p.rows)[i] = make_uint4(0, 0, 0, 0);
    for (uint64_t i = m + at; p.row_weight && i < p.num_rows; i += step) p.row_weight[i] = 0;
}

__global__ void __launch_bounds__(32 * EP_WARPS, 1) dispatch_kernel(const __grid_constant__ Params p) {
    const uint64_t epoch = ep_begin(&p.comm);
    if (epoch && ep_block_enter(&p.comm, EP_OP_DISPATCH, p.plan, p.layout.num_tokens, p.num_rows, p.has_weight, 0, epoch)) {
        move_tokens(p, epoch);
        clear_rest(p);
    }
    if (ep_block_leave(&p.comm, epoch) == EP_LEFT_LAST_FAILED) {
        ep_block_fill(p.rows, p.num_rows * p.comm.layout.row_bytes, EP_NAN_WORD);
        ep_block_fill(p.row_weight, p.num_rows * 4ull, EP_NAN_WORD);
        ep_block_fill(p.recv, 4ull * p.comm.shape.num_ranks * p.comm.shape.max_tokens * (1 + p.comm.shape.num_topk), EP_NO_ROW);
    }
}

extern "C" int ep_launch_dispatch(const EpDispatchParams *p, uint32_t num_blocks, void *stream) {
    return (int)ep_launch_resident(dispatch_kernel, num_blocks, EP_WARPS, 0, stream, *p);
}
extern "C" int ep_preload_dispatch(void) {
    cudaFuncAttributes a;
    return (int)cudaFuncGetAttributes(&a, dispatch_kernel);
}
