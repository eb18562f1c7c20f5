/* tensor_maps.c - tensor maps as the driver encodes them, cached for later launches.
 *
 * A map holds an address and a shape, and nothing of the memory at that address. So a map stays right if its
 * memory is freed and another tensor of the same shape gets the same address.
 *
 * The hash of a shape gives a set of EP_MAP_WAYS entries. If all are used, the oldest of the set is replaced.
 * The lock is not held while the driver is called. */
#include "cuda/tensor_maps.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <string.h>

_Static_assert(sizeof(EpTensorMap) == 14 * sizeof(uint64_t), "without padding: its bytes are compared");

typedef struct {
    EpTensorMap shapes[EP_MAP_WAYS];
    CUtensorMap maps[EP_MAP_WAYS];
    uint32_t num_used, oldest;
} MapSet;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* ranks may be threads of one process */
static MapSet sets[EP_MAP_SETS];

static MapSet *set_of(const EpTensorMap *shape) {
    uint64_t words[sizeof *shape / sizeof(uint64_t)];
    uint64_t hash = 0;
    memcpy(words, shape, sizeof words);
    for (uint32_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32; /* the upper bits depend on all bits of the word, and the lower ones do not */
    }
    return &sets[hash % EP_MAP_SETS];
}

/* The entry of a shape in its set, or EP_MAP_WAYS. */
static uint32_t entry_of(const MapSet *set, const EpTensorMap *shape) {
    for (uint32_t i = 0; i < set->num_used; i++)
        if (memcmp(&set->shapes[i], shape, sizeof *shape) == 0) return i;
    return EP_MAP_WAYS;
}

bool ep_find_tensor_map(const EpTensorMap *shape, CUtensorMap *map) {
    MapSet *set = set_of(shape);
    pthread_mutex_lock(&lock);
    const uint32_t at = entry_of(set, shape);
    if (at < EP_MAP_WAYS) *map = set->maps[at];
    pthread_mutex_unlock(&lock);
    return at < EP_MAP_WAYS;
}

/* Cache a map, unless another thread has cached it since. */
static void cache(const EpTensorMap *shape, const CUtensorMap *map) {
    MapSet *set = set_of(shape);
    pthread_mutex_lock(&lock);
    if (entry_of(set, shape) == EP_MAP_WAYS) {
        const uint32_t at = set->num_used < EP_MAP_WAYS ? set->num_used++ : set->oldest++ % EP_MAP_WAYS;
        set->shapes[at] = *shape;
        set->maps[at] = *map;
    }
    pthread_mutex_unlock(&lock);
}

/* The driver's function is looked up by name, because the library must also load without a driver. */
static PFN_cuTensorMapEncodeTiled_v12000 find_encoder(void) {
    static void *known; /* every thread that looks it up finds the same */
    void *f = __atomic_load_n(&known, __ATOMIC_RELAXED);
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (!f) {
        const cudaError_t e =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result);
        if (e != cudaSuccess || result != cudaDriverEntryPointSuccess) return NULL;
        __atomic_store_n(&known, f, __ATOMIC_RELAXED);
    }
    PFN_cuTensorMapEncodeTiled_v12000 encode_tiled;
    memcpy(&encode_tiled, &f, sizeof f);
    return encode_tiled;
}

int ep_encode_tensor_map(const EpTensorMap *s, CUtensorMap *map) {
    const PFN_cuTensorMapEncodeTiled_v12000 encode_tiled = find_encoder();
    cuuint64_t strides[4];
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    if (!encode_tiled) return (int)cudaErrorNotSupported;
    for (uint32_t i = 0; i + 1 < s->num_dims; i++) strides[i] = ep_map_number_bytes(s->type) * s->strides[i];
    const CUtensorMapDataType type = s->type == EP_MAP_E4M3  ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                     : s->type == EP_MAP_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult r = encode_tiled(map, type, s->num_dims, (void *)(uintptr_t)s->base, s->dims, strides,
                                    s->box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r == CUDA_SUCCESS) cache(s, map);
    return (int)r; /* cudaError_t has the same numbers */
}
