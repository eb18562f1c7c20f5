/* backend.h - what a backend promises.  heap.c and layer.c know no more of CPU or CUDA than this table.
 *
 * Work goes to a stream; on the CPU it has finished when the function returns.  Functions return 0 or
 * a code with its text set. */
#ifndef EP_BACKEND_H
#define EP_BACKEND_H
#include "epmoe.h"
#include "kernels/fused.h"

/* What one rank sends another so that it can map its heap; a descriptor may go beside it. */
typedef struct {
    uint64_t num_bytes, address;
    unsigned char handle[64];
    int32_t runtime_version, driver_version;
} EpHeapCard;

/* The memory that a rank's heap would come from.  Ranks with the same device_id share that memory. */
typedef struct {
    unsigned char
        device_id[16]; /* CUDA: the UUID of the GPU.  CPU: zeros, because all ranks are on one machine */
    uint64_t free_bytes;
    uint32_t num_sms;   /* CUDA: SMs of the GPU.  CPU: 0 */
    uint32_t may_share; /* ranks that are processes may share this device */
} EpHeapRoom;

typedef struct {
    /* What this rank's device has left.  heap.c compares it with what all ranks that share the device need. */
    int (*heap_room)(int device, EpHeapRoom *room);
    /* A block of num_bytes on the device, and the card (and descriptor, or -1) that lets peers map it. */
    int (*heap_open)(int device, uint64_t num_bytes, void **memory, EpHeapCard *card, int *fd);
    void (*heap_close)(int device, void *memory, uint64_t num_bytes);
    /* A peer's block, from its card; fd is closed in any case. */
    int (*heap_import)(int device, const EpHeapCard *mine, const EpHeapCard *card, int fd, void **memory);
    void (*heap_unimport)(int device, void *memory, uint64_t num_bytes);
    /* Host memory that workers read and write. */
    int (*host_alloc)(int device, uint64_t num_bytes, void **memory);
    void (*host_free)(int device, void *memory, uint64_t num_bytes);
    int (*copy)(int device, void *dst, const void *src, uint64_t num_bytes, void *stream);
    int (*zero)(int device, void *dst, uint64_t num_bytes, void *stream);
    int (*sync)(int device, void *stream,
                EpWorld *world);       /* leaves a second after the world ends, at the latest */
    bool (*is_captured)(void *stream); /* for a graph; NULL where there are none */
    int (*sync_all)(int device);       /* everything that this process has given the device */
    /* The operations that wait for peers: on whatever streams, those of one lane (EpComm) run in the order of these calls. */
    int (*plan)(int device, const EpPlanParams *p, void *stream);
    int (*dispatch)(int device, const EpDispatchParams *p, uint32_t num_sm, void *stream);
    int (*combine)(int device, const EpCombineParams *p, uint32_t num_sm, void *stream);
    int (*enter)(int device, const EpComm *c, uint32_t op, void *stream);
    int (*clear)(int device, const EpComm *c,
                 void *stream); /* the faulted word, after the operations that it made void */
    /* NULL where there are none. */
    int (*dispatch_gemm)(int device, const EpDispatchGemmParams *p, void *stream);
    int (*gemm_combine)(int device, const EpGemmCombineParams *p, void *stream);
    /* What is ordered by its stream only. */
    int (*signal)(int device, uint64_t *word, uint64_t value, bool add, void *stream);
    int (*wait)(int device, const EpComm *c, const uint64_t *word, uint64_t value, bool exact, void *stream);
    int (*gemm)(int device, const EpGemmParams *p, void *stream); /* NULL where there is none */
    int (*preload)(int device); /* load every kernel before the first wait */
} EpBackend;

extern const EpBackend ep_cpu_backend;
extern const EpBackend ep_cuda_backend; /* only where built with CUDA */
/* The backend of a kind, or NULL with the text set. */
const EpBackend *ep_backend(EpBackendKind kind);

/* A communication buffer: a region of the heap, host words, and a place under the watchdog. */
typedef struct {
    EpComm comm;
    uint64_t off;
    /* For the flight record: whose it is, and operations so far (the epoch, as the host counts). */
    bool is_heaps, on_stream;
    uint16_t of, buffer;
    uint64_t num_ops;
} EpCommBuffer;
/* Collective: its region of the heap. */
int ep_comm_alloc(EpHeap *heap, const EpShape *shape, EpCommBuffer *b);
/* Local, behind that.  b says whose it is. */
int ep_comm_open(EpHeap *heap, const EpShape *shape, EpCommBuffer *b);
void ep_comm_close(EpHeap *heap, EpCommBuffer *b); /* local */
/* Note an operation of this buffer; ep_world_noted ends it. */
uint64_t ep_comm_note(EpHeap *heap, EpCommBuffer *b, uint32_t op, uint64_t num_tokens, int code,
                      void *stream);
/* Before an operation: 0, or the error that the world or an earlier operation of this buffer has met. */
int ep_comm_check(EpHeap *heap, EpCommBuffer *b, void *stream);
/* Nothing can be launched here any more, on a GPU, so that no header says so: the others hear of it by the end of the world.  Keeps the
 * error's text. */
void ep_comm_give_up(EpHeap *heap, int code, void *stream);
const EpBackend *ep_heap_backend(const EpHeap *heap);
EpWorld *ep_heap_world(const EpHeap *heap);
/* SMs that this rank leaves to other ranks on the same GPU; 0 where it has the GPU to itself. */
uint32_t ep_heap_reserved_sms(const EpHeap *heap);
/* Until this rank's GPU has done all that it was given: before memory goes back, which peers and kernels may still use. */
int ep_heap_quiesce(EpHeap *heap);

#endif /* EP_BACKEND_H */
