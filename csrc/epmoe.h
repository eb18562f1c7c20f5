/* epmoe.h - the public C interface: worlds, symmetric heaps, expert-parallel layers.
 *
 * Functions return 0 or a negative EpCode (protocol/abi.h); ep_error_text() tells the calling thread
 * what was wrong.  Objects are counted: _create gives the first reference, _release drops one.
 * "Collective" means: every rank of the world calls it, in the same order.  A stream is a CUDA stream
 * as void *, and is ignored on the CPU, where every call has finished when it returns.
 * A world and what belongs to it are used by one thread at a time. */
#ifndef EPMOE_H
#define EPMOE_H
#include <stdbool.h>
#include <stdint.h>

#include "epmoe_device.h"
#include "protocol/abi.h"

typedef struct EpWorld EpWorld;
typedef struct EpHeap EpHeap;
typedef struct EpLayer EpLayer;
typedef enum { EP_CPU = 0, EP_CUDA = 1 } EpBackendKind;

const char *ep_error_text(void);
/* "ValueError" and so on: the exception that stands for a code. */
const char *ep_error_name(int code);

/* ---- world: who takes part, and who is still alive ---- */

#define EP_NAME_BYTES 8 /* an abstract socket name that the kernel chose */
#define EP_NONCE_BYTES 16
#define EP_EXCHANGE_BYTES 512
#define EP_PAGE_BYTES 8192u

typedef struct {
    uint32_t rank, num_ranks;
    double timeout_s;
    int listen_fd;                                    /* from ep_world_listen; the world closes it */
    unsigned char nonce[EP_NONCE_BYTES];              /* the same on every rank */
    unsigned char names[EP_MAX_RANKS][EP_NAME_BYTES]; /* of every rank's listening socket */
} EpWorldConfig;

/* Open this rank's meeting place; its name and a random nonce go to the other ranks by any way. */
int ep_world_listen(int *listen_fd, unsigned char name[EP_NAME_BYTES], unsigned char nonce[EP_NONCE_BYTES]);
/* Collective: connect to every other rank.  A peer must be of the same user and know the nonce. */
int ep_world_create(const EpWorldConfig *config, EpWorld **world);
/* num_ranks worlds inside this process, each to be used by its own thread.  CPU heaps only. */
int ep_world_create_threads(uint32_t num_ranks, double timeout_s, EpWorld *worlds[]);
/* Collective: all gets num_ranks blocks of num_bytes (at most EP_EXCHANGE_BYTES).  Sizes that differ are
 * EP_EMISMATCH on every rank, and the next exchange works. */
int ep_world_exchange(EpWorld *world, const void *mine, uint32_t num_bytes, void *all);
/* Take part in an exchange only to say that this rank failed with `code`: the others get EP_EPEER, none waits. */
int ep_world_refuse(EpWorld *world, int code);
/* A function that an exchange's wait for a peer calls ten times a second; when it says true it ends, and with it
 * its world.  The Python module looks for Ctrl-C in it.  One for the whole process, or NULL. */
void ep_world_set_interrupt(bool (*wanted)(void));
/* 0, or why the world has come to its end. */
int ep_world_check(EpWorld *world);
/* A bit for each rank that is gone, as far as this one knows by now: it has died, or left alone and was missed. */
uint32_t ep_world_lost_ranks(EpWorld *world);
/* End the world for all ranks, for a reason. */
void ep_world_abort(EpWorld *world, int code, uint32_t rank, const char *text);
/* A page of text: who ended the world, and the last operations of every rank.  With EPMOE_FLIGHT_RECORD=DIR
 * it is added to DIR/epmoe-rank{r}-pid{pid}.txt at the end of the world. */
int ep_world_flight_record(EpWorld *world, char page[EP_PAGE_BYTES]);
/* Collective: wait for all, then leave.  Leaving alone (collective = false) tells the peers so. */
int ep_world_close(EpWorld *world, bool collective);
/* Before this process ends: worlds that it has left alone stop looking after what is on its way, half a second behind their end. */
void ep_world_settle_all(void);
void ep_world_release(EpWorld *world);
uint32_t ep_world_rank(const EpWorld *world);
uint32_t ep_world_size(const EpWorld *world);
int ep_world_set_timeout(EpWorld *world, double timeout_s);

/* ---- heap: the same bytes on every rank, reachable from every rank ---- */

typedef struct {
    uint64_t total_bytes, used_bytes, free_bytes, largest_free_bytes, peak_bytes, num_allocations;
} EpHeapStats;

/* Collective.  Every rank's block is mapped by every other, and every pair is tried.  status: 0, or the
 * code with which this rank cannot take part, so that all fail. */
int ep_heap_create(EpWorld *world, EpBackendKind kind, int device, uint64_t num_bytes, int status,
                   EpHeap **heap);
/* Collective; zeroed.  status: as above.  Nothing is allocated for no bytes. */
int ep_heap_alloc(EpHeap *heap, uint64_t num_bytes, uint64_t alignment, int status, uint64_t *off);
int ep_heap_free(EpHeap *heap, uint64_t off); /* collective; 0: of nothing */
int ep_heap_translate(EpHeap *heap, uint64_t off, uint32_t peer, void **address);
int ep_heap_offset(EpHeap *heap, const void *address, uint64_t num_bytes, uint64_t *off);
void ep_heap_stats(EpHeap *heap, EpHeapStats *stats);
/* Copy between any memory of this rank and off of peer, in stream order. */
int ep_heap_put(EpHeap *heap, uint64_t dst_off, const void *src, uint64_t num_bytes, uint32_t peer,
                void *stream);
int ep_heap_get(EpHeap *heap, void *dst, uint64_t src_off, uint64_t num_bytes, uint32_t peer, void *stream);
/* A u64 at off of peer: set or add, after everything this rank has put there (release, system scope). */
int ep_heap_signal(EpHeap *heap, uint64_t off, uint64_t value, bool add, uint32_t peer, void *stream);
/* Until the u64 at off of this rank is >= or == value: then what it publishes is readable (acquire). */
int ep_heap_wait(EpHeap *heap, uint64_t off, uint64_t value, bool exact, void *stream);
int ep_heap_barrier(EpHeap *heap, void *stream);
/* For kernels that reach peers by themselves; good until the heap is closed.  Waits have the limit that the world has now. */
int ep_heap_handle(EpHeap *heap, EpDeviceHeap *handle);
int ep_heap_sync(EpHeap *heap, void *stream); /* wait for the stream, raise what went wrong in it */
int ep_heap_close(EpHeap *heap);              /* collective */
void ep_heap_release(EpHeap *heap);           /* local only: never waits for a peer */
EpHeap *ep_heap_retain(EpHeap *heap);
EpBackendKind ep_heap_kind(const EpHeap *heap);
int ep_heap_device(const EpHeap *heap);
/* Which one of its world: the same on all ranks. */
uint16_t ep_heap_number(const EpHeap *heap);

/* ---- layer: route -> plan -> dispatch -> (gemm) -> combine ---- */

/* A tensor as its owner describes it.  dtype: EpDtype, or one of those below; strides in elements. */
enum {
    EP_I32 = 16,
    EP_I64,
    EP_I16,
    EP_I8,
    EP_U8,
    EP_F64,
    EP_OTHER
}; /* what no operation takes has a name, too */
typedef struct {
    void *data;
    uint32_t dtype, num_dims, element_bytes;
    int64_t shape[4], stride[4];
    EpBackendKind kind;
    int device;
} EpTensor;

typedef struct {
    EpShape shape;
    uint32_t num_buffers; /* communication buffers: calls that may be in flight at once */
    uint32_t num_sm;      /* CUDA: thread blocks that move tokens; CPU: worker threads */
    uint32_t reserve_sms; /* CUDA: SMs that no operation takes; may differ from rank to rank, as num_sm */
} EpLayerConfig;

/* 0, or what is wrong with the shape; num_bytes: heap bytes that ep_layer_create will take. */
int ep_layer_check_config(const EpLayerConfig *config, uint64_t *num_bytes);
/* Collective: the ranks' configurations are one, or an error says in what they differ.  ep_layer_create does this, too: it is for who makes
 * the layer's heap first.  status: 0, or why this rank has no configuration, which ep_error_text says. */
int ep_layer_agree(EpWorld *world, const EpLayerConfig *config, int status);
int ep_layer_create(EpHeap *heap, const EpLayerConfig *config, EpLayer **layer); /* collective */
int ep_layer_close(EpLayer *layer);                                              /* collective */
void ep_layer_release(EpLayer *layer);
int ep_layer_plan_words(EpLayer *layer, uint64_t num_tokens, uint64_t *num_words);
/* Collective, each of the following.  indices [T][K] i32 or i64; scatter NULL or i32 [T][K] or of all
 * ranks; plan i32 [plan_words(T)].  sort_slots: tokens travel by expert, as the megakernels want it. */
int ep_layer_plan(EpLayer *layer, uint32_t buffer, const EpTensor *indices, const EpTensor *scatter,
                  bool sort_slots, const EpTensor *plan, void *stream);
/* Wait, on the host, for the rows of a plan of this buffer; NULL: of the newest. */
int ep_layer_num_rows(EpLayer *layer, uint32_t buffer, const EpTensor *plan, void *stream,
                      uint32_t *num_rows);
/* x [T][H], weight NULL or f32 [T][K]; rows [>= M][H], row_weight NULL or f32 [>= M]; recv i32
 * [W * max_tokens * (1 + K)]: which row came from which token, for combine.  A plan of another T, or of more rows
 * than the tensors have, is seen when the operation runs: EP_EINVAL on this rank, EP_EPEER on the others.  requires_grad: an
 * operation of the backward will follow on this one; it must on all ranks, or on none. */
int ep_layer_dispatch(EpLayer *layer, uint32_t buffer, const EpTensor *x, const EpTensor *weight,
                      const EpTensor *plan, const EpTensor *rows, const EpTensor *row_weight,
                      const EpTensor *recv, bool requires_grad, void *stream);
/* rows [>= M][H], row_weight and row_scalar NULL or f32 [>= M]; out [T][H], out_scalar NULL or f32 [T][K]. */
int ep_layer_combine(EpLayer *layer, uint32_t buffer, const EpTensor *rows, const EpTensor *row_weight,
                     const EpTensor *row_scalar, const EpTensor *plan, const EpTensor *recv,
                     const EpTensor *out, const EpTensor *out_scalar, bool requires_grad, void *stream);
/* Dispatch, and the grouped product of the rows that it places, in one launch; CUDA only.  gemm_weight [L][N][H], out
 * [>= M][N], or [>= M][N / 2] where the activation is gated; the rest as in ep_layer_dispatch, but that rows behind M are
 * left as they are. */
typedef struct {
    const EpTensor *x, *weight, *plan, *rows, *row_weight, *recv;
    const EpTensor *gemm_weight, *bias, *out; /* bias NULL or [L][N] */
    uint32_t activation;                      /* EpActivation */
    double alpha, limit;                      /* its numbers; see EpGemmParams */
    uint32_t num_move, num_tail;              /* thread blocks; see EpDispatchGemmParams */
    uint32_t num_copies;                      /* tokens that are one row of x; see EpDispatchParams */
    bool waits_for_expert, requires_grad;
} EpDispatchGemm;
int ep_layer_dispatch_gemm(EpLayer *layer, uint32_t buffer, const EpDispatchGemm *g, void *stream);
/* The grouped product of a [>= M][K] with gemm_weight [L][H][K], into rows [>= M][H], and the combine of those, in one
 * launch; CUDA only. */
typedef struct {
    const EpTensor *a, *gemm_weight, *bias, *rows, *row_weight, *plan, *recv, *out;
    uint32_t num_move, num_reduce; /* thread blocks; see EpGemmCombineParams */
    bool is_serial, requires_grad;
} EpGemmCombine;
int ep_layer_gemm_combine(EpLayer *layer, uint32_t buffer, const EpGemmCombine *g, void *stream);
/* Enter the operation `op` only to say that this rank failed with `code`: the others raise, none waits. */
int ep_layer_refuse(EpLayer *layer, uint32_t buffer, uint32_t op, int code, void *stream);
int ep_layer_barrier(EpLayer *layer, uint32_t buffer, void *stream);
/* Wait for the stream and raise what went wrong in it. */
int ep_layer_sync(EpLayer *layer, void *stream);
/* From now on the megakernels on this buffer write what their warps do to `events`, i64 [blocks * 12 * room * 2], zeroed;
 * NULL: no longer.  EP_EINVAL where the module was built without the profiler. */
int ep_layer_trace(EpLayer *layer, uint32_t buffer, const EpTensor *events, uint32_t room);
EpHeap *ep_layer_heap(EpLayer *layer);
/* For tests: let the next operation of a buffer have this epoch. */
int ep_layer_set_epoch(EpLayer *layer, uint32_t buffer, uint64_t epoch, void *stream);

/* ---- grouped GEMM: local to a rank, CUDA only ---- */

/* What is multiplied: kernels/gemm.h has the kinds and the activations. */
typedef struct {
    uint32_t kind, activation;
    double alpha, limit;
    const EpTensor *a, *b, *offsets, *out; /* offsets: i32 [L + 1], on the device */
    const EpTensor *bias, *row_weight;     /* NULL, or [L][N] of a's dtype and f32 [M] */
    const EpTensor *tickets;               /* i64 [1]: 0 before, and again behind; one for each stream */
    bool is_portable;                      /* use the kernel for any GPU, also where there is a better one */
} EpGemm;
int ep_grouped_gemm(const EpGemm *gemm, void *stream);

#endif /* EPMOE_H */
