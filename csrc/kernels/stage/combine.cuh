/* combine.cuh - one warp's part of combine: return rows to the ranks of their tokens, and add them up there.
 *
 * Exports combine_tokens, await_all_rows and poison_combine.
 * LOCAL and SCATTER: for each slot that this rank received, return the sum of its rows (LOCAL) or the rows
 * one by one (SCATTER). Add up this rank's own tokens as the chunks that they need arrive.
 * GATHER: copy the rows to this rank's staging buffer; the rank of each token pulls them.
 * Every warp does both parts, and waits for a peer only when it has nothing left to send (queue.h). What a
 * warp returns is in returns.cuh. Beside a GEMM it returns slots in the order in which they become complete:
 * open_chunks.cuh.
 * Invariant: sums are in fp32 and in a fixed order, independent of the order of arrival. */
#ifndef EP_COMBINE_CUH
#define EP_COMBINE_CUH
#include "kernels/stage/open_chunks.cuh"

EP_HANDLES_ALL(EP_NUM_COMBINE_MODES, 5); /* here and in returns.cuh and few_tokens.cuh */

/* The slots that a chunk of this rank's tokens needs. A lane has one (token, rank): its slot, or -1 for
 * none. */
template <typename C> EP_FN int32_t slot_to_await(const EpCombineParams &p, uint32_t chunk) {
    static_assert(EP_CHUNK_SLOTS * EP_MAX_RANKS == 32, "a lane for each token and rank of a chunk");
    const uint32_t t = chunk * EP_CHUNK_SLOTS + ep_lane() / EP_MAX_RANKS;
    const uint32_t r = ep_lane() % EP_MAX_RANKS;
    const uint32_t W = p.comm.shape.num_ranks;
    if (r >= W || t >= p.layout.num_tokens || (!C::FUSED && returns_nothing(p, r))) return -1;
    return p.comm.shape.combine_mode == EP_COMBINE_GATHER
               ? 0
               : p.plan[p.layout.token_slot_off + (uint64_t)t * W + r];
}
/* The lanes whose slots have not arrived yet. */
template <typename E> EP_FN uint32_t missing_slots(const EpCombineParams &p, int32_t slot, E epoch) {
    const bool here =
        slot < 0 || ep_flag_seen(&p.comm, ep_lane() % EP_MAX_RANKS, (uint32_t)slot / EP_CHUNK_SLOTS, epoch);
    const uint32_t lanes = __ballot_sync(EP_FULL, !here);
    ep_warp_sync(); /* what any lane has acquired is now readable by all lanes */
    return lanes;
}

/* The rows whose sum is a token of this rank, one per lane. LOCAL: lane r has what rank r returned, in the
 * given slot. Other modes: lane k has choice k, in this rank's staging buffer (SCATTER) or in that of the
 * expert's rank (GATHER); for an expert of this rank, SCATTER takes the row itself. */
typedef struct {
    bool mine;
    uint64_t from;
    float weight;
} TokenRows;
EP_FN TokenRows rows_of_token(const EpCombineParams &p, uint32_t t, int32_t slot, const EpPart &part) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk, W = c->shape.num_ranks, lane = ep_lane();
    const bool gather = c->shape.combine_mode == EP_COMBINE_GATHER;
    const bool local = c->shape.combine_mode == EP_COMBINE_LOCAL;
    const bool by_choice = lane < K && (!local || p.has_scalar);
    const int32_t expert = by_choice ? p.plan[p.layout.token_expert_off + (uint64_t)t * K + lane] : -1;
    const uint32_t owner = expert < 0 ? 0 : (uint32_t)expert / ep_num_local_experts(&c->shape);
    const int32_t slot_there = __shfl_sync(EP_FULL, slot, (int)owner);
    const int32_t row = !local && lane < K ? p.plan[p.layout.token_row_off + (uint64_t)t * K + lane] : 0;
    const bool own = expert >= 0 && returns_nothing(p, owner) && is_row(p, row);
    const unsigned char *choice =
        local    ? ep_slot_at(c, c->my_rank, owner, slot_there < 0 ? 0 : (uint32_t)slot_there)
        : gather ? ep_choice_at(c, owner, (uint32_t)(row < 0 ? 0 : row))
                 : ep_choice_at(c, c->my_rank, (uint64_t)t * K + lane);
    const float *trailer = (const float *)(choice + c->layout.row_bytes);
    const uint64_t from =
        local ? (uint64_t)ep_slot_at(c, c->my_rank, lane < W ? lane : 0, slot < 0 ? 0 : (uint32_t)slot)
        : own ? row_address(p, row)
              : (uint64_t)choice;
    TokenRows r = {local ? slot >= 0 : expert >= 0, from + 16ull * part.vec, 1};
    if (own && p.has_weight) r.weight = p.row_weight[row];
    else if (r.mine && !own && !local) r.weight = trailer[EP_CHOICE_WEIGHT];
    if (p.has_scalar && part.vec == 0 && lane < K)
        p.out_scalar[(uint64_t)t * K + lane] = expert < 0 ? 0
                                               : own      ? p.row_scalar[row]
                                                          : trailer[local ? lane : EP_CHOICE_SCALAR];
    return r;
}

/* The same for LOCAL by choice: lane k has what the rank of choice k returned, if no later choice is at that
 * rank. */
EP_FN TokenRows rows_by_choice(const EpCombineParams &p, uint32_t t, int32_t slot, const EpPart &part) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk, lane = ep_lane();
    const int32_t expert = lane < K ? p.plan[p.layout.token_expert_off + (uint64_t)t * K + lane] : -1;
    const uint32_t owner = expert < 0 ? 0 : (uint32_t)expert / ep_num_local_experts(&c->shape);
    const int32_t slot_there = __shfl_sync(EP_FULL, slot, (int)owner);
    const uint32_t same = __match_any_sync(EP_FULL, expert < 0 ? (uint32_t)EP_MAX_RANKS : owner);
    const uint64_t from =
        (uint64_t)ep_slot_at(c, c->my_rank, owner, slot_there < 0 ? 0 : (uint32_t)slot_there);
    return {expert >= 0 && slot_there >= 0 && same >> lane == 1, from + 16ull * part.vec, 1};
}
/* The address of a part of lane i's bias i of a token. */
EP_FN uint64_t bias_of_token(const EpCombineParams &p, uint32_t t, const EpPart &part) {
    return (uint64_t)p.bias[ep_lane() == 1] + t * p.comm.layout.row_bytes + 16ull * part.vec;
}

/* Add up a part of a chunk of this rank's tokens; slot: see slot_to_await. */
template <typename C> EP_FN void finish_part(const EpCombineParams &p, const EpPart &part, int32_t slot,
                                             uint32_t fifo) {
    const EpComm *c = &p.comm;
    const bool weighted = c->shape.combine_mode != EP_COMBINE_LOCAL && p.has_weight;
    uint32_t ends = 0, listed = 0;
    ep_warp_sync(); /* no lane still reads the list */
    for (uint32_t i = 0; i < part.num; i++) {
        const uint32_t lane = (part.first + i) % EP_CHUNK_SLOTS * EP_MAX_RANKS + ep_lane() % EP_MAX_RANKS;
        const int32_t there = __shfl_sync(EP_FULL, slot, (int)lane);
        const int32_t mine = ep_lane() < c->shape.num_ranks ? there : -1;
        TokenRows r = rows_of_token(p, part.first + i, mine, part);
        if constexpr (C::OPTIONS) {
            if (p.by_choice) r = rows_by_choice(p, part.first + i, mine, part);
            listed = ep_stream_list<typename C::Fifo>(fifo, listed, ep_lane() < p.num_biases,
                                                      bias_of_token(p, part.first + i, part), 1);
        }
        listed = ep_stream_list<typename C::Fifo>(fifo, listed, r.mine, r.from, r.weight);
        ends |= listed << 8 * i;
    }
    ep_warp_sync();
    ep_stream_sums<typename C::Fifo, C::DTYPE>(fifo, ends, part.num, part.num_vec, weighted, [&](uint32_t i) {
        return (unsigned char *)p.out + (part.first + i) * c->layout.row_bytes + 16ull * part.vec;
    });
}

EP_FN bool chunk_is_made(const EpCombineParams &p, EpTask task) {
    const uint32_t first = task.chunk * EP_CHUNK_SLOTS, slots = all_slots(num_to_return(p, task));
    return made_slots(p, task.rank, first, slots, lane_row(p, task.rank, first, slots, 0)) == slots;
}
EP_FN bool staged_rows_are_made(const EpCombineParams &p, uint32_t chunk) {
    const uint32_t num = ep_chunk_slots(num_staged_rows(p), chunk);
    return ep_warp_all(row_is_made(p, ep_lane() < num ? (int32_t)(chunk * EP_CHUNK_SLOTS + ep_lane()) : -1));
}

/* One step of backoff: in a wait for rows of this rank that the warp has to return, or in a wait for slots
 * of `lanes`. Hundreds of warps wait in a megakernel. Without the sleep between two polls they slow down
 * the MMA warps. */
template <typename E> EP_FN bool wait_for_rows(const EpCombineParams &p, uint32_t op, EpBackoff *w, E epoch) {
    const EpFaultRecord f = ep_fault_at(op, p.comm.my_rank, EP_WORD_READY, epoch);
    uint64_t ok = 1;
    ep_sleep_2us();
    if (ep_lane() == 0) ok = ep_wait_on(&p.comm, w, ep_local_limit_ns(&p.comm), &f, 1, 0);
    return ep_warp_bcast_u64(ok) != 0;
}
template <typename C, typename E> EP_FN bool wait_for_slots(const EpCombineParams &p, uint32_t lanes,
                                                            int32_t slot, EpBackoff *w, E epoch) {
    const uint32_t first = (uint32_t)__ffs((int)lanes) - 1;
    const uint32_t chunk = (uint32_t)__shfl_sync(EP_FULL, slot, (int)first) / EP_CHUNK_SLOTS;
    uint64_t ok = 1;
    if (C::FUSED) ep_sleep_2us();
    if (ep_lane() == 0) ok = ep_flag_wait_on(&p.comm, C::OP, first % EP_MAX_RANKS, chunk, epoch, w);
    return ep_warp_bcast_u64(ok) != 0;
}

/* Wait until all rows are ready, in a megakernel that returns no row earlier. */
template <typename E> EP_FN bool await_all_rows(const EpCombineParams &p, uint32_t op, E epoch) {
    const uint32_t num_rows = num_staged_rows(p);
    EpBackoff w = {0, 0, 0};
    for (uint32_t first = 0; first < num_rows;) {
        if (ep_warp_all(row_is_made(p, (int32_t)(first + EP_TILE_ROWS * ep_lane()))))
            first += 32 * EP_TILE_ROWS;
        else if (!wait_for_rows(p, op, &w, epoch)) return false;
    }
    return true;
}

/* The parts that a warp takes: returning rows, and adding up this rank's tokens. */
typedef struct {
    bool sends, adds;
} EpCombineParts;

/* Draw the next chunk to return or to stage, as a task number. */
template <typename C>
EP_FN uint32_t next_to_send(const EpCombineParams &p, EpReturnTurn *at, uint32_t num_send) {
    EpLocal *l = ep_local(&p.comm);
    if constexpr (!C::FUSED) return (uint32_t)ep_queue_pop(l->queue_send);
    if (p.comm.shape.combine_mode == EP_COMBINE_GATHER) return (uint32_t)ep_queue_pop(l->queue_send);
    return next_of_peers(p, at, num_send);
}

/* epoch: a uint64_t, or an object that converts to one and so needs no register. */
template <typename C, typename E> EP_FN void combine_tokens(const EpCombineParams &p, E epoch,
                                                            EpCombineParts parts, uint32_t fifo) {
    const EpComm *c = &p.comm;
    EpLocal *l = ep_local(c);
    const bool gather = c->shape.combine_mode == EP_COMBINE_GATHER;
    const uint32_t W = c->shape.num_ranks;
    const uint32_t T = p.layout.num_tokens;
    const uint32_t num_recv = parts.adds ? ep_ceil_div_u32(T, EP_CHUNK_SLOTS) : 0;
    const uint32_t num_send = num_chunks_to_return(p);
    bool may_send = parts.sends;
    uint32_t send = num_send; /* the chunk that this warp has drawn and not yet returned or staged */
    EpBackoff backoff = {0, 0, 0};
    uint32_t to_come;
    EpReturnTurn turn = first_turn(W);
    uint32_t recv = num_recv ? (uint32_t)ep_queue_pop(&l->queue_recv) : 0;
    int32_t slot = slot_to_await<C>(p, recv);
    while (may_send || recv < num_recv) {
        if (recv < num_recv && (to_come = missing_slots(p, slot, epoch)) == 0) {
            const uint64_t begin = C::FUSED ? ep_trace_now(c) : 0;
            finish_part<C>(p, ep_whole_chunk(recv, ep_chunk_slots(T, recv), ep_row_vecs(c)), slot, fifo);
            if (C::FUSED) ep_trace_span(c, EP_SPAN_ADD, c->my_rank, begin);
            recv = (uint32_t)ep_queue_pop(&l->queue_recv), slot = slot_to_await<C>(p, recv),
            backoff = {0, 0, 0};
        } else if (may_send && C::OPENS && !gather) {
            const EpReturned done = return_some<C>(p, &turn, num_send, epoch, fifo);
            may_send = done != EP_NOTHING_LEFT;
            if (done == EP_DID_RETURN) backoff = {0, 0, 0};
            if (done == EP_ROWS_MISSING && !wait_for_rows(p, C::OP, &backoff, epoch)) return;
        } else if (may_send) {
            const EpTask task = ep_task_at(send, c->my_rank, W);
            if (send == num_send) {
                send = next_to_send<C>(p, &turn, num_send);
                may_send = send < num_send, backoff = {0, 0, 0};
            } else if (C::FUSED && !(gather ? staged_rows_are_made(p, send) : chunk_is_made(p, task))) {
                if (!wait_for_rows(p, C::OP, &backoff, epoch)) return;
            } else {
                const uint64_t begin = C::FUSED ? ep_trace_now(c) : 0;
                if (gather) stage_chunk<C>(p, send, num_send, epoch, fifo);
                else if constexpr (!C::OPENS) return_chunk<C>(p, task, epoch, fifo);
                if (C::FUSED) ep_trace_span(c, EP_SPAN_RETURN, task.rank, begin);
                send = num_send;
            }
        } else if (!wait_for_slots<C>(p, to_come, slot, &backoff, epoch)) {
            return;
        }
    }
}

/* Poison the outputs after a failed combine. The last CTA out calls it. */
EP_FN void poison_combine(const EpCombineParams &p) {
    ep_cta_fill(p.out, p.layout.num_tokens * p.comm.layout.row_bytes, EP_NAN_WORD);
    ep_cta_fill(p.out_scalar, p.has_scalar ? 4ull * p.layout.num_tokens * p.comm.shape.num_topk : 0,
                EP_NAN_WORD);
}

#endif /* EP_COMBINE_CUH */
