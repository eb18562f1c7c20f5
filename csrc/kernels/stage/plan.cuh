/* plan.cuh - one CTA's part of the routing plan.
 *
 * Each CTA has a range of tokens, and each of its EP_WARPS warps a part of it.
 *   count      each warp counts its choices per expert, in a histogram in shared memory
 *   scan       prefix sums over the CTA's warps; then, after one grid barrier, over CTAs
 *   all-gather every rank writes its counts to every rank
 *   place      each warp walks through its choices again, in order; __match_any_sync ranks equal experts
 *              among the 32 lanes
 *
 * Invariant: no atomic decides an order. So the plan is the same in every run, and the same as the CPU
 * backend's.
 *
 * The run time consists of latencies. So each CTA has one more warp, the control warp. It has no tokens
 * and does what would delay the others: it enters, waits for the peers to enter, publishes to the host,
 * and writes the tables. */
#ifndef EP_PLAN_CUH
#define EP_PLAN_CUH
#include "kernels/stage/plan_scans.cuh"
#include "protocol/balance.h"

/* The tokens of this warp. */
struct Range {
    uint32_t first, last;
    __device__ Range(uint32_t num_tokens) {
        const uint32_t num_warps = gridDim.x * EP_WARPS, per = ep_ceil_div_u32(num_tokens, num_warps);
        const uint32_t at = (blockIdx.x * EP_WARPS + threadIdx.x / 32) * per;
        first = at < num_tokens && !is_control_warp() ? at : num_tokens;
        last = first + per < num_tokens ? first + per : num_tokens;
    }
};

/* A round: as many tokens as a warp processes at once, with one lane per choice. */
struct Round {
    uint32_t num_tokens, num_choices;
    __device__ Round(uint32_t K) {
        num_tokens = 32 / K;
        num_choices = num_tokens * K;
    }
    __device__ bool has(uint64_t i, uint64_t end) const { return ep_lane() < num_choices && i < end; }
};
/* What a lane knows about its choice in a round. */
struct Choice {
    int32_t expert;    /* or -1 */
    uint32_t rank : 8; /* rank of the expert; 0 if the choice is dropped */
    /* Both are 0 unless slots are sorted. Among the choices that the token has at `rank`, this one has the
     * lowest expert (is_first), or the highest (is_last). */
    uint32_t is_first : 1;
    uint32_t is_last : 1;
    uint32_t ranks : EP_MAX_RANKS; /* in lane j: bit r is set if token j of the round goes to rank r */
};
EP_FN uint32_t ranks_of(const Params &p, const Round &round, const Choice &c) {
    const uint32_t K = p.comm.shape.num_topk, bit = c.expert < 0 ? 0 : 1u << c.rank;
    uint32_t ranks = 0;
    for (uint32_t k = 0; k < K; k++)
        ranks |= __shfl_sync(EP_FULL, bit, (int)(ep_lane() * K + k)); /* the lane is taken modulo 32 */
    return ep_lane() < round.num_tokens ? ranks : 0;
}
EP_FN void find_first_and_last(const Params &p, Choice *c) {
    const int32_t K = (int32_t)p.comm.shape.num_topk, L = (int32_t)ep_num_local_experts(&p.comm.shape);
    const int32_t token = (int32_t)ep_lane() / K * K, from = (int32_t)c->rank * L;
    bool first = c->expert >= 0, last = first;
    for (int32_t k = 0; k < K; k++) {
        const int32_t other = __shfl_sync(EP_FULL, c->expert, token + k); /* the lane is taken modulo 32 */
        if (other < from || other >= from + L || token + k == (int32_t)ep_lane()) continue;
        const bool before = other < c->expert || (other == c->expert && token + k < (int32_t)ep_lane());
        if (before) first = false;
        else last = false;
    }
    c->is_first = first;
    c->is_last = last;
}
EP_FN Choice classify_choice(const Params &p, const Round &round, int32_t expert, bool sorts) {
    Choice c = {expert, expert < 0 ? 0 : (uint32_t)expert / ep_num_local_experts(&p.comm.shape), 0, 0, 0};
    c.ranks = ranks_of(p, round, c);
    if (sorts) find_first_and_last(p, &c);
    return c;
}

/* Count this warp's choices. first_rounds returns those of its first two rounds, so that place need not
 * compute them again. */
EP_FN void count(const Params &p, Range range, bool sorts, uint32_t *mine, uint32_t *bad,
                 Choice (&first_rounds)[2]) {
    const EpShape &s = p.comm.shape;
    const Round round(s.num_topk);
    const uint64_t end = (uint64_t)range.last * s.num_topk;
    int32_t *expert = p.plan + p.layout.token_expert_off;
    uint32_t to_rank = 0; /* in lane r: tokens that go to rank r */
    for (uint32_t t = range.first; t < range.last; t += 2 * round.num_tokens) {
        int32_t both[2]; /* two loads in flight */
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            const uint64_t i = (uint64_t)(t + j * round.num_tokens) * s.num_topk + ep_lane();
            both[j] = round.has(i, end) ? ep_read_expert(p.exp_indices, p.index_bytes, i, s.num_experts) : -1;
        }
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            const uint64_t i = (uint64_t)(t + j * round.num_tokens) * s.num_topk + ep_lane();
            if (both[j] == -2) {
                atomicMin(bad, (uint32_t)i);
                both[j] = -1;
            }
            if (round.has(i, end)) expert[i] = both[j];
            const Choice c = classify_choice(p, round, both[j], sorts);
            if (c.expert >= 0) atomicAdd(&mine[c.expert], 1u);
            if (c.is_first | c.is_last)
                atomicAdd(&mine[p.comm.layout.num_count_cells + c.expert],
                          c.is_first | (uint32_t)c.is_last << 16);
            for (uint32_t r = 0; r < s.num_ranks; r++) {
                const uint32_t num = __popc(__ballot_sync(EP_FULL, c.ranks >> r & 1u));
                if (ep_lane() == r) to_rank += num;
            }
            if (t == range.first) first_rounds[j] = c;
        }
    }
    if (ep_lane() < s.num_ranks && !is_control_warp()) mine[s.num_experts + ep_lane()] = to_rank;
}

/* A barrier of all CTAs of this rank, which makes their counts readable, and at the same time the wait
 * until all ranks have entered. */
EP_FN bool sync_ranks(const EpComm *c, uint64_t epoch, EpWaits *waits) {
    __shared__ int arrived, entered;
    __syncthreads();
    if (threadIdx.x == 0) {
        EpFaultRecord f = ep_fault_at(EP_OP_PLAN, c->my_rank, EP_WORD_GRID, epoch);
        ep_add_acq_rel_gpu_u64(&ep_local(c)->grid_arrived, 1);
        arrived = ep_wait_u64(c, &ep_local(c)->grid_arrived, EP_CMP_GE, gridDim.x, &f);
    }
    if (is_control_warp()) {
        const bool ok = ep_enter_await(c, EP_OP_PLAN, epoch, blockIdx.x == 0, waits);
        if (ep_lane() == 0) entered = ok;
    }
    __syncthreads();
    return arrived && entered;
}

/* Wait for two cells, j and k (k = -1: only j), which are indices among the cells of all ranks. Waiting for
 * both at once costs only one latency. */
EP_FN bool await_cells(const EpComm *c, uint32_t j, int32_t k, uint64_t epoch, uint32_t *of_j,
                       uint32_t *of_k) {
    const uint64_t tag = ep_cell_tag(epoch);
    EpBackoff backoff = {0, 0, 0};
    /* Cells of rank 0, then of rank 1, and so on: so j and k can be indices from rank 0's first cell on. */
    for (;;) {
        const uint64_t a = ep_count_seen(c, 0, j), b = k < 0 ? a : ep_count_seen(c, 0, (uint32_t)k);
        *of_j = (uint32_t)a;
        *of_k = (uint32_t)b;
        if (a >> 32 == tag && b >> 32 == tag) return true;
        const uint32_t late = (a >> 32 == tag ? (uint32_t)k : j) / c->layout.num_count_cells;
        const EpFaultRecord f = ep_fault_at(EP_OP_PLAN, late, EP_WORD_COUNTS, epoch);
        if (!ep_wait_on(c, &backoff, c->timeout_ns, &f, tag, (a >> 32 == tag ? b : a) >> 32)) return false;
    }
}
/* Store the value n that a rank wrote in a cell. j is the cell's index among the cells of all ranks. */
EP_FN void store_cell(const Params &p, const Smem &m, Verdict *v, uint32_t j, uint32_t n) {
    const EpShape &s = p.comm.shape;
    const uint32_t w = j / m.cells, i = j % m.cells, me = p.comm.my_rank;
    n = ep_clamp_count(&s, i, n);
    if (i < s.num_experts) m.counts[w * s.num_experts + i] = (int32_t)n;
    else if (i == s.num_experts + me && blockIdx.x == 0 && w != me) p.plan[EP_HEAD_NUM_RECV + w] = (int32_t)n;
    else if (i >= ep_first_wrong(&s)) v->wrong[w].cell[i - ep_first_wrong(&s)] = n;
}

/* Write this rank's cells to all ranks (CTA b writes to rank b), and read the cells of all ranks. */
EP_FN bool all_gather_counts(const Params &p, const Smem &m, Verdict *v, uint64_t epoch) {
    const uint32_t cells = m.cells, first_wrong = ep_first_wrong(&p.comm.shape);
    const EpComm *c = &p.comm;
    const EpShape &s = c->shape;
    const uint32_t num = s.num_ranks * cells;
    bool ok = true;
    const bool no_scatter =
        p.scatter_indices && p.num_scatter_tokens != p.num_tokens && p.num_scatter_tokens != v->num_tokens;
    ep_chaos(EP_CHAOS_COUNTS_WRITE);
    for (uint32_t r = blockIdx.x; r < s.num_ranks; r += gridDim.x)
        for (uint32_t i = threadIdx.x; i < cells; i += blockDim.x) {
            const uint32_t n = i < first_wrong                  ? m.total[i]
                               : no_scatter && i == first_wrong ? EP_BAD_SCATTER
                                                                : v->mine.cell[i - first_wrong];
            ep_st_relaxed_sys_u64(ep_count_cell(c, r, c->my_rank, i), ep_cell(epoch, n));
        }
    ep_chaos(EP_CHAOS_COUNTS_READ);
    for (uint32_t j = threadIdx.x; j < num; j += 2 * blockDim.x) {
        const int32_t k = j + blockDim.x < num ? (int32_t)(j + blockDim.x) : -1;
        uint32_t of_j = 0, of_k = 0;
        ok = ok && await_cells(c, j, k, epoch, &of_j, &of_k);
        store_cell(p, m, v, j, ok ? of_j : 0);
        if (k >= 0) store_cell(p, m, v, (uint32_t)k, ok ? of_k : 0);
    }
    return __syncthreads_and(ok);
}

/* Record the first error in rank order; all ranks see the same ones. One thread calls it. */
EP_FN void report_wrong(const Params &p, const Smem &m, Verdict *v, uint64_t epoch) {
    const EpShape &s = p.comm.shape;
    EpFaultRecord f = ep_fault_at(EP_OP_PLAN, 0, EP_WORD_NONE, epoch);
    for (uint32_t w = 0; w < s.num_ranks && !f.code; w++) ep_wrong_fault(&s, w, &v->wrong[w], &f);
    for (uint32_t w = 0; w < s.num_ranks; w++) {
        const uint32_t rows = (uint32_t)v->rank_rows[w];
        if (rows > s.capacity && !f.code) ep_overflow_fault(&s, &m.padding, m.counts, w, rows, &f);
    }
    if (blockIdx.x == 0) ep_fault(&p.comm, &f);
    v->code = f.code;
}

/* If slots are sorted by expert: of a token's choices at a rank, that with the lowest (highest) expert sets
 * the token's send (return) slot there. send_slot (return_slot): how many lowest (highest) choices of the
 * same expert precede it in this CTA. */
EP_FN void place_sorted_slots(const Params &p, const Smem &m, const Choice &c, uint32_t token,
                              uint32_t send_slot, uint32_t return_slot) {
    const uint32_t E = p.comm.shape.num_experts, e = (uint32_t)c.expert;
    if (c.is_first) {
        send_slot += m.before[m.cells + e] + m.send_from[e];
        p.plan[p.layout.send_token_off + (uint64_t)c.rank * p.num_tokens + send_slot] = (int32_t)token;
    }
    if (c.is_last) {
        return_slot += m.before[m.cells + E + e] + m.return_from[e];
        p.plan[p.layout.token_slot_off + (uint64_t)token * p.comm.shape.num_ranks + c.rank] =
            (int32_t)return_slot;
    }
}
/* If slots are not sorted: tokens get consecutive slots. sent: lane r has the number of slots assigned at
 * rank r. */
EP_FN void place_unsorted_slots(const Params &p, const Choice &c, uint32_t token, uint32_t *sent) {
    for (uint32_t r = 0; r < p.comm.shape.num_ranks; r++) {
        const uint32_t there = __ballot_sync(EP_FULL, c.ranks >> r & 1u), lower = (1u << ep_lane()) - 1;
        const uint32_t slot = __shfl_sync(EP_FULL, *sent, (int)r) + __popc(there & lower);
        if (c.ranks >> r & 1u) {
            p.plan[p.layout.token_slot_off + (uint64_t)token * p.comm.shape.num_ranks + r] = (int32_t)slot;
            p.plan[p.layout.send_token_off + (uint64_t)r * p.num_tokens + slot] = (int32_t)token;
        }
        if (ep_lane() == r) *sent += __popc(there);
    }
}

/* Assign rows, the sorted order and slots to this warp's choices. */
EP_FN void place(const Params &p, const Smem &m, Range range, const Verdict &v, const int32_t *scatter,
                 uint64_t epoch, const Choice (&first_rounds)[2]) {
    const EpShape &s = p.comm.shape;
    const Round round(s.num_topk);
    const uint32_t K = s.num_topk, W = s.num_ranks, lane = ep_lane(), lower = (1u << lane) - 1;
    const int32_t *expert = p.plan + p.layout.token_expert_off;
    const uint64_t end = (uint64_t)range.last * K;
    uint32_t *mine = m.warp_count + threadIdx.x / 32 * m.warp_cells;
    const bool sorts = m.sums > m.cells;
    uint32_t sent = lane < W ? m.before[s.num_experts + lane] + mine[s.num_experts + lane] : 0;
    for (uint32_t t = range.first, n = 0; t < range.last; t += round.num_tokens, n++) {
        const uint64_t i = (uint64_t)t * K + lane;
        const bool has = round.has(i, end);
        const Choice c = n == 0   ? first_rounds[0]
                         : n == 1 ? first_rounds[1]
                                  : classify_choice(p, round, has ? expert[i] : -1, sorts);
        const int32_t e = c.expert;
        const uint32_t same = __match_any_sync(EP_FULL, e);
        const uint32_t first = same & __ballot_sync(EP_FULL, c.is_first);
        const uint32_t last = same & __ballot_sync(EP_FULL, c.is_last);
        uint32_t at = 0, ends_at = 0;
        if (e >= 0) {
            at = mine[e];
            ends_at = sorts ? mine[m.cells + e] : 0;
        }
        __syncwarp();
        if (e >= 0 && (same & lower) == 0) {
            mine[e] = at + __popc(same);
            if (sorts) mine[m.cells + e] = ends_at + __popc(first) + (__popc(last) << 16);
        }
        __syncwarp();
        int32_t row = -1;
        if (e >= 0) {
            at += __popc(same & lower) + m.before[e];
            row = scatter ? scatter[i]
                          : (int32_t)(m.row_from[e] +
                                      ep_rows_before_rank(&s, m.counts, (uint32_t)e, p.comm.my_rank) + at);
            if (row < 0 || row >= v.rank_rows[c.rank]) {
                EpFaultRecord f = ep_fault_at(EP_OP_PLAN, p.comm.my_rank, EP_WORD_SCATTER, epoch);
                f.code = EP_EINVAL;
                f.want = 1; /* only this rank knows of the fault; see comm_buffer.c */
                ep_fault(&p.comm, &f);
                row = -1;
            }
            p.plan[p.layout.sort_off + m.sorted_from[e] + at] = (int32_t)i;
        }
        if (has) p.plan[p.layout.token_row_off + i] = row;
        const uint32_t token = t + lane; /* the token of this lane in the round, as in c.ranks */
        for (uint32_t r = 0; r < W; r++)
            if (lane < round.num_tokens && token < range.last && !(c.ranks >> r & 1u))
                p.plan[p.layout.token_slot_off + (uint64_t)token * W + r] = -1;
        if (sorts)
            place_sorted_slots(p, m, c, t + lane / K, (ends_at & 0xffffu) + __popc(first & lower),
                               (ends_at >> 16) + __popc(last & lower));
        else place_unsorted_slots(p, c, token, &sent);
    }
}

/* The parts of the plan that belong to no token: the end of the sorted order, tiles, counts, offsets, the
 * head. The control warps write them. */
EP_FN void write_tables(const Params &p, const Smem &m, const Verdict &v) {
    const EpShape &s = p.comm.shape;
    const uint32_t L = ep_num_local_experts(&s), at = blockIdx.x * 32 + ep_lane(), step = gridDim.x * 32;
    const uint32_t first = p.comm.my_rank * L, num_tiles = m.tile_from[L];
    for (uint64_t i = v.num_sorted + at; i < (uint64_t)p.num_tokens * s.num_topk; i += step)
        p.plan[p.layout.sort_off + i] = -1;
    for (uint32_t n = at; n < num_tiles && n < p.layout.max_tiles; n += step) {
        uint32_t low = 0, high = L; /* find the last expert whose first tile is at or before n */
        while (high - low > 1) {
            const uint32_t mid = (low + high) / 2;
            if (m.tile_from[mid] <= n) low = mid;
            else high = mid;
        }
        p.plan[p.layout.tile_expert_off + n] = (int32_t)low;
        p.plan[p.layout.tile_row_off + n] =
            (int32_t)(m.row_from[first + low] + (n - m.tile_from[low]) * EP_TILE_ROWS);
    }
    for (uint32_t i = at; i < s.num_ranks * s.num_experts; i += step)
        p.plan[p.layout.counts_off + i] = m.counts[i];
    for (uint32_t l = at; l <= L; l += step)
        p.plan[p.layout.expert_row_off + l] =
            l == L ? v.rank_rows[p.comm.my_rank] : (int32_t)m.row_from[first + l];
    if (at < s.num_ranks) {
        p.plan[EP_HEAD_NUM_SEND + at] = (int32_t)m.total[s.num_experts + at];
        /* This rank's own count, not one that went through memory that peers write. */
        if (at == p.comm.my_rank) p.plan[EP_HEAD_NUM_RECV + at] = (int32_t)m.total[s.num_experts + at];
        p.plan[EP_HEAD_RANK_ROWS + at] = v.rank_rows[at];
    }
    if (at == 0) {
        p.plan[EP_HEAD_NUM_ROWS] = v.rank_rows[p.comm.my_rank];
        p.plan[EP_HEAD_NUM_TILES] = (int32_t)num_tiles;
    }
}

/* Make the plan empty after a failure. An operation that uses it before the error is raised then finds no
 * rows. */
EP_FN void invalidate_plan(const Params &p) {
    const uint64_t num = p.layout.expert_row_off + ep_num_local_experts(&p.comm.shape) + 1;
    for (uint64_t i = threadIdx.x; i < num; i += blockDim.x) p.plan[i] = 0;
    __syncthreads();
}

/* Publish the number of rows that this rank receives, or the code of a failure, to the host as early as
 * possible. One thread calls it. */
EP_FN void publish_to_host(const Params &p, int32_t code, uint32_t num_rows, uint64_t epoch) {
    EpPlanResult *r = &p.comm.host->plan;
    p.plan[EP_HEAD_STATUS] = code;
    p.plan[EP_HEAD_PLAN_IDX] = (int32_t)epoch;
    p.plan[EP_HEAD_NUM_TOKENS] = (int32_t)p.num_tokens;
    if (code) p.plan[EP_HEAD_NUM_ROWS] = 0;
    r->num_rows = num_rows;
    r->status = code;
    ep_st_relaxed_sys_u64(&r->epoch, epoch);
    ep_st_release_sys_u64(&r->ticket, p.ticket); /* publishes the result to the host */
}

/* Write the choices of each expert, and the balance_key, for the host. One warp calls it, before
 * publish_to_host. */
EP_FN void write_host_counts(const Params &p, const Smem &m, uint64_t epoch) {
    const EpShape &s = p.comm.shape;
    if (ep_lane() == 0) p.comm.host->balance_key = ep_agreed_balance_key(&p.comm, epoch);
    for (uint32_t e = ep_lane(); e < s.num_experts; e += 32)
        p.comm.host->expert_choices[e] = (int32_t)ep_expert_rows(&s, m.counts, e);
    ep_warp_sync(); /* all lanes' stores come before the release of the lane that publishes */
}

/* All steps between count and place. False: there is no plan. */
EP_FN bool agree(const Params &p, const Smem &m, Verdict *v, uint64_t epoch, EpWaits *waits) {
    const EpComm *c = &p.comm;
    if (!sync_ranks(c, epoch, waits)) return false;
    scan_ctas(p, m, v);
    if (threadIdx.x == 0 && p.scatter_indices) {
        v->tokens_before = v->num_tokens = 0;
        for (uint32_t w = 0; w < c->shape.num_ranks; w++) {
            if (w == c->my_rank) v->tokens_before = v->num_tokens;
            v->num_tokens += ep_header(c, c->my_rank, w, epoch)->num_tokens;
        }
    }
    __syncthreads();
    if (!all_gather_counts(p, m, v, epoch)) return false;
    scan_experts(p, m, v);
    __syncthreads();
    const uint32_t r = threadIdx.x;
    if (__syncthreads_and(r >= c->shape.num_ranks ||
                          (v->wrong[r].cell[0] == 0 && (uint32_t)v->rank_rows[r] <= c->shape.capacity)))
        return true;
    if (threadIdx.x == 0) report_wrong(p, m, v, epoch);
    __syncthreads();
    return false;
}

#endif /* EP_PLAN_CUH */
