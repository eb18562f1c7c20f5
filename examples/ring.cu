/* ring.cu - a kernel that accesses other ranks' memory without the host. 06_device.py builds and launches it.
 *
 * With nvcc it is a kernel for heaps on GPUs. With a C compiler (-x c) it is a function for heaps on the
 * CPU. */
#include "epmoe_device.h"

/* In each of num_ranks steps, a rank puts the numbers that it has to its right neighbour. Row `step` of
 * inbox [num_ranks][n] has the numbers of this step. The caller is a warp or a CPU thread.
 * Returns 1, or 0 if a wait has failed. */
EP_FN uint64_t ring(const EpDeviceHeap *h, float *inbox, uint64_t *arrived, uint64_t *barrier_words,
                    const float *mine, uint64_t n) {
    const uint32_t right = (h->my_rank + 1) % h->num_ranks;
    for (uint64_t step = 0; step < h->num_ranks; step++) {
        ep_dev_put(h, inbox + step * n, mine, n * sizeof(float), right);
        ep_dev_signal_set(h, arrived, step + 1, right);   /* publishes the put */
        if (!ep_dev_wait(h, arrived, step + 1)) return 0; /* now the left neighbour's put is readable */
        mine = inbox + step * n;
    }
    return ep_dev_barrier(h, barrier_words, 1);
}

#ifdef __CUDACC__
__global__ void ring_kernel(const __grid_constant__ EpDeviceHeap h, float *inbox, uint64_t *arrived,
                            uint64_t *barrier_words, const float *mine, uint64_t n, uint64_t *ok) {
    const uint64_t all = ring(&h, inbox, arrived, barrier_words, mine, n);
    if (threadIdx.x == 0) *ok = all;
}
extern "C" int start_ring(const EpDeviceHeap *h, float *inbox, uint64_t *arrived, uint64_t *barrier_words,
                          const float *mine, uint64_t n, uint64_t *ok, void *stream) {
    ring_kernel<<<1, 32, 0, (cudaStream_t)stream>>>(*h, inbox, arrived, barrier_words, mine, n, ok);
    return (int)cudaGetLastError();
}
#else
int start_ring(const EpDeviceHeap *h, float *inbox, uint64_t *arrived, uint64_t *barrier_words,
               const float *mine, uint64_t n, uint64_t *ok, void *stream) {
    (void)stream;
    *ok = ring(h, inbox, arrived, barrier_words, mine, n);
    return 0;
}
#endif
