/* cuda/backend.c - the CUDA backend: heap memory, streams, launch order, and the table ep_cuda_backend.
 *
 * A heap is one cudaMalloc block, which travels as a cudaIpcMemHandle. Work runs on the caller's stream; the
 * kernels are in kernels/. The block comes directly from cudaMalloc, never from a framework's allocator,
 * because IPC shares whole allocations, and memory of a pool or of expandable segments cannot be shared.
 * Invariants: every function leaves the calling thread's current device as it was. Operations of one launch
 * lane run in the order of their calls. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else
#define nvtxRangePushA(text) ((void)(text))
#define nvtxRangePop() ((void)0)
#endif

#include "backend.h"
#include "cuda/capabilities.h"
#include "kernels/launch.h"
#include "protocol/flags.h"
#include "runtime/error.h"

#define BLOCK_BYTES (2ull << 20) /* IPC requires allocations that share no page with others */
/* After the world has ended, work on a stream has this much time to finish. */
#define ENDED_NS 1000000000ull
#define EP_CUDA_TRY(call)                                    \
    do {                                                     \
        cudaError_t e_ = (cudaError_t)(call);                \
        if (e_ != cudaSuccess) return cuda_error(e_, #call); \
    } while (0)

static int cuda_error(cudaError_t e, const char *call) {
    /* Clear the error if it is not sticky, so that the next caller does not receive it. */
    cudaGetLastError();
    if (e == cudaErrorMemoryAllocation) return ep_error(EP_ENOMEM, "%s: %s", call, cudaGetErrorString(e));
    return ep_error(EP_ECUDA, "%s: %s", call, cudaGetErrorString(e));
}

/* Set the calling thread's device to the heap's device. unguard restores the previous one. */
typedef struct {
    int before, device;
} Guard;
static int guard(int device, Guard *g) {
    g->device = device;
    EP_CUDA_TRY(cudaGetDevice(&g->before));
    if (g->before != device) EP_CUDA_TRY(cudaSetDevice(device));
    return 0;
}
static int unguard(const Guard *g, int code) {
    if (g->before != g->device) cudaSetDevice(g->before);
    return code;
}
/* Evaluate the expression while `device` is the thread's current device. The macro returns the result from
 * the function that uses it. */
#define GUARDED(device, expression)        \
    do {                                   \
        Guard g_;                          \
        EP_TRY(guard(device, &g_));        \
        return unguard(&g_, (expression)); \
    } while (0)

static int check_call(cudaError_t e, const char *what) { return e == cudaSuccess ? 0 : cuda_error(e, what); }

/* ---- memory ---- */

static int open_block(int device, uint64_t num_bytes, void **memory, EpHeapCard *card) {
    struct cudaDeviceProp prop;
    cudaIpcMemHandle_t handle;
    uint64_t rounded = ep_align_u64(num_bytes, BLOCK_BYTES);
    EP_CUDA_TRY(cudaGetDeviceProperties(&prop, device));
    if (prop.major < 8)
        return ep_error(EP_EINVAL, "%s has compute capability %d.%d; epmoe needs 8.0 or newer", prop.name,
                        prop.major, prop.minor);
    cudaError_t e = cudaMalloc(memory, rounded);
    if (e != cudaSuccess && e != cudaErrorMemoryAllocation) return cuda_error(e, "cudaMalloc");
    if (e != cudaSuccess) {
        size_t num_free = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&num_free, &total);
        return ep_error(
            EP_ENOMEM, "no room for a heap of %llu bytes: %llu of %llu bytes of GPU memory are free",
            (unsigned long long)num_bytes, (unsigned long long)num_free, (unsigned long long)total);
    }
    e = cudaMemset(*memory, 0, rounded);
    if (e == cudaSuccess) e = cudaDeviceSynchronize();
    if (e == cudaSuccess) e = cudaIpcGetMemHandle(&handle, *memory);
    if (e == cudaSuccess) e = cudaRuntimeGetVersion(&card->runtime_version);
    if (e == cudaSuccess) e = cudaDriverGetVersion(&card->driver_version);
    if (e != cudaSuccess) {
        cudaFree(*memory);
        *memory = NULL;
        return cuda_error(e, "cudaIpcGetMemHandle");
    }
    card->num_bytes = num_bytes;
    _Static_assert(sizeof card->handle == sizeof handle, "an IPC handle has 64 bytes");
    memcpy(card->handle, &handle, sizeof handle);
    return 0;
}

static int read_room(int device, EpHeapRoom *room) {
    struct cudaDeviceProp prop;
    size_t num_free = 0, total = 0;
    const char *share = getenv("EPMOE_SHARE_GPU");
    if (share && strcmp(share, "0") != 0 && strcmp(share, "1") != 0)
        return ep_error(EP_EINVAL, "EPMOE_SHARE_GPU=%.40s: must be 0 or 1", share);
    EP_CUDA_TRY(cudaGetDeviceProperties(&prop, device));
    EP_CUDA_TRY(cudaMemGetInfo(&num_free, &total));
    memcpy(room->device_id, &prop.uuid, sizeof room->device_id);
    room->free_bytes = num_free;
    room->num_sms = (uint32_t)prop.multiProcessorCount;
    room->may_share = share && strcmp(share, "1") == 0;
    return 0;
}
static int heap_room(int device, EpHeapRoom *room) { GUARDED(device, read_room(device, room)); }

static int heap_open(int device, uint64_t num_bytes, void **memory, EpHeapCard *card, int *fd) {
    *fd = -1; /* a peer needs only the handle */
    GUARDED(device, open_block(device, num_bytes, memory, card));
}

static void heap_close(int device, void *memory, uint64_t num_bytes) {
    Guard g;
    (void)num_bytes;
    if (guard(device, &g)) return;
    cudaFree(memory); /* waits for kernels that still use it */
    cudaGetLastError();
    unguard(&g, 0);
}

static int import_block(const EpHeapCard *mine, const EpHeapCard *card, void **memory) {
    cudaIpcMemHandle_t handle;
    if (card->num_bytes != mine->num_bytes)
        return ep_error(EP_ECORRUPT, "a peer sent memory that is not a heap of this world");
    memcpy(&handle, card->handle, sizeof handle);
    EP_CUDA_TRY(cudaIpcOpenMemHandle(memory, handle, cudaIpcMemLazyEnablePeerAccess));
    return 0;
}

static int heap_import(int device, const EpHeapCard *mine, const EpHeapCard *card, int fd, void **memory) {
    (void)fd;
    GUARDED(device, import_block(mine, card, memory));
}

static void heap_unimport(int device, void *memory, uint64_t num_bytes) {
    Guard g;
    (void)num_bytes;
    if (guard(device, &g)) return;
    cudaIpcCloseMemHandle(memory);
    cudaGetLastError();
    unguard(&g, 0);
}

static int host_alloc(int device, uint64_t num_bytes, void **memory) {
    GUARDED(device, check_call(cudaHostAlloc(memory, num_bytes, cudaHostAllocPortable | cudaHostAllocMapped),
                               "cudaHostAlloc"));
}

static void host_free(int device, void *memory, uint64_t num_bytes) {
    Guard g;
    (void)num_bytes;
    if (guard(device, &g)) return;
    cudaFreeHost(memory); /* waits for kernels that still write it */
    cudaGetLastError();
    unguard(&g, 0);
}

static int copy(int device, void *dst, const void *src, uint64_t num_bytes, void *stream) {
    GUARDED(device, check_call(cudaMemcpyAsync(dst, src, num_bytes, cudaMemcpyDefault, (cudaStream_t)stream),
                               "cudaMemcpyAsync"));
}

static int zero(int device, void *dst, uint64_t num_bytes, void *stream) {
    GUARDED(device, check_call(cudaMemsetAsync(dst, 0, num_bytes, (cudaStream_t)stream), "cudaMemsetAsync"));
}

/* ---- streams ---- */

/* Wait for a stream. epmoe's kernels end when the world ends. Other work on the stream, an NCCL
 * collective for example, may wait for a dead rank without a limit. So after the end of the world this
 * wait ends too, after ENDED_NS. */
static int wait_stream(cudaStream_t stream, EpWorld *world) {
    uint64_t until = 0;
    for (uint32_t polls = 1;; polls++) {
        cudaError_t e = cudaStreamQuery(stream);
        if (e == cudaSuccess) return 0;
        if (e != cudaErrorNotReady) return cuda_error(e, "cudaStreamQuery");
        if (polls < 1000) continue;
        sched_yield();
        int code = polls % 128 ? 0 : ep_world_check(world);
        if (code && !until) until = ep_now_ns() + ENDED_NS;
        else if (code && ep_now_ns() > until) return code;
    }
}
static int sync_stream(int device, void *stream, EpWorld *world) {
    GUARDED(device, wait_stream((cudaStream_t)stream, world));
}

static bool is_captured(void *stream) {
    enum cudaStreamCaptureStatus status;
    cudaError_t e = cudaStreamIsCapturing((cudaStream_t)stream, &status);
    if (e == cudaSuccess) return status != cudaStreamCaptureStatusNone;
    cudaGetLastError();
    return e == cudaErrorStreamCaptureImplicit; /* on another error, the launch will report it */
}

static int sync_all(int device) {
    GUARDED(device, check_call(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
}

/* ---- launch order ---- */

/* An operation holds SMs while it waits for its peers, and an operation that finds no free SM cannot start.
 * If two operations started in different orders on two ranks, each could wait for SMs that the other holds: a
 * deadlock. Streams do not order operations among themselves. Therefore the operations of one lane run in the
 * order of their calls: each waits for the operation before it, if that one is on another stream.
 *
 * A process is one lane on each GPU. Ranks that are threads of one process have a lane each: they wait for
 * each other, so they must run at the same time. Each of them uses its own part of the SMs
 * (ep_heap_reserved_sms), so there are enough SMs for all.
 *
 * A captured operation is ordered inside its graph. The program orders the replays of its graphs. */
typedef struct {
    /* The end of the newest operation. It is recorded right after the launch, because later the stream may
     * have been destroyed, or may be captured for a graph. */
    cudaEvent_t end;
    cudaStream_t stream;      /* of the newest operation */
    unsigned long long graph; /* the graph for which it was captured, or 0 */
    bool has_operation;       /* false before the first operation */
} LaunchOrder;
typedef struct {
    /* one for each lane, because a launch may wait for a launch of another lane */
    pthread_mutex_t lock;
    LaunchOrder runs, captured;
} Lane;
static Lane lanes[EP_MAX_DEVICES][EP_MAX_RANKS];
static void init_lanes(void) {
    for (uint32_t i = 0; i < EP_MAX_DEVICES; i++)
        for (uint32_t j = 0; j < EP_MAX_RANKS; j++) pthread_mutex_init(&lanes[i][j].lock, NULL);
}

/* The graph for which a stream is being captured, or 0. */
static int graph_of(cudaStream_t stream, unsigned long long *graph) {
    enum cudaStreamCaptureStatus status;
    unsigned long long id = 0;
#if CUDART_VERSION >= 13000
    EP_CUDA_TRY(cudaStreamGetCaptureInfo(stream, &status, &id, NULL, NULL, NULL, NULL));
#else
    EP_CUDA_TRY(cudaStreamGetCaptureInfo(stream, &status, &id, NULL, NULL, NULL));
#endif
    *graph = status == cudaStreamCaptureStatusActive ? id : 0;
    return 0;
}
static int lock_lane(int device, uint32_t lane, Lane **out) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (device < 0 || device >= EP_MAX_DEVICES)
        return ep_error(EP_EINVAL, "device %d of at most %d", device, EP_MAX_DEVICES);
    pthread_once(&once, init_lanes);
    *out = &lanes[device][lane];
    pthread_mutex_lock(&(*out)->lock);
    return 0;
}
static int unlock_lane(Lane *lane, int code) {
    pthread_mutex_unlock(&lane->lock);
    return code;
}
/* Before a launch: make the stream wait for the operation before it, if that one is on another stream. */
static int begin_launch(Lane *lane, cudaStream_t stream, LaunchOrder **out) {
    unsigned long long graph = 0;
    EP_TRY(graph_of(stream, &graph));
    LaunchOrder *o = *out = graph ? &lane->captured : &lane->runs;
    if (!o->end) EP_CUDA_TRY(cudaEventCreateWithFlags(&o->end, cudaEventDisableTiming));
    if (o->has_operation && o->stream != stream && o->graph == graph)
        EP_CUDA_TRY(cudaStreamWaitEvent(stream, o->end, 0));
    o->stream = stream;
    o->graph = graph;
    return 0;
}
/* After a launch: record its end for the next operation of the lane. */
static int end_launch(LaunchOrder *o, cudaError_t launched, const char *what) {
    EP_TRY(check_call(launched, what));
    o->has_operation = true;
    return check_call(cudaEventRecord(o->end, o->stream), "cudaEventRecord");
}
/* Launch an operation in the launch order of its lane. The macro returns from the function that uses it.
 * The NVTX range lets profilers show the operation's name next to its kernel. */
#define IN_LAUNCH_ORDER(device, comm, stream, call, what)                  \
    do {                                                                   \
        Guard g_;                                                          \
        Lane *lane_ = NULL;                                                \
        LaunchOrder *order_ = NULL;                                        \
        EP_TRY(lock_lane(device, (comm)->launch_lane, &lane_));            \
        if (guard(device, &g_)) return unlock_lane(lane_, EP_ECUDA);       \
        int code_ = begin_launch(lane_, (cudaStream_t)(stream), &order_);  \
        nvtxRangePushA("epmoe: " what);                                    \
        if (!code_) code_ = end_launch(order_, (cudaError_t)(call), what); \
        nvtxRangePop();                                                    \
        return unlock_lane(lane_, unguard(&g_, code_));                    \
    } while (0)

/* ---- kernels ---- */

static int plan(int device, const EpPlanParams *p, void *stream) {
    IN_LAUNCH_ORDER(device, &p->comm, stream, ep_launch_plan(p, stream), "plan kernel");
}
static int dispatch(int device, const EpDispatchParams *p, uint32_t num_sm, void *stream) {
    IN_LAUNCH_ORDER(device, &p->comm, stream, ep_launch_dispatch(p, num_sm, stream), "dispatch kernel");
}
static int combine(int device, const EpCombineParams *p, uint32_t num_sm, void *stream) {
    IN_LAUNCH_ORDER(device, &p->comm, stream, ep_launch_combine(p, num_sm, stream), "combine kernel");
}
static int enter(int device, const EpComm *c, uint32_t op, void *stream) {
    IN_LAUNCH_ORDER(device, c, stream, ep_launch_enter(c, op, stream), "enter kernel");
}
static int clear(int device, const EpComm *c, void *stream) {
    IN_LAUNCH_ORDER(device, c, stream,
                    cudaMemsetAsync(&ep_local(c)->faulted, 0, sizeof(uint64_t), (cudaStream_t)stream),
                    "clear");
}
static int signal_word(int device, uint64_t *word, uint64_t value, bool add, void *stream) {
    GUARDED(device, check_call((cudaError_t)ep_launch_signal(word, value, add, stream), "signal kernel"));
}
static int wait_word(int device, const EpComm *c, const uint64_t *word, uint64_t value, bool exact,
                     void *stream) {
    GUARDED(device, check_call((cudaError_t)ep_launch_wait(c, word, value, exact, stream), "wait kernel"));
}

static int gemm(int device, const EpGemmParams *p, void *stream) {
    GUARDED(device, check_call((cudaError_t)ep_launch_gemm(p, stream), "grouped GEMM kernel"));
}

static int dispatch_gemm(int device, const EpDispatchGemmParams *p, void *stream) {
    IN_LAUNCH_ORDER(device, &p->dispatch.comm, stream, ep_launch_dispatch_gemm(p, stream),
                    "dispatch + GEMM kernel");
}
static int gemm_combine(int device, const EpGemmCombineParams *p, void *stream) {
    IN_LAUNCH_ORDER(device, &p->combine.comm, stream, ep_launch_gemm_combine(p, stream),
                    "GEMM + combine kernel");
}

static int preload_all(void) {
    EP_CUDA_TRY(ep_preload_plan());
    EP_CUDA_TRY(ep_preload_dispatch());
    EP_CUDA_TRY(ep_preload_combine());
    EP_CUDA_TRY(ep_preload_words());
    EP_CUDA_TRY(ep_preload_fused());
    return 0;
}
static int preload(int device) { GUARDED(device, preload_all()); }

const EpBackend ep_cuda_backend = {
    .heap_room = heap_room,
    .heap_open = heap_open,
    .heap_close = heap_close,
    .heap_import = heap_import,
    .heap_unimport = heap_unimport,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .copy = copy,
    .zero = zero,
    .sync = sync_stream,
    .is_captured = is_captured,
    .sync_all = sync_all,
    .plan = plan,
    .dispatch = dispatch,
    .combine = combine,
    .enter = enter,
    .clear = clear,
    .signal = signal_word,
    .wait = wait_word,
    .gemm = gemm,
    .dispatch_gemm = dispatch_gemm,
    .gemm_combine = gemm_combine,
    .preload = preload,
};
