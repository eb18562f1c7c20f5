/* test_gemm_low_rank.cpp - compares the GEMM for Hopper that adds a product of low rank with sums in double.
 *
 * CPU threads emulate the kernel. Inputs are random, and NaN around the rows of the experts, also in the rows
 * of low rank. The outputs are poisoned, and rows of no expert must stay so. With an activation the kernel
 * runs twice: where it saves the product, the activated rows must have the bits that they have where it does
 * not.
 * Usage: test_gemm_low_rank [seed] */
#include "gemm_pair.h"

struct Case {
    uint32_t n, k, r, pairs;
    std::vector<int32_t> sizes;
    bool bias;
};

struct Problem {
    EpGemmLowRankParams p;
    std::vector<uint16_t> a, b, low_a, low_b, bias, saved, out;
    std::vector<int32_t> offsets;
    uint64_t drawn_tiles;
};

template <typename C> static void make_problem(const Case &c, uint32_t activation, Problem *q) {
    const bool forward = C::KIND == EP_GEMM_FORWARD;
    const uint64_t L = c.sizes.size(), rows = place_experts(c.sizes, &q->offsets);
    fill_rows(q->a, q->offsets, forward ? c.k : c.n, C::F16);
    fill_all(q->b, L * c.n * c.k, C::F16);
    fill_rows(q->low_a, q->offsets, c.r, C::F16);
    fill_all(q->low_b, L * c.r * (forward ? c.n : c.k), C::F16);
    fill_all(q->bias, L * c.n, C::F16);
    q->saved.assign(rows * c.n, EP_POISON);
    EpGemmParams *p = &q->p.gemm;
    *p = parameters(c, q->offsets, C::KIND, C::F16);
    ep_gemm_set_activation(p, {activation, 1.3f, 2.0f});
    q->out.assign(rows * ep_gemm_out_cols(p), EP_POISON);
    p->a = q->a.data();
    p->b = q->b.data();
    p->bias = c.bias ? q->bias.data() : NULL;
    p->out = q->out.data();
    q->drawn_tiles = 0;
    p->tile_counter = &q->drawn_tiles;
    q->p.low = {q->low_a.data(), q->low_b.data(), c.r};
}

template <typename C> static void run(const Problem &q, uint32_t pairs) {
    const EpGemmParams *p = &q.p.gemm, low = ep_gemm_low_rank(p, &q.p.low);
    const EpTensorMap a = ep_map_a(p, C::BN), b = ep_map_b(p, C::BN);
    const EpTensorMap low_a = ep_map_a(&low, C::BN), low_b = ep_map_b(&low, C::BN);
    gridDim = dim3(2 * pairs);
    for (uint32_t first = 0; first < gridDim.x; first += 2)
        run_cluster(first, 0, 0, [&] {
            EpGemmNoHooks none;
            ep_gemm_body<C>(p, none, &a, &b, &low_a, &low_b, q.p.low.r);
        });
}

/* Number c of the product of row r of expert e, and in *size the sum of the sizes of its terms. */
template <typename C>
static double product(const Problem &q, uint64_t e, uint64_t r, uint64_t c, double *size) {
    const uint64_t n = q.p.gemm.n, k = q.p.gemm.k, low = q.p.low.r;
    double sum = q.p.gemm.bias ? ep_widen(q.bias[e * n + c], C::F16) : 0;
    *size = fabs(sum);
    auto add = [&](uint16_t x, uint16_t y) {
        const double term = (double)ep_widen(x, C::F16) * ep_widen(y, C::F16);
        sum += term;
        *size += fabs(term);
    };
    if (C::KIND == EP_GEMM_FORWARD) {
        for (uint64_t i = 0; i < k; i++) add(q.a[r * k + i], q.b[(e * n + c) * k + i]);
        for (uint64_t i = 0; i < low; i++) add(q.low_a[r * low + i], q.low_b[(e * n + c) * low + i]);
    } else {
        for (uint64_t i = 0; i < n; i++) add(q.a[r * n + i], q.b[(e * n + i) * k + c]);
        for (uint64_t i = 0; i < low; i++) add(q.low_a[r * low + i], q.low_b[(e * low + i) * k + c]);
    }
    return sum;
}

/* The number of wrong numbers of a matrix with `cols` columns; want(e, r, c, &size) has those of the experts'
 * rows. bound(value, size): of the error. */
template <typename Want>
static uint64_t num_wrong(const char *what, const Problem &q, const std::vector<uint16_t> &got, uint64_t cols,
                          const Want &want) {
    const bool f16 = q.p.gemm.is_f16;
    uint64_t wrong = 0;
    for (uint64_t r = 0, e = 0; r < q.p.gemm.num_rows; r++) {
        const bool is_owned = r >= ROWS_BEFORE && r < (uint64_t)q.offsets.back();
        while (is_owned && r >= (uint64_t)q.offsets[e + 1]) e++;
        for (uint64_t c = 0; c < cols; c++) {
            const uint16_t v = got[r * cols + c];
            double size = 0, exact = is_owned ? want(e, r, c, &size) : 0;
            const double bound = fabs(exact) * (f16 ? 0x1p-11 : 0x1p-8) + 1e-5 * size + 1e-7;
            const bool ok = is_owned ? fabs(ep_widen(v, f16) - exact) <= bound : v == EP_POISON;
            if (!ok && wrong++ == 0)
                printf("  %s, row %llu column %llu: got %g, expected %g\n", what, (unsigned long long)r,
                       (unsigned long long)c, ep_widen(v, f16), exact);
        }
    }
    return wrong;
}

template <int KIND, int BN, int ACTIVATION, bool F16> static bool check(const char *name, const Case &c) {
    typedef EpGemmLowRankConfig<KIND, BN, EP_ACT_KERNEL(ACTIVATION), F16> C;
    Problem q;
    make_problem<C>(c, ACTIVATION, &q);
    EpGemmParams *p = &q.p.gemm;
    const uint64_t cols = ep_gemm_out_cols(p);
    run<C>(q, c.pairs);
    uint64_t wrong = 0;
    if (ACTIVATION == EP_ACT_NONE) {
        wrong = num_wrong("out", q, q.out, cols, [&](uint64_t e, uint64_t r, uint64_t i, double *size) {
            return product<C>(q, e, r, i, size);
        });
    } else {
        const std::vector<uint16_t> inference = q.out;
        q.out.assign(q.out.size(), EP_POISON);
        p->saved = q.saved.data();
        p->saves = true;
        run<C>(q, c.pairs);
        wrong = num_wrong("saved", q, q.saved, p->n, [&](uint64_t e, uint64_t r, uint64_t i, double *size) {
            return product<C>(q, e, r, i, size);
        });
        wrong += num_wrong("out", q, q.out, cols, [&](uint64_t e, uint64_t r, uint64_t i, double *size) {
            double scale = 1;
            const double y = activated(*p, (uint32_t)i, [&](uint32_t n) {
                double of_sum;
                const double v = product<C>(q, e, r, n, &of_sum);
                *size += of_sum;
                scale += fabs(v);
                return v;
            });
            *size *= scale;
            return y;
        });
        if (inference != q.out && wrong++ == 0) printf("  saving changes the activated rows\n");
    }
    const bool ok = wrong == 0 && q.drawn_tiles == 0;
    printf("%-48s %u experts of %u x %u + %u: %s\n", name, p->num_experts, c.n, c.k, c.r,
           ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

/* Experts have no row, one row, half a tile, or slightly more than a tile. n and k are no multiples of a
 * tile, and r fills a part of a stage, or more than one. */
static const Case odd = {288, 208, 16, 3, {1, 0, 64, 130, 17}, false};
static const Case full = {256, 448, 128, 1, {128, 0, 70}, true};
static const Case narrow = {96, 80, 80, 2, {16, 33, 0, 200}, true};
static const Case plain = {288, 208, 16, 3, {1, 0, 64, 130, 17}, false};
static const Case wide = {160, 272, 144, 2, {5, 0, 192}, false};
static const Case small = {160, 48, 16, 2, {1, 0, 33, 70, 17}, true}; /* for ThreadSanitizer, which is slow */
static const Case small_m = {272, 528, 16, 3, {1, 16, 17, 0, 31, 33, 5, 70, 15}, true};
static const Case small_m_wide = {144, 256, 320, 2, {1, 0, 17, 40}, false};

#define RUN(KIND, BN, ACT, F16, CASE) \
    ok = check<KIND, BN, ACT, F16>(#KIND " " #BN " " #ACT " " #F16 " " #CASE, CASE) && ok;

static bool run_all(void) {
    bool ok = true;
#ifdef __SANITIZE_THREAD__
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU, false, small)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_NONE, true, small)
#else
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_NONE, false, odd)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_NONE, true, full)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU, false, odd)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU, true, narrow)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_GPT_OSS, false, full)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_GELU, false, narrow)
    RUN(EP_GEMM_DGRAD, 256, EP_ACT_NONE, false, plain)
    RUN(EP_GEMM_DGRAD, 256, EP_ACT_NONE, true, wide)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_NONE, false, small_m)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_NONE, true, small_m_wide)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_SWIGLU, false, small_m)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_GPT_OSS, true, small_m_wide)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_GELU, false, small_m)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_SWIGLU, true, narrow)
#endif
    return ok;
}

int main(int argc, char **argv) { return gemm_main(argc, argv, run_all); }
