/* launch.h - the interface of the kernels to cuda/backend.c. Each function launches one kernel on the
 * current device and returns its cudaError_t. */
#ifndef EP_LAUNCH_H
#define EP_LAUNCH_H
#include "protocol/activation_gradient.h"
#include "protocol/balance.h"
#include "protocol/expert_map.h"
#include "protocol/four_bit.h"
#include "protocol/params.h"
#include "protocol/wgrad_fp8.h"

#ifdef __cplusplus
extern "C" {
#endif
int ep_launch_plan(const EpPlanParams *p, void *stream);
int ep_launch_move_choices(const EpMoveChoicesParams *p, void *stream);
int ep_launch_map_choices(const EpMapChoicesParams *p, void *stream);
int ep_launch_dispatch(const EpDispatchParams *p, const EpScales *scales, uint32_t num_blocks, void *stream);
int ep_launch_combine(const EpCombineParams *p, uint32_t num_blocks, void *stream);
/* The megakernels: dispatch + GEMM, and GEMM + combine. They launch all their CTAs at once, or fail. */
int ep_launch_dispatch_gemm(const EpDispatchGemmParams *p, const EpScales *scales, void *stream);
int ep_launch_gemm_combine(const EpGemmCombineParams *p, const EpScales *scales, void *stream);
/* scales: NULL, or those of FP8. four_bit: NULL, or how the weights have 4 bits. low_rank: NULL, or what is
 * added, to a product with weights of 16 bits. own: NULL, or the columns that the rows keep. */
int ep_launch_gemm(const EpGemmParams *p, const EpGemmScales *scales, const EpFourBit *four_bit,
                   const EpLowRank *low_rank, const EpOwnColumns *own, void *stream);
int ep_launch_activation(const EpActivationParams *p, void *stream);
int ep_launch_quantize(const EpQuantizeParams *p, void *stream);
int ep_launch_rescale(const EpRescaleParams *p, void *stream);
int ep_launch_transpose(const EpTransposeParams *p, void *stream);
int ep_launch_quantize_weight(const EpQuantizeWeightParams *p, void *stream);
int ep_launch_expand(const EpExpandParams *p, void *stream);
int ep_launch_wgrad_fp8(const EpWgradFp8Params *p, void *stream);
int ep_launch_ll_dispatch(const EpLlDispatchParams *p, uint32_t num_sm, void *stream);
int ep_launch_ll_combine(const EpLlCombineParams *p, uint32_t num_sm, void *stream);
int ep_launch_enter(const EpComm *c, uint32_t word, void *stream);
int ep_launch_signal(uint64_t *word, uint64_t value, uint32_t add, void *stream);
int ep_launch_wait(const EpComm *c, const uint64_t *word, uint64_t value, uint32_t exact, void *stream);
/* Load the kernels of a file now. If a kernel were loaded lazily while another one waits for it, both
 * could deadlock. */
int ep_preload_plan(void);
int ep_preload_dispatch(void);
int ep_preload_combine(void);
int ep_preload_fused(void);
int ep_preload_low_latency(void);
int ep_preload_words(void);
int ep_preload_quantize(void);
#ifdef __cplusplus
}
#endif

#endif /* EP_LAUNCH_H */
