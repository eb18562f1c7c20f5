/* gemm_narrow.cuh - the grouped GEMM for Hopper with few columns, such as the rank of an adapter.
 *
 * Such a product does little with the rows that it reads, so the memory limits it: what counts is how many
 * loads are under way. The producer, a warp, fills a ring of pipeline stages, and a warpgroup multiplies. A
 * tile is a row block of an expert with all columns; CTA number c computes tiles c, c + number of CTAs, and
 * so on. With few rows each expert is one tile, and all tiles are computed at once.
 *
 * A warpgroup multiplies the columns of a tile in passes of BN columns. Without a mixture there is one pass.
 * In a mixture (EpOwnColumns) a row keeps the columns of its own adapter and gets zeros in the others. There
 * a pass takes those groups of 16 columns that some row of the tile keeps. The others are not loaded.
 *
 * The wgmmas of an element follow one another as in the other kernels for 16 bits, so its bits are the same.
 *
 * Exports ep_gemm_narrow_body. The template parameter C is an EpGemmNarrowConfig. Invariant: only rows and
 * columns that exist are written. */
#ifndef EP_GEMM_NARROW_CUH
#define EP_GEMM_NARROW_CUH
#include "kernels/arch/wgmma.cuh"
#include "kernels/gemm/gemm_stages.cuh"

enum { EP_NARROW_GROUP = 16 }; /* columns that are loaded together in a mixture */

/* FEW: few rows of each expert. Then there are few tiles, and a CTA has an SM alone, with more stages.
 * Otherwise an SM has two or three CTAs: while one of them begins a tile, the others load. */
template <int KIND_, int BN_, bool FEW_, bool F16_> struct EpGemmNarrowConfig {
    static constexpr int KIND = KIND_, BN = BN_;
    static constexpr bool F16 = F16_, TRANS_B = KIND == EP_GEMM_DGRAD;
    static constexpr int BM = 64, K_BOXES = 2, BK = K_BOXES * EP_GEMM_BK;
    static constexpr int A_ROWS = FEW_ ? 16 : 64; /* of a TMA box */
    static constexpr int A_SLAB = BM * 128, B_SLAB = TRANS_B ? (BN + 63) / 64 * EP_GEMM_BOX : BN * 128;
    static constexpr int STAGE_BYTES = K_BOXES * (A_SLAB + B_SLAB);
    static constexpr int CTAS_OF_SM = FEW_ ? 1 : BN == 16 && !TRANS_B ? 3 : 2;
    static constexpr int STAGES = EP_SMEM_OF_CTAS(CTAS_OF_SM) / (STAGE_BYTES + 2 * 8);
    static constexpr int SMEM_BYTES = STAGES * (STAGE_BYTES + 2 * 8);
    static constexpr int THREADS = 128 + 32;            /* the MMA warpgroup, and the producer's warp */
    static constexpr int GROUPS = BN / EP_NARROW_GROUP; /* of a pass */
    static_assert(KIND != EP_GEMM_WGRAD, "the contraction runs over columns of the rows");
    static_assert(STAGES >= 2, "one is loaded while another one is multiplied");
};

/* ---- tiles ---- */

typedef struct {
    uint32_t expert, row0, num_rows;
} EpNarrowTile;
/* Where a warp goes on to look: an expert, and the number of tiles of those before it. */
typedef struct {
    uint32_t expert, num_before;
} EpNarrowCursor;

/* Find tile t: all lanes of a warp, each of which looks at EACH experts at once. t must not be smaller than
 * in the call before. Returns false if there is no such tile. */
template <typename C>
EP_PTX bool ep_narrow_find(const EpGemmParams *p, EpNarrowCursor *cursor, uint32_t t, EpNarrowTile *tile) {
    enum { EACH = 4 };
    const uint32_t lane = ep_lane_now();
    for (; cursor->expert < p->num_experts; cursor->expert += 32 * EACH) {
        const uint32_t first = cursor->expert + EACH * lane;
        uint32_t row[EACH + 1], own = 0;
#pragma unroll
        for (uint32_t i = 0; i <= EACH; i++)
            row[i] = ep_gemm_clamp_row(p, p->offsets[min(first + i, p->num_experts)]);
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
            own += row[i + 1] > row[i] ? (row[i + 1] - row[i] + C::BM - 1) / C::BM : 0;
        uint32_t sum = own; /* of the lanes up to this one */
#pragma unroll
        for (uint32_t d = 1; d < 32; d *= 2) {
            const uint32_t before = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += before;
        }
        const uint32_t all = __shfl_sync(0xffffffffu, sum, 31);
        if (t - cursor->num_before >= all) {
            cursor->num_before += all;
            continue;
        }
        uint32_t left = t - cursor->num_before;
        const int finder = __ffs((int)__ballot_sync(0xffffffffu, sum > left)) - 1;
        left -= sum - own; /* counts, in the finder, among its own tiles */
        uint32_t expert = 0, row0 = 0, num_rows = 0;
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            const uint32_t num = row[i + 1] > row[i] ? row[i + 1] - row[i] : 0;
            const uint32_t num_tiles = (num + C::BM - 1) / C::BM;
            if (num_rows == 0 && left < num_tiles) {
                expert = first + i;
                row0 = row[i] + C::BM * left;
                num_rows = min((uint32_t)C::BM, row[i + 1] - row0);
            }
            left -= num_tiles; /* past the wanted tile it wraps around, to a large number */
        }
        tile->expert = __shfl_sync(0xffffffffu, expert, finder);
        tile->row0 = __shfl_sync(0xffffffffu, row0, finder);
        tile->num_rows = __shfl_sync(0xffffffffu, num_rows, finder);
        return true;
    }
    return false;
}

/* ---- passes ---- */

/* Of the groups of columns from `from` on, 32 at most: those that some row of the tile keeps, a bit for each.
 * All lanes of a warp. */
template <typename C> EP_PTX uint32_t ep_narrow_kept(const EpGemmParams *p, const EpOwnColumns *own,
                                                     const EpNarrowTile *t, uint32_t from) {
    const uint32_t num_cols = ep_gemm_num_cols(p), num = min(32u, num_cols / EP_NARROW_GROUP - from);
    const uint32_t all = 0xffffffffu >> (32 - num);
    uint32_t kept = 0;
    if (!own->row_tag) return all;
#pragma unroll
    for (uint32_t r = ep_lane_now(); r < C::BM; r += 32) {
        if (r >= t->num_rows) continue;
        const uint32_t col = ep_first_own_column(own, t->row0 + r, num_cols);
        const uint32_t first = max(col / EP_NARROW_GROUP, from);
        const uint32_t last = min((col + own->of_adapter - 1) / EP_NARROW_GROUP, from + num - 1);
        if (col < num_cols && first <= last) kept |= 0xffffffffu >> (31 - (last - first)) << (first - from);
    }
    return __reduce_or_sync(0xffffffffu, kept);
}

/* The first columns of a pass's groups, which are next to each other in shared memory. */
template <typename C> struct EpNarrowPass {
    uint32_t num, col[C::GROUPS];
};
/* Whether a pass's groups are next to each other. */
template <typename C> EP_PTX bool ep_narrow_is_dense(const EpNarrowPass<C> &pass) {
    bool is_dense = true;
#pragma unroll
    for (uint32_t i = 1; i < C::GROUPS; i++)
        is_dense &= i >= pass.num || pass.col[i] == pass.col[0] + EP_NARROW_GROUP * i;
    return is_dense;
}
/* Take the groups of the next pass from the bits in *left. */
template <typename C> EP_PTX EpNarrowPass<C> ep_narrow_next(uint32_t from, uint32_t *left) {
    EpNarrowPass<C> pass = {0, {}};
#pragma unroll
    for (uint32_t i = 0; i < C::GROUPS; i++) {
        if (*left == 0) continue;
        pass.col[i] = (from + (uint32_t)__ffs((int)*left) - 1) * EP_NARROW_GROUP;
        *left &= *left - 1;
        pass.num = i + 1;
    }
    return pass;
}

/* ---- the roles ---- */

typedef struct {
    uint32_t stages, full, empty;
} EpNarrowShared;
/* Boxes of the rows; of BN columns, in DGRAD of 64; and in a mixture of a group. */
typedef struct {
    const CUtensorMap *rows, *columns, *group;
} EpNarrowMaps;

/* Load a stage: of the rows the boxes that have some, and the columns of a pass. */
template <typename C>
EP_PTX void ep_narrow_load(const EpNarrowTile *t, const EpNarrowPass<C> &pass, bool is_mixture, uint32_t k,
                           uint32_t smem, uint32_t bar, const EpNarrowMaps *maps) {
    /* One box of BN columns is loaded faster than a box for each group. */
    const bool by_group = is_mixture && (pass.num * 2 <= C::GROUPS || !ep_narrow_is_dense<C>(pass));
    const uint32_t num_a = (t->num_rows + C::A_ROWS - 1) / C::A_ROWS;
    const uint32_t b_bytes = by_group ? pass.num * EP_NARROW_GROUP * 128 : C::B_SLAB;
    ep_mbar_arrive_expect(bar, (num_a * C::A_ROWS * 128 + b_bytes) * C::K_BOXES);
#pragma unroll
    for (uint32_t kk = 0; kk < C::K_BOXES; kk++) {
        const int32_t at = (int32_t)(k + kk * EP_GEMM_BK), col = (int32_t)pass.col[0], e = (int32_t)t->expert;
        const uint32_t b = smem + C::K_BOXES * C::A_SLAB + kk * C::B_SLAB;
        for (uint32_t i = 0; i < num_a; i++)
            ep_tma_load_2d<false>(smem + kk * C::A_SLAB + i * C::A_ROWS * 128, maps->rows, bar, at,
                                  (int32_t)(t->row0 + C::A_ROWS * i));
        if constexpr (C::TRANS_B) {
            for (int32_t i = 0; i < C::B_SLAB / EP_GEMM_BOX; i++)
                ep_tma_load_3d<false>(b + (uint32_t)i * EP_GEMM_BOX, maps->columns, bar, col + 64 * i, at, e);
        } else if (by_group) {
#pragma unroll
            for (uint32_t i = 0; i < C::GROUPS; i++)
                if (i < pass.num)
                    ep_tma_load_3d<false>(b + i * EP_NARROW_GROUP * 128, maps->group, bar, at,
                                          (int32_t)pass.col[i], e);
        } else {
            ep_tma_load_3d<false>(b, maps->columns, bar, at, col, e);
        }
    }
}

template <typename C> EP_PTX void ep_narrow_produce(const EpGemmNarrowParams *p, const EpNarrowShared *s,
                                                    const EpNarrowMaps *maps) {
    const uint32_t num_k = C::TRANS_B ? p->gemm.n : p->gemm.k;
    const uint32_t num_groups = ep_gemm_num_cols(&p->gemm) / EP_NARROW_GROUP;
    EpNarrowCursor cursor = {0, 0};
    EpRing ring = {0, 1};
    EpNarrowTile t;
    for (uint32_t n = blockIdx.x; ep_narrow_find<C>(&p->gemm, &cursor, n, &t); n += gridDim.x)
        for (uint32_t from = 0; from < num_groups; from += 32)
            for (uint32_t left = ep_narrow_kept<C>(&p->gemm, &p->own, &t, from); left;) {
                const EpNarrowPass<C> pass = ep_narrow_next<C>(from, &left);
                if (ep_lane_now() != 0) continue;
                for (uint32_t k = 0; k < num_k; k += C::BK, ep_ring_next<C::STAGES>(&ring)) {
                    ep_mbar_wait(s->empty + 8 * ring.stage, ring.parity, p->gemm.limit_ns);
                    ep_narrow_load<C>(&t, pass, p->own.row_tag != NULL, k,
                                      s->stages + ring.stage * C::STAGE_BYTES, s->full + 8 * ring.stage,
                                      maps);
                }
            }
}

/* d = the products of a pass: N columns. TMA has filled the last stage with zeros after the last value of k.
 */
template <typename C, int N> EP_PTX void ep_narrow_multiply_by(float (&d)[C::BN / 2],
                                                               const EpGemmNarrowParams *p,
                                                               const EpNarrowShared *s, EpRing *ring) {
    float sum[N / 2];
    constexpr uint64_t STEP_B = C::TRANS_B ? 128 : 2; /* the k of a wgmma, in units of 16 bytes */
    const uint32_t num_k = C::TRANS_B ? p->gemm.n : p->gemm.k;
    for (uint32_t k = 0; k < num_k; k += C::BK, ep_ring_next<C::STAGES>(ring)) {
        const uint32_t at = s->stages + ring->stage * C::STAGE_BYTES;
        const uint64_t a = ep_wgmma_desc(at, EP_GEMM_BOX);
        const uint64_t b = ep_wgmma_desc(at + C::K_BOXES * C::A_SLAB, EP_GEMM_BOX);
        ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->gemm.limit_ns);
        ep_wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4 * C::K_BOXES; i++)
            ep_wgmma<N, C::F16, 0, C::TRANS_B>(sum, a + i / 4 * (C::A_SLAB / 16) + i % 4 * 2,
                                               b + i / 4 * (C::B_SLAB / 16) + i % 4 * STEP_B, k || i);
        ep_wgmma_commit();
        ep_wgmma_wait<0>();
        ep_wgmma_keep_order(sum);
        __syncwarp(); /* every lane has finished its wait, before the stage is overwritten */
        if (threadIdx.x % 32 == 0) ep_mbar_arrive(s->empty + 8 * ring->stage);
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = sum[i];
}
/* The same with as few columns as the pass has, because a wgmma takes its time for each of them. */
template <typename C>
EP_PTX void ep_narrow_multiply(float (&d)[C::BN / 2], const EpGemmNarrowParams *p, const EpNarrowShared *s,
                               EpRing *ring, uint32_t num_groups) {
    if (C::BN > 16 && num_groups <= 1) ep_narrow_multiply_by<C, 16>(d, p, s, ring);
    else if (C::BN > 32 && num_groups <= 2) ep_narrow_multiply_by<C, 32>(d, p, s, ring);
    else ep_narrow_multiply_by<C, C::BN>(d, p, s, ring);
}

/* Round the products of a pass and write them. A lane has two neighbouring columns of each eight, of two
 * rows. In a mixture it writes zeros to the columns that are not a row's own. */
template <typename C> EP_PTX void ep_narrow_write(const float (&d)[C::BN / 2], const EpGemmNarrowParams *p,
                                                  const EpNarrowTile *t, const EpNarrowPass<C> &pass) {
    const uint32_t lane = ep_lane_now(), num_cols = ep_gemm_num_cols(&p->gemm);
    const bool is_mixture = p->own.row_tag != NULL;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t r = threadIdx.x / 32 * 16 + lane / 4 + 8 * half, row = t->row0 + r;
        if (r >= t->num_rows) continue;
        const uint32_t own = is_mixture ? ep_first_own_column(&p->own, row, num_cols) : 0;
        const uint32_t num_own = is_mixture ? p->own.of_adapter : num_cols;
        uint32_t *to = (uint32_t *)((uint16_t *)p->gemm.out + (uint64_t)row * num_cols) + lane % 4;
#pragma unroll
        for (uint32_t i = 0; i < C::BN / 8; i++) {
            const uint32_t col = pass.col[i / 2] + i % 2 * 8;
            const uint32_t v = ep_pack<C::F16>(d[4 * i + 2 * half], d[4 * i + 2 * half + 1]);
            if (i / 2 < pass.num) to[col / 2] = col - own < num_own ? v : 0;
        }
    }
}

/* Write zeros to the groups of 32 from `from` on that no row of the tile keeps. A warp has 16 rows, and a
 * lane half of a row's group. */
template <typename C> EP_PTX void ep_narrow_clear(const EpGemmNarrowParams *p, const EpNarrowTile *t,
                                                  uint32_t from, uint32_t kept) {
    const uint32_t num_cols = ep_gemm_num_cols(&p->gemm), num_groups = num_cols / EP_NARROW_GROUP;
    const uint32_t r = threadIdx.x / 32 * 16 + ep_lane_now() / 2;
    uint16_t *to = (uint16_t *)p->gemm.out + (uint64_t)(t->row0 + r) * num_cols + ep_lane_now() % 2 * 8;
    for (uint32_t i = 0; i < 32 && from + i < num_groups; i++)
        if (!(kept >> i & 1) && r < t->num_rows)
            *(uint4 *)(to + (from + i) * EP_NARROW_GROUP) = make_uint4(0, 0, 0, 0);
}

template <typename C> EP_PTX void ep_narrow_mma(const EpGemmNarrowParams *p, const EpNarrowShared *s) {
    const uint32_t num_groups = ep_gemm_num_cols(&p->gemm) / EP_NARROW_GROUP;
    EpNarrowCursor cursor = {0, 0};
    EpRing ring = {0, 0};
    EpNarrowTile t;
    for (uint32_t n = blockIdx.x; ep_narrow_find<C>(&p->gemm, &cursor, n, &t); n += gridDim.x)
        for (uint32_t from = 0; from < num_groups; from += 32) {
            const uint32_t kept = ep_narrow_kept<C>(&p->gemm, &p->own, &t, from);
            ep_narrow_clear<C>(p, &t, from, kept);
            for (uint32_t left = kept; left;) {
                const EpNarrowPass<C> pass = ep_narrow_next<C>(from, &left);
                float d[C::BN / 2];
                ep_narrow_multiply<C>(d, p, s, &ring, pass.num);
                ep_narrow_write<C>(d, p, &t, pass);
            }
        }
}

template <typename C> EP_PTX void ep_gemm_narrow_body(const EpGemmNarrowParams *p, const EpNarrowMaps *maps) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const uint32_t smem = ep_smem(smem_bytes), bars = smem + C::STAGES * C::STAGE_BYTES;
    const EpNarrowShared s = {smem, bars, bars + 8 * C::STAGES};
    if (threadIdx.x == 0) {
        ep_tma_prefetch(maps->rows);
        ep_tma_prefetch(maps->columns);
        ep_tma_prefetch(maps->group);
        for (uint32_t i = 0; i < C::STAGES; i++) {
            ep_mbar_init(s.full + 8 * i, 1);
            ep_mbar_init(s.empty + 8 * i, 4);
        }
        ep_fence_mbar_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) ep_narrow_mma<C>(p, &s);
    else ep_narrow_produce<C>(p, &s, maps);
}

#endif /* EP_GEMM_NARROW_CUH */
