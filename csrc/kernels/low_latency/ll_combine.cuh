/* ll_combine.cuh - a warp's part of the low-latency combine.
 *
 * Two steps of sums: the expert's rank adds up its rows of a token, each times its weight, and sends the sum
 * to the token's rank. The token's rank adds up the sums of all ranks.
 *
 * With FP8, sums of other ranks travel as e4m3 numbers with a scale for each group.
 *
 * Invariant: both sums are in fp32 and in a fixed order (choices, ranks), whichever sum arrives first. */
#ifndef EP_LL_COMBINE_CUH
#define EP_LL_COMBINE_CUH
#include "kernels/low_latency/pieces.cuh"

/* The sum of this rank's rows of a token, each times its weight, in the order of its choices: this lane's
 * part of a piece, rounded to the dtype. False: there is no such row. */
template <int DTYPE> EP_FN bool sum_choices(const EpLlCombineParams &p, Token at, uint32_t piece,
                                            uint4 (&sum)[EP_PIECE_PARTS]) {
    enum { N = EpVec<DTYPE>::N, AHEAD = 4 }; /* rows whose loads are in flight */
    const EpComm *c = &p.comm;
    const EpLlHandle h = ep_ll_handle(&c->shape);
    const uint64_t choice = ep_ll_choices_at(&c->shape, at.source, at.token) + ep_lane();
    const uint64_t num_rows = ep_ll_num_rows(&c->shape, p.is_masked);
    int32_t row = -1;
    float weight = 0;
    if (ep_lane() < c->shape.num_topk) {
        row = p.handle[h.rows_off + choice];
        weight = ((const float *)p.handle)[h.weights_off + choice];
    }
    uint32_t left = __ballot_sync(EP_FULL, row >= 0 && (uint64_t)row < num_rows);
    float acc[EP_PIECE_PARTS][N] = {};
    if (left == 0) return false;
    while (left) {
        uint4 v[AHEAD][EP_PIECE_PARTS];
        uint32_t now = left;
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (now == 0) continue;
            const uint64_t r = (uint64_t)__shfl_sync(EP_FULL, row, __ffs((int)now) - 1);
            const uint4 *from = (const uint4 *)((const unsigned char *)p.rows + r * c->layout.row_bytes);
            now &= now - 1;
#pragma unroll
            for (uint32_t u = 0; u < EP_PIECE_PARTS; u++)
                if (unit_of(piece, u) < num_units(c)) v[j][u] = from[unit_of(piece, u)];
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (left == 0) continue;
            const float w = __shfl_sync(EP_FULL, weight, __ffs((int)left) - 1);
            left &= left - 1;
            ep_stream_add<DTYPE>(acc, v[j], true, w);
        }
    }
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) sum[u] = EpVec<DTYPE>::pack(acc[u]);
    return true;
}

/* Send the sum of this rank's rows of a peer's token. False: there is no such row. */
template <int DTYPE, bool FP8> EP_FN bool return_piece(const EpLlCombineParams &p, Token at, uint32_t piece,
                                                       uint64_t epoch) {
    const EpComm *c = &p.comm;
    uint4 sum[EP_PIECE_PARTS];
    if (!sum_choices<DTYPE>(p, at, piece, sum)) return false;
    Piece<FP8> got;
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) {
        if constexpr (FP8) got.v[u] = quantize<DTYPE>(sum[u], EP_FP8_SCALED, &got.scale[u]);
        else got.v[u] = sum[u];
    }
    write_slot<FP8>(c, ep_ll_slot(c, at.source, c->my_rank, at.token, epoch), piece, got);
    return true;
}
template <int DTYPE, bool FP8> EP_FN void return_pieces(const EpLlCombineParams &p, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const uint32_t num_pieces = c->layout.num_pieces;
    uint32_t num = 0;
    for (uint32_t w = 0; w < c->shape.num_ranks; w++)
        num += w == c->my_rank ? 0 : ep_ll_tokens_of(&p, w) * num_pieces;
    for (uint32_t round = 0; round * item_step() + blockIdx.x < num; round++) {
        const uint32_t i = round * item_step() + first_item();
        Sent sent = {0, 0, i % num_pieces};
        if (i < num) {
            const Token at =
                peers_token(c, i / num_pieces, [&](uint32_t w) { return ep_ll_tokens_of(&p, w); });
            sent.token = at.token;
            if (return_piece<DTYPE, FP8>(p, at, sent.piece, epoch)) sent.ranks = 1u << at.source;
        }
        publish_all(c, sent, round, epoch);
    }
}

/* What finish_piece needs of this rank: the ranks that return a sum for the token, a bit for each, and the
 * sum of this rank's own rows. A warp reads that of its first item before the heads are judged. */
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

/* Add up a piece of this rank's token, in the order of the ranks. A sum that does not arrive is NaN. */
template <int DTYPE, bool FP8>
EP_FN void finish_piece(const EpLlCombineParams &p, uint32_t token, uint32_t piece, const OwnSum &own,
                        uint64_t epoch) {
    const EpComm *c = &p.comm;
    float acc[EP_PIECE_PARTS][EpVec<DTYPE>::N] = {};
    for (uint32_t r = 0; r < c->shape.num_ranks; r++) {
        uint4 v[EP_PIECE_PARTS] = {};
        if (!(own.targets >> r & 1u)) continue;
        if (r == c->my_rank) {
            if (!own.is_there) continue;
#pragma unroll
            for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) v[u] = own.sum[u];
        } else {
            const bool here = ep_ll_await(c, EP_OP_LL_COMBINE, r, token, piece, epoch);
            const unsigned char *slot = ep_ll_slot(c, c->my_rank, r, token, epoch);
            const Piece<FP8> got = here ? read_slot<FP8>(c, slot, piece) : nan_piece<FP8>();
            if constexpr (FP8) {
#pragma unroll
                for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) /* 16 lanes share a scale; the first has it */
                    add_quantized(acc[u], got.v[u], __shfl_sync(EP_FULL, got.scale[u], ep_lane() / 16 * 16));
                continue;
            } else {
#pragma unroll
                for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) v[u] = got.v[u];
            }
        }
        ep_stream_add<DTYPE>(acc, v, false, 1.0f);
    }
    uint4 *to = (uint4 *)((unsigned char *)p.out + token * c->layout.row_bytes);
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++)
        if (unit_of(piece, u) < num_units(c)) to[unit_of(piece, u)] = EpVec<DTYPE>::pack(acc[u]);
}

#endif /* EP_LL_COMBINE_CUH */
