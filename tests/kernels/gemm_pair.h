/* gemm_pair.h - what the tests of the grouped GEMM for Hopper share: the random rows of experts, and a pair
 * of CTAs that CPU threads emulate. */
#ifndef GEMM_PAIR_H
#define GEMM_PAIR_H
#include "emulated_ptx.h"
#include "kernels/gemm/gemm.cuh"

#include <random>
#include <thread>

enum { ROWS_BEFORE = 3, ROWS_AFTER = 5 };              /* rows that belong to no expert */
enum { EP_NOT_A_NUMBER = 0x7fff, EP_POISON = 0x7ffe }; /* of inputs, and of outputs that are not written */

static std::mt19937 ep_random;
static double uniform(double a, double b) { return std::uniform_real_distribution<double>(a, b)(ep_random); }

/* Compute the first row of each expert and their end. Returns the number of rows, with those of no expert. */
static uint64_t place_experts(const std::vector<int32_t> &sizes, std::vector<int32_t> *offsets) {
    offsets->assign(1, ROWS_BEFORE);
    for (int32_t s : sizes) offsets->push_back(offsets->back() + s);
    return (uint64_t)offsets->back() + ROWS_AFTER;
}

/* Fill elements [from, until) with random numbers, and all others with NaN. */
static void fill(std::vector<uint16_t> &to, uint64_t num, uint64_t from, uint64_t until, bool f16) {
    to.assign(num, EP_NOT_A_NUMBER);
    for (uint64_t i = from; i < until; i++) to[i] = ep_round((float)uniform(-1, 1), f16);
}
static void fill_all(std::vector<uint16_t> &to, uint64_t num, bool f16) { fill(to, num, 0, num, f16); }
/* Rows of no expert are NaN, because a tile may read them but must not use them. */
static void fill_rows(std::vector<uint16_t> &to, const std::vector<int32_t> &offsets, uint64_t cols,
                      bool f16) {
    const uint64_t end = (uint64_t)offsets.back();
    fill(to, (end + ROWS_AFTER) * cols, ROWS_BEFORE * cols, end * cols, f16);
}

/* The parameters of a case with these offsets, without tensors and without an activation. */
template <typename Case> static EpGemmParams parameters(const Case &c, const std::vector<int32_t> &offsets,
                                                        uint32_t kind, bool f16) {
    EpGemmParams p = {};
    p.offsets = offsets.data();
    p.limit_ns = 60000000000ull;
    p.num_rows = (uint32_t)offsets.back() + ROWS_AFTER;
    p.num_experts = (uint32_t)c.sizes.size();
    p.n = c.n;
    p.k = c.k;
    p.kind = kind;
    p.is_f16 = f16;
    return p;
}

/* The activation of column c of the output, in double. product(n): the sum of row n of the weights. */
template <typename F> static double activated(const EpGemmParams &p, uint32_t c, F product) {
    const bool mixed = p.activation.kind == EP_ACT_GPT_OSS;
    double v = product(mixed ? 2 * c : c);
    double u = EP_ACT_IS_GATED(p.activation.kind) ? product(mixed ? 2 * c + 1 : c + p.n / 2) : 0;
    if (p.activation.kind == EP_ACT_GELU) v *= 0.5 * (1 + erf(v / sqrt(2.0)));
    if (p.activation.kind == EP_ACT_SWIGLU) v = v / (1 + exp(-v)) * u;
    if (mixed) {
        v = std::min(v, (double)p.activation.limit);
        u = std::max(-(double)p.activation.limit, std::min(u, (double)p.activation.limit));
        v = (u + 1) * v / (1 + exp(-p.activation.alpha * v));
    }
    return v;
}

/* Run CTAs `first` and `first` + 1, which are a cluster. Emulated are thread 0, all threads of the warps from
 * `warp` until `last_warp`, and the two warpgroups of the MMA. */
template <typename Body> static void run_cluster(uint32_t first, uint32_t warp, uint32_t last_warp,
                                                 const Body &body) {
    std::vector<std::thread> threads;
    memset(ep_shared, 0xff, sizeof ep_shared);
    for (uint32_t i = 0; i < EP_GEMM_THREADS; i++) {
        if (i && i < 128 && (i / 32 < warp || i / 32 >= last_warp)) continue;
        for (uint32_t rank = 0; rank < 2; rank++)
            threads.emplace_back([&body, first, i, rank] {
                threadIdx.x = i;
                blockIdx.x = first + rank;
                ep_rank = rank;
                body();
            });
    }
    for (std::thread &t : threads) t.join();
}

/* Run all pairs of CTAs of the grid, each thread with a copy of the hooks. */
template <typename C, typename Hooks> static void run_pairs(const EpGemmParams *p, uint32_t pairs,
                                                            const Hooks &hooks) {
    const EpTensorMap a = ep_map_a(p, C::BN), b = ep_map_b(p, C::BN);
    gridDim = dim3(2 * pairs);
    for (uint32_t first = 0; first < gridDim.x; first += 2)
        run_cluster(first, 0, 0, [&] {
            Hooks mine = hooks;
            ep_gemm_body<C>(p, mine, &a, &b);
        });
}

/* Run all cases with the seed of the command line. Returns the exit status. */
static int gemm_main(int argc, char **argv, bool (*run_all)(void)) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    const bool ok = run_all();
    puts(ok ? "ok" : "FAILED");
    return !ok;
}

#endif /* GEMM_PAIR_H */
