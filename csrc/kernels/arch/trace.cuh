/* trace.cuh - the profiler of the megakernels, only in builds with EPMOE_TRACE=1: what each warp did, and
 * when.
 *
 * Each warp records spans of time in its own part of device memory. EpComm.trace has the events as
 * [trace_blocks][EP_TRACE_WARPS][trace_capacity], by CTA, warp and time. One lane writes, with ordinary
 * stores. Events that do not fit are dropped. In other builds these functions are empty. */
#ifndef EP_TRACE_CUH
#define EP_TRACE_CUH
#include "protocol/comm.h"

#ifdef EP_TRACE
static __shared__ uint32_t ep_trace_num[EP_TRACE_WARPS];

EP_FN EpTraceEvent *ep_trace_events(const EpComm *c) {
    return c->trace + ((uint64_t)blockIdx.x * EP_TRACE_WARPS + threadIdx.x / 32) * c->trace_capacity;
}
/* Continue after the events of earlier kernels. */
EP_FN void ep_trace_start(const EpComm *c) {
    if (ep_lane() != 0) return;
    uint32_t n = 0;
    if (c->trace && blockIdx.x < c->trace_blocks)
        while (n < c->trace_capacity && ep_trace_events(c)[n].begin_ns) n++;
    ep_trace_num[threadIdx.x / 32] = n;
}
/* Start a span: returns its time. The caller's lane 0 keeps it. */
EP_FN uint64_t ep_trace_now(const EpComm *c) { return c->trace ? ep_now_ns() : 0; }
/* End a span and record it; lane 0 must have its start time. */
EP_FN void ep_trace_span(const EpComm *c, uint32_t what, uint32_t of, uint64_t begin_ns) {
    const uint32_t warp = threadIdx.x / 32, n = ep_trace_num[warp];
    if (!c->trace || ep_lane() != 0 || n >= c->trace_capacity || blockIdx.x >= c->trace_blocks) return;
    EpTraceEvent *to = ep_trace_events(c) + n;
    to->begin_ns = begin_ns;
    to->num_ns = (uint32_t)(ep_now_ns() - begin_ns);
    to->what = (uint16_t)what;
    to->of = (uint16_t)of;
    ep_trace_num[warp] = n + 1;
}
#else
EP_FN void ep_trace_start(const EpComm *) {}
EP_FN uint64_t ep_trace_now(const EpComm *) { return 0; }
EP_FN void ep_trace_span(const EpComm *, uint32_t, uint32_t, uint64_t) {}
#endif

#endif /* EP_TRACE_CUH */
