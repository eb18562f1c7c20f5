/* cpu/quantize.h - rows and weights to FP8, on the CPU; see protocol/quantize.h, protocol/wgrad_fp8.h, and
 * protocol/four_bit.h for weights of 4 bits. */
#ifndef EP_CPU_QUANTIZE_H
#define EP_CPU_QUANTIZE_H
#include "protocol/four_bit.h"
#include "protocol/wgrad_fp8.h"

void ep_cpu_quantize_rows(const EpQuantizeParams *p);
void ep_cpu_rescale(const EpRescaleParams *p);
void ep_cpu_transpose(const EpTransposeParams *p);
void ep_cpu_quantize_weight(const EpQuantizeWeightParams *p);
void ep_cpu_expand(const EpExpandParams *p);
/* Row n of the weights of an expert of a product: each rounded to the dtype of the rows, as float32. */
void ep_cpu_expand_row(const EpFourBit *w, const EpGemmParams *p, uint32_t expert, uint32_t n, float *to);

#endif /* EP_CPU_QUANTIZE_H */
