/* test_gemm_save.cpp - compares the GEMM for Hopper that saves the product with that of inference.
 *
 * CPU threads emulate both kernels. Inputs are random, and NaN around the rows of the experts. What is saved
 * must be the product with its bias, within the rounding of a sum in double. The activated rows must have the
 * bits of the kernel that saves nothing. Rows of no expert must not be written.
 * Usage: test_gemm_save [seed] */
#include "gemm_pair.h"

struct Case {
    uint32_t n, k, pairs;
    std::vector<int32_t> sizes;
    bool bias;
};

struct Problem {
    EpGemmParams p;
    std::vector<uint16_t> a, b, bias, saved, out;
    std::vector<int32_t> offsets;
    uint64_t drawn_tiles;
};

template <typename C> static void make_problem(const Case &c, uint32_t activation, Problem *q) {
    const uint64_t L = c.sizes.size(), rows = place_experts(c.sizes, &q->offsets);
    fill_rows(q->a, q->offsets, c.k, C::F16);
    fill_all(q->b, L * c.n * c.k, C::F16);
    fill_all(q->bias, L * c.n, C::F16);
    q->saved.assign(rows * c.n, EP_POISON);
    q->p = parameters(c, q->offsets, EP_GEMM_FORWARD, C::F16);
    ep_gemm_set_activation(&q->p, {activation, 1.3f, 2.0f});
    q->out.assign(rows * ep_gemm_out_cols(&q->p), EP_POISON);
    q->p.a = q->a.data();
    q->p.b = q->b.data();
    q->p.bias = c.bias ? q->bias.data() : NULL;
    q->p.out = q->out.data();
    q->drawn_tiles = 0;
    q->p.tile_counter = &q->drawn_tiles;
}

/* Whether column c of row r of expert e is the product with its bias. */
template <typename C> static bool is_saved(const Problem &q, uint64_t e, uint64_t r, uint64_t c) {
    const uint64_t n = q.p.n, k = q.p.k;
    double sum = q.p.bias ? ep_widen(q.bias[e * n + c], C::F16) : 0, size = fabs(sum);
    for (uint64_t i = 0; i < k; i++) {
        const double term =
            (double)ep_widen(q.a[r * k + i], C::F16) * ep_widen(q.b[(e * n + c) * k + i], C::F16);
        sum += term;
        size += fabs(term);
    }
    const double bound = fabs(sum) * (C::F16 ? 0x1p-11 : 0x1p-8) + 1e-5 * size + 1e-7;
    return fabs(ep_widen(q.saved[r * n + c], C::F16) - sum) <= bound;
}

/* The number of wrong results. inference: what the kernel that saves nothing has written. */
template <typename C>
static uint64_t num_wrong(const Problem &q, const std::vector<uint16_t> &inference) {
    const uint64_t n = q.p.n, cols = ep_gemm_out_cols(&q.p);
    uint64_t wrong = 0;
    for (uint64_t r = 0, e = 0; r < q.p.num_rows; r++) {
        const bool is_owned = r >= ROWS_BEFORE && r < (uint64_t)q.offsets.back();
        while (is_owned && r >= (uint64_t)q.offsets[e + 1]) e++;
        for (uint64_t c = 0; c < n; c++)
            if ((is_owned ? !is_saved<C>(q, e, r, c) : q.saved[r * n + c] != EP_POISON) && wrong++ == 0)
                printf("  saved, row %llu column %llu: got %x\n", (unsigned long long)r,
                       (unsigned long long)c, q.saved[r * n + c]);
        for (uint64_t c = 0; c < cols; c++) {
            const uint16_t got = q.out[r * cols + c], want = inference[r * cols + c];
            if ((got != want || is_owned == (got == EP_POISON)) && wrong++ == 0)
                printf("  row %llu column %llu: got %x, expected %x\n", (unsigned long long)r,
                       (unsigned long long)c, got, want);
        }
    }
    return wrong;
}

template <int BN, int ACTIVATION, bool F16> static bool check(const char *name, const Case &c) {
    constexpr int ACT = EP_ACT_KERNEL(ACTIVATION);
    typedef EpGemmSaveConfig<BN, ACT, F16> C;
    Problem q;
    make_problem<C>(c, ACTIVATION, &q);
    run_pairs<EpGemmConfig<EP_GEMM_FORWARD, BN, ACT, F16>>(&q.p, c.pairs, EpGemmNoHooks());
    const std::vector<uint16_t> inference = q.out;
    q.out.assign(q.out.size(), EP_POISON);
    q.p.saved = q.saved.data();
    q.p.saves = true;
    run_pairs<C>(&q.p, c.pairs, EpGemmNoHooks());
    const bool ok = num_wrong<C>(q, inference) == 0 && q.drawn_tiles == 0;
    printf("%-34s %u experts of %u x %u: %s\n", name, q.p.num_experts, c.n, c.k, ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

/* Experts have no row, one row, half a tile, or slightly more than a tile. n and k are no multiples of a
 * tile. */
static const Case odd = {288, 208, 3, {1, 0, 64, 130, 17}, false};
static const Case full = {256, 448, 1, {128, 0, 70}, true};
static const Case narrow = {96, 80, 2, {16, 33, 0, 200}, true};
static const Case small = {160, 48, 2, {1, 0, 33, 70, 17}, true}; /* for ThreadSanitizer, which is slow */
static const Case small_m = {272, 528, 3, {1, 16, 17, 0, 31, 33, 5, 70, 15}, true};

#define RUN(BN, ACT, F16, CASE) ok = check<BN, ACT, F16>(#BN " " #ACT " " #F16 " " #CASE, CASE) && ok;

static bool run_all(void) {
    bool ok = true;
#ifdef __SANITIZE_THREAD__
    RUN(256, EP_ACT_SWIGLU, false, small)
    RUN(64, EP_ACT_GPT_OSS, false, small)
#else
    RUN(256, EP_ACT_SWIGLU, false, odd)
    RUN(256, EP_ACT_SWIGLU, true, full)
    RUN(256, EP_ACT_SWIGLU, false, narrow)
    RUN(256, EP_ACT_GPT_OSS, false, odd)
    RUN(256, EP_ACT_GPT_OSS, true, full)
    RUN(256, EP_ACT_GPT_OSS, false, narrow)
    RUN(256, EP_ACT_SWIGLU_NUMBERS, false, full)
    RUN(256, EP_ACT_GEGLU_TANH, false, odd)
    RUN(256, EP_ACT_GELU, false, odd)
    RUN(256, EP_ACT_GELU, true, full)
    RUN(256, EP_ACT_RELU2, true, odd)
    RUN(256, EP_ACT_SILU, false, narrow)
    RUN(64, EP_ACT_SWIGLU, false, small_m)
    RUN(64, EP_ACT_GPT_OSS, true, small_m)
    RUN(64, EP_ACT_SWIGLU_PLUS_ONE, false, small_m)
    RUN(64, EP_ACT_GELU, false, small_m)
    RUN(64, EP_ACT_GELU_TANH, true, small_m)
#endif
    return ok;
}

int main(int argc, char **argv) { return gemm_main(argc, argv, run_all); }
