/* gemm.cuh - the grouped GEMM for Hopper: persistent CTAs with one producer warp and two MMA warpgroups.
 *
 * A CTA processes tiles of 128 x BN of the product. The producer computes which tile is next and fills a ring
 * of pipeline stages by TMA, each with C::BK values of k (the contraction). The first stage of a tile comes
 * with a description of the tile. A warpgroup multiplies 64 rows by BN columns with wgmma, accumulates in
 * registers, and writes its part through shared memory, much of it during the next tile (gemm_write.cuh). It
 * writes with ordinary stores: TMA would queue them after the loads of the next tile. Rows are not padded:
 * the last tile of an expert also reads rows of the next expert, and does not write them.
 *
 * CTAs work in pairs (clusters of two). Of an operand that both need, each loads one half and multicasts it
 * to both. A pair draws the number of its next tile when it starts a tile (ep_next_tile_*). So CTAs that run
 * at the same time have tiles with near numbers, and find the same rows and weights in L2. That saves power,
 * and power limits a GPU that computes GEMMs.
 *
 * With a product of low rank, the producer loads its operands into the stages after those of the weights. The
 * MMA warps see more values of k.
 *
 * For small M (few rows per expert), tiles and MMA warps are those of gemm_small_m.cuh. With FP8 and a scale
 * for each block of weights, the MMA warps are those of gemm_fp8.cuh.
 *
 * Gated activations: the tensor map of the weights alternates eight gate rows and the eight up rows of the
 * same outputs (its dimensions are k, 8 rows, gate or up, groups of 8, expert). So one thread holds the gate
 * and the up of an output. */
#ifndef EP_GEMM_CUH
#define EP_GEMM_CUH
#include "kernels/arch/wgmma.cuh"
#include "kernels/gemm/gemm_accumulate.cuh"
#include "kernels/gemm/gemm_fp8.cuh"
#include "kernels/gemm/gemm_save.cuh"
#include "kernels/gemm/gemm_small_m.cuh"
#include "kernels/gemm/gemm_w4.cuh"

/* The producer is one thread. With WARP_PRODUCES it is a warp, of which each lane loads some scales; all else
 * is done by lane 0, which leads. */
template <typename C> EP_PTX bool ep_gemm_leads(void) {
    if constexpr (C::WARP_PRODUCES) return ep_lane_now() == 0;
    return true;
}

/* ---- drawing tiles ---- */

/* CTA 0 of a pair draws the next tile for both, after it has acquired the first stage of its current tile.
 * The entry that it writes is free: each stage that it acquires has been released by both CTAs, and a tile
 * uses at least one stage. So the other CTA has read all entries up to STAGES tiles ago, and an entry is
 * reused only after more tiles. */
template <typename C> EP_PTX uint32_t ep_next_tile_send(const EpGemmParams *p, const EpGemmShared *s,
                                                        uint32_t num_done) {
    const uint32_t drawn = (uint32_t)ep_add_relaxed_gpu_u64(p->tile_counter, 1), i = num_done % C::NUM_NEXT;
    ep_st_async(s->next_tiles + 4 * i, drawn, s->next_tile_bars + 8 * i, 0);
    ep_st_async(s->next_tiles + 4 * i, drawn, s->next_tile_bars + 8 * i, 1);
    return drawn;
}
template <typename C> EP_PTX uint32_t ep_next_tile_receive(const EpGemmParams *p, const EpGemmShared *s,
                                                           uint32_t num_done) {
    const uint32_t i = num_done % C::NUM_NEXT, bar = s->next_tile_bars + 8 * i;
    if (ep_gemm_leads<C>()) ep_mbar_arrive_expect(bar, 4);
    ep_gemm_wait<C>(bar, num_done / C::NUM_NEXT & 1, p->limit_ns);
    if constexpr (C::BY_BLOCK) { /* compute the address again: no register is left for it during the wait */
        asm volatile("" : "+r"(num_done));
        return ep_ld_shared_u32(s->next_tiles + 4 * (num_done % C::NUM_NEXT));
    }
    return ep_ld_shared_u32(s->next_tiles + 4 * i);
}

/* ---- the producer ---- */

/* Load part i of a stage's columns. The boxes of one part are adjacent in the weights. */
template <typename C, bool BOTH>
EP_PTX void ep_gemm_load_cols(const EpGemmTile *t, int32_t at, int32_t i, uint32_t smem, uint32_t bar,
                              const CUtensorMap *map_b) {
    const int32_t e = (int32_t)t->expert, col = (int32_t)t->col0 + i * (C::TRANS_B ? 64 : C::BN / 2);
    smem += C::A_BYTES + (uint32_t)i * (C::TRANS_B ? EP_GEMM_BOX : C::BN * EP_GEMM_BK);
#pragma unroll
    for (int kk = 0; kk < C::K_BOXES; kk++, at += C::BOX_K, smem += C::B_SLAB) {
        if (C::GATED) ep_tma_load_5d<BOTH>(smem, map_b, bar, at, 0, 0, col / 16, e);
        else if (C::KIND == EP_GEMM_FORWARD) ep_tma_load_3d<BOTH>(smem, map_b, bar, at, col, e);
        else if (C::KIND == EP_GEMM_DGRAD) ep_tma_load_3d<BOTH>(smem, map_b, bar, col, at, e);
        else ep_tma_load_2d<BOTH>(smem, map_b, bar, col, at);
    }
}
/* Load box i of a stage's rows, for the kk-th 64 values of k. */
template <typename C, bool BOTH>
EP_PTX void ep_gemm_load_rows(const EpGemmTile *t, int32_t at, uint32_t i, uint32_t kk, uint32_t smem,
                              uint32_t bar, const CUtensorMap *map_a) {
    const int32_t row = (int32_t)(t->row0 + C::A_ROWS * i);
    smem += kk * C::A_SLAB + i * (C::A_ROWS * 128);
    at += (int32_t)kk * C::BOX_K;
    ep_tma_load_2d<BOTH>(smem, map_a, bar, C::TRANS_A ? row : at, C::TRANS_A ? at : row);
}

/* Load a stage. The operand that both CTAs need consists of parts, which the two CTAs load alternately,
 * for both. w4 and slot: of weights of 4 bits, their parameters and the stage's slot for scales. */
template <typename C>
EP_PTX void ep_gemm_load_stage(const EpGemmTile *t, uint32_t k, uint32_t smem, uint32_t bar, uint32_t rank,
                               const CUtensorMap *map_a, const CUtensorMap *map_b, const EpGemmW4Params *w4,
                               uint32_t slot) {
    constexpr uint32_t NUM_COL_PARTS = C::TRANS_B ? C::BN / 64 : 2;
    constexpr uint32_t NUM_ROW_BOXES = C::W4 && C::SMALL_M ? 0 : C::BM / C::A_ROWS * C::K_BOXES;
    const int32_t at = (int32_t)(t->k0 + k);
    const uint32_t num_a = (t->num_rows + C::A_ROWS - 1) / C::A_ROWS;
    if constexpr (C::W4)
        ep_mbar_arrive_expect(bar, num_a * C::A_ROWS * 128 * C::K_BOXES + ep_gemm_w4_bytes<C>(w4, t, k));
    else ep_mbar_arrive_expect(bar, (num_a * C::A_ROWS * 128 + C::B_SLAB) * C::K_BOXES);
    if (t->shares_rows) {
        if constexpr (C::W4 && C::SMALL_M) ep_gemm_w4_load_rows<C, true>(t, k, num_a, rank, smem, bar, map_a);
        /* alternating between the CTAs: box i of the rows, kk-th 64 values of k */
#pragma unroll
        for (uint32_t j = 0; j < NUM_ROW_BOXES; j++)
            if (j / C::K_BOXES < num_a && (j / C::K_BOXES + j % C::K_BOXES) % 2 == rank)
                ep_gemm_load_rows<C, true>(t, at, j / C::K_BOXES, j % C::K_BOXES, smem, bar, map_a);
        for (uint32_t i = 0; i < NUM_COL_PARTS; i++) {
            if constexpr (C::W4) ep_gemm_w4_load_part<C, false>(w4, t, k, i, smem, slot, bar);
            else ep_gemm_load_cols<C, false>(t, at, (int32_t)i, smem, bar, map_b);
        }
    } else {
        if constexpr (C::W4 && C::SMALL_M)
            for (uint32_t half = 0; half < 2; half++)
                ep_gemm_w4_load_rows<C, false>(t, k, num_a, half, smem, bar, map_a);
#pragma unroll
        for (uint32_t j = 0; j < NUM_ROW_BOXES; j++)
            if (j / C::K_BOXES < num_a)
                ep_gemm_load_rows<C, false>(t, at, j / C::K_BOXES, j % C::K_BOXES, smem, bar, map_a);
        for (uint32_t i = rank; i < NUM_COL_PARTS; i += 2) {
            if constexpr (C::W4) ep_gemm_w4_load_part<C, true>(w4, t, k, i, smem, slot, bar);
            else ep_gemm_load_cols<C, true>(t, at, (int32_t)i, smem, bar, map_b);
        }
    }
}

/* The producer's loop. Every tile uses at least one stage, because the info comes with a stage. num_rows
 * == 0 is the end marker. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_produce_tiles(const EpGemmParams *p, Hooks &hooks, const EpGemmShared *s,
                                  const CUtensorMap *map_a, const CUtensorMap *map_b,
                                  const CUtensorMap *low_a, const CUtensorMap *low_b, uint32_t low_r) {
    const uint32_t rank = ep_cluster_rank(), num_pairs = gridDim.x / 2;
    uint32_t num_done = 0, drawn = 0xffffffffu;
    EpGemmTileScheduler sched = {0};
    EpRing ring = {0, 1};
    EpGemmTile t;
    if constexpr (C::W4) sched.by_rows = C::LARGE;
    ep_tile_scheduler_enter(p, C::BM, 2, &sched);
    for (uint32_t n = blockIdx.x / 2;
         ep_gemm_tile(p, C::BM, C::BN, 2, C::BY_BLOCK ? ep_cluster_rank() : rank, &sched, n, &t);
         num_done++) {
        if constexpr (C::BY_BLOCK) t.num_k = p->k; /* known to be so, but otherwise kept in a register */
        if (ep_gemm_leads<C>()) hooks.await_rows(t);
        /* only now, because await_rows may need the number of rows of the whole expert */
        t.num_rows = min(t.num_rows, (uint32_t)C::BM);
        const uint32_t low_from = (t.num_k + C::BK - 1) / C::BK * C::BK; /* TMA fills up with zeros */
        if constexpr (C::LOW_RANK) t.num_k = low_from + low_r;
        EpGemmScaleCursor scales = {};
        if constexpr (C::WARP_PRODUCES) {
            __syncwarp(); /* what lane 0 has acquired is now readable by all lanes */
            scales = ep_gemm_scales_begin<C>(p, hooks.scales, &t);
        }
        for (uint32_t k = 0; k == 0 || k < t.num_k; k += C::BK, ep_ring_next<C::STAGES>(&ring)) {
            ep_gemm_wait<C>(s->empty + 8 * ring.stage, ring.parity, p->limit_ns);
            if constexpr (C::WARP_PRODUCES) /* first, because the copies of the rest take longer to start */
                ep_gemm_stage_scales<C>(hooks.scales, &scales, &t, k, s, ring.stage);
            if (ep_gemm_leads<C>()) {
                if (k == 0) ep_gemm_put_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage, &t);
                if constexpr (C::SCALE_WARP) ep_mbar_arrive(ep_gemm_info_ready<C>(s, ring.stage));
                const bool is_low = C::LOW_RANK && k >= low_from;
                if (t.num_k == 0) ep_mbar_arrive(s->full + 8 * ring.stage);
                else
                    ep_gemm_load_stage<C>(&t, is_low ? k - low_from : k,
                                          s->stages + ring.stage * C::STAGE_BYTES, s->full + 8 * ring.stage,
                                          C::BY_BLOCK ? ep_cluster_rank() : rank, is_low ? low_a : map_a,
                                          is_low ? low_b : map_b, (const EpGemmW4Params *)p,
                                          ep_gemm_w4_slot<C>(s, ring.stage));
                if (k == 0 && (C::BY_BLOCK ? ep_cluster_rank() : rank) == 0)
                    drawn = ep_next_tile_send<C>(p, s, num_done);
            }
        }
        n = (C::BY_BLOCK ? ep_num_ctas_now() / 2 : num_pairs) + ep_next_tile_receive<C>(p, s, num_done);
    }
    /* The last number has been drawn: reset the counter. (A megakernel's last CTA out does that.) */
    if (!Hooks::FUSED && ep_gemm_leads<C>() && drawn == sched.first_tile - 1) *p->tile_counter = 0;
    ep_gemm_wait<C>(s->empty + 8 * ring.stage, ring.parity, p->limit_ns);
    if (ep_gemm_leads<C>()) {
        t.num_rows = 0;
        ep_gemm_put_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage, &t);
        if constexpr (C::SCALE_WARP) ep_mbar_arrive(ep_gemm_info_ready<C>(s, ring.stage));
        ep_mbar_arrive(s->full + 8 * ring.stage);
    }
    if constexpr (C::WARP_PRODUCES) ep_mbar_arrive(s->full + 8 * ring.stage);
}

/* ---- the MMA warps ---- */

/* In WGRAD the contraction runs over rows, and an expert's last rows are followed by rows of the next
 * expert. The expert's last wgmma multiplies some of those, too. Set these to zero in both operands, so that
 * they do not count, whatever they contain. */
template <typename C> EP_PTX void ep_gemm_clear_tail(uint32_t smem, uint32_t num_valid) {
    const uint32_t num_lines = EP_WGMMA_K - num_valid % EP_WGMMA_K, thread = threadIdx.x - 128;
    for (uint32_t i = thread; i < (2 + C::BN / 64) * num_lines * 8; i += 256) {
        const uint32_t slab = i / (num_lines * 8), line = num_valid + i / 8 % num_lines;
        ep_st_shared(smem + slab * EP_GEMM_BOX + line * 128 + i % 8 * 16, 0, 0, 0, 0);
    }
    ep_fence_proxy_async_shared();
    ep_bar_sync(1, 256);
}

/* Issue the wgmmas of a stage. k: the number of values of k in the stages before. WHOLE: all wgmmas, as one
 * group; otherwise only those of the first num_k values. Then each is a group of its own: if the number of
 * wgmmas in a group varied, ptxas would let no two wgmmas of the kernel overlap. */
template <typename C, bool WHOLE>
EP_PTX void ep_gemm_multiply(float (&d)[C::BN / 2], uint64_t a, uint64_t b, uint32_t num_k, uint32_t k) {
    constexpr uint64_t STEP_A = C::TRANS_A ? 128 : 2; /* the k of a wgmma, in units of 16 bytes */
    constexpr uint64_t STEP_B = C::TRANS_B ? 128 : 2;
    if constexpr (WHOLE) {
        ep_wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (C::FP8) ep_wgmma_e4m3<C::BN>(d, a + i * STEP_A, b + i * STEP_B, k || i);
            else ep_wgmma<C::BN, C::F16, C::TRANS_A, C::TRANS_B>(d, a + i * STEP_A, b + i * STEP_B, k || i);
        }
        ep_wgmma_commit();
    } else {
        uint32_t i = 0;
#pragma unroll 1
        do {
            ep_wgmma_fence();
            ep_wgmma<C::BN, C::F16, C::TRANS_A, C::TRANS_B>(d, a + i * STEP_A, b + i * STEP_B, k || i);
            ep_wgmma_commit();
        } while (++i * EP_WGMMA_K < num_k);
    }
}

/* Process a stage, and release the one before it, whose wgmmas have then finished. WHOLE: all values of k of
 * the stage count; otherwise it is the last one of the tile. */
template <typename C, bool WHOLE, typename Hooks>
EP_PTX void ep_gemm_mma_stage(float (&d)[C::BN / 2], EpGemmDeferred<C> *deferred, const EpGemmParams *p,
                              Hooks &hooks, const EpGemmTile *t, uint32_t group, const EpGemmShared *s,
                              const EpRing *ring, uint32_t k, uint32_t *before) {
    const uint32_t staging = s->staging + (threadIdx.x / 32 - 4) * EP_GEMM_OUT_STAGING;
    const uint32_t at = s->stages + ring->stage * C::STAGE_BYTES, num_k = t->num_k - k;
    const bool active = 64 * group < t->num_rows, signals = threadIdx.x % 32 == 0;
    ep_mbar_wait(s->full + 8 * ring->stage, ring->parity, p->limit_ns);
    if constexpr (!WHOLE)
        if (num_k % EP_WGMMA_K) ep_gemm_clear_tail<C>(at, num_k);
    if (active) {
        const uint64_t a = ep_wgmma_desc(at + group * EP_GEMM_BOX, EP_GEMM_BOX);
        const uint64_t b = ep_wgmma_desc(at + C::A_BYTES, EP_GEMM_BOX);
        ep_gemm_multiply<C, WHOLE>(d, a, b, num_k, k);
        if (k == 0) hooks.mma_in_flight();
    }
    if constexpr (EP_GEMM_DEFERS<C, Hooks>)
        ep_gemm_write_deferred<C, C::EAGER_PARTS>(deferred, ep_gemm_out_cols(p), staging);
    if (active) ep_wgmma_wait<WHOLE ? 1 : 0>();
    __syncwarp(); /* every lane has finished its wait, before the stage is overwritten */
    if (k && signals) ep_gemm_release_stage(s->empty + 8 * *before);
    *before = ring->stage;
}

/* d = this warpgroup's 64 rows of the tile. The wgmmas of at most two stages are in flight. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_mma_tile(float (&d)[C::BN / 2], EpGemmDeferred<C> *deferred, const EpGemmParams *p,
                             Hooks &hooks, const EpGemmTile *t, uint32_t group, const EpGemmShared *s,
                             EpRing *ring) {
    /* In the other products, TMA has filled the last stage with zeros after the last value of k. */
    constexpr bool WGRAD = C::KIND == EP_GEMM_WGRAD;
    const uint32_t num_whole = WGRAD ? t->num_k / C::BK * C::BK : t->num_k;
    uint32_t before = ring->stage, k = 0;
    if (WGRAD && t->num_k == 0)
        ep_ring_next<C::STAGES>(ring); /* an expert without rows uses one stage for its info */
    for (; k < num_whole; k += C::BK, ep_ring_next<C::STAGES>(ring))
        ep_gemm_mma_stage<C, true>(d, deferred, p, hooks, t, group, s, ring, k, &before);
    if constexpr (WGRAD)
        if (k < t->num_k) {
            ep_gemm_mma_stage<C, false>(d, deferred, p, hooks, t, group, s, ring, k, &before);
            ep_ring_next<C::STAGES>(ring);
        }
    ep_wgmma_wait<0>();
    ep_wgmma_keep_order(d);
    __syncwarp(); /* every lane has read the info, before it is overwritten */
    if (threadIdx.x % 32 == 0) ep_gemm_release_stage(s->empty + 8 * before);
}

/* ---- the kernel ---- */

/* The functions that a megakernel plugs in.
 *   comm             communication warps: the three other warps of the producer's warpgroup. They may use the
 *                    shared memory after `end`
 *   await_rows       producer, before it reads the rows of a tile
 *   tile_started     MMA warps, after they have read the info of a tile. Returns the time, for the profiler
 *   tile_written     MMA warps, after all lanes have stored the warp's part of the tile; with scales of
 *                    blocks its second piece is stored later, but before the next mma_in_flight
 *   mma_in_flight    MMA warps, while a wgmma of the next tile is in flight, and before they write it
 *   after_last_tile  MMA warps, after the last tile. They may use the shared memory of the stages */
struct EpGemmNoHooks {
    static constexpr bool FUSED = false;
    static constexpr int PRODUCER_REGS = 56, MMA_REGS = 224;
    __device__ void comm(uint32_t) {}
    __device__ void await_rows(const EpGemmTile &) {}
    __device__ uint64_t tile_started() { return 0; }
    __device__ void tile_written(const EpGemmTile &, uint32_t, uint64_t) {}
    __device__ void mma_in_flight() {}
    __device__ void after_last_tile(uint32_t) {}
};

template <typename C, typename Hooks>
EP_PTX void ep_gemm_mma_tiles(const EpGemmParams *p, Hooks &hooks, const EpGemmShared *s) {
    const uint32_t group = threadIdx.x / 128 - 1;
    const uint32_t staging = s->staging + (threadIdx.x / 32 - 4) * EP_GEMM_OUT_STAGING;
    EpRing ring = {0, 0};
    EpGemmDeferred<C> deferred;
    deferred.part = C::PARTS;
    for (;;) {
        float d[C::BN / 2];
        ep_mbar_wait(s->full + 8 * ring.stage, ring.parity, p->limit_ns);
        const EpGemmTile t = ep_gemm_get_tile(s->infos + EP_GEMM_INFO_BYTES * ring.stage);
        if (t.num_rows == 0) break;
        const uint64_t begun = hooks.tile_started();
        if constexpr (C::ACCUMULATES) ep_gemm_prefetch_out<C>(p, &t, group);
        ep_gemm_mma_tile<C>(d, &deferred, p, hooks, &t, group, s, &ring);
        if constexpr (EP_GEMM_DEFERS<C, Hooks>)
            while (ep_gemm_write_deferred<C, C::EAGER_PARTS>(&deferred, ep_gemm_out_cols(p), staging));
        hooks.mma_in_flight();
        if constexpr (C::ACCUMULATES) ep_gemm_accumulate<C>(d, p, &t, group);
        else if constexpr (C::SAVES) ep_gemm_save<C>(d, p, &t, group, staging);
        else {
            constexpr int AT_ONCE = EP_GEMM_DEFERS<C, Hooks> ? C::EAGER_PARTS : C::PARTS;
            ep_gemm_defer<C, AT_ONCE>(&deferred, d, p, &t, group, staging);
        }
        hooks.tile_written(t, group, begun);
    }
    if constexpr (EP_GEMM_DEFERS<C, Hooks>)
        while (ep_gemm_write_deferred<C, C::EAGER_PARTS>(&deferred, ep_gemm_out_cols(p), staging));
    if (Hooks::FUSED)
        ep_bar_sync(1, 256); /* no warp of the CTA reads a stage any more, and no load is in flight */
    hooks.after_last_tile(s->stages);
}

/* low_a, low_b, low_r: with LOW_RANK the operands of the product of low rank, and its r. */
template <typename C, typename Hooks>
EP_PTX void ep_gemm_body(const EpGemmParams *p, Hooks &hooks, const CUtensorMap *map_a,
                         const CUtensorMap *map_b, const CUtensorMap *low_a = nullptr,
                         const CUtensorMap *low_b = nullptr, uint32_t low_r = 0) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const EpGemmShared s = ep_gemm_shared<C>(ep_smem(smem_bytes));
    if (threadIdx.x == 0) {
        ep_tma_prefetch(map_a);
        ep_tma_prefetch(map_b);
        if constexpr (C::LOW_RANK) {
            ep_tma_prefetch(low_a);
            ep_tma_prefetch(low_b);
        }
        for (uint32_t i = 0; i < C::STAGES; i++) {
            ep_mbar_init(s.full + 8 * i, C::BY_BLOCK ? 1 + 32 : 1);
            if constexpr (C::SCALE_WARP) ep_mbar_init(ep_gemm_info_ready<C>(&s, i), 1);
            ep_mbar_init(s.empty + 8 * i, 2 * 8);
        }
        for (uint32_t i = 0; i < C::NUM_NEXT; i++) ep_mbar_init(s.next_tile_bars + 8 * i, 1);
        ep_fence_mbar_init();
    }
    ep_cluster_sync();
    if (threadIdx.x < 128) {
        ep_setmaxnreg_dec<Hooks::PRODUCER_REGS>();
        if (threadIdx.x >= 32) hooks.comm(s.end);
        else if (C::WARP_PRODUCES || threadIdx.x == 0)
            ep_gemm_produce_tiles<C>(p, hooks, &s, map_a, map_b, low_a, low_b, low_r);
        if constexpr (C::SCALE_WARP)
            if (threadIdx.x / 32 == 1) ep_gemm_load_scales<C>(p, hooks, &s);
        __syncwarp();
        if (Hooks::FUSED)
            ep_setmaxnreg_inc<
                EP_GEMM_REGS>(); /* as at the start, because code follows that all threads execute */
    } else {
        ep_setmaxnreg_inc<Hooks::MMA_REGS>();
        if constexpr (C::W4) {
            static_assert(!Hooks::FUSED, "tile_written would be called before the tile's burst");
            ep_gemm_mma_tiles_w4<C>((const EpGemmW4Params *)p, &s);
        } else if constexpr (C::SMALL_M) {
            static_assert(!Hooks::FUSED, "tile_written would be called before the tile's burst");
            ep_gemm_mma_tiles_small_m<C>(p, &s);
        } else if constexpr (C::BY_BLOCK) ep_gemm_mma_tiles_fp8<C>(p, hooks, &s);
        else ep_gemm_mma_tiles<C>(p, hooks, &s);
        if (Hooks::FUSED) ep_setmaxnreg_dec<EP_GEMM_REGS>();
    }
    ep_cluster_sync(); /* the other CTA may still write to this CTA's shared memory */
}

#endif /* EP_GEMM_CUH */
