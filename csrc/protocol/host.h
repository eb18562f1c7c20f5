/* host.h - the words of one communication buffer in host memory: how a rank's host and its workers talk.
 *
 * The host sets the abort word. The workers report a fault, the result of a plan, and a wait that lasts long.
 * The host polls these words without a stream synchronisation.
 *
 * Exports EpHostWords, EpFaultRecord, EpWord, EpPlanResult.
 * Invariant: no peer reads or writes them. A worker writes a record first, and then the word that publishes
 * it (EpFaultRecord.state, EpPlanResult.ticket); see flags.h. */
#ifndef EP_HOST_H
#define EP_HOST_H
#include "protocol/shape.h"

/* The first fault of a communication buffer, in memory that the host reads. */
typedef struct {
    uint64_t state;      /* 0: none, 1: written */
    int32_t code;        /* EpCode */
    uint32_t op;         /* EP_OP_WORD */
    uint32_t peer, word; /* EpWord */
    uint32_t field, pad; /* 1 + index of a header field, or position of a wrong index, or 0 */
    uint64_t epoch, want, got;
} EpFaultRecord;
/* The words for which a fault record can stand: X(NAME, text). */
#define EP_WORDS(X)         \
    X(ENTER, "enter")       \
    X(COUNTS, "counts")     \
    X(FLAG, "flag")         \
    X(SIGNAL, "signal")     \
    X(HEADER, "header")     \
    X(INDEX, "index")       \
    X(ROWS, "rows")         \
    X(GRID, "grid barrier") \
    X(SCATTER, "scatter")   \
    X(READY, "ready")       \
    X(ROUTE, "route")       \
    X(SLOT, "slot")
typedef enum {
    EP_WORD_NONE = 0,
#define X(NAME, text) EP_WORD_##NAME,
    EP_WORDS(X)
#undef X
} EpWord;

/* The result of a plan, which the host reads without a stream synchronisation. */
typedef struct {
    uint64_t ticket; /* number that the host gave the call; written last */
    uint32_t num_rows;
    int32_t status; /* EpCode */
    uint64_t epoch; /* epoch of the plan; the flight record uses it */
} EpPlanResult;

/* Host memory of one communication buffer. Workers write it and the host polls it. */
typedef struct {
    /* nonzero: every wait must end. The host sets it, workers read it. */
    uint64_t abort;
    /* Epoch of an operation in which a wait has lasted longer than EP_STUCK_NS. The waiting worker
     * writes it at each check until the wait ends. */
    uint64_t stuck;
    EpFaultRecord fault;
    EpPlanResult plan;
    /* How long this rank has waited for each rank to enter an operation, in nanoseconds, altogether. */
    uint64_t waited_ns[EP_MAX_RANKS];
    /* Parts of the result of a plan with host_counts: [E] choices of all ranks for each expert; and the
     * balance_key of all ranks (ep_agreed_balance_key). */
    int32_t expert_choices[EP_MAX_EXPERTS];
    uint32_t balance_key;
} EpHostWords;

#endif /* EP_HOST_H */
