/* map_choices.cu - the kernel that maps choices to physical experts, and its launcher; see
 * protocol/expert_map.h. */
#include <cuda_runtime.h>

#include "kernels/launch.h"

enum { MAP_THREADS = 256 };

__global__ void __launch_bounds__(MAP_THREADS)
    map_choices_kernel(const __grid_constant__ EpMapChoicesParams p) {
    const uint64_t i = (uint64_t)blockIdx.x * MAP_THREADS + threadIdx.x;
    if (i < p.num_choices) p.out[i] = ep_mapped_choice(&p, i);
}

extern "C" int ep_launch_map_choices(const EpMapChoicesParams *p, void *stream) {
    const uint64_t num_ctas = (p->num_choices + MAP_THREADS - 1) / MAP_THREADS;
    if (num_ctas == 0) return 0;
    map_choices_kernel<<<(uint32_t)num_ctas, MAP_THREADS, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
