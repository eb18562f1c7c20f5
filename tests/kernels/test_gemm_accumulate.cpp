/* test_gemm_accumulate.cpp - compares WGRAD for Hopper that adds to fp32 numbers with sums in double.
 *
 * CPU threads emulate the kernel. Inputs are random, and NaN around the rows of the experts. The numbers that
 * are added to are random too. Those of experts without rows must keep their bits, and so must the numbers
 * before and after the output. Usage: test_gemm_accumulate [seed] */
#include "gemm_pair.h"

struct Case {
    uint32_t n, k, pairs;
    std::vector<int32_t> sizes;
    float scale;
};

enum { MARGIN = 64 }; /* numbers before and after the output */

struct Problem {
    EpGemmParams p;
    std::vector<uint16_t> a, b;
    std::vector<float> before, out;
    std::vector<int32_t> offsets;
};

template <typename C> static void make_problem(const Case &c, Problem *q) {
    const uint64_t num = c.sizes.size() * c.n * c.k;
    place_experts(c.sizes, &q->offsets);
    fill_rows(q->a, q->offsets, c.n, C::F16);
    fill_rows(q->b, q->offsets, c.k, C::F16);
    for (uint64_t i = 0; i < num + 2 * MARGIN; i++) q->before.push_back((float)uniform(-3, 3));
    q->out = q->before;
    q->p = parameters(c, q->offsets, EP_GEMM_WGRAD, C::F16);
    q->p.a = q->a.data();
    q->p.b = q->b.data();
    q->p.out = q->out.data() + MARGIN;
    ep_gemm_set_activation(&q->p, {EP_ACT_NONE, 0, 0});
    q->p.scale = c.scale;
    q->p.accumulates = true;
}

/* Compare the output with sums in double, and what must not change bit by bit. */
template <typename C> static uint64_t num_wrong(const Problem &q) {
    const uint64_t n = q.p.n, k = q.p.k, end = MARGIN + q.p.num_experts * n * k;
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < q.out.size(); i++) {
        const uint64_t at = i - MARGIN, e = at / (n * k), r = at / k % n, c = at % k;
        const bool is_out = i >= MARGIN && i < end && q.offsets[e] < q.offsets[e + 1];
        double sum = 0, size = 0;
        for (int32_t m = is_out ? q.offsets[e] : 0; m < (is_out ? q.offsets[e + 1] : 0); m++) {
            const double term = (double)ep_widen(q.a[m * n + r], C::F16) * ep_widen(q.b[m * k + c], C::F16);
            sum += term;
            size += fabs(term);
        }
        const double want = q.before[i] + q.p.scale * sum;
        const double bound = is_out ? 1e-6 * (fabs(want) + 1) + 1e-5 * fabs(q.p.scale) * size : 0;
        if (!(fabs(q.out[i] - want) <= bound) && wrong++ == 0)
            printf("  expert %llu row %llu column %llu: got %g, expected %g\n", (unsigned long long)e,
                   (unsigned long long)r, (unsigned long long)c, q.out[i], want);
    }
    return wrong;
}

template <typename C> static bool check(const char *name, const Case &c) {
    Problem q;
    uint64_t drawn_tiles = 0;
    make_problem<C>(c, &q);
    q.p.tile_counter = &drawn_tiles;
    run_pairs<C>(&q.p, c.pairs, EpGemmNoHooks());
    const bool ok = num_wrong<C>(q) == 0 && drawn_tiles == 0;
    printf("%-24s %u experts of %u x %u: %s\n", name, q.p.num_experts, c.n, c.k, ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

/* Experts have no row, one row, half a tile, or slightly more than a tile of n. n and k are no multiples of a
 * tile. */
static const Case odd = {272, 208, 3, {1, 0, 64, 130, 17}, 1};
static const Case narrow = {96, 80, 2, {16, 33, 0, 200}, 0.25f};
static const Case even = {160, 272, 2, {5, 0, 192}, -0.7f};
static const Case empty = {144, 48, 1, {0, 0}, 1};
static const Case small = {144, 48, 2, {1, 0, 33, 70, 17}, 0.5f}; /* for ThreadSanitizer, which is slow */

#define RUN(BN, F16, CASE) ok = check<EpGemmAccumulateConfig<BN, F16>>(#BN " " #F16 " " #CASE, CASE) && ok;

static bool run_all(void) {
    bool ok = true;
#ifdef __SANITIZE_THREAD__
    RUN(128, false, small)
#else
    RUN(256, false, odd)
    RUN(256, true, even)
    RUN(192, true, odd)
    RUN(192, false, even)
    RUN(128, false, narrow)
    RUN(128, true, odd)
    RUN(128, false, empty)
    RUN(256, false, small)
#endif
    return ok;
}

int main(int argc, char **argv) { return gemm_main(argc, argv, run_all); }
