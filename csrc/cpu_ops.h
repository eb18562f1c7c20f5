/* cpu_ops.h - the stages in plain loads and stores: what a worker thread of the CPU backend runs.
 *
 * Each function is one worker's part of one operation; all num_workers of a rank run it at once.  The
 * plan is small and runs on one worker.  The only cross-rank words are those of protocol/flags.h. */
#ifndef EP_CPU_OPS_H
#define EP_CPU_OPS_H
#include "protocol/plan.h"
#include "protocol/queue.h"

void ep_cpu_plan(const EpPlanParams *p);
void ep_cpu_dispatch(const EpDispatchParams *p, uint32_t worker, uint32_t num_workers);
void ep_cpu_combine(const EpCombineParams *p, uint32_t worker, uint32_t num_workers);
/* An operation without data: all ranks have entered it when it returns.  With comm.status set it is
 * the stand-in for an operation (op) whose arguments this rank could not accept. */
void ep_cpu_enter(const EpComm *c, uint32_t op);

#endif /* EP_CPU_OPS_H */
