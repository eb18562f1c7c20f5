/* launch_order.h - the order in which the operations of a launch sequence run on a GPU.
 *
 * An operation holds SMs while it waits for its peers, and an operation that finds no free SM cannot start.
 * If two operations started in different orders on two ranks, each could wait for SMs that the other holds: a
 * deadlock. Streams do not order operations among themselves. Therefore the operations of one sequence run in
 * the order of their calls: each waits for the operation before it, if that one is on another stream.
 *
 * A process is one sequence on each GPU. Ranks that are threads of one process have a sequence each: they
 * wait for each other, so they must run at the same time. Each of them uses its own part of the SMs
 * (ep_sharing_reserved_sms), so there are enough SMs for all.
 *
 * A captured operation is ordered inside its graph. The program orders the replays of its graphs. Threads may
 * capture graphs at the same time; each graph has its own order.
 *
 * Exports ep_begin_launch and ep_end_launch.
 * Invariant: between them the calling thread holds the sequence's lock, and the device is its current
 * device. */
#ifndef EP_LAUNCH_ORDER_H
#define EP_LAUNCH_ORDER_H
#include "cuda/guard.h"
#include "protocol/comm.h"

typedef struct {
    /* The end of the newest operation. It is recorded right after the launch, because later the stream may
     * have been destroyed, or may be captured for a graph. */
    cudaEvent_t end;
    unsigned long long stream; /* the number of the newest operation's stream. No two streams have the same,
                                * but a new stream may have the handle of one that was destroyed. */
    unsigned long long graph;  /* the graph for which it was captured, or 0 */
    uint64_t last_use;         /* when it was used, as a count of captured operations */
    bool has_operation;        /* false before the first operation */
} EpLaunchOrder;
typedef struct EpLaunchSequence EpLaunchSequence;

/* A launch between its begin and its end. */
typedef struct {
    EpGuard guard;
    EpLaunchSequence *sequence;
    EpLaunchOrder *order;
    cudaStream_t stream;
    unsigned long long stream_number;
} EpLaunch;

/* Before a launch: take the sequence's lock, make `device` the current device, and make the stream wait for
 * the operation before this one. `range` is the name that profilers show next to the kernel (NVTX). After an
 * error nothing is held, and the caller must not call ep_end_launch. */
int ep_begin_launch(int device, const EpComm *c, void *stream, const char *range, EpLaunch *l);
/* After a launch: record its end for the next operation of the sequence, and undo what ep_begin_launch took.
 * `launched` is the launch's cudaError_t. `what` names the kernel in an error text. */
int ep_end_launch(EpLaunch *l, int launched, const char *what);

#endif /* EP_LAUNCH_ORDER_H */
