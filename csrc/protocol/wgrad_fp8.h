/* wgrad_fp8.h - the gradient of weights in FP8: the layout of transposed rows, and the parameters of the
 * kernels that make them and that multiply them.
 *
 * Tensor cores of Hopper take operands of FP8 only with the contraction along memory. WGRAD contracts over
 * rows, so both of its operands are transposed. Transposed rows are [C][P]: number r of column c of the rows
 * is number p of line c. The rows of an expert take whole blocks of 128 numbers of a line, filled up with
 * zeros. All rows of an expert have one scale for each 128 columns, [L][C / 128], a power of two. So the
 * tensor cores add up an expert without an intermediate scale.
 *
 * Expert e begins at block offsets[e] / 128 + e. So a kernel knows the place of an expert without the sizes
 * of the others. Between experts there may be a block that nobody writes or reads. */
#ifndef EP_WGRAD_FP8_H
#define EP_WGRAD_FP8_H
#include "protocol/quantize.h"
#include "protocol/shape.h"

/* The rows of a block. */
#define EP_TRANSPOSED_ROWS EP_GEMM_SCALE_BLOCK
/* The blocks of num_rows rows of num_experts experts, whatever their sizes are: P / 128. */
EP_PURE uint32_t ep_transposed_num_blocks(uint32_t num_rows, uint32_t num_experts) {
    return num_rows / EP_TRANSPOSED_ROWS + num_experts;
}
/* The block of the first row of an expert. first: offsets[expert], at most num_rows. */
EP_PURE uint32_t ep_transposed_first_block(uint32_t first, uint32_t expert) {
    return first / EP_TRANSPOSED_ROWS + expert;
}

/* Rows of e4m3 to transposed rows. The scale of an expert is the largest one of its rows in these 128
 * columns, and q is the number times its scale / that scale. This is exact for powers of two, unless the
 * number becomes subnormal. */
typedef struct {
    const uint8_t *x;              /* [num_rows][num_cols] */
    const float *x_scale;          /* see the strides below */
    const int32_t *offsets;        /* [num_experts + 1] first row of each expert */
    uint8_t *q;                    /* [num_cols][P] */
    float *scales;                 /* [num_experts][num_cols / 128], rounded up */
    uint64_t scale_row, scale_col; /* from a row of x_scale to the next, and from 128 columns to the next */
    uint32_t num_rows, num_cols, num_experts;
} EpTransposeParams;
#define EP_TRANSPOSED_LEAST 0x1p-126f /* the least scale */

/* Weights [num][n][k] to e4m3 with a scale for each block of 128 by 128, and the same numbers transposed. */
typedef struct {
    const void *x;
    uint8_t *q, *transposed;           /* [num][n][k], [num][k][n] */
    float *scales, *transposed_scales; /* [num][n / 128][k / 128], [num][k / 128][n / 128], rounded up */
    uint32_t num, n, k;
    uint32_t dtype; /* EpDtype of x */
} EpQuantizeWeightParams;

/* gemm.a is [N][P], gemm.b [K][P]. */
typedef struct {
    EpGemmParams gemm;              /* kind: WGRAD */
    const float *a_scale, *b_scale; /* [L][N / 128], [L][K / 128], rounded up */
} EpWgradFp8Params;

/* An expert's rows of block `block`. num is 0 for a block between experts. */
typedef struct {
    uint32_t row, num, expert;
} EpTransposedBlock;
/* Clamp an offset to the rows that exist. */
EP_PURE uint32_t ep_transpose_clamp(const EpTransposeParams *p, int32_t row) {
    return row < 0 ? 0 : (uint32_t)row < p->num_rows ? (uint32_t)row : p->num_rows;
}
/* The rows of a block that belongs to this expert, or is between it and the next one. The offsets may be
 * anything; the rows exist. */
EP_PURE EpTransposedBlock ep_transposed_block(const EpTransposeParams *p, uint32_t expert, uint32_t block) {
    const uint32_t from = ep_transpose_clamp(p, p->offsets[expert]);
    const uint32_t to = ep_transpose_clamp(p, p->offsets[expert + 1]);
    const uint32_t begin = ep_transposed_first_block(from, expert);
    const uint64_t row = from + (uint64_t)(block - begin) * EP_TRANSPOSED_ROWS;
    EpTransposedBlock b = {0, 0, expert};
    if (block < begin || row >= to) return b;
    b.row = (uint32_t)row;
    b.num = to - b.row < EP_TRANSPOSED_ROWS ? to - b.row : EP_TRANSPOSED_ROWS;
    return b;
}

#endif /* EP_WGRAD_FP8_H */
