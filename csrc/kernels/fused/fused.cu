/* fused.cu - the launcher of the megakernels: which kernel, how many CTAs, and the timeout within a CTA. */
#include <cuda_runtime_api.h>

#include "cuda/cluster_launch.h"
#include "kernels/fused/fused_params.h"
#include "kernels/gemm/gemm_tune.h"
#include "kernels/launch.h"

extern EpClusterKernel ep_mega_kernels_bf16[], ep_mega_kernels_f16[];
extern EpClusterKernel ep_mega_save_kernels_bf16[], ep_mega_save_kernels_f16[];
extern EpClusterKernel ep_mega_low_rank_kernels_bf16[], ep_mega_low_rank_kernels_f16[];
extern EpClusterKernel ep_mega_kernels_fp8_bf16[], ep_mega_kernels_fp8_f16[];

static bool is_fp8(uint32_t op) { return ep_op_dtype_of(op) == EP_IN_FP8; }
static EpClusterKernel *table_of(uint32_t op, const EpGemmParams *gemm, bool has_low) {
    if (has_low) return gemm->is_f16 ? ep_mega_low_rank_kernels_f16 : ep_mega_low_rank_kernels_bf16;
    if (is_fp8(op)) return gemm->is_f16 ? ep_mega_kernels_fp8_f16 : ep_mega_kernels_fp8_bf16;
    if (gemm->saves) return gemm->is_f16 ? ep_mega_save_kernels_f16 : ep_mega_save_kernels_bf16;
    return gemm->is_f16 ? ep_mega_kernels_f16 : ep_mega_kernels_bf16;
}

/* The limit of a wait within a CTA. It is longer than the waits that it depends on: those for a peer
 * (timeout_ns), then those for this rank's ready counters (twice that). */
static uint64_t block_limit_ns(const EpComm *c) {
    const uint64_t ns = c->timeout_ns < UINT64_MAX / 4 ? 4 * c->timeout_ns : UINT64_MAX;
    return ns < EP_GEMM_MIN_LIMIT_NS ? EP_GEMM_MIN_LIMIT_NS : ns;
}

/* A launch in preparation: one CTA on each SM that is not reserved, all of them resident. */
typedef struct {
    EpClusterKernel *kernel;
    uint32_t tile_cols, num_ctas;
} MegaLaunch;

/* Choose the kernel and the number of CTAs, and complete the parameters of the GEMM. op: EP_OP_WORD. has_low:
 * whether a product of low rank is added. There are no narrower tiles for it, as in launch_hopper_low_rank.
 */
static int prepare(uint32_t op, const EpComm *comm, EpGemmParams *gemm, bool has_low, MegaLaunch *m) {
    EpCapabilities c;
    uint32_t max_ctas;
    int e = ep_capabilities(&c);
    if (e) return e;
    if (!c.has_hopper) return (int)cudaErrorNoKernelImageForDevice;
    m->tile_cols = is_fp8(op) || has_low ? 256 : ep_gemm_tile_cols(gemm);
    m->kernel = ep_find_kernel(table_of(op, gemm, has_low), op, gemm, m->tile_cols);
    if (!m->kernel) return (int)cudaErrorInvalidValue;
    e = ep_load_kernel(m->kernel, &max_ctas);
    if (e) return e;
    const uint32_t most = c.num_sms > comm->reserve_sms + 1 ? (c.num_sms - comm->reserve_sms) / 2 * 2 : 2;
    m->num_ctas = most < max_ctas ? most : max_ctas;
    gemm->limit_ns = block_limit_ns(comm);
    gemm->tile_counter = &EP_AT(EpLocal, comm, comm->my_rank, comm->layout.local_off)->queue_tiles;
    return 0;
}

static int launch(const MegaLaunch *m, const void *params, const EpGemmParams *gemm, const EpLowRank *low,
                  void *stream) {
    EpGemmParams seen = *gemm;
    EpLowRank seen_low = low ? *low : (EpLowRank){NULL, NULL, 0};
    /* A tensor map cannot have a dimension of 0. Nothing is read. */
    if (seen.num_rows == 0) {
        seen.a = seen.b;
        seen_low.a = seen_low.b;
        seen.num_rows = 1;
    }
    const bool fp8 = is_fp8(m->kernel->op);
    const EpTensorMap a = ep_map_a(&seen, m->tile_cols), b = ep_map_b(&seen, m->tile_cols);
    EpClusterLaunch l = {m->num_ctas, true, params, fp8 ? ep_map_fp8(a) : a, fp8 ? ep_map_fp8(b) : b};
    if (seen_low.a) {
        const EpGemmParams of_low = ep_gemm_low_rank(&seen, &seen_low);
        l.low_a = ep_map_a(&of_low, m->tile_cols);
        l.low_b = ep_map_b(&of_low, m->tile_cols);
    }
    return ep_launch_clusters(m->kernel, &l, stream);
}

/* A rank that shares its GPU has fewer CTAs than the caller may have assumed. If all of them would only
 * receive, half of them receive and the other half sends. */
static void leave_senders(const MegaLaunch *m, EpDispatchGemmParams *p) {
    if (p->num_tail_blocks >= m->num_ctas) p->num_tail_blocks = m->num_ctas / 2;
}

extern "C" int ep_launch_dispatch_gemm(const EpDispatchGemmParams *p, const EpScales *scales, void *stream) {
    EpMegaFp8Params q = {*p, scales->rows, scales->gemm};
    MegaLaunch m;
    const int e =
        prepare(EP_OP_WORD(EP_OP_DISPATCH_GEMM, scales->dtype), &p->dispatch.comm, &q.gemm, false, &m);
    if (e) return e;
    leave_senders(&m, &q);
    return launch(&m, &q, &q.gemm, NULL, stream);
}
/* Into how many pieces the column tiles divide a row. */
static uint32_t num_row_pieces(const EpGemmParams *gemm, const MegaLaunch *m) {
    return (ep_gemm_num_cols(gemm) + m->tile_cols - 1) / m->tile_cols;
}
extern "C" int ep_launch_gemm_combine(const EpGemmCombineParams *p, const EpScales *scales, void *stream) {
    EpCombineFp8Params q = {*p, scales->gemm};
    MegaLaunch m;
    const int e = prepare(EP_OP_WORD(EP_OP_GEMM_COMBINE, scales->dtype), &p->combine.comm, &q.gemm,
                          p->low.a != NULL, &m);
    if (e) return e;
    q.combine.row_pieces = num_row_pieces(&q.gemm, &m);
    return launch(&m, &q, &q.gemm, &p->low, stream);
}

/* Load the megakernels, if this device has them. */
extern "C" int ep_preload_fused(void) {
    EpCapabilities c;
    uint32_t max_ctas;
    int e = ep_capabilities(&c);
    if (e || !c.has_hopper) return e;
    for (EpClusterKernel *table :
         {ep_mega_kernels_bf16, ep_mega_kernels_f16, ep_mega_save_kernels_bf16, ep_mega_save_kernels_f16,
          ep_mega_low_rank_kernels_bf16, ep_mega_low_rank_kernels_f16, ep_mega_kernels_fp8_bf16,
          ep_mega_kernels_fp8_f16})
        for (EpClusterKernel *k = table; k->function && !e; k++) e = ep_load_kernel(k, &max_ctas);
    return e;
}
