/* tile_counters.h - a tile counter for each stream: the number in which a grouped GEMM counts the tiles that
 * its CTAs have drawn. It is 0 before and after each launch.
 *
 * Two launches that overlap must not share a counter. Launches of one stream never overlap, so each stream
 * has one. These cases need care:
 *
 *   captured launches     A replay may overlap with other work of the stream that was captured. So a captured
 *                         launch has no counter here. Its caller allocates one, from the memory of the graph.
 *   destroyed streams     A new stream may get the address of a destroyed one, whose work may still run. So a
 *                         counter belongs to the number of a stream, which the driver never gives again.
 *   many streams          The number of counters is bounded, and none is taken from a stream: nothing tells
 *                         when its last launch has ended. A stream that finds no counter has none here, as if
 *                         it were captured.
 *   threads               Two threads may ask at once, for the same stream too. No lock is held.
 *
 * The counters are in a variable of the module, in no pool of a framework. So a framework that empties a
 * pool, or gives a pool to a graph, leaves them alone. */
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
