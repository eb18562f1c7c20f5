/* rescale.cuh - numbers of e4m3 get one scale for a whole row, or for a whole matrix; see EpRescaleParams.
 *
 * A warp has a row. It reads and writes only groups of 128 numbers whose scale changes.
 * Invariant: the bits are those of cpu/quantize.c. */
#ifndef EP_RESCALE_CUH
#define EP_RESCALE_CUH
#include "kernels/quantize/e4m3.cuh"

#define EP_RESCALE_WARPS 8u /* of a CTA */
#define EP_RESCALE_LOADS 4u /* of a lane that are in flight */

EP_FN void ep_rescale_row(const EpRescaleParams &p, uint64_t row) {
    const uint32_t matrix = (uint32_t)(row / p.n), r = (uint32_t)(row % p.n), lane = ep_lane();
    const uint32_t num_groups = ep_gemm_num_blocks(p.k);
    float *const scales = p.scales + matrix * p.scale_matrix + r / p.rows_of_scale * p.scale_row;
    float to = 0;
    if (p.to) to = p.to[matrix];
    else {
        for (uint32_t g = lane; g < num_groups; g += 32) to = fmaxf(to, scales[g * p.scale_col]);
#pragma unroll
        for (int j = 16; j > 0; j /= 2) to = fmaxf(to, __shfl_xor_sync(EP_FULL, to, j));
    }
    const float inverse = __frcp_rn(to);
    uint4 *const q = (uint4 *)(p.q + row * p.k);
    const uint32_t num_pieces = p.k / 16;
    for (uint32_t first = lane; first < num_pieces; first += 32 * EP_RESCALE_LOADS) {
        float scale[EP_RESCALE_LOADS];
        uint4 v[EP_RESCALE_LOADS];
#pragma unroll
        for (uint32_t i = 0; i < EP_RESCALE_LOADS; i++) {
            const uint32_t piece = first + 32 * i;
            scale[i] = piece < num_pieces ? scales[piece / 8 * p.scale_col] : to;
            if (piece < num_pieces && scale[i] != to) v[i] = q[piece];
        }
#pragma unroll
        for (uint32_t i = 0; i < EP_RESCALE_LOADS; i++) {
            if (first + 32 * i >= num_pieces || scale[i] == to) continue; /* `to` may be NaN */
            const __half2 ratio = __float2half2_rn(__fmul_rn(scale[i], inverse));
            q[first + 32 * i] = make_uint4(ep_e4m3_shift(v[i].x, ratio), ep_e4m3_shift(v[i].y, ratio),
                                           ep_e4m3_shift(v[i].z, ratio), ep_e4m3_shift(v[i].w, ratio));
        }
    }
    if (p.to) return;
    __syncwarp(); /* all lanes have read the scales */
    for (uint32_t g = lane; g < num_groups; g += 32) scales[g * p.scale_col] = to;
}

static __global__ void __launch_bounds__(32 * EP_RESCALE_WARPS)
    rescale_kernel(const __grid_constant__ EpRescaleParams p) {
    const uint64_t num_rows = ep_rescale_num_rows(&p);
    for (uint64_t row = blockIdx.x * EP_RESCALE_WARPS + threadIdx.x / 32; row < num_rows;
         row += (uint64_t)gridDim.x * EP_RESCALE_WARPS)
        ep_rescale_row(p, row);
}

#endif /* EP_RESCALE_CUH */
