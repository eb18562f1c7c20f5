/* gemm_stages.cuh - what the roles of the grouped GEMM for Hopper share: the configuration of an instance,
 * the layout of a CTA's shared memory, and the ring of pipeline stages.
 *
 * Exports EpGemmConfig, EpGemmFp8Config, EpGemmShared, EpRing, ep_gemm_put_tile, ep_gemm_get_tile and
 * ep_gemm_release_stage. */
#ifndef EP_GEMM_STAGES_CUH
#define EP_GEMM_STAGES_CUH
#include "cuda/capabilities.h"
#include "kernels/gemm/gemm_write.cuh"

enum {
    EP_GEMM_BK = 64, /* values of k in a TMA box of 16-bit numbers; a stage has K_BOXES of them */
    EP_WGMMA_K = 16, /* values of k in a wgmma of 16-bit numbers */
    EP_GEMM_THREADS = 384,
    EP_GEMM_REGS = 168, /* registers that each thread can have in a CTA of 384 */
    EP_GEMM_BOX = 64 * 64 * 2,
    EP_GEMM_INFO_BYTES = 32
};

template <int KIND_, int BN_, int ACT_, bool F16_> struct EpGemmConfig {
    static constexpr int KIND = KIND_, BN = BN_, ACT = ACT_;
    static constexpr bool F16 = F16_, GATED = EP_ACT_IS_GATED(ACT), FP8 = false, BY_BLOCK = false,
                          ACCUMULATES = false, SAVES = false, W4 = false, LOW_RANK = false;
    /* The warp that loads scales, if there are any: the producer's, or one of its own (SCALE_WARP), to which
     * the producer signals each stage. */
    static constexpr bool WARP_PRODUCES = false, SCALE_WARP = false;
    static constexpr int TRANS_A = KIND == EP_GEMM_WGRAD, TRANS_B = KIND != EP_GEMM_FORWARD;
    /* Small M (few rows per expert): tiles of 32 x 64. A stage then has 512 bytes of each row of weights. */
    static constexpr bool SMALL_M = BN == 64;
    static constexpr int BM = SMALL_M ? 32 : EP_GEMM_BM;
    static constexpr int A_ROWS = SMALL_M ? 16 : 64; /* rows of a TMA box */
    static constexpr int K_BOXES = SMALL_M ? 4 : 1;
    static constexpr int BOX_K = EP_GEMM_BK, BK = K_BOXES * BOX_K;
    static constexpr int A_SLAB = BM * EP_GEMM_BK * 2;
    static constexpr int B_SLAB = BN * EP_GEMM_BK * 2; /* 64 values of k */
    static constexpr int A_BYTES = K_BOXES * A_SLAB;
    static constexpr int STAGE_BYTES = A_BYTES + K_BOXES * B_SLAB;
    static constexpr int STAGES = BN == 128 ? 6 : 4;
    static constexpr int OUT_GROUPS = BN / 8 / (GATED ? 2 : 1);
    static constexpr int ACT_GROUPS = 4; /* of which the activations are computed together */
    /* groups of 8 columns that one staging buffer holds */
    static constexpr int PASS = OUT_GROUPS % 16 ? OUT_GROUPS % 8 ? 4 : 8 : 16;
    static constexpr int PARTS = 2 * OUT_GROUPS / PASS;
    static constexpr int EAGER_PARTS = OUT_GROUPS > 16 ? 2 : 0; /* see ep_gemm_defer */

    static constexpr int NUM_NEXT = 8; /* more than STAGES; see ep_next_tile_send */
    static constexpr int RING_BYTES =
        STAGES * (STAGE_BYTES + EP_GEMM_INFO_BYTES + 2 * 8) + NUM_NEXT * (8 + 4);
    static constexpr int BURST_PITCH = OUT_GROUPS * 16 + 16;
    static constexpr int BURST_GROUP = 8 * BURST_PITCH;
    static constexpr int NUM_BURST_GROUPS = (EP_CTA_SMEM_BYTES - RING_BYTES) / (BURST_GROUP + 16);
    static constexpr int OUT_BYTES =
        SMALL_M ? NUM_BURST_GROUPS * (BURST_GROUP + 16) : 8 * EP_GEMM_OUT_STAGING;
    static constexpr int SMEM_BYTES = RING_BYTES + OUT_BYTES;
    static_assert(SMEM_BYTES <= EP_CTA_SMEM_BYTES, "the shared memory of a CTA");
    static_assert(!SMALL_M || NUM_BURST_GROUPS >= BM / 8, "room for the groups of a tile");
    static_assert(OUT_GROUPS % PASS == 0, "staging buffers of up to 128 columns");
    static_assert(K_BOXES == 1 || KIND == EP_GEMM_FORWARD,
                  "the boxes of the other kinds are adjacent with one box of k");
    static_assert(NUM_NEXT > STAGES && (NUM_NEXT & (NUM_NEXT - 1)) == 0,
                  "an entry is free when it is written; see ep_next_tile_send");
};

/* The configuration of a kernel that also adds a product of low rank (EpLowRank), whose values of k follow
 * those of the weights, from the next stage on. With an activation it can save the product. */
template <int KIND_, int BN_, int ACT_, bool F16_> struct EpGemmLowRankConfig
    : EpGemmConfig<KIND_, BN_, ACT_, F16_> {
    static constexpr bool LOW_RANK = true, SAVES = ACT_ != EP_ACT_NONE;
};

/* The configuration of a kernel for FP8. A line of shared memory has 128 bytes: 128 values of k instead of
 * the 64 of 16-bit numbers. So a TMA box has twice the values of k, and the same number of bytes as in the
 * kernel for 16 bits from which this configuration is derived.
 *
 * BY_BLOCK: there is a scale for each 128 values of k of a row, and for each block of the weights. Each stage
 * has a slot in shared memory that holds the scales of its values. A tile of 256 columns consists of two
 * pieces of 128 columns, and the epilogue writes a piece as it writes a tile of 128 columns of 16 bits.
 *
 * Not BY_BLOCK: one scale for each row, and one scale for each expert's weights. */
template <int BN_, bool BY_BLOCK_, int ACT, bool F16>
struct EpGemmFp8Config : EpGemmConfig<EP_GEMM_FORWARD, BN_, ACT, F16> {
    typedef EpGemmConfig<EP_GEMM_FORWARD, BN_, ACT, F16> Of16Bits;
    struct Piece : EpGemmConfig<EP_GEMM_FORWARD, 128, ACT, F16> {
        static constexpr int ACT_GROUPS = 2;
    };
    static constexpr bool FP8 = true, BY_BLOCK = BY_BLOCK_, SCALE_WARP = BY_BLOCK, IS_MEGA = false;
    /* A tile has gate columns and up columns, which have different scales. */
    static constexpr bool TWO_SCALES = EP_ACT_IS_GATED(ACT) && !EP_ACT_IS_MIXED(ACT);
    static constexpr int NUM_PIECES = BN_ == 256 ? 2 : 1;
    static constexpr int BOX_K = EP_GEMM_SCALE_BLOCK, BK = Of16Bits::K_BOXES * BOX_K;
    /* bytes: for each 128 values of k the rows, and of each piece cols and up; of all stages, with an
     * mbarrier for each */
    static constexpr int SCALE_SLOT = Of16Bits::K_BOXES * (4 * Of16Bits::BM + 8 * NUM_PIECES);
    static constexpr int SCALE_BYTES = BY_BLOCK ? Of16Bits::STAGES * (SCALE_SLOT + 8) : 0;
    static constexpr int NUM_BURST_GROUPS =
        (EP_CTA_SMEM_BYTES - Of16Bits::RING_BYTES - SCALE_BYTES) / (Of16Bits::BURST_GROUP + 16);
    static constexpr int OUT_BYTES =
        Of16Bits::SMALL_M ? NUM_BURST_GROUPS * (Of16Bits::BURST_GROUP + 16) : Of16Bits::OUT_BYTES;
    static constexpr int SMEM_BYTES = Of16Bits::RING_BYTES + OUT_BYTES + SCALE_BYTES;
    static_assert(SMEM_BYTES <= EP_CTA_SMEM_BYTES, "the shared memory of a CTA");
    static_assert(!BY_BLOCK || BN_ == 64 || BN_ == 256, "one piece for small M, two pieces for large M");
};

/* The same in a megakernel, whose MMA warps have fewer registers. */
template <int ACT, bool F16> struct EpGemmMegaFp8Config : EpGemmFp8Config<256, true, ACT, F16> {
    static constexpr bool IS_MEGA = true;
};
/* In GEMM + combine the producer's warp loads the scales, so that three warps return rows, and not two.
 * Dispatch + GEMM is not faster with three (docs/experiments/megakernels.md, E-127). */
template <bool F16> struct EpGemmCombineFp8Config : EpGemmMegaFp8Config<EP_ACT_NONE, F16> {
    static constexpr bool SCALE_WARP = false, WARP_PRODUCES = true;
};

/* The layout of a CTA's shared memory: addresses. Each stage has an info, which describes the tile that
 * begins there. */
typedef struct {
    uint32_t stages, staging, infos, full, empty, next_tile_bars, next_tiles, end;
} EpGemmShared;
template <typename C> EP_PTX EpGemmShared ep_gemm_shared(uint32_t smem) {
    EpGemmShared s;
    s.stages = smem;
    s.staging = smem + C::STAGES * C::STAGE_BYTES;
    s.infos = s.staging + C::OUT_BYTES;
    s.full = s.infos + C::STAGES * EP_GEMM_INFO_BYTES;
    s.empty = s.full + 8 * C::STAGES;
    s.next_tile_bars = s.empty + 8 * C::STAGES;
    s.next_tiles = s.next_tile_bars + 8 * C::NUM_NEXT;
    s.end = smem + C::SMEM_BYTES;
    return s;
}
/* BY_BLOCK: the slot of the scales of a stage. SCALE_WARP: the mbarrier at which the producer
 * arrives after it has written the stage's info. */
template <typename C> EP_PTX uint32_t ep_gemm_slot(const EpGemmShared *s, uint32_t stage) {
    return s->end - C::SCALE_BYTES + stage * C::SCALE_SLOT;
}
template <typename C> EP_PTX uint32_t ep_gemm_info_ready(const EpGemmShared *s, uint32_t stage) {
    return s->end - 8 * (C::STAGES - stage);
}
EP_PTX void ep_gemm_put_tile(uint32_t info, const EpGemmTile *t) {
    ep_st_shared(info, t->expert, t->row0, t->num_rows, t->col0);
    ep_st_shared(info + 16, t->k0, t->num_k, t->shares_rows, 0);
}
EP_PTX EpGemmTile ep_gemm_get_tile(uint32_t info) {
    const uint4 u = ep_ld_shared(info), v = ep_ld_shared(info + 16);
    const EpGemmTile t = {u.x, u.y, u.z, u.w, v.x, v.y, v.z};
    return t;
}

/* One side's position in the ring of pipeline stages: the stage, and the parity of its mbarrier's phase. */
typedef struct {
    uint32_t stage, parity;
} EpRing;
template <int STAGES> EP_PTX void ep_ring_next(EpRing *r) {
    if (++r->stage == STAGES) {
        r->stage = 0;
        r->parity ^= 1;
    }
}

/* Wait for an mbarrier. Kernels with scales of blocks have few registers. */
template <typename C> EP_PTX void ep_gemm_wait(uint32_t bar, uint32_t parity, uint64_t limit_ns) {
    if constexpr (C::BY_BLOCK) ep_mbar_wait_lean(bar, parity, limit_ns);
    else ep_mbar_wait(bar, parity, limit_ns);
}

/* Release a pipeline stage to both CTAs of the pair, because the other CTA loads a part of it. The arrival
 * at this CTA orders the warp's reads of the stage's info before the producer overwrites it. */
EP_PTX void ep_gemm_release_stage(uint32_t empty) {
    ep_mbar_arrive(empty);
    ep_mbar_arrive_at(empty, ep_cluster_rank() ^ 1);
}

/* Whether the last parts of a tile are written during the next tile. Only if no worker waits for them. */
template <typename C, typename Hooks> constexpr bool EP_GEMM_DEFERS =
    !Hooks::FUSED && !C::SMALL_M && !C::ACCUMULATES && !C::SAVES;

#endif /* EP_GEMM_STAGES_CUH */
