/* cpu/quantize.h - rows to e4m3 with a scale for each 128 numbers, on the CPU; see protocol/quantize.h. */
#ifndef EP_CPU_QUANTIZE_H
#define EP_CPU_QUANTIZE_H
#include "protocol/quantize.h"

void ep_cpu_quantize_rows(const EpQuantizeParams *p);

#endif /* EP_CPU_QUANTIZE_H */
