/* rows.cuh - how one warp copies rows and adds them up.
 *
 * A row is a multiple of 16 bytes. ep_copy_row moves a row through registers. ep_stream_copy and
 * ep_stream_sums move rows through shared memory, where a warp has a queue of cells. A lane loads its part of
 * a piece of a row into its part of a cell with cp.async, and later reads it back in the same order.
 * So as many pieces as there are cells are in flight, also across the ends of rows, and pieces in flight need
 * no registers.
 * Invariant: no lane reads what another lane has loaded, so the cells need no synchronisation. */
#ifndef EP_ROWS_CUH
#define EP_ROWS_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/arch/cta.cuh"

EP_FN uint32_t ep_row_vecs(const EpComm *c) { return (uint32_t)(c->layout.row_bytes / 16); }

/* What a warp moves of a chunk: the slots first, first + 1, ... (num of them), and of each row num_vec units
 * of 16 bytes, the first of which is unit vec. The warp that has unit 0 of a row also moves what else is in
 * the slot, and records what has arrived. */
typedef struct {
    uint32_t first, num, vec, num_vec;
} EpPart;
EP_FN EpPart ep_whole_chunk(uint32_t chunk, uint32_t num_slots, uint32_t num_vec) {
    return {chunk * EP_CHUNK_SLOTS, num_slots, 0, num_vec};
}
/* Part i of a chunk that the warps of a CTA share: a quarter of the row of one slot, or nothing (num 0). */
enum { EP_ROW_PARTS = 4, EP_CHUNK_PARTS = EP_CHUNK_SLOTS * EP_ROW_PARTS };
EP_FN EpPart ep_part_of_chunk(uint32_t i, uint32_t chunk, uint32_t num_slots, uint32_t num_vec) {
    const uint32_t per = ep_ceil_div_u32(num_vec, 32 * EP_ROW_PARTS) * 32;
    const uint32_t slot = i / EP_ROW_PARTS, vec = i % EP_ROW_PARTS * per;
    const uint32_t left = slot < num_slots && vec < num_vec ? num_vec - vec : 0;
    return {chunk * EP_CHUNK_SLOTS + slot, left ? 1u : 0u, vec, left < per ? left : per};
}

/* Copy row src to several destinations: for each lane in `mask`, to the address that this lane holds. Each
 * byte passes the load/store unit twice. Through shared memory it would be four times, which costs
 * bandwidth when few SMs must saturate a link. */
EP_FN void ep_copy_row(uint64_t my_dst, uint32_t mask, const void *src, uint32_t num_vec) {
    enum { UNROLL = 8 }; /* loads in flight before the first result is used */
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

/* A warp's queue: DEPTH cells, each of PARTS times 16 bytes per lane. A sum has at most ROWS rows. */
template <int DEPTH_, int PARTS_, int ROWS = EP_MAX_TOPK> struct EpFifo {
    static constexpr int DEPTH = DEPTH_, PARTS = PARTS_;
    static constexpr uint32_t CELL = PARTS * 512;
    static constexpr uint32_t LIST = DEPTH * CELL; /* after the cells: the addresses of a chunk's rows */
    static constexpr uint32_t WEIGHTS = LIST + 8 * EP_CHUNK_SLOTS * ROWS; /* and their weights */
    static constexpr uint32_t BYTES = WEIGHTS + 4 * EP_CHUNK_SLOTS * ROWS;
    static_assert(EP_CHUNK_SLOTS * ROWS < 256, "ep_stream_sums: a position in the list fits a byte");
};
/* For megakernels, which have little shared memory left; GEMM + combine in FP8 has the least. */
typedef EpFifo<4, 2> EpFusedFifo;
typedef EpFifo<3, 2> EpCombineFp8Fifo;

/* This warp's queue, in a kernel that uses its dynamic shared memory for nothing else. */
template <typename F> EP_FN uint32_t ep_warp_fifo(void) {
    return ep_smem(ep_dynamic_smem()) + threadIdx.x / 32 * F::BYTES;
}

/* Move this lane's part of a piece of a row: into a cell, out of a cell, and to its destination. `left` is
 * the number of 16-byte units from this lane's first one to the end of the row. */
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

/* Copy one row for each lane in `rows`, of num_vec times 16 bytes. The row of lane i starts at my_src of
 * lane i. It goes to the addresses that place(i, &my_dst, &mask) gives: my_dst of each lane in `mask`. */
template <typename F, typename Place>
EP_FN void ep_stream_copy(uint32_t fifo, uint64_t my_src, uint32_t rows, uint32_t num_vec, Place place) {
    const uint32_t lane = ep_lane();
    const int32_t num =
        (int32_t)num_vec -
        (int32_t)lane; /* number of 16-byte units from this lane's first one to the row's end */
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
            load(cell); /* refill the cell: its content has been stored */
        }
    }
}

template <int DTYPE> struct EpVec; /* Convert 16 bytes to floats and back, rounding to nearest even. */
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

/* Append rows to the list of rows to add up: each lane with `mine` appends its row, starting at position
 * `num`. The rows of one sum must be consecutive. Returns the new length of the list. */
template <typename F> EP_FN uint32_t ep_stream_list(uint32_t fifo, uint32_t num, bool mine, uint64_t my_src,
                                                    float my_weight) {
    const uint32_t mask = __ballot_sync(EP_FULL, mine), at = num + __popc(mask & ((1u << ep_lane()) - 1));
    if (mine) {
        ep_st_shared_u64(fifo + F::LIST + 8 * at, my_src);
        ep_st_shared_u32(fifo + F::WEIGHTS + 4 * at, __float_as_uint(my_weight));
    }
    return num + __popc(mask);
}

/* Add this lane's part of a row to its sums. If weighted, the row is first multiplied by w. The product and
 * the sum are each rounded to fp32, as on the CPU. */
template <int DTYPE, int PARTS> EP_FN void ep_stream_add(float (&acc)[PARTS][EpVec<DTYPE>::N],
                                                         const uint4 (&v)[PARTS], bool weighted, float w) {
    enum { N = EpVec<DTYPE>::N };
#pragma unroll
    for (uint32_t u = 0; u < PARTS; u++) {
        float f[N];
        EpVec<DTYPE>::unpack(v[u], f);
#pragma unroll
        for (uint32_t j = 0; j < N; j++)
            acc[u][j] = __fadd_rn(acc[u][j], weighted ? __fmul_rn(w, f[j]) : f[j]);
    }
}

/* Add up rows of the warp's list in shared memory; write num sums. Byte i of `ends` is end[i]: sum i consists
 * of the rows end[i - 1] to end[i] - 1 of the list (the first one of the rows from 0 on) and goes to dst(i).
 * If weighted, each row is multiplied by its weight. The order is that of the list, and each product and each
 * sum is rounded to fp32 separately, as on the CPU, so that both backends agree bit by bit; a finished sum is
 * then rounded to DTYPE. The caller must synchronise the warp between writing the list and this call. */
template <typename F, int DTYPE, typename Dst>
EP_FN void ep_stream_sums(uint32_t fifo, uint32_t ends, uint32_t num, uint32_t num_vec, bool weighted,
                          Dst dst) {
    enum { N = EpVec<DTYPE>::N };
    const uint32_t lane = ep_lane(), list = fifo + F::LIST, weights = fifo + F::WEIGHTS;
    auto end = [&](uint32_t i) { return ends >> 8 * i & 255u; };
    auto begin = [&](uint32_t i) { return i ? ends >> 8 * (i - 1) & 255u : 0u; };
    uint32_t sum_ahead = 0, vec_ahead = 0, at_ahead = 0;
    const uint4 *from = NULL; /* the next row to load */
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
                    while (sum_ahead < num && end(sum_ahead) == at_ahead) sum_ahead++; /* skip empty sums */
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
                ep_stream_add<DTYPE>(acc, v, weighted, w);
                load(cell);
            }
#pragma unroll
            for (uint32_t u = 0; u < F::PARTS; u++) v[u] = EpVec<DTYPE>::pack(acc[u]);
            ep_stream_put(to + vec, v, (int32_t)(num_vec - vec) - (int32_t)lane);
        }
    }
}

#endif /* EP_ROWS_CUH */
