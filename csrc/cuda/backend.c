/* cuda/backend.c - the CUDA backend: heap memory, streams, launches, and the table ep_cuda_backend.
 *
 * A heap is one cudaMalloc block, which travels as a cudaIpcMemHandle. Work runs on the caller's stream; the
 * kernels are in kernels/. The block comes directly from cudaMalloc, never from a framework's allocator,
 * because IPC shares whole allocations, and memory of a pool or of expandable segments cannot be shared.
 * Invariants: every function leaves the calling thread's current device as it was (guard.h). Operations of
 * one launch sequence run in the order of their calls (launch_order.h). */
#include <cuda_runtime_api.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "cuda/capabilities.h"
#include "cuda/guard.h"
#include "cuda/launch_order.h"
#include "cuda/tile_counters.h"
#include "kernels/launch.h"
#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "runtime/world.h"

#define BLOCK_BYTES (2ull << 20) /* IPC requires allocations that share no page with others */
/* After the world has ended, work on a stream has this much time to finish. */
#define ENDED_NS 1000000000ull

/* ---- memory ---- */

static int open_block(int device, uint64_t num_bytes, void **memory, EpHeapHandle *heap_handle) {
    EpCapabilities c;
    cudaIpcMemHandle_t handle;
    uint64_t rounded = ep_align_u64(num_bytes, BLOCK_BYTES);
    EP_CUDA_TRY(ep_capabilities(&c));
    if (c.major < 8)
        return ep_error(EP_EINVAL, "CUDA device %d has compute capability %u.%u: epmoe needs 8.0 or newer",
                        device, c.major, c.minor);
    cudaError_t e = cudaMalloc(memory, rounded);
    if (e != cudaSuccess && e != cudaErrorMemoryAllocation) return ep_cuda_error(e, "cudaMalloc");
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
    if (e == cudaSuccess) e = cudaRuntimeGetVersion(&heap_handle->runtime_version);
    if (e == cudaSuccess) e = cudaDriverGetVersion(&heap_handle->driver_version);
    if (e != cudaSuccess) {
        cudaFree(*memory);
        *memory = NULL;
        return ep_cuda_error(e, "cudaIpcGetMemHandle");
    }
    heap_handle->num_bytes = num_bytes;
    _Static_assert(sizeof heap_handle->handle == sizeof handle, "an IPC handle has 64 bytes");
    memcpy(heap_handle->handle, &handle, sizeof handle);
    return 0;
}

static int read_device(int device, EpHeapDevice *out) {
    EpCapabilities c;
    struct cudaDeviceProp
        prop; /* for the UUID, which is no attribute that the runtime can be asked for alone */
    size_t num_free = 0, total = 0;
    const char *share = getenv("EPMOE_SHARE_GPU");
    if (share && strcmp(share, "0") != 0 && strcmp(share, "1") != 0)
        return ep_error(EP_EINVAL, "EPMOE_SHARE_GPU=%.40s: must be 0 or 1", share);
    EP_CUDA_TRY(ep_capabilities(&c));
    EP_CUDA_TRY(cudaGetDeviceProperties(&prop, device));
    EP_CUDA_TRY(cudaMemGetInfo(&num_free, &total));
    memcpy(out->device_id, &prop.uuid, sizeof out->device_id);
    out->free_bytes = num_free;
    out->num_sms = c.num_sms;
    out->may_share = share && strcmp(share, "1") == 0;
    return 0;
}
static int heap_device(int device, EpHeapDevice *out) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, read_device(device, out));
}

static int heap_open(int device, uint64_t num_bytes, void **memory, EpHeapHandle *heap_handle, int *fd) {
    *fd = -1; /* a peer needs only the handle */
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, open_block(device, num_bytes, memory, heap_handle));
}

static void heap_close(int device, void *memory, uint64_t num_bytes) {
    EpGuard g;
    (void)num_bytes;
    if (ep_guard(device, &g)) return;
    cudaFree(memory); /* waits for kernels that still use it */
    cudaGetLastError();
    ep_unguard(&g, 0);
}

static int import_block(const EpHeapHandle *mine, const EpHeapHandle *heap_handle, void **memory) {
    cudaIpcMemHandle_t handle;
    if (heap_handle->num_bytes != mine->num_bytes)
        return ep_error(EP_ECORRUPT, "a peer sent memory that is not a heap of this world");
    memcpy(&handle, heap_handle->handle, sizeof handle);
    EP_CUDA_TRY(cudaIpcOpenMemHandle(memory, handle, cudaIpcMemLazyEnablePeerAccess));
    return 0;
}

static int heap_import(int device, const EpHeapHandle *mine, const EpHeapHandle *heap_handle, int fd,
                       void **memory) {
    (void)fd;
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, import_block(mine, heap_handle, memory));
}

static void heap_unimport(int device, void *memory, uint64_t num_bytes) {
    EpGuard g;
    (void)num_bytes;
    if (ep_guard(device, &g)) return;
    cudaIpcCloseMemHandle(memory);
    cudaGetLastError();
    ep_unguard(&g, 0);
}

static int host_alloc(int device, uint64_t num_bytes, void **memory) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(
        &g, ep_cuda_check(cudaHostAlloc(memory, num_bytes, cudaHostAllocPortable | cudaHostAllocMapped),
                          "cudaHostAlloc"));
}

static void host_free(int device, void *memory, uint64_t num_bytes) {
    EpGuard g;
    (void)num_bytes;
    if (ep_guard(device, &g)) return;
    cudaFreeHost(memory); /* waits for kernels that still write it */
    cudaGetLastError();
    ep_unguard(&g, 0);
}

static int copy(int device, void *dst, const void *src, uint64_t num_bytes, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(
        &g, ep_cuda_check(cudaMemcpyAsync(dst, src, num_bytes, cudaMemcpyDefault, (cudaStream_t)stream),
                          "cudaMemcpyAsync"));
}

static int zero(int device, void *dst, uint64_t num_bytes, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(
        &g, ep_cuda_check(cudaMemsetAsync(dst, 0, num_bytes, (cudaStream_t)stream), "cudaMemsetAsync"));
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
        if (e != cudaErrorNotReady) return ep_cuda_error(e, "cudaStreamQuery");
        if (polls < 1000) continue;
        sched_yield();
        if (ep_interrupted()) return ep_take_interrupt(), ep_world_interrupt(world);
        int code = polls % 128 ? 0 : ep_world_check(world);
        if (code && !until) until = ep_now_ns() + ENDED_NS;
        else if (code && ep_now_ns() > until) return code;
    }
}
static int sync_stream(int device, void *stream, EpWorld *world) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, wait_stream((cudaStream_t)stream, world));
}

static bool is_captured(void *stream) {
    enum cudaStreamCaptureStatus status;
    cudaError_t e = cudaStreamIsCapturing((cudaStream_t)stream, &status);
    if (e == cudaSuccess) return status != cudaStreamCaptureStatusNone;
    cudaGetLastError();
    return e == cudaErrorStreamCaptureImplicit; /* on another error, the launch will report it */
}

static int sync_all(int device) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, ep_cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
}

/* ---- kernels ---- */

static int plan(int device, const EpPlanParams *p, void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, &p->comm, stream, "epmoe: plan kernel", &l));
    return ep_end_launch(&l, ep_launch_plan(p, stream), "plan kernel");
}
/* The text about a launch in this dtype, for the profiler or for an error. */
#define IN_DTYPE(before, scales, name) ((scales)->dtype == EP_IN_FP8 ? before "FP8 " name : before name)

static int dispatch(int device, const EpDispatchParams *p, const EpScales *scales, uint32_t num_sm,
                    void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, &p->comm, stream, IN_DTYPE("epmoe: ", scales, "dispatch kernel"), &l));
    return ep_end_launch(&l, ep_launch_dispatch(p, scales, num_sm, stream),
                         IN_DTYPE("", scales, "dispatch kernel"));
}
static int combine(int device, const EpCombineParams *p, uint32_t num_sm, void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, &p->comm, stream, "epmoe: combine kernel", &l));
    return ep_end_launch(&l, ep_launch_combine(p, num_sm, stream), "combine kernel");
}
static int ll_dispatch(int device, const EpLlDispatchParams *p, uint32_t num_sm, void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, &p->comm, stream, "epmoe: low-latency dispatch kernel", &l));
    return ep_end_launch(&l, ep_launch_ll_dispatch(p, num_sm, stream), "low-latency dispatch kernel");
}
static int ll_combine(int device, const EpLlCombineParams *p, uint32_t num_sm, void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, &p->comm, stream, "epmoe: low-latency combine kernel", &l));
    return ep_end_launch(&l, ep_launch_ll_combine(p, num_sm, stream), "low-latency combine kernel");
}
static int enter(int device, const EpComm *c, uint32_t word, void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, c, stream, "epmoe: enter kernel", &l));
    return ep_end_launch(&l, ep_launch_enter(c, word, stream), "enter kernel");
}
static int order(int device, const EpComm *c, void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, c, stream, "epmoe: order", &l));
    return ep_end_launch(&l, cudaSuccess, "order");
}
static int clear(int device, const EpComm *c, void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, c, stream, "epmoe: clear", &l));
    return ep_end_launch(
        &l, cudaMemsetAsync(&ep_local(c)->faulted, 0, sizeof(uint64_t), (cudaStream_t)stream), "clear");
}
static int signal_word(int device, uint64_t *word, uint64_t value, bool add, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(
        &g, ep_cuda_check((cudaError_t)ep_launch_signal(word, value, add, stream), "signal kernel"));
}
static int wait_word(int device, const EpComm *c, const uint64_t *word, uint64_t value, bool exact,
                     void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(
        &g, ep_cuda_check((cudaError_t)ep_launch_wait(c, word, value, exact, stream), "wait kernel"));
}

static int gemm(int device, const EpGemmParams *p, const EpGemmScales *scales, const EpFourBit *four_bit,
                const EpLowRank *low_rank, const EpOwnColumns *own, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g,
                      ep_cuda_check((cudaError_t)ep_launch_gemm(p, scales, four_bit, low_rank, own, stream),
                                    scales ? "grouped GEMM kernel of FP8" : "grouped GEMM kernel"));
}
static int move_choices(int device, const EpMoveChoicesParams *p, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(
        &g, ep_cuda_check((cudaError_t)ep_launch_move_choices(p, stream), "kernel that moves choices"));
}
static int map_choices(int device, const EpMapChoicesParams *p, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(
        &g, ep_cuda_check((cudaError_t)ep_launch_map_choices(p, stream), "kernel that maps choices"));
}
static int quantize(int device, const EpQuantizeParams *p, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, ep_cuda_check((cudaError_t)ep_launch_quantize(p, stream), "quantisation kernel"));
}
static int rescale(int device, const EpRescaleParams *p, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, ep_cuda_check((cudaError_t)ep_launch_rescale(p, stream), "rescaling kernel"));
}
static int transpose(int device, const EpTransposeParams *p, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, ep_cuda_check((cudaError_t)ep_launch_transpose(p, stream), "transposition kernel"));
}
static int quantize_weight(int device, const EpQuantizeWeightParams *p, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, ep_cuda_check((cudaError_t)ep_launch_quantize_weight(p, stream),
                                        "quantisation kernel of weights"));
}
static int expand(int device, const EpExpandParams *p, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, ep_cuda_check((cudaError_t)ep_launch_expand(p, stream), "expansion kernel"));
}
static int wgrad_fp8(int device, const EpWgradFp8Params *p, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, ep_cuda_check((cudaError_t)ep_launch_wgrad_fp8(p, stream), "WGRAD kernel of FP8"));
}

static int activation(int device, const EpActivationParams *p, void *stream) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, ep_cuda_check((cudaError_t)ep_launch_activation(p, stream),
                                        "kernel of an activation's gradient"));
}

static int tile_counter(int device, void *stream, uint64_t **counter) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g,
                      ep_cuda_check((cudaError_t)ep_tile_counter(stream, counter), "finding a tile counter"));
}

static int dispatch_gemm(int device, const EpDispatchGemmParams *p, const EpScales *scales, void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, &p->dispatch.comm, stream,
                           IN_DTYPE("epmoe: ", scales, "dispatch + GEMM kernel"), &l));
    return ep_end_launch(&l, ep_launch_dispatch_gemm(p, scales, stream),
                         IN_DTYPE("", scales, "dispatch + GEMM kernel"));
}
static int gemm_combine(int device, const EpGemmCombineParams *p, const EpScales *scales, void *stream) {
    EpLaunch l;
    EP_TRY(ep_begin_launch(device, &p->combine.comm, stream,
                           IN_DTYPE("epmoe: ", scales, "GEMM + combine kernel"), &l));
    return ep_end_launch(&l, ep_launch_gemm_combine(p, scales, stream),
                         IN_DTYPE("", scales, "GEMM + combine kernel"));
}

static int query_current(EpDevice *out) {
    EpCapabilities c;
    const int e = ep_capabilities(&c);
    if (e) return ep_cuda_error((cudaError_t)e, "asking what the device can do");
    out->major = c.major;
    out->minor = c.minor;
    out->num_sms = c.num_sms;
    out->has_hopper = c.has_hopper;
    return 0;
}
static int query(int device, EpDevice *out) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, query_current(out));
}

static int preload_all(bool is_shared) {
    if (is_shared) EP_CUDA_TRY(ep_share_device());
    EP_CUDA_TRY(ep_preload_plan());
    EP_CUDA_TRY(ep_preload_dispatch());
    EP_CUDA_TRY(ep_preload_combine());
    EP_CUDA_TRY(ep_preload_low_latency());
    EP_CUDA_TRY(ep_preload_words());
    EP_CUDA_TRY(ep_preload_quantize());
    EP_CUDA_TRY(ep_preload_fused());
    return 0;
}
static int preload(int device, bool is_shared) {
    EpGuard g;
    EP_TRY(ep_guard(device, &g));
    return ep_unguard(&g, preload_all(is_shared));
}

const EpBackend ep_cuda_backend = {
    .heap_device = heap_device,
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
    .ll_dispatch = ll_dispatch,
    .ll_combine = ll_combine,
    .enter = enter,
    .order = order,
    .clear = clear,
    .signal = signal_word,
    .wait = wait_word,
    .gemm = gemm,
    .activation = activation,
    .move_choices = move_choices,
    .map_choices = map_choices,
    .quantize = quantize,
    .rescale = rescale,
    .transpose = transpose,
    .quantize_weight = quantize_weight,
    .expand = expand,
    .wgrad_fp8 = wgrad_fp8,
    .tile_counter = tile_counter,
    .dispatch_gemm = dispatch_gemm,
    .gemm_combine = gemm_combine,
    .query = query,
    .preload = preload,
};
