/* trace.cuh - what a megakernel's warps did, and when: the profiler, which only a build with EPMOE_TRACE=1 has.
 *
 * A warp notes spans of time in a room of its own in device memory (EpComm.trace: [trace_blocks][EP_TRACE_WARPS][trace_room]
 * events), one lane by ordinary stores; what does not fit is left out.  In other builds all of it is nothing. */
#ifndef EP_TRACE_CUH
#define EP_TRACE_CUH
#include "protocol/abi.h"

#ifdef EP_TRACE
static __shared__ uint32_t ep_trace_num[EP_TRACE_WARPS];

EP_FN EpTraceEvent *ep_trace_room(const EpComm *c) {
    return c->trace + ((uint64_t)blockIdx.x * EP_TRACE_WARPS + threadIdx.x / 32) * c->trace_room;
}
/* Behind what the kernels before have noted. */
EP_FN void ep_trace_start(const EpComm *c) {
    if (ep_lane() != 0) return;
    uint32_t n = 0;
    if (c->trace && blockIdx.x < c->trace_blocks)
        while (n < c->trace_room && ep_trace_room(c)[n].begin_ns) n++;
    ep_trace_num[threadIdx.x / 32] = n;
}
/* A span begins; one lane has the time. */
EP_FN uint64_t ep_trace_now(const EpComm *c) { return c->trace ? ep_now_ns() : 0; }
/* A span ends; lane 0 has noted its beginning. */
EP_FN void ep_trace_span(const EpComm *c, uint32_t what, uint32_t of, uint64_t begin_ns) {
    const uint32_t warp = threadIdx.x / 32, n = ep_trace_num[warp];
    if (!c->trace || ep_lane() != 0 || n >= c->trace_room || blockIdx.x >= c->trace_blocks) return;
    EpTraceEvent *to = ep_trace_room(c) + n;
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
