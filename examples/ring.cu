/* ring.cu - a kernel that reaches other ranks by itself; 06_device.py builds and starts it.
 *
 * nvcc makes a kernel of it for heaps on GPUs; a C compiler (-x c) makes a function of it for heaps on the CPU. */
#include "epmoe_device.h"

/* What each rank has goes to its right neighbour, num_ranks times, until it is home again; inbox [num_ranks][n] keeps what came.
 * The calls are a worker's: a warp, or a thread of the CPU.  Returns 1, or 0 where a wait has ended in vain. */
EP_FN uint64_t ring(const EpDeviceHeap *h, float *inbox, uint64_t *arrived, uint64_t *turns, const float *mine, uint64_t n) {
    const uint32_t right = (h->my_rank + 1) % h->num_ranks;
    for (uint64_t step = 0; step < h->num_ranks; step++) {
        ep_dev_put(h, inbox + step * n, mine, n * sizeof(float), right);
        ep_dev_signal_set(h, arrived, step + 1, right);   /* publishes the put */
        if (!ep_dev_wait(h, arrived, step + 1)) return 0; /* what the left neighbour put is now readable */
        mine = inbox + step * n;
    }
    return ep_dev_barrier(h, turns, 1);
}

#ifdef __CUDACC__
__global__ void ring_kernel(const __grid_constant__ EpDeviceHeap h, float *inbox, uint64_t *arrived, uint64_t *turns, const float *mine,
                            uint64_t n, uint64_t *ok) {
    const uint64_t all = ring(&h, inbox, arrived, turns, mine, n);
    if (threadIdx.x == 0) *ok = all;
}
extern "C" int start_ring(const EpDeviceHeap *h, float *inbox, uint64_t *arrived, uint64_t *turns, const float *mine, uint64_t n,
                          uint64_t *ok, void *stream) {
    ring_kernel<<<1, 32, 0, (cudaStream_t)stream>>>(*h, inbox, arrived, turns, mine, n, ok);
    return (int)cudaGetLastError();
}
#else
int start_ring(const EpDeviceHeap *h, float *inbox, uint64_t *arrived, uint64_t *turns, const float *mine, uint64_t n, uint64_t *ok,
               void *stream) {
    (void)stream;
    *ok = ring(h, inbox, arrived, turns, mine, n);
    return 0;
}
#endif
