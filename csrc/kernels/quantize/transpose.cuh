/* transpose.cuh - FP8 with the contraction along memory: rows, transposed, and weights, also quantised; see
 * protocol/wgrad_fp8.h.
 *
 * A CTA has a block of 128 rows and 128 columns (of rows: two, next to each other). A thread has 8 or 16
 * consecutive rows of 8 or 16 columns, in registers: it transposes them there, so no byte passes through
 * shared memory. All loads of a thread are in flight at once. 8 lanes read 128 bytes of a row; 4 lanes write
 * 64 bytes of a line of the result.
 * Invariant: the bits are those of cpu/transpose.c. */
#ifndef EP_TRANSPOSE_CUH
#define EP_TRANSPOSE_CUH
#include "kernels/quantize/e4m3.cuh"
#include "kernels/quantize/eight.cuh"
#include "protocol/wgrad_fp8.h"

#define EP_TRANSPOSE_CTAS 4u /* of an SM, of 128 threads */

/* Transpose 4 by 4 bytes. */
EP_FN void ep_transpose_bytes(const uint32_t (&row)[4], uint32_t (&col)[4]) {
    const uint32_t top_low = __byte_perm(row[0], row[1], 0x5140);
    const uint32_t top_high = __byte_perm(row[0], row[1], 0x7362);
    const uint32_t bottom_low = __byte_perm(row[2], row[3], 0x5140);
    const uint32_t bottom_high = __byte_perm(row[2], row[3], 0x7362);
    col[0] = __byte_perm(top_low, bottom_low, 0x5410);
    col[1] = __byte_perm(top_low, bottom_low, 0x7632);
    col[2] = __byte_perm(top_high, bottom_high, 0x5410);
    col[3] = __byte_perm(top_high, bottom_high, 0x7632);
}
/* Write the lines of ROWS rows of WORDS * 4 columns. to: of the first line; size: of a line. */
template <int ROWS, int WORDS>
EP_FN void ep_transpose_write(const uint32_t (&q)[ROWS][WORDS], uint8_t *to, uint64_t size) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        uint32_t line[4][ROWS / 4];
#pragma unroll
        for (int r = 0; r < ROWS; r += 4) {
            const uint32_t rows[4] = {q[r][w], q[r + 1][w], q[r + 2][w], q[r + 3][w]};
            uint32_t cols[4];
            ep_transpose_bytes(rows, cols);
#pragma unroll
            for (int c = 0; c < 4; c++) line[c][r / 4] = cols[c];
        }
#pragma unroll
        for (int c = 0; c < 4; c++, to += size) {
            if constexpr (ROWS == 16)
                *(uint4 *)to = make_uint4(line[c][0], line[c][1], line[c][2], line[c][3]);
            else *(uint2 *)to = make_uint2(line[c][0], line[c][1]);
        }
    }
}

/* The rows of a block of transposed rows. All lanes call this: each looks at some of the experts. */
EP_FN EpTransposedBlock ep_transpose_find(const EpTransposeParams *p, uint32_t block) {
    uint32_t num = 0; /* experts that begin at this block or before */
    for (uint32_t first = 0; first < p->num_experts; first += 32) {
        const uint32_t e = first + ep_lane();
        const bool begins =
            e < p->num_experts && ep_transposed_first_block(ep_transpose_clamp(p, p->offsets[e]), e) <= block;
        num += (uint32_t)__popc(__ballot_sync(EP_FULL, begins));
    }
    if (num == 0) return {0, 0, 0};
    return ep_transposed_block(p, num - 1, block);
}

/* The block and the first column of a CTA. Eight blocks proceed through the columns together, because their
 * lines are next to each other. */
#define EP_TRANSPOSE_GROUP 8u
typedef struct {
    uint32_t block, col;
} EpTransposeTask;
EP_FN EpTransposeTask ep_transpose_task(uint32_t num_blocks, uint32_t num_cols, uint32_t cols) {
    const uint32_t num = ep_ceil_div_u32(num_cols, cols), of_group = EP_TRANSPOSE_GROUP * num;
    const uint32_t first = blockIdx.x / of_group * EP_TRANSPOSE_GROUP, i = blockIdx.x % of_group;
    const uint32_t group = num_blocks - first < EP_TRANSPOSE_GROUP ? num_blocks - first : EP_TRANSPOSE_GROUP;
    return {first + i % group, i / group * cols};
}

/* ---- weights, from 16 or 32 bits ---- */

/* The rows of a thread, so that its numbers take 64 registers; its place in the block; the warps of a CTA. */
template <int DTYPE> struct EpTransposeConfig {
    static constexpr int ROWS = DTYPE == EP_F32 ? 8 : 16, WARPS = 64 / ROWS;
};
template <int DTYPE> EP_FN uint32_t ep_transpose_row(void) {
    constexpr uint32_t ROWS = EpTransposeConfig<DTYPE>::ROWS;
    return (threadIdx.x / 64 * 4 + ep_lane() / 8) * ROWS;
}
EP_FN uint32_t ep_transpose_col(void) { return threadIdx.x / 32 % 2 * 64 + ep_lane() % 8 * 8; }

/* Read a thread's numbers, from number `at` on. Those that do not exist are 0. */
template <int DTYPE, int ROWS> EP_FN void ep_transpose_read(EpEight<DTYPE> (&x)[ROWS], const void *from,
                                                            uint64_t at, uint64_t pitch, uint32_t num_rows) {
#pragma unroll
    for (int i = 0; i < ROWS; i++, at += pitch)
        x[i] = ep_read_eight<DTYPE, true>(from, at, (uint32_t)i < num_rows ? 8 : 0);
}
/* The largest magnitude of a thread's numbers, without NaN. */
template <int DTYPE, int ROWS> EP_FN float ep_transpose_most(const EpEight<DTYPE> (&x)[ROWS]) {
    float of_col[8], most = EP_QUANTIZE_LEAST;
#pragma unroll
    for (int j = 0; j < 8; j++) of_col[j] = EP_QUANTIZE_LEAST;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float f[8];
        EpEight<DTYPE>::unpack(x[i], f);
#pragma unroll
        for (int j = 0; j < 8; j++) of_col[j] = fmaxf(of_col[j], fabsf(f[j]));
    }
#pragma unroll
    for (int j = 0; j < 8; j++) most = fmaxf(most, of_col[j]);
    return most;
}
/* Each number times inverse, rounded. */
template <int DTYPE, int ROWS>
EP_FN void ep_transpose_quantize(const EpEight<DTYPE> (&x)[ROWS], float inverse, uint32_t (&q)[ROWS][2]) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float f[8];
        uint32_t pair[4];
        EpEight<DTYPE>::unpack(x[i], f);
#pragma unroll
        for (int j = 0; j < 4; j++)
            pair[j] = __nv_cvt_float2_to_fp8x2(
                make_float2(__fmul_rn(f[2 * j], inverse), __fmul_rn(f[2 * j + 1], inverse)), __NV_SATFINITE,
                __NV_E4M3);
        q[i][0] = pair[0] | pair[1] << 16;
        q[i][1] = pair[2] | pair[3] << 16;
    }
}

template <int DTYPE> __global__ void __launch_bounds__(32 * EpTransposeConfig<DTYPE>::WARPS,
                                                       EP_TRANSPOSE_CTAS *EpTransposeConfig<DTYPE>::ROWS / 16)
    quantize_weight_kernel(const __grid_constant__ EpQuantizeWeightParams p) {
    constexpr int ROWS = EpTransposeConfig<DTYPE>::ROWS, WARPS = EpTransposeConfig<DTYPE>::WARPS;
    __shared__ float part[WARPS];
    const uint32_t blocks_n = ep_gemm_num_blocks(p.n), blocks_k = ep_gemm_num_blocks(p.k);
    const uint32_t e = blockIdx.x / (blocks_n * blocks_k), i = blockIdx.x % (blocks_n * blocks_k);
    const uint32_t block_n = i / blocks_k, block_k = i % blocks_k;
    const uint32_t row = block_n * EP_TRANSPOSED_ROWS + ep_transpose_row<DTYPE>();
    const uint32_t col = block_k * EP_TRANSPOSED_ROWS + ep_transpose_col();
    const uint64_t at = ((uint64_t)e * p.n + row) * p.k + col;
    const bool exists = row < p.n && col < p.k; /* n and k are multiples of 16 */
    EpEight<DTYPE> x[ROWS];
    ep_transpose_read<DTYPE, ROWS>(x, p.x, at, p.k, exists ? ROWS : 0);
    float most = ep_transpose_most<DTYPE, ROWS>(x);
#pragma unroll
    for (int j = 16; j > 0; j /= 2) most = fmaxf(most, __shfl_xor_sync(EP_FULL, most, j));
    if (ep_lane() == 0) part[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < WARPS; j++) most = fmaxf(most, part[j]);
    const float scale = ep_quantize_pow2(most);
    if (threadIdx.x == 0) {
        p.scales[((uint64_t)e * blocks_n + block_n) * blocks_k + block_k] = scale;
        p.transposed_scales[((uint64_t)e * blocks_k + block_k) * blocks_n + block_n] = scale;
    }
    if (!exists) return;
    uint32_t q[ROWS][2];
    ep_transpose_quantize<DTYPE, ROWS>(x, ep_quantize_pow2_inverse(scale), q);
#pragma unroll
    for (int j = 0; j < ROWS; j++) *(uint2 *)(p.q + at + (uint64_t)j * p.k) = make_uint2(q[j][0], q[j][1]);
    ep_transpose_write<ROWS, 2>(q, p.transposed + ((uint64_t)e * p.k + col) * p.n + row, p.n);
}

/* ---- rows, from e4m3 ---- */

/* The scales of the experts: a CTA has those of 128 columns of an expert. Its threads have many loads in
 * flight, because the rows of an expert are many and nothing else hides the latency of a load. */
#define EP_EXPERT_SCALES_THREADS 256
__global__ void __launch_bounds__(EP_EXPERT_SCALES_THREADS)
    expert_scales_kernel(const __grid_constant__ EpTransposeParams p) {
    __shared__ float part[EP_EXPERT_SCALES_THREADS / 32];
    const uint32_t groups = ep_gemm_num_blocks(p.num_cols), e = blockIdx.x / groups, g = blockIdx.x % groups;
    const uint32_t to = ep_transpose_clamp(&p, p.offsets[e + 1]);
    float scale = EP_TRANSPOSED_LEAST;
#pragma unroll 8
    for (uint32_t row = ep_transpose_clamp(&p, p.offsets[e]) + threadIdx.x; row < to;
         row += EP_EXPERT_SCALES_THREADS)
        scale = fmaxf(scale, p.x_scale[row * p.scale_row + g * p.scale_col]);
#pragma unroll
    for (int j = 16; j > 0; j /= 2) scale = fmaxf(scale, __shfl_xor_sync(EP_FULL, scale, j));
    if (ep_lane() == 0) part[threadIdx.x / 32] = scale;
    __syncthreads();
    if (threadIdx.x) return;
    for (uint32_t i = 0; i < EP_EXPERT_SCALES_THREADS / 32; i++) scale = fmaxf(scale, part[i]);
    p.scales[blockIdx.x] = scale;
}

#define EP_SHIFT_ROWS 16
#define EP_SHIFT_COLS (2u * EP_TRANSPOSED_ROWS) /* of a CTA */
#define EP_SHIFT_THREADS 128
/* Warps 0 and 1 have the halves of the rows of the first 128 columns, warps 2 and 3 of the next ones. */
__global__ void __launch_bounds__(EP_SHIFT_THREADS, EP_TRANSPOSE_CTAS)
    transpose_e4m3_kernel(const __grid_constant__ EpTransposeParams p) {
    const uint32_t lane = ep_lane(), half = threadIdx.x / 32 % 2;
    const uint32_t num_blocks = ep_transposed_num_blocks(p.num_rows, p.num_experts);
    const EpTransposeTask t = ep_transpose_task(num_blocks, p.num_cols, EP_SHIFT_COLS);
    const EpTransposedBlock b = ep_transpose_find(&p, t.block);
    const uint32_t first_col = t.col + threadIdx.x / 64 * EP_TRANSPOSED_ROWS, col = first_col + lane % 8 * 16;
    const uint32_t row = 64 * half + lane / 8 * EP_SHIFT_ROWS;
    if (b.num == 0 || first_col >= p.num_cols) return;
    const uint8_t *from = p.x + (uint64_t)(b.row + row) * p.num_cols + col;
    uint4 x[EP_SHIFT_ROWS];
#pragma unroll
    for (uint32_t i = 0; i < EP_SHIFT_ROWS; i++) {
        x[i] = make_uint4(0, 0, 0, 0);
        if (row + i < b.num && col < p.num_cols)
            x[i] = __ldg((const uint4 *)(from + (uint64_t)i * p.num_cols));
    }
    /* Of the 16 rows of eight lanes, a lane has the scales of two. */
    const float *of_row =
        p.x_scale + (uint64_t)b.row * p.scale_row + first_col / EP_TRANSPOSED_ROWS * p.scale_col;
    float mine[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t r = row + lane % 8 * 2 + i;
        mine[i] = r < b.num ? of_row[r * p.scale_row] : 0;
    }
    const float inverse =
        __frcp_rn(p.scales[b.expert * ep_gemm_num_blocks(p.num_cols) + first_col / EP_TRANSPOSED_ROWS]);
    uint32_t q[EP_SHIFT_ROWS][4];
#pragma unroll
    for (uint32_t i = 0; i < EP_SHIFT_ROWS; i++) {
        const float ratio =
            __fmul_rn(__shfl_sync(EP_FULL, mine[i % 2], (int)(lane / 8 * 8 + i / 2)), inverse);
        const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
        const bool is_same = ratio == 1 || row + i >= b.num;
        if (__ballot_sync(EP_FULL, is_same) == EP_FULL) {
#pragma unroll
            for (int w = 0; w < 4; w++) q[i][w] = words[w];
        } else {
            const __half2 factor = __float2half2_rn(ratio);
#pragma unroll
            for (int w = 0; w < 4; w++) q[i][w] = is_same ? words[w] : ep_e4m3_shift(words[w], factor);
        }
    }
    if (col >= p.num_cols) return;
    const uint64_t size = (uint64_t)num_blocks * EP_TRANSPOSED_ROWS;
    ep_transpose_write<EP_SHIFT_ROWS, 4>(q, p.q + col * size + (uint64_t)t.block * EP_TRANSPOSED_ROWS + row,
                                         size);
}

typedef void EpQuantizeWeightKernel(EpQuantizeWeightParams);
static EpQuantizeWeightKernel *ep_quantize_weight_kernel(uint32_t dtype) {
    return dtype == EP_F32   ? quantize_weight_kernel<EP_F32>
           : dtype == EP_F16 ? quantize_weight_kernel<EP_F16>
                             : quantize_weight_kernel<EP_BF16>;
}

/* The warps of a CTA for weights, and the numbers of CTAs. */
static uint32_t ep_quantize_weight_num_warps(uint32_t dtype) {
    EP_HANDLES_ALL(EP_NUM_DTYPES, 3);
    return dtype == EP_F32 ? EpTransposeConfig<EP_F32>::WARPS : EpTransposeConfig<EP_BF16>::WARPS;
}
static uint64_t ep_transpose_num_ctas(const EpTransposeParams *p) {
    return (uint64_t)ep_transposed_num_blocks(p->num_rows, p->num_experts) *
           ep_ceil_div_u32(p->num_cols, EP_SHIFT_COLS);
}
static uint64_t ep_quantize_weight_num_ctas(const EpQuantizeWeightParams *p) {
    return (uint64_t)p->num * ep_gemm_num_blocks(p->n) * ep_gemm_num_blocks(p->k);
}

#endif /* EP_TRANSPOSE_CUH */
