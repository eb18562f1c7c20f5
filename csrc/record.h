/* record.h - the flight record: what every rank did last, so that a world's end can be laid at somebody's door.
 *
 * Each rank notes its operations in a ring, at the cost of two looks at the clock and some stores.  At the
 * end of the world the ranks send each other their newest notes, and each makes a page of them.
 *
 * Collective operations are counted: "step" is the same number for the same call on every rank, so a rank
 * with a smaller step is behind, and one with another operation at the same step is out of order. */
#ifndef EP_RECORD_H
#define EP_RECORD_H
#include <stdatomic.h>

#include "backend.h"

#define EP_RING_NOTES 2048u /* a power of two; more than a GPU has launches on their way */
#define EP_SENT_NOTES 10u   /* as many as fit a frame */

/* What an operation is; the first six are EpOpKind. */
#define EP_DIDS(X)                                                             \
    X(EP_DID_NOTHING, "nothing")                                               \
    X(EP_DID_PLAN, "plan")                                                     \
    X(EP_DID_DISPATCH, "dispatch")                                             \
    X(EP_DID_COMBINE, "combine")                                               \
    X(EP_DID_BARRIER, "barrier")                                               \
    X(EP_DID_DISPATCH_GEMM, "dispatch + gemm")                                 \
    X(EP_DID_GEMM_COMBINE, "gemm + combine")                                   \
    X(EP_DID_HEAP_BARRIER, "heap barrier")                                     \
    X(EP_DID_EXCHANGE, "exchange")                                             \
    X(EP_DID_HEAP_CREATE, "heap creation")                                     \
    X(EP_DID_LAYER_AGREE, "agreement on a layer")                              \
    X(EP_DID_ALLOC, "allocation")                                              \
    X(EP_DID_FREE, "free")                                                     \
    X(EP_DID_HEAP_CLOSE, "heap close")                                         \
    X(EP_DID_LAYER_CREATE, "layer creation")                                   \
    X(EP_DID_LAYER_CLOSE, "layer close")                                       \
    X(EP_DID_CLOSE, "world close")                                             \
    X(EP_DID_SIGNAL, "signal") /* from here on: not collective, not counted */ \
    X(EP_DID_WAIT, "wait for a signal")
typedef enum {
#define X(name, text) name,
    EP_DIDS(X)
#undef X
        EP_NUM_DIDS
} EpDid;

typedef struct {
    uint64_t step; /* collective operations that this rank has entered so far, with this one */
    uint64_t seq; /* epoch of a layer's operation, as the host counts; else the number of its last exchange */
    uint64_t size;             /* tokens of a layer's operation; else bytes */
    uint64_t begin_ns, end_ns; /* on the monotonic clock; 0 while it is in flight */
    uint8_t what, on_stream;   /* EpDid; on_stream: its end means that it is enqueued */
    uint16_t of, buffer;       /* number of the layer or heap in this world, by creation; buffer of a layer */
    int16_t code;              /* EpCode with which this rank refused it */
} EpNote;
_Static_assert(sizeof(EpNote) == 48, "a note has six words");

/* Collective; of a layer; of this buffer. */
static inline bool ep_note_is_counted(const EpNote *n) {
    return n->what >= EP_DID_PLAN && n->what < EP_DID_SIGNAL;
}
static inline bool ep_note_is_layers(const EpNote *n) {
    return n->what >= EP_DID_PLAN && n->what <= EP_DID_GEMM_COMBINE;
}
static inline bool ep_note_is_buffers(const EpNote *n, const EpCommBuffer *b) {
    return n->of == b->of &&
           (b->is_heaps ? n->what == EP_DID_HEAP_BARRIER : ep_note_is_layers(n) && n->buffer == b->buffer);
}

/* The newest notes of a rank, the oldest first: what goes over the wire. */
typedef struct {
    uint32_t num, is_vague; /* is_vague: their steps need not be the other ranks' */
    EpNote notes[EP_SENT_NOTES];
} EpNotes;
_Static_assert(sizeof(EpNotes) <= EP_EXCHANGE_BYTES, "notes fit a frame");

/* A note is written by the rank's thread while the watchdog may read it.  place: 1 + its place among all
 * notes, 0 while it is written: a reader who sees the same place before and after has read one note. */
typedef struct {
    _Atomic uint64_t place, word[6];
} EpRingNote;
typedef struct {
    EpRingNote notes[EP_RING_NOTES];
    _Atomic uint64_t num, step,
        open;                /* notes so far; collective operations so far; the one in flight, or 0 */
    _Atomic uint64_t thread; /* whose operations that are over when they return are, or 0 */
    atomic_bool is_vague;    /* for good: these steps need not be the other ranks' */
} EpRing;

/* Begin a note: its number for ep_ring_end, or 0 inside of another one, which it is a part of. */
uint64_t ep_ring_begin(EpRing *ring, const EpNote *note);
void ep_ring_end(EpRing *ring, uint64_t note, int code);
/* What happened makes this rank's steps its own from now on: an operation that failed, which other ranks may have seen before or
 * after more calls; one that is captured, and runs when nobody notes it.  Threads that share the ring are seen by itself. */
void ep_ring_blur(EpRing *ring);
/* The operation in flight has come to this exchange.  Which one it is, as a number that is the same on all ranks; 0 where it
 * may be another thread's. */
uint32_t ep_ring_exchange(EpRing *ring, uint64_t seq);
/* That number in words. */
void ep_about_name(uint32_t about, char *text, size_t num_bytes);
void ep_ring_newest(EpRing *ring, EpNotes *out);
/* The notes about the newest one of a layer's operation or a heap's barrier of this epoch, and its step; 0: there is none. */
uint64_t ep_ring_about(EpRing *ring, const EpCommBuffer *buffer, uint64_t epoch, EpNotes *out);

/* What this rank knows of another when the world ends. */
typedef struct {
    bool has_notes, is_gone, said_goodbye;
    EpNotes notes;                /* a peer's numbers: nothing is an index before it is compared */
    uint64_t heard_seq, heard_ns; /* its newest exchange, and when it came */
} EpRankNotes;

/* Everything that a page is made of. */
typedef struct {
    uint32_t rank, num_ranks;
    int end_code; /* 0: the world lives */
    uint32_t end_rank;
    uint64_t end_ns;
    const char *end_text;
    EpRankNotes ranks[EP_MAX_RANKS];
    const EpCommBuffer *const *buffers; /* num_buffers, some of them NULL */
    uint32_t num_buffers;
} EpRecord;
/* The page: the culprit in the first line, then each rank's last operation, then the operations side by side. */
void ep_record_page(const EpRecord *record, char page[EP_PAGE_BYTES]);
/* True when ranks whose notes are here were at a step in operations that cannot meet: of two buffers, say.  Then the text says which,
 * and *odd is one of the fewer. */
bool ep_record_disagrees(const EpRecord *record, uint64_t step, uint32_t *odd, char *text, size_t num_bytes);
/* Add the page to folder/epmoe-rank{r}-pid{pid}.txt; on failure the page says so. */
void ep_record_write(const char *folder, uint32_t rank, char page[EP_PAGE_BYTES]);

#endif /* EP_RECORD_H */
