/* shape.h - the shape of a layer: the numbers on which all sizes and offsets depend.
 *
 * Letters, in all files: W ranks, E experts, L = E/W local experts, T tokens of this rank, K choices per
 * token, H hidden size, M rows received by this rank.
 *
 * Exports EpShape, EpDtype, EpCombineMode, the limits, and the arithmetic of sizes.
 * Invariant: all ranks of a layer have the same shape. They compare it when they create the layer. */
#ifndef EP_SHAPE_H
#define EP_SHAPE_H
#include "protocol/port.h"

#define EP_MAX_RANKS 8u
#define EP_MAX_TOPK 32u
#define EP_MAX_EXPERTS 1024u
EP_STATIC_ASSERT(EP_MAX_RANKS < 32, "a set of ranks is a mask of 32 bits, and a lane of a warp is a rank");
EP_STATIC_ASSERT(EP_MAX_TOPK <= 32, "a lane of a warp is a choice of a token");
#define EP_FILL_NAN 0xffu /* every dtype reads this byte pattern as NaN */

/* The dtypes of rows: X(NAME, value, bytes of an element, text). epmoe.h has those that no row may have. */
#define EP_DTYPES(X)        \
    X(F32, 0, 4, "float32") \
    X(F16, 1, 2, "float16") \
    X(BF16, 2, 2, "bfloat16")
typedef enum {
#define X(NAME, value, num_bytes, text) EP_##NAME = value,
    EP_DTYPES(X)
#undef X
        EP_NUM_DTYPES
} EpDtype;
/* LOCAL: the expert's rank adds up its rows of a token and pushes one row per (token, rank).
 * SCATTER: the expert's rank pushes one row per choice. GATHER: the token's rank pulls one row per choice. */
typedef enum {
    EP_COMBINE_LOCAL = 0,
    EP_COMBINE_SCATTER = 1,
    EP_COMBINE_GATHER = 2,
    /* Not forms of combine, but layers with other operations (low_latency.h). The second one returns a row
     * per choice. */
    EP_LOW_LATENCY = 3,
    EP_LOW_LATENCY_SCATTER = 4,
    EP_NUM_COMBINE_MODES
} EpCombineMode;

typedef struct {
    uint32_t num_ranks;    /* W */
    uint32_t num_experts;  /* E, a multiple of W */
    uint32_t num_topk;     /* K */
    uint32_t max_tokens;   /* upper limit of T on every rank */
    uint32_t hidden;       /* H, in elements */
    uint32_t dtype;        /* EpDtype */
    uint32_t combine_mode; /* EpCombineMode */
    uint32_t capacity;     /* upper limit of M on every rank */
} EpShape;

EP_PURE bool ep_is_low_latency(const EpShape *s) { return s->combine_mode >= EP_LOW_LATENCY; }
EP_PURE uint32_t ep_num_local_experts(const EpShape *s) { return s->num_experts / s->num_ranks; }
/* Bytes of an element; 0 if the number is no EpDtype. */
EP_PURE uint32_t ep_dtype_bytes(uint32_t dtype) {
    switch (dtype) {
#define X(NAME, value, num_bytes, text) \
    case EP_##NAME: return num_bytes;
        EP_DTYPES(X)
#undef X
    default: return 0;
    }
}

EP_PURE uint32_t ep_ceil_div_u32(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }
EP_PURE uint64_t ep_align_u64(uint64_t a, uint64_t to) { return (a + to - 1) / to * to; }
EP_PURE uint64_t ep_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

#endif /* EP_SHAPE_H */
