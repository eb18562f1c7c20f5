/* cpu/ops.h - the stages of the CPU backend: the code that a worker thread runs.
 *
 * Exports ep_cpu_plan, ep_cpu_enter, ep_cpu_activation, ep_cpu_gemm, and dispatch and combine of both kinds.
 * Dispatch and combine run on all num_workers of a rank at once, and each call is one worker's part. A plan
 * is small and runs on one worker.
 * Invariant: ranks synchronise only through the words of protocol/flags.h and the count cells of
 * protocol/plan.h. */
#ifndef EP_CPU_OPS_H
#define EP_CPU_OPS_H
#include "protocol/activation_gradient.h"
#include "protocol/four_bit.h"
#include "protocol/low_latency.h"
#include "protocol/plan.h"
#include "protocol/queue.h"

void ep_cpu_plan(const EpPlanParams *p);
void ep_cpu_dispatch(const EpDispatchParams *p, const EpScales *scales, uint32_t worker,
                     uint32_t num_workers);
void ep_cpu_combine(const EpCombineParams *p, uint32_t worker, uint32_t num_workers);
void ep_cpu_ll_dispatch(const EpLlDispatchParams *p, uint32_t worker, uint32_t num_workers);
void ep_cpu_ll_combine(const EpLlCombineParams *p, uint32_t worker, uint32_t num_workers);
void ep_cpu_activation(const EpActivationParams *p);
/* The grouped GEMM of bf16 or fp16, in the calling thread: 0, or an error. four_bit: NULL, or how the weights
 * of a FORWARD have 4 bits. low_rank: NULL, or what a FORWARD or DGRAD adds. */
int ep_cpu_gemm(const EpGemmParams *p, const EpFourBit *four_bit, const EpLowRank *low_rank);
/* Its two parts: allocate its memory, which the caller frees; and the rest, which cannot fail. */
int ep_cpu_gemm_memory(const EpGemmParams *p, const EpLowRank *low_rank, float **memory);
void ep_cpu_gemm_in(const EpGemmParams *p, const EpFourBit *four_bit, const EpLowRank *low_rank,
                    float *memory);
/* Run an operation without data. When it returns, all ranks have entered, or the operation has failed. If
 * comm.status is set, this rank propagates an error in operation `op`, whose arguments it could not
 * accept. */
void ep_cpu_enter(const EpComm *c, uint32_t op);

#endif /* EP_CPU_OPS_H */
