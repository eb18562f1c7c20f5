/* gemm_bf16.cu - the grouped GEMM's kernels for sm_90a in bfloat16; by themselves, so that they compile beside the others. */
#include "gemm_hopper.cuh"

int ep_launch_gemm_bf16(const EpGemmParams *p, uint32_t tile_cols, uint32_t num_blocks, cudaStream_t stream) {
    return (int)launch_of<false>(p, tile_cols, num_blocks, stream);
}
