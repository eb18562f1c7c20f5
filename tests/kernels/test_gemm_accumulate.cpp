/* test_gemm_accumulate.cpp - compares WGRAD for Hopper that adds to fp32 numbers with sums in double.
 *
 * CPU threads emulate the kernel. Inputs are random, and NaN around the rows of the experts. The numbers that
 * are added to are random too. Those of experts without rows must keep their bits, and so must the numbers
 * before and after the output. Usage: test_gemm_accumulate [seed] */
#include "emulated_ptx.h"
#include "kernels/gemm/gemm.cuh"

#include <random>
#include <thread>

static std::mt19937 ep_random;
static float uniform(float a, float b) { return std::uniform_real_distribution<float>(a, b)(ep_random); }

struct Case {
    uint32_t n, k, pairs;
    std::vector<int32_t> sizes;
    float alpha;
};

enum { ROWS_BEFORE = 3, ROWS_AFTER = 5 }; /* rows that belong to no expert */
enum { MARGIN = 64 };                     /* numbers before and after the output */

struct Problem {
    EpGemmParams p;
    std::vector<uint16_t> a, b;
    std::vector<float> before, out;
    std::vector<int32_t> offsets;
};

static void fill(std::vector<uint16_t> &to, uint64_t num, uint64_t from, uint64_t until, bool f16) {
    to.assign(num, 0x7fff);
    for (uint64_t i = from; i < until; i++) to[i] = ep_round(uniform(-1, 1), f16);
}

template <typename C> static void make_problem(const Case &c, Problem *q) {
    const uint32_t L = (uint32_t)c.sizes.size();
    q->offsets.push_back(ROWS_BEFORE);
    for (int32_t s : c.sizes) q->offsets.push_back(q->offsets.back() + s);
    const uint64_t last = (uint64_t)q->offsets.back(), rows = last + ROWS_AFTER;
    fill(q->a, rows * c.n, ROWS_BEFORE * c.n, last * c.n, C::F16);
    fill(q->b, rows * c.k, ROWS_BEFORE * c.k, last * c.k, C::F16);
    for (uint64_t i = 0; i < (uint64_t)L * c.n * c.k + 2 * MARGIN; i++) q->before.push_back(uniform(-3, 3));
    q->out = q->before;
    q->p = {};
    q->p.a = q->a.data();
    q->p.b = q->b.data();
    q->p.out = q->out.data() + MARGIN;
    q->p.offsets = q->offsets.data();
    q->p.limit_ns = 60000000000ull;
    q->p.num_rows = (uint32_t)rows;
    q->p.num_experts = L;
    q->p.n = c.n;
    q->p.k = c.k;
    q->p.kind = EP_GEMM_WGRAD;
    ep_gemm_set_activation(&q->p, EP_ACT_NONE, c.alpha, 0);
    q->p.is_f16 = C::F16;
    q->p.accumulates = true;
}

template <typename C> static void run_pair(const EpGemmParams *p, uint32_t first) {
    const EpTensorMap a = ep_map_a(p, C::BN), b = ep_map_b(p, C::BN);
    std::vector<std::thread> threads;
    memset(ep_shared, 0xff, sizeof ep_shared);
    for (uint32_t i = 127; i < EP_GEMM_THREADS; i++)
        for (uint32_t rank = 0; rank < 2; rank++)
            threads.emplace_back([&, i, rank] {
                threadIdx.x = i == 127 ? 0 : i;
                blockIdx.x = first + rank;
                ep_rank = rank;
                EpGemmNoHooks none;
                ep_gemm_body<C>(p, none, &a, &b);
            });
    for (std::thread &t : threads) t.join();
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
        const double want = q.before[i] + q.p.alpha * sum;
        const double bound = is_out ? 1e-6 * (fabs(want) + 1) + 1e-5 * fabs(q.p.alpha) * size : 0;
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
    gridDim = dim3(2 * c.pairs);
    for (uint32_t b = 0; b < gridDim.x; b += 2) run_pair<C>(&q.p, b);
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

int main(int argc, char **argv) {
    bool ok = true;
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
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
    puts(ok ? "ok" : "FAILED");
    return !ok;
}
