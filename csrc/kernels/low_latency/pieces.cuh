/* pieces.cuh - what the low-latency dispatch and combine share: work items, pieces of rows, e4m3.
 *
 * Work is divided into pieces of rows, one warp a piece. Consecutive pieces go to different CTAs, so that few
 * tokens also use many SMs. protocol/low_latency.h has the protocol.
 * Invariant: a warp waits for a peer only after the warps of its CTA have written all their pieces. The warp
 * that publishes them waits for a peer only after it has published them all. All CTAs are resident. */
#ifndef EP_PIECES_CUH
#define EP_PIECES_CUH
#include <cuda_fp8.h>

#include "kernels/stage/rows.cuh"
#include "protocol/low_latency.h"

enum { EP_PIECE_PARTS = EP_PIECE_VECS / 32 }; /* 16-byte units of a piece that a lane moves */

/* ---- work items ---- */

/* This warp's first item, and the distance to its next one. */
EP_FN uint32_t first_item(void) { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }
EP_FN uint32_t item_step(void) { return gridDim.x * EP_WARPS; }

/* A token of a source rank. */
typedef struct {
    uint32_t source, token;
} Token;
/* Token n of the peers' tokens, of which rank w has num(w). */
template <typename Num> EP_FN Token peers_token(const EpComm *c, uint32_t n, Num num) {
    Token t = {0, n};
    while (t.source + 1 < c->shape.num_ranks && (t.source == c->my_rank || t.token >= num(t.source))) {
        if (t.source != c->my_rank) t.token -= num(t.source);
        t.source++;
    }
    return t;
}

/* ---- e4m3 ---- */

/* 8 numbers as they are in 16 bytes of a row, quantised; 16 lanes share a scale, and all of them get it. */
template <int DTYPE> EP_FN uint2 quantize(uint4 v, uint32_t fp8, float *scale) {
    float f[8], most = 0x1p-100f;
    EpVec<DTYPE>::unpack(v, f);
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(f[i]));
#pragma unroll
    for (int i = 8; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(EP_FULL, most, i));
    *scale = __fdiv_rn(most, 448.0f);
    if (fp8 >= EP_FP8_POW2) {
        const uint32_t bits = __float_as_uint(*scale);
        *scale = __uint_as_float(bits & 0x7fffffu ? (bits | 0x7fffffu) + 1 : bits);
    }
    const float inverse = __frcp_rn(*scale);
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

/* What a lane holds of a piece. FP8: 8 e4m3 numbers and their scale for each unit; else 16 bytes. */
template <bool FP8> struct Piece;
template <> struct Piece<false> {
    uint4 v[EP_PIECE_PARTS];
};
template <> struct Piece<true> {
    uint2 v[EP_PIECE_PARTS];
    float scale[EP_PIECE_PARTS];
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

/* Write a piece to a slot, and read it from one. */
template <bool FP8> EP_FN void write_slot(const EpComm *c, unsigned char *to, uint32_t piece,
                                          const Piece<FP8> &got) {
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) {
        const uint32_t unit = unit_of(piece, u);
        if (unit >= num_units(c)) continue;
        if constexpr (FP8) {
            ((uint2 *)to)[unit] = got.v[u];
            if (unit % 16 == 0) ((float *)(to + ep_ll_scales_at(c)))[unit / 16] = got.scale[u];
        } else {
            ((uint4 *)to)[unit] = got.v[u];
        }
    }
}
template <bool FP8> EP_FN Piece<FP8> read_slot(const EpComm *c, const unsigned char *from, uint32_t piece) {
    Piece<FP8> got = {};
#pragma unroll
    for (uint32_t u = 0; u < EP_PIECE_PARTS; u++) {
        const uint32_t unit = unit_of(piece, u);
        if (unit >= num_units(c)) continue;
        if constexpr (FP8) {
            got.v[u] = ((const uint2 *)from)[unit];
            if (unit % 16 == 0) got.scale[u] = ((const float *)(from + ep_ll_scales_at(c)))[unit / 16];
        } else {
            got.v[u] = ep_ld_row((const uint4 *)from + unit);
        }
    }
    return got;
}

/* ---- publish ---- */

/* The piece that a warp has written to slots of its peers: a bit for each rank. */
typedef struct {
    uint32_t ranks, token, piece;
} Sent;
/* Publish the pieces that the warps of the CTA have written. All warps call it, once a round. One warp
 * publishes them all, after one fence, which waits until the stores before it have crossed the links. It is
 * not the last warp, which enters and judges the heads. */
EP_FN void publish_all(const EpComm *c, Sent mine, uint32_t round, uint64_t epoch) {
    __shared__ Sent sent[2][EP_WARPS]; /* the next round is written while this one is read */
    Sent *now = sent[round % 2];
    if (ep_lane() == 0) now[threadIdx.x / 32] = mine;
    __syncthreads(); /* the stores of all warps come before the fence */
    if (threadIdx.x / 32 != EP_WARPS - 2) return;
    if (__ballot_sync(EP_FULL, now[ep_lane() % EP_WARPS].ranks != 0) == 0) return;
    ep_chaos(EP_CHAOS_FLAG_PUBLISH);
    ep_fence_acq_rel_sys();
    for (uint32_t i = ep_lane(); i < EP_WARPS * c->shape.num_ranks; i += 32) {
        const Sent s = now[i % EP_WARPS];
        const uint32_t r = i / EP_WARPS;
        if (s.ranks >> r & 1u) /* publishes the piece */
            ep_st_fenced_sys_u64(ep_ll_flag(c, r, c->my_rank, s.token, s.piece, epoch), epoch);
    }
}

#endif /* EP_PIECES_CUH */
