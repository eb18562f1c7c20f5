/* backend.h - the interface of the CPU and CUDA backends, and communication buffers (comm_buffer.c).
 *
 * heap.c and layer.c reach a backend only through the table EpBackend. Work is enqueued on a stream; on the
 * CPU it has finished when the function returns. Functions return 0, or a code with its error text set.
 * Invariant: operations of one launch sequence run in the order of their calls, whatever their streams. */
#ifndef EP_BACKEND_H
#define EP_BACKEND_H
#include "epmoe.h"
#include "protocol/activation_gradient.h"
#include "protocol/four_bit.h"
#include "protocol/low_latency.h"
#include "protocol/params.h"
#include "protocol/wgrad_fp8.h"
#include "runtime/deferred_free.h"

/* What a rank sends to a peer so that the peer can map its heap. A file descriptor may be sent with it. */
typedef struct {
    uint64_t num_bytes, address;
    unsigned char handle[64];
    int32_t runtime_version, driver_version;
} EpHeapHandle;

/* The device of a rank's heap, and its free memory. Ranks with the same device_id share it. */
typedef struct {
    /* CUDA: the UUID of the GPU. CPU: zeros on every rank, because all ranks share the host memory. */
    unsigned char device_id[16];
    uint64_t free_bytes;
    uint32_t num_sms;   /* CUDA: SMs of the GPU. CPU: 0. */
    uint32_t may_share; /* ranks that are processes may share this device */
} EpHeapDevice;

typedef struct {
    /* This rank's device. sharing.c compares its free memory with the total need of all ranks that share
     * it. */
    int (*heap_device)(int device, EpHeapDevice *out);
    /* Allocate num_bytes on the device. heap_handle (and *fd, or -1) lets peers map the memory. */
    int (*heap_open)(int device, uint64_t num_bytes, void **memory, EpHeapHandle *heap_handle, int *fd);
    void (*heap_close)(int device, void *memory, uint64_t num_bytes);
    /* Map a peer's memory from its heap handle. fd is closed in any case. */
    int (*heap_import)(int device, const EpHeapHandle *mine, const EpHeapHandle *heap_handle, int fd,
                       void **memory);
    void (*heap_unimport)(int device, void *memory, uint64_t num_bytes);
    /* Host memory that workers read and write. */
    int (*host_alloc)(int device, uint64_t num_bytes, void **memory);
    void (*host_free)(int device, void *memory, uint64_t num_bytes);
    int (*copy)(int device, void *dst, const void *src, uint64_t num_bytes, void *stream);
    int (*zero)(int device, void *dst, uint64_t num_bytes, void *stream);
    /* Wait for the stream. Returns an error if the stream has not finished a second after the world ends. */
    int (*sync)(int device, void *stream, EpWorld *world);
    /* True if the stream is being captured for a CUDA graph. NULL if the backend has no graphs. */
    bool (*is_captured)(void *stream);
    /* Wait for all work that this process has enqueued on the device. */
    int (*sync_all)(int device);
    /* The operations that wait for peers. Those of one sequence (EpComm.launch_sequence) run in the order of
     * these calls, whatever their streams. scales: the dtype of the operation, and in FP8 the scales. */
    int (*plan)(int device, const EpPlanParams *p, void *stream);
    int (*dispatch)(int device, const EpDispatchParams *p, const EpScales *scales, uint32_t num_sm,
                    void *stream);
    int (*combine)(int device, const EpCombineParams *p, uint32_t num_sm, void *stream);
    int (*ll_dispatch)(int device, const EpLlDispatchParams *p, uint32_t num_sm, void *stream);
    int (*ll_combine)(int device, const EpLlCombineParams *p, uint32_t num_sm, void *stream);
    int (*enter)(int device, const EpComm *c, uint32_t word, void *stream); /* word: EP_OP_WORD */
    /* Let the next operation, on whatever stream, begin after the work that this stream has now. NULL: a
     * backend whose calls return when their work is done. */
    int (*order)(int device, const EpComm *c, void *stream);
    /* Clear the buffer's faulted word in stream order, after the operations that it made do nothing. */
    int (*clear)(int device, const EpComm *c, void *stream);
    /* The fused operations. ep_multiplies says in which dtypes they are called. */
    int (*dispatch_gemm)(int device, const EpDispatchGemmParams *p, const EpScales *scales, void *stream);
    int (*gemm_combine)(int device, const EpGemmCombineParams *p, const EpScales *scales, void *stream);
    /* The operations that only their stream orders. */
    int (*signal)(int device, uint64_t *word, uint64_t value, bool add, void *stream);
    int (*wait)(int device, const EpComm *c, const uint64_t *word, uint64_t value, bool exact, void *stream);
    /* scales: NULL, or those of numbers in FP8, which ep_multiplies tells whether the backend has. four_bit:
     * NULL, or how the weights have 4 bits, in a FORWARD of rows in 16 bits. low_rank: NULL, or what is
     * added, to a FORWARD or DGRAD of 16 bits. own: NULL, or the columns that rows of 16 bits keep. */
    int (*gemm)(int device, const EpGemmParams *p, const EpGemmScales *scales, const EpFourBit *four_bit,
                const EpLowRank *low_rank, const EpOwnColumns *own, void *stream);
    int (*activation)(int device, const EpActivationParams *p, void *stream);
    int (*move_choices)(int device, const EpMoveChoicesParams *p, void *stream);
    int (*map_choices)(int device, const EpMapChoicesParams *p, void *stream);
    int (*quantize)(int device, const EpQuantizeParams *p, void *stream);
    int (*rescale)(int device, const EpRescaleParams *p, void *stream);
    int (*transpose)(int device, const EpTransposeParams *p, void *stream);
    int (*quantize_weight)(int device, const EpQuantizeWeightParams *p, void *stream);
    int (*expand)(int device, const EpExpandParams *p, void *stream);
    int (*wgrad_fp8)(int device, const EpWgradFp8Params *p, void *stream); /* NULL if there is none */
    /* The tile counter of a stream, or *counter = NULL; see cuda/tile_counters.h. NULL: gemm needs none. */
    int (*tile_counter)(int device, void *stream, uint64_t **counter);
    int (*query)(int device, EpDevice *out); /* what the device can do; NULL for the CPU */
    /* Load all kernels before the first wait; see launch.h. is_shared: ranks share the device. */
    int (*preload)(int device, bool is_shared);
} EpBackend;

extern const EpBackend ep_cpu_backend;
extern const EpBackend ep_cuda_backend; /* only if built with CUDA */
/* The backend of a kind, or NULL after the error text is set. */
const EpBackend *ep_backend(EpBackendKind kind);

enum { EP_NUM_VOIDS = 16 }; /* errors of a buffer that the host remembers */
/* A communication buffer: an allocation of the heap, host words, and an entry in the watchdog's list. The
 * heap, which fills in the first five fields, outlives the buffer. */
typedef struct {
    EpWorld *world;
    const EpBackend *backend;
    int device;
    bool on_stream; /* the backend is CUDA */
    uint64_t off;
    EpComm comm;
    /* For the flight record: the heap or layer that owns the buffer, and the number of operations so far.
     * The number is the epoch, as the host counts it. */
    bool is_heaps;
    uint16_t of, buffer;
    uint64_t num_ops;
    /* An operation that was void, and those that were begun before its error was raised, do not count in
     * num_ops. With num_uncounted, each operation has a number of its own. voids: the numbers of the newest
     * operations that were void, of num_voids in all. was_captured: an operation was captured in a CUDA
     * graph, so that the host no longer knows the numbers of those that run. */
    bool was_captured;
    uint64_t num_uncounted, num_voids;
    struct {
        uint64_t first, last;
    } voids[EP_NUM_VOIDS];
} EpCommBuffer;
/* Collective: allocate the memory of a buffer in the heap. */
int ep_heap_alloc_buffer(EpHeap *heap, const EpShape *shape, EpCommBuffer *b);
/* Local, after ep_heap_alloc_buffer: fill in the buffer, and open it. The caller has set the owner in b. */
int ep_heap_open_buffer(EpHeap *heap, const EpShape *shape, EpCommBuffer *b);
/* Local: prepare a buffer that its heap has filled in. */
int ep_comm_open(EpCommBuffer *b, const EpShape *shape);
void ep_comm_close(EpCommBuffer *b); /* local */
/* Begin the call record of an operation of this buffer, an EP_OP_WORD. ep_world_end_call ends it. */
uint64_t ep_comm_begin_call(EpCommBuffer *b, uint32_t word, uint64_t num_tokens, int code, void *stream);
/* The number of the newest operation of this buffer, and whether an operation was void: false after a
 * capture. Of an operation before the EP_NUM_VOIDS newest errors nobody knows, so it counts as void. was_void
 * waits for no operation. */
uint64_t ep_comm_newest_call(const EpCommBuffer *b);
bool ep_comm_was_void(const EpCommBuffer *b, uint64_t number);
/* Called before an operation: 0, or the error of the world or of an earlier operation of this buffer. */
int ep_comm_check(EpCommBuffer *b, void *stream);
/* End the world, because this rank could not launch an operation on its GPU: it cannot propagate the error by
 * a header, which needs a launch too, and its peers would wait for this rank. The text of ep_error_text() is
 * kept. */
void ep_comm_give_up(EpCommBuffer *b, int code, void *stream);
const EpBackend *ep_heap_backend(const EpHeap *heap);
EpWorld *ep_heap_world(const EpHeap *heap);
/* Wait until this rank's GPU has finished all its work. Called before memory is freed, because peers and
 * kernels may still use it. */
int ep_heap_quiesce(EpHeap *heap);
/* 0, or the error of a call on a heap that is closed. */
int ep_heap_check_open(const EpHeap *heap);
/* Local: the owner of this allocation was destroyed without a close. The allocation is free after all ranks
 * have said this of it, from their next allocation or free on, which is collective. */
void ep_heap_drop(EpHeap *heap, uint64_t off);
/* The layers of the heap whose free is deferred (deferred_free.h). They hold no reference to it. */
EpDeferredFrees *ep_heap_deferred_layers(EpHeap *heap);
/* Run the deferred frees of the heap and of its world. May wait for the GPU. */
void ep_heap_run_deferred_frees(EpHeap *heap);

#endif /* EP_BACKEND_H */
