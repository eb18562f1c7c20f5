/* test_wgrad_fp8.cpp - compares the kernel of WGRAD in FP8 for Hopper with sums in double.
 *
 * CPU threads emulate the kernel. Numbers are small integers, and scales are powers of two, different for
 * each expert and 128 lines. So all sums are exact, and a wrong number or scale changes the result. The
 * blocks between the experts are NaN. The output is poisoned, or random where it is added to; what lies
 * around it must keep its bits. Usage: test_wgrad_fp8 [seed] */
#include "gemm_pair.h"
#include "kernels/gemm/gemm_wgrad_fp8.cuh"

static int between(int least, int most) { return std::uniform_int_distribution<int>(least, most)(ep_random); }

struct Case {
    uint32_t n, k, pairs;
    std::vector<int32_t> sizes;
    float scale;
};

enum { MARGIN = 64 }; /* numbers before and after the output */

/* Transposed rows of an operand: a line has `size` numbers. */
struct Operand {
    std::vector<uint8_t> q;
    std::vector<float> scales;
    uint64_t lines, size;
    double at(uint64_t e, uint64_t line, uint64_t p) const {
        return (double)ep_widen_fp8(q[line * size + p]) * scales[e * ((lines + 127) / 128) + line / 128];
    }
};

struct Problem {
    EpWgradFp8Params q;
    Operand a, b;
    std::vector<uint16_t> out;
    std::vector<float> sums, before;
    std::vector<int32_t> offsets;
};

static float power(void) { return ldexpf(1, between(-3, 0)); }

/* Numbers of the experts' rows, zeros up to the end of their last blocks, and NaN elsewhere; and scales. */
static void make_operand(Operand *x, uint64_t lines, const std::vector<int32_t> &offsets,
                         uint64_t num_blocks) {
    x->lines = lines;
    x->size = num_blocks * 128;
    x->q.assign(lines * x->size, 0x7f);
    for (uint64_t i = 0; i < (offsets.size() - 1) * ((lines + 127) / 128); i++) x->scales.push_back(power());
    for (uint32_t e = 0; e + 1 < offsets.size(); e++) {
        const uint64_t num = (uint64_t)(offsets[e + 1] - offsets[e]);
        const uint64_t first = ep_transposed_first_block((uint32_t)offsets[e], e);
        for (uint64_t i = 0; i < (num + 127) / 128; i++)
            for (uint64_t line = 0; line < lines; line++)
                for (uint64_t r = 0; r < 128; r++)
                    x->q[line * x->size + (first + i) * 128 + r] =
                        i * 128 + r < num
                            ? (uint8_t)__nv_cvt_float_to_fp8((float)between(-2, 2), __NV_SATFINITE, __NV_E4M3)
                            : 0;
    }
}

template <typename C> static void make_problem(const Case &c, Problem *x, uint64_t *counter) {
    const uint64_t num = c.sizes.size() * (uint64_t)c.n * c.k;
    place_experts(c.sizes, &x->offsets);
    EpGemmParams p = parameters(c, x->offsets, EP_GEMM_WGRAD, C::F16);
    const uint32_t num_blocks = ep_transposed_num_blocks(p.num_rows, p.num_experts);
    make_operand(&x->a, c.n, x->offsets, num_blocks);
    make_operand(&x->b, c.k, x->offsets, num_blocks);
    for (uint64_t i = 0; i < num + 2 * MARGIN; i++) x->before.push_back((float)between(-50, 50) / 8);
    x->sums = x->before;
    x->out.assign(num + 2 * MARGIN, EP_POISON);
    ep_gemm_set_activation(&p, {EP_ACT_NONE, 0, 0});
    p.scale = c.scale;
    p.a = x->a.q.data();
    p.b = x->b.q.data();
    p.out = C::ACCUMULATES ? (void *)(x->sums.data() + MARGIN) : (void *)(x->out.data() + MARGIN);
    p.accumulates = C::ACCUMULATES;
    p.tile_counter = counter;
    x->q = {p, x->a.scales.data(), x->b.scales.data()};
}

template <typename C> static void run(const EpWgradFp8Params *q, uint32_t pairs) {
    const EpTensorMap a = ep_map_transposed(q, q->gemm.a, q->gemm.n, 64),
                      b = ep_map_transposed(q, q->gemm.b, q->gemm.k, 128);
    gridDim = dim3(2 * pairs);
    for (uint32_t first = 0; first < gridDim.x; first += 2)
        run_cluster(first, 0, 0, [&] { ep_wgrad_fp8_body<C>(q, &a, &b); });
}

/* The number of outputs that differ from what they must be. */
template <typename C> static uint64_t num_wrong(const Problem &x) {
    const EpGemmParams &g = x.q.gemm;
    const uint64_t n = g.n, k = g.k, end = MARGIN + g.num_experts * n * k;
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < x.sums.size(); i++) {
        const bool is_out = i >= MARGIN && i < end;
        const uint64_t at = is_out ? i - MARGIN : 0, e = at / (n * k), row = at / k % n, col = at % k;
        const uint64_t num = is_out ? (uint64_t)(x.offsets[e + 1] - x.offsets[e]) : 0;
        const uint64_t first = 128ull * ep_transposed_first_block((uint32_t)x.offsets[e], (uint32_t)e);
        double sum = 0;
        for (uint64_t r = first; r < first + num; r++) sum += x.a.at(e, row, r) * x.b.at(e, col, r);
        const double want = C::ACCUMULATES ? x.before[i] + (double)g.scale * sum
                            : is_out       ? ep_widen(ep_round((float)sum, C::F16), C::F16)
                                           : 0;
        const double got = C::ACCUMULATES ? x.sums[i] : ep_widen(x.out[i], C::F16);
        const bool right = C::ACCUMULATES ? fabs(got - want) <= 1e-6 * fabs(want) * is_out
                           : is_out       ? got == want
                                          : x.out[i] == EP_POISON;
        if (!right && wrong++ == 0)
            printf("  expert %llu row %llu column %llu: got %g, expected %g\n", (unsigned long long)e,
                   (unsigned long long)row, (unsigned long long)col, got, want);
    }
    return wrong;
}

template <typename C> static bool check(const char *name, const Case &c) {
    Problem x;
    uint64_t drawn_tiles = 0;
    make_problem<C>(c, &x, &drawn_tiles);
    run<C>(&x.q, c.pairs);
    const bool ok = num_wrong<C>(x) == 0 && drawn_tiles == 0;
    printf("%-32s %u experts of %u x %u: %s\n", name, x.q.gemm.num_experts, c.n, c.k, ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

/* Experts have no row, one row, a block, and up to five blocks. n and k are no multiples of a tile. */
static const Case odd = {272, 208, 3, {1, 0, 128, 700, 17}, 1};
static const Case narrow = {96, 80, 2, {16, 133, 0, 300}, 0.25f};
static const Case even = {160, 272, 2, {129, 0, 192}, -0.5f};
static const Case wide = {128, 528, 1, {300, 40}, 2};
static const Case empty = {144, 48, 1, {0, 0}, 1};
static const Case small = {144, 48, 2, {1, 0, 133, 70, 17}, 0.5f}; /* for ThreadSanitizer, which is slow */

#define RUN(F16, ADDS, CASE) ok = check<EpWgradFp8Config<F16, ADDS>>(#F16 " " #ADDS " " #CASE, CASE) && ok;

static bool run_all(void) {
    bool ok = true;
#ifndef __SANITIZE_THREAD__
    RUN(false, false, odd)
    RUN(false, true, odd)
    RUN(true, false, narrow)
    RUN(false, true, even)
    RUN(false, false, wide)
    RUN(false, true, wide)
    RUN(false, false, empty)
    RUN(false, true, empty)
#endif
    RUN(false, false, small)
    RUN(false, true, small)
    return ok;
}

int main(int argc, char **argv) { return gemm_main(argc, argv, run_all); }
