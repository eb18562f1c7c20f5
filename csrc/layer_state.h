/* layer_state.h - a layer from within: layer.c makes it and orders its operations, layer_ops.c checks what they are given. */
#ifndef EP_LAYER_STATE_H
#define EP_LAYER_STATE_H
#include <stdatomic.h>

#include "backend.h"

#define EP_MAX_BUFFERS 16u

struct EpLayer {
    EpHeap *heap;
    EpLayerConfig config;
    atomic_int num_refs;
    bool closed;
    uint32_t num_freed;                 /* buffers, by close */
    uint64_t ticket[EP_MAX_BUFFERS];    /* of the newest plan */
    const void *newest[EP_MAX_BUFFERS]; /* where that is */
    EpCommBuffer buffers[EP_MAX_BUFFERS];
};

/* Ready for an operation on a buffer: nothing has gone wrong before. */
int ep_layer_begin(EpLayer *l, uint32_t buffer, void *stream, EpCommBuffer **out);
/* The operation's end on the host: on the CPU it is over, and so is its failure known; on CUDA, where it was not launched, the
 * others are told. */
int ep_layer_end(EpLayer *l, EpCommBuffer *b, uint32_t op, uint64_t note, int code, void *stream);
/* Tell the others of a failure that is this thread's error, and keep this rank's own reason. */
int ep_layer_fail(EpLayer *l, uint32_t buffer, uint32_t op, int code, void *stream);

#endif /* EP_LAYER_STATE_H */
