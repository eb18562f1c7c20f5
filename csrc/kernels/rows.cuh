/* rows.cuh - what a warp does with rows: copy one to several places, add several up.
 *
 * A row is a multiple of 16 bytes.  Each lane moves 16 bytes at a time and has UNROLL loads in flight
 * before its first use of one: enough, over a block's warps, to cover the latency of memory and link. */
#ifndef EP_ROWS_CUH
#define EP_ROWS_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "protocol/plan.h"
#include "protocol/queue.h"
#include "ptx.cuh"
#include "resident.cuh"

#ifndef EP_WARPS
#define EP_WARPS 16u         /* of a block of plan and dispatch */
#define EP_COMBINE_WARPS 12u /* of combine: its accumulators want 170 registers a thread */
#endif
#define EP_FULL 0xffffffffu

/* Copy src to each dst whose lane is in mask: lane j holds the address of the j-th. */
template <int UNROLL = 8> EP_FN void ep_copy_row(uint64_t my_dst, uint32_t mask, const void *src, uint32_t num_vec) {
    const uint4 *from = (const uint4 *)src;
    for (uint32_t base = 0; base < num_vec && mask; base += 32 * UNROLL) {
        const uint32_t at = base + ep_lane();
        uint4 v[UNROLL];
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++)
            if (at + 32 * u < num_vec) v[u] = ep_ld_row(from + at + 32 * u);
        for (uint32_t left = mask; left; left &= left - 1) {
            uint4 *to = (uint4 *)__shfl_sync(EP_FULL, my_dst, __ffs((int)left) - 1);
#pragma unroll
            for (uint32_t u = 0; u < UNROLL; u++)
                if (at + 32 * u < num_vec) to[at + 32 * u] = v[u];
        }
    }
}

template <int DTYPE> struct EpVec; /* 16 bytes as floats and back, each rounded to nearest even */
template <> struct EpVec<EP_F32> {
    enum { N = 4 };
    static __device__ void unpack(uint4 v, float *f) {
        f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
    }
    static __device__ uint4 pack(const float *f) {
        return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
    }
};
template <> struct EpVec<EP_BF16> {
    enum { N = 8 };
    static __device__ void unpack(uint4 v, float *f) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
    static __device__ uint32_t pair(float a, float b) {
        __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
        return *reinterpret_cast<uint32_t *>(&h);
    }
    static __device__ uint4 pack(const float *f) {
        return make_uint4(pair(f[0], f[1]), pair(f[2], f[3]), pair(f[4], f[5]), pair(f[6], f[7]));
    }
};
template <> struct EpVec<EP_F16> {
    enum { N = 8 };
    static __device__ void unpack(uint4 v, float *f) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 p = __half22float2(*reinterpret_cast<const __half2 *>(&w[i]));
            f[2 * i] = p.x, f[2 * i + 1] = p.y;
        }
    }
    static __device__ uint32_t pair(float a, float b) {
        __half2 h = __floats2half2_rn(a, b);
        return *reinterpret_cast<uint32_t *>(&h);
    }
    static __device__ uint4 pack(const float *f) {
        return make_uint4(pair(f[0], f[1]), pair(f[2], f[3]), pair(f[4], f[5]), pair(f[6], f[7]));
    }
};

/* dst = the rows whose lanes are in mask, times their weights if weighted, added in lane order; each
 * product and sum rounded to fp32 by itself, as on the CPU, so that both backends agree to the bit.  ROWS of them
 * are on their way at once, UNROLL pieces of each. */
template <int DTYPE, int UNROLL = 4, int ROWS = 3>
EP_FN void ep_sum_rows(void *dst, uint32_t num_vec, uint32_t mask, uint64_t my_src, float my_weight, bool weighted) {
    enum { N = EpVec<DTYPE>::N };
    uint4 *to = (uint4 *)dst;
    for (uint32_t base = 0; base < num_vec; base += 32 * UNROLL) {
        const uint32_t at = base + ep_lane();
        float acc[UNROLL][N] = {};
        for (uint32_t left = mask; left;) {
            uint4 v[ROWS][UNROLL];
            int lane[ROWS];
            const uint32_t num = __popc(left);
#pragma unroll
            for (uint32_t i = 0; i < ROWS; i++) {
                if (i >= num) break;
                lane[i] = __ffs((int)left) - 1, left &= left - 1;
                const uint4 *from = (const uint4 *)__shfl_sync(EP_FULL, my_src, lane[i]);
#pragma unroll
                for (uint32_t u = 0; u < UNROLL; u++)
                    if (at + 32 * u < num_vec) v[i][u] = ep_ld_row(from + at + 32 * u);
            }
#pragma unroll
            for (uint32_t i = 0; i < ROWS; i++) {
                if (i >= num) break;
                const float w = __shfl_sync(EP_FULL, my_weight, lane[i]); /* it may still be on its way */
#pragma unroll
                for (uint32_t u = 0; u < UNROLL; u++) {
                    float f[N];
                    EpVec<DTYPE>::unpack(v[i][u], f);
#pragma unroll
                    for (uint32_t j = 0; j < N; j++) acc[u][j] = __fadd_rn(acc[u][j], weighted ? __fmul_rn(w, f[j]) : f[j]);
                }
            }
        }
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++)
            if (at + 32 * u < num_vec) to[at + 32 * u] = EpVec<DTYPE>::pack(acc[u]);
    }
}

/* ---- what every operation's blocks do alike ---- */

/* Enter, by the first block; wait and judge, by one warp of every block.  All threads get the verdict. */
EP_FN bool ep_block_enter(const EpComm *c, uint32_t op, const int32_t *plan, uint32_t num_tokens, uint32_t num_rows, uint32_t has_weight,
                          uint32_t has_scalar, uint64_t epoch) {
    __shared__ int ok;
    if (threadIdx.x < 32) {
        if (blockIdx.x == 0) {
            EpHeader h = ep_make_header(c, op, plan, num_tokens, num_rows);
            h.has_weight = has_weight, h.has_scalar = has_scalar;
            ep_enter(c, &h, epoch);
        }
        bool verdict = ep_enter_await(c, op, epoch);
        if (threadIdx.x == 0) ok = verdict;
    }
    __syncthreads();
    return ok;
}

/* Leave, by one thread of every block; all threads of the last one get its news. */
EP_FN EpLeft ep_block_leave(const EpComm *c, uint64_t epoch) {
    __shared__ int left;
    __syncthreads();
    if (threadIdx.x == 0) left = ep_leave(c, gridDim.x, epoch);
    __syncthreads();
    return (EpLeft)left;
}

/* The calling block sets num_bytes (a multiple of 4) at a multiple of 4. */
EP_FN void ep_block_fill(void *at, uint64_t num_bytes, uint32_t pattern) {
    if (!at) return;
    for (uint64_t i = threadIdx.x; i < num_bytes / 4; i += blockDim.x) ((uint32_t *)at)[i] = pattern;
}
#define EP_NAN_WORD 0xffffffffu
#define EP_NO_ROW 0xffffffffu /* -1: nothing came from there */

EP_FN unsigned char *ep_slot_at(const EpComm *c, uint32_t at_rank, uint32_t of_rank, uint32_t slot) {
    return c->base[at_rank] + c->layout.stage_off + ((uint64_t)of_rank * c->shape.max_tokens + slot) * c->layout.slot_stride;
}
EP_FN unsigned char *ep_choice_at(const EpComm *c, uint32_t at_rank, uint64_t idx) {
    return c->base[at_rank] + c->layout.stage_off + idx * c->layout.choice_stride;
}

#endif /* EP_ROWS_CUH */
