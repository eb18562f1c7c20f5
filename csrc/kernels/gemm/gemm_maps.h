/* gemm_maps.h - the tensor maps of a grouped GEMM's operands, as pure arithmetic: shapes, strides and
 * boxes. */
#ifndef EP_GEMM_MAPS_H
#define EP_GEMM_MAPS_H
#include "protocol/wgrad_fp8.h"

/* The numbers of a tensor. The first two are as EpGemmParams.is_f16. */
typedef enum { EP_MAP_BF16 = 0, EP_MAP_F16 = 1, EP_MAP_E4M3 = 2 } EpMapType;
EP_PURE uint32_t ep_map_number_bytes(uint32_t type) { return type == EP_MAP_E4M3 ? 1 : 2; }

/* A tensor, innermost dimension first. Its innermost stride is 1; strides[i] is that of dimension i + 1. A
 * box arrives in shared memory as lines of 128 bytes, swizzled within a line. */
typedef struct {
    const void *base;
    uint32_t num_dims, type;      /* EpMapType */
    uint64_t dims[5], strides[4]; /* in elements */
    uint32_t box[6]; /* the sixth is 0: the struct then has no padding, and tensor_maps.c can compare bytes */
} EpTensorMap;

static inline EpTensorMap ep_map_rows(const EpGemmParams *p, const void *base, uint32_t cols, uint32_t rows) {
    EpTensorMap m = {base, 2, p->is_f16, {cols, p->num_rows}, {cols}, {64, rows}};
    return m;
}

/* Which rows of the weights belong to a column, and which operand is transposed. */
EP_HANDLES_ALL(EP_NUM_GEMM_KINDS, 3);
static inline EpTensorMap ep_map_a(const EpGemmParams *p, uint32_t tile_cols) {
    return ep_map_rows(p, p->a, p->kind == EP_GEMM_FORWARD ? p->k : p->n, tile_cols == 64 ? 16 : 64);
}

/* The tensor map of the weights [L][N][K]. A box has half of a tile's columns by 64 of K; or 64 by 64, if the
 * contraction runs over N.
 * For a gated activation, the rows of a box are 8 gate rows, their 8 up rows, the next 8 gate rows, and so
 * on, independent of their location in the weights: [K][8][gate, up][N / 16][L]. */
static inline EpTensorMap ep_map_b(const EpGemmParams *p, uint32_t tile_cols) {
    const uint64_t n = p->n;
    const uint64_t k = p->k;
    const uint64_t of_up = EP_ACT_IS_MIXED(p->activation.kind) ? k : n / 2 * k;
    const uint64_t next = EP_ACT_IS_MIXED(p->activation.kind) ? 2 * k : k;
    EpTensorMap plain = {p->b,       3,
                         p->is_f16,  {k, n, p->num_experts},
                         {k, n * k}, {64, p->kind == EP_GEMM_DGRAD ? 64 : tile_cols / 2, 1}};
    EpTensorMap gated = {p->b,
                         5,
                         p->is_f16,
                         {k, 8, 2, n / 16, p->num_experts},
                         {next, of_up, 8 * next, n * k},
                         {64, 8, 2, tile_cols / 32, 1}};
    if (p->kind == EP_GEMM_WGRAD) return ep_map_rows(p, p->b, p->k, 64);
    return EP_ACT_IS_GATED(p->activation.kind) ? gated : plain;
}

/* The map of an operand of e4m3, from its map as a tensor of 16-bit numbers. */
static inline EpTensorMap ep_map_fp8(EpTensorMap m) {
    m.type = EP_MAP_E4M3;
    m.box[0] = 128;
    return m;
}

/* The tensor map of the rows of a product with weights of 4 bits, for small or large M: a box has 8 rows of
 * two times 64 values of k, or 64 rows. The weights need no map: a part of them is contiguous. */
static inline EpTensorMap ep_map_w4_rows(const EpGemmParams *p, bool is_large) {
    const EpTensorMap few = {p->a, 3, p->is_f16, {64, p->num_rows, p->k / 64}, {p->k, 64}, {64, 8, 2}};
    return is_large ? ep_map_rows(p, p->a, p->k, 64) : few;
}

/* Transposed rows of FP8: `num_lines` lines of P numbers. A box has 128 numbers of each of `lines` lines. */
static inline EpTensorMap ep_map_transposed(const EpWgradFp8Params *p, const void *base, uint32_t num_lines,
                                            uint32_t lines) {
    const uint64_t size =
        (uint64_t)EP_TRANSPOSED_ROWS * ep_transposed_num_blocks(p->gemm.num_rows, p->gemm.num_experts);
    EpTensorMap m = {base, 2, EP_MAP_E4M3, {size, num_lines}, {size}, {EP_TRANSPOSED_ROWS, lines}};
    return m;
}

#endif /* EP_GEMM_MAPS_H */
