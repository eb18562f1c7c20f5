/* comm.h - a communication buffer as one rank sees it: EpComm, and the addresses in the buffers of all ranks.
 *
 * Exports EpComm, EP_AT, ep_slot_at, ep_choice_at.
 * Invariant: an address in a rank's buffer is base[rank] plus an offset of layout.h, and the offset is the
 * same for every rank. */
#ifndef EP_COMM_H
#define EP_COMM_H
#include "protocol/host.h"
#include "protocol/layout.h"
#include "protocol/trace.h"

/* One rank's view of one communication buffer: all that a stage needs except its tensors. */
typedef struct {
    EpShape shape;
    EpCommLayout layout;
    unsigned char *base[EP_MAX_RANKS]; /* address of the buffer in each rank's heap, as mapped by this rank */
    uint32_t my_rank;
    int32_t status; /* see EpHeader */
    EpHostWords *host;
    uint64_t timeout_ns;
    EpTraceEvent *trace; /* where the profiler writes, or NULL */
    /* The profiler's memory: number of CTAs that have a part of it, and events per warp. */
    uint32_t trace_blocks, trace_capacity;
    uint32_t reserve_sms; /* SMs that the kernel leaves to other kernels */
    /* The operation will have a backward, which is an operation of its own. */
    uint32_t requires_grad;
    /* Host only: operations of one sequence run in the order of their calls (cuda/launch_order.h). */
    uint32_t launch_sequence;
} EpComm;

#define EP_AT(type, comm, rank, off) ((type *)((comm)->base[rank] + (off)))

/* Slot `slot` of those that of_rank sends, in at_rank's staging buffer. */
EP_FN unsigned char *ep_slot_at(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint32_t slot) {
    return c->base[at_rank] + c->layout.stage_off +
           ((uint64_t)of_rank * c->shape.max_tokens + slot) * c->layout.slot_stride;
}
/* Choice idx in at_rank's staging buffer: idx is token * K + k in SCATTER, the expert's row in GATHER. */
EP_FN unsigned char *ep_choice_at(const EpComm *c, uint32_t at_rank, uint64_t idx) {
    return c->base[at_rank] + c->layout.stage_off + idx * c->layout.choice_stride;
}

#endif /* EP_COMM_H */
