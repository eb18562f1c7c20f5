/* own_columns.cu - the kernel that keeps of each row the columns of its own adapter, and its launcher; see
 * EpOwnColumnsParams. */
#include <cuda_runtime.h>

#include "kernels/launch.h"

enum { OWN_THREADS = 256 };

/* A thread has eight columns, which belong to one adapter. */
__global__ void __launch_bounds__(OWN_THREADS)
    own_columns_kernel(const __grid_constant__ EpOwnColumnsParams p) {
    const uint32_t of_row = p.num_columns / 8;
    const uint64_t i = (uint64_t)blockIdx.x * OWN_THREADS + threadIdx.x, row = i / of_row;
    const uint32_t column = (uint32_t)(i % of_row) * 8;
    if (row < p.num_rows && row < (uint32_t)*p.end && !ep_is_own_column(&p, row, column))
        *(uint4 *)(p.rows + row * p.num_columns + column) = make_uint4(0, 0, 0, 0);
}

extern "C" int ep_launch_own_columns(const EpOwnColumnsParams *p, void *stream) {
    const uint64_t num = (uint64_t)p->num_rows * (p->num_columns / 8);
    if (num == 0) return 0;
    own_columns_kernel<<<(uint32_t)((num + OWN_THREADS - 1) / OWN_THREADS), OWN_THREADS, 0,
                         (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
