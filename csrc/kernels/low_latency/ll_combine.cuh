/* ll_combine.cuh - a warp's part of the low-latency combine.
 *
 * Two steps of sums: the expert's rank adds up its rows of a token, each times its weight, and sends the sum
 * to the token's rank. The token's rank adds up the sums of all ranks.
 *
 * With FP8, sums of other ranks travel as e4m3 numbers with a scale for each group.
 *
 * In mode EP_LOW_LATENCY_SCATTER the expert's rank sends each row as it is, and the token's rank adds up all
 * rows, each times its weight. So the number of ranks changes no sum.
 *
 * Invariant: sums are accumulated in fp32 and in a fixed order (choices; sums of ranks: ranks), whichever
 * arrives first. The first sum of two steps is rounded to the dtype. */
#ifndef EP_LL_COMBINE_CUH
#define EP_LL_COMBINE_CUH
#include "kernels/low_latency/pieces.cuh"

/* For lane k: what rows_off has for choice k of a token (or -1), its weight, and whether it is a row of this
 * rank. */
typedef struct {
    int32_t row;
    float weight;
    bool is_here;
} Choice;
EP_FN Choice choice_of(const EpLlCombineParams &p, Token at) {
    const EpComm *c = &p.comm;
    const EpLlHandle h = ep_ll_handle(&c->shape);
    const uint64_t choice = ep_ll_choices_at(&c->shape, at.source, at.token) + ep_lane();
    const uint64_t num_rows = ep_ll_num_rows(&c->shape, p.is_masked); /* before the loads: it divides */
    Choice mine = {-1, 0, false};
    if (ep_lane() < c->shape.num_topk) {
        mine.row = p.handle[h.rows_off + choice];
        mine.weight = ((const float *)p.handle)[h.weights_off + choice];
    }
    mine.is_here = (uint64_t)(int64_t)mine.row < num_rows; /* -1 is large */
    return mine;
}
/* Load this lane's part of a piece of a row of this rank. */
EP_FN void load_row(const EpLlCombineParams &p, uint64_t row, uint32_t piece, uint4 (&v)[EP_PIECE_PARTS]) {
    const EpComm *c = &p.comm;
    const uint4 *from = (const uint4 *)((const unsigned char *)p.rows + row * c->layout.row_bytes);
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++)
        if (unit_of(piece, u) < num_units(c)) v[u] = from[unit_of(piece, u)];
}

/* Add up this rank's rows of a token, each times its weight, in the order of its choices. sum: this lane's
 * part of a piece of the sum, rounded to the dtype. Returns false if this rank has no row of the token. */
template <int DTYPE> EP_FN bool sum_choices(const EpLlCombineParams &p, Token at, uint32_t piece,
                                            uint4 (&sum)[EP_PIECE_PARTS]) {
    enum { N = EpVec<DTYPE>::N, AHEAD = 4 }; /* rows whose loads are in flight */
    const Choice mine = choice_of(p, at);
    uint32_t left = __ballot_sync(EP_FULL, mine.is_here);
    float acc[EP_PIECE_PARTS][N] = {};
    if (left == 0) return false;
    while (left) {
        uint4 v[AHEAD][EP_PIECE_PARTS];
        uint32_t now = left;
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (now == 0) continue;
            load_row(p, (uint64_t)__shfl_sync(EP_FULL, mine.row, __ffs((int)now) - 1), piece, v[j]);
            now &= now - 1;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (left == 0) continue;
            const float w = __shfl_sync(EP_FULL, mine.weight, __ffs((int)left) - 1);
            left &= left - 1;
            ep_stream_add<DTYPE>(acc, v[j], true, w);
        }
    }
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) sum[u] = EpVec<DTYPE>::pack(acc[u]);
    return true;
}

/* Send the sum of this rank's rows of a peer's token, if it has any. */
template <int DTYPE, bool FP8> EP_FN void return_piece(const EpLlCombineParams &p, Token at, uint32_t piece,
                                                       uint64_t epoch) {
    const EpComm *c = &p.comm;
    uint4 sum[EP_PIECE_PARTS];
    if (!sum_choices<DTYPE>(p, at, piece, sum)) return;
    Piece<FP8> got = {};
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) {
        if constexpr (FP8) got.v[u] = quantize<DTYPE>(sum[u], EP_FP8_SCALED, &got.scale[u]);
        else got.v[u] = sum[u];
    }
    put_piece<FP8>(c, Place{ep_ll_slot(c, at.source, c->my_rank, at.token, epoch), piece, false}, got);
}
/* Mode SCATTER: send each of this rank's rows of a peer's token. */
template <int DTYPE>
EP_FN void return_rows(const EpLlCombineParams &p, Token at, uint32_t piece, uint64_t epoch) {
    enum { AHEAD = 4 }; /* rows whose loads are in flight */
    const EpComm *c = &p.comm;
    const Choice mine = choice_of(p, at);
    uint32_t left = __ballot_sync(EP_FULL, mine.is_here);
    while (left) {
        Piece<false> got[AHEAD] = {};
        uint32_t now = left;
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (now == 0) continue;
            load_row(p, (uint64_t)__shfl_sync(EP_FULL, mine.row, __ffs((int)now) - 1), piece, got[j].v);
            now &= now - 1;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (left == 0) continue;
            const uint32_t of = c->shape.num_ranks + (uint32_t)__ffs((int)left) - 1;
            put_piece<false>(c, Place{ep_ll_slot(c, at.source, of, at.token, epoch), piece, false}, got[j]);
            left &= left - 1;
        }
    }
}
/* The number of pieces that this rank may have to return: peers_token gives the token of each. */
EP_FN uint32_t num_returns(const EpLlCombineParams &p) {
    const EpComm *c = &p.comm;
    const uint32_t most = most_of_peers(c, [&](uint32_t w) { return ep_ll_tokens_of(&p, w); });
    return most * (c->shape.num_ranks - 1) * c->layout.num_pieces;
}
/* Return this warp's share of the first `num` pieces. */
template <int DTYPE, bool FP8, bool SCATTER>
EP_FN void return_pieces(const EpLlCombineParams &p, uint32_t num, Share share, uint64_t epoch) {
    const uint32_t num_pieces = p.comm.layout.num_pieces;
    for (uint32_t i = share.first; i < num; i += share.step) {
        const Token at = peers_token(&p.comm, i / num_pieces);
        ep_chaos(EP_CHAOS_FLAG_PUBLISH);
        if (at.token >= ep_ll_tokens_of(&p, at.source)) continue;
        if constexpr (SCATTER) return_rows<DTYPE>(p, at, i % num_pieces, epoch);
        else return_piece<DTYPE, FP8>(p, at, i % num_pieces, epoch);
    }
}

/* Half of the CTAs send: they add up rows, and send a sum for each peer. */
EP_FN Division divide_combine(const EpLlCombineParams &p, uint32_t returns) {
    return divide(returns, 4, p.parts);
}

/* What finish_piece gets from this rank itself: the ranks that return a sum for the token, a bit for each,
 * and the sum of this rank's own rows of it. For its first piece, a warp gets it before the heads are
 * judged. */
typedef struct {
    uint32_t targets;
    bool is_there;
    uint4 sum[EP_PIECE_PARTS];
} OwnSum;
template <int DTYPE> EP_FN OwnSum own_sum(const EpLlCombineParams &p, uint32_t token, uint32_t piece) {
    const EpComm *c = &p.comm;
    OwnSum own = {(uint32_t)p.handle[ep_ll_handle(&c->shape).targets_off + token], false, {}};
    if (own.targets >> c->my_rank & 1u)
        own.is_there = sum_choices<DTYPE>(p, Token{c->my_rank, token}, piece, own.sum);
    return own;
}

/* Add a rank's sum. */
template <int DTYPE, bool FP8>
EP_FN void add_sum(float (&acc)[EP_PIECE_PARTS][EpVec<DTYPE>::N], const Piece<FP8> &got) {
    if constexpr (FP8) {
#pragma unroll
        for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) { /* 16 lanes share a scale; the first has it */
            const uint32_t scale = __shfl_sync(EP_FULL, got.scale[u], ep_lane() / 16 * 16);
            add_quantized(acc[u], got.v[u], __uint_as_float(scale));
        }
    } else {
        ep_stream_add<DTYPE>(acc, got.v, false, 1.0f);
    }
}

/* Write a piece of this rank's token. */
template <int DTYPE> EP_FN void write_sum(const EpLlCombineParams &p, uint32_t token, uint32_t piece,
                                          const float (&acc)[EP_PIECE_PARTS][EpVec<DTYPE>::N]) {
    uint4 *to = (uint4 *)((unsigned char *)p.out + token * p.comm.layout.row_bytes);
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++)
        if (unit_of(piece, u) < num_units(&p.comm)) to[unit_of(piece, u)] = EpVec<DTYPE>::pack(acc[u]);
}

/* Add up a piece of this rank's token, in the order of the ranks. A sum that does not arrive is NaN. */
template <int DTYPE, bool FP8>
EP_FN void finish_piece(const EpLlCombineParams &p, uint32_t token, uint32_t piece, const OwnSum &own,
                        uint64_t epoch) {
    enum { AHEAD = 4 }; /* ranks whose sums are loaded together */
    const EpComm *c = &p.comm;
    const uint32_t me = c->my_rank, peers = own.targets & ((1u << c->shape.num_ranks) - 1) & ~(1u << me);
    const uint64_t stride =
        c->shape.max_tokens * c->layout.slot_stride; /* from a rank's slot to the next's */
    float acc[EP_PIECE_PARTS][EpVec<DTYPE>::N] = {};
#pragma unroll 1
    for (uint32_t first = 0; first < c->shape.num_ranks; first += AHEAD) {
        const uint32_t wanted = peers >> first & ((1u << AHEAD) - 1);
        unsigned char *slots = ep_ll_slot(c, me, first, token, epoch);
        Piece<FP8> got[AHEAD];
        take_pieces<FP8>(
            c, EP_OP_LL_COMBINE, wanted, [&](uint32_t j) { return Place{slots + j * stride, piece, false}; },
            [&](uint32_t j) { return first + j; }, epoch, got);
#pragma unroll
        for (uint32_t j = 0; j < AHEAD; j++) {
            if (first + j == me && own.is_there) ep_stream_add<DTYPE>(acc, own.sum, false, 1.0f);
            if (wanted >> j & 1u) add_sum<DTYPE, FP8>(acc, got[j]);
        }
    }
    write_sum<DTYPE>(p, token, piece, acc);
}

/* Mode SCATTER: add up a piece of this rank's token, in the order of the choices. A row that does not arrive
 * is NaN. */
template <int DTYPE>
EP_FN void finish_rows(const EpLlCombineParams &p, uint32_t token, uint32_t piece, uint64_t epoch) {
    enum { AHEAD = 4 }; /* rows that are loaded together */
    const EpComm *c = &p.comm;
    const Choice mine = choice_of(p, Token{c->my_rank, token});
    const uint32_t rank = ep_ll_rank_of(&c->shape, mine.row);
    const uint32_t here = __ballot_sync(EP_FULL, mine.is_here);
    const uint32_t peers = __ballot_sync(EP_FULL, rank != EP_MAX_RANKS);
    const uint64_t stride =
        c->shape.max_tokens * c->layout.slot_stride; /* from a choice's slot to the next's */
    float acc[EP_PIECE_PARTS][EpVec<DTYPE>::N] = {};
#pragma unroll 1
    for (uint32_t first = 0; first < c->shape.num_topk; first += AHEAD) {
        const uint32_t wanted = peers >> first & ((1u << AHEAD) - 1);
        unsigned char *slots = ep_ll_slot(c, c->my_rank, c->shape.num_ranks + first, token, epoch);
        Piece<false> got[AHEAD] = {};
        uint32_t of[AHEAD];
#pragma unroll
        for (uint32_t j = 0; j < AHEAD; j++) {
            const int lane = (int)(first + j) % 32;
            const uint64_t row = (uint64_t)__shfl_sync(EP_FULL, mine.row, lane);
            of[j] = __shfl_sync(EP_FULL, rank, lane);
            if (here >> first >> j & 1u) load_row(p, row, piece, got[j].v);
        }
        take_pieces<false>(
            c, EP_OP_LL_COMBINE, wanted, [&](uint32_t j) { return Place{slots + j * stride, piece, false}; },
            [&](uint32_t j) { return of[j]; }, epoch, got);
#pragma unroll
        for (uint32_t j = 0; j < AHEAD; j++) {
            const float w = __shfl_sync(EP_FULL, mine.weight, (int)(first + j) % 32);
            if ((here | peers) >> first >> j & 1u) ep_stream_add<DTYPE>(acc, got[j].v, true, w);
        }
    }
    write_sum<DTYPE>(p, token, piece, acc);
}

#endif /* EP_LL_COMBINE_CUH */
