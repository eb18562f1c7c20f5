/* gemm_f16.cu - the sm_90a kernels of the grouped GEMM in f16; a separate file, to compile in parallel. */
#include "kernels/gemm/gemm_hopper.cuh"

int ep_launch_gemm_f16(const EpGemmParams *p, uint32_t tile_cols, uint32_t num_blocks, cudaStream_t stream) {
    return (int)launch_of<true>(p, tile_cols, num_blocks, stream);
}
