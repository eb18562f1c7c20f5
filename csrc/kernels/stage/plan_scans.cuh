/* plan_scans.cuh - the plan kernel's shared memory, and its prefix sums over warps, CTAs and experts. */
#ifndef EP_PLAN_SCANS_CUH
#define EP_PLAN_SCANS_CUH
#include "kernels/arch/cta.cuh"

typedef EpPlanParams Params;

/* The shared memory of a plan CTA, in words of 32 bits. W ranks, E experts, L of them on this rank.
 *   warp_count   [EP_WARPS][warp_cells]  what each warp has counted; later the prefix sums over the warps
 *   before       [sums]    the sums of the CTAs before this one
 *   total        [sums]    the sums of all CTAs
 *   counts       [W][E]    choices of each rank for each expert
 *   row_from     [E]       first row of an expert at its rank
 *   sorted_from  [E]       first position of an expert in the choices of this rank, sorted by expert
 *   tile_from    [L + 1]   first tile of a local expert, and the number of tiles
 *   send_from    [E]       first slot out of the tokens whose lowest expert at its rank is this one
 *   return_from  [E]       first slot back of the tokens whose highest expert at its rank is this one
 * The first `cells` counts of a warp, and as many sums, are those of plan.h: choices for each expert, tokens
 * for each rank, and wrong arguments. If slots are sorted (send_from, return_from), a warp has E more. Each
 * has two numbers: in its low 16 bits the tokens whose lowest expert at the rank is this one, in its high 16
 * bits those whose highest expert is. As sums these are 2 E words. */
struct Smem {
    uint32_t *warp_count, *before, *total, *row_from, *sorted_from, *tile_from, *send_from, *return_from;
    int32_t *counts;
    uint32_t cells, warp_cells, sums;
    EpPadding padding = {0, 0};
    __host__ __device__ Smem(uint32_t *base, const EpShape &s, bool sorts) {
        cells = ep_first_wrong(&s) + EP_WRONG_CELLS;
        warp_cells = cells + (sorts ? s.num_experts : 0);
        sums = cells + (sorts ? 2 * s.num_experts : 0);
        warp_count = base;
        before = warp_count + EP_WARPS * warp_cells;
        total = before + sums;
        counts = (int32_t *)(total + sums);
        row_from = (uint32_t *)counts + s.num_ranks * s.num_experts;
        sorted_from = row_from + s.num_experts;
        tile_from = sorted_from + s.num_experts;
        send_from = tile_from + s.num_experts + 1;
        return_from = send_from + s.num_experts;
    }
    uint32_t num_words(const EpShape &s) const {
        return EP_WARPS * warp_cells + 2 * sums + (s.num_ranks + 5) * s.num_experts + 1;
    }
};
/* What all ranks agree on; in shared memory. */
struct Verdict {
    int32_t code;
    int32_t rank_rows[EP_MAX_RANKS];
    EpWrong wrong[EP_MAX_RANKS], mine; /* the errors of all ranks, and of this one */
    uint64_t tokens_before, num_tokens;
    uint32_t num_sorted;
};

EP_FN bool is_control_warp(void) { return threadIdx.x / 32 == EP_WARPS; }

/* Replace the warps' counts by exclusive prefix sums over the warps of this CTA. The CTA's totals go to
 * scratch. */
EP_FN void scan_warps(const Params &p, const Smem &m, uint32_t bad) {
    uint32_t *scratch =
        EP_AT(uint32_t, &p.comm, p.comm.my_rank, p.comm.layout.scratch_off) + (uint64_t)blockIdx.x * m.sums;
    for (uint32_t i = threadIdx.x; i < m.warp_cells; i += blockDim.x) {
        uint32_t n[EP_WARPS], sum = 0; /* all loads in flight */
#pragma unroll
        for (uint32_t w = 0; w < EP_WARPS; w++) n[w] = m.warp_count[w * m.warp_cells + i];
#pragma unroll
        for (uint32_t w = 0; w < EP_WARPS; w++) {
            m.warp_count[w * m.warp_cells + i] = sum;
            sum += n[w];
        }
        if (i < m.cells) scratch[i] = i == ep_first_wrong(&p.comm.shape) ? bad : sum;
        else {
            scratch[i] = sum & 0xffffu;
            scratch[i + p.comm.shape.num_experts] = sum >> 16;
        }
    }
}

/* The number of CTAs for this many choices: about 64 choices per warp. It is small, or a multiple of 64,
 * because of sums_over_ctas. (Any number would be correct.) */
enum { FEW_CTAS = 16, MANY_CTAS = 64 };
static_assert(EP_PLAN_CTAS % MANY_CTAS == 0, "the most is a number that there can be");
EP_PURE uint32_t num_plan_ctas(uint64_t num_choices) {
    const uint64_t ctas = (num_choices + 64 * EP_WARPS - 1) / (64 * EP_WARPS);
    if (ctas <= FEW_CTAS) return ctas ? (uint32_t)ctas : 1;
    return ctas < EP_PLAN_CTAS ? ((uint32_t)ctas + MANY_CTAS - 1) / MANY_CTAS * MANY_CTAS : EP_PLAN_CTAS;
}

/* The totals of one cell: sum over all CTAs, and over those before this one. Up to MOST loads are in
 * flight. */
struct CtaSums {
    uint32_t before, total;
};
template <uint32_t MOST> EP_FN CtaSums sums_over_ctas(const uint32_t *of_first, uint32_t stride) {
    CtaSums s = {0, 0};
    for (uint32_t first = 0; first < gridDim.x; first += MOST) {
#pragma unroll
        for (uint32_t i = 0; i < MOST; i++) {
            const uint32_t b = first + i;
            const bool is_one = MOST == MANY_CTAS || b < gridDim.x;
            const uint32_t n = is_one ? __ldcg(of_first + (uint64_t)b * stride) : 0;
            if (b == blockIdx.x) s.before = s.total;
            s.total += n;
        }
    }
    return s;
}

/* For each cell, compute the sum over earlier CTAs and over all CTAs. The control warp finds the first wrong
 * expert index. */
EP_FN void scan_ctas(const Params &p, const Smem &m, Verdict *v) {
    const uint32_t *scratch = EP_AT(uint32_t, &p.comm, p.comm.my_rank, p.comm.layout.scratch_off);
    for (uint32_t i = threadIdx.x; i < m.sums; i += blockDim.x) {
        const CtaSums s = gridDim.x % MANY_CTAS ? sums_over_ctas<FEW_CTAS>(scratch + i, m.sums)
                                                : sums_over_ctas<MANY_CTAS>(scratch + i, m.sums);
        m.before[i] = s.before;
        m.total[i] = s.total;
    }
    if (is_control_warp()) {
        uint32_t least = UINT32_MAX;
        for (uint32_t b = ep_lane(); b < gridDim.x; b += 32) {
            const uint32_t n = __ldcg(scratch + (uint64_t)b * m.sums + ep_first_wrong(&p.comm.shape));
            if (n < least) least = n;
        }
        least = ep_warp_min_u32(least);
        if (ep_lane() == 0 && least != UINT32_MAX)
            v->mine = ep_wrong_index(least, ep_read_index(p.exp_indices, p.index_bytes, least));
    }
}

/* Exclusive prefix sums by one warp: out[i] = sum of value(j) for j < i, for i < n. Returns the total in
 * all lanes. Each lane has consecutive elements. */
template <typename F> EP_FN uint32_t warp_scan(uint32_t *out, uint32_t n, F value) {
    const uint32_t per = ep_ceil_div_u32(n, 32);
    const uint32_t first = ep_lane() * per;
    const uint32_t last = first + per < n ? first + per : n;
    uint32_t sum = 0;
    for (uint32_t i = first; i < last; i++) sum += value(i);
    uint32_t at = sum; /* inclusive over lanes, then exclusive */
#pragma unroll
    for (uint32_t d = 1; d < 32; d *= 2) {
        const uint32_t y = __shfl_up_sync(EP_FULL, at, d);
        if (ep_lane() >= d) at += y;
    }
    const uint32_t whole = __shfl_sync(EP_FULL, at, 31);
    at -= sum;
    for (uint32_t i = first; i < last; i++) {
        const uint32_t x = value(i);
        out[i] = at;
        at += x;
    }
    return whole;
}

/* From the counts of all ranks: first rows, the sorted order's first positions, first tiles. One warp per
 * scan. */
EP_FN void scan_experts(const Params &p, const Smem &m, Verdict *v) {
    const EpShape &s = p.comm.shape;
    const uint32_t L = ep_num_local_experts(&s), W = s.num_ranks, first = p.comm.my_rank * L;
    const uint32_t num_scans = W + 2 + (m.sums > m.cells ? 2 * W : 0);
    for (uint32_t scan = threadIdx.x / 32; scan < num_scans; scan += blockDim.x / 32) {
        /* The first send slot and the first return slot of each expert at its rank. */
        if (scan >= W + 2) {
            const uint32_t half = (scan - W - 2) / W, from = (scan - W - 2) % W * L;
            const uint32_t *ends = m.total + m.cells + half * s.num_experts + from;
            warp_scan((half ? m.return_from : m.send_from) + from, L, [&](uint32_t l) { return ends[l]; });
        } else if (scan < W) {
            const uint32_t rows = warp_scan(m.row_from + scan * L, L, [&](uint32_t l) {
                return ep_padded_rows(&m.padding, ep_expert_rows(&s, m.counts, scan * L + l));
            });
            if (ep_lane() == 0) v->rank_rows[scan] = (int32_t)rows;
        } else if (scan == W) {
            const uint32_t n =
                warp_scan(m.sorted_from, s.num_experts, [&](uint32_t e) { return m.total[e]; });
            if (ep_lane() == 0) v->num_sorted = n;
        } else {
            const uint32_t n = warp_scan(m.tile_from, L, [&](uint32_t l) {
                return ep_ceil_div_u32(ep_padded_rows(&m.padding, ep_expert_rows(&s, m.counts, first + l)),
                                       EP_TILE_ROWS);
            });
            if (ep_lane() == 0) m.tile_from[L] = n;
        }
    }
}

#endif /* EP_PLAN_SCANS_CUH */
