/* dispatch.cuh - one warp's part of dispatch: send tokens to the ranks of their experts, receive tokens into
 * rows.
 *
 * Exports move_tokens, poison_dispatch (after a failed dispatch, it sets rows and weights to NaN and recv to
 * -1) and NoScales (rows that are not FP8).
 * Send: a token goes once to each rank that has at least one of its experts, into the slot that the plan
 * assigned. The numbers of its rows at that rank, and its weights, are in the slot's trailer (slot.h). When
 * all slots of a chunk (EP_CHUNK_SLOTS slots) are written, one flag publishes them.
 * Receive: when the flag of a chunk has arrived, read each of its slots once and copy it to all its rows.
 * Every warp does both, unless EpMoveWhat gives it only one. It receives chunks that have arrived, sends if
 * none has, and waits only when it has nothing left to send (queue.h).
 *
 * FUSED (in a megakernel): after a chunk that it has received, a warp sends one, if any is left. It copies
 * rows through its part of shared memory (`fifo`), because it has too few registers. For each row that it has
 * placed, it increments the ready counter of the row's block of EP_TILE_ROWS rows. The warp that loads the
 * operands of the GEMM waits for that counter.
 * Invariant: numbers from a peer are checked before they become an address. A row that does not exist counts
 * as -1, which is no row. */
#ifndef EP_DISPATCH_CUH
#define EP_DISPATCH_CUH
#include <type_traits>

#include "kernels/arch/trace.cuh"
#include "kernels/stage/rows.cuh"

/* The part of the work that a warp takes. ALL, except in the megakernel's mode of separate sending and
 * receiving CTAs. */
typedef enum { EP_MOVE_ALL = 3, EP_MOVE_SENDS = 1, EP_MOVE_RECEIVES = 2 } EpMoveWhat;

/* For lane k: the row of token t's choice k at rank r, or -1. */
EP_FN int32_t row_at_rank(const EpDispatchParams &p, uint32_t t, uint32_t r) {
    const uint32_t K = p.comm.shape.num_topk, k = ep_lane();
    if (k >= K) return -1;
    const int32_t e = p.plan[p.layout.token_expert_off + (uint64_t)t * K + k];
    return e >= 0 && (uint32_t)e / ep_num_local_experts(&p.comm.shape) == r
               ? p.plan[p.layout.token_row_off + (uint64_t)t * K + k]
               : -1;
}

/* For lane i: the token in slot first + i of those that this rank sends to rank r. */
EP_FN uint32_t tokens_to_send(const EpDispatchParams &p, uint32_t r, uint32_t first, uint32_t num) {
    return ep_lane() < num
               ? (uint32_t)
                     p.plan[p.layout.send_token_off + (uint64_t)r * p.layout.num_tokens + first + ep_lane()]
               : 0;
}

/* The trailer of a slot (slot.h), spread over a warp. head: lane i has word i, so lane EP_TRAILER_TOKEN has
 * the token, lane EP_TRAILER_RETURN_SLOT the return slot, and lane EP_TRAILER_TAG the tag. row, weight: lane
 * k has those of choice k. */
typedef struct {
    int32_t head, row;
    float weight;
} SlotWords;

/* The trailer of token t of this rank, to be sent to rank r. In a fused operation nobody reads the tag, and a
 * warp has no register for its address. */
template <bool FUSED> EP_FN SlotWords words_to_send(const EpDispatchParams &p, uint32_t r, uint32_t t) {
    const uint32_t K = p.comm.shape.num_topk;
    SlotWords w;
    w.row = row_at_rank(p, t, r);
    w.head = ep_lane() == EP_TRAILER_RETURN_SLOT
                 ? p.plan[p.layout.token_slot_off + (uint64_t)t * p.comm.shape.num_ranks + r]
                 : (int32_t)t;
    if (!FUSED && ep_lane() == EP_TRAILER_TAG) w.head = p.tag ? p.tag[t / p.num_copies] : 0;
    w.weight = p.weight && ep_lane() < K ? p.weight[(uint64_t)t * K + ep_lane()] : 0;
    return w;
}

/* The trailer of a slot that has arrived. Its numbers come from a peer. */
EP_FN SlotWords words_received(const EpDispatchParams &p, const void *trailer) {
    const uint32_t K = p.comm.shape.num_topk;
    SlotWords w = {0, -1, 0};
    if (ep_lane() < EP_TRAILER_ROWS) w.head = ((const int32_t *)trailer)[ep_lane()];
    if (ep_lane() < K) w.row = ((const int32_t *)trailer)[EP_TRAILER_ROWS + ep_lane()];
    if (ep_lane() < K && p.has_weight) w.weight = ((const float *)trailer)[ep_trailer_weights(K) + ep_lane()];
    return w;
}

/* Address of a token's row in the input. */
EP_FN uint64_t input_row(const EpDispatchParams &p, uint32_t token) {
    return (uint64_t)p.x + token / p.num_copies * p.comm.layout.row_bytes;
}

/* ---- scales of rows in FP8: EpRowScales; other rows have NoScales ---- */

struct NoScales {};
template <typename S> static constexpr bool HAS_SCALES = true;
template <> constexpr bool HAS_SCALES<NoScales> = false;

/* Where the scales of a token of this rank begin. */
EP_FN const float *input_scales(const EpDispatchParams &p, const EpRowScales &s, uint32_t token,
                                uint32_t lane) {
    return s.x + (int64_t)(__shfl_sync(EP_FULL, token, (int)lane) / p.num_copies) * s.x_row;
}
/* A warp sends, or places, the scales of one token: `token` of lane `lane`. */
EP_FN void send_scales(const EpDispatchParams &p, const EpRowScales &s, uint32_t token, uint32_t lane,
                       int32_t *trailer) {
    float *to = (float *)(trailer + ep_trailer_words(p.comm.shape.num_topk));
    const float *from = input_scales(p, s, token, lane);
    for (uint32_t g = ep_lane(); g < s.num_groups; g += 32) to[g] = from[(int64_t)g * s.x_group];
}
/* slot: where the row and the trailer of the token have arrived; NULL: the token is this rank's own. The
 * scales go to the rows of the lanes in `mask`. */
EP_FN void place_scales(const EpDispatchParams &p, const EpRowScales &s, uint32_t token, uint32_t lane,
                        const unsigned char *slot, int32_t row, uint32_t mask) {
    const uint32_t after_row = 4 * ep_trailer_words(p.comm.shape.num_topk);
    const float *from =
        slot ? (const float *)(slot + p.comm.layout.row_bytes + after_row) : input_scales(p, s, token, lane);
    const int64_t step = slot ? 1 : s.x_group;
    for (uint32_t first = 0; first < s.num_groups; first += 32) {
        const uint32_t g = first + ep_lane();
        const float scale = g < s.num_groups ? from[(int64_t)g * step] : 0;
        for (uint32_t left = mask; left; left &= left - 1) {
            const uint32_t to = (uint32_t)__shfl_sync(EP_FULL, row, __ffs((int)left) - 1);
            if (g < s.num_groups) *ep_row_scale(&s, to, g) = scale;
        }
    }
}

/* Set the scales of rows first, .., end - 1 to `value`. num_threads threads, of one CTA or of all CTAs, share
 * the work; this is number `thread`. */
EP_FN void fill_scales(const EpRowScales &s, uint32_t first, uint32_t end, float value, uint64_t thread,
                       uint64_t num_threads) {
    const uint64_t G = s.num_groups;
    for (uint64_t i = first * G + thread; i < end * G; i += num_threads)
        *ep_row_scale(&s, (uint32_t)(i / G), (uint32_t)(i % G)) = value;
}

/* Copy the part's rows. Row i starts at my_src of lane i. It goes to the addresses that place(i, &my_dst,
 * &mask) gives: my_dst of each lane in `mask`. */
template <bool FUSED, typename Place>
EP_FN void copy_rows(uint32_t fifo, uint64_t my_src, const EpPart &part, Place place) {
    const uint64_t skipped = 16ull * part.vec;
    if constexpr (FUSED) {
        ep_stream_copy<EpFusedFifo>(fifo, my_src, (1u << part.num) - 1, part.num_vec, place);
    } else {
        for (uint32_t i = 0; i < part.num; i++) {
            uint64_t my_dst;
            uint32_t mask;
            place(i, &my_dst, &mask);
            ep_copy_row(my_dst + skipped, mask,
                        (const void *)(__shfl_sync(EP_FULL, my_src, (int)i) + skipped), part.num_vec);
        }
    }
}

/* This lane's words of the trailers of a chunk's slots. All are loaded before the first one is used, so that
 * the loads overlap. of[0] belongs to the current slot, and next() shifts the array by one. A run-time index
 * would put the array in local memory; this way it stays in registers. After EP_CHUNK_SLOTS calls of next(),
 * of[i] belongs to slot i again, as row(i) expects. */
struct ChunkWords {
    SlotWords of[EP_CHUNK_SLOTS];

    __device__ explicit ChunkWords(uint32_t) {}
    __device__ void put(uint32_t i, const SlotWords &w) { of[i] = w; }
    __device__ void put_row(uint32_t i, int32_t row) { of[i].row = row; }
    __device__ SlotWords current(uint32_t) const { return of[0]; }
    __device__ void put_current_row(uint32_t, int32_t row) { of[0].row = row; }
    __device__ int32_t row(uint32_t i) const { return of[i].row; }
    __device__ void next() {
        const SlotWords first = of[0];
#pragma unroll
        for (uint32_t j = 1; j < EP_CHUNK_SLOTS; j++) of[j - 1] = of[j];
        of[EP_CHUNK_SLOTS - 1] = first;
    }
};

/* The same in the part of the warp's queue where combine has its list, for a warp with few registers. A lane
 * reads only what it has written. */
struct SharedChunkWords {
    uint32_t at;

    __device__ explicit SharedChunkWords(uint32_t fifo) : at(fifo + EpFusedFifo::LIST + 4 * ep_lane()) {
        static_assert(EpFusedFifo::BYTES - EpFusedFifo::LIST >= 3 * 128 * EP_CHUNK_SLOTS, "there is room");
    }
    __device__ void put(uint32_t i, const SlotWords &w) {
        put_row(i, w.row);
        ep_st_shared_u32(at + 128 * (EP_CHUNK_SLOTS + 2 * i), (uint32_t)w.head);
        ep_st_shared_u32(at + 128 * (EP_CHUNK_SLOTS + 2 * i + 1), __float_as_uint(w.weight));
    }
    __device__ void put_row(uint32_t i, int32_t row) { ep_st_shared_u32(at + 128 * i, (uint32_t)row); }
    __device__ SlotWords current(uint32_t i) const {
        return {(int32_t)ep_ld_shared_u32(at + 128 * (EP_CHUNK_SLOTS + 2 * i)), row(i),
                __uint_as_float(ep_ld_shared_u32(at + 128 * (EP_CHUNK_SLOTS + 2 * i + 1)))};
    }
    __device__ void put_current_row(uint32_t i, int32_t row) { put_row(i, row); }
    __device__ int32_t row(uint32_t i) const { return (int32_t)ep_ld_shared_u32(at + 128 * i); }
    __device__ void next() {}
};

/* A megakernel of FP8 has few registers left for the warps that move tokens: what they have in the others'
 * registers is in shared memory, and task numbers have 32 bits. */
template <bool FUSED, typename S> static constexpr bool IS_LEAN = FUSED && HAS_SCALES<S>;
template <bool FUSED, typename S> using WordsOf =
    std::conditional_t<IS_LEAN<FUSED, S>, SharedChunkWords, ChunkWords>;

/* Send a part of a chunk to rank r. */
template <bool FUSED, typename S> EP_FN void send_part(const EpDispatchParams &p, const S &scales, uint32_t r,
                                                       EpPart part, uint32_t fifo) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk;
    const uint32_t token = tokens_to_send(p, r, part.first, part.num);
    WordsOf<FUSED, S> w(fifo);
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++)
        if (i < part.num) w.put(i, words_to_send<FUSED>(p, r, __shfl_sync(EP_FULL, token, (int)i)));
    copy_rows<FUSED>(fifo, input_row(p, token), part, [&](uint32_t i, uint64_t *my_dst, uint32_t *mask) {
        unsigned char *to = ep_slot_at(c, r, c->my_rank, part.first + i);
        int32_t *trailer = (int32_t *)(to + c->layout.row_bytes);
        const bool first = part.vec == 0;
        const SlotWords words = w.current(i);
        if (first && ep_lane() < EP_TRAILER_ROWS) trailer[ep_lane()] = words.head;
        if (first && ep_lane() < K) trailer[EP_TRAILER_ROWS + ep_lane()] = words.row;
        if (first && ep_lane() < K && p.weight)
            ((float *)trailer)[ep_trailer_weights(K) + ep_lane()] = words.weight;
        if constexpr (HAS_SCALES<S>)
            if (first) send_scales(p, scales, token, i, trailer);
        *my_dst = (uint64_t)to;
        *mask = 1;
        w.next();
    });
}

/* The number of slots of a chunk that this rank sends: 0 for its own, which it does not send to itself. */
EP_FN uint32_t num_to_send(const EpDispatchParams &p, EpTask task) {
    return task.rank == p.comm.my_rank
               ? 0
               : ep_chunk_slots((uint32_t)p.plan[EP_HEAD_NUM_SEND + task.rank], task.chunk);
}
EP_FN uint32_t num_to_receive(const EpDispatchParams &p, EpTask task) {
    return ep_chunk_slots((uint32_t)p.plan[EP_HEAD_NUM_RECV + task.rank], task.chunk);
}

template <bool FUSED, typename E, typename S>
EP_FN void send_chunk(const EpDispatchParams &p, const S &scales, EpTask task, E epoch, uint32_t fifo) {
    const EpComm *c = &p.comm;
    const uint32_t num = num_to_send(p, task);
    if (num == 0) return;
    send_part<FUSED>(p, scales, task.rank, ep_whole_chunk(task.chunk, num, ep_row_vecs(c)), fifo);
    ep_warp_sync(); /* all lanes' stores come before lane 0's release */
    if (ep_lane() == 0) ep_flag_publish(c, task.rank, task.chunk, epoch);
}

/* The rows of a slot that has arrived, or -1: whatever a peer has sent, nothing beyond the plan's rows is
 * written. */
EP_FN int32_t checked_row(const EpDispatchParams &p, int32_t row) {
    return (uint32_t)row >= p.num_rows || row >= p.plan[EP_HEAD_NUM_ROWS] ? -1 : row;
}
/* Store what combine needs to know of a slot from rank s. w.row is checked. */
EP_FN void record_slot(const EpDispatchParams &p, uint32_t s, SlotWords w) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk, most = c->shape.max_tokens;
    const uint32_t return_slot = (uint32_t)__shfl_sync(EP_FULL, w.head, EP_TRAILER_RETURN_SLOT);
    int32_t *record = p.recv + ep_record_at(&c->shape, s, return_slot < most ? return_slot : 0);
    if (ep_lane() == 0) record[EP_RECORD_TOKEN] = (uint32_t)w.head < most ? w.head : 0;
    if (ep_lane() < K) record[EP_RECORD_ROWS + ep_lane()] = w.row;
    if (ep_lane() < K && w.row >= 0 && p.row_weight) p.row_weight[w.row] = w.weight;
}

/* Store the tag of a slot for its rows. w.row is checked. */
EP_FN void record_tag(const EpDispatchParams &p, SlotWords w) {
    const int32_t tag = __shfl_sync(EP_FULL, w.head, EP_TRAILER_TAG);
    if (ep_lane() < p.comm.shape.num_topk && w.row >= 0) p.row_tag[w.row] = tag;
}

/* With `wait`: wait until the chunk has arrived; false if the wait failed. Without: poll once. */
template <typename E> EP_FN bool chunk_is_here(const EpDispatchParams &p, uint32_t op, EpTask task, E epoch,
                                               bool wait) {
    const EpComm *c = &p.comm;
    if (task.rank == c->my_rank || num_to_receive(p, task) == 0) return true;
    return wait ? ep_flag_await(c, op, task.rank, task.chunk, epoch)
                : ep_flag_ready(c, task.rank, task.chunk, epoch);
}

/* Receive a part of a chunk of rank r, or place a part of this rank's own tokens, which come directly from
 * the input. */
template <bool FUSED, typename S>
EP_FN WordsOf<FUSED, S> receive_part(const EpDispatchParams &p, const S &scales, uint32_t r, EpPart part,
                                     uint32_t fifo) {
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk, lane = ep_lane() < part.num ? ep_lane() : 0;
    const bool own = r == c->my_rank;
    const uint32_t token = own ? tokens_to_send(p, r, part.first, part.num) : 0;
    const uint64_t my_src =
        own ? input_row(p, token) : (uint64_t)ep_slot_at(c, c->my_rank, r, part.first + lane);
    WordsOf<FUSED, S> w(fifo);
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++) {
        const uint32_t t = __shfl_sync(EP_FULL, token, (int)i);
        w.put_row(i, -1);
        if (i < part.num)
            w.put(i, own ? words_to_send<FUSED>(p, r, t)
                         : words_received(p, ep_slot_at(c, c->my_rank, r, part.first + i) +
                                                 c->layout.row_bytes));
    }
    copy_rows<FUSED>(fifo, my_src, part, [&](uint32_t i, uint64_t *my_dst, uint32_t *mask) {
        SlotWords words = w.current(i);
        const int32_t row = words.row = checked_row(p, words.row);
        w.put_current_row(i, row);
        if (part.vec == 0) record_slot(p, r, words);
        if constexpr (!FUSED)
            if (part.vec == 0 && p.row_tag) record_tag(p, words);
        *my_dst = (uint64_t)p.rows + (uint64_t)(row < 0 ? 0 : row) * c->layout.row_bytes;
        *mask = __ballot_sync(EP_FULL, ep_lane() < K && row >= 0);
        if constexpr (HAS_SCALES<S>)
            if (part.vec == 0)
                place_scales(p, scales, token, i, own ? NULL : ep_slot_at(c, c->my_rank, r, part.first + i),
                             row, *mask);
        w.next();
    });
    return w;
}

template <bool FUSED, typename S>
EP_FN void receive_chunk(const EpDispatchParams &p, const S &scales, EpTask task, uint32_t fifo) {
    const EpComm *c = &p.comm;
    const uint32_t num = num_to_receive(p, task);
    if (num == 0) return;
    const WordsOf<FUSED, S> w =
        receive_part<FUSED>(p, scales, task.rank, ep_whole_chunk(task.chunk, num, ep_row_vecs(c)), fifo);
    if (!FUSED) return;
    ep_warp_sync();
    ep_fence_acq_rel_gpu(); /* all lanes' rows come before the counts */
    ep_chaos(EP_CHAOS_ROWS_COUNT);
#pragma unroll
    for (uint32_t i = 0; i < EP_CHUNK_SLOTS; i++)
        if (w.row(i) >= 0) ep_red_add_relaxed_gpu(ep_ready_word(c, (uint32_t)w.row(i) / EP_TILE_ROWS), 1);
}

/* epoch: a uint64_t, or an object that converts to one and so needs no register. */
template <bool FUSED, typename E, typename S>
EP_FN void move_tokens(const EpDispatchParams &p, uint32_t op, E epoch, EpMoveWhat what, uint32_t fifo,
                       const S &scales) {
    const EpComm *c = &p.comm;
    EpLocal *l = ep_local(c);
    const uint32_t W = c->shape.num_ranks;
    typedef std::conditional_t<IS_LEAN<FUSED, S>, uint32_t, uint64_t> Number; /* of a task */
    /* a warp with few registers counts them again each time */
    const Number num_send = IS_LEAN<FUSED, S> ? 0 : (Number)ep_num_tasks(p.plan + EP_HEAD_NUM_SEND, W);
    const Number num_recv = what & EP_MOVE_RECEIVES ? (Number)ep_num_tasks(p.plan + EP_HEAD_NUM_RECV, W) : 0;
    /* A megakernel alternates. The MMA warps of a peer wait for the first chunks of all ranks, and a rank
     * that has much to receive would otherwise send late. */
    bool may_send = what & EP_MOVE_SENDS, receive_next = !FUSED;
    Number recv = num_recv ? (Number)ep_queue_pop(&l->queue_recv) : 0;
    while (may_send || recv < num_recv) {
        if (recv < num_recv && (receive_next || !may_send) &&
            chunk_is_here(p, op, ep_task_at(recv, c->my_rank, W), epoch, !may_send)) {
            const uint64_t begin = FUSED ? ep_trace_now(c) : 0;
            receive_chunk<FUSED>(p, scales, ep_task_at(recv, c->my_rank, W), fifo);
            if (FUSED) ep_trace_span(c, EP_SPAN_RECEIVE, ep_task_at(recv, c->my_rank, W).rank, begin);
            recv = (Number)ep_queue_pop(&l->queue_recv);
            receive_next = !FUSED;
        } else if (may_send) {
            const Number send = (Number)ep_queue_pop(l->queue_send);
            may_send =
                send < (IS_LEAN<FUSED, S> ? (Number)ep_num_tasks(p.plan + EP_HEAD_NUM_SEND, W) : num_send);
            receive_next = true;
            const uint64_t begin = FUSED ? ep_trace_now(c) : 0;
            if (may_send) send_chunk<FUSED>(p, scales, ep_task_at(send, c->my_rank, W), epoch, fifo);
            if (FUSED && may_send)
                ep_trace_span(c, EP_SPAN_SEND, ep_task_at(send, c->my_rank, W).rank, begin);
        } else {
            return; /* the wait has failed */
        }
    }
}

/* Poison the outputs after a failed dispatch. The last CTA out calls it. */
EP_FN void poison_dispatch(const EpDispatchParams &p) {
    const EpShape &s = p.comm.shape;
    ep_cta_fill(p.rows, p.num_rows * p.comm.layout.row_bytes, EP_NAN_WORD);
    ep_cta_fill(p.row_weight, p.num_rows * 4ull, EP_NAN_WORD);
    ep_cta_fill(p.recv, 4 * ep_recv_words(&s), EP_NO_ROW);
}
EP_FN void poison_scales(const EpRowScales &s, uint32_t num_rows) {
    fill_scales(s, 0, num_rows, __uint_as_float(EP_NAN_WORD), threadIdx.x, blockDim.x);
}

#endif /* EP_DISPATCH_CUH */
