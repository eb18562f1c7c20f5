/* pieces.cuh - what the low-latency dispatch and combine share: work items, pieces of rows, e4m3.
 *
 * Work is divided into pieces of rows. One warp moves a piece. Consecutive pieces go to different CTAs, so
 * that few tokens also use many SMs. protocol/low_latency.h has the protocol.
 *
 * Freedom from deadlock. A rank waits for two things of a peer: heads and routes, and pieces.
 *   (1) A warp sends its share of the heads, routes and pieces before it waits for a peer.
 *   (2) All CTAs are resident. So each warp comes to send its share, also while other warps wait.
 * So all heads, routes and pieces leave, whatever the peers do. */
#ifndef EP_PIECES_CUH
#define EP_PIECES_CUH
#include <cuda_fp8.h>
#include <type_traits>

#include "kernels/stage/rows.cuh"
#include "protocol/low_latency.h"

enum { EP_PIECE_PARTS = EP_PIECE_VECS / 32 }; /* 16-byte units of a piece that a lane moves */

/* ---- work items ---- */

/* A warp's share of numbered items: its first item, and the distance to its next one. */
typedef struct {
    uint32_t first, step;
} Share;
/* This warp's share if CTAs begin ... end - 1 take part, of which this is one. Consecutive items go to
 * different CTAs. */
EP_FN Share share_of(uint32_t begin, uint32_t end) {
    return {threadIdx.x / 32 * (end - begin) + blockIdx.x - begin, (end - begin) * EP_WARPS};
}

/* How the CTAs of a launch divide its work: the last CTAs only send, and the others only receive. While
 * stores wait for the link, loads of the same SM wait too. So a CTA that does both is slow to receive. All
 * CTAs share all work if the launch only sends or only receives (EpLlParts), if it has one CTA, or if this
 * rank has nothing to send. */
typedef struct {
    uint32_t num_receivers; /* CTAs 0 ... num_receivers - 1 */
    bool is_divided;
} Division;
/* num: what this rank has to send; 0 is nothing. senders: how many in 8 CTAs send. */
EP_FN Division divide(uint32_t num, uint32_t senders, uint32_t parts) {
    const bool is_divided = parts == EP_LL_BOTH && num && gridDim.x > 1;
    return {gridDim.x - (is_divided ? ep_ceil_div_u32(gridDim.x * senders, 8) : 0), is_divided};
}
/* This CTA only sends. */
EP_FN bool only_sends(Division d) { return blockIdx.x >= d.num_receivers; }
EP_FN bool sends(Division d) { return !d.is_divided || only_sends(d); }
EP_FN Share senders_share(Division d) { return share_of(d.is_divided ? d.num_receivers : 0, gridDim.x); }
EP_FN Share receivers_share(Division d) { return share_of(0, d.num_receivers); }

/* A token of a source rank. */
typedef struct {
    uint32_t source, token;
} Token;
/* Token n of the peers' tokens: token 0 of each peer, then token 1 of each, and so on. They arrive in roughly
 * this order. The peer may have fewer tokens: the caller compares Token.token with their number. */
EP_FN Token peers_token(const EpComm *c, uint32_t n) {
    const uint32_t num_peers = c->shape.num_ranks - 1;
    return {(c->my_rank + 1 + n % num_peers) % c->shape.num_ranks, n / num_peers};
}
/* The largest number of tokens of a peer, if peer w has num(w). */
template <typename Num> EP_FN uint32_t most_of_peers(const EpComm *c, Num num) {
    uint32_t most = 0;
    for (uint32_t w = 0; w < c->shape.num_ranks; w++)
        if (w != c->my_rank && num(w) > most) most = num(w);
    return most;
}

/* ---- e4m3 ---- */

/* 8 numbers as they are in 16 bytes of a row, quantised; 16 lanes share a scale, and all of them get it. */
template <int DTYPE> EP_FN uint2 quantize(uint4 v, uint32_t fp8, uint32_t *scale_bits) {
    float f[8], most = 0x1p-100f;
    EpVec<DTYPE>::unpack(v, f);
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(f[i]));
#pragma unroll
    for (int i = 8; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(EP_FULL, most, i));
    uint32_t bits = __float_as_uint(__fdiv_rn(most, 448.0f));
    if (fp8 >= EP_FP8_POW2) bits = bits & 0x7fffffu ? (bits | 0x7fffffu) + 1 : bits;
    *scale_bits = bits;
    const float inverse = __frcp_rn(__uint_as_float(bits));
    uint32_t q[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        q[i] = __nv_cvt_float2_to_fp8x2(
            make_float2(__fmul_rn(f[2 * i], inverse), __fmul_rn(f[2 * i + 1], inverse)), __NV_SATFINITE,
            __NV_E4M3);
    return make_uint2(q[0] | q[1] << 16, q[2] | q[3] << 16);
}

/* acc += the 8 numbers times their scale. Each product and each sum is rounded to float32, as on the CPU. */
EP_FN void add_quantized(float (&acc)[8], uint2 v, float scale) {
    const uint32_t pairs[] = {v.x, v.x >> 16, v.y, v.y >> 16};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 h = __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pairs[i], __NV_E4M3));
        const float2 f = __half22float2(h);
        acc[2 * i] = __fadd_rn(acc[2 * i], __fmul_rn(f.x, scale));
        acc[2 * i + 1] = __fadd_rn(acc[2 * i + 1], __fmul_rn(f.y, scale));
    }
}

/* ---- a piece of a row on its way ---- */

/* What a lane has of a piece. FP8: 8 e4m3 numbers for each unit, and the bits of their scale; else 16 bytes.
 * weight: in the first piece of a slot of dispatch the bits of the weight of choice ep_lane(), and in lane K
 * the tag (ep_ll_caller_tag). */
template <bool FP8> struct Piece {
    typedef typename std::conditional<FP8, uint2, uint4>::type Unit;
    Unit v[EP_PIECE_PARTS];
    uint32_t scale[EP_PIECE_PARTS]; /* FP8 only */
    uint32_t weight;
};

/* The unit of the row that this lane has in part u of a piece. */
EP_FN uint32_t unit_of(uint32_t piece, uint32_t u) { return piece * EP_PIECE_VECS + 32 * u + ep_lane(); }
EP_FN uint32_t num_units(const EpComm *c) { return (uint32_t)(c->layout.row_bytes / 16); }

/* A piece as it is in this rank's input. */
typedef struct {
    uint4 v[EP_PIECE_PARTS];
} Input;
EP_FN Input read_input(const EpLlDispatchParams &p, uint32_t token, uint32_t piece) {
    const uint4 *from = (const uint4 *)((const unsigned char *)p.x + token * p.comm.layout.row_bytes);
    Input got = {};
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++)
        if (unit_of(piece, u) < num_units(&p.comm)) got.v[u] = from[unit_of(piece, u)];
    return got;
}
/* The piece in the form in which it travels. */
template <int DTYPE, bool FP8> EP_FN Piece<FP8> pack_input(const EpLlDispatchParams &p, const Input &input) {
    Piece<FP8> got = {};
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) {
        if constexpr (FP8) got.v[u] = quantize<DTYPE>(input.v[u], p.fp8, &got.scale[u]);
        else got.v[u] = input.v[u];
    }
    return got;
}

/* What is placed for a piece that did not arrive: every dtype reads these bytes as NaN. */
template <bool FP8> EP_FN Piece<FP8> nan_piece(void) {
    Piece<FP8> nan;
    memset(&nan, EP_FILL_NAN, sizeof nan);
    return nan;
}

/* ---- a piece in a slot ---- */

/* Values as words, and back. */
EP_FN uint32_t words_of(uint32_t v) { return ep_ll_word(v); }
EP_FN uint2 words_of(uint2 v) { return make_uint2(ep_ll_word(v.x), ep_ll_word(v.y)); }
EP_FN uint4 words_of(uint4 v) {
    return make_uint4(ep_ll_word(v.x), ep_ll_word(v.y), ep_ll_word(v.z), ep_ll_word(v.w));
}
EP_FN uint32_t values_of(uint32_t w) { return ep_ll_value(w); }
EP_FN uint2 values_of(uint2 w) { return make_uint2(ep_ll_value(w.x), ep_ll_value(w.y)); }
EP_FN uint4 values_of(uint4 w) {
    return make_uint4(ep_ll_value(w.x), ep_ll_value(w.y), ep_ll_value(w.z), ep_ll_value(w.w));
}
EP_FN bool has_all(uint32_t w) { return w != 0; }
EP_FN bool has_all(uint2 w) { return w.x && w.y; }
EP_FN bool has_all(uint4 w) { return w.x && w.y && w.z && w.w; }

/* A piece of a slot. has_weights: it is the first piece of a slot of dispatch. */
typedef struct {
    unsigned char *slot;
    uint32_t piece;
    bool has_weights;
} Place;

/* Call f(address in the slot, what this lane has of the piece) for all that this lane has. */
template <bool FP8, typename F> EP_FN void for_words(const EpComm *c, Place at, Piece<FP8> &piece, F f) {
    typedef typename Piece<FP8>::Unit Unit;
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) {
        const uint32_t unit = unit_of(at.piece, u);
        if (unit >= num_units(c)) continue;
        f((Unit *)at.slot + unit, piece.v[u]);
        if (FP8 && unit % 16 == 0) f((uint32_t *)(at.slot + ep_ll_scales_at(c)) + unit / 16, piece.scale[u]);
    }
    if (at.has_weights && ep_lane() < ep_ll_num_weight_words(&c->shape))
        f((uint32_t *)(at.slot + ep_ll_weights_at(c)) + ep_lane(), piece.weight);
}
template <bool FP8> EP_FN void put_piece(const EpComm *c, Place at, Piece<FP8> piece) {
    for_words<FP8>(c, at, piece, [](auto *to, auto &v) { ep_st_words(to, words_of(v)); });
}
/* Load what is there of a piece. True if this lane has all of its part. */
template <bool FP8> EP_FN bool load_piece(const EpComm *c, Place at, Piece<FP8> &piece) {
    bool all = true;
    for_words<FP8>(c, at, piece, [](auto *from, auto &v) { v = ep_ld_words(from); });
    for_words<FP8>(c, at, piece, [&](auto *, auto &v) {
        all = all && has_all(v);
        v = values_of(v);
    });
    return all;
}
/* Empty the slot of a piece that has been loaded. */
template <bool FP8> EP_FN void clear_piece(const EpComm *c, Place at) {
    Piece<FP8> none = {};
    for_words<FP8>(c, at, none, [](auto *to, auto &v) { ep_st_words(to, v); });
}

/* Wait for pieces, load them into `got`, and empty their places. There are NUM places; bit j of `wanted` says
 * whether to wait for place(j), which rank source(j) fills. If a piece does not arrive, got[j] is NaN. */
template <bool FP8, uint32_t NUM, typename At, typename Source>
EP_FN void take_pieces(const EpComm *c, uint32_t op, uint32_t wanted, At place, Source source, uint64_t epoch,
                       Piece<FP8> (&got)[NUM]) {
    uint32_t missing = wanted;
    EpBackoff w = {0, 0, 0};
    ep_chaos(EP_CHAOS_FLAG_READ);
    while (missing) {
        bool all[NUM];
#pragma unroll
        for (uint32_t j = 0; j < NUM; j++) /* the loads of all places are in flight together */
            all[j] = (missing >> j & 1u) && load_piece<FP8>(c, place(j), got[j]);
#pragma unroll
        for (uint32_t j = 0; j < NUM; j++) {
            if (__ballot_sync(EP_FULL, all[j]) != EP_FULL) continue;
            missing &= ~(1u << j);
            clear_piece<FP8>(c, place(j));
        }
        if (missing == 0) return;
        bool ok = true;
        if (ep_lane() == 0) {
            const uint32_t peer = source((uint32_t)__ffs((int)missing) - 1);
            const EpFaultRecord f = ep_fault_at(op, peer, EP_WORD_SLOT, epoch);
            ok = ep_wait_on(c, &w, c->timeout_ns, &f, 1, 0);
        }
        if (ep_warp_all(ok)) continue;
#pragma unroll
        for (uint32_t j = 0; j < NUM; j++)
            if (missing >> j & 1u) got[j] = nan_piece<FP8>();
        return;
    }
}

#endif /* EP_PIECES_CUH */
