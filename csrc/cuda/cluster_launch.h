/* cluster_launch.h - launch the kernels that multiply: the grouped GEMMs and the megakernels.
 *
 * Their CTAs form clusters of two, and read their operands through tensor maps. What a launch must know is
 * asked once for each kernel and GPU, and tensor maps are cached (tensor_maps.c). */
#ifndef EP_CLUSTER_LAUNCH_H
#define EP_CLUSTER_LAUNCH_H
#include "cuda/capabilities.h"
#include "kernels/gemm/gemm_maps.h"

/* The smallest limit of waits within a CTA; see ep_mbar_wait. */
#define EP_GEMM_MIN_LIMIT_NS 10000000000ull

/* An instance of a kernel. A table of instances ends with one whose function is NULL. */
typedef struct {
    const void *function;
    uint32_t op;                       /* EP_OP_WORD of a megakernel; 0 for a GEMM alone */
    uint32_t kind;                     /* EpGemmKind */
    uint32_t tile_cols;                /* columns of a tile */
    uint32_t activation;               /* EP_ACT_KERNEL of what it computes */
    uint32_t num_threads;              /* of a CTA */
    uint32_t smem_bytes;               /* dynamic shared memory of a CTA */
    uint32_t max_ctas[EP_MAX_DEVICES]; /* CTAs that can be resident at once; 0 before the first question */
} EpClusterKernel;

typedef struct {
    uint32_t num_ctas;
    bool is_resident; /* all CTAs at once, or an error; otherwise they may run one after the other */
    const void *params;
    EpTensorMap a, b;         /* the operands */
    EpTensorMap low_a, low_b; /* those of a product of low rank; a base of NULL: there is none */
    bool needs_whole_sms;     /* no other CTA may be on the SM of a CTA */
} EpClusterLaunch;

#ifdef __cplusplus
extern "C" {
#endif
/* The instance in a table for this operation and product, or NULL. */
EpClusterKernel *ep_find_kernel(EpClusterKernel *table, uint32_t op, const EpGemmParams *p,
                                uint32_t tile_cols);
/* Load a kernel, and say how many CTAs of it can be resident at once on the current device: an even number,
 * at least 2. Returns a cudaError_t. */
int ep_load_kernel(EpClusterKernel *k, uint32_t *max_ctas);
/* Launch a kernel that was loaded on the current device. Returns a cudaError_t. */
int ep_launch_clusters(const EpClusterKernel *k, const EpClusterLaunch *l, void *stream);
#ifdef __cplusplus
}
#endif

#endif /* EP_CLUSTER_LAUNCH_H */
