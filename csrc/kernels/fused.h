/* fused.h - the megakernels as their launchers see them: dispatch + GEMM, and GEMM + combine, in one launch each. */
#ifndef EP_FUSED_H
#define EP_FUSED_H
#include "gemm.h"
#include "protocol/abi.h"

typedef struct {
    EpDispatchParams dispatch;
    EpGemmParams gemm;        /* FORWARD, of the rows that dispatch places */
    uint32_t num_move_blocks; /* blocks whose spare warps move tokens; 1 or more */
    uint32_t
        num_tail_blocks; /* of those, the first ones only receive, and the others only send; 0: all do both */
    uint32_t
        waits_for_expert; /* a tile waits for all rows of its expert, not only for the blocks it has rows in */
} EpDispatchGemmParams;

typedef struct {
    EpGemmParams gemm; /* FORWARD, its output the rows that combine takes */
    EpCombineParams combine;
    uint32_t num_move_blocks;   /* blocks whose warps send rows home; 1 or more */
    uint32_t num_reduce_blocks; /* blocks whose warps add up tokens; 1 or more */
    uint32_t is_serial;         /* no row goes home before all are made */
} EpGemmCombineParams;

#ifdef __cplusplus
extern "C" {
#endif
/* Launch on the current device, or not at all; a cudaError_t. */
int ep_launch_dispatch_gemm(const EpDispatchGemmParams *p, void *stream);
int ep_launch_gemm_combine(const EpGemmCombineParams *p, void *stream);
int ep_preload_fused(void);
#ifdef __cplusplus
}
#endif

#endif /* EP_FUSED_H */
