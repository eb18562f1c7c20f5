/* combine.cu - every row home, and added up there.
 *
 * LOCAL and SCATTER: send what this rank's experts made of each slot (its rows added up, or one by one),
 * and add up this rank's own tokens as the chunks they need arrive.  GATHER: put the rows where peers can
 * reach them; each token's rank pulls.  Every warp does both parts, and waits only when there is nothing
 * left to send (queue.h).  Sums are in fp32 and in a fixed order, whoever comes first. */
#include "launch.h"
#include "rows.cuh"

typedef EpCombineParams Params;

EP_FN uint64_t row_address(const Params &p, int32_t row) {
    return (uint64_t)p.rows + (uint64_t)(row < 0 ? 0 : row) * p.comm.layout.row_bytes;
}

/* Copy a row and its weight and scalar to where one choice is kept. */
EP_FN void put_choice(const Params &p, unsigned char *to, int32_t row) {
    if (ep_lane() == 0) {
        float *trailer = (float *)(to + p.comm.layout.row_bytes);
        trailer[0] = p.has_weight ? p.row_weight[row] : 1.0f;
        trailer[1] = p.has_scalar ? p.row_scalar[row] : 0.0f;
    }
    ep_copy_row((uint64_t)to, 1, (const void *)row_address(p, row), (uint32_t)(p.comm.layout.row_bytes / 16));
}

/* Send home what this rank made of one slot of rank s: of its token; lane k has the row of choice k. */
template <int DTYPE>
EP_FN void return_slot(const Params &p, uint32_t s, uint32_t slot, int32_t token, int32_t row) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk;
    const bool here = row >= 0 && (uint32_t)row < p.num_rows && (uint32_t)token < c->shape.max_tokens;
    const uint32_t mask = __ballot_sync(EP_FULL, here);
    if (c->shape.combine_mode == EP_COMBINE_SCATTER) {
        for (uint32_t left = mask; left; left &= left - 1) {
            const int k = __ffs((int)left) - 1;
            put_choice(p, ep_choice_at(c, s, (uint64_t)(uint32_t)token * K + (uint32_t)k), __shfl_sync(EP_FULL, row, k));
        }
        return;
    }
    unsigned char *to = ep_slot_at(c, s, c->my_rank, slot);
    ep_sum_rows<DTYPE>(to, (uint32_t)(c->layout.row_bytes / 16), mask, row_address(p, here ? row : -1),
                       here && p.has_weight ? p.row_weight[row] : 1.0f, p.has_weight);
    if (p.has_scalar && ep_lane() < K) ((float *)(to + c->layout.row_bytes))[ep_lane()] = here ? p.row_scalar[row] : 0.0f;
}

template <int DTYPE>
EP_FN void return_chunk(const Params &p, EpTask task, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const uint32_t num = ep_chunk_slots((uint32_t)p.plan[EP_HEAD_NUM_RECV + task.rank], task.chunk), K = c->shape.num_topk;
    const uint32_t first = task.chunk * EP_CHUNK_SLOTS;
    const int32_t *meta = p.recv + ((uint64_t)task.rank * c->shape.max_tokens + first) * (1 + K);
    int32_t row[EP_CHUNK_SLOTS]; /* of all slots, before the first is worked on; lane i has the i-th's token */
    if (num == 0) return;
    const int32_t token = ep_lane() < num ? meta[ep_lane() * (1 + K)] : 0;
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++) row[i] = i < num && ep_lane() < K ? meta[i * (1 + K) + 1 + ep_lane()] : -1;
    for (uint32_t i = 0; i < num; i++) {
        return_slot<DTYPE>(p, task.rank, first + i, __shfl_sync(EP_FULL, token, (int)i), row[0]);
#pragma unroll
        for (uint32_t j = 1; j < EP_CHUNK_SLOTS; j++) row[j - 1] = row[j];
    }
    ep_warp_sync(); /* all lanes' stores come before lane 0's release */
    if (ep_lane() == 0) ep_flag_publish(c, task.rank, task.chunk, epoch);
}

EP_FN uint32_t num_staged_rows(const Params &p) {
    const uint32_t m = (uint32_t)p.plan[EP_HEAD_NUM_ROWS];
    return m < p.num_rows ? m : p.num_rows;
}
/* GATHER: put a chunk of this rank's rows where peers can pull them; who ends the last one tells everyone. */
EP_FN void stage_chunk(const Params &p, uint32_t chunk, uint32_t num_chunks, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const uint32_t first = chunk * EP_CHUNK_SLOTS, num = ep_chunk_slots(num_staged_rows(p), chunk);
    for (uint32_t i = first; i < first + num; i++) put_choice(p, ep_choice_at(c, c->my_rank, i), (int32_t)i);
    ep_warp_sync();
    /* acq_rel: the last warp's flags publish all warps' rows. */
    if (ep_lane() == 0 && ep_add_acq_rel_gpu_u64(&ep_local(c)->num_copied, 1) + 1 == num_chunks)
        for (uint32_t r = 0; r < c->shape.num_ranks; r++) ep_flag_publish(c, r, 0, epoch);
}

/* Is all here that a chunk of this rank's tokens needs?  With `wait`: until it is.  A lane looks after one
 * (token, rank) of the chunk, and keeps its slot. */
EP_FN bool tokens_are_here(const Params &p, uint32_t chunk, uint64_t epoch, bool wait, int32_t *slot_of_lane) {
    static_assert(EP_CHUNK_SLOTS * EP_MAX_RANKS == 32, "a lane for each token and rank of a chunk");
    const EpComm *c = &p.comm;
    const uint32_t t = chunk * EP_CHUNK_SLOTS + ep_lane() / EP_MAX_RANKS, r = ep_lane() % EP_MAX_RANKS;
    const bool gather = c->shape.combine_mode == EP_COMBINE_GATHER;
    int32_t slot = -1;
    if (r < c->shape.num_ranks && t < p.layout.num_tokens)
        slot = gather ? 0 : p.plan[p.layout.token_slot_off + (uint64_t)t * c->shape.num_ranks + r];
    EpFaultRecord f = {0, 0, EP_OP_COMBINE, r, EP_WORD_FLAG, 0, 0, epoch, 0, 0};
    bool ok = true;
    *slot_of_lane = slot;
    if (slot >= 0) {
        const uint64_t *flag = ep_flag(c, c->my_rank, r, (uint32_t)slot / EP_CHUNK_SLOTS);
        ok = wait ? ep_wait_u64(c, flag, EP_CMP_EQ, epoch, &f) : ep_ld_acquire_sys_u64(flag) == epoch;
    }
    return __all_sync(EP_FULL, ok); /* what any lane acquired is now readable by all */
}

/* One token of this rank, from what the ranks returned; LOCAL: lane r has its slot at rank r. */
template <int DTYPE>
EP_FN void finish_token(const Params &p, uint32_t t, int32_t slot) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk, W = c->shape.num_ranks, lane = ep_lane();
    const bool gather = c->shape.combine_mode == EP_COMBINE_GATHER, local = c->shape.combine_mode == EP_COMBINE_LOCAL;
    const bool by_choice = lane < K && (!local || p.has_scalar);
    const int32_t expert = by_choice ? p.plan[p.layout.token_expert_off + (uint64_t)t * K + lane] : -1;
    const uint32_t owner = expert < 0 ? 0 : (uint32_t)expert / ep_num_local_experts(&c->shape);
    unsigned char *out = (unsigned char *)p.out + t * c->layout.row_bytes;
    const uint32_t num_vec = (uint32_t)(c->layout.row_bytes / 16);
    /* LOCAL: lane r has what rank r returned.  Else: lane k has choice k, here or at the expert's rank. */
    const int32_t slot_there = __shfl_sync(EP_FULL, slot, (int)owner);
    const int32_t row = gather && lane < K ? p.plan[p.layout.token_row_off + (uint64_t)t * K + lane] : 0;
    const unsigned char *choice = local    ? ep_slot_at(c, c->my_rank, owner, slot_there < 0 ? 0 : (uint32_t)slot_there)
                                  : gather ? ep_choice_at(c, owner, (uint32_t)(row < 0 ? 0 : row))
                                           : ep_choice_at(c, c->my_rank, (uint64_t)t * K + lane);
    const float *trailer = (const float *)(choice + c->layout.row_bytes);
    float weight = 1, scalar = 0;
    if (expert >= 0 && !local) weight = trailer[0];
    if (expert >= 0 && p.has_scalar) scalar = trailer[local ? lane : 1];
    const unsigned char *from = local ? ep_slot_at(c, c->my_rank, lane < W ? lane : 0, slot < 0 ? 0 : (uint32_t)slot) : choice;
    ep_sum_rows<DTYPE>(out, num_vec, __ballot_sync(EP_FULL, local ? slot >= 0 : expert >= 0), (uint64_t)from, weight,
                       !local && p.has_weight);
    if (p.has_scalar && lane < K) p.out_scalar[(uint64_t)t * K + lane] = scalar;
}

template <int DTYPE>
EP_FN void bring_home(const Params &p, uint64_t epoch) {
    const EpComm *c = &p.comm;
    EpLocal *l = ep_local(c);
    const bool gather = c->shape.combine_mode == EP_COMBINE_GATHER;
    const uint32_t W = c->shape.num_ranks, T = p.layout.num_tokens, num_recv = ep_ceil_div_u32(T, EP_CHUNK_SLOTS);
    /* GATHER has at least one chunk to stage, be it empty: somebody must tell the peers. */
    const uint32_t num_staged = ep_ceil_div_u32(num_staged_rows(p), EP_CHUNK_SLOTS), num_stage = num_staged ? num_staged : 1;
    const uint64_t num_send = gather ? num_stage : ep_num_tasks(p.plan + EP_HEAD_NUM_RECV, W);
    bool may_send = true;
    int32_t slot = -1; /* of lane's token of a chunk, at lane's rank */
    for (uint64_t recv = ep_queue_pop(&l->queue_recv); may_send || recv < num_recv;) {
        if (recv < num_recv && tokens_are_here(p, (uint32_t)recv, epoch, !may_send, &slot)) {
            const uint32_t first = (uint32_t)recv * EP_CHUNK_SLOTS, num = ep_chunk_slots(T, (uint32_t)recv);
            for (uint32_t i = 0; i < num; i++) {
                const int32_t there = __shfl_sync(EP_FULL, slot, (int)(i * EP_MAX_RANKS + ep_lane() % EP_MAX_RANKS));
                finish_token<DTYPE>(p, first + i, ep_lane() < W ? there : -1);
            }
            recv = ep_queue_pop(&l->queue_recv);
        } else if (may_send) {
            const uint64_t send = ep_queue_pop(&l->queue_send);
            may_send = send < num_send;
            if (may_send && gather) stage_chunk(p, (uint32_t)send, num_stage, epoch);
            else if (may_send) return_chunk<DTYPE>(p, ep_task_at(send, c->my_rank, W), epoch);
        } else {
            return; /* the wait has failed */
        }
    }
}

template <int DTYPE>
__global__ void __launch_bounds__(32 * EP_COMBINE_WARPS, 1) combine_kernel(const __grid_constant__ Params p) {
    const uint64_t epoch = ep_begin(&p.comm);
    if (epoch && ep_block_enter(&p.comm, EP_OP_COMBINE, p.plan, p.layout.num_tokens, p.num_rows, p.has_weight, p.has_scalar, epoch)) {
        bring_home<DTYPE>(p, epoch);
    }
    if (ep_block_leave(&p.comm, epoch) == EP_LEFT_LAST_FAILED) {
        ep_block_fill(p.out, p.layout.num_tokens * p.comm.layout.row_bytes, EP_NAN_WORD);
        ep_block_fill(p.out_scalar, p.has_scalar ? 4ull * p.layout.num_tokens * p.comm.shape.num_topk : 0, EP_NAN_WORD);
    }
}

extern "C" int ep_launch_combine(const EpCombineParams *p, uint32_t num_blocks, void *stream) {
    if (p->comm.shape.dtype == EP_F32) return (int)ep_launch_resident(combine_kernel<EP_F32>, num_blocks, EP_COMBINE_WARPS, 0, stream, *p);
    if (p->comm.shape.dtype == EP_F16) return (int)ep_launch_resident(combine_kernel<EP_F16>, num_blocks, EP_COMBINE_WARPS, 0, stream, *p);
    return (int)ep_launch_resident(combine_kernel<EP_BF16>, num_blocks, EP_COMBINE_WARPS, 0, stream, *p);
}
extern "C" int ep_preload_combine(void) {
    cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, combine_kernel<EP_F32>);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, combine_kernel<EP_F16>);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, combine_kernel<EP_BF16>);
    return (int)e;
}
