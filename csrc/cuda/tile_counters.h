/* tile_counters.h - a tile counter for each stream: the number in which a grouped GEMM counts the tiles that
 * its CTAs have drawn. It is 0 before a launch, and the CTA that has drawn the last number sets it to 0.
 *
 * Two launches that overlap must not share a counter. Grouped GEMMs of one stream never overlap, so each
 * stream has one. Where there is none, ep_tile_counter gives NULL, and the GEMM needs a counter from its
 * caller: tile_counter() in epmoe asks first, and allocates one for this launch. These cases need
 * care:
 *
 *   captured launches     A replay may overlap with other work of the stream that was captured. So a captured
 *                         launch gets NULL, and the memory of its counter belongs to the graph.
 *   destroyed streams     A new stream may get the address of a destroyed one, whose work may still run. So a
 *                         counter belongs to the number of a stream (cudaStreamGetId), which the driver never
 *                         gives to another stream.
 *   many streams          A device has EP_NUM_COUNTERS counters. A stream keeps its counter for ever, because
 *                         nothing tells when its last launch has ended. Further streams get NULL.
 *   threads               Two threads may call ep_tile_counter at once, even for the same stream. It takes a
 *                         counter with one compare-and-swap, so it needs no lock.
 *
 * The counters are in a __device__ variable, and not in a memory pool of torch. So they stay where they are
 * when torch empties a pool, or gives a pool to a graph. */
#ifndef EP_TILE_COUNTERS_H
#define EP_TILE_COUNTERS_H
#include <stdint.h>

#define EP_NUM_COUNTERS 256u  /* streams of a device that have a counter */
#define EP_COUNTER_STRIDE 16u /* numbers from one counter to the next: each is on a line of its own */

#ifdef __cplusplus
extern "C" {
#endif
/* The counter of a stream of the current device, or NULL. Returns a cudaError_t. */
int ep_tile_counter(void *stream, uint64_t **counter);
/* The memory of the counters of the current device; gemm.cu has it. Returns a cudaError_t. */
int ep_counter_memory(uint64_t **memory);
#ifdef __cplusplus
}
#endif

#endif /* EP_TILE_COUNTERS_H */
