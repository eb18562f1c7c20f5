/* trace.h - the events of the profiler: one span of time of one warp of a megakernel.
 *
 * kernels/arch/trace.cuh records them in device memory, and epmoe/trace.py reads them from there.
 * Exports EpTraceEvent, EpSpan, EP_TRACE_WARPS.
 * Invariant: an event has 16 bytes. epmoe/trace.py reads it as two numbers of 64 bits. */
#ifndef EP_TRACE_H
#define EP_TRACE_H
#include "protocol/port.h"

#define EP_TRACE_WARPS 12u /* warps of a CTA */
/* The spans: X(NAME, text). */
#define EP_SPANS(X)               \
    X(ENTER, "enter")             \
    X(SEND, "send")               \
    X(RECEIVE, "receive")         \
    X(WAIT_ROWS, "wait for rows") \
    X(GEMM, "gemm")               \
    X(RETURN, "return")           \
    X(ADD, "add up")
typedef enum {
    EP_SPAN_NONE = 0,
#define X(NAME, text) EP_SPAN_##NAME,
    EP_SPANS(X)
#undef X
} EpSpan;
typedef struct {
    uint64_t begin_ns;
    uint32_t num_ns;
    uint16_t what, of; /* EpSpan; the rank or the expert that the work was for */
} EpTraceEvent;

#endif /* EP_TRACE_H */
