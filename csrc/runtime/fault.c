/* fault.c - the error of a fault record: which rank, which wait, what was expected and what was found.
 *
 * Exports ep_fault_error and ep_op_name (error.h). */
#include <stdio.h>

#include "protocol/low_latency.h"
#include "runtime/error.h"

EpOpName ep_op_name(uint32_t word) {
    static const char *const names[EP_NUM_OPS] = {[EP_OP_NONE] = "wait",
#define X(NAME, name, Type, text) [EP_OP_##NAME] = text,
                                                  EP_OPERATIONS(X, X)
#undef X
    };
    static const char *const dtypes[EP_NUM_OP_DTYPES] = {
#define X(NAME, text) [EP_IN_##NAME] = text,
        EP_OP_DTYPES(X)
#undef X
    };
    const uint32_t op = ep_op_of(word), dtype = ep_op_dtype_of(word);
    EpOpName name;
    snprintf(name.text, sizeof name.text, "%s%s", names[op < EP_NUM_OPS ? op : EP_OP_NONE],
             dtypes[dtype < EP_NUM_OP_DTYPES ? dtype : EP_IN_LAYER_DTYPE]);
    return name;
}
static const char *field_name(uint32_t field) {
    static const char *const names[] = {"",
#define X(name) #name,
                                        EP_HEADER_FIELDS(X)
#undef X
                                            "fp8",
                                        "handle"};
    return names[field <= 1 + EP_FIELD_handle ? field : 0];
}

/* The timeout of a wait. The record of a wait for a signal has neither the signalling rank nor the word's
 * offset, because any rank may signal any word. */
static int timeout_error(const EpFaultRecord *f, uint32_t my_rank) {
    unsigned long long want = f->want, got = f->got;
    if (f->word == EP_WORD_SIGNAL)
        return ep_error(
            EP_ETIMEOUT,
            "rank %u timed out: no rank signalled the word on which it waits (expected value %llu, "
            "found %llu). Check that a rank calls signal() for this word. See world.flight_record().",
            my_rank, want, got);
    if (f->word == EP_WORD_READY && ep_op_of(f->op) == EP_OP_DISPATCH_GEMM)
        return ep_error(
            EP_ETIMEOUT,
            "rank %u timed out: only %llu of %llu rows of a row block have arrived, and no rank is late. If "
            "full_scatter_indices were passed, they give one row of this rank twice and another one not at "
            "all. See world.flight_record().",
            my_rank, got, want);
    const char *advice = f->word == EP_WORD_ENTER ? "Every rank must call every layer, also without tokens."
                                                  : "All ranks must make the same calls in the same order.";
    return ep_error(EP_ETIMEOUT,
                    "rank %u timed out waiting for rank %u in its %s (word %s, epoch %llu: wanted %llu, saw "
                    "%llu). %s See world.flight_record().",
                    my_rank, f->peer, ep_op_name(f->op).text, ep_word_name(f->word),
                    (unsigned long long)f->epoch, want, got, advice);
}

int ep_fault_error(const EpFaultRecord *f, const EpShape *s, uint32_t my_rank) {
    unsigned long long want = f->want, got = f->got;
    switch (f->code) {
    case EP_EPEER:
        if (f->peer == my_rank && (int)(int64_t)got == EP_EINVAL) /* see ep_make_header */
            return ep_error(EP_EINVAL,
                            "rank %u: %s cannot use this layout: its plan or dispatch failed, or its T or "
                            "its number of rows does not "
                            "match the tensors. Make a new layout with preprocess or dispatch.",
                            my_rank, ep_op_name(f->op).text);
        return ep_error(EP_EPEER, "rank %u failed before its %s: %s. See the error that it raised.", f->peer,
                        ep_op_name(f->op).text,
                        (int)(int64_t)got == EP_ENOMEM ? "no memory" : ep_error_name((int)(int64_t)got));
    case EP_EMISMATCH:
        if (f->field == 1 + EP_FIELD_op) /* the order of calls differs */
            return ep_error(EP_EMISMATCH,
                            "ranks disagree in op: rank %u called %s, rank 0 called %s. All ranks must make "
                            "the same calls in the same order.",
                            f->peer, ep_op_name((uint32_t)got).text, ep_op_name((uint32_t)want).text);
        return ep_error(EP_EMISMATCH,
                        "ranks disagree in %s: rank %u has %llu, rank 0 has %llu (in %s). It must be the "
                        "same on all ranks.",
                        field_name(f->field), f->peer, got, want, ep_op_name(f->op).text);
    case EP_EINDEX:
        if ((int64_t)got == EP_INDEX_UNKNOWN)
            return ep_error(EP_EINDEX,
                            "rank %u: the expert index of token %u, choice %u is outside [-1, %llu]. The "
                            "error of that rank has the index.",
                            f->peer, f->field / s->num_topk, f->field % s->num_topk, want);
        return ep_error(EP_EINDEX,
                        "rank %u: expert index %lld of token %u, choice %u is outside [-1, %llu]. Use -1 to "
                        "drop a choice.",
                        f->peer, (long long)got, f->field / (s->num_topk ? s->num_topk : 1),
                        f->field % (s->num_topk ? s->num_topk : 1), want);
    case EP_EOVERFLOW:
        if (f->field)
            return ep_error(EP_EOVERFLOW,
                            "expert %u, on rank %u, would receive %llu rows; its expert_capacity is %llu. "
                            "Increase expert_capacity or balance the routing.",
                            f->field - 1, f->peer, got, want);
        return ep_error(EP_EOVERFLOW,
                        "rank %u would receive %llu rows; its capacity is %llu. Increase capacity or balance "
                        "the routing.",
                        f->peer, got, want);
    case EP_EINVAL:
        return ep_error(EP_EINVAL,
                        "rank %u: full_scatter_indices must have one line for each token of this rank (or of "
                        "all ranks), and each index "
                        "of a choice that is not dropped must be in [0, M) of the expert's rank",
                        f->peer);
    case EP_ETIMEOUT: return timeout_error(f, my_rank);
    default:
        return ep_error(f->code, "%s failed (word %s, rank %u). See world.flight_record().",
                        ep_op_name(f->op).text, ep_word_name(f->word), f->peer);
    }
}
