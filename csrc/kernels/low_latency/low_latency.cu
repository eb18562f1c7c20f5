/* low_latency.cu - the kernels of the low-latency dispatch and combine, and their launchers. */
#include "kernels/launch.h"
#include "kernels/low_latency/ll_combine.cuh"
#include "kernels/low_latency/ll_dispatch.cuh"

/* The last warp of each CTA is its control warp. It waits for the heads of all ranks and judges them.
 * It first sends its share of the pieces, of which it has none if there are few tokens. */
EP_FN bool is_control_warp(void) { return threadIdx.x / 32 == EP_WARPS - 1; }

/* Enter for the rank, in the control warp of the last CTA: the last of all warps to get a piece. */
EP_FN void enter(const EpComm *c, EpLlHead mine, uint64_t epoch) {
    if (is_control_warp() && blockIdx.x == gridDim.x - 1) ep_ll_enter(c, mine, epoch);
}

/* Judge the heads of all ranks, in the control warp. heads and verdict are in shared memory. */
EP_FN void judge(const EpComm *c, uint32_t op, EpLlHead mine, EpLlHead *heads, bool *verdict,
                 uint64_t epoch) {
    const bool ok = ep_ll_enter_await(c, op, mine, epoch, heads);
    if (ep_lane() == 0) *verdict = ok;
}

/* Clear the slots of the operation before, if it was void. All receiving warps call it after judge(). */
EP_FN void clear_void(const EpComm *c, uint64_t void_epoch, Share share, uint64_t epoch) {
    ep_ll_clear_void(c, void_epoch, share.first, share.step, epoch);
}

/* What a thread reads before it knows the epoch: the route of its first choice, and its warp's first
 * piece. */
typedef struct {
    uint32_t route;
    Input piece;
} Early;
EP_FN Early read_early(const EpLlDispatchParams &p, Share share) {
    const uint32_t num_pieces = p.comm.layout.num_pieces, i = share.first;
    Early early = {first_route(p), {}};
    if (i < p.num_tokens * num_pieces) early.piece = read_input(p, i / num_pieces, i % num_pieces);
    return early;
}

/* Judge the heads, and read the routes of all tokens. All threads get the verdict. Every CTA that receives
 * reads all routes, so no CTA places a row if a route is wrong. The early routes (routes.cuh) are read while
 * the control warp waits for the heads. The others are read after it, because a head tells how many routes a
 * peer has. */
EP_FN bool read_routes(const EpLlDispatchParams &p, const Routes &m, uint32_t first, EpLlHead *heads,
                       uint64_t epoch) {
    __shared__ bool verdict;
    const EpComm *c = &p.comm;
    const EpLlHead mine = ep_ll_dispatch_head(&p);
    Found found = {true, EP_MAX_RANKS, 0};
    for (uint32_t i = threadIdx.x; i < m.L * m.words; i += blockDim.x) m.bits[i] = 0;
    __syncthreads();
    if (is_control_warp()) {
        judge(c, EP_OP_LL_DISPATCH, mine, heads, &verdict, epoch);
    } else {
        note_own(p, m, first, &found);
        read_early_routes(p, m, mine.call, epoch, &found);
    }
    bool ok = __syncthreads_and(found.ok);
    if (!verdict) return false;
    const uint32_t most = most_of_peers(c, [&](uint32_t w) { return heads[w].number; });
    if (most && most * c->shape.num_topk > num_early(c->shape)) {
        if (found.ok && !is_control_warp()) read_later_routes(p, m, heads, epoch, &found);
        ok = __syncthreads_and(found.ok);
    }
    if (ok) return true;
    record_wrong(p, found, epoch);
    __syncthreads(); /* the fault is recorded before thread 0 counts this CTA as finished */
    return false;
}

/* Read all routes and find all rows. All threads get the verdict. */
EP_FN bool make_routes(const EpLlDispatchParams &p, const Routes &m, uint32_t first, EpLlHead *heads,
                       uint64_t epoch) {
    if (!read_routes(p, m, first, heads, epoch)) return false;
    count_rows(p, m, heads);
    __syncthreads();
    if (!p.is_masked) {
        if (threadIdx.x < 32) sum_rows(m, p.handle + ep_ll_handle(&p.comm.shape).offsets_off);
        __syncthreads();
    }
    return true;
}

EP_FN void write_head_of_handle(const EpLlDispatchParams &p, const EpLlHead *heads, uint64_t epoch) {
    const uint32_t i = threadIdx.x;
    if (blockIdx.x) return;
    if (i == EP_LL_STATUS) p.handle[i] = 0;
    if (i == EP_LL_NUM_TOKENS) p.handle[i] = (int32_t)p.num_tokens;
    if (i == EP_LL_ID) p.handle[i] = (int32_t)(epoch & 0xffffu);
    if (i < p.comm.shape.num_ranks) p.handle[EP_LL_SOURCES + i] = (int32_t)heads[i].number;
}

/* CTAs 0 ... num_ctas - 1 fill num_bytes with a 32-bit pattern. Address and size are multiples of 4. */
EP_FN void fill(void *at, uint64_t num_bytes, uint32_t pattern, uint32_t num_ctas) {
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < num_bytes / 4;
         i += (uint64_t)num_ctas * blockDim.x)
        ((uint32_t *)at)[i] = pattern;
}
/* The outputs of a void dispatch. */
EP_FN void poison(const EpLlDispatchParams &p, uint32_t num_ctas) {
    const EpShape &s = p.comm.shape;
    const uint64_t row_bytes = p.fp8 ? s.hidden : p.comm.layout.row_bytes;
    fill(p.rows, ep_ll_num_rows(&s, p.is_masked) * row_bytes, EP_NAN_WORD, num_ctas);
    fill(p.counts, 4ull * ep_num_local_experts(&s), 0, num_ctas);
    fill(p.handle + EP_LL_STATUS, 4, (uint32_t)EP_EPEER, num_ctas);
}

/* Place this warp's share of all tokens: this rank's own first. input: its first piece, which read_early has
 * read. */
template <int DTYPE, bool FP8>
EP_FN void place_share(const EpLlDispatchParams &p, const Routes &m, const EpLlHead *heads, Share share,
                       Input input, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const uint32_t num_pieces = c->layout.num_pieces, own = p.num_tokens;
    const uint32_t most = most_of_peers(c, [&](uint32_t w) { return heads[w].number; });
    const uint32_t num = own + most * (c->shape.num_ranks - 1);
    for (uint32_t i = share.first; i < num * num_pieces; i += share.step) {
        const uint32_t n = i / num_pieces, piece = i % num_pieces;
        const Token at = n < own ? Token{c->my_rank, n} : peers_token(c, n - own);
        if (n < own && i != share.first) input = read_input(p, n, piece);
        if (at.token < heads[at.source].number) place<DTYPE, FP8>(p, m, at, piece, input, epoch);
    }
}

template <int DTYPE, bool FP8> __global__ void __launch_bounds__(32 * EP_WARPS, 1)
    ll_dispatch_kernel(const __grid_constant__ EpLlDispatchParams p) {
    __shared__ EpLlHead heads[EP_MAX_RANKS];
    const EpComm *c = &p.comm;
    const Routes m(ep_dynamic_smem(), c->shape);
    const Division d = divide_dispatch(p);
    const Share share = receivers_share(d);
    ep_await_previous_kernel();
    const uint64_t void_epoch = ep_ll_void_epoch(c), epoch = ep_begin(c);
    Early early = {};
    if (p.parts & EP_LL_RECEIVE && !only_sends(d)) early = read_early(p, share);
    if (epoch && p.parts & EP_LL_SEND) {
        enter(c, ep_ll_dispatch_head(&p), epoch);
        send_routes(p, epoch);
        __syncthreads(); /* heads and routes go first: a peer can do nothing before it has all of them */
        if (only_sends(d) && threadIdx.x == 0) ep_ll_leave(c, gridDim.x, false, epoch);
        if (sends(d)) send_pieces<DTYPE, FP8>(p, senders_share(d), epoch);
    }
    if (!(p.parts & EP_LL_RECEIVE) || only_sends(d)) return;
    const bool ok = epoch && make_routes(p, m, early.route, heads, epoch);
    if (epoch) clear_void(c, void_epoch, share, epoch);
    if (epoch && threadIdx.x == 0) ep_ll_leave(c, gridDim.x, !ok, epoch);
    if (ok) {
        write_head_of_handle(p, heads, epoch);
        place_share<DTYPE, FP8>(p, m, heads, share, early.piece, epoch);
    } else {
        poison(p, d.num_receivers);
    }
}

template <int DTYPE, bool FP8, bool SCATTER> __global__ void __launch_bounds__(32 * EP_WARPS, 1)
    ll_combine_kernel(const __grid_constant__ EpLlCombineParams p) {
    __shared__ EpLlHead heads[EP_MAX_RANKS];
    __shared__ bool verdict;
    const EpComm *c = &p.comm;
    const uint32_t num_pieces = c->layout.num_pieces, num = p.num_tokens * num_pieces;
    ep_await_previous_kernel();
    const uint64_t void_epoch = ep_ll_void_epoch(c), epoch = ep_begin(c);
    const EpLlHead mine = ep_ll_combine_head(&p);
    const bool is_good = epoch && (mine.call & 0xffu) == 0;
    const uint32_t returns = p.parts & EP_LL_SEND && is_good ? num_returns(p) : 0;
    const Division d = divide_combine(p, returns);
    const Share share = receivers_share(d);
    if (epoch && p.parts & EP_LL_SEND) {
        enter(c, mine, epoch);
        if (only_sends(d)) __syncthreads(); /* all warps have the epoch, before the operation may end */
        if (only_sends(d) && threadIdx.x == 0) ep_ll_leave(c, gridDim.x, false, epoch);
        if (sends(d)) return_pieces<DTYPE, FP8, SCATTER>(p, returns, senders_share(d), epoch);
    }
    if (!(p.parts & EP_LL_RECEIVE) || only_sends(d)) return;
    OwnSum own = {};
    uint32_t i = share.first;
    if (!SCATTER && is_good && i < num) own = own_sum<DTYPE>(p, i / num_pieces, i % num_pieces);
    if (epoch && is_control_warp()) judge(c, EP_OP_LL_COMBINE, mine, heads, &verdict, epoch);
    __syncthreads();
    const bool ok = epoch && verdict;
    if (epoch) clear_void(c, void_epoch, share, epoch);
    if (epoch && threadIdx.x == 0) ep_ll_leave(c, gridDim.x, !ok, epoch);
    if (!ok) fill(p.out, p.num_tokens * c->layout.row_bytes, EP_NAN_WORD, d.num_receivers);
    for (; ok && i < num; i += share.step) {
        if constexpr (SCATTER) {
            finish_rows<DTYPE>(p, i / num_pieces, i % num_pieces, epoch);
        } else {
            if (i != share.first) own = own_sum<DTYPE>(p, i / num_pieces, i % num_pieces);
            finish_piece<DTYPE, FP8>(p, i / num_pieces, i % num_pieces, own, epoch);
        }
    }
}

/* ---- launch ---- */

/* CTAs for this many tokens of a rank: a piece for every second warp, at most num_sm. */
static uint32_t num_ctas(const EpComm &c, uint32_t num_tokens, uint32_t num_sm) {
    const uint64_t items = (uint64_t)num_tokens * c.layout.num_pieces * c.shape.num_ranks;
    const uint64_t wanted = (items + EP_WARPS / 2 - 1) / (EP_WARPS / 2);
    const uint64_t most = wanted < 16 ? 16 : wanted;
    return most < num_sm ? (uint32_t)most : num_sm;
}

typedef void DispatchKernel(EpLlDispatchParams);
static DispatchKernel *dispatch_kernel_of(const EpLlDispatchParams *p) {
    if (!p->fp8) return ll_dispatch_kernel<EP_BF16, false>; /* copies bytes of any dtype */
    return p->comm.shape.dtype == EP_F16 ? ll_dispatch_kernel<EP_F16, true>
                                         : ll_dispatch_kernel<EP_BF16, true>;
}
typedef void CombineKernel(EpLlCombineParams);
template <int DTYPE> static CombineKernel *combine_kernel_for(bool fp8, bool scatter) {
    if (scatter) return ll_combine_kernel<DTYPE, false, true>; /* which has no FP8 */
    return fp8 && DTYPE != EP_F32 ? ll_combine_kernel < DTYPE, DTYPE != EP_F32,
           false >                : ll_combine_kernel<DTYPE, false, false>;
}
static CombineKernel *combine_kernel_of(uint32_t dtype, bool fp8, bool scatter) {
    EP_HANDLES_ALL(EP_NUM_DTYPES, 3);
    return dtype == EP_F32   ? combine_kernel_for<EP_F32>(fp8, scatter)
           : dtype == EP_F16 ? combine_kernel_for<EP_F16>(fp8, scatter)
                             : combine_kernel_for<EP_BF16>(fp8, scatter);
}

extern "C" int ep_launch_ll_dispatch(const EpLlDispatchParams *p, uint32_t num_sm, void *stream) {
    return (int)ep_launch_resident_early(dispatch_kernel_of(p), num_ctas(p->comm, p->num_tokens, num_sm),
                                         EP_WARPS, ep_ll_smem_bytes(&p->comm.shape), stream, *p);
}
extern "C" int ep_launch_ll_combine(const EpLlCombineParams *p, uint32_t num_sm, void *stream) {
    const EpShape *s = &p->comm.shape;
    CombineKernel *f = combine_kernel_of(s->dtype, p->fp8 != 0, s->combine_mode == EP_LOW_LATENCY_SCATTER);
    return (int)ep_launch_resident_early(f, num_ctas(p->comm, p->num_tokens, num_sm), EP_WARPS, 0, stream,
                                         *p);
}
extern "C" int ep_preload_low_latency(void) {
    EpCapabilities c;
    cudaFuncAttributes a;
    cudaError_t e = (cudaError_t)ep_capabilities(&c);
    /* A GPU with less shared memory accepts only layers that need less: the launch tells. */
    const uint32_t smem = c.smem_bytes - 1024 < EP_LL_MAX_SMEM ? c.smem_bytes - 1024 : EP_LL_MAX_SMEM;
    if (e == cudaSuccess) e = ep_allow_smem(ll_dispatch_kernel<EP_BF16, false>, smem);
    if (e == cudaSuccess) e = ep_allow_smem(ll_dispatch_kernel<EP_BF16, true>, smem);
    if (e == cudaSuccess) e = ep_allow_smem(ll_dispatch_kernel<EP_F16, true>, smem);
    for (uint32_t dtype = EP_F32; e == cudaSuccess && dtype <= EP_BF16; dtype++)
        for (uint32_t kind = 0; e == cudaSuccess && kind < 3; kind++)
            e = cudaFuncGetAttributes(&a, combine_kernel_of(dtype, kind == 1, kind == 2));
    return (int)e;
}
