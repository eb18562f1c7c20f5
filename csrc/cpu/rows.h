/* cpu/rows.h - rows of numbers: sums in float32, NaN, e4m3, and access by index. The stages of the CPU
 * backend use it. */
#ifndef EP_CPU_ROWS_H
#define EP_CPU_ROWS_H
#include "protocol/low_latency.h"

/* dst = sum of the rows, each times its weight if there are weights, in the order of the array. */
void ep_cpu_sum_rows(void *dst, const void *const *rows, const float *weights, uint32_t num, uint32_t dtype,
                     uint32_t hidden);
/* Poison the output of a failed operation with NaN, so that no caller mistakes it for a result. */
void ep_cpu_fill_nan(void *at, uint64_t num_bytes);
/* Convert numbers at, .., at + n - 1 of src to float32. */
void ep_cpu_load(float *to, const void *src, uint32_t dtype, uint64_t at, uint32_t n);
/* Round to e4m3, to nearest even. A magnitude above 448 becomes 448; NaN becomes 0x7f. */
uint8_t ep_cpu_to_e4m3(float f);
float ep_cpu_from_e4m3(uint8_t v);
/* Quantise n numbers that share a scale (n <= EP_FP8_GROUP) to e4m3. fp8: an EpLlFp8. Returns the scale. */
float ep_cpu_quantize_floats(uint8_t *dst, const float *src, uint32_t n, uint32_t fp8);
/* The same for a group of EP_FP8_GROUP numbers of bf16 or fp16. */
float ep_cpu_quantize(uint8_t *dst, const void *src, uint32_t dtype, uint32_t fp8);
/* dst = the sum of the rows, in the order of the array. Row i is of dtype where scales[i] is NULL. Else it
 * has e4m3 numbers, and a scale for each EP_FP8_GROUP of them. hidden is a multiple of EP_FP8_GROUP. */
void ep_cpu_sum_fp8(void *dst, const void *const *rows, const float *const *scales, uint32_t num,
                    uint32_t dtype, uint32_t hidden);
/* Read and write number i of an array of bf16 or fp16. */
float ep_cpu_number(const void *src, uint32_t dtype, uint64_t i);
void ep_cpu_store(void *dst, uint32_t dtype, uint64_t i, float value);

#endif /* EP_CPU_ROWS_H */
