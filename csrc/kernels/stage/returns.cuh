/* returns.cuh - one warp's part of combine: return rows to the ranks of their tokens.
 *
 * Exports return_part, return_chunk, stage_part, stage_chunk, num_chunks_to_return, all_slots, and lane_row,
 * which says how a warp looks at the rows of slots. combine.cuh says what is returned in which mode. */
#ifndef EP_RETURNS_CUH
#define EP_RETURNS_CUH
#include "kernels/stage/rows.cuh"

/* Parameters of combine. OP: the EP_OP_WORD in headers and fault records. FUSED: the GEMM of the same kernel
 * is still computing rows, so a warp waits for the ready counter of a row before it reads the row. OPENS: a
 * CTA has many chunks open (open_chunks.cuh). Else a warp has one chunk. With FP8 the GEMM is so short that
 * complete chunks keep three warps busy; there, to look for single slots costs up to 9 % (E-128). HAS_SMEM: a
 * warp has 8 KB of shared memory for its queue (rows.cuh), else that of a megakernel. OPTIONS: biases, and
 * sums by choice, as the parameters say. */
template <int DTYPE_, uint32_t OP_, bool HAS_SMEM = true, bool OPTIONS_ = false> struct EpCombineConfig {
    static constexpr int DTYPE = DTYPE_;
    static constexpr uint32_t OP = OP_;
    static constexpr bool FUSED = OP != EP_OP_COMBINE, OPENS = OP == EP_OP_GEMM_COMBINE, OPTIONS = OPTIONS_;
    typedef std::conditional_t<FUSED && !OPENS, EpCombineFp8Fifo, EpFusedFifo> Small;
    typedef EpFifo<4, 4, EP_MAX_TOPK + (OPTIONS ? EP_MAX_BIASES : 0)> Large;
    typedef std::conditional_t<HAS_SMEM, Large, Small> Fifo;
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

/* Whether `row`, which may be a number from a peer, is a valid row. */
EP_FN bool is_row(const EpCombineParams &p, int32_t row) { return row >= 0 && (uint32_t)row < p.num_rows; }

/* SCATTER: this rank adds up its own rows where they are, so it returns none of them to itself. In a
 * megakernel it still publishes their chunks: that tells that the rows are ready. */
EP_FN bool returns_nothing(const EpCombineParams &p, uint32_t to_rank) {
    return to_rank == p.comm.my_rank && p.comm.shape.combine_mode == EP_COMBINE_SCATTER;
}

/* How many lanes have the rows of one slot: K, rounded up to 8, 16 or 32. So the warp has the rows of four
 * slots, of two, or of one at a time. */
EP_FN uint32_t lanes_of_slot(const EpCombineParams &p) {
    const uint32_t K = p.comm.shape.num_topk;
    return K <= 8 ? 8 : K <= 16 ? 16 : 32;
}
/* A lane's row: that of one choice of one slot; -1: there is none. LOCAL: and the weight of the row, or 1. */
typedef struct {
    int32_t row;
    float weight;
} LaneRow;
/* Load this lane's row. The first lanes_of_slot lanes have the rows of slot first + at, which rank s has
 * sent, the next ones those of slot first + at + 1, and so on. Bit i of `slots` is the slot first + i. A slot
 * whose bit is 0 has no rows. */
EP_FN LaneRow lane_row(const EpCombineParams &p, uint32_t s, uint32_t first, uint32_t slots, uint32_t at) {
    const uint32_t K = p.comm.shape.num_topk, lanes = lanes_of_slot(p);
    const uint32_t i = at + ep_lane() / lanes, k = ep_lane() % lanes;
    const int32_t *record = p.recv + ep_record_at(&p.comm.shape, s, first) + (uint64_t)i * ep_record_words(K);
    LaneRow r = {(slots >> i & 1) && k < K ? record[EP_RECORD_ROWS + k] : -1, 1.0f};
    if (p.has_weight && p.comm.shape.combine_mode == EP_COMBINE_LOCAL && is_row(p, r.row))
        r.weight = p.row_weight[r.row];
    return r;
}
EP_FN uint32_t num_to_return(const EpCombineParams &p, EpTask task) {
    return ep_chunk_slots((uint32_t)p.plan[EP_HEAD_NUM_RECV + task.rank], task.chunk);
}

EP_FN uint32_t all_slots(uint32_t num) { return (1u << num) - 1; }

/* LOCAL: return the sum of the rows of each slot to rank s, added up through shared memory. */
template <typename C> EP_FN void return_sums(const EpCombineParams &p, uint32_t s, LaneRow mine,
                                             const EpPart &part, uint32_t slots, uint32_t fifo) {
    const EpComm *c = &p.comm;
    const uint32_t lanes = lanes_of_slot(p);
    const uint64_t skipped = 16ull * part.vec;
    uint32_t ends = 0, listed = 0, num = 0;
    ep_warp_sync(); /* no lane still reads the list */
    for (uint32_t at = 0; at < EP_CHUNK_SLOTS; at += 32 / lanes) {
        if (at) mine = lane_row(p, s, part.first, slots, at);
        const uint32_t i = at + ep_lane() / lanes, k = ep_lane() % lanes;
        const bool here = (slots >> i & 1) && is_row(p, mine.row);
        const uint32_t rows = __ballot_sync(EP_FULL, here);
        ep_stream_list<typename C::Fifo>(fifo, listed, here, row_address(p, mine.row) + skipped, mine.weight);
        for (uint32_t j = 0; j < 32 / lanes; j++) {
            if (!(slots >> (at + j) & 1)) continue;
            listed += (uint32_t)__popc(rows >> lanes * j & EP_FULL >> (32 - lanes));
            ends |= listed << 8 * num++;
        }
        if (p.has_scalar && part.vec == 0 && (slots >> i & 1) && k < c->shape.num_topk)
            ((float *)(ep_slot_at(c, s, c->my_rank, part.first + i) + c->layout.row_bytes))[k] =
                here ? p.row_scalar[mine.row] : 0.0f;
    }
    ep_warp_sync();
    ep_stream_sums<typename C::Fifo, C::DTYPE>(
        fifo, ends, num, part.num_vec, p.has_weight, [&](uint32_t sum) {
            uint32_t left = slots;
            for (; sum; sum--) left &= left - 1; /* without the slots of the sums before */
            return ep_slot_at(c, s, c->my_rank, part.first + (uint32_t)__ffs((int)left) - 1) + skipped;
        });
}

/* SCATTER: return the rows of the slots one by one to rank s. */
template <typename C> EP_FN void return_choices(const EpCombineParams &p, uint32_t s, LaneRow mine,
                                                const EpPart &part, uint32_t slots, uint32_t fifo) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk, lanes = lanes_of_slot(p);
    const int32_t *records = p.recv + ep_record_at(&c->shape, s, part.first);
    for (uint32_t at = 0; at < EP_CHUNK_SLOTS; at += 32 / lanes) {
        if (at) mine = lane_row(p, s, part.first, slots, at);
        const uint32_t i = at + ep_lane() / lanes;
        const bool wanted = (slots >> i & 1) && is_row(p, mine.row);
        const int32_t token = wanted ? records[(uint64_t)i * ep_record_words(K) + EP_RECORD_TOKEN] : -1;
        const bool here = (uint32_t)token < c->shape.max_tokens;
        put_choices<C>(p, mine.row, __ballot_sync(EP_FULL, here), part, fifo, [&](uint32_t lane) {
            const uint32_t t = (uint32_t)__shfl_sync(EP_FULL, token, (int)lane);
            return ep_choice_at(c, s, (uint64_t)t * K + lane % lanes);
        });
    }
}

/* Return the slots of the mask `slots` to rank s: of each row, the units that `part` names. Bit i is the slot
 * part.first + i. mine: the result of lane_row with at = 0 and these slots, or more. */
template <typename C> EP_FN void return_part(const EpCombineParams &p, uint32_t s, LaneRow mine,
                                             const EpPart &part, uint32_t slots, uint32_t fifo) {
    if (returns_nothing(p, s)) return;
    if (p.comm.shape.combine_mode == EP_COMBINE_LOCAL) return_sums<C>(p, s, mine, part, slots, fifo);
    else return_choices<C>(p, s, mine, part, slots, fifo);
}

template <typename C, typename E>
EP_FN void return_chunk(const EpCombineParams &p, EpTask task, E epoch, uint32_t fifo) {
    const uint32_t num = num_to_return(p, task);
    if (num == 0) return;
    const EpPart part = ep_whole_chunk(task.chunk, num, ep_row_vecs(&p.comm));
    const LaneRow mine = lane_row(p, task.rank, part.first, all_slots(num), 0);
    return_part<C>(p, task.rank, mine, part, all_slots(num), fifo);
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

/* The number of tasks to return chunks, or for GATHER of chunks to stage. GATHER stages at least one chunk,
 * possibly empty: a warp must publish to the peers. */
EP_FN uint32_t num_chunks_to_return(const EpCombineParams &p) {
    const uint32_t num_staged = ep_ceil_div_u32(num_staged_rows(p), EP_CHUNK_SLOTS);
    if (p.comm.shape.combine_mode == EP_COMBINE_GATHER) return num_staged ? num_staged : 1;
    return (uint32_t)ep_num_tasks(p.plan + EP_HEAD_NUM_RECV, p.comm.shape.num_ranks);
}

#endif /* EP_RETURNS_CUH */
