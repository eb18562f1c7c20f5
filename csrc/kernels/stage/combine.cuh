/* combine.cuh - one warp's part of combine: return rows to the ranks of their tokens, and add them up there.
 *
 * Exports combine_tokens, await_all_rows and poison_combine.
 * LOCAL and SCATTER: for each slot that this rank received, return the sum of its rows (LOCAL) or the rows
 * one by one (SCATTER). Add up this rank's own tokens as the chunks that they need arrive.
 * GATHER: copy the rows to this rank's staging buffer; the rank of each token pulls them.
 * Every warp does both parts, and waits for a peer only when it has nothing left to send (queue.h).
 * Invariant: sums are in fp32 and in a fixed order, independent of the order of arrival. */
#ifndef EP_COMBINE_CUH
#define EP_COMBINE_CUH
#include "kernels/arch/trace.cuh"
#include "kernels/stage/rows.cuh"

/* Parameters of combine. OP: the operation in headers and fault records. FUSED: the GEMM of the same kernel
 * is still computing rows, so a warp waits for the ready counter of a row before it reads the row. HAS_SMEM:
 * a warp has 8 KB of shared memory for its queue (rows.cuh), else that of a megakernel. */
template <int DTYPE_, EpOpKind OP_, bool HAS_SMEM = true> struct EpCombineConfig {
    static constexpr int DTYPE = DTYPE_;
    static constexpr EpOpKind OP = OP_;
    static constexpr bool FUSED = OP != EP_OP_COMBINE;
    typedef std::conditional_t<OP == EP_OP_GEMM_COMBINE_FP8, EpCombineFp8Fifo, EpFusedFifo> Small;
    typedef std::conditional_t<HAS_SMEM, EpFifo<4, 4>, Small> Fifo;
};

EP_FN uint64_t row_address(const EpCombineParams &p, int32_t row) {
    return (uint64_t)p.rows + (uint64_t)(row < 0 ? 0 : row) * p.comm.layout.row_bytes;
}

/* Copy this part of the rows of the lanes in `mask`, each with its weight and scalar. The row of lane i goes
 * to at(i), a choice of a staging buffer. */
template <typename C, typename At>
EP_FN void put_choices(const EpCombineParams &p, int32_t row, uint32_t mask, const EpPart &part,
                       uint32_t fifo, At at) {
    const uint32_t row_bytes = (uint32_t)p.comm.layout.row_bytes;
    const uint64_t skipped = 16ull * part.vec;
    ep_stream_copy<typename C::Fifo>(fifo, row_address(p, row) + skipped, mask, part.num_vec,
                                     [&](uint32_t i, uint64_t *my_dst, uint32_t *to) {
                                         const int32_t r = __shfl_sync(EP_FULL, row, (int)i);
                                         unsigned char *choice = at(i);
                                         float *trailer = (float *)(choice + row_bytes);
                                         if (part.vec == 0 && ep_lane() == 0) {
                                             trailer[EP_CHOICE_WEIGHT] =
                                                 p.has_weight ? p.row_weight[r] : 1.0f;
                                             trailer[EP_CHOICE_SCALAR] =
                                                 p.has_scalar ? p.row_scalar[r] : 0.0f;
                                         }
                                         *my_dst = (uint64_t)choice + skipped;
                                         *to = 1;
                                     });
}

/* Whether `row` is a valid row of a slot of token `token`. Both may be numbers from a peer. */
EP_FN bool is_row(const EpCombineParams &p, int32_t token, int32_t row) {
    return row >= 0 && (uint32_t)row < p.num_rows && (uint32_t)token < p.comm.shape.max_tokens;
}

/* SCATTER: this rank adds up its own rows where they are, so it returns none of them to itself. In a
 * megakernel it still publishes their chunks: that tells that the rows are ready. */
EP_FN bool returns_nothing(const EpCombineParams &p, uint32_t to_rank) {
    return to_rank == p.comm.my_rank && p.comm.shape.combine_mode == EP_COMBINE_SCATTER;
}

/* A chunk of slots to return. Lane i has the token of slot i. In row[i], lane k has the row of the slot's
 * choice k. */
typedef struct {
    int32_t token, row[EP_CHUNK_SLOTS];
} ChunkRows;
EP_FN ChunkRows no_rows(void) {
    ChunkRows r;
    r.token = 0;
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++) r.row[i] = -1;
    return r;
}
/* Of the slots first to first + num - 1 that rank s has sent. */
EP_FN ChunkRows rows_to_return(const EpCombineParams &p, uint32_t s, uint32_t first, uint32_t num) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk;
    const uint32_t stride = ep_record_words(K);
    const int32_t *records = p.recv + ep_record_at(&c->shape, s, first);
    ChunkRows r;
    r.token = ep_lane() < num ? records[ep_lane() * stride + EP_RECORD_TOKEN] : 0;
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++)
        r.row[i] = i < num && ep_lane() < K ? records[i * stride + EP_RECORD_ROWS + ep_lane()] : -1;
    return r;
}
EP_FN uint32_t num_to_return(const EpCombineParams &p, EpTask task) {
    return ep_chunk_slots((uint32_t)p.plan[EP_HEAD_NUM_RECV + task.rank], task.chunk);
}

/* LOCAL: return the sum of the rows of each slot to rank s, added up through shared memory. */
template <typename C> EP_FN void return_sums(const EpCombineParams &p, uint32_t s, const ChunkRows &r,
                                             const EpPart &part, uint32_t fifo) {
    const EpComm *c = &p.comm;
    const uint64_t skipped = 16ull * part.vec;
    uint32_t ends = 0, listed = 0;
    float weight[EP_CHUNK_SLOTS];
    bool here[EP_CHUNK_SLOTS];
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++) {
        here[i] = is_row(p, __shfl_sync(EP_FULL, r.token, (int)i), r.row[i]);
        weight[i] = here[i] && p.has_weight ? p.row_weight[r.row[i]] : 1.0f;
    }
    ep_warp_sync(); /* no lane still reads the list */
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++) {
        listed = ep_stream_list<typename C::Fifo>(fifo, listed, here[i], row_address(p, r.row[i]) + skipped,
                                                  weight[i]);
        ends |= listed << 8 * i;
    }
    ep_warp_sync();
    ep_stream_sums<typename C::Fifo, C::DTYPE>(
        fifo, ends, part.num, part.num_vec, p.has_weight,
        [&](uint32_t i) { return ep_slot_at(c, s, c->my_rank, part.first + i) + skipped; });
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++)
        if (p.has_scalar && part.vec == 0 && i < part.num && ep_lane() < c->shape.num_topk)
            ((float *)(ep_slot_at(c, s, c->my_rank, part.first + i) + c->layout.row_bytes))[ep_lane()] =
                here[i] ? p.row_scalar[r.row[i]] : 0.0f;
}

/* SCATTER: return the rows of the slots one by one to rank s. */
template <typename C> EP_FN void return_choices(const EpCombineParams &p, uint32_t s, const ChunkRows &r,
                                                const EpPart &part, uint32_t fifo) {
    const EpComm *c = &p.comm;
    /* Unrolled: a loop costs the main loop of GEMM + combine registers, and 1.5 % of its time (E-074). */
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++) {
        if (i >= part.num) return;
        const int32_t token = __shfl_sync(EP_FULL, r.token, (int)i);
        const uint32_t mask = __ballot_sync(EP_FULL, is_row(p, token, r.row[i]));
        put_choices<C>(p, r.row[i], mask, part, fifo, [&](uint32_t k) {
            return ep_choice_at(c, s, (uint64_t)(uint32_t)token * c->shape.num_topk + k);
        });
    }
}

template <typename C> EP_FN void return_part(const EpCombineParams &p, uint32_t s, const ChunkRows &r,
                                             const EpPart &part, uint32_t fifo) {
    if (returns_nothing(p, s)) return;
    if (p.comm.shape.combine_mode == EP_COMBINE_LOCAL) return_sums<C>(p, s, r, part, fifo);
    else return_choices<C>(p, s, r, part, fifo);
}

template <typename C, typename E> EP_FN void return_chunk(const EpCombineParams &p, EpTask task,
                                                          const ChunkRows &r, E epoch, uint32_t fifo) {
    const uint32_t num = num_to_return(p, task);
    if (num == 0) return;
    return_part<C>(p, task.rank, r, ep_whole_chunk(task.chunk, num, ep_row_vecs(&p.comm)), fifo);
    ep_warp_sync(); /* all lanes' stores come before lane 0's release */
    if (ep_lane() == 0) ep_flag_publish(&p.comm, task.rank, task.chunk, epoch);
}

EP_FN uint32_t num_staged_rows(const EpCombineParams &p) {
    const uint32_t m = (uint32_t)p.plan[EP_HEAD_NUM_ROWS];
    return m < p.num_rows ? m : p.num_rows;
}
/* GATHER: copy this rank's rows to its staging buffer. */
template <typename C> EP_FN void stage_part(const EpCombineParams &p, const EpPart &part, uint32_t fifo) {
    const EpComm *c = &p.comm;
    put_choices<C>(p, (int32_t)(part.first + ep_lane()), (1u << part.num) - 1, part, fifo,
                   [&](uint32_t i) { return ep_choice_at(c, c->my_rank, part.first + i); });
}
/* A chunk has been staged. The warp that has finished the last chunk publishes all. One lane calls it. */
template <typename E> EP_FN void count_staged(const EpComm *c, uint32_t num_chunks, E epoch) {
    /* acq_rel: the flags of the last warp publish the rows of all warps. */
    if (ep_add_acq_rel_gpu_u64(&ep_local(c)->num_copied, 1) + 1 == num_chunks)
        for (uint32_t r = 0; r < c->shape.num_ranks; r++) ep_flag_publish(c, r, 0, epoch);
}
template <typename C, typename E>
EP_FN void stage_chunk(const EpCombineParams &p, uint32_t chunk, uint32_t num_chunks, E epoch,
                       uint32_t fifo) {
    const uint32_t num = ep_chunk_slots(num_staged_rows(p), chunk);
    stage_part<C>(p, ep_whole_chunk(chunk, num, ep_row_vecs(&p.comm)), fifo);
    ep_warp_sync();
    if (ep_lane() == 0) count_staged(&p.comm, num_chunks, epoch);
}

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
    const bool own = expert >= 0 && returns_nothing(p, owner) && is_row(p, 0, row);
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
        const TokenRows r =
            rows_of_token(p, part.first + i, ep_lane() < c->shape.num_ranks ? there : -1, part);
        listed = ep_stream_list<typename C::Fifo>(fifo, listed, r.mine, r.from, r.weight);
        ends |= listed << 8 * i;
    }
    ep_warp_sync();
    ep_stream_sums<typename C::Fifo, C::DTYPE>(fifo, ends, part.num, part.num_vec, weighted, [&](uint32_t i) {
        return (unsigned char *)p.out + (part.first + i) * c->layout.row_bytes + 16ull * part.vec;
    });
}

/* Whether the lane's row is ready: whether its row block is complete. In a megakernel different tiles store
 * the row_pieces pieces of a row. A row of -1, or not below M, does not exist and counts as ready. */
EP_FN bool row_is_made(const EpCombineParams &p, int32_t row) {
    const uint32_t m = (uint32_t)p.plan[EP_HEAD_NUM_ROWS], block = (uint32_t)row / EP_TILE_ROWS;
    return row < 0 || (uint32_t)row >= m ||
           ep_ld_acquire_gpu_u64(ep_ready_word(&p.comm, block)) >=
               ep_ready_count(block, m, p.row_pieces); /* the row is now readable */
}
EP_FN bool rows_are_made(const EpCombineParams &p, const ChunkRows &r) {
    bool made = true;
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++) made = made && row_is_made(p, r.row[i]);
    return ep_warp_all(made); /* what any lane has acquired is now readable by all lanes */
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

/* The number of tasks to return chunks, or for GATHER of chunks to stage. GATHER stages at least one chunk,
 * possibly empty: a warp must publish to the peers. */
EP_FN uint32_t num_chunks_to_return(const EpCombineParams &p) {
    const uint32_t num_staged = ep_ceil_div_u32(num_staged_rows(p), EP_CHUNK_SLOTS);
    if (p.comm.shape.combine_mode == EP_COMBINE_GATHER) return num_staged ? num_staged : 1;
    return (uint32_t)ep_num_tasks(p.plan + EP_HEAD_NUM_RECV, p.comm.shape.num_ranks);
}

/* The parts that a warp takes: returning rows, and adding up this rank's tokens. */
typedef struct {
    bool sends, adds;
} EpCombineParts;

/* Draw the next chunk to return, as a task number (queue.h). A megakernel has one queue per peer. A warp
 * draws from its queue `turn` until that queue is empty, then from the next; `left` queues are not yet known
 * to be empty. Reason: the rows of an expert are grouped by source rank, so they become ready for one peer
 * after the other. With a single queue, a warp that waits for rows of the last peer could not return ready
 * rows of the other peers. */
typedef struct {
    uint32_t turn, left;
} SendTurn;
template <typename C> EP_FN uint32_t next_to_send(const EpCombineParams &p, SendTurn *at, uint32_t num_send) {
    const uint32_t W = p.comm.shape.num_ranks;
    EpLocal *l = ep_local(&p.comm);
    if constexpr (!C::FUSED) return (uint32_t)ep_queue_pop(l->queue_send);
    if (p.comm.shape.combine_mode == EP_COMBINE_GATHER) return (uint32_t)ep_queue_pop(l->queue_send);
    for (; at->left; at->left--, at->turn = (at->turn + 1) % W) {
        const uint32_t send = (uint32_t)ep_queue_pop(l->queue_send + at->turn) * W + at->turn;
        if (send < num_send) return send;
    }
    return num_send;
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
    uint32_t send = num_send; /* the chunk that this warp has drawn and not yet returned */
    ChunkRows rows = no_rows();
    EpBackoff backoff = {0, 0, 0};
    uint32_t to_come;
    SendTurn turn = {(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) % W, W};
    uint32_t recv = num_recv ? (uint32_t)ep_queue_pop(&l->queue_recv) : 0;
    int32_t slot = slot_to_await<C>(p, recv);
    while (may_send || recv < num_recv) {
        if (recv < num_recv && (to_come = missing_slots(p, slot, epoch)) == 0) {
            const uint64_t begin = C::FUSED ? ep_trace_now(c) : 0;
            finish_part<C>(p, ep_whole_chunk(recv, ep_chunk_slots(T, recv), ep_row_vecs(c)), slot, fifo);
            if (C::FUSED) ep_trace_span(c, EP_SPAN_ADD, c->my_rank, begin);
            recv = (uint32_t)ep_queue_pop(&l->queue_recv), slot = slot_to_await<C>(p, recv),
            backoff = {0, 0, 0};
        } else if (may_send) {
            const EpTask task = ep_task_at(send, c->my_rank, W);
            if (send == num_send) {
                send = next_to_send<C>(p, &turn, num_send);
                may_send = send < num_send, backoff = {0, 0, 0};
                const EpTask next = ep_task_at(send, c->my_rank, W);
                if (may_send && !gather)
                    rows = rows_to_return(p, next.rank, next.chunk * EP_CHUNK_SLOTS, num_to_return(p, next));
            } else if (C::FUSED && !(gather ? staged_rows_are_made(p, send) : rows_are_made(p, rows))) {
                if (!wait_for_rows(p, C::OP, &backoff, epoch)) return;
            } else {
                const uint64_t begin = C::FUSED ? ep_trace_now(c) : 0;
                if (gather) stage_chunk<C>(p, send, num_send, epoch, fifo);
                else return_chunk<C>(p, task, rows, epoch, fifo);
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
