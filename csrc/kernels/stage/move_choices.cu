/* move_choices.cu - the kernel that moves choices of a plan to helper slots, and its launcher; see
 * protocol/balance.h. */
#include <cuda_runtime.h>

#include "kernels/launch.h"

enum { MOVE_THREADS = 256 };

__global__ void __launch_bounds__(MOVE_THREADS)
    move_choices_kernel(const __grid_constant__ EpMoveChoicesParams p) {
    const uint64_t i = (uint64_t)blockIdx.x * MOVE_THREADS + threadIdx.x;
    if (i < p.num_choices) p.indices[i] = ep_moved_choice(&p, i);
}

extern "C" int ep_launch_move_choices(const EpMoveChoicesParams *p, void *stream) {
    const uint64_t num_ctas = (p->num_choices + MOVE_THREADS - 1) / MOVE_THREADS;
    if (num_ctas == 0) return 0;
    move_choices_kernel<<<(uint32_t)num_ctas, MOVE_THREADS, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
