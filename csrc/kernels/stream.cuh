/* stream.cuh - rows through shared memory: what a warp of a megakernel, which has few registers, does in place of
 * ep_copy_row and ep_sum_rows.
 *
 * A warp has a queue of EP_FIFO_DEPTH cells of 512 bytes.  Each lane loads its 16 bytes of a piece of a row into its part
 * of a cell (cp.async), and takes them out again in the same order; so EP_FIFO_DEPTH pieces are on their way at
 * once, across the ends of rows.  No lane reads what another has loaded. */
#ifndef EP_STREAM_CUH
#define EP_STREAM_CUH
#include "rows.cuh"

enum {
    EP_FIFO_DEPTH = 8,
    EP_FIFO_CELL = 512,
    EP_FIFO_LIST = EP_FIFO_DEPTH * EP_FIFO_CELL,                       /* behind the cells: addresses of a chunk's rows, 8 bytes each */
    EP_FIFO_WEIGHTS = EP_FIFO_LIST + 8 * EP_CHUNK_SLOTS * EP_MAX_TOPK, /* and their weights */
    EP_FIFO_BYTES = EP_FIFO_WEIGHTS + 4 * EP_CHUNK_SLOTS * EP_MAX_TOPK
};

/* Copy num rows of num_vec times 16 bytes: the i-th from the address that lane i has, to those lanes' addresses that
 * place(i, &my_dst, &mask) gives. */
template <typename Place> EP_FN void ep_stream_copy(uint32_t fifo, uint64_t my_src, uint32_t num, uint32_t num_vec, Place place) {
    const uint32_t lane = ep_lane();
    uint32_t row_ahead = 0, vec_ahead = 0;
    fifo += 16 * lane;
    auto load = [&](uint32_t cell) {
        const uint4 *from = (const uint4 *)__shfl_sync(EP_FULL, my_src, (int)row_ahead);
        if (row_ahead < num && vec_ahead + lane < num_vec) ep_cp_async_16(fifo + cell, from + vec_ahead + lane);
        ep_cp_async_commit();
        vec_ahead += 32;
        if (vec_ahead >= num_vec) vec_ahead = 0, row_ahead += row_ahead < num;
    };
    for (uint32_t cell = 0; cell < EP_FIFO_LIST; cell += EP_FIFO_CELL) load(cell);
    for (uint32_t i = 0, cell = 0; i < num; i++) {
        uint64_t my_dst;
        uint32_t mask;
        place(i, &my_dst, &mask);
        for (uint32_t vec = 0; vec < num_vec; vec += 32, cell = (cell + EP_FIFO_CELL) % EP_FIFO_LIST) {
            ep_cp_async_wait<EP_FIFO_DEPTH - 1>();
            const uint4 v = ep_ld_shared(fifo + cell);
            for (uint32_t left = mask; left; left &= left - 1) {
                uint4 *to = (uint4 *)__shfl_sync(EP_FULL, my_dst, __ffs((int)left) - 1);
                if (vec + lane < num_vec) to[vec + lane] = v;
            }
            load(cell); /* the cell is empty: what was in it has been stored */
        }
    }
}

/* Rows to add up, those of one sum behind those of another: each lane with a row puts it into the list, at `num` and behind.
 * Returns how many there are then. */
EP_FN uint32_t ep_stream_list(uint32_t fifo, uint32_t num, bool mine, uint64_t my_src, float my_weight) {
    const uint32_t mask = __ballot_sync(EP_FULL, mine), at = num + __popc(mask & ((1u << ep_lane()) - 1));
    if (mine)
        ep_st_shared_u64(fifo + EP_FIFO_LIST + 8 * at, my_src),
            ep_st_shared_u32(fifo + EP_FIFO_WEIGHTS + 4 * at, __float_as_uint(my_weight));
    return num + __popc(mask);
}

/* The i-th of num sums, of the listed rows from the (i - 1)-th to the i-th end (a byte each in `ends`), goes to dst(i); summed as by
 * ep_sum_rows.  The caller's warp has met between list and sums. */
template <int DTYPE, typename Dst>
EP_FN void ep_stream_sums(uint32_t fifo, uint32_t ends, uint32_t num, uint32_t num_vec, bool weighted, Dst dst) {
    enum { N = EpVec<DTYPE>::N };
    const uint32_t lane = ep_lane(), list = fifo + EP_FIFO_LIST, weights = fifo + EP_FIFO_WEIGHTS;
    auto end = [&](uint32_t i) { return ends >> 8 * i & 255u; };
    auto begin = [&](uint32_t i) { return i ? ends >> 8 * (i - 1) & 255u : 0u; };
    uint32_t sum_ahead = 0, vec_ahead = 0, at_ahead = 0;
    fifo += 16 * lane;
    while (sum_ahead < num && end(sum_ahead) == 0) sum_ahead++;
    auto load = [&](uint32_t cell) {
        if (sum_ahead < num) {
            const uint4 *from = (const uint4 *)ep_ld_shared_u64(list + 8 * at_ahead);
            if (vec_ahead + lane < num_vec) ep_cp_async_16(fifo + cell, from + vec_ahead + lane);
            if (++at_ahead == end(sum_ahead)) {
                vec_ahead += 32;
                if (vec_ahead >= num_vec) {
                    vec_ahead = 0, sum_ahead++;
                    while (sum_ahead < num && end(sum_ahead) == at_ahead) sum_ahead++; /* a sum of nothing */
                } else {
                    at_ahead = begin(sum_ahead);
                }
            }
        }
        ep_cp_async_commit();
    };
    for (uint32_t cell = 0; cell < EP_FIFO_LIST; cell += EP_FIFO_CELL) load(cell);
    for (uint32_t i = 0, cell = 0; i < num; i++) {
        uint4 *to = (uint4 *)dst(i);
        for (uint32_t vec = 0; vec < num_vec; vec += 32) {
            float acc[N] = {};
            for (uint32_t at = begin(i); at < end(i); at++, cell = (cell + EP_FIFO_CELL) % EP_FIFO_LIST) {
                float f[N];
                ep_cp_async_wait<EP_FIFO_DEPTH - 1>();
                EpVec<DTYPE>::unpack(ep_ld_shared(fifo + cell), f);
                const float w = __uint_as_float(ep_ld_shared_u32(weights + 4 * at));
#pragma unroll
                for (uint32_t j = 0; j < N; j++) acc[j] = __fadd_rn(acc[j], weighted ? __fmul_rn(w, f[j]) : f[j]);
                load(cell);
            }
            if (vec + lane < num_vec) to[vec + lane] = EpVec<DTYPE>::pack(acc);
        }
    }
}

#endif /* EP_STREAM_CUH */
