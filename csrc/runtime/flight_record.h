/* flight_record.h - the last operations of every rank. They show which rank caused a world's end.
 *
 * Each rank writes a call record (EpCallRecord) for each operation into a ring buffer (flight_ring.c). This
 * costs two reads of the clock and some stores. At the end of the world each rank sends its newest call
 * records to all others. Each rank makes a page of text from them (flight_record.c), and writes it to a file
 * if the user wants that (record_file.c).
 *
 * Invariant: collective operations are counted. "step" is the same number for the same call on every rank. So
 * a rank with a smaller step is behind, and a rank with another operation at the same step is out of order. A
 * rank for which this may be wrong has is_order_unknown set, and its steps are not compared. */
#ifndef EP_RECORD_H
#define EP_RECORD_H
#include <stdatomic.h>

#include "backend.h"

#define EP_RING_ENTRIES 2048u /* a power of two, and more than a GPU can have launches in flight */
#define EP_SENT_RECORDS 10u   /* as many as fit into a frame */

/* The kinds of calls. The operations of layers have the numbers of EpOpKind; these follow: X(NAME, text). */
#define EP_OTHER_CALLS(X)                                               \
    X(HEAP_BARRIER, "heap barrier")                                     \
    X(ALL_GATHER, "exchange")                                           \
    X(HEAP_CREATE, "heap creation")                                     \
    X(LAYER_AGREE, "agreement on a layer")                              \
    X(ALLOC, "allocation")                                              \
    X(FREE, "free")                                                     \
    X(HEAP_CLOSE, "heap close")                                         \
    X(LAYER_CREATE, "layer creation")                                   \
    X(LAYER_CLOSE, "layer close")                                       \
    X(CLOSE, "world close")                                             \
    X(SIGNAL, "signal") /* from here on: not collective, not counted */ \
    X(WAIT, "wait for a signal")
typedef enum {
    EP_CALL_NOTHING = EP_OP_NONE,
    EP_CALL_LAST_OP = EP_NUM_OPS - 1,
#define X(NAME, text) EP_CALL_##NAME,
    EP_OTHER_CALLS(X)
#undef X
        EP_NUM_CALLS
} EpCallKind;

typedef struct {
    uint64_t step;     /* number of collective operations that this rank has entered, including this one */
    uint64_t seq;      /* layer operation or heap barrier: epoch, as the host counts; else: last all-gather */
    uint64_t size;     /* layer operation: tokens; else: bytes */
    uint64_t begin_ns; /* time of the monotonic clock */
    uint64_t end_ns;   /* time of the monotonic clock; 0 while the call is in flight */
    uint8_t what;      /* EpCallKind */
    uint8_t on_stream; /* the end of the call means only that the operation is enqueued */
    uint16_t of;       /* number of the layer or heap, in the order of their creation in this world */
    uint8_t buffer;    /* layer operation: number of the communication buffer */
    uint8_t dtype;     /* layer operation: EpOpDtype */
    int16_t code;      /* 0, or the EpCode that this rank propagated in the operation */
} EpCallRecord;
_Static_assert(sizeof(EpCallRecord) == 48, "a call record has six words");

/* True if the operation is collective (so it is counted); is an operation of a layer; belongs to buffer b. */
static inline bool ep_call_is_counted(const EpCallRecord *n) {
    return n->what > EP_CALL_NOTHING && n->what < EP_CALL_SIGNAL;
}
static inline bool ep_call_is_layers(const EpCallRecord *n) {
    return n->what > EP_CALL_NOTHING && n->what <= EP_CALL_LAST_OP;
}
static inline bool ep_call_is_buffers(const EpCallRecord *n, const EpCommBuffer *b) {
    return n->of == b->of &&
           (b->is_heaps ? n->what == EP_CALL_HEAP_BARRIER : ep_call_is_layers(n) && n->buffer == b->buffer);
}

/* The newest call records of a rank, the oldest first. Ranks send this structure to each other. */
typedef struct {
    uint32_t num;
    uint32_t is_order_unknown; /* the steps may differ from those of the other ranks */
    EpCallRecord at[EP_SENT_RECORDS];
} EpCallRecords;
_Static_assert(sizeof(EpCallRecords) <= EP_ALL_GATHER_BYTES, "call records fit into a frame");

/* An entry of the ring: one call record. A host thread may write it while the watchdog thread reads it.
 * place: the number of the record, counted from 1, or 0 while the entry is being written. If a reader sees
 * the same place before and after its copy of the words, and it is not 0, the copy is one whole record. */
typedef struct {
    _Atomic uint64_t place, word[6];
} EpRingEntry;
typedef struct {
    EpRingEntry entries[EP_RING_ENTRIES];
    _Atomic uint64_t num;         /* call records so far */
    _Atomic uint64_t step;        /* collective operations so far */
    _Atomic uint64_t num_open;    /* threads of this rank that are in a collective call */
    _Atomic uint64_t thread;      /* the first thread that made a synchronous collective call, or 0 */
    atomic_bool is_order_unknown; /* the steps may differ from those of the other ranks; never reset */
} EpRing;

/* Begin a call record. Returns its number, for ep_ring_end. Returns 0 if the call is part of a collective
 * call in which this thread is already. */
uint64_t ep_ring_begin(EpRing *ring, const EpCallRecord *record);
void ep_ring_end(EpRing *ring, uint64_t record, int code);
/* From now on, this rank's steps may differ from those of the other ranks. Reasons: an operation failed, and
 * other ranks may see the failure one or more calls earlier or later; or an operation was captured in a CUDA
 * graph, and its replays make no call records. The ring itself detects a third reason: several threads. */
void ep_ring_order_unknown(EpRing *ring);
/* True if the calling thread is in a collective call that has a record in this ring. */
bool ep_ring_is_in_call(const EpRing *ring);
/* The collective call of this thread has reached this all-gather. Returns a number that identifies the call
 * and is the same on all ranks. */
uint32_t ep_ring_all_gather(EpRing *ring, uint64_t seq);
/* The name of the call that this number identifies. */
void ep_about_name(uint32_t about, char *text, size_t num_bytes);
/* The newest call records of this rank. */
void ep_ring_newest(EpRing *ring, EpCallRecords *out);
/* Find the newest call record of this buffer (a layer's operation or a heap's barrier) with this epoch.
 * Returns its step, and in out the call records around it. Returns 0 if there is none. */
uint64_t ep_ring_about(EpRing *ring, const EpCommBuffer *buffer, uint64_t epoch, EpCallRecords *out);

/* What this rank knows of another rank when the world ends. */
typedef struct {
    bool has_records, is_gone, said_goodbye;
    EpCallRecords records; /* sent by a peer: compare a number with its limits before using it as an index */
    uint64_t heard_seq;    /* the number of the newest all-gather frame that it sent */
    uint64_t heard_ns;     /* the time at which that frame arrived, or 0 */
} EpRankCalls;

/* The data from which a page is made. */
typedef struct {
    uint32_t rank, num_ranks;
    int end_code;      /* 0: the world has not ended */
    uint32_t end_rank; /* the culprit; but if end_word is a signal, the rank that waited for it */
    uint32_t end_word; /* the EpWord of the wait that failed, or 0 */
    uint64_t end_ns;
    bool is_elsewhere; /* the culprit is on another node, and end_rank has no meaning */
    const char *end_text;
    EpRankCalls ranks[EP_MAX_RANKS];
    const EpCommBuffer *const *buffers; /* num_buffers entries, some of them NULL */
    uint32_t num_buffers;
} EpRecord;
/* Make the page: the culprit in the first line, then each rank's last operation, then the operations of all
 * ranks side by side. */
void ep_record_page(const EpRecord *record, char page[EP_PAGE_BYTES]);
/* True if, at this step, ranks made calls that cannot meet, for example calls of two buffers. Then text says
 * which rank called what, and *odd is a rank of the minority. */
bool ep_record_disagrees(const EpRecord *record, uint64_t step, uint32_t *odd, char *text, size_t num_bytes);
/* Write the page to the new file folder/epmoe-rank{rank}-pid{pid}.txt (with -2, -3, ... before .txt if the
 * name exists). On failure, append a line about it to the page. The call takes at most about 2 s, also if the
 * file system does not answer (record_file.c). */
void ep_record_write(const char *folder, uint32_t rank, char page[EP_PAGE_BYTES]);

#endif /* EP_RECORD_H */
