/* test_launch.c - which calls of the CUDA runtime a launch makes, with a fake runtime that counts them.
 *
 * Each test has kernels and buffers of its own, because the library keeps what it learns until the process
 * ends. A fake tensor map holds the shape for which it was encoded, so that the fake launch can check it. */
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "cuda/cluster_launch.h"
#include "cuda/tensor_maps.h"
#include "harness.h"

/* ---- the fake runtime ---- */

/* The calls, in the order in which the first launch on a device makes them. cudaGetDevice is not counted: it
 * asks the driver nothing. */
enum { DEVICE, PTX, ATTRIBUTE, OCCUPANCY, ENTRY_POINT, ENCODE, LAUNCH, NUM_CALLS };
static _Atomic uint32_t num_calls[NUM_CALLS];
static _Thread_local int failing = NUM_CALLS; /* this call fails in this thread */
static _Thread_local int current_device;

enum { NUM_SMS = 132, NUM_PAIRS = 64, OTHER_NUM_PAIRS = 8, SMEM_BYTES = 200000, NUM_THREADS = 384 };
/* On this device fewer pairs than SMs can run at once. */
enum { SMALL_DEVICE = 5 };
/* On this device the module has only PTX of an older architecture; the other devices have code for sm_90a. */
enum { PTX_DEVICE = 6 };

static cudaError_t called(int call) {
    num_calls[call]++;
    return failing == call ? cudaErrorInvalidValue : cudaSuccess;
}

void test_set_device(int device) { current_device = device; }
cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int device) {
    (void)device;
    *value = what == cudaDevAttrComputeCapabilityMajor         ? 9
             : what == cudaDevAttrComputeCapabilityMinor       ? 1
             : what == cudaDevAttrMultiProcessorCount          ? NUM_SMS
             : what == cudaDevAttrMaxSharedMemoryPerBlockOptin ? SMEM_BYTES + 1024
                                                               : -1;
    return called(DEVICE);
}
int ep_ptx_version(int *version) {
    *version = current_device == PTX_DEVICE ? 80 : 90;
    return (int)called(PTX);
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute what, int value) {
    const bool ok = function && what == cudaFuncAttributeMaxDynamicSharedMemorySize && value == SMEM_BYTES;
    const cudaError_t e = called(ATTRIBUTE);
    return ok ? e : cudaErrorNotSupported;
}
cudaError_t cudaOccupancyMaxActiveClusters(int *num_clusters, const void *function,
                                           const cudaLaunchConfig_t *config) {
    const bool ok = function && config->blockDim.x == NUM_THREADS && config->dynamicSmemBytes == SMEM_BYTES &&
                    config->numAttrs == 1 && config->attrs[0].id == cudaLaunchAttributeClusterDimension;
    *num_clusters = current_device == SMALL_DEVICE ? OTHER_NUM_PAIRS : NUM_PAIRS;
    const cudaError_t e = called(OCCUPANCY);
    return ok ? e : cudaErrorNotSupported;
}

/* Put the shape into the map. */
static void fill_map(CUtensorMap *map, bool is_f16, uint32_t num_dims, const void *base,
                     const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box) {
    memset(map, 0, sizeof *map);
    map->opaque[0] = (uint64_t)(uintptr_t)base;
    map->opaque[1] = (uint64_t)is_f16 << 32 | num_dims;
    for (uint32_t i = 0; i < num_dims; i++) map->opaque[2 + i] = dims[i] << 32 | box[i];
    for (uint32_t i = 0; i + 1 < num_dims; i++) map->opaque[7 + i] = strides[i];
}
static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t num_dims, void *base,
                       const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                       const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    (void)steps, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    fill_map(map, type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16, num_dims, base, dims, strides, box);
    return called(ENCODE) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    if (test_find_context_function(name, version, function)) {
        *result = cudaDriverEntryPointSuccess;
        return cudaSuccess;
    }
    const PFN_cuTensorMapEncodeTiled_v12000 found = encode;
    const bool ok = strcmp(name, "cuTensorMapEncodeTiled") == 0 && version == 12000 && flags == 0;
    const cudaError_t e = called(ENTRY_POINT);
    memcpy(function, &found, sizeof *function);
    *result = ok && e == cudaSuccess ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return e;
}

/* What the newest launch of this thread was given. */
static _Thread_local struct {
    const void *function, *params;
    uint32_t num_ctas, num_attributes;
    CUtensorMap map_a, map_b;
} launched;
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    launched.function = function;
    launched.params = arguments[0];
    launched.num_ctas = config->gridDim.x;
    launched.num_attributes = config->numAttrs;
    memcpy(&launched.map_a, arguments[1], sizeof launched.map_a);
    memcpy(&launched.map_b, arguments[2], sizeof launched.map_b);
    return called(LAUNCH);
}

/* ---- launches ---- */

static void clear_counts(void) {
    for (uint32_t i = 0; i < NUM_CALLS; i++) num_calls[i] = 0;
}
static uint32_t num_all(void) {
    uint32_t num = 0;
    for (uint32_t i = 0; i < NUM_CALLS; i++) num += num_calls[i];
    return num;
}
/* Whether these calls were made since clear_counts. */
static bool counts_are(uint32_t ptx, uint32_t occupancy, uint32_t encode_, uint32_t launch) {
    return num_calls[DEVICE] == 4 * ptx && num_calls[PTX] == ptx && num_calls[OCCUPANCY] == occupancy &&
           num_calls[ENCODE] == encode_ && num_calls[LAUNCH] == launch;
}

/* Nothing is executed, so any addresses are good: a new kernel has a new address. */
static EpClusterKernel new_kernel(void) {
    static _Atomic uint32_t num;
    const EpClusterKernel k = {.function = (const void *)(uintptr_t)(0x1000 + 16 * ++num),
                               .tile_cols = 128,
                               .num_threads = NUM_THREADS,
                               .smem_bytes = SMEM_BYTES};
    return k;
}
static EpGemmParams new_gemm(void) {
    static _Atomic uint32_t num;
    const uintptr_t at = (uintptr_t)(1 + ++num) << 24;
    const EpGemmParams p = {.a = (const void *)at,
                            .b = (const void *)(at + (1u << 23)),
                            .num_rows = 256,
                            .num_experts = 4,
                            .n = 128,
                            .k = 64,
                            .kind = EP_GEMM_FORWARD};
    return p;
}

static bool is_map_of(const CUtensorMap *map, const EpTensorMap *shape) {
    CUtensorMap want;
    cuuint64_t strides[4];
    /* A number has two bytes. */
    for (uint32_t i = 0; i < 4; i++) strides[i] = 2 * shape->strides[i];
    const bool is_f16 = shape->type == EP_MAP_F16;
    fill_map(&want, is_f16, shape->num_dims, shape->base, shape->dims, strides, shape->box);
    return memcmp(map, &want, sizeof want) == 0;
}

static EpClusterLaunch launch_of(const EpClusterKernel *k, const EpGemmParams *gemm, uint32_t num_ctas) {
    const EpClusterLaunch l = {.num_ctas = num_ctas,
                               .is_resident = true,
                               .params = gemm,
                               .a = ep_map_a(gemm, k->tile_cols),
                               .b = ep_map_b(gemm, k->tile_cols)};
    return l;
}

/* Launch as a megakernel is launched, and check what the runtime was given. Returns the code. */
static int launch(int device, EpClusterKernel *k, const EpGemmParams *gemm) {
    EpCapabilities c;
    uint32_t num_ctas = 0;
    current_device = device;
    memset(&launched, 0, sizeof launched);
    int e = ep_capabilities(&c);
    if (!e) e = ep_load_kernel(k, &num_ctas);
    if (e) return e;
    const EpClusterLaunch l = launch_of(k, gemm, num_ctas);
    e = ep_launch_clusters(k, &l, NULL);
    if (e) return e;
    const bool ok = launched.function == k->function && launched.params == gemm &&
                    launched.num_ctas == (device == SMALL_DEVICE ? 2 * OTHER_NUM_PAIRS : 2 * NUM_PAIRS) &&
                    launched.num_attributes == 2 && is_map_of(&launched.map_a, &l.a) &&
                    is_map_of(&launched.map_b, &l.b);
    return ok ? 0 : -1;
}

/* ---- tests ---- */

bool test_launch_again(void) {
    Rank *me = NULL;
    EpClusterKernel k = new_kernel();
    EpClusterKernel other = new_kernel();
    EpGemmParams gemm = new_gemm();
    /* Without the encoder there is no launch, and the next launch looks it up again. */
    failing = ENTRY_POINT;
    CHECK_CODE(me, (int)cudaErrorNotSupported, launch(1, &k, &gemm));
    CHECK_CODE(me, (int)cudaErrorNotSupported, launch(1, &k, &gemm));
    failing = NUM_CALLS;
    clear_counts();
    CHECK_CODE(me, 0, launch(0, &k, &gemm));
    CHECK(me, counts_are(1, 1, 2, 1) && num_calls[ATTRIBUTE] >= 1 && num_calls[ENTRY_POINT] == 1);
    /* The second launch makes only the launch call. */
    clear_counts();
    CHECK_CODE(me, 0, launch(0, &k, &gemm));
    CHECK(me, counts_are(0, 0, 0, 1) && num_all() == 1);
    /* Another shape: only the map of A has changed. */
    clear_counts();
    gemm.num_rows = 300;
    CHECK_CODE(me, 0, launch(0, &k, &gemm));
    /* The call that sets the attribute gives a new thread a context, which the encoder requires. */
    CHECK(me, counts_are(0, 0, 1, 1) && num_calls[ATTRIBUTE] == 1);
    gemm.is_f16 = 1;
    CHECK_CODE(me, 0, launch(0, &k, &gemm));
    CHECK(me, counts_are(0, 0, 3, 2));
    /* The first shape is still known, and so it is to another kernel with equal tiles. */
    clear_counts();
    gemm.is_f16 = 0;
    gemm.num_rows = 256;
    CHECK_CODE(me, 0, launch(0, &k, &gemm));
    CHECK(me, num_all() == 1);
    CHECK_CODE(me, 0, launch(0, &other, &gemm));
    CHECK(me, counts_are(0, 1, 0, 2));
    /* Another device: everything but the maps is asked again. */
    clear_counts();
    CHECK_CODE(me, 0, launch(SMALL_DEVICE, &k, &gemm));
    CHECK(me, counts_are(1, 1, 0, 1) && num_calls[ATTRIBUTE] >= 1);
    clear_counts();
    CHECK_CODE(me, 0, launch(SMALL_DEVICE, &k, &gemm));
    CHECK_CODE(me, 0, launch(0, &k, &gemm));
    CHECK(me, num_all() == 2 && num_calls[LAUNCH] == 2);
    return true;
}

bool test_launch_errors_are_not_cached(void) {
    Rank *me = NULL;
    for (int call = 0; call < NUM_CALLS; call++) {
        EpClusterKernel k = new_kernel();
        EpGemmParams gemm = new_gemm();
        const int device = 8 + call;
        if (call == ENTRY_POINT) continue; /* test_launch_again has this error */
        clear_counts();
        failing = call;
        for (uint32_t i = 1; i <= 2; i++) {
            CHECK_CODE(me, (int)cudaErrorInvalidValue, launch(device, &k, &gemm));
            CHECK(me, num_calls[call] == i); /* the error is asked again */
        }
        failing = NUM_CALLS;
        CHECK_CODE(me, 0, launch(device, &k, &gemm));
        clear_counts();
        CHECK_CODE(me, 0, launch(device, &k, &gemm));
        CHECK(me, num_all() == 1);
    }
    EpCapabilities c;
    current_device = EP_MAX_DEVICES;
    CHECK_CODE(me, (int)cudaErrorInvalidDevice, ep_capabilities(&c));
    return true;
}

/* More shapes than maps are cached: each launch gets the maps of its own shape. */
bool test_launch_replaces_old_shapes(void) {
    enum { NUM_SHAPES = 3 * EP_MAP_SETS * EP_MAP_WAYS };
    Rank *me = NULL;
    EpClusterKernel k = new_kernel();
    const EpGemmParams first = new_gemm();
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t i = 0; i < NUM_SHAPES; i++) {
            EpGemmParams gemm = first;
            gemm.num_rows = 1 + i;
            CHECK_CODE(me, 0, launch(0, &k, &gemm));
        }
    clear_counts();
    EpGemmParams gemm = first;
    gemm.num_rows = NUM_SHAPES;
    CHECK_CODE(me, 0, launch(0, &k, &gemm));
    CHECK(me, num_all() == 1); /* the newest ones are there */
    return true;
}

bool test_launch_capabilities(void) {
    Rank *me = NULL;
    EpCapabilities c;
    current_device = PTX_DEVICE;
    CHECK_CODE(me, 0, ep_capabilities(&c));
    CHECK(me, c.major == 9 && c.minor == 1 && c.num_sms == NUM_SMS && c.smem_bytes == SMEM_BYTES + 1024);
    CHECK(me, !c.has_hopper);
    current_device = 0;
    CHECK_CODE(me, 0, ep_capabilities(&c));
    CHECK(me, c.has_hopper);
    return true;
}

/* ---- threads ---- */

enum { NUM_TEAM = 4, TEAM_SHAPES = 40, TEAM_DEVICE = 7 };
typedef struct {
    EpClusterKernel k;
    EpGemmParams gemm;
    pthread_barrier_t start;
    _Atomic uint32_t num_wrong;
} Team;
static void *launch_many(void *arg) {
    Team *team = (Team *)arg;
    pthread_barrier_wait(&team->start);
    for (uint32_t round = 0; round < 3; round++)
        for (uint32_t i = 0; i < TEAM_SHAPES; i++) {
            EpGemmParams gemm = team->gemm;
            gemm.num_rows = 1 + i;
            if (launch(TEAM_DEVICE, &team->k, &gemm)) team->num_wrong++;
        }
    return NULL;
}
/* Threads that are ranks make the same first launches at once. */
bool test_launch_threads(void) {
    Rank *me = NULL;
    Team team = {.k = new_kernel(), .gemm = new_gemm()};
    pthread_t threads[NUM_TEAM];
    clear_counts();
    pthread_barrier_init(&team.start, NULL, NUM_TEAM);
    for (uint32_t i = 0; i < NUM_TEAM; i++)
        if (pthread_create(&threads[i], NULL, launch_many, &team)) abort();
    for (uint32_t i = 0; i < NUM_TEAM; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&team.start);
    CHECK(me, team.num_wrong == 0);
    /* Threads may ask for the same at once, but each asks at most once. */
    CHECK(me, num_calls[PTX] >= 1 && num_calls[PTX] <= NUM_TEAM);
    CHECK(me, num_calls[OCCUPANCY] >= 1 && num_calls[OCCUPANCY] <= NUM_TEAM);
    clear_counts();
    for (uint32_t i = 0; i < TEAM_SHAPES; i++) {
        EpGemmParams gemm = team.gemm;
        gemm.num_rows = 1 + i;
        CHECK_CODE(me, 0, launch(TEAM_DEVICE, &team.k, &gemm));
    }
    CHECK(me, num_all() == TEAM_SHAPES);
    return true;
}
