/* epmoe.h - the public C interface: worlds, symmetric heaps, expert-parallel layers, grouped GEMM.
 *
 * A function returns 0 or a negative EpCode (protocol/errors.h). After an error, ep_error_text() gives the
 * calling thread the reason. Objects are reference-counted: _create returns the first reference, _release
 * drops one. "Collective" means that every rank of the world must call the function, in the same order. A
 * stream is a CUDA stream as void *. On the CPU it is ignored, and every call has finished when it returns.
 * Invariant: only one thread at a time uses a world and the heaps and layers that belong to it. The
 * operations of a layer are an exception: several threads may call them, and those on one buffer run one
 * after the other. On CUDA the error of an operation may come in a call of another thread. */
#ifndef EPMOE_H
#define EPMOE_H
#include <stdbool.h>
#include <stdint.h>

#include "epmoe_device.h"
#include "protocol/activation.h"
#include "protocol/balance.h"
#include "protocol/errors.h"
#include "protocol/expert_map.h"
#include "protocol/ops.h"
#include "protocol/shape.h"

typedef struct EpWorld EpWorld;
typedef struct EpHeap EpHeap;
typedef struct EpLayer EpLayer;
typedef enum { EP_CPU = 0, EP_CUDA = 1 } EpBackendKind;

const char *ep_error_text(void);
/* The name of the Python exception for a code, for example "ValueError". */
const char *ep_error_name(int code);

/* ---- world: the ranks that work together, and which of them are alive ---- */

#define EP_NAME_BYTES 8 /* an abstract socket name, chosen by the kernel */
#define EP_NONCE_BYTES 16
#define EP_ALL_GATHER_BYTES 512
#define EP_PAGE_BYTES 8192u
#define EP_END_BYTES 256 /* of the text that says why a world has ended */
/* Instead of the number of a rank: the rank is on another node, and not in this world. */
#define EP_NO_RANK UINT32_MAX

typedef struct {
    uint32_t rank, num_ranks;
    double timeout_s;
    int listen_fd;                                    /* from ep_world_listen; the world closes it */
    unsigned char nonce[EP_NONCE_BYTES];              /* the same on every rank */
    unsigned char names[EP_MAX_RANKS][EP_NAME_BYTES]; /* of every rank's listening socket */
} EpWorldConfig;

/* Open this rank's listening socket. The caller sends its name and the random nonce to the other ranks by
 * any means. */
int ep_world_listen(int *listen_fd, unsigned char name[EP_NAME_BYTES], unsigned char nonce[EP_NONCE_BYTES]);
/* Close a listening socket that is not passed to ep_world_create. */
void ep_world_unlisten(int listen_fd);
/* Collective: connect to every other rank. A peer must belong to the same user and know the nonce. */
int ep_world_create(const EpWorldConfig *config, EpWorld **world);
/* Create num_ranks worlds in this process. Each is for a thread of its own. CPU heaps only. */
int ep_world_create_threads(uint32_t num_ranks, double timeout_s, EpWorld *worlds[]);
/* Collective: `all` receives num_bytes from each rank, in rank order (num_bytes at most
 * EP_ALL_GATHER_BYTES). If the sizes differ, every rank gets EP_EMISMATCH, and the next all-gather works. */
int ep_world_all_gather(EpWorld *world, const void *mine, uint32_t num_bytes, void *all);
/* Take part in an all-gather only to report that this rank failed with `code`. The other ranks get EP_EPEER
 * instead of waiting. */
int ep_world_propagate_error(EpWorld *world, int code);
/* Set the function that a thread calls ten times a second while it waits for a peer or a stream. If the
 * function returns true, the wait and its world end. The Python module uses it to check for Ctrl-C. There is
 * one function for the whole process; NULL removes it. */
void ep_world_set_interrupt(bool (*wanted)(void));
/* The program waits, in code of its own, on behalf of an operation of this thread. Calls of this thread that
 * a signal handler makes meanwhile are refused. Returns what was set before. */
bool ep_world_set_waiting(bool is_waiting);
/* 0, or EP_EINVAL in a signal handler that runs while this thread waits. */
int ep_world_check_handler(void);
/* 0, or the reason for which the world has ended. */
int ep_world_check(EpWorld *world);
/* One bit for each rank that this rank knows to be gone: the rank has died, or it left alone and an
 * operation needed it. */
uint32_t ep_world_lost_ranks(EpWorld *world);
/* End the world for all ranks, with this reason. rank: the culprit, or EP_NO_RANK. */
void ep_world_abort(EpWorld *world, int code, uint32_t rank, const char *text);
/* The code with which the world has ended, and its text; 0 while it has not. A close is no end. */
int ep_world_reason(EpWorld *world, char text[EP_END_BYTES]);
/* The ranks of this world are those of one of several nodes; its rank 0 is rank first_rank of all. The texts
 * that say why the world has ended then say so. */
void ep_world_set_place(EpWorld *world, uint32_t node, uint32_t first_rank);
/* A page of text: which rank ended the world, and the last operations of every rank. If
 * EPMOE_FLIGHT_RECORD=DIR is set, the page is written to DIR/epmoe-rank{r}-pid{pid}.txt, a new file, when the
 * world ends. */
int ep_world_flight_record(EpWorld *world, char page[EP_PAGE_BYTES]);
/* Collective: wait for all ranks, then leave. A rank that leaves alone (collective = false) tells its
 * peers. */
int ep_world_close(EpWorld *world, bool collective);
/* Called before this process ends. A world that this process has left alone still monitors its unfinished
 * operations. It stops half a second after the process left it. */
void ep_world_settle_all(void);
void ep_world_release(EpWorld *world);
uint32_t ep_world_rank(const EpWorld *world);
uint32_t ep_world_size(const EpWorld *world);
int ep_world_set_timeout(EpWorld *world, double timeout_s);

/* ---- heap: memory of the same size on every rank, mapped by every rank ---- */

typedef struct {
    uint64_t total_bytes, used_bytes, free_bytes, largest_free_bytes, peak_bytes, num_allocations;
} EpHeapStats;

/* Collective. Every rank maps the memory of every other rank, and every pair is tested. status: 0, or the
 * code with which this rank cannot take part; then all ranks fail. */
int ep_heap_create(EpWorld *world, EpBackendKind kind, int device, uint64_t num_bytes, int status,
                   EpHeap **heap);
/* Collective. The memory is zeroed. status: as above. If num_bytes is 0, nothing is allocated. */
int ep_heap_alloc(EpHeap *heap, uint64_t num_bytes, uint64_t alignment, int status, uint64_t *off);
int ep_heap_free(EpHeap *heap, uint64_t off); /* collective; off 0: nothing was allocated */
int ep_heap_translate(EpHeap *heap, uint64_t off, uint32_t peer, void **address);
int ep_heap_offset(EpHeap *heap, const void *address, uint64_t num_bytes, uint64_t *off);
int ep_heap_stats(EpHeap *heap, EpHeapStats *stats);
/* Copy between any memory of this rank and offset off of peer, in stream order. */
int ep_heap_put(EpHeap *heap, uint64_t dst_off, const void *src, uint64_t num_bytes, uint32_t peer,
                void *stream);
int ep_heap_get(EpHeap *heap, void *dst, uint64_t src_off, uint64_t num_bytes, uint32_t peer, void *stream);
/* Set the u64 at off of peer, or add to it, after everything that this rank has put there (release,
 * system scope). */
int ep_heap_signal(EpHeap *heap, uint64_t off, uint64_t value, bool add, uint32_t peer, void *stream);
/* Wait until the u64 at off of this rank is >= value, or == value if exact. Then the data that it
 * publishes is readable (acquire). */
int ep_heap_wait(EpHeap *heap, uint64_t off, uint64_t value, bool exact, void *stream);
int ep_heap_barrier(EpHeap *heap, void *stream);
/* A handle for the user's kernels that access peers themselves. It is valid until the heap is closed.
 * Waits with it have the timeout that the world has at this call. */
int ep_heap_handle(EpHeap *heap, EpDeviceHeap *handle);
int ep_heap_sync(EpHeap *heap, void *stream); /* wait for the stream, then return its error */
int ep_heap_close(EpHeap *heap);              /* collective */
void ep_heap_release(EpHeap *heap);           /* local: it never waits for a peer */
EpHeap *ep_heap_retain(EpHeap *heap);
/* The same for a tensor over the memory of a rank. While there is one, that memory stays mapped. */
void ep_heap_retain_view(EpHeap *heap, uint32_t peer);
void ep_heap_release_view(EpHeap *heap, uint32_t peer);
EpBackendKind ep_heap_kind(const EpHeap *heap);
int ep_heap_device(const EpHeap *heap);
/* The number of the heap among the heaps of its world: the same on all ranks. */
uint16_t ep_heap_number(const EpHeap *heap);

/* ---- layer: route -> plan -> dispatch -> (gemm) -> combine ---- */

/* The dtypes that a row cannot have: X(NAME, text). No operation accepts some of them; they are here so that
 * an error can name them. */
#define EP_OTHER_DTYPES(X) \
    X(I32, "int32")        \
    X(I64, "int64")        \
    X(I16, "int16")        \
    X(I8, "int8")          \
    X(U8, "uint8")         \
    X(F64, "float64")
enum {
    EP_BEFORE_OTHER_DTYPES = 15,
#define X(NAME, text) EP_##NAME,
    EP_OTHER_DTYPES(X)
#undef X
        EP_OTHER /* any other dtype */
};
/* A tensor as its owner describes it. dtype is an EpDtype or one of the values above. Strides are in
 * elements. */
typedef struct {
    void *data;
    uint32_t dtype, num_dims, element_bytes;
    int64_t shape[4], stride[4];
    EpBackendKind kind;
    int device;
} EpTensor;

typedef struct {
    EpShape shape;
    uint32_t num_buffers; /* communication buffers: operations that may be in flight at once */
    uint32_t num_sm;      /* CUDA: CTAs that move tokens; CPU: worker threads */
    /* CUDA: SMs that no operation uses; like num_sm, it may differ between ranks */
    uint32_t reserve_sms;
    uint32_t expert_alignment; /* the rows of an expert are padded to a multiple of it; 0 and 1: no padding */
    uint32_t
        expert_capacity;  /* every expert has exactly so many rows, with padding; 0: as many as it needs */
    uint32_t host_counts; /* nonzero: the rows of each expert go to the host together with M */
    /* A layer with a heap of its own is not made unless so many communication buffers of the world stay free:
     * a layer that only makes something faster must not take the last ones. */
    uint32_t spare_buffers;
    /* The fused operations; see EpDispatchGemmParams and EpGemmCombineParams. num_move 0: the layer has none.
     */
    uint32_t fused;              /* EpFused */
    uint32_t num_move, num_tail; /* CTAs that move tokens beside a GEMM; those of them that only receive */
    uint32_t num_reduce;         /* CTAs that add up the tokens */
    uint32_t waits_for_expert;   /* a tile waits for all rows of its expert, not only for its own */
    uint32_t is_serial;          /* rows return after all are computed */
    uint32_t sort_slots;         /* a plan orders the slots by expert, which makes fused operations fast */
    uint32_t num_copies; /* tokens that share a row of the input: the choices of a token; 0 and 1: one */
} EpLayerConfig;
/* When the products of experts share a launch with the communication beside them. */
typedef enum { EP_FUSED_NEVER, EP_FUSED_ALWAYS /* where the kernels exist */, EP_FUSED_BEST } EpFused;

/* The fields of a layer's configuration (X macro), in the order in which the extension module takes them.
 * AGREED(field, name, kind): when a layer is created, all ranks compare the value, and a difference is an
 * error on all of them. LOCAL(field, name): ranks may have different values. name is what a user calls the
 * field. kind says how an error prints the value: NUMBER, or DTYPE or MODE, which have names. */
#define EP_CONFIG_FIELDS(AGREED, LOCAL)                  \
    AGREED(shape.num_ranks, "ranks", NUMBER)             \
    AGREED(shape.num_experts, "num_experts", NUMBER)     \
    AGREED(shape.num_topk, "topk", NUMBER)               \
    AGREED(shape.max_tokens, "max_tokens", NUMBER)       \
    AGREED(shape.hidden, "hidden", NUMBER)               \
    AGREED(shape.dtype, "dtype", DTYPE)                  \
    AGREED(shape.combine_mode, "combine_mode", MODE)     \
    AGREED(expert_alignment, "expert_alignment", NUMBER) \
    AGREED(expert_capacity, "expert_capacity", NUMBER)   \
    AGREED(shape.capacity, "capacity", NUMBER)           \
    AGREED(num_buffers, "num_buffers", NUMBER)           \
    LOCAL(num_sm, "num_sm")                              \
    LOCAL(reserve_sms, "reserve_sms")                    \
    LOCAL(host_counts, "host_counts")                    \
    LOCAL(spare_buffers, "spare_buffers")                \
    LOCAL(fused, "fused")                                \
    LOCAL(num_move, "num_move")                          \
    LOCAL(num_tail, "num_tail_sms")                      \
    LOCAL(num_reduce, "num_reduce_sms")                  \
    LOCAL(waits_for_expert, "waits_for_expert")          \
    LOCAL(is_serial, "is_serial")                        \
    LOCAL(sort_slots, "token_sorting")                   \
    LOCAL(num_copies, "num_copies")
/* Check a configuration: 0, or an error. num_bytes: heap bytes that ep_layer_create will allocate. */
int ep_layer_check_config(const EpLayerConfig *config, uint64_t *num_bytes);

static inline uint32_t ep_layer_num_copies(const EpLayerConfig *c) {
    return c->num_copies ? c->num_copies : 1;
}

/* The rows that the experts of a rank get if routing is uniform and each rank has max_tokens tokens. */
uint64_t ep_layer_expected_rows(const EpShape *shape);
/* Which path a call takes (path.c). Whether an expert gets more rows on average than in decoding: */
bool ep_layer_has_many_rows(const EpShape *shape);
/* Whether calls without gradients take a low-latency layer of the same shape: */
bool ep_layer_decodes(const EpLayerConfig *config);
/* The rows for which a training step makes room without knowing M, so that the host need not wait for the
 * plan: the capacity, where so many rows take little memory. Else 0. */
uint32_t ep_layer_unread_rows(const EpShape *shape);
/* Whether a product with weights [L][n][k] shares a launch with the communication beside it. has_kernels: the
 * device has the fused kernels for the dtype of the weights. */
typedef struct {
    uint32_t n, k;
    uint32_t columns; /* rows of the gate and up weights; 0 for the second product in FP8 */
    bool is_fp8, has_four_bits, trains;
    bool has_split_gates; /* gates in front of ups, in an activation that multiplies them */
} EpProduct;
bool ep_layer_fuses(const EpLayerConfig *config, bool has_kernels, const EpProduct *product);
/* Whether products in this dtype (EpOpDtype) run on this backend, fused or by themselves. */
bool ep_multiplies(EpBackendKind kind, uint32_t dtype);
/* Collective: check that all ranks have the same configuration; if not, the error names the field.
 * ep_layer_create does this too. This function is for callers that create the heap of the layer first.
 * status: 0, or the code with which this rank has no configuration; ep_error_text() then has the reason. */
int ep_layer_agree(EpWorld *world, const EpLayerConfig *config, int status);
int ep_layer_create(EpHeap *heap, const EpLayerConfig *config, EpLayer **layer); /* collective */
int ep_layer_close(EpLayer *layer);                                              /* collective */
void ep_layer_release(EpLayer *layer);
/* Elements of the handle of a low-latency layer, whose configuration is valid. offsets: where the first row
 * of each local expert is located in it. */
uint64_t ep_layer_ll_handle_words(const EpLayerConfig *config, uint64_t *offsets);
int ep_layer_plan_words(EpLayer *layer, uint64_t num_tokens, uint64_t *num_words);
/* The arguments of each operation: EpPlanArgs, EpDispatchArgs, EpCombineArgs, EpDispatchGemmArgs and
 * EpGemmCombineArgs. protocol/ops.h has their fields and says what they are. */
#define EP_FIELD_OF_TENSOR const EpTensor *
#define EP_FIELD_OF_OPTIONAL const EpTensor *
#define EP_FIELD_OF_OUT const EpTensor *
#define EP_FIELD_OF_OWN const EpTensor *
#define EP_FIELD_OF_OWN_OUT const EpTensor *
#define EP_FIELD_OF_OWN_OUT_OPTIONAL const EpTensor *
#define EP_FIELD_OF_PLAN const EpTensor *
#define EP_FIELD_OF_PLAN_OUT const EpTensor *
#define EP_FIELD_OF_U32 uint32_t
#define EP_FIELD_OF_ACTIVATION EpActivation
#define EP_FIELD_OF_PLANNED uint32_t
#define EP_FIELD_OF_AWAITS uint32_t
#define EP_ARGUMENT(S, kind, name) EP_FIELD_OF_##kind name;
#define X(NAME, name, Type, text)           \
    typedef struct {                        \
        EP_ARGS_##name(EP_ARGUMENT, unused) \
    } Ep##Type##Args;
#define B(NAME, name, Type, text)
EP_OPERATIONS(X, B)
#undef X
#undef B
#define C(name, Type, NAME)                 \
    typedef struct {                        \
        EP_ARGS_##name(EP_ARGUMENT, unused) \
    } Ep##Type##Args;
EP_CALLS(C)
#undef C
/* For how many rows the outputs of a call have room, if the call awaits the number of its rows (room.c).
 * EpRoomOf: which calls have the same room. */
typedef struct {
    uint64_t num_tokens; /* those with the same number of bits */
    bool is_kept;        /* a backward keeps the outputs */
    const void *weight;  /* of outputs that are kept: the address of the weights, or NULL */
} EpRoomOf;
#define EP_NO_ROOM (-1)
/* The rows to make room for: 0 at first, EP_NO_ROOM once the caller has set that. Calls set the others. */
int64_t ep_layer_room(EpLayer *layer, const EpRoomOf *of);
/* num_rows: EP_NO_ROOM after there was no memory for the room. It is not tried again. */
void ep_layer_set_room(EpLayer *layer, const EpRoomOf *of, int64_t num_rows);
/* What a call did. Without an awaited plan num_rows is 0. */
typedef struct {
    uint32_t num_rows;  /* M of the awaited plan */
    uint32_t num_fused; /* fused operations that were launched */
    /* false: nothing was launched after the plan, because the outputs do not fit num_rows, or because there
     * is help (ep_layer_helps) */
    bool is_launched;
} EpRan;
/* Collective: run operation op, an EpOpKind with arguments. args: the struct of its arguments. */
int ep_layer_run(EpLayer *layer, uint32_t buffer, uint32_t op, const void *args, void *stream, EpRan *ran);
/* ep_layer_plan(layer, buffer, const EpPlanArgs *, stream), and so on: ep_layer_run for each operation. */
#define X(NAME, name, Type, text)                                                                  \
    static inline int ep_layer_##name(EpLayer *layer, uint32_t buffer, const Ep##Type##Args *args, \
                                      void *stream) {                                              \
        EpRan ran;                                                                                 \
        return ep_layer_run(layer, buffer, EP_OP_##NAME, args, stream, &ran);                      \
    }
#define B(NAME, name, Type, text)
EP_OPERATIONS(X, B)
#undef X
#undef B
/* Collective: ep_layer_experts(layer, buffer, const EpExpertsArgs *, stream, &ran), and so on. */
#define C(name, Type, NAME)                                                                        \
    int ep_layer_##name(EpLayer *layer, uint32_t buffer, const Ep##Type##Args *args, void *stream, \
                        EpRan *ran);
EP_CALLS(C)
#undef C
/* Wait on the host for the number of rows of a plan of this buffer. plan NULL means the newest plan. */
int ep_layer_num_rows(EpLayer *layer, uint32_t buffer, const EpTensor *plan, void *stream,
                      uint32_t *num_rows);
/* The same in a layer with host_counts. expert_rows: room for EP_MAX_EXPERTS; becomes the rows of each local
 * expert, with padding. */
int ep_layer_expert_rows(EpLayer *layer, uint32_t buffer, const EpTensor *plan, void *stream,
                         int32_t *expert_rows, uint32_t *num_experts);
/* How long this rank has waited for each rank [W] to enter operations of the layer since its creation, in
 * nanoseconds. The host waits for nothing. ns: room for EP_MAX_RANKS. */
int ep_layer_waited(EpLayer *layer, uint64_t *ns, uint32_t *num_ranks);
/* What the latest ep_layer_experts of a buffer has found: which helper slots compute rows of which experts,
 * and how many. Empty, if it has balanced nothing. */
int ep_layer_helps(EpLayer *layer, uint32_t buffer, EpHelps *helps);
/* Give a layer the memory through which weights travel to helper slots: num_slots slots of slot_bytes in
 * `heap` from off on, a multiple of 256. */
int ep_layer_set_staging(EpLayer *layer, EpHeap *heap, uint64_t off, uint64_t slot_bytes, uint32_t num_slots);
/* Collective: let the helper slots hold what they held in the call that has found these helps: a barrier, the
 * weights, and another barrier. expert, slot [num]: of the helps. weights: gate_up, gate_up_bias, down and
 * down_bias of that call; NULL: a bias that is not there, or of which the caller needs nothing. */
int ep_layer_restore_weights(EpLayer *layer, uint32_t buffer, uint32_t num, const uint32_t *expert,
                             const uint32_t *slot, const EpTensor *const weights[4], void *stream);
/* Enter operation `op` only to report that this rank failed with `code`. The other ranks raise an error
 * instead of waiting. */
int ep_layer_propagate_error(EpLayer *layer, uint32_t buffer, uint32_t op, int code, void *stream);
int ep_layer_barrier(EpLayer *layer, uint32_t buffer, void *stream);
/* Wait for the stream, then return the error of the operations in it. */
int ep_layer_sync(EpLayer *layer, void *stream);
/* The number of the newest operation of this rank on a buffer. Numbers ascend, and none is used again. */
int ep_layer_newest_call(EpLayer *layer, uint32_t buffer, uint64_t *number);
/* Whether the operation of this number had no effect on any rank, as far as errors have been raised: false in
 * a forked child, and after an operation was captured in a CUDA graph. Of one before the 16 newest errors on
 * the buffer nobody knows, so it counts as such. Waits for no operation. */
int ep_layer_was_void(EpLayer *layer, uint32_t buffer, uint64_t number, bool *was_void);
/* From now on, the fused kernels on this buffer write the times of their warps' work to `events`, i64
 * [blocks * 12 * capacity * 2], zeroed. NULL stops this. EP_EINVAL if the module was built without the
 * profiler. */
int ep_layer_trace(EpLayer *layer, uint32_t buffer, const EpTensor *events, uint32_t capacity);
EpHeap *ep_layer_heap(EpLayer *layer);

/* ---- devices: local to a rank, CUDA only ---- */

typedef struct {
    uint32_t major, minor; /* the compute capability */
    uint32_t num_sms;
    uint32_t
        has_hopper; /* there are kernels for sm_90a, which include the fused kernels, and the GPU runs them */
} EpDevice;
/* What a device can do. The runtime is asked once in a process for each device. */
int ep_device_query(int device, EpDevice *out);

/* ---- grouped GEMM: local to a rank; on the CPU with rows of bf16 and f16 ---- */

/* The operands. protocol/gemm_params.h lists the kinds, activation.h beside it the activations. */
typedef struct {
    uint32_t kind;
    EpActivation activation;
    /* offsets: i32 [L + 1], on the device. out of WGRAD may be f32: scale times the result is added to it. */
    double scale;
    const EpTensor *a, *b, *offsets, *out;
    const EpTensor *bias, *row_weight; /* NULL, or [L][N] of out's dtype and f32 [M] */
    /* NULL; or in a FORWARD of 16 bits with an activation, without row_weight: [M][N], the product with its
     * bias, before the activation. */
    const EpTensor *saved;
    /* NULL; or the GEMM is of FP8: a and b are u8, the bytes of e4m3 numbers, and these are their scales: f32
     * [M][K / 128] and [L][N / 128][K / 128], rounded up, of any strides. */
    const EpTensor *a_scale, *b_scale;
    /* b_scale without a_scale: a FORWARD with weights of 4 bits, and rows of 16 bits. b is u8 [L][N][K / 2];
     * the scales are u8 (MXFP4) or of the rows' dtype (INT4), as protocol/four_bit.h has them; b_zero is NULL
     * or u8, as the scales. protocol/four_bit.h has the layout. */
    const EpTensor *b_zero;
    /* NULL; or a product of low rank that is added to a FORWARD or DGRAD of 16 bits: [M][R], and [L][N][R] or
     * [L][R][K]; see EpLowRank. */
    const EpTensor *low_a, *low_b;
    /* NULL; or i32 [M], the adapters of the rows. Then the GEMM multiplies by the first factors of a mixture,
     * of_adapter columns for each adapter; see EpOwnColumns. */
    const EpTensor *row_tag;
    uint32_t of_adapter;
    /* CUDA: i64 [1], 0 before and after the launch, and of no launch that overlaps with this one. NULL: the
     * counter that the library has for the stream. */
    const EpTensor *tile_counter;
    bool is_portable; /* use the kernel for any GPU even if there is a faster one */
    /* How many rows of `a` are expected to belong to experts, where `a` has room for more. Only the choice of
     * the kernel depends on it. 0: all of them. */
    uint64_t expected_rows;
    bool clears; /* in a FORWARD or DGRAD: rows of out that belong to no expert become 0 */
} EpGemm;
int ep_grouped_gemm(const EpGemm *gemm, void *stream);
/* Whether the library has a tile counter for launches on this stream. It has none while the stream is
 * captured, and for a stream that came after 256 others of its device. */
int ep_gemm_has_counter(int device, void *stream, bool *has);

/* ---- the gradient of an activation: local to a rank, CPU and CUDA ---- */

/* See protocol/activation_gradient.h. h [M][I], or [M][2 I] for a gated activation, and d [M][I], of bf16 or
 * f16; offsets i32 [L + 1]; row_weight f32 [M] or NULL. Outputs: d_h as h, weighted as d, which may be d,
 * dots f32 [M]. On CUDA, I is a multiple of 8. d_h_scale f32 [columns of h / 128][M] and weighted_scale f32
 * [I / 128][M]: both, and d_h and weighted are u8, the bytes of e4m3 numbers, and I is a multiple of 128; or
 * neither. */
typedef struct {
    EpActivation activation;
    const EpTensor *h, *d, *offsets, *row_weight, *d_h, *weighted, *dots, *d_h_scale, *weighted_scale;
    bool is_rowwise; /* with scales: those of a row of d_h become the same, as in EpQuantize */
} EpActivationArgs;
int ep_activation(const EpActivationArgs *a, void *stream);

/* ---- the physical experts of choices: local to a rank ---- */

typedef struct {
    const EpTensor *indices; /* i32 or i64 [T][K] */
    const EpTensor *table;   /* i32 [E + 4][1 + R]; see EpMapChoicesParams */
    const EpTensor *out;     /* i32 [T][K] */
    uint32_t rank;
} EpMapChoices;
int ep_map_choices(const EpMapChoices *a, void *stream);

/* What follows from the logical expert that each physical one holds: its replicas, and the table that
 * ep_map_choices reads. All tensors are in host memory. */
typedef struct {
    const EpTensor *held; /* i64 [P]: logical experts, or -1 for none. Each of the E is held at least once */
    const EpTensor *replicas; /* i64 [E][R]: in ascending order, then -1. R is P - E + 1 */
    const EpTensor *count;    /* i64 [E]: the number of replicas */
    const EpTensor *table;    /* i32 [E + 4][1 + R] */
} EpExpertMap;
int ep_fill_expert_map(const EpExpertMap *a);

/* ---- rows to FP8: local to a rank ---- */

typedef struct {
    EpActivation activation;  /* applied first */
    const EpTensor *x;        /* [M][K], if the activation is gated [M][2 * K]: f32, bf16 or f16 */
    const EpTensor *num_rows; /* NULL, or i32 [1]: rows from this number on are neither read nor written */
    const EpTensor *q;        /* u8 [M][K], the bytes of e4m3 numbers */
    const EpTensor *scales;   /* f32 [K / 128][M], rounded up */
    bool is_pow2;             /* scales are powers of two */
    bool is_rowwise;          /* and all of a row are the same: the largest, see EpRescaleParams */
} EpQuantize;
int ep_quantize(const EpQuantize *quantize, void *stream);

/* Weights of e4m3 get one scale for each expert, see EpRescaleParams. On CUDA, K is a multiple of 16. */
typedef struct {
    const EpTensor *q;      /* u8 [L][N][K], the bytes of e4m3 numbers */
    const EpTensor *scales; /* f32 [L][N / 128][K / 128], rounded up, of any strides; only read */
    const EpTensor *to;     /* f32 [L] */
} EpRescaleWeight;
int ep_rescale_weight(const EpRescaleWeight *rescale, void *stream);

/* Weights of 4 bits to FP8: local to a rank. protocol/four_bit.h has the layout of the first three, and what
 * is computed. N and K are multiples of 64. */
typedef struct {
    const EpTensor *numbers;  /* u8 [L][N][K / 2] */
    const EpTensor *scales;   /* [L][N / 64][K / 256][64 * 256 / group], K / 256 rounded up: u8, or dtype */
    const EpTensor *zeros;    /* NULL, or u8 as scales */
    const EpTensor *q;        /* u8 [L][N][K], the bytes of e4m3 numbers */
    const EpTensor *q_scales; /* f32 [L][N / 128][K / 128], rounded up */
    const EpTensor *to;       /* NULL, or f32 [L]: the scale of each expert, a power of two */
    uint32_t dtype;           /* EP_BF16 or EP_F16: to which a weight is rounded before it is quantised */
} EpExpand;
int ep_expand(const EpExpand *expand, void *stream);

/* ---- the gradient of weights in FP8: local to a rank. protocol/wgrad_fp8.h has the layout of transposed
 * rows [C][P], and what each operation computes. On CUDA, C is a multiple of 16. ---- */

typedef struct {
    const EpTensor *x;       /* u8 [M][C], the bytes of e4m3 numbers */
    const EpTensor *x_scale; /* f32 [M][C / 128], rounded up, of any strides */
    const EpTensor *offsets; /* i32 [L + 1] */
    const EpTensor *q;       /* u8 [C][P]; P = 128 * (M / 128 + L), rounded down */
    const EpTensor *scales;  /* f32 [L][C / 128], rounded up */
} EpTranspose;
int ep_transpose(const EpTranspose *transpose, void *stream);

/* Weights to e4m3, and transposed, with a scale for each block of 128 by 128. */
typedef struct {
    const EpTensor *x;                          /* [L][N][K]: f32, bf16 or f16 */
    const EpTensor *q, *transposed;             /* u8 [L][N][K] and [L][K][N] */
    const EpTensor *scales, *transposed_scales; /* f32 [L][N / 128][K / 128] and [L][K / 128][N / 128] */
} EpQuantizeWeight;
int ep_quantize_weight(const EpQuantizeWeight *quantize, void *stream);

/* The product of two transposed rows for each expert. CUDA devices of Hopper only. */
typedef struct {
    const EpTensor *a, *b;             /* u8 [N][P] and [K][P] */
    const EpTensor *a_scale, *b_scale; /* f32 [L][N / 128] and [L][K / 128], rounded up */
    const EpTensor *offsets;           /* i32 [L + 1] */
    const EpTensor *tile_counter;      /* as in EpGemm */
    const EpTensor *out;               /* [L][N][K]: bf16, f16; or f32, to which scale times it is added */
    double scale;
} EpWgradFp8;
int ep_wgrad_fp8(const EpWgradFp8 *wgrad, void *stream);

#endif /* EPMOE_H */
