/* fused.h - the interface of the megakernels: dispatch + GEMM, and GEMM + combine, each in one launch. */
#ifndef EP_FUSED_H
#define EP_FUSED_H
#include "kernels/gemm/gemm.h"
#include "protocol/params.h"

typedef struct {
    EpDispatchParams dispatch;
    EpGemmParams gemm; /* FORWARD, on the rows that dispatch places */
    /* CTAs whose communication warps work; at least 1 */
    uint32_t num_move_blocks;
    /* The first num_tail_blocks of these only receive, and the others only send. 0: all do both. */
    uint32_t num_tail_blocks;
    /* A tile waits for all rows of its expert, not only for the row blocks in which it has rows. */
    uint32_t waits_for_expert;
} EpDispatchGemmParams;

typedef struct {
    EpGemmParams gemm; /* FORWARD; its output is the rows of combine */
    EpCombineParams combine;
    /* CTAs whose warps return rows; at least 1 */
    uint32_t num_move_blocks;
    /* CTAs whose warps add up tokens; at least 1 */
    uint32_t num_reduce_blocks;
    /* No row is returned before all rows are ready. */
    uint32_t is_serial;
} EpGemmCombineParams;

#ifdef __cplusplus
extern "C" {
#endif
/* Launch on the current device, or fail. Returns a cudaError_t. */
int ep_launch_dispatch_gemm(const EpDispatchGemmParams *p, void *stream);
int ep_launch_gemm_combine(const EpGemmCombineParams *p, void *stream);
int ep_preload_fused(void);
#ifdef __cplusplus
}
#endif

#endif /* EP_FUSED_H */
