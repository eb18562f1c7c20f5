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

template <int DTYPE, bool FP8> EP_FN void return_pieces(const EpLlCombineParams &p, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const uint32_t num_pieces = c->layout.num_pieces;
    uint32_t num = 0;
    for (uint32_t w = 0; w < c->shape.num_ranks; w++) num += w == c->my_rank ? 0 : ep_ll_tokens_of(&p, w);
    for (uint32_t i = first_item(); i < num * num_pieces; i += item_step()) {
        const Token at = peers_token(c, i / num_pieces, [&](uint32_t w) { return ep_ll_tokens_of(&p, w); });
        const uint32_t piece = i % num_pieces;
        uint4 sum[EP_PIECE_PARTS];
        if (!sum_choices<DTYPE>(p, at, piece, sum)) continue;
        Piece<FP8> got;
#pragma unroll
        for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) {
            if constexpr (FP8) got.v[u] = quantize<DTYPE>(sum[u], EP_FP8_SCALED, &got.scale[u]);
            else got.v[u] = sum[u];
        }
        write_slot<FP8>(c, ep_ll_slot(c, at.source, c->my_rank, at.token, epoch), piece, got);
        ep_warp_sync(); /* all lanes' stores come before the release */
        if (ep_lane() == 0) ep_ll_publish(c, at.source, at.token, piece, epoch);
    }
}

/* Add up a piece of this rank's token, in the order of the ranks. A sum that does not arrive is NaN. */
template <int DTYPE, bool FP8> EP_FN void finish_piece(const EpLlCombineParams &p, uint32_t token,
                                                       uint32_t piece, uint64_t epoch) {
    const EpComm *c = &p.comm;
    const uint32_t targets = (uint32_t)p.handle[ep_ll_handle(&c->shape).targets_off + token];
    float acc[EP_PIECE_PARTS][EpVec<DTYPE>::N] = {};
    for (uint32_t r = 0; r < c->shape.num_ranks; r++) {
        uint4 v[EP_PIECE_PARTS] = {};
        if (!(targets >> r & 1u)) continue;
        if (r == c->my_rank) {
            if (!sum_choices<DTYPE>(p, Token{r, token}, piece, v)) continue;
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
