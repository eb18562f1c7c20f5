/* routes.cuh - the routes of all tokens in a CTA's shared memory, and the row of each token at an expert.
 *
 * Every CTA that receives reads all routes and finds all rows by itself, so no CTA waits for another one.
 * Rows of an expert are in the order of source rank and token. An expert has a bit for each token, set if the
 * token comes to it. So the number of set bits before the token's bit is the index of its row among the rows
 * of the expert.
 * Early routes are read before the heads of the peers are there, later routes after that.
 * Invariant: all these CTAs, of all ranks, read the same routes. So all find a wrong index, or none does. */
#ifndef EP_ROUTES_CUH
#define EP_ROUTES_CUH
#include "kernels/low_latency/pieces.cuh"

/* The shared memory of a CTA. A token of source rank w has the number n = w * max_tokens + token.
 *   routes   the expert of each choice of each token, as the source sent it
 *   bits     for each local expert, bit n % 32 of word n / 32 is set if token n comes to it
 *   before   for each of these words, the number of the expert's set bits in the words before it
 *   first    the first row of each expert if the experts' rows are next to each other (compact layout) */
struct Routes {
    uint16_t *routes;                /* [W * max_tokens][K] */
    uint32_t *bits, *before, *first; /* [words][L], [words][L], [L + 1] */
    uint32_t words, L;
    __device__ __forceinline__ Routes(uint32_t *smem, const EpShape &s) {
        L = ep_num_local_experts(&s);
        words = ep_ll_mask_words(&s);
        bits = smem;
        before = bits + L * words;
        first = before + L * words;
        routes = (uint16_t *)(first + L + 1);
    }
    /* Row i of local expert e is this token's. */
    __device__ __forceinline__ uint32_t row_in_expert(uint32_t e, uint32_t at) const {
        const uint32_t word = at / 32 * L + e;
        return before[word] + __popc(bits[word] & ((1u << at % 32) - 1));
    }
};

/* The number of threads of a CTA that read routes: those of all warps but the control warp. That is the last
 * warp, so these are the threads whose threadIdx.x is less than EP_ROUTE_THREADS. */
enum { EP_ROUTE_THREADS = 32 * (EP_WARPS - 1) };

/* What a thread has found in the routes that it has read. A wrong index is recorded only after the
 * heads are judged: if the heads make the operation void, their fault is the one to report. */
typedef struct {
    bool ok;            /* no wait has failed, and no index is wrong */
    uint32_t source, i; /* a choice whose index is wrong; source is EP_MAX_RANKS if there is none */
} Found;

/* Note the route of choice i of a source in the shared memory, and in `found` if its index is wrong. */
EP_FN void note_route(const EpLlDispatchParams &p, const Routes &m, uint32_t source, uint32_t i,
                      uint32_t route, Found *found) {
    const EpShape &s = p.comm.shape;
    const uint32_t K = s.num_topk, at = source * s.max_tokens + i / K, e = route - p.comm.my_rank * m.L;
    m.routes[(uint64_t)source * s.max_tokens * K + i] = (uint16_t)route;
    if (route < s.num_experts && e < m.L) atomicOr(&m.bits[at / 32 * m.L + e], 1u << at % 32);
    if (route != EP_ROUTE_WRONG) return;
    found->ok = false;
    if (found->source != EP_MAX_RANKS) return; /* the first one counts: this rank's own come first */
    found->source = source;
    found->i = i;
}
/* Record a wrong index. All threads call it. A rank keeps its first record. A route says that an index is
 * wrong, but only the source has the index itself. So each CTA records a wrong index of this rank first. */
EP_FN void record_wrong(const EpLlDispatchParams &p, const Found &found, uint64_t epoch) {
    const uint32_t me = p.comm.my_rank;
    if (found.source == me)
        ep_ll_wrong_index(&p.comm, me, found.i, ep_read_index(p.indices, p.index_bytes, found.i), epoch);
    __syncthreads();
    if (found.source != me && found.source != EP_MAX_RANKS)
        ep_ll_wrong_index(&p.comm, found.source, found.i, EP_INDEX_UNKNOWN, epoch);
}

/* The route of this thread's first choice among those of this rank's tokens. */
EP_FN uint32_t first_route(const EpLlDispatchParams &p) {
    return threadIdx.x < p.num_tokens * p.comm.shape.num_topk ? ep_ll_route_of(&p, threadIdx.x)
                                                              : EP_ROUTE_NONE;
}
/* Note the routes of this rank's tokens. first: first_route(), read earlier. */
EP_FN void note_own(const EpLlDispatchParams &p, const Routes &m, uint32_t first, Found *found) {
    const uint32_t num = p.num_tokens * p.comm.shape.num_topk;
    for (uint32_t i = threadIdx.x; i < num; i += EP_ROUTE_THREADS)
        note_route(p, m, p.comm.my_rank, i, i == threadIdx.x ? first : ep_ll_route_of(&p, i), found);
}

/* The early routes of a peer are its first num_early(). Each thread reads EP_EARLY_ROUTES of them, before the
 * number of the peer's tokens is known. */
enum { EP_EARLY_ROUTES = 2 };
EP_FN uint32_t threads_of_peer(const EpShape &s) { return EP_ROUTE_THREADS / (s.num_ranks - 1); }
EP_FN uint32_t num_early(const EpShape &s) { return EP_EARLY_ROUTES * threads_of_peer(s); }

/* Read this thread's early routes. The head of the peer is loaded together with the routes: it says which of
 * them exist. If the peer is in another call than this rank, the operation is void, so the thread does not
 * wait for routes. */
EP_FN void read_early_routes(const EpLlDispatchParams &p, const Routes &m, uint32_t my_call, uint64_t epoch,
                             Found *found) {
    const EpComm *c = &p.comm;
    const EpShape &s = c->shape;
    if (s.num_ranks == 1) return;
    const uint32_t step = threads_of_peer(s), nth = threadIdx.x / step, first = threadIdx.x % step;
    const uint32_t peer = nth + (nth >= c->my_rank);
    if (peer >= s.num_ranks) return;
    const uint64_t *head = ep_ll_head(c, c->my_rank, peer, epoch);
    const uint64_t *cells = ep_ll_route(c, c->my_rank, peer, 0, epoch);
    uint32_t num = s.max_tokens * s.num_topk; /* routes of the peer: the most, until the head is there */
    uint32_t missing = (1u << EP_EARLY_ROUTES) - 1;
    EpBackoff w = {0, 0, 0};
    for (;;) {
        EpLlHead its;
        uint64_t seen, route[EP_EARLY_ROUTES];
#pragma unroll
        for (uint32_t u = 0; u < EP_EARLY_ROUTES; u++)
            route[u] = first + u * step < num && (missing >> u & 1u)
                           ? ep_ld_relaxed_sys_u64(cells + first + u * step)
                           : 0;
        const bool has_head = ep_ll_head_read(head, epoch, &its, &seen);
        if (has_head) num = its.call != my_call || its.number > s.max_tokens ? 0 : its.number * s.num_topk;
#pragma unroll
        for (uint32_t u = 0; u < EP_EARLY_ROUTES; u++) {
            const uint32_t i = first + u * step;
            const bool is_here = has_head && ep_ll_cell_is(route[u], epoch);
            if (!(missing >> u & 1u)) continue;
            if (i < num && !is_here) {
                if (has_head) seen = route[u] >> 16;
                continue;
            }
            if (i < num) note_route(p, m, peer, i, (uint32_t)route[u] & 0xffffu, found);
            missing &= ~(1u << u);
        }
        if (missing == 0) return;
        const EpFaultRecord f =
            ep_fault_at(EP_OP_LL_DISPATCH, peer, has_head ? EP_WORD_ROUTE : EP_WORD_ENTER, epoch);
        if (!ep_wait_on(c, &w, c->timeout_ns, &f, epoch, seen)) {
            found->ok = false;
            return;
        }
    }
}

/* Read the routes after the early ones, once the heads are judged. A thread loads eight routes together: two
 * from each of four peers. If it instead counted through all pairs of peer and route, it would need
 * divisions, which cost more than the loads. */
EP_FN void read_later_routes(const EpLlDispatchParams &p, const Routes &m, const EpLlHead *heads,
                             uint64_t epoch, Found *found) {
    enum { PEERS = 4, AHEAD = 2 };
    const EpComm *c = &p.comm;
    const uint32_t K = c->shape.num_topk, W = c->shape.num_ranks;
    const uint32_t most = K * most_of_peers(c, [&](uint32_t w) { return heads[w].number; });
    const uint32_t begin = num_early(c->shape) + threadIdx.x, step = AHEAD * EP_ROUTE_THREADS;
    for (uint32_t at = begin; at < most && found->ok; at += step)
        for (uint32_t first = 0; first < W; first += PEERS) {
            uint64_t got[PEERS][AHEAD];
            const auto is_there = [&](uint32_t w, uint32_t i) {
                return w < W && w != c->my_rank && i < heads[w].number * K;
            };
            const auto cell_of = [&](uint32_t w, uint32_t i) {
                return ep_ll_route(c, c->my_rank, w, 0, epoch) + i;
            };
#pragma unroll
            for (uint32_t n = 0; n < PEERS * AHEAD; n++) {
                const uint32_t w = first + n / AHEAD, i = at + n % AHEAD * EP_ROUTE_THREADS;
                got[n / AHEAD][n % AHEAD] = is_there(w, i) ? ep_ld_relaxed_sys_u64(cell_of(w, i)) : 0;
            }
#pragma unroll
            for (uint32_t n = 0; n < PEERS * AHEAD; n++) {
                const uint32_t w = first + n / AHEAD, i = at + n % AHEAD * EP_ROUTE_THREADS;
                if (!is_there(w, i)) continue;
                uint32_t route = (uint32_t)got[n / AHEAD][n % AHEAD] & 0xffffu;
                const EpFaultRecord f = ep_fault_at(EP_OP_LL_DISPATCH, w, EP_WORD_ROUTE, epoch);
                if (!ep_ll_cell_is(got[n / AHEAD][n % AHEAD], epoch) &&
                    !ep_ll_cell_await(c, cell_of(w, i), epoch, &f, &route))
                    found->ok = false;
                else note_route(p, m, w, i, route, found);
            }
        }
}

/* Count the bits before each word that has a token. Each thread takes some experts. CTA 0 also writes the
 * counts for the caller. */
EP_FN void count_rows(const EpLlDispatchParams &p, const Routes &m, const EpLlHead *heads) {
    enum { AHEAD = 4 }; /* words that are loaded together */
    const EpShape &s = p.comm.shape;
    for (uint32_t e = threadIdx.x; e < m.L; e += blockDim.x) {
        uint32_t sum = 0, next = 0; /* next: the first word that was not counted */
        for (uint32_t w = 0; w < s.num_ranks; w++) {
            const uint32_t begin = w * s.max_tokens, end = ep_ceil_div_u32(begin + heads[w].number, 32);
            if (heads[w].number == 0) continue;
            for (uint32_t word = begin / 32 < next ? next : begin / 32; word < end; word += AHEAD) {
                uint32_t bits[AHEAD];
#pragma unroll
                for (uint32_t u = 0; u < AHEAD; u++)
                    bits[u] = word + u < end ? m.bits[(word + u) * m.L + e] : 0;
#pragma unroll
                for (uint32_t u = 0; u < AHEAD; u++) {
                    if (word + u < end) m.before[(word + u) * m.L + e] = sum;
                    sum += (uint32_t)__popc(bits[u]);
                }
            }
            next = end > next ? end : next;
        }
        m.first[e + 1] = sum;
        if (blockIdx.x == 0) p.counts[e] = (int32_t)sum;
    }
}

/* One warp turns the counts in first[1 ..] into sums. CTA 0 also writes them to the handle. */
EP_FN void sum_rows(const Routes &m, int32_t *offsets) {
    uint32_t sum = 0;
    for (uint32_t base = 0; base < m.L; base += 32) {
        const uint32_t e = base + ep_lane();
        uint32_t to_here = e < m.L ? m.first[e + 1] : 0;
#pragma unroll
        for (uint32_t d = 1; d < 32; d *= 2) {
            const uint32_t other = __shfl_up_sync(EP_FULL, to_here, d);
            if (ep_lane() >= d) to_here += other;
        }
        if (e < m.L) m.first[e + 1] = sum + to_here;
        if (e < m.L && blockIdx.x == 0) offsets[e + 1] = (int32_t)(sum + to_here);
        sum += __shfl_sync(EP_FULL, to_here, 31);
    }
    if (ep_lane() == 0) m.first[0] = 0;
    if (ep_lane() == 0 && blockIdx.x == 0) offsets[0] = 0;
}

#endif /* EP_ROUTES_CUH */
