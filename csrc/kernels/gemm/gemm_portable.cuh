/* gemm_portable.cuh - the grouped GEMM for any GPU from compute capability 8.0 on. Correct, not fast.
 *
 * A CTA of four warps computes one tile of 64 x 64 at a time. Operands are copied element by element to
 * shared memory, in any layout. Tensor cores multiply, and the sums return through shared memory. For a
 * gated activation the columns of a tile are gate, up, gate, up, ... */
#ifndef EP_GEMM_PORTABLE_CUH
#define EP_GEMM_PORTABLE_CUH
#include <mma.h>

#include "kernels/gemm/gemm_epilogue.cuh"
#include "kernels/gemm/gemm_tile_scheduler.h"

enum {
    EP_SIMPLE_TILE = 64,
    EP_SIMPLE_BK = 32,
    EP_SIMPLE_THREADS = 128,
    EP_SIMPLE_PITCH = EP_SIMPLE_BK + 8,
    EP_SIMPLE_OUT_PITCH = EP_SIMPLE_TILE + 4
};

template <int ACT, bool F16, bool ACCUMULATES> struct EpSimpleGemm {
    static constexpr bool GATED = EP_ACT_IS_GATED(ACT);
    using T = std::conditional_t<F16, __half, __nv_bfloat16>;

    /* The row of the weights for column c of the product. Columns alternate between gate and up; except for
     * GPT_OSS, the gate rows are the first half of the weights. */
    static __device__ uint32_t weight_row(const EpGemmParams *p, uint32_t c) {
        return GATED && !EP_ACT_IS_MIXED(ACT) ? c / 2 + c % 2 * (p->n / 2) : c;
    }
    /* Element c of the contraction, for row m of the tile (A) or column n of the tile (B). Zero outside of
     * the operands. */
    EP_HANDLES_ALL(EP_NUM_GEMM_KINDS, 3);
    static __device__ T load_a(const EpGemmParams *p, const EpGemmTile *t, uint32_t m, uint32_t c) {
        const T *a = (const T *)p->a;
        if (m >= t->num_rows || c >= t->num_k) return T(0.0f);
        if (p->kind == EP_GEMM_WGRAD) return a[(uint64_t)(t->k0 + c) * p->n + t->row0 + m];
        return a[(uint64_t)(t->row0 + m) * t->num_k + c];
    }
    static __device__ T load_b(const EpGemmParams *p, const EpGemmTile *t, uint32_t n, uint32_t c) {
        const T *b = (const T *)p->b;
        const uint32_t col = t->col0 + n;
        if (col >= ep_gemm_num_cols(p) || c >= t->num_k) return T(0.0f);
        if (p->kind == EP_GEMM_WGRAD) return b[(uint64_t)(t->k0 + c) * p->k + col];
        if (p->kind == EP_GEMM_DGRAD) return b[((uint64_t)t->expert * p->n + c) * p->k + col];
        return b[((uint64_t)t->expert * p->n + weight_row(p, col)) * p->k + c];
    }

    /* Elements of the contraction that follow those of the weights. */
    static __device__ uint32_t num_more(const void *) { return 0; }

    static __device__ void write_tile(const EpGemmParams *p, const EpGemmTile *t, const float *sums) {
        constexpr uint32_t COLS = EP_SIMPLE_TILE / (GATED ? 2 : 1);
        const uint32_t out_cols = ep_gemm_out_cols(p), first = t->col0 / (GATED ? 2 : 1);
        for (uint32_t i = threadIdx.x; i < EP_SIMPLE_TILE * COLS / 2; i += EP_SIMPLE_THREADS) {
            const uint32_t m = i / (COLS / 2), j = i % (COLS / 2) * 2, c = first + j;
            if (m >= t->num_rows || c >= out_cols) continue;
            const float *s = sums + m * EP_SIMPLE_OUT_PITCH + j * (GATED ? 2 : 1);
            float d[8] = {s[0], s[GATED ? 2 : 1], 0, 0, s[1], GATED ? s[3] : 0, 0, 0};
            const uint64_t row = t->row0 + m;
            if constexpr (ACCUMULATES) {
                float *out = (float *)p->out + ((uint64_t)t->expert * p->n + row) * out_cols + c;
                for (int k = 0; k < 2 && t->num_k; k++) out[k] = fmaf(p->scale, d[k], out[k]);
                continue;
            }
            if (p->bias) ep_gemm_add_bias<ACT, F16>(p, t->expert, c, d);
            if (ACT != EP_ACT_NONE && p->saves) ep_gemm_save_pair<ACT, F16>(p, row, c, d);
            ep_gemm_activate<ACT>(p, d, d);
            const float weight = !p->saves && p->row_weight ? p->row_weight[row] : 1.0f;
            const uint64_t base = p->kind == EP_GEMM_WGRAD ? (uint64_t)t->expert * p->n : 0;
            *(uint32_t *)((uint16_t *)p->out + (base + row) * out_cols + c) =
                ep_pack<F16>(d[0] * weight, d[1] * weight);
        }
    }
};

/* With a product of low rank (EpLowRank), whose elements of the contraction follow those of the weights. */
template <int ACT, bool F16> struct EpSimpleLowRankGemm : EpSimpleGemm<ACT, F16, false> {
    using Base = EpSimpleGemm<ACT, F16, false>;
    using T = typename Base::T;

    /* The product and the tile to which element c of the contraction belongs, and its number there. */
    struct Place {
        EpGemmParams p;
        EpGemmTile t;
        uint32_t c;
    };
    static __device__ Place place(const EpGemmLowRankParams *q, const EpGemmTile *t, uint32_t c) {
        const uint32_t num_k = t->num_k - q->low.r;
        Place at = {c < num_k ? q->gemm : ep_gemm_low_rank(&q->gemm, &q->low), *t, c < num_k ? c : c - num_k};
        at.t.num_k = c < num_k ? num_k : q->low.r;
        return at;
    }
    static __device__ uint32_t num_more(const EpGemmLowRankParams *q) { return q->low.r; }
    static __device__ T load_a(const EpGemmParams *p, const EpGemmTile *t, uint32_t m, uint32_t c) {
        const Place at = place((const EpGemmLowRankParams *)p, t, c);
        return Base::load_a(&at.p, &at.t, m, at.c);
    }
    static __device__ T load_b(const EpGemmLowRankParams *q, const EpGemmTile *t, uint32_t n, uint32_t c) {
        const Place at = place(q, t, c);
        return Base::load_b(&at.p, &at.t, n, at.c);
    }
};

/* G: EpSimpleGemm, or one that derives from it and loads other operands. Params: its parameters, which are
 * EpGemmParams or begin with them. */
template <typename G, typename Params> EP_PTX void simple_gemm(const EpGemmParams &p, const Params &params) {
    using namespace nvcuda;
    using T = typename G::T;
    __shared__ __align__(32) T a[EP_SIMPLE_TILE * EP_SIMPLE_PITCH], b[EP_SIMPLE_TILE * EP_SIMPLE_PITCH];
    __shared__ __align__(32) float sums[EP_SIMPLE_TILE * EP_SIMPLE_OUT_PITCH];
    const uint32_t m0 = threadIdx.x / 64 * 32,
                   n0 = threadIdx.x / 32 % 2 * 32; /* first row and column of the warp */
    const bool a_by_row = p.kind != EP_GEMM_WGRAD, b_by_row = p.kind == EP_GEMM_FORWARD;
    EpGemmTileScheduler sched = {0};
    EpGemmTile t;
    ep_tile_scheduler_enter(&p, EP_SIMPLE_TILE, 1, &sched);
    for (uint32_t n = blockIdx.x; ep_gemm_tile(&p, EP_SIMPLE_TILE, EP_SIMPLE_TILE, 1, 0, &sched, n, &t);
         n += gridDim.x) {
        t.num_k += G::num_more(&params);
        wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc[2][2];
        for (int i = 0; i < 4; i++) wmma::fill_fragment(acc[i / 2][i % 2], 0.0f);
        for (uint32_t k = 0; k < t.num_k; k += EP_SIMPLE_BK) {
            for (uint32_t i = threadIdx.x; i < EP_SIMPLE_TILE * EP_SIMPLE_BK; i += EP_SIMPLE_THREADS) {
                const uint32_t am = a_by_row ? i / EP_SIMPLE_BK : i % EP_SIMPLE_TILE;
                const uint32_t ac = a_by_row ? i % EP_SIMPLE_BK : i / EP_SIMPLE_TILE;
                const uint32_t bn = b_by_row ? i / EP_SIMPLE_BK : i % EP_SIMPLE_TILE;
                const uint32_t bc = b_by_row ? i % EP_SIMPLE_BK : i / EP_SIMPLE_TILE;
                a[am * EP_SIMPLE_PITCH + ac] = G::load_a(&p, &t, am, k + ac);
                b[bn * EP_SIMPLE_PITCH + bc] = G::load_b(&params, &t, bn, k + bc);
            }
            __syncthreads();
            for (int kk = 0; kk < EP_SIMPLE_BK; kk += 16) {
                wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> fa[2];
                wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> fb[2];
                for (int i = 0; i < 2; i++) {
                    wmma::load_matrix_sync(fa[i], a + (m0 + 16 * i) * EP_SIMPLE_PITCH + kk, EP_SIMPLE_PITCH);
                    wmma::load_matrix_sync(fb[i], b + (n0 + 16 * i) * EP_SIMPLE_PITCH + kk, EP_SIMPLE_PITCH);
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
        G::write_tile(&p, &t, sums);
        __syncthreads();
    }
}

template <int ACT, bool F16, bool ACCUMULATES> __global__ void __launch_bounds__(EP_SIMPLE_THREADS)
    simple_gemm_kernel(const __grid_constant__ EpGemmParams p) {
    simple_gemm<EpSimpleGemm<ACT, F16, ACCUMULATES>>(p, p);
}

template <int ACT, bool F16> __global__ void __launch_bounds__(EP_SIMPLE_THREADS)
    simple_low_rank_gemm_kernel(const __grid_constant__ EpGemmLowRankParams q) {
    simple_gemm<EpSimpleLowRankGemm<ACT, F16>>(q.gemm, q);
}

#endif /* EP_GEMM_PORTABLE_CUH */
