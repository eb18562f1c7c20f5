/* gemm_w4.cuh - the grouped GEMM of 16-bit rows and 4-bit weights, for Hopper: what the producer loads, and
 * the MMA warps.
 *
 * The weights are the first operand of the products, because that one may be in registers: a warp reads the
 * codes of its 16 lines from shared memory, expands them to 16 bits in registers, and multiplies. Memory
 * delivers a quarter of the bytes of 16-bit weights, and nothing writes the expanded weights anywhere. The
 * tokens are the second operand. A weight is rounded as in 16 bits, and products are added up in the same
 * order, so the results have the bits of the kernels for 16 bits.
 *
 * A tile has 128 lines of weights, 16 for each MMA warp. Rows g and g + 8 of the first operand (g = lane / 4)
 * are lines 2 g and 2 g + 1 of a warp. So a lane has the results of two neighbouring columns of the product.
 * With a gate these are a gate and its up: of line 2 g and 2 g + 1, where they alternate in the weights
 * (MIXED), and else of line g of both halves of the tile.
 *
 * Two instances:
 *   small M   Few rows per expert, tiles of 16 tokens, limited by memory. It multiplies by mma.sync, whose
 *             results have the same bits. For 8 tokens, the descriptors and waits of wgmmas take more
 *             instructions than loading the tokens into registers (docs/experiments, E-145).
 *   large M   Tiles of 256 tokens, limited by the tensor cores. It multiplies by wgmma. While one warpgroup
 *             expands, another one multiplies.
 *
 * Exports EpGemmW4Config, EpGemmW4Params, ep_gemm_w4_bytes, ep_gemm_w4_load_part and ep_gemm_mma_tiles_w4.
 * Results are written in bursts, as in gemm_small_m.cuh. */
#ifndef EP_GEMM_W4_CUH
#define EP_GEMM_W4_CUH
#include "kernels/arch/wgmma.cuh"
#include "kernels/gemm/expand.cuh"
#include "kernels/gemm/gemm_fp8.cuh"
#include "kernels/gemm/gemm_small_m.cuh"

/* gemm is the first member, as in EpGemmFp8Params. */
typedef struct {
    EpGemmParams gemm;
    EpFourBit weights;
} EpGemmW4Params;

template <bool LARGE_, int FORMAT_, int ACT, bool F16>
struct EpGemmW4Config : EpGemmConfig<EP_GEMM_FORWARD, 128, ACT, F16> {
    typedef EpGemmConfig<EP_GEMM_FORWARD, 128, ACT, F16> Base;
    static constexpr bool W4 = true, LARGE = LARGE_, SMALL_M = !LARGE;
    static constexpr int FORMAT = FORMAT_;
    /* For small M a warpgroup waits most of the time. So there are two CTAs on an SM. */
    static constexpr int CTAS_PER_SM = LARGE ? 1 : 2;
    static constexpr int MAX_SMEM_BYTES = LARGE ? EP_CTA_SMEM_BYTES : EP_HALF_SM_SMEM_BYTES;
    /* Gates and ups are two halves of the weights, and so are their scales in a slot. */
    static constexpr bool HALVES = EP_ACT_IS_GATED(ACT) && !EP_ACT_IS_MIXED(ACT);
    static constexpr int BM = LARGE ? 256 : 16, A_ROWS = LARGE ? 64 : 8;
    static constexpr int K_BOXES = LARGE ? 1 : 4, BK = K_BOXES * EP_GEMM_BK;
    static constexpr int UNITS = BK / EP_FOUR_BIT_UNIT;
    static constexpr int PART_BYTES = UNITS * 2048; /* the codes of 64 lines in a stage */
    /* Of the tokens, a stage for small M has [tokens / 8][4] boxes of 8 tokens by 64 values of k. */
    static constexpr int A_SLAB = LARGE ? BM * EP_GEMM_BK * 2 : 1024, A_BYTES = K_BOXES * BM * EP_GEMM_BK * 2;
    static constexpr int EIGHT_ROWS = LARGE ? 1024 : K_BOXES * 1024;
    static constexpr int STAGE_BYTES = A_BYTES + 2 * PART_BYTES;
    static constexpr int STAGES = 4;
    /* The scales of a stage: those of 256 values of k of each line, and then its zeros. */
    static constexpr int SCALE_SIZE = FORMAT == EP_MXFP4 ? 1 : 2, MAX_SCALES = EP_FOUR_BIT_BLOCK / 32;
    static constexpr int ZEROS = 128 * MAX_SCALES * SCALE_SIZE;
    static constexpr int SCALE_SLOT = ZEROS + (FORMAT == EP_MXFP4 ? 0 : 128 * MAX_SCALES);
    static constexpr int SCALE_BYTES = STAGES * SCALE_SLOT;
    static constexpr int RING_BYTES =
        (STAGES * (STAGE_BYTES + EP_GEMM_INFO_BYTES + 2 * 8) + Base::NUM_NEXT * (8 + 4) + 15) / 16 * 16;
    static constexpr int NUM_BURST_GROUPS =
        (MAX_SMEM_BYTES - RING_BYTES - SCALE_BYTES) / (Base::BURST_GROUP + 16);
    static constexpr int OUT_BYTES = NUM_BURST_GROUPS * (Base::BURST_GROUP + 16);
    static constexpr int SMEM_BYTES = RING_BYTES + OUT_BYTES + SCALE_BYTES;
    static_assert(SMEM_BYTES <= MAX_SMEM_BYTES && SMEM_BYTES % 16 == 0, "the shared memory of a CTA");
    static_assert(NUM_BURST_GROUPS >= BM / 8, "room for the groups of a tile");
    static_assert(STAGE_BYTES % 1024 == 0, "the tokens of a stage begin with the swizzle's pattern");
};

/* ---- loading ---- */

/* A stage has two parts of 64 lines each: with HALVES gates, and then their ups. Of a part it has the codes
 * of each unit, and the scales and zeros of the block of 256 values of k in which the stage is. All of these
 * are contiguous in memory. A part exists as a whole, or not at all. */
template <typename C> EP_PTX bool ep_gemm_w4_has_part(const EpGemmParams *p, const EpGemmTile *t,
                                                      uint32_t i) {
    return C::HALVES ? t->col0 < p->n : t->col0 + 64 * i < p->n;
}
template <typename C> EP_PTX uint32_t ep_gemm_w4_slot(const EpGemmShared *s, uint32_t stage) {
    if constexpr (C::W4) return ep_gemm_slot<C>(s, stage);
    return 0; /* weights of other formats have none */
}
template <typename C> EP_PTX uint32_t ep_gemm_w4_num_units(const EpGemmTile *t, uint32_t k) {
    return C::LARGE ? 1 : min((uint32_t)C::UNITS, (t->num_k - k) / EP_FOUR_BIT_UNIT);
}
template <typename C>
EP_PTX uint32_t ep_gemm_w4_bytes(const EpGemmW4Params *q, const EpGemmTile *t, uint32_t k) {
    const uint32_t num_units = ep_gemm_w4_num_units<C>(t, k);
    const uint32_t num = EP_FOUR_BIT_BLOCK >> ep_gemm_w4_log2_group(&q->weights); /* scales of a line */
    const uint32_t of_line = 32 * num_units + num * (C::SCALE_SIZE + (q->weights.zeros ? 1 : 0));
    return 64 * of_line * (ep_gemm_w4_has_part<C>(&q->gemm, t, 0) + ep_gemm_w4_has_part<C>(&q->gemm, t, 1));
}
/* Load one half of the values of k of a stage's rows for small M. */
template <typename C, bool BOTH>
EP_PTX void ep_gemm_w4_load_rows(const EpGemmTile *t, uint32_t k, uint32_t num_boxes, uint32_t half,
                                 uint32_t smem, uint32_t bar, const CUtensorMap *map) {
    for (uint32_t i = 0; i < num_boxes; i++)
        ep_tma_load_3d<BOTH>(smem + i * C::EIGHT_ROWS + half * 2 * C::A_SLAB, map, bar, 0,
                             (int32_t)(t->row0 + 8 * i), (int32_t)(k / 64 + 2 * half));
}
template <typename C, bool BOTH>
EP_PTX void ep_gemm_w4_load_part(const EpGemmW4Params *q, const EpGemmTile *t, uint32_t k, uint32_t i,
                                 uint32_t smem, uint32_t slot, uint32_t bar) {
    const EpGemmParams *p = &q->gemm;
    const EpFourBit *w = &q->weights;
    const uint32_t row = C::HALVES ? t->col0 / 2 + i * (p->n / 2) : t->col0 + 64 * i;
    const uint32_t num = EP_FOUR_BIT_BLOCK >> ep_gemm_w4_log2_group(w);
    if (!ep_gemm_w4_has_part<C>(p, t, i)) return;
    const uint64_t rows = (uint64_t)t->expert * (p->n / EP_FOUR_BIT_UNIT) + row / EP_FOUR_BIT_UNIT;
    const uint64_t block = rows * ep_four_bit_num_blocks(p->k) + k / EP_FOUR_BIT_BLOCK;
    const char *codes = (const char *)p->b + (rows * (p->k / EP_FOUR_BIT_UNIT) + k / EP_FOUR_BIT_UNIT) * 2048;
    const uint32_t num_scales = EP_FOUR_BIT_UNIT * num, num_units = ep_gemm_w4_num_units<C>(t, k);
    ep_bulk_load_to<BOTH>(smem + C::A_BYTES + C::PART_BYTES * i, codes, 2048 * num_units, bar);
    ep_bulk_load_to<BOTH>(slot + num_scales * C::SCALE_SIZE * i,
                          (const char *)w->scales + block * num_scales * C::SCALE_SIZE,
                          num_scales * C::SCALE_SIZE, bar);
    if (C::FORMAT == EP_INT4 && w->zeros)
        ep_bulk_load_to<BOTH>(slot + C::ZEROS + num_scales * i, w->zeros + block * num_scales, num_scales,
                              bar);
}

/* ---- reading codes ---- */

/* Where a lane finds its two lines: the first of them, and the address of its codes in the first stage. */
typedef struct {
    uint32_t line, codes;
} EpGemmW4Lane;
template <typename C> EP_PTX EpGemmW4Lane ep_gemm_w4_lane(const EpGemmShared *s) {
    const uint32_t lane = ep_lane_now(), warp = threadIdx.x / 32 - 4;
    const uint32_t line = warp * 16 + lane / 4 * 2, codes = s->stages + C::A_BYTES + lane % 4 * 16;
    if constexpr (C::HALVES) return {line, codes + line / 4 * 64 + line / 2 % 2 * 8};
    return {line, codes + line / 64 * C::PART_BYTES + line % 64 / 2 * 64};
}

/* The codes of both lines in unit U of a stage. */
template <typename C, int U>
EP_PTX void ep_gemm_w4_read_codes(uint2 (&codes)[2], uint32_t stage, const EpGemmW4Lane *own) {
    const uint32_t at = own->codes + stage * C::STAGE_BYTES + U * 2048;
    if constexpr (C::HALVES) { /* line / 2 of the gates, and of the ups */
        codes[0] = ep_ld_shared_u32x2(at);
        codes[1] = ep_ld_shared_u32x2(at + C::PART_BYTES);
    } else {
        const uint4 both = ep_ld_shared(at);
        codes[0] = make_uint2(both.x, both.y);
        codes[1] = make_uint2(both.z, both.w);
    }
}
template <typename C> EP_PTX uint32_t ep_gemm_w4_line(const EpGemmW4Lane *own, uint32_t i) {
    return C::HALVES ? own->line / 2 + 64 * i : own->line + i;
}

/* The only unit of a stage for large M. unit: its number in its block of 256 values of k. */
template <typename C>
EP_PTX void ep_gemm_w4_read(EpGemmW4Raw *raw, const EpFourBit *w, const EpGemmShared *s, uint32_t stage,
                            const EpGemmW4Lane *own, uint32_t unit) {
    const uint32_t slot = ep_gemm_slot<C>(s, stage);
    ep_gemm_w4_read_codes<C, 0>(raw->codes, stage, own);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t line = ep_gemm_w4_line<C>(own, i);
        if constexpr (C::FORMAT == EP_MXFP4) raw->scales[i] = ep_ld_shared_u16(slot + 8 * line + 2 * unit);
        else {
            const uint32_t log2 = ep_gemm_w4_log2_group(w);
            const uint32_t to = line * (EP_FOUR_BIT_BLOCK >> log2) + 2 * (unit >> (log2 - 5));
            raw->scales[i] = ep_ld_shared_u32(slot + 2 * to);
            raw->zeros[i] = w->zeros ? ep_ld_shared_u16(slot + C::ZEROS + to) : 0x0808;
        }
    }
}

/* For small M: the scales and zeros of a line in all four units of a stage, which is a block. In MXFP4 a word
 * has those of two units. In INT4 a word has both scales of a unit, and a word of zeros those of two. */
typedef struct {
    uint32_t scales[4], zeros[2];
} EpGemmW4Block;
template <typename C>
EP_PTX EpGemmW4Block ep_gemm_w4_read_block(const EpFourBit *w, uint32_t slot, uint32_t line) {
    if constexpr (C::FORMAT == EP_MXFP4) {
        const uint2 all = ep_ld_shared_u32x2(slot + 8 * line);
        return {{all.x, all.y}};
    }
    const uint32_t zeros = slot + C::ZEROS;
    if (w->group == 32) {
        const uint4 all = ep_ld_shared(slot + 16 * line);
        const uint2 z = w->zeros ? ep_ld_shared_u32x2(zeros + 8 * line) : make_uint2(0x08080808, 0x08080808);
        return {{all.x, all.y, all.z, all.w}, {z.x, z.y}};
    }
    if (w->group == 64) { /* the scale of a unit, twice in a word */
        const uint2 all = ep_ld_shared_u32x2(slot + 8 * line);
        const uint32_t z = w->zeros ? ep_ld_shared_u32(zeros + 4 * line) : 0x08080808;
        return {{__byte_perm(all.x, 0, 0x1010), __byte_perm(all.x, 0, 0x3232), __byte_perm(all.y, 0, 0x1010),
                 __byte_perm(all.y, 0, 0x3232)},
                {__byte_perm(z, 0, 0x1100), __byte_perm(z, 0, 0x3322)}};
    }
    const uint32_t all = ep_ld_shared_u32(slot + 4 * line);
    const uint32_t z = w->zeros ? ep_ld_shared_u16(zeros + 2 * line) : 0x0808;
    const uint32_t first = __byte_perm(all, 0, 0x1010), second = __byte_perm(all, 0, 0x3232);
    return {{first, first, second, second}, {__byte_perm(z, 0, 0x0000), __byte_perm(z, 0, 0x1111)}};
}
template <typename C, int U> EP_PTX EpGemmW4Factors ep_gemm_w4_block_factors(const EpGemmW4Block *b) {
    if constexpr (C::FORMAT == EP_MXFP4) return {ep_gemm_w4_mxfp4_scales<C::F16, U % 2>(b->scales[U / 2]), 0};
    return {b->scales[U], ep_gemm_w4_offsets<C::F16>(b->zeros[U / 2], U % 2 ? 0x4342 : 0x4140)};
}

/* ---- products ---- */

/* For small M: unit U of a stage. x: the addresses from which a lane loads the tokens of the stage. Of eight
 * tokens it loads eight matrices of 8 values of k, four at once. */
template <typename C, int N, int U>
EP_PTX void ep_gemm_w4_unit_small(float (&sum)[N / 2], uint32_t stage, const EpGemmW4Lane *own,
                                  const EpGemmW4Block (&block)[2], const uint32_t (&x)[2]) {
    uint2 codes[2];
    uint32_t a[16], b[N / 8][8];
    ep_gemm_w4_read_codes<C, U>(codes, stage, own);
#pragma unroll
    for (uint32_t i = 0; i < N / 8; i++) {
        ep_ldmatrix_x4(x[0] + U * C::A_SLAB + i * C::EIGHT_ROWS, b[i]);
        ep_ldmatrix_x4(x[1] + U * C::A_SLAB + i * C::EIGHT_ROWS, b[i] + 4);
    }
    ep_gemm_w4_expand_line<C, 0>(a, codes[0], ep_gemm_w4_block_factors<C, U>(&block[0]));
    ep_gemm_w4_expand_line<C, 1>(a, codes[1], ep_gemm_w4_block_factors<C, U>(&block[1]));
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
#pragma unroll
        for (uint32_t i = 0; i < N / 8; i++) ep_mma<C::F16>(&sum[4 * i], &a[4 * j], &b[i][2 * j]);
}
template <typename C, int N>
EP_PTX void ep_gemm_w4_stage_small(float (&sum)[N / 2], const EpFourBit *w, const EpGemmShared *s,
                                   uint32_t stage, const EpGemmW4Lane *own, const uint32_t (&x0)[2],
                                   uint32_t num_k) {
    const uint32_t x[2] = {x0[0] + stage * C::STAGE_BYTES, x0[1] + stage * C::STAGE_BYTES};
    const uint32_t slot = ep_gemm_slot<C>(s, stage);
    const EpGemmW4Block block[2] = {ep_gemm_w4_read_block<C>(w, slot, ep_gemm_w4_line<C>(own, 0)),
                                    ep_gemm_w4_read_block<C>(w, slot, ep_gemm_w4_line<C>(own, 1))};
    ep_gemm_w4_unit_small<C, N, 0>(sum, stage, own, block, x);
    ep_gemm_w4_unit_small<C, N, 1>(sum, stage, own, block, x);
    if (num_k <= 2 * EP_FOUR_BIT_UNIT) return;
    ep_gemm_w4_unit_small<C, N, 2>(sum, stage, own, block, x);
    ep_gemm_w4_unit_small<C, N, 3>(sum, stage, own, block, x);
}

/* For large M: read, expand, and issue the four wgmmas of a stage, which is one unit. unit: its number in its
 * block. While this warpgroup expands, another one multiplies. */
template <typename C, int N>
EP_PTX void ep_gemm_w4_stage_large(float (&sum)[N / 2], const EpFourBit *w, const EpGemmShared *s,
                                   uint32_t stage, const EpGemmW4Lane *own, uint32_t unit) {
    EpGemmW4Raw raw;
    uint32_t a[16];
    ep_gemm_w4_read<C>(&raw, w, s, stage, own, unit);
    ep_gemm_w4_expand_line<C, 0>(a, raw.codes[0], ep_gemm_w4_factors<C>(&raw, 0, w, unit));
    ep_gemm_w4_expand_line<C, 1>(a, raw.codes[1], ep_gemm_w4_factors<C>(&raw, 1, w, unit));
    const uint64_t x = ep_wgmma_desc_rows(s->stages + stage * C::STAGE_BYTES, C::EIGHT_ROWS);
    ep_wgmma_fence();
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) ep_wgmma_rows<N, C::F16>(sum, &a[4 * j], x + 2 * j, 1);
    ep_wgmma_commit();
    ep_wgmma_wait<0>();
    ep_wgmma_keep_order(sum);
}

/* sum = the products of a tile, for its first N rows. */
template <typename C, int N>
EP_PTX void ep_gemm_w4_products(float (&sum)[N / 2], const EpGemmParams *p, const EpFourBit *w,
                                const EpGemmTile *t, const EpGemmShared *s, EpRing *ring) {
    const EpGemmW4Lane own = ep_gemm_w4_lane<C>(s);
    const uint32_t lane = ep_lane_now(), x0 = s->stages + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    const uint32_t x[2] = {x0, x0 ^ 64}; /* as TMA has swizzled lines */
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] = 0;
    for (uint32_t k = 0; k < t->num_k; k += C::BK, ep_ring_next<C::STAGES>(ring)) {
        ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->limit_ns);
        if constexpr (C::LARGE)
            ep_gemm_w4_stage_large<C, N>(sum, w, s, ring->stage, &own,
                                         k % EP_FOUR_BIT_BLOCK / EP_FOUR_BIT_UNIT);
        else ep_gemm_w4_stage_small<C, N>(sum, w, s, ring->stage, &own, x, t->num_k - k);
        ep_gemm_release_by_warp(s, ring->stage);
    }
}

/* ---- from accumulators to 16 bits ---- */

/* Bias, activation, row weight and rounding of two columns, from `col` of the output on, of rows ra and rb of
 * the tile. e: two numbers of each row; with a gate four gates and then their ups. v: a row each. */
template <typename C> EP_PTX void ep_gemm_w4_finish(uint32_t (&v)[2], float *e, const EpGemmParams *p,
                                                    const EpGemmTile *t, uint32_t ra, uint32_t rb,
                                                    uint32_t col) {
    if (p->bias) ep_gemm_add_bias<C::ACT, C::F16>(p, t->expert, min(col, ep_gemm_out_cols(p) - 2), e);
    ep_gemm_activate<C::ACT>(p, e, e);
    if (p->row_weight) {
        const float top = ra < t->num_rows ? p->row_weight[t->row0 + ra] : 0;
        const float bottom = rb < t->num_rows ? p->row_weight[t->row0 + rb] : 0;
        e[0] *= top;
        e[1] *= top;
        e[2] *= bottom;
        e[3] *= bottom;
    }
    v[0] = ep_pack<C::F16>(e[0], e[1]);
    v[1] = ep_pack<C::F16>(e[2], e[3]);
}

/* Put a tile into the burst. Of each eight tokens a lane has tokens lane % 4 * 2 and the next one, of two
 * lines. With a gate the lines are a gate and its up, and a lane swaps with lane ^ 4, which has the
 * neighbouring column: each then has both columns for one of the two tokens. */
template <typename C, int N> EP_PTX void ep_gemm_w4_put(float (&d)[N / 2], const EpGemmParams *p,
                                                        const EpGemmTile *t, uint32_t staging,
                                                        uint32_t num_groups) {
    const uint32_t lane = ep_lane_now(), g = lane / 4;
    const uint32_t line = threadIdx.x / 128 * 64 - 64 + threadIdx.x / 32 % 4 * 16 + 2 * g;
    const uint32_t col = C::GATED ? line / 2 & ~1u : line, col0 = C::GATED ? t->col0 / 2 : t->col0;
    const uint32_t odd = g % 2, row = lane % 4 * 2 + (C::GATED ? odd : 0);
#pragma unroll
    for (uint32_t j = 0; j < N / 8; j += 2) {
        if (8 * j >= t->num_rows) break;
        uint32_t v[2][2]; /* of two groups of eight tokens */
        float e[8];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const float *own = &d[4 * min(j + i, N / 8u - 1)]; /* with 8 tokens there is no second group */
            if constexpr (C::GATED) {
                const float gate = __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[1], 4);
                const float up = __shfl_xor_sync(0xffffffffu, odd ? own[2] : own[3], 4);
                e[2 * i] = odd ? gate : own[0];
                e[2 * i + 1] = odd ? own[1] : gate;
                e[4 + 2 * i] = odd ? up : own[2];
                e[4 + 2 * i + 1] = odd ? own[3] : up;
            } else {
                e[4 * i] = own[0];
                e[4 * i + 1] = own[2];
                e[4 * i + 2] = own[1];
                e[4 * i + 3] = own[3];
            }
        }
        if constexpr (C::GATED) {
            uint32_t both[2];
            ep_gemm_w4_finish<C>(both, e, p, t, 8 * j + row, 8 * j + 8 + row, col0 + col);
            v[0][0] = both[0];
            v[1][0] = both[1];
        } else {
#pragma unroll
            for (uint32_t i = 0; i < 2; i++)
                ep_gemm_w4_finish<C>(v[i], e + 4 * i, p, t, 8 * (j + i) + row, 8 * (j + i) + row + 1,
                                     col0 + col);
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t from = 8 * (j + i), at = num_groups + j + i;
            const uint32_t to = staging + at * C::BURST_GROUP + row * C::BURST_PITCH + col * 2;
            if (from >= t->num_rows) break;
            ep_st_shared_u32(to, v[i][0]);
            if constexpr (!C::GATED) ep_st_shared_u32(to + C::BURST_PITCH, v[i][1]);
            if (threadIdx.x == 128)
                ep_st_shared(staging + C::NUM_BURST_GROUPS * C::BURST_GROUP + 16 * at, t->row0 + from,
                             t->num_rows - from, col0, 0);
        }
    }
}

/* ---- the MMA warps' loop ---- */

/* A tile of at most N tokens. */
template <typename C, int N>
EP_PTX void ep_gemm_w4_tile(const EpGemmParams *p, const EpFourBit *w, const EpGemmTile *t,
                            const EpGemmShared *s, EpRing *ring, EpGemmBurst *burst) {
    const uint32_t num_groups = (t->num_rows + 7) / 8;
    float d[N / 2];
    ep_gemm_w4_products<C, N>(d, p, w, t, s, ring);
    ep_gemm_burst_make_room<C>(p, num_groups, s->staging, burst);
    ep_gemm_w4_put<C, N>(d, p, t, s->staging, burst->num_groups);
    burst->num_groups += num_groups;
    burst->num_tiles++;
}

template <typename C> EP_PTX void ep_gemm_mma_tiles_w4(const EpGemmW4Params *q, const EpGemmShared *s) {
    const EpGemmParams *p = &q->gemm;
    const EpFourBit *w = &q->weights;
    constexpr int STEP = C::LARGE ? 64 : 8; /* tokens; a tile multiplies as many of these steps as it needs */
    EpRing ring = {0, 0};
    EpGemmBurst burst = {0, 0};
    for (;;) {
        ep_mbar_wait(s->full + 8 * ring.stage, ring.parity, p->limit_ns);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage);
        if (t.num_rows == 0) break;
        if (t.num_rows <= STEP) ep_gemm_w4_tile<C, STEP>(p, w, &t, s, &ring, &burst);
        else if (!C::LARGE || t.num_rows <= 2 * STEP)
            ep_gemm_w4_tile<C, 2 * STEP>(p, w, &t, s, &ring, &burst);
        else if constexpr (C::LARGE) {
            if (t.num_rows <= 3 * STEP) ep_gemm_w4_tile<C, 3 * STEP>(p, w, &t, s, &ring, &burst);
            else ep_gemm_w4_tile<C, 4 * STEP>(p, w, &t, s, &ring, &burst);
        }
    }
    ep_gemm_burst_write<C>(p, s->staging, &burst);
}

#endif /* EP_GEMM_W4_CUH */
