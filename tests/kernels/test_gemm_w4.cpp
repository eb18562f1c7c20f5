/* test_gemm_w4.cpp - compares the grouped GEMM kernel of 16-bit rows and 4-bit weights for Hopper with sums
 * in double.
 *
 * CPU threads emulate the kernel. Rows are small integers, and scales are powers of two, different in each
 * group. So all sums are exact, and a wrong code, zero or scale changes the result. What a weight is, the
 * test takes from the scalar functions of four_bit.h. The rows around the rows of the experts are
 * NaN, because a tile may read them but must not use them. The output is poisoned, and so is all shared
 * memory.
 * Usage: test_gemm_w4 [seed] */
#include "gemm_pair.h"

static int between(int least, int most) { return std::uniform_int_distribution<int>(least, most)(ep_random); }

struct Case {
    uint32_t n, k, pairs;
    std::vector<int32_t> sizes;
    bool bias, row_weight;
    uint32_t group; /* of INT4 */
    bool zeros;
};

struct Problem {
    EpGemmW4Params q;
    std::vector<uint8_t> codes, bytes, zeros;
    std::vector<uint16_t> a, bias, out, scales;
    std::vector<float> row_weight;
    std::vector<int32_t> offsets;

    double weight(uint32_t e, uint32_t n, uint32_t k) const {
        const EpGemmParams &p = q.gemm;
        const uint32_t code =
            ep_four_bit_code(&q.weights, codes.data() + (uint64_t)e * p.n * (p.k / 2), p.k, n, k);
        const uint64_t at = ep_four_bit_scale(&q.weights, p.n, p.k, e, n, k);
        if (q.weights.format == EP_MXFP4) return ep_four_bit_mxfp4(code, bytes[at]);
        return ((int)code - (q.weights.zeros ? zeros[at] : 8)) * (double)ep_widen(scales[at], p.is_f16);
    }
    /* The sum of row r and weight row c of expert e. */
    double product(uint32_t e, uint64_t r, uint32_t c) const {
        const EpGemmParams &p = q.gemm;
        double sum = p.bias ? ep_widen(bias[(uint64_t)e * p.n + c], p.is_f16) : 0;
        for (uint32_t i = 0; i < p.k; i++) sum += ep_widen(a[r * p.k + i], p.is_f16) * weight(e, c, i);
        return sum;
    }
    double expected(uint32_t e, uint64_t r, uint32_t c) const {
        const double v = activated(q.gemm, c, [&](uint32_t n) { return product(e, r, n); });
        return q.gemm.row_weight ? v * row_weight[r] : v;
    }
};

template <typename C> static void make_problem(const Case &c, Problem *x, uint64_t *counter) {
    const uint32_t L = (uint32_t)c.sizes.size(), group = C::FORMAT == EP_MXFP4 ? EP_MXFP4_GROUP : c.group;
    const uint32_t rows = (uint32_t)place_experts(c.sizes, &x->offsets), last = rows - ROWS_AFTER;
    const uint64_t num_scales = (uint64_t)L * c.n * ep_four_bit_num_blocks(c.k) * (EP_FOUR_BIT_BLOCK / group);
    x->a.assign((uint64_t)rows * c.k, EP_NOT_A_NUMBER);
    for (uint64_t i = ROWS_BEFORE * c.k; i < (uint64_t)last * c.k; i++)
        x->a[i] = ep_round((float)between(-2, 2), C::F16);
    for (uint64_t i = 0; i < (uint64_t)L * c.n * c.k / 2; i++) x->codes.push_back((uint8_t)between(0, 255));
    for (uint32_t i = 0; i < rows; i++) x->row_weight.push_back(ldexpf(1, between(-3, 0)));
    for (uint64_t i = 0; i < (uint64_t)L * c.n; i++)
        x->bias.push_back(ep_round((float)between(-3, 3), C::F16));
    EpGemmParams p = parameters(c, x->offsets, EP_GEMM_FORWARD, C::F16);
    p.a = x->a.data();
    p.b = x->codes.data();
    p.bias = c.bias ? x->bias.data() : NULL;
    p.row_weight = c.row_weight ? x->row_weight.data() : NULL;
    p.tile_counter = counter;
    ep_gemm_set_activation(&p, {C::ACT, 1.3f, 0.6f});
    x->out.assign((uint64_t)rows * ep_gemm_out_cols(&p), EP_POISON);
    p.out = x->out.data();
    x->q = {p, {NULL, NULL, C::FORMAT, group}};
    /* Scales of values past k are 0, as in weights that were packed. */
    x->bytes.assign(num_scales, 0);
    x->scales.assign(num_scales, 0);
    x->zeros.assign(num_scales, 0);
    for (uint32_t e = 0; e < L; e++)
        for (uint32_t n = 0; n < c.n; n++)
            for (uint32_t k = 0; k < c.k; k += group) {
                const uint64_t at = ep_four_bit_scale(&x->q.weights, c.n, c.k, e, n, k);
                x->bytes[at] = (uint8_t)between(250, EP_MXFP4_MAX_SCALE);
                x->scales[at] = ep_round(ldexpf(1, between(-8, -3)), C::F16);
                x->zeros[at] = (uint8_t)between(0, 15);
            }
    x->q.weights.scales = C::FORMAT == EP_MXFP4 ? (const void *)x->bytes.data() : x->scales.data();
    x->q.weights.zeros = C::FORMAT == EP_INT4 && c.zeros ? x->zeros.data() : NULL;
}

template <typename C> static void run_w4(const EpGemmW4Params *q, uint32_t pairs) {
    const EpTensorMap rows = ep_map_w4_rows(&q->gemm, C::LARGE);
    gridDim = dim3(2 * pairs);
    for (uint32_t first = 0; first < gridDim.x; first += 2)
        run_cluster(first, 0, 0, [&] {
            EpGemmNoHooks hooks;
            ep_gemm_body<C>(&q->gemm, hooks, &rows, &rows);
        });
}

template <typename C> static bool check(const char *name, const Case &c) {
    Problem x;
    uint64_t drawn_tiles = 0, num_wrong = 0;
    make_problem<C>(c, &x, &drawn_tiles);
    run_w4<C>(&x.q, c.pairs);
    const uint32_t out_cols = ep_gemm_out_cols(&x.q.gemm);
    const double share = C::ACT == EP_ACT_NONE ? 0 : C::F16 ? 1e-3 : 8e-3;
    for (uint32_t r = 0, e = 0; r < x.q.gemm.num_rows; r++) {
        while (e < c.sizes.size() && r >= (uint32_t)x.offsets[e + 1]) e++;
        const bool owned = r >= ROWS_BEFORE && e < c.sizes.size();
        for (uint32_t j = 0; j < out_cols; j++) {
            const uint16_t bits = x.out[(uint64_t)r * out_cols + j];
            const double want = owned ? x.expected(e, r, j) : 0, got = ep_widen(bits, C::F16);
            const double exact = ep_widen(ep_round((float)want, C::F16), C::F16);
            const bool right = !owned       ? bits == EP_POISON
                               : share == 0 ? got == exact
                                            : fabs(got - want) <= share * fabs(want) + 1e-4;
            if (!right && num_wrong++ == 0)
                printf("  %s: row %u of expert %u, column %u: got %g, expected %g\n", name, r, e, j, got,
                       want);
        }
    }
    if (drawn_tiles) num_wrong++;
    printf("w4 %-44s %6u rows of %4u: %s\n", name, x.q.gemm.num_rows, out_cols, num_wrong ? "WRONG" : "ok");
    fflush(stdout);
    return num_wrong == 0;
}

/* ---- cases: n, k, pairs of CTAs, rows of the experts, bias, row weights, group of INT4, zeros ---- */

/* More than one tile of tokens, experts without rows, an odd number of column tiles. */
static const Case few = {192, 320, 2, {1, 0, 9, 17, 0, 2}, true, true, 32, true};
static const Case wide = {384, 512, 3, {4, 33}, false, false, 128, false};
static const Case halves = {256, 576, 2, {8, 0, 21}, true, false, 64, true};
/* For the kernel for large M: each number of steps of 64 tokens. */
static const Case large = {192, 320, 2, {70, 0, 257, 130}, true, true, 64, true};
static const Case large_halves = {128, 256, 1, {190, 40}, false, true, 128, false};
/* Fewer tiles than pairs of CTAs: none, and one of many experts. */
static const Case none = {192, 320, 3, {0, 0, 0}, true, true, 32, true};
static const Case one = {128,  128,  4,  {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0},
                         true, true, 32, true};
/* For ThreadSanitizer, which is slow: more than one tile, more stages than the ring has. */
static const Case small = {64, 1408, 1, {12, 0, 3}, false, true, 32, true};

#define RUN(LARGE, FORMAT, ACT, F16, CASE)                                                              \
    ok = check<EpGemmW4Config<LARGE, FORMAT, ACT, F16>>(#LARGE " " #FORMAT " " #ACT " " #F16 " " #CASE, \
                                                        CASE) &&                                        \
         ok;

static bool run_all(void) {
    bool ok = true;
#ifndef __SANITIZE_THREAD__
    RUN(false, EP_MXFP4, EP_ACT_NONE, false, few)
    RUN(false, EP_MXFP4, EP_ACT_NONE, true, wide)
    RUN(false, EP_MXFP4, EP_ACT_SWIGLU, false, halves)
    RUN(false, EP_MXFP4, EP_ACT_GPT_OSS, true, few)
    RUN(false, EP_INT4, EP_ACT_NONE, false, few)
    RUN(false, EP_INT4, EP_ACT_NONE, true, wide)
    RUN(false, EP_INT4, EP_ACT_GELU, false, halves)
    RUN(false, EP_INT4, EP_ACT_SWIGLU, true, halves)
    RUN(false, EP_INT4, EP_ACT_GPT_OSS, false, wide)
    RUN(false, EP_MXFP4, EP_ACT_NONE, false, none)
    RUN(false, EP_MXFP4, EP_ACT_SWIGLU, false, one)
    RUN(true, EP_MXFP4, EP_ACT_NONE, false, large)
    RUN(true, EP_MXFP4, EP_ACT_SWIGLU, true, large_halves)
    RUN(true, EP_MXFP4, EP_ACT_GPT_OSS, false, large)
    RUN(true, EP_INT4, EP_ACT_NONE, true, large)
    RUN(true, EP_INT4, EP_ACT_SWIGLU, false, large_halves)
#endif
    RUN(false, EP_MXFP4, EP_ACT_NONE, false, small)
    RUN(false, EP_INT4, EP_ACT_GPT_OSS, true, small)
    RUN(true, EP_MXFP4, EP_ACT_NONE, false, small)
    return ok;
}

int main(int argc, char **argv) { return gemm_main(argc, argv, run_all); }
