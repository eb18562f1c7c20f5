/* rows.cuh - what a warp does with rows: copy them, add them up.
 *
 * A row is a multiple of 16 bytes.  Rows go through registers (ep_copy_row), or through shared memory (ep_stream_*): there a
 * warp has a queue of cells, and each lane loads its part of a piece of a row into its part of a cell (cp.async), and takes
 * it out again in the same order; so as many pieces as there are cells are on their way at once, across the ends of rows,
 * and none of them takes a register.  No lane reads what another has loaded. */
#ifndef EP_ROWS_CUH
#define EP_ROWS_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cta.cuh"

/* Copy src to each dst whose lane is in mask: lane j holds the address of the j-th.  Each byte passes the SM's memory pipe
 * twice; by way of shared memory it would be four times, which shows where few SMs are to fill a link. */
EP_FN void ep_copy_row(uint64_t my_dst, uint32_t mask, const void *src, uint32_t num_vec) {
    enum { UNROLL = 8 }; /* loads on their way before the first is used */
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

/* A warp's queue: of how many cells, and of how many times 16 bytes a lane each. */
template <int DEPTH_, int PARTS_> struct EpFifo {
    static constexpr int DEPTH = DEPTH_, PARTS = PARTS_;
    static constexpr uint32_t CELL = PARTS * 512;
    static constexpr uint32_t LIST = DEPTH * CELL; /* behind the cells: addresses of a chunk's rows */
    static constexpr uint32_t WEIGHTS = LIST + 8 * EP_CHUNK_SLOTS * EP_MAX_TOPK; /* and their weights */
    static constexpr uint32_t BYTES = WEIGHTS + 4 * EP_CHUNK_SLOTS * EP_MAX_TOPK;
};
typedef EpFifo<4, 2> EpFusedFifo; /* of a megakernel, where there is little room */

/* Of a kernel that has nothing else in shared memory: a warp's part. */
template <typename F> EP_FN uint32_t ep_warp_fifo(void) {
    return ep_smem(ep_dynamic_smem()) + threadIdx.x / 32 * F::BYTES;
}

/* A lane's part of a piece of a row, of which `left` times 16 bytes are there, this lane's first among them: into a cell; and out of it. */
template <int PARTS> EP_FN void ep_stream_in(uint32_t cell, const uint4 *from, int32_t left) {
#pragma unroll
    for (int32_t u = 0; u < PARTS; u++)
        if (32 * u < left) ep_cp_async_16(cell + 512 * (uint32_t)u, from + 32 * u);
}
template <int PARTS> EP_FN void ep_stream_out(uint4 (&v)[PARTS], uint32_t cell) {
#pragma unroll
    for (int32_t u = 0; u < PARTS; u++) v[u] = ep_ld_shared(cell + 512 * (uint32_t)u);
}
template <int PARTS> EP_FN void ep_stream_put(uint4 *to, const uint4 (&v)[PARTS], int32_t left) {
#pragma unroll
    for (int32_t u = 0; u < PARTS; u++)
        if (32 * u < left) to[32 * u] = v[u];
}

/* Copy rows of num_vec times 16 bytes, one for each lane in `rows`: that of lane i from its address to those lanes'
 * addresses that place(i, &my_dst, &mask) gives. */
template <typename F, typename Place>
EP_FN void ep_stream_copy(uint32_t fifo, uint64_t my_src, uint32_t rows, uint32_t num_vec, Place place) {
    const uint32_t lane = ep_lane();
    const int32_t num = (int32_t)num_vec - (int32_t)lane; /* this lane's, as `left` counts */
    uint32_t ahead = rows, cell = 0;
    int32_t left_ahead = num;
    const uint4 *from = (const uint4 *)__shfl_sync(EP_FULL, my_src, __ffs((int)ahead) - 1) + lane;
    fifo += 16 * lane;
    auto load = [&](uint32_t to) {
        if (ahead) ep_stream_in<F::PARTS>(fifo + to, from, left_ahead);
        ep_cp_async_commit();
        from += 32 * F::PARTS;
        left_ahead -= 32 * F::PARTS;
        if (left_ahead + (int32_t)lane > 0) return;
        ahead &= ahead - 1;
        left_ahead = num;
        from = (const uint4 *)__shfl_sync(EP_FULL, my_src, __ffs((int)ahead) - 1) + lane;
    };
    for (uint32_t to = 0; to < F::LIST; to += F::CELL) load(to);
    for (uint32_t here = rows; here; here &= here - 1) {
        uint64_t my_dst;
        uint32_t mask;
        place((uint32_t)__ffs((int)here) - 1, &my_dst, &mask);
        for (uint32_t vec = 0; vec < num_vec; vec += 32 * F::PARTS, cell = (cell + F::CELL) % F::LIST) {
            uint4 v[F::PARTS];
            ep_cp_async_wait<F::DEPTH - 1>();
            ep_stream_out(v, fifo + cell);
            for (uint32_t left = mask; left; left &= left - 1) {
                uint4 *to = (uint4 *)__shfl_sync(EP_FULL, my_dst, __ffs((int)left) - 1);
                ep_stream_put(to + vec + lane, v, num - (int32_t)vec);
            }
            load(cell); /* the cell is empty: what was in it has been stored */
        }
    }
}

template <int DTYPE> struct EpVec; /* 16 bytes as floats and back, each rounded to nearest even */
template <> struct EpVec<EP_F32> {
    enum { N = 4 };
    static __device__ void unpack(uint4 v, float *f) {
        f[0] = __uint_as_float(v.x);
        f[1] = __uint_as_float(v.y);
        f[2] = __uint_as_float(v.z);
        f[3] = __uint_as_float(v.w);
    }
    static __device__ uint4 pack(const float *f) {
        return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                          __float_as_uint(f[3]));
    }
};
template <> struct EpVec<EP_BF16> {
    enum { N = 8 };
    static __device__ void unpack(uint4 v, float *f) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[2 * i] = __uint_as_float(w[i] << 16);
            f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        }
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
            f[2 * i] = p.x;
            f[2 * i + 1] = p.y;
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

/* Rows to add up, those of one sum behind those of another: each lane with a row puts it into the list, at `num` and behind.
 * Returns how many there are then. */
template <typename F> EP_FN uint32_t ep_stream_list(uint32_t fifo, uint32_t num, bool mine, uint64_t my_src,
                                                    float my_weight) {
    const uint32_t mask = __ballot_sync(EP_FULL, mine), at = num + __popc(mask & ((1u << ep_lane()) - 1));
    if (mine) {
        ep_st_shared_u64(fifo + F::LIST + 8 * at, my_src);
        ep_st_shared_u32(fifo + F::WEIGHTS + 4 * at, __float_as_uint(my_weight));
    }
    return num + __popc(mask);
}

/* The i-th of num sums, of the listed rows from the (i - 1)-th to the i-th end (a byte each in `ends`), goes to dst(i): times their
 * weights if weighted, in the list's order, each product and sum rounded to fp32 by itself, as on the CPU, so that both
 * backends agree to the bit.  The caller's warp has met between list and sums. */
template <typename F, int DTYPE, typename Dst>
EP_FN void ep_stream_sums(uint32_t fifo, uint32_t ends, uint32_t num, uint32_t num_vec, bool weighted,
                          Dst dst) {
    enum { N = EpVec<DTYPE>::N };
    const uint32_t lane = ep_lane(), list = fifo + F::LIST, weights = fifo + F::WEIGHTS;
    auto end = [&](uint32_t i) { return ends >> 8 * i & 255u; };
    auto begin = [&](uint32_t i) { return i ? ends >> 8 * (i - 1) & 255u : 0u; };
    uint32_t sum_ahead = 0, vec_ahead = 0, at_ahead = 0;
    const uint4 *from = NULL; /* the next row to load from */
    fifo += 16 * lane;
    while (sum_ahead < num && end(sum_ahead) == 0) sum_ahead++;
    auto look_ahead = [&] {
        if (sum_ahead < num) from = (const uint4 *)ep_ld_shared_u64(list + 8 * at_ahead);
    };
    auto load = [&](uint32_t cell) {
        if (sum_ahead < num) {
            ep_stream_in<F::PARTS>(fifo + cell, from + vec_ahead + lane,
                                   (int32_t)(num_vec - vec_ahead) - (int32_t)lane);
            if (++at_ahead == end(sum_ahead)) {
                vec_ahead += 32 * F::PARTS;
                if (vec_ahead >= num_vec) {
                    vec_ahead = 0;
                    sum_ahead++;
                    while (sum_ahead < num && end(sum_ahead) == at_ahead) sum_ahead++; /* a sum of nothing */
                } else {
                    at_ahead = begin(sum_ahead);
                }
            }
        }
        ep_cp_async_commit();
    };
    for (uint32_t cell = 0; cell < F::LIST; cell += F::CELL) {
        look_ahead();
        load(cell);
    }
    for (uint32_t i = 0, cell = 0; i < num; i++) {
        uint4 *to = (uint4 *)dst(i) + lane;
        for (uint32_t vec = 0; vec < num_vec; vec += 32 * F::PARTS) {
            float acc[F::PARTS][N] = {};
            uint4 v[F::PARTS];
            for (uint32_t at = begin(i); at < end(i); at++, cell = (cell + F::CELL) % F::LIST) {
                const float w = __uint_as_float(ep_ld_shared_u32(weights + 4 * at));
                look_ahead();
                ep_cp_async_wait<F::DEPTH - 1>();
                ep_stream_out(v, fifo + cell);
#pragma unroll
                for (uint32_t u = 0; u < F::PARTS; u++) {
                    float f[N];
                    EpVec<DTYPE>::unpack(v[u], f);
#pragma unroll
                    for (uint32_t j = 0; j < N; j++)
                        acc[u][j] = __fadd_rn(acc[u][j], weighted ? __fmul_rn(w, f[j]) : f[j]);
                }
                load(cell);
            }
#pragma unroll
            for (uint32_t u = 0; u < F::PARTS; u++) v[u] = EpVec<DTYPE>::pack(acc[u]);
            ep_stream_put(to + vec, v, (int32_t)(num_vec - vec) - (int32_t)lane);
        }
    }
}

#endif /* EP_ROWS_CUH */
