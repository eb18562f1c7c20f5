/* cluster_launch.c - launches that repeat no question to the runtime, and encode no tensor map twice.
 *
 * Invariant: an error is not remembered. The next call asks again. */
#include "cuda/cluster_launch.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

/* Ranks may be threads of one process. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EpClusterKernel *ep_find_kernel(EpClusterKernel *table, uint32_t op, const EpGemmParams *p,
                                uint32_t tile_cols) {
    for (EpClusterKernel *k = table; k->function; k++)
        if (k->op == op && k->kind == p->kind && k->activation == p->activation && k->tile_cols == tile_cols)
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

/* Allow the kernel its dynamic shared memory. This call also loads the kernel, and gives the calling thread a
 * current context. */
static cudaError_t allow_smem(const EpClusterKernel *k) {
    return cudaFuncSetAttribute(k->function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)k->smem_bytes);
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

int ep_load_kernel(EpClusterKernel *k, uint32_t *max_ctas) {
    uint32_t device;
    int e = ep_current_device(&device);
    if (e) return e;
    pthread_mutex_lock(&lock);
    if (k->max_ctas[device] == 0) e = (int)ask(k, &k->max_ctas[device]);
    *max_ctas = k->max_ctas[device];
    pthread_mutex_unlock(&lock);
    return e;
}

/* ---- tensor maps ---- */

/* A map holds an address and a shape, and nothing of the memory behind the address. So a map stays right if
 * its memory is freed and another tensor of the same shape gets the same address. Each description has one
 * place, given by its hash. A new map replaces the map that is there. */
enum { NUM_MAPS = 1024 };
#define KEY_BYTES (offsetof(EpTensorMap, box) + sizeof(uint32_t[5])) /* without the padding at the end */
static struct {
    bool is_valid;
    EpTensorMap key;
    CUtensorMap map;
} maps[NUM_MAPS];

static uint32_t place_of(const EpTensorMap *key) {
    uint64_t hash = 0xcbf29ce484222325u;
    const uint64_t words[] = {(uintptr_t)key->base, key->dims[0], key->dims[1], key->dims[2], key->box[1]};
    for (uint32_t i = 0; i < sizeof words / sizeof words[0]; i++)
        hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(hash >> 40) % NUM_MAPS;
}

/* The driver's function is looked up by name, because the library must also load without a driver. The driver
 * needs a current context in this thread. */
static cudaError_t encode(const EpTensorMap *s, CUtensorMap *map) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode_tiled;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    cuuint64_t strides[4];
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    if (!encode_tiled) {
        void *f = NULL;
        const cudaError_t e =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result);
        if (e != cudaSuccess || result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
        memcpy(&encode_tiled, &f, sizeof f);
    }
    for (uint32_t i = 0; i + 1 < s->num_dims; i++) strides[i] = 2 * s->strides[i];
    const CUresult r = encode_tiled(
        map, s->is_f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, s->num_dims,
        (void *)(uintptr_t)s->base, s->dims, strides, s->box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return (cudaError_t)r; /* both enumerations have the same numbers */
}

/* The tensor map of an operand of the kernel. Another thread may have loaded the kernel, so this thread may
 * still need a context for the driver. */
static cudaError_t map_of(const EpClusterKernel *k, const EpTensorMap *key, CUtensorMap *map) {
    cudaError_t e = cudaSuccess;
    const uint32_t i = place_of(key);
    pthread_mutex_lock(&lock);
    if (!maps[i].is_valid || memcmp(&maps[i].key, key, KEY_BYTES)) {
        maps[i].is_valid = false;
        e = allow_smem(k);
        if (e == cudaSuccess) e = encode(key, &maps[i].map);
        if (e == cudaSuccess) {
            maps[i].key = *key;
            maps[i].is_valid = true;
        }
    }
    *map = maps[i].map;
    pthread_mutex_unlock(&lock);
    return e;
}

int ep_launch_clusters(const EpClusterKernel *k, const EpClusterLaunch *l, void *stream) {
    CUtensorMap a, b;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config;
    void *arguments[] = {(void *)(uintptr_t)l->params, &a, &b};
    cudaError_t e = map_of(k, &l->a, &a);
    if (e == cudaSuccess) e = map_of(k, &l->b, &b);
    if (e != cudaSuccess) return (int)e;
    make_config(k, l->num_ctas, stream, attributes, &config);
    config.numAttrs = l->is_resident ? 2 : 1;
    return (int)cudaLaunchKernelExC(&config, k->function, arguments);
}
