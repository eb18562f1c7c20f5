/* test_gemm_fp8.cpp - compares the grouped GEMM kernel of FP8 for Hopper with sums in double.
 *
 * CPU threads emulate the kernel. Numbers are small integers, and scales are powers of two, different in each
 * block. So all sums are exact, and a wrong number or scale changes the result. The rows around the rows of
 * the experts are NaN, because a tile may read them but must not use them. The output is poisoned.
 * Usage: test_gemm_fp8 [seed] */
#include "gemm_pair.h"

static int between(int least, int most) { return std::uniform_int_distribution<int>(least, most)(ep_random); }

struct Case {
    uint32_t n, k, pairs;
    std::vector<int32_t> sizes;
    bool bias, row_weight, by_k; /* by_k: the scales of 128 values of k are next to each other */
};

/* As in a megakernel, whose last CTA resets the tile counter, except that no tokens are moved. */
template <typename C> struct Hooks : EpGemmNoHooks {
    static constexpr bool FUSED = C::IS_MEGA;
    const EpGemmScales *scales;
};

static float widen(uint8_t e4m3) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(e4m3, __NV_E4M3))); }

struct Problem {
    EpGemmFp8Params q;
    std::vector<uint8_t> a, b;
    std::vector<uint16_t> bias, out;
    std::vector<float> row_weight, a_scale, b_scale;
    std::vector<int32_t> offsets;

    /* The sum of row r and weight row c of expert e. */
    double product(uint32_t e, uint64_t r, uint64_t c) const {
        const EpGemmParams &p = q.gemm;
        double sum = p.bias ? ep_widen(bias[e * p.n + c], p.is_f16) : 0;
        for (uint64_t i = 0; i < p.k; i++)
            sum += (double)widen(a[r * p.k + i]) * widen(b[(e * p.n + c) * p.k + i]) *
                   q.scales.a[r * q.scales.a_row + i / 128 * q.scales.a_k] *
                   b_scale[e * q.scales.b_expert + c / 128 * q.scales.b_n + i / 128 * q.scales.b_k];
        return sum;
    }
    double expected(uint32_t e, uint64_t r, uint32_t c) const {
        const double v = activated(q.gemm, c, [&](uint32_t n) { return product(e, r, n); });
        return q.gemm.row_weight ? v * row_weight[r] : v;
    }
};

static float power(void) { return ldexpf(1, between(-5, 0)); }

template <typename C> static void make_problem(const Case &c, Problem *x, uint64_t *counter) {
    const uint32_t L = (uint32_t)c.sizes.size(), num_n = ep_gemm_num_blocks(c.n),
                   num_k = ep_gemm_num_blocks(c.k);
    const uint32_t rows = (uint32_t)place_experts(c.sizes, &x->offsets), last = rows - ROWS_AFTER;
    auto small = [] {
        return (uint8_t)__nv_cvt_float_to_fp8((float)between(-2, 2), __NV_SATFINITE, __NV_E4M3);
    };
    x->a.assign((uint64_t)rows * c.k, 0x7f);
    for (uint64_t i = ROWS_BEFORE * c.k; i < (uint64_t)last * c.k; i++) x->a[i] = small();
    for (uint64_t i = 0; i < (uint64_t)L * c.n * c.k; i++) x->b.push_back(small());
    for (uint64_t i = 0; i < (uint64_t)L * c.n; i++)
        x->bias.push_back(ep_round((float)between(-3, 3), C::F16));
    x->a_scale.assign((uint64_t)rows * num_k, NAN);
    for (uint32_t i = 0; i < rows; i++) {
        x->row_weight.push_back(power());
        for (uint32_t j = 0; i >= ROWS_BEFORE && i < last && j < num_k; j++)
            x->a_scale[c.by_k ? j * rows + i : i * num_k + j] = power();
    }
    for (uint64_t i = 0; i < (uint64_t)L * num_n * num_k; i++) x->b_scale.push_back(power());
    EpGemmParams p = parameters(c, x->offsets, EP_GEMM_FORWARD, C::F16);
    p.a = x->a.data();
    p.b = x->b.data();
    p.bias = c.bias ? x->bias.data() : NULL;
    p.row_weight = c.row_weight ? x->row_weight.data() : NULL;
    p.tile_counter = counter;
    ep_gemm_set_activation(&p, {C::ACT, 1.3f, 0.6f});
    x->out.assign((uint64_t)rows * ep_gemm_out_cols(&p), EP_POISON);
    p.out = x->out.data();
    const EpGemmScales by_block = {x->a_scale.data(),
                                   x->b_scale.data(),
                                   c.by_k ? 1 : num_k,
                                   c.by_k ? rows : 1u,
                                   (uint64_t)num_n * num_k,
                                   num_k,
                                   1};
    const EpGemmScales one = {x->row_weight.data(), x->b_scale.data(), 0, 0, 1, 0, 0};
    x->q = {p, C::BY_BLOCK ? by_block : one};
}

/* Run all pairs of CTAs. With scales of blocks, the producer is a warp, or the second warp loads scales. */
template <typename C> static void run_fp8(const EpGemmFp8Params *q, uint32_t pairs) {
    const EpTensorMap a = ep_map_fp8(ep_map_a(&q->gemm, C::BN)), b = ep_map_fp8(ep_map_b(&q->gemm, C::BN));
    gridDim = dim3(2 * pairs);
    const uint32_t warp = C::SCALE_WARP ? 1 : 0, last_warp = C::SCALE_WARP ? 2 : C::WARP_PRODUCES ? 1 : 0;
    ep_producer_lanes = C::WARP_PRODUCES ? 32 : 1;
    ep_cta_threads = ep_producer_lanes + (C::SCALE_WARP ? 32 : 0) + 256; /* and the warpgroups */
    for (uint32_t first = 0; first < gridDim.x; first += 2)
        run_cluster(first, warp, last_warp, [&] {
            Hooks<C> hooks;
            hooks.scales = &q->scales;
            ep_gemm_body<C>(&q->gemm, hooks, &a, &b);
        });
}

template <typename C> static bool check(const char *name, const Case &c) {
    constexpr int ACT = C::ACT;
    constexpr bool F16 = C::F16;
    Problem x;
    uint64_t drawn_tiles = 0, num_wrong = 0;
    make_problem<C>(c, &x, &drawn_tiles);
    run_fp8<C>(&x.q, c.pairs);
    const uint32_t out_cols = ep_gemm_out_cols(&x.q.gemm);
    const double share = ACT == EP_ACT_NONE ? 0 : F16 ? 1e-3 : 8e-3;
    for (uint32_t r = 0, e = 0; r < x.q.gemm.num_rows; r++) {
        while (e < c.sizes.size() && r >= (uint32_t)x.offsets[e + 1]) e++;
        const bool owned = r >= ROWS_BEFORE && e < c.sizes.size();
        for (uint32_t j = 0; j < out_cols; j++) {
            const uint16_t bits = x.out[(uint64_t)r * out_cols + j];
            const double want = owned ? x.expected(e, r, j) : 0, got = ep_widen(bits, F16);
            const double exact = ep_widen(ep_round((float)want, F16), F16);
            const bool right = !owned       ? bits == EP_POISON
                               : share == 0 ? got == exact
                                            : fabs(got - want) <= share * fabs(want) + 1e-4;
            if (!right && num_wrong++ == 0)
                printf("  %s: row %u of expert %u, column %u: got %g, expected %g\n", name, r, e, j, got,
                       want);
        }
    }
    if ((drawn_tiles != 0) != C::IS_MEGA) num_wrong++;
    printf("fp8 %-40s %6u rows of %4u: %s\n", name, x.q.gemm.num_rows, out_cols, num_wrong ? "WRONG" : "ok");
    fflush(stdout);
    return num_wrong == 0;
}

/* ---- cases: n, k, pairs of CTAs, rows of the experts, bias, row weights, scales by block ---- */

static const Case odd = {272, 400, 3, {1, 0, 64, 130, 17}, false, false, false};
static const Case full = {256, 512, 1, {128, 0, 70}, true, true, true};
static const Case narrow = {96, 80, 2, {16, 33, 0, 200}, true, false, false};
static const Case gated = {384, 272, 2, {150, 0, 9}, true, true, false};
/* Tiles of which the second half has rows, and pairs that share rows. */
static const Case tall = {256, 272, 2, {300, 0, 640, 257}, false, true, false};
static const Case small_m = {192, 1296, 2, {1, 0, 40, 3, 0, 2}, true, true, true};
/* For ThreadSanitizer, which is slow: more than one tile, more stages than the ring has. */
static const Case small = {144, 912, 1, {200, 0, 70}, false, true, true};

#define RUN(BN, BY_BLOCK, ACT, F16, CASE)                                                              \
    ok = check<EpGemmFp8Config<BN, BY_BLOCK, ACT, F16>>(#BN " " #BY_BLOCK " " #ACT " " #F16 " " #CASE, \
                                                        CASE) &&                                       \
         ok;

#define RUN_MEGA(ACT, F16, CASE) \
    ok = check<EpGemmMegaFp8Config<ACT, F16>>("mega " #ACT " " #F16 " " #CASE, CASE) && ok;

#define RUN_COMBINE(F16, CASE) \
    ok = check<EpGemmCombineFp8Config<F16>>("GEMM + combine " #F16 " " #CASE, CASE) && ok;

static bool run_all(void) {
    bool ok = true;
#ifndef __SANITIZE_THREAD__
    RUN(256, true, EP_ACT_NONE, false, odd)
    RUN(256, true, EP_ACT_NONE, true, full)
    RUN(256, true, EP_ACT_NONE, false, tall)
    RUN(256, true, EP_ACT_SWIGLU, false, tall)
    RUN(256, true, EP_ACT_NONE, false, narrow)
    RUN(256, true, EP_ACT_GELU, true, narrow)
    RUN(256, true, EP_ACT_SWIGLU, false, full)
    RUN(256, true, EP_ACT_SWIGLU, true, gated)
    RUN(256, true, EP_ACT_GPT_OSS, false, odd)
    RUN(256, true, EP_ACT_GPT_OSS, true, full)
    RUN(64, true, EP_ACT_NONE, false, odd)
    RUN(64, true, EP_ACT_NONE, true, small_m)
    RUN(64, true, EP_ACT_SWIGLU, false, small_m)
    RUN(64, true, EP_ACT_GPT_OSS, true, full)
    RUN(256, false, EP_ACT_NONE, false, odd)
    RUN(256, false, EP_ACT_SWIGLU, true, gated)
    RUN(256, false, EP_ACT_GELU, false, full)
    RUN_MEGA(EP_ACT_NONE, false, odd)
    RUN_MEGA(EP_ACT_SWIGLU, true, gated)
    RUN_MEGA(EP_ACT_GPT_OSS, false, full)
    RUN_COMBINE(false, odd)
    RUN_COMBINE(true, full)
    RUN_COMBINE(false, tall)
#endif
    RUN(256, true, EP_ACT_NONE, false, small)
    RUN_MEGA(EP_ACT_NONE, false, small)
    RUN_COMBINE(false, small)
    RUN(64, true, EP_ACT_NONE, false, small)
    return ok;
}

int main(int argc, char **argv) { return gemm_main(argc, argv, run_all); }
