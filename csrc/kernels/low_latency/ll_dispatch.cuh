/* ll_dispatch.cuh - a warp's part of the low-latency dispatch: send pieces, receive pieces.
 *
 * Invariant: no row is placed before the heads and the routes of all ranks are judged. */
#ifndef EP_LL_DISPATCH_CUH
#define EP_LL_DISPATCH_CUH
#include "kernels/low_latency/routes.cuh"

/* ---- send ---- */

/* For lane k: the route of choice k of this rank's token; EP_ROUTE_NONE for the other lanes. */
EP_FN uint32_t my_route(const EpLlDispatchParams &p, uint32_t token) {
    const uint32_t K = p.comm.shape.num_topk;
    return ep_lane() < K ? ep_ll_route_of(&p, (uint64_t)token * K + ep_lane()) : EP_ROUTE_NONE;
}
/* The ranks that hold an expert of the lanes' routes, a bit for each. */
EP_FN uint32_t ranks_of(const EpShape &s, uint32_t route) {
    return __reduce_or_sync(EP_FULL, route < s.num_experts ? 1u << route / ep_num_local_experts(&s) : 0);
}

/* Send this warp's share of the routes of this rank's tokens. The last warps of the grid get the first
 * tokens; the first pieces go to the first warps of CTAs. So with few tokens, no warp sends both routes and
 * pieces. The very last warp of the grid, which sends the heads, is the last one to get a token. */
EP_FN void send_routes(const EpLlDispatchParams &p, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const Share all = share_of(0, gridDim.x);
    const uint32_t last = all.step - 1, first = all.first == last ? last : last - 1 - all.first;
    for (uint32_t t = first; t < p.num_tokens; t += all.step) {
        const uint32_t route = my_route(p, t);
        for (uint32_t r = 0; r < c->shape.num_ranks; r++)
            if (r != c->my_rank && ep_lane() < c->shape.num_topk)
                ep_st_relaxed_sys_u64(ep_ll_route(c, r, c->my_rank, t, epoch) + ep_lane(),
                                      ep_ll_cell(epoch, route));
    }
}

/* For lane k: the bits of the weight of choice k of this rank's token; for lane K those of its tag
 * (ep_ll_caller_tag). */
EP_FN uint32_t my_weight(const EpLlDispatchParams &p, uint32_t token) {
    const uint32_t K = p.comm.shape.num_topk;
    if (ep_lane() == K) return ep_ll_caller_tag(p.tag ? (uint32_t)p.tag[token] : 0);
    return __float_as_uint(ep_lane() < K && p.weight ? p.weight[(uint64_t)token * K + ep_lane()] : 1.0f);
}

/* Write a piece of a token to the slots at the ranks in `ranks`, a bit for each. */
template <int DTYPE, bool FP8> EP_FN void send_piece(const EpLlDispatchParams &p, uint32_t token,
                                                     uint32_t piece, uint32_t ranks, uint64_t epoch) {
    const EpComm *c = &p.comm;
    if (ranks == 0) return;
    Piece<FP8> got = pack_input<DTYPE, FP8>(p, read_input(p, token, piece));
    if (piece == 0) got.weight = my_weight(p, token);
    for (uint32_t left = ranks; left; left &= left - 1) {
        unsigned char *to = ep_ll_slot(c, (uint32_t)__ffs((int)left) - 1, c->my_rank, token, epoch);
        put_piece<FP8>(c, Place{to, piece, piece == 0}, got);
    }
}
/* Send this warp's share of all pieces. */
template <int DTYPE, bool FP8>
EP_FN void send_pieces(const EpLlDispatchParams &p, Share share, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const uint32_t num_pieces = c->layout.num_pieces, num = p.num_tokens * num_pieces;
    if (c->shape.num_ranks == 1) return;
    for (uint32_t i = share.first; i < num; i += share.step) {
        const uint32_t token = i / num_pieces;
        const uint32_t ranks = ranks_of(c->shape, my_route(p, token)) & ~(1u << c->my_rank);
        ep_chaos(EP_CHAOS_FLAG_PUBLISH);
        send_piece<DTYPE, FP8>(p, token, i % num_pieces, ranks, epoch);
    }
}

/* One in 8 CTAs sends: a piece costs a sender little, and few SMs fill the link. */
EP_FN Division divide_dispatch(const EpLlDispatchParams &p) {
    return divide(p.comm.shape.num_ranks > 1 ? p.num_tokens : 0, 1, p.parts);
}

/* ---- receive ---- */

/* Copy a piece to the rows of the lanes in `mask`. */
template <bool FP8> EP_FN void place_piece(const EpLlDispatchParams &p, uint32_t piece, const Piece<FP8> &got,
                                           uint32_t mask, uint64_t my_row, uint64_t my_scales) {
    const EpComm *c = &p.comm;
    const uint64_t num_bytes = FP8 ? c->shape.hidden : c->layout.row_bytes;
    for (uint32_t left = mask; left; left &= left - 1) {
        const int lane = __ffs((int)left) - 1;
        unsigned char *to = (unsigned char *)p.rows + __shfl_sync(EP_FULL, my_row, lane) * num_bytes;
        const uint64_t scales = FP8 ? __shfl_sync(EP_FULL, my_scales, lane) : 0;
#pragma unroll
        for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) {
            const uint32_t unit = unit_of(piece, u);
            if (unit >= num_units(c)) continue;
            if constexpr (FP8) {
                ((uint2 *)to)[unit] = got.v[u];
                if (unit % 16 == 0) ep_ll_put_scale(&p, scales, unit / 16, got.scale[u]);
            } else {
                ((uint4 *)to)[unit] = got.v[u];
            }
        }
    }
}

/* Receive one piece of a token: copy it to the token's rows at this rank's experts. For a token of this
 * rank, `input` is the piece. For another token, the warp waits until the piece is in the slot, loads it and
 * empties its place. If that wait fails (the world has ended, or a timeout), the warp fills its piece of the
 * rows with NaN. The handle is the tensor that dispatch leaves for combine. The warp of the first piece
 * stores in it, for each choice at this rank, the index of the row and the weight; and the tags of the
 * rows. */
template <int DTYPE, bool FP8> EP_FN void place(const EpLlDispatchParams &p, const Routes &m, Token at,
                                                uint32_t piece, const Input &input, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const EpShape &s = c->shape;
    const EpLlHandle h = ep_ll_handle(&s);
    const uint32_t K = s.num_topk, L = ep_num_local_experts(&s), number = at.source * s.max_tokens + at.token;
    const bool own = at.source == c->my_rank;
    const uint32_t route = ep_lane() < K ? m.routes[(uint64_t)number * K + ep_lane()] : EP_ROUTE_NONE;
    const uint32_t e = route - c->my_rank * L;
    const bool is_mine = route < s.num_experts && e < L;
    const uint32_t i = is_mine ? m.row_in_expert(e, number) : 0;
    const uint64_t row = is_mine ? ep_ll_row(&s, p.is_masked, e, m.first[e], i) : 0;
    const uint64_t lines = ep_ll_scale_lines(&s, p.fp8);
    const uint64_t scales = p.is_masked ? e * lines * p.scale_line + i : row;
    /* A token has one row at an expert, also if it has chosen it twice. */
    const uint32_t same = __match_any_sync(EP_FULL, is_mine ? e : 0x10000u + ep_lane());
    const uint32_t mask = __ballot_sync(EP_FULL, is_mine && __ffs((int)same) - 1 == (int)ep_lane());
    const uint32_t targets = own && piece == 0 ? ranks_of(s, route) : 0;
    const Place from = {ep_ll_slot(c, c->my_rank, at.source, at.token, epoch), piece, piece == 0};
    Piece<FP8> got[1] = {};
    if (mask && own) got[0] = pack_input<DTYPE, FP8>(p, input);
    if (piece == 0) got[0].weight = own ? my_weight(p, at.token) : __float_as_uint(1.0f);
    if (mask && !own)
        take_pieces<FP8>(
            c, EP_OP_LL_DISPATCH, 1, [&](uint32_t) { return from; }, [&](uint32_t) { return at.source; },
            epoch, got);
    if (piece == 0 && ep_lane() < K) {
        const uint64_t choice = ep_ll_choices_at(&s, at.source, at.token) + ep_lane();
        p.handle[h.rows_off + choice] = is_mine ? (int32_t)row : ep_ll_row_elsewhere(&s, own, route);
        ((uint32_t *)p.handle)[h.weights_off + choice] = got[0].weight;
    }
    if (piece == 0 && p.row_tag) {
        const int32_t tag = (int32_t)ep_ll_caller_tag(__shfl_sync(EP_FULL, got[0].weight, (int)K));
        if (mask >> ep_lane() & 1u) p.row_tag[row] = tag;
    }
    if (own && piece == 0 && ep_lane() == 0) p.handle[h.targets_off + at.token] = (int32_t)targets;
    if (mask) place_piece<FP8>(p, piece, got[0], mask, row, scales);
}

#endif /* EP_LL_DISPATCH_CUH */
