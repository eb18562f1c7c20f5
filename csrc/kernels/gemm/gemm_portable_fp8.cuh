/* gemm_portable_fp8.cuh - the grouped GEMM of FP8 for any GPU from compute capability 8.0 on. Correct,
 * not fast.
 *
 * As gemm_portable.cuh, with e4m3 numbers converted to fp16, which holds them exactly. After each 128 values
 * of k, the sums of their products return through shared memory, are multiplied by the scales, and are added
 * to the results, which also are in shared memory. */
#ifndef EP_GEMM_PORTABLE_FP8_CUH
#define EP_GEMM_PORTABLE_FP8_CUH
#include <cuda_fp8.h>

#include "kernels/gemm/gemm_portable.cuh"

template <int ACT, bool F16> struct EpSimpleFp8Gemm {
    using G = EpSimpleGemm<ACT, F16, false>;

    static __device__ __half widen(const void *from, uint64_t at) {
        return __half(__nv_cvt_fp8_to_halfraw(((const uint8_t *)from)[at], __NV_E4M3));
    }
    /* Element c of the contraction, for row m or column n of the tile. Zero outside of the operands. */
    static __device__ __half load_a(const EpGemmParams *p, const EpGemmTile *t, uint32_t m, uint32_t c) {
        if (m >= t->num_rows || c >= t->num_k) return __half(0.0f);
        return widen(p->a, (uint64_t)(t->row0 + m) * p->k + c);
    }
    static __device__ __half load_b(const EpGemmParams *p, const EpGemmTile *t, uint32_t n, uint32_t c) {
        const uint32_t col = t->col0 + n;
        if (col >= p->n || c >= t->num_k) return __half(0.0f);
        return widen(p->b, ((uint64_t)t->expert * p->n + G::weight_row(p, col)) * p->k + c);
    }
    /* The product of the scales of row m and column n of the tile, for a block of k. */
    static __device__ float scale(const EpGemmFp8Params *q, const EpGemmTile *t, uint32_t m, uint32_t n,
                                  uint32_t block) {
        const EpGemmParams *p = &q->gemm;
        const EpGemmScales *s = &q->scales;
        const uint32_t col = t->col0 + n;
        if (m >= t->num_rows || col >= p->n) return 0;
        const uint32_t of_col = G::weight_row(p, col) / EP_GEMM_SCALE_BLOCK;
        return s->a[(t->row0 + m) * s->a_row + block * s->a_k] *
               s->b[t->expert * s->b_expert + of_col * s->b_n + block * s->b_k];
    }
};

template <int ACT, bool F16> __global__ void __launch_bounds__(EP_SIMPLE_THREADS, 4)
    simple_fp8_gemm_kernel(const __grid_constant__ EpGemmFp8Params q) {
    using namespace nvcuda;
    using G = EpSimpleFp8Gemm<ACT, F16>;
    const EpGemmParams &p = q.gemm;
    __shared__ __align__(32) __half a[EP_SIMPLE_TILE * EP_SIMPLE_PITCH], b[EP_SIMPLE_TILE * EP_SIMPLE_PITCH];
    __shared__ __align__(32) float sums[EP_SIMPLE_TILE * EP_SIMPLE_OUT_PITCH];
    __shared__ float results[EP_SIMPLE_TILE * EP_SIMPLE_OUT_PITCH]; /* a thread has the same ones each time */
    /* first row and column of the warp */
    const uint32_t m0 = threadIdx.x / 64 * 32, n0 = threadIdx.x / 32 % 2 * 32;
    EpGemmTileScheduler sched = {0};
    EpGemmTile t;
    ep_tile_scheduler_enter(&p, EP_SIMPLE_TILE, 1, &sched);
    for (uint32_t n = blockIdx.x; ep_gemm_tile(&p, EP_SIMPLE_TILE, EP_SIMPLE_TILE, 1, 0, &sched, n, &t);
         n += gridDim.x) {
        for (uint32_t block = 0; block * EP_GEMM_SCALE_BLOCK < t.num_k; block++) {
            const uint32_t k0 = block * EP_GEMM_SCALE_BLOCK;
            wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc[2][2];
            for (int i = 0; i < 4; i++) wmma::fill_fragment(acc[i / 2][i % 2], 0.0f);
            for (uint32_t k = k0; k < min(t.num_k, k0 + EP_GEMM_SCALE_BLOCK); k += EP_SIMPLE_BK) {
                for (uint32_t i = threadIdx.x; i < EP_SIMPLE_TILE * EP_SIMPLE_BK; i += EP_SIMPLE_THREADS) {
                    const uint32_t line = i / EP_SIMPLE_BK, c = i % EP_SIMPLE_BK;
                    a[line * EP_SIMPLE_PITCH + c] = G::load_a(&p, &t, line, k + c);
                    b[line * EP_SIMPLE_PITCH + c] = G::load_b(&p, &t, line, k + c);
                }
                __syncthreads();
                for (int kk = 0; kk < EP_SIMPLE_BK; kk += 16) {
                    wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> fa[2];
                    wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> fb[2];
                    for (int i = 0; i < 2; i++) {
                        wmma::load_matrix_sync(fa[i], a + (m0 + 16 * i) * EP_SIMPLE_PITCH + kk,
                                               EP_SIMPLE_PITCH);
                        wmma::load_matrix_sync(fb[i], b + (n0 + 16 * i) * EP_SIMPLE_PITCH + kk,
                                               EP_SIMPLE_PITCH);
                    }
                    for (int i = 0; i < 4; i++)
                        wmma::mma_sync(acc[i / 2][i % 2], fa[i / 2], fb[i % 2], acc[i / 2][i % 2]);
                }
                __syncthreads();
            }
            for (int i = 0; i < 4; i++)
                wmma::store_matrix_sync(sums + (m0 + i / 2 * 16) * EP_SIMPLE_OUT_PITCH + n0 + i % 2 * 16,
                                        acc[i / 2][i % 2], EP_SIMPLE_OUT_PITCH, wmma::mem_row_major);
            __syncthreads();
            for (uint32_t i = threadIdx.x; i < EP_SIMPLE_TILE * EP_SIMPLE_TILE; i += EP_SIMPLE_THREADS) {
                const uint32_t row = i / EP_SIMPLE_TILE, col = i % EP_SIMPLE_TILE;
                const uint32_t at = row * EP_SIMPLE_OUT_PITCH + col;
                const float before = block ? results[at] : 0.0f;
                results[at] = fmaf(G::scale(&q, &t, row, col, block), sums[at], before);
            }
            __syncthreads();
        }
        EpSimpleGemm<ACT, F16, false>::write_tile(&p, &t, results);
        __syncthreads();
    }
}

#endif /* EP_GEMM_PORTABLE_FP8_CUH */
