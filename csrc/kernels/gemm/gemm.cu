/* gemm.cu - the launcher of the grouped GEMM: which kernel, and how many CTAs. */
#include <cuda_runtime_api.h>

#include "cuda/cluster_launch.h"
#include "cuda/tile_counters.h"
#include "kernels/gemm/gemm_portable_fp8.cuh"
#include "kernels/gemm/gemm_portable_w4.cuh"
#include "kernels/gemm/gemm_tune.h"
#include "kernels/gemm/gemm_w4.h"
#include "kernels/launch.h"

extern EpClusterKernel ep_gemm_kernels_bf16[], ep_gemm_kernels_f16[];
extern EpClusterKernel ep_gemm_save_kernels_bf16[], ep_gemm_save_kernels_f16[];
extern EpClusterKernel ep_gemm_low_rank_kernels_bf16[], ep_gemm_low_rank_kernels_f16[];
extern EpClusterKernel ep_gemm_narrow_kernels_bf16[], ep_gemm_narrow_kernels_f16[];
extern EpClusterKernel ep_gemm_narrow_few_kernels_bf16[], ep_gemm_narrow_few_kernels_f16[];
extern EpClusterKernel ep_gemm_kernels_fp8_bf16[], ep_gemm_kernels_fp8_f16[];
extern EpClusterKernel ep_gemm_kernels_sum_scaled_bf16[], ep_gemm_kernels_sum_scaled_f16[];
extern EpClusterKernel ep_gemm_kernels_accumulate_bf16[], ep_gemm_kernels_accumulate_f16[];

/* They are 0 when the module is loaded, and after each launch. */
static __device__ uint64_t tile_counters[EP_NUM_COUNTERS * EP_COUNTER_STRIDE];

extern "C" int ep_counter_memory(uint64_t **memory) {
    return (int)cudaGetSymbolAddress((void **)memory, tile_counters);
}

template <bool F16>
static int launch_portable(const EpGemmParams *p, uint32_t num_blocks, cudaStream_t stream) {
    if (p->accumulates) {
        simple_gemm_kernel<EP_ACT_NONE, F16, true><<<num_blocks, EP_SIMPLE_THREADS, 0, stream>>>(*p);
        return (int)cudaGetLastError();
    }
#define EP_CASE(ACT)                                                                           \
    if (EP_ACT_KERNEL(p->activation.kind) == ACT) {                                            \
        simple_gemm_kernel<ACT, F16, false><<<num_blocks, EP_SIMPLE_THREADS, 0, stream>>>(*p); \
        return (int)cudaGetLastError();                                                        \
    }
    EP_ACT_KERNELS(EP_CASE)
#undef EP_CASE
    return (int)cudaErrorInvalidValue;
}

/* A thread has eight columns, which belong to one adapter. */
static __global__ void __launch_bounds__(EP_SIMPLE_THREADS)
    own_columns_kernel(const __grid_constant__ EpGemmNarrowParams p) {
    const uint32_t num_cols = ep_gemm_num_cols(&p.gemm);
    const uint64_t i = (uint64_t)blockIdx.x * EP_SIMPLE_THREADS + threadIdx.x, row = i / (num_cols / 8);
    const uint32_t col = (uint32_t)(i % (num_cols / 8)) * 8;
    if (row >= ep_gemm_clamp_row(&p.gemm, p.gemm.offsets[0]) && row < p.gemm.num_rows &&
        row < ep_gemm_clamp_row(&p.gemm, p.gemm.offsets[p.gemm.num_experts]) &&
        col - ep_first_own_column(&p.own, row, num_cols) >= p.own.of_adapter)
        *(uint4 *)((uint16_t *)p.gemm.out + row * num_cols + col) = make_uint4(0, 0, 0, 0);
}
/* After the portable kernel: of each row keep the columns of its own adapter. */
static int launch_own_columns(const EpGemmParams *p, const EpOwnColumns *own, cudaStream_t stream) {
    const EpGemmNarrowParams q = {*p, *own};
    const uint64_t num = (uint64_t)p->num_rows * (ep_gemm_num_cols(p) / 8);
    own_columns_kernel<<<(uint32_t)((num + EP_SIMPLE_THREADS - 1) / EP_SIMPLE_THREADS), EP_SIMPLE_THREADS, 0,
                         stream>>>(q);
    return (int)cudaGetLastError();
}

template <bool F16>
static int launch_portable_w4(const EpGemmW4Params *p, uint32_t num_blocks, cudaStream_t stream) {
#define EP_CASE(ACT)                                                                       \
    if (EP_ACT_KERNEL(p->gemm.activation.kind) == ACT) {                                   \
        simple_w4_gemm_kernel<ACT, F16><<<num_blocks, EP_SIMPLE_THREADS, 0, stream>>>(*p); \
        return (int)cudaGetLastError();                                                    \
    }
    EP_ACT_KERNELS(EP_CASE)
#undef EP_CASE
    return (int)cudaErrorInvalidValue;
}

template <bool F16>
static int launch_portable_fp8(const EpGemmFp8Params *p, uint32_t num_blocks, cudaStream_t stream) {
#define EP_CASE(ACT)                                                                        \
    if (EP_ACT_KERNEL(p->gemm.activation.kind) == ACT) {                                    \
        simple_fp8_gemm_kernel<ACT, F16><<<num_blocks, EP_SIMPLE_THREADS, 0, stream>>>(*p); \
        return (int)cudaGetLastError();                                                     \
    }
    EP_ACT_KERNELS(EP_CASE)
#undef EP_CASE
    return (int)cudaErrorInvalidValue;
}

template <bool F16>
static int launch_portable_low_rank(const EpGemmLowRankParams *p, uint32_t num_blocks, cudaStream_t stream) {
#define EP_CASE(ACT)                                                                             \
    if (EP_ACT_KERNEL(p->gemm.activation.kind) == ACT) {                                         \
        simple_low_rank_gemm_kernel<ACT, F16><<<num_blocks, EP_SIMPLE_THREADS, 0, stream>>>(*p); \
        return (int)cudaGetLastError();                                                          \
    }
    EP_ACT_KERNELS(EP_CASE)
#undef EP_CASE
    return (int)cudaErrorInvalidValue;
}

static int launch_hopper(const EpGemmParams *p, uint32_t num_sms, void *stream) {
    const uint32_t tile_cols = p->is_small_m ? 64 : ep_gemm_tile_cols(p);
    EpClusterKernel *table = p->is_f16 ? ep_gemm_kernels_f16 : ep_gemm_kernels_bf16;
    if (p->accumulates) table = p->is_f16 ? ep_gemm_kernels_accumulate_f16 : ep_gemm_kernels_accumulate_bf16;
    if (p->saves) table = p->is_f16 ? ep_gemm_save_kernels_f16 : ep_gemm_save_kernels_bf16;
    EpClusterKernel *k = ep_find_kernel(table, 0, p, tile_cols);
    uint32_t max_ctas;
    if (!k) return (int)cudaErrorInvalidValue;
    const int e = ep_load_kernel(k, &max_ctas);
    if (e) return e;
    EpGemmParams q = *p;
    q.limit_ns = EP_GEMM_MIN_LIMIT_NS;
    const EpClusterLaunch l = {num_sms / 2 * 2, false, &q, ep_map_a(p, tile_cols), ep_map_b(p, tile_cols)};
    return ep_launch_clusters(k, &l, stream);
}

static int launch_narrow(const EpGemmParams *p, const EpOwnColumns *own, const EpCapabilities *c,
                         void *stream) {
    const uint32_t tile_cols = ep_gemm_narrow_cols(p, own);
    const bool is_few = p->is_small_m;
    EpClusterKernel *table =
        is_few      ? p->is_f16 ? ep_gemm_narrow_few_kernels_f16 : ep_gemm_narrow_few_kernels_bf16
        : p->is_f16 ? ep_gemm_narrow_kernels_f16
                    : ep_gemm_narrow_kernels_bf16;
    EpClusterKernel *k = ep_find_kernel(table, 0, p, tile_cols);
    uint32_t max_ctas;
    if (!k) return (int)cudaErrorInvalidValue;
    const int e = ep_load_kernel(k, &max_ctas);
    if (e) return e;
    EpGemmNarrowParams q = {*p, own ? *own : (EpOwnColumns){NULL, 0}};
    q.gemm.limit_ns = EP_GEMM_MIN_LIMIT_NS;
    /* No more CTAs than there can be tiles. An expert has at most one row block that is not full. */
    const uint64_t M = p->num_rows, most_blocks = M / 64 + p->num_experts;
    const uint64_t most_tiles = M < most_blocks ? M : most_blocks;
    const EpTensorMap rows = ep_map_rows(p, p->a, p->kind == EP_GEMM_FORWARD ? p->k : p->n, is_few ? 16 : 64);
    const EpTensorMap columns = ep_map_b(p, 2 * tile_cols);
    EpTensorMap group = columns;
    if (own) group.box[1] = 16;
    EpClusterLaunch l = {most_tiles < max_ctas ? (uint32_t)(most_tiles + 1) / 2 * 2 : max_ctas,
                         false,
                         &q,
                         rows,
                         columns,
                         group,
                         group};
    l.needs_whole_sms = c->is_shared && k->smem_bytes <= EP_HALF_SM_SMEM_BYTES; /* as in launch_hopper_w4 */
    return ep_launch_clusters(k, &l, stream);
}

/* A tile of a gate with all gate rows first has as many gate columns as up columns. The 64 gates of a piece,
 * or the 32 of a tile for small M, must have one scale, and so must their ups. */
static bool has_whole_blocks(const EpGemmFp8Params *p) {
    const EpGemmParams *g = &p->gemm;
    return !EP_ACT_IS_GATED(g->activation.kind) || EP_ACT_IS_MIXED(g->activation.kind) ||
           ep_gemm_scales_sums(&p->scales) || g->n / 2 % (g->is_small_m ? 32 : 64) == 0;
}

static int launch_hopper_fp8(const EpGemmFp8Params *p, uint32_t num_sms, void *stream) {
    /* With a scale for each row, the kernel is the same for all sizes, and so are the bits. */
    const bool sums = ep_gemm_scales_sums(&p->scales) && (p->scales.a_row || !p->gemm.is_small_m);
    const bool small_m = p->gemm.is_small_m && !sums;
    const uint32_t tile_cols = small_m ? 64 : 256;
    EpClusterKernel *table = p->gemm.is_f16 ? sums ? ep_gemm_kernels_sum_scaled_f16 : ep_gemm_kernels_fp8_f16
                             : sums         ? ep_gemm_kernels_sum_scaled_bf16
                                            : ep_gemm_kernels_fp8_bf16;
    EpClusterKernel *k = ep_find_kernel(table, 0, &p->gemm, tile_cols);
    uint32_t max_ctas;
    if (!k) return (int)cudaErrorInvalidValue;
    const int e = ep_load_kernel(k, &max_ctas);
    if (e) return e;
    EpGemmFp8Params q = *p;
    q.gemm.limit_ns = EP_GEMM_MIN_LIMIT_NS;
    const EpClusterLaunch l = {num_sms / 2 * 2, false, &q, ep_map_fp8(ep_map_a(&p->gemm, tile_cols)),
                               ep_map_fp8(ep_map_b(&p->gemm, tile_cols))};
    return ep_launch_clusters(k, &l, stream);
}

static int launch_hopper_w4(const EpGemmW4Params *p, const EpCapabilities *c, void *stream) {
    const uint32_t num_sms = c->num_sms;
    const bool is_large = !p->gemm.is_small_m, f16 = p->gemm.is_f16;
    EpGemmW4Kernels *tables = p->weights.format == EP_MXFP4
                                  ? f16 ? &ep_gemm_kernels_mxfp4_f16 : &ep_gemm_kernels_mxfp4_bf16
                              : f16 ? &ep_gemm_kernels_int4_f16
                                    : &ep_gemm_kernels_int4_bf16;
    EpClusterKernel *k = ep_find_kernel((*tables)[is_large], 0, &p->gemm, 128);
    uint32_t max_ctas;
    if (!k) return (int)cudaErrorInvalidValue;
    const int e = ep_load_kernel(k, &max_ctas);
    if (e) return e;
    EpGemmW4Params q = *p;
    q.gemm.limit_ns = EP_GEMM_MIN_LIMIT_NS;
    const EpTensorMap rows = ep_map_w4_rows(&p->gemm, is_large);
    /* No more pairs than there can be tiles: with few rows and narrow weights most would end at once. A row
     * block that is not full is the last one of its expert. */
    const uint64_t M = p->gemm.num_rows, most_blocks = M / 16 + p->gemm.num_experts;
    const uint64_t most_tiles = (M < most_blocks ? M : most_blocks) * ((p->gemm.n + 127) / 128);
    const uint32_t num_pairs = num_sms / 2 * (is_large || c->is_shared ? 1 : 2);
    const uint32_t num_ctas = 2 * (most_tiles < num_pairs ? (uint32_t)most_tiles : num_pairs);
    EpClusterLaunch l = {num_ctas, false, &q, rows, rows};
    /* Where ranks share a GPU, a CTA has its SM alone, as in the other kernels. With half of an SM,
     * these CTAs did not end while CTAs of other ranks waited for their rows (docs/experiments, E-150). */
    l.needs_whole_sms = c->is_shared && !is_large;
    return ep_launch_clusters(k, &l, stream);
}

static int launch_hopper_low_rank(const EpGemmLowRankParams *p, uint32_t num_sms, void *stream) {
    const EpGemmParams *g = &p->gemm;
    /* There are no narrower tiles: they would pay for few columns only. */
    const uint32_t tile_cols = g->is_small_m ? 64 : 256;
    EpClusterKernel *table = g->is_f16 ? ep_gemm_low_rank_kernels_f16 : ep_gemm_low_rank_kernels_bf16;
    EpClusterKernel *k = ep_find_kernel(table, 0, g, tile_cols);
    uint32_t max_ctas;
    if (!k) return (int)cudaErrorInvalidValue;
    const int e = ep_load_kernel(k, &max_ctas);
    if (e) return e;
    EpGemmLowRankParams q = *p;
    q.gemm.limit_ns = EP_GEMM_MIN_LIMIT_NS;
    const EpGemmParams low = ep_gemm_low_rank(g, &p->low);
    const EpClusterLaunch l = {num_sms / 2 * 2,
                               false,
                               &q,
                               ep_map_a(g, tile_cols),
                               ep_map_b(g, tile_cols),
                               ep_map_a(&low, tile_cols),
                               ep_map_b(&low, tile_cols)};
    return ep_launch_clusters(k, &l, stream);
}

static int launch_low_rank(const EpGemmLowRankParams *p, const EpCapabilities *c, void *stream) {
    const EpGemmParams *g = &p->gemm;
    if (g->num_rows == 0 || g->num_experts == 0) return 0;
    if (c->has_hopper && !g->is_portable) return launch_hopper_low_rank(p, c->num_sms, stream);
    return (g->is_f16 ? launch_portable_low_rank<true>
                      : launch_portable_low_rank<false>)(p, 4 * c->num_sms, (cudaStream_t)stream);
}

static int launch_w4(const EpGemmW4Params *p, const EpCapabilities *c, void *stream) {
    const EpGemmParams *g = &p->gemm;
    if (g->num_rows == 0 || g->num_experts == 0) return 0;
    if (c->has_hopper && !g->is_portable) return launch_hopper_w4(p, c, stream);
    return (g->is_f16 ? launch_portable_w4<true> : launch_portable_w4<false>)(p, 4 * c->num_sms,
                                                                              (cudaStream_t)stream);
}

static int launch_fp8(const EpGemmFp8Params *p, const EpCapabilities *c, void *stream) {
    const EpGemmParams *g = &p->gemm;
    if (g->num_rows == 0 || g->num_experts == 0) return 0;
    if (c->has_hopper && !g->is_portable && has_whole_blocks(p))
        return launch_hopper_fp8(p, c->num_sms, stream);
    return (g->is_f16 ? launch_portable_fp8<true> : launch_portable_fp8<false>)(p, 4 * c->num_sms,
                                                                                (cudaStream_t)stream);
}

static int launch_16_bits(const EpGemmParams *p, const EpOwnColumns *own, const EpCapabilities *c,
                          void *stream) {
    const bool must_write = p->kind == EP_GEMM_WGRAD && !p->accumulates; /* zeros, without rows */
    if ((p->num_rows == 0 && !must_write) || p->num_experts == 0) return 0;
    /* A tensor map cannot have a dimension of 0. */
    if (c->has_hopper && p->num_rows > 0 && !p->is_portable)
        return own || ep_gemm_narrow_cols(p, own) ? launch_narrow(p, own, c, stream)
                                                  : launch_hopper(p, c->num_sms, stream);
    const int failed =
        (p->is_f16 ? launch_portable<true> : launch_portable<false>)(p, 4 * c->num_sms, (cudaStream_t)stream);
    return failed || !own ? failed : launch_own_columns(p, own, (cudaStream_t)stream);
}

/* The rows of no expert are few as a rule. So this takes a launch, and not the time of a memset of all rows.
 * A row of out has a multiple of 8 numbers. */
static __global__ void __launch_bounds__(EP_SIMPLE_THREADS)
    clear_kernel(const __grid_constant__ EpGemmParams p) {
    const uint64_t pieces = ep_gemm_out_cols(&p) / 8; /* of 16 bytes, of a row */
    const uint32_t first = ep_gemm_clamp_row(&p, p.offsets[0]);
    const uint32_t end = ep_gemm_clamp_row(&p, p.offsets[p.num_experts]);
    const uint64_t before = first * pieces, after = end < first ? 0 : (p.num_rows - end) * pieces;
    const uint64_t step = (uint64_t)gridDim.x * EP_SIMPLE_THREADS;
    for (uint64_t i = (uint64_t)blockIdx.x * EP_SIMPLE_THREADS + threadIdx.x; i < before + after; i += step)
        ((uint4 *)p.out)[i < before ? i : end * pieces + (i - before)] = make_uint4(0, 0, 0, 0);
}
static int launch_clear(const EpGemmParams *p, uint32_t num_sms, cudaStream_t stream) {
    const uint64_t pieces = (uint64_t)p->num_rows * (ep_gemm_out_cols(p) / 8);
    const uint64_t most = (pieces + EP_SIMPLE_THREADS - 1) / EP_SIMPLE_THREADS;
    const uint32_t num_ctas = most < (uint64_t)num_sms ? (uint32_t)most : num_sms;
    if (num_ctas == 0) return 0;
    clear_kernel<<<num_ctas, EP_SIMPLE_THREADS, 0, stream>>>(*p);
    return (int)cudaGetLastError();
}

extern "C" int ep_launch_gemm(const EpGemmParams *p, const EpGemmScales *scales, const EpFourBit *four_bit,
                              const EpLowRank *low_rank, const EpOwnColumns *own, void *stream) {
    EpCapabilities c;
    int e = ep_capabilities(&c);
    if (e) return e;
    if (four_bit) {
        const EpGemmW4Params q = {*p, *four_bit};
        e = launch_w4(&q, &c, stream);
    } else if (low_rank) {
        const EpGemmLowRankParams q = {*p, *low_rank};
        e = launch_low_rank(&q, &c, stream);
    } else if (scales) {
        const EpGemmFp8Params q = {*p, *scales};
        e = launch_fp8(&q, &c, stream);
    } else e = launch_16_bits(p, own, &c, stream);
    return e || !p->clears ? e : launch_clear(p, c.num_sms, (cudaStream_t)stream);
}
