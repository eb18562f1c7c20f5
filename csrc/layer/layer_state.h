/* layer_state.h - the inside of a layer, for layer.c, layer_ops.c and experts.c.
 *
 * layer.c creates the layer and begins and ends its operations. layer_ops.c checks their arguments.
 * Invariant: buffers[0 .. config.num_buffers) are the communication buffers; each runs one operation at a
 * time. Of several threads that call operations on one buffer, all but one wait for its lock. */
#ifndef EP_LAYER_STATE_H
#define EP_LAYER_STATE_H
#include <pthread.h>
#include <stdatomic.h>

#include "backend.h"
#include "runtime/deferred_free.h"

#define EP_MAX_BUFFERS 16u
_Static_assert(EP_MAX_BUFFERS <= 256, "a call record has 8 bits for the number of a buffer");

/* Symmetric memory through which the weights of helper slots travel: num_slots slots of slot_bytes from off
 * on. The layer has a reference to the heap. */
typedef struct {
    EpHeap *heap;
    uint64_t off, slot_bytes;
    uint32_t num_slots;
} EpStaging;
enum { EP_NUM_WEIGHTS = 4 }; /* gate and up, their bias, down, its bias */
/* Which helper slot computes rows of which expert, and the weights [L][..] of this rank. A slot has one
 * expert's part of each. A weight that is absent is NULL. */
typedef struct {
    uint32_t num;
    const uint32_t *expert, *slot; /* both physical */
    const EpTensor *weights[EP_NUM_WEIGHTS];
} EpHelpedWeights;

/* The helps of a call whose slots do not hold the weights already. */
typedef struct {
    uint32_t num, expert[EP_MAX_HELPS], slot[EP_MAX_HELPS];
} EpTravels;

/* The rooms of a layer (room.c): a table in which an entry is found by its key. */
enum { EP_MAX_ROOMS = 1024, EP_ROOM_SLOTS = 2 * EP_MAX_ROOMS };
typedef struct {
    const void *weight;
    int64_t num_rows;
    uint8_t magnitude; /* the bits of the number of tokens */
    bool is_kept, is_used;
} EpRoom;
typedef struct {
    pthread_mutex_t lock; /* guards the other fields */
    uint32_t num;         /* entries that are used */
    EpRoom at[EP_ROOM_SLOTS];
} EpRooms;

/* What a call of an operation awaits before its launch: that this plan has the number of rows M. Its outputs
 * have the room of such calls. */
typedef struct {
    const EpTensor *plan;
    EpRoomOf of;
} EpAwaited;
static inline EpAwaited ep_awaited(const EpTensor *plan, const EpTensor *x, bool is_kept,
                                   const EpTensor *weight) {
    const uint64_t num_tokens = x && x->num_dims ? (uint64_t)x->shape[0] : 0; /* nobody has checked x */
    return (EpAwaited){plan, {num_tokens, is_kept, weight ? weight->data : NULL}};
}

struct EpLayer {
    EpHeap *heap;
    EpLayerConfig config;
    bool has_fused; /* the device has the fused kernels of 16 bits */
    atomic_int num_refs;
    atomic_bool closed; /* set while all locks are held; some readers hold none */
    EpDeferredFree deferred_free;
    uint64_t waited_ns[EP_MAX_RANKS];   /* of a closed layer: see ep_layer_waited */
    uint32_t num_freed;                 /* buffers whose heap memory is free; written inside of calls */
    uint64_t ticket[EP_MAX_BUFFERS];    /* number of the newest plan of each buffer */
    const void *newest[EP_MAX_BUFFERS]; /* address of that plan */
    EpMoveChoicesParams moves[EP_MAX_BUFFERS]; /* of each buffer; see balance.c */
    EpStaging staging;                         /* heap NULL: none */
    EpCommBuffer buffers[EP_MAX_BUFFERS];
    pthread_mutex_t locks[EP_MAX_BUFFERS]; /* each guards a buffer, and its ticket, newest and moves */
    EpRooms rooms;
};

/* Lock a buffer: 0, or an error without the lock. The wait ends when the operation of another thread ends,
 * which has a limit, or when the user interrupts it. The caller must not hold Python's lock, which that
 * operation may need. */
int ep_layer_lock(EpLayer *l, uint32_t buffer);
/* Lock all buffers: no other thread of this rank is in an operation then. 0, or an error and no lock. */
int ep_layer_lock_all(EpLayer *l);
/* Unlock a buffer, and return the code of what was called while it was locked. */
static inline int ep_layer_unlock(EpLayer *l, uint32_t buffer, int code) {
    pthread_mutex_unlock(&l->locks[buffer]);
    return code;
}

/* Begin an operation on a locked buffer: 0, or the error of an earlier one. */
int ep_layer_begin(EpLayer *l, uint32_t buffer, void *stream, EpCommBuffer **out);
/* End the host's part of an operation. On the CPU the operation has finished, so its failure is known
 * here. On CUDA a failure means that it was not launched; then this rank propagates the error to the
 * others. */
int ep_layer_end(EpLayer *l, EpCommBuffer *b, uint32_t op, uint64_t record, int code, void *stream);
/* Propagate an error of this thread to the other ranks in the operation on a locked buffer, and keep the
 * text of that error. */
int ep_layer_fail(EpLayer *l, uint32_t buffer, uint32_t op, int code, void *stream);
/* 0, or the error of a tensor that is no plan. */
int ep_layer_check_plan(const EpLayer *l, const EpTensor *plan);
/* ep_layer_num_rows on a locked buffer. */
int ep_layer_rows_locked(EpLayer *l, uint32_t buffer, const EpTensor *plan, void *stream, uint32_t *num_rows);
/* On a locked buffer, in a layer with host_counts: wait for a plan, and find who helps whom (balance.h).
 * held: NULL, or what the slots hold, a table [E + 1] that becomes what they hold in this call. num_rows:
 * becomes M of this rank, that after the help. travels: gets those whose weights must travel. */
int ep_layer_find_helps(EpLayer *l, uint32_t buffer, const EpBalance *b, const EpTensor *plan, EpHeld *held,
                        void *stream, uint32_t *num_rows, EpTravels *travels);
/* Copy the weights of this rank's helped experts to the stagings of the helpers, or those of its own staging
 * to its helper slots. The weights have been checked. */
int ep_layer_send_weights(const EpLayer *l, const EpHelpedWeights *w, void *stream);
int ep_layer_receive_weights(const EpLayer *l, const EpHelpedWeights *w, void *stream);
/* The physical expert of each choice of a plan, i32 [T][K], after the help that was found; -1: dropped. */
int ep_layer_move_choices(EpLayer *l, uint32_t buffer, const EpTensor *plan, const EpTensor *indices,
                          void *stream);
/* ep_layer_barrier on a locked buffer. */
int ep_layer_barrier_locked(EpLayer *l, uint32_t buffer, void *stream);
/* Whether outputs with room for `room` rows serve a call with num_rows: they are enough, and if a backward
 * keeps them, not many more. The next calls make the room that this one had wanted. */
bool ep_layer_fits_room(EpLayer *l, const EpRoomOf *of, uint32_t room, uint32_t num_rows);
/* Run an operation on a locked buffer. awaited: NULL if the caller knows M. ran: NULL, or what the call has
 * done, to which this is added. */
int ep_layer_run_locked(EpLayer *l, uint32_t buffer, uint32_t op, const void *args, const EpAwaited *awaited,
                        void *stream, EpRan *ran);

#endif /* EP_LAYER_STATE_H */
