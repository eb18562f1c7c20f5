/* launch_order.c - the launch sequences of this process. launch_order.h says why operations need an order.
 *
 * Process-wide state: the sequences, because all worlds of a process share its GPUs. */
#include "cuda/launch_order.h"

#include <pthread.h>

#include "cuda/capabilities.h"
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else
#define nvtxRangePushA(text) ((void)(text))
#define nvtxRangePop() ((void)0)
#endif

/* Graphs of a sequence whose captures may interleave: one for each thread that captures. A further graph
 * takes the place of the one that was used the longest ago. The capture of that graph is expected to have
 * ended. */
#define EP_GRAPHS 32
struct EpLaunchSequence {
    /* one for each sequence, because a launch may wait for a launch of another sequence */
    pthread_mutex_t lock;
    EpLaunchOrder runs, captured[EP_GRAPHS];
    uint64_t num_captured; /* operations */
};
static EpLaunchSequence sequences[EP_MAX_DEVICES][EP_MAX_RANKS];
static void init_sequences(void) {
    for (uint32_t i = 0; i < EP_MAX_DEVICES; i++)
        for (uint32_t j = 0; j < EP_MAX_RANKS; j++) pthread_mutex_init(&sequences[i][j].lock, NULL);
}
static int sequence_of(int device, uint32_t sequence, EpLaunchSequence **out) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (device < 0 || device >= EP_MAX_DEVICES)
        return ep_error(EP_EINVAL, "device %d of at most %d", device, EP_MAX_DEVICES);
    pthread_once(&once, init_sequences);
    *out = &sequences[device][sequence];
    return 0;
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

/* The order of the operations of a graph. A place that another graph had begins anew, with its event. */
static EpLaunchOrder *order_of_graph(EpLaunchSequence *sequence, unsigned long long graph) {
    EpLaunchOrder *o = sequence->captured;
    for (uint32_t i = 0; i < EP_GRAPHS && o->graph != graph; i++)
        if (sequence->captured[i].graph == graph || sequence->captured[i].last_use < o->last_use)
            o = &sequence->captured[i];
    if (o->graph != graph) o->has_operation = false;
    o->graph = graph;
    o->last_use = ++sequence->num_captured;
    return o;
}

/* A number that no other stream has. CUDA tells it only of a stream that is not captured. While a graph is
 * captured, its streams exist, so that their handles differ. */
static int number_of(cudaStream_t stream, bool is_captured, unsigned long long *number) {
    *number = (unsigned long long)(uintptr_t)stream;
    if (!is_captured) EP_CUDA_TRY(cudaStreamGetId(stream, number));
    return 0;
}

/* Make the stream wait for the operation before this one, if that one is on another stream. */
static int wait_for_previous(EpLaunch *l) {
    unsigned long long graph = 0;
    EP_TRY(graph_of(l->stream, &graph));
    EP_TRY(number_of(l->stream, graph != 0, &l->stream_number));
    EpLaunchOrder *o = graph ? order_of_graph(l->sequence, graph) : &l->sequence->runs;
    if (!o->end) EP_CUDA_TRY(cudaEventCreateWithFlags(&o->end, cudaEventDisableTiming));
    if (o->has_operation && o->stream != l->stream_number)
        EP_CUDA_TRY(cudaStreamWaitEvent(l->stream, o->end, 0));
    l->order = o;
    return 0;
}

int ep_begin_launch(int device, const EpComm *c, void *stream, const char *range, EpLaunch *l) {
    EP_TRY(sequence_of(device, c->launch_sequence, &l->sequence));
    l->stream = (cudaStream_t)stream;
    pthread_mutex_lock(&l->sequence->lock);
    int code = ep_guard(device, &l->guard);
    if (!code) {
        code = wait_for_previous(l);
        if (code) ep_unguard(&l->guard, code);
    }
    if (code) pthread_mutex_unlock(&l->sequence->lock);
    else nvtxRangePushA(range);
    return code;
}

int ep_end_launch(EpLaunch *l, int launched, const char *what) {
    EpLaunchOrder *o = l->order;
    int code = ep_cuda_check((cudaError_t)launched, what);
    if (!code) {
        o->has_operation = true;
        o->stream = l->stream_number;
        code = ep_cuda_check(cudaEventRecord(o->end, l->stream), "cudaEventRecord");
    }
    nvtxRangePop();
    ep_unguard(&l->guard, code);
    pthread_mutex_unlock(&l->sequence->lock);
    return code;
}
