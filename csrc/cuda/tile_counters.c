/* tile_counters.c - which tile counter belongs to which stream; tile_counters.h says why.
 *
 * Process-wide state: for each device, the streams that have a counter. A place is taken once and for all.
 * Invariant: the place of a stream is the first one from (number % EP_NUM_COUNTERS) on, in a circle, that no
 * other stream had taken. So a search may end at the first free place. */
#include "cuda/tile_counters.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

#include "cuda/capabilities.h"

static struct {
    uint64_t *memory;                 /* or NULL: not known yet */
    uint64_t owners[EP_NUM_COUNTERS]; /* 1 + the number of the stream, or 0: free */
} devices[EP_MAX_DEVICES];

static int memory_of(uint32_t device, uint64_t **memory) {
    *memory = __atomic_load_n(&devices[device].memory, __ATOMIC_RELAXED);
    if (*memory) return 0;
    const int e = ep_counter_memory(memory);
    if (!e)
        __atomic_store_n(&devices[device].memory, *memory, __ATOMIC_RELAXED); /* all threads get the same */
    return e;
}

/* False also if the runtime cannot tell, for example for the default stream while another stream is captured.
 * The launch then reports the error. */
static bool runs_now(cudaStream_t stream) {
    enum cudaStreamCaptureStatus status;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status == cudaStreamCaptureStatusNone;
    cudaGetLastError();
    return false;
}

int ep_tile_counter(void *stream, uint64_t **counter) {
    unsigned long long number;
    uint32_t device;
    uint64_t *memory;
    *counter = NULL;
    if (!runs_now((cudaStream_t)stream)) return 0;
    int e = ep_current_device(&device);
    if (!e) e = (int)cudaStreamGetId((cudaStream_t)stream, &number);
    if (!e) e = memory_of(device, &memory);
    for (uint32_t i = 0; i < EP_NUM_COUNTERS && !e && !*counter; i++) {
        const uint32_t at = (uint32_t)((number + i) % EP_NUM_COUNTERS);
        uint64_t owner = 0;
        if (__atomic_compare_exchange_n(&devices[device].owners[at], &owner, number + 1, false,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
            owner == number + 1)
            *counter = memory + at * EP_COUNTER_STRIDE;
    }
    return e;
}
