/* cpu/quantize.h - rows and weights to FP8, on the CPU; see protocol/quantize.h and protocol/wgrad_fp8.h. */
#ifndef EP_CPU_QUANTIZE_H
#define EP_CPU_QUANTIZE_H
#include "protocol/wgrad_fp8.h"

void ep_cpu_quantize_rows(const EpQuantizeParams *p);
void ep_cpu_transpose(const EpTransposeParams *p);
void ep_cpu_quantize_weight(const EpQuantizeWeightParams *p);

#endif /* EP_CPU_QUANTIZE_H */
