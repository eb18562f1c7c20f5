/* cluster_launch.c - launches that repeat no question to the runtime, and encode no tensor map twice.
 *
 * Invariant: an error is not remembered. The next call asks again. */
#include "cuda/cluster_launch.h"

#include <cuda_runtime_api.h>
#include <string.h>

#include "cuda/tensor_maps.h"

EpClusterKernel *ep_find_kernel(EpClusterKernel *table, uint32_t op, const EpGemmParams *p,
                                uint32_t tile_cols) {
    for (EpClusterKernel *k = table; k->function; k++)
        if (k->op == op && k->kind == p->kind && k->activation == EP_ACT_KERNEL(p->activation.kind) &&
            k->tile_cols == tile_cols)
            return k;
    return NULL;
}

/* ---- what a launch must know ---- */

static void make_config(const EpClusterKernel *k, uint32_t num_ctas, void *stream,
                        cudaLaunchAttribute attributes[2], cudaLaunchConfig_t *config) {
    memset(attributes, 0, 2 * sizeof *attributes);
    memset(config, 0, sizeof *config);
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = 2;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    config->gridDim = (dim3){num_ctas, 1, 1};
    config->blockDim = (dim3){k->num_threads, 1, 1};
    config->dynamicSmemBytes = k->smem_bytes;
    config->stream = (cudaStream_t)stream;
    config->attrs = attributes;
    config->numAttrs = 1;
}

/* Allow the kernel its dynamic shared memory, and that of a whole SM if it needs less than half of it. This
 * call also loads the kernel, and gives the calling thread a current context. */
static cudaError_t allow_smem(const EpClusterKernel *k) {
    const uint32_t num_bytes = k->smem_bytes > EP_HALF_SM_SMEM_BYTES ? k->smem_bytes : EP_CTA_SMEM_BYTES;
    return cudaFuncSetAttribute(k->function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)num_bytes);
}

static cudaError_t ask(const EpClusterKernel *k, uint32_t *max_ctas) {
    EpCapabilities c;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config;
    int num_clusters = 0;
    cudaError_t e = (cudaError_t)ep_capabilities(&c);
    if (e != cudaSuccess) return e;
    make_config(k, c.num_sms / 2 * 2, NULL, attributes, &config);
    e = allow_smem(k);
    if (e == cudaSuccess) e = cudaOccupancyMaxActiveClusters(&num_clusters, k->function, &config);
    if (e == cudaSuccess && num_clusters <= 0) e = cudaErrorCooperativeLaunchTooLarge;
    if (e == cudaSuccess) *max_ctas = 2 * (uint32_t)num_clusters;
    return e;
}

/* No lock is held: loading a kernel may wait for a kernel that runs, and that one may wait for a rank that is
 * another thread of this process. Two threads may both ask: they get the same answer. */
int ep_load_kernel(EpClusterKernel *k, uint32_t *max_ctas) {
    uint32_t device;
    int e = ep_current_device(&device);
    if (e) return e;
    *max_ctas = __atomic_load_n(&k->max_ctas[device], __ATOMIC_ACQUIRE);
    if (*max_ctas) return 0;
    e = (int)ask(k, max_ctas);
    if (!e) __atomic_store_n(&k->max_ctas[device], *max_ctas, __ATOMIC_RELEASE);
    return e;
}

/* ---- launch ---- */

enum { NUM_MAPS = 4 };

static int find_maps(const EpClusterKernel *k, const EpClusterLaunch *l, CUtensorMap maps[NUM_MAPS]) {
    const EpTensorMap *const shapes[NUM_MAPS] = {&l->a, &l->b, &l->low_a, &l->low_b};
    const uint32_t num = l->low_a.base ? 4 : 2;
    uint32_t num_found = 0;
    while (num_found < num && ep_find_tensor_map(shapes[num_found], &maps[num_found])) num_found++;
    if (num_found == num) return 0;
    /* Another thread may have loaded the kernel, but this thread needs a context for the driver. */
    int e = (int)allow_smem(k);
    for (uint32_t i = num_found; i < num && !e; i++)
        if (!ep_find_tensor_map(shapes[i], &maps[i])) e = ep_encode_tensor_map(shapes[i], &maps[i]);
    return e;
}

int ep_launch_clusters(const EpClusterKernel *k, const EpClusterLaunch *l, void *stream) {
    CUtensorMap maps[NUM_MAPS];
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config;
    /* The runtime reads as many as the kernel has. */
    void *arguments[] = {(void *)(uintptr_t)l->params, &maps[0], &maps[1], &maps[2], &maps[3]};
    const int e = find_maps(k, l, maps);
    if (e) return e;
    make_config(k, l->num_ctas, stream, attributes, &config);
    if (l->needs_whole_sms) config.dynamicSmemBytes = EP_CTA_SMEM_BYTES;
    config.numAttrs = l->is_resident ? 2 : 1;
    return (int)cudaLaunchKernelExC(&config, k->function, arguments);
}
