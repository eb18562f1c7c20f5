/* test_launch_order.c - the order of operations in a launch sequence, and on which devices contexts are made,
 * with a fake runtime.
 *
 * The library keeps a sequence until the process ends. So each test has devices of its own. */
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "cuda/capabilities.h"
#include "cuda/launch_order.h"
#include "harness.h"

/* ---- the fake runtime; test_launch.c has cudaGetDevice, test_counters.c has questions about streams ---- */

enum { NUM_EVENTS = 200 };
static struct FakeEvent events[NUM_EVENTS];
static uint32_t num_events;
static bool has_context[EP_MAX_DEVICES];
static int pushed[8], num_pushed; /* the devices that were current before each push */
static CUresult retaining;        /* what cuDevicePrimaryCtxRetain returns */

static int now_current(void) {
    int device;
    cudaGetDevice(&device);
    return device;
}
cudaError_t cudaSetDevice(int device) {
    has_context[device] = true;
    test_set_device(device);
    return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "a fake error"; }

static CUresult get_state(CUdevice_v1 device, unsigned *flags, int *active) {
    *flags = 0;
    *active = has_context[device];
    return CUDA_SUCCESS;
}
static CUresult retain(CUcontext *context, CUdevice_v1 device) {
    if (retaining != CUDA_SUCCESS) return retaining;
    has_context[device] = true;
    *context = (CUcontext)(uintptr_t)(device + 1);
    return CUDA_SUCCESS;
}
static CUresult push(CUcontext context) {
    pushed[num_pushed++] = now_current();
    test_set_device((int)(uintptr_t)context - 1);
    return CUDA_SUCCESS;
}
static CUresult pop(CUcontext *context) {
    *context = (CUcontext)(uintptr_t)(now_current() + 1);
    test_set_device(pushed[--num_pushed]);
    return CUDA_SUCCESS;
}
bool test_find_context_function(const char *name, unsigned version, void **function) {
    const PFN_cuDevicePrimaryCtxGetState_v7000 f0 = get_state;
    const PFN_cuDevicePrimaryCtxRetain_v7000 f1 = retain;
    const PFN_cuCtxPushCurrent_v4000 f2 = push;
    const PFN_cuCtxPopCurrent_v4000 f3 = pop;
    const struct {
        const char *name;
        unsigned version;
        const void *function;
    } known[] = {{"cuDevicePrimaryCtxGetState", 7000, &f0},
                 {"cuDevicePrimaryCtxRetain", 7000, &f1},
                 {"cuCtxPushCurrent", 4000, &f2},
                 {"cuCtxPopCurrent", 4000, &f3}};
    for (uint32_t i = 0; i < 4; i++)
        if (strcmp(name, known[i].name) == 0 && version == known[i].version) {
            memcpy(function, known[i].function, sizeof *function);
            return true;
        }
    return false;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *graph, void *no_graph, void *no_nodes,
                                     void *no_edges, size_t *no_number) {
    *status = stream->status;
    *graph = stream->graph;
    return no_graph || no_nodes || no_edges || no_number ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    if (flags != cudaEventDisableTiming || num_events == NUM_EVENTS) return cudaErrorInvalidValue;
    *event = &events[num_events++];
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->stream = stream;
    event->graph = stream->graph;
    return cudaSuccess;
}
/* As in the real runtime, a stream that is captured cannot wait for what another graph, or none, has. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (flags || event->graph != stream->graph) return cudaErrorInvalidValue;
    stream->waited = event;
    return cudaSuccess;
}

/* ---- launches ---- */

static struct FakeStream stream_of(unsigned long long number, unsigned long long graph) {
    const struct FakeStream s = {.number = number,
                                 .graph = graph,
                                 .status =
                                     graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone};
    return s;
}
/* Launch on a stream of a device. Returns the stream for which this one now waits, or NULL. An error: the
 * stream itself, which never waits for itself. */
static struct FakeStream *launch(int device, struct FakeStream *stream, int launched) {
    EpLaunch l;
    const EpComm comm = {.launch_sequence = 0};
    stream->waited = NULL;
    test_set_device(device);
    if (ep_begin_launch(device, &comm, stream, "a test", &l)) return stream;
    struct FakeStream *const waits_for = stream->waited ? stream->waited->stream : NULL;
    return ep_end_launch(&l, launched, "a test") == (launched ? EP_ECUDA : 0) ? waits_for : stream;
}

/* ---- tests ---- */

bool test_launch_order_streams(void) {
    struct FakeStream a = stream_of(1, 0), b = stream_of(2, 0);
    CHECK(NULL, launch(30, &a, 0) == NULL);
    CHECK(NULL, launch(30, &a, 0) == NULL);
    CHECK(NULL, launch(30, &b, 0) == &a);
    CHECK(NULL, launch(31, &a, 0) == NULL); /* another device */
    /* A launch that failed leaves the order as it was. */
    CHECK(NULL, launch(30, &a, (int)cudaErrorInvalidValue) == &b);
    CHECK(NULL, launch(30, &a, 0) == &b);
    /* The stream was destroyed, and a new one has its handle. Work of the old one may still run. */
    a.number = 3;
    CHECK(NULL, launch(30, &a, 0) == &a);
    return true;
}

/* Two threads capture a graph each at the same time. Each graph orders its own streams. */
bool test_launch_order_graphs(void) {
    struct FakeStream a = stream_of(1, 0), a1 = stream_of(11, 100), b1 = stream_of(12, 100),
                      a2 = stream_of(21, 200), b2 = stream_of(22, 200);
    CHECK(NULL, launch(32, &a, 0) == NULL);
    CHECK(NULL, launch(32, &a1, 0) == NULL);
    CHECK(NULL, launch(32, &a2, 0) == NULL);
    CHECK(NULL, launch(32, &b1, 0) == &a1);
    CHECK(NULL, launch(32, &b2, 0) == &a2);
    CHECK(NULL, launch(32, &a1, 0) == &b1);
    CHECK(NULL, launch(32, &a, 0) == NULL); /* what runs does not wait for what is captured */
    /* Many graphs, one after the other, use few events. */
    const uint32_t before = num_events;
    for (uint32_t i = 0; i < 1000; i++) {
        struct FakeStream first = stream_of(31, 1000 + i), second = stream_of(32, 1000 + i);
        CHECK(NULL, launch(32, &first, 0) == NULL);
        CHECK(NULL, launch(32, &second, 0) == &first);
    }
    CHECK(NULL, num_events - before < 40);
    return true;
}

/* A thread that has not chosen a device has device 0. The guard makes no context there. */
bool test_guard_makes_no_context(void) {
    EpGuard g;
    has_context[40] = has_context[41] = has_context[42] = false;
    test_set_device(40);
    retaining = CUDA_ERROR_INVALID_VALUE;
    CHECK_CODE(NULL, EP_ECUDA, ep_guard(41, &g));
    retaining = CUDA_SUCCESS;
    CHECK(NULL, num_pushed == 0 && now_current() == 40);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_CODE(NULL, 0, ep_guard(41, &g));
        CHECK(NULL, now_current() == 41);
        CHECK_CODE(NULL, EP_ETIMEOUT, ep_unguard(&g, EP_ETIMEOUT));
        CHECK(NULL, now_current() == 40 && num_pushed == 0 && !has_context[40] && has_context[41]);
    }
    CHECK_CODE(NULL, 0, ep_guard(40, &g)); /* its own device */
    ep_unguard(&g, 0);
    CHECK(NULL, now_current() == 40 && !has_context[40]);
    /* A device that has a context is set, and set back. */
    has_context[40] = true;
    CHECK_CODE(NULL, 0, ep_guard(42, &g));
    CHECK(NULL, now_current() == 42 && num_pushed == 0);
    ep_unguard(&g, 0);
    CHECK(NULL, now_current() == 40);
    return true;
}
