/* test_gemm_save.cpp - compares the GEMM for Hopper that saves gate and up with sums in double.
 *
 * CPU threads emulate the kernel. Inputs are random, and NaN around the rows of the experts. Gate and up must
 * be the product with its bias. The activated rows must be, bit by bit, what follows from the gate and up
 * that were stored. Rows of no expert must not be written. Usage: test_gemm_save [seed] */
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
};

template <typename C> static void make_problem(const Case &c, Problem *q) {
    const uint64_t L = c.sizes.size(), rows = place_experts(c.sizes, &q->offsets);
    fill_rows(q->a, q->offsets, c.k, C::F16);
    fill_all(q->b, L * c.n * c.k, C::F16);
    fill_all(q->bias, L * c.n, C::F16);
    q->saved.assign(rows * c.n, EP_POISON);
    q->out.assign(rows * c.n / 2, EP_POISON);
    q->p = parameters(c, q->offsets, EP_GEMM_FORWARD, C::F16);
    q->p.a = q->a.data();
    q->p.b = q->b.data();
    q->p.bias = c.bias ? q->bias.data() : NULL;
    q->p.saved = q->saved.data();
    q->p.out = q->out.data();
    ep_gemm_set_activation(&q->p, EP_ACT_SWIGLU, 0, 0);
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

template <typename C> static uint64_t num_wrong(const Problem &q) {
    const uint64_t n = q.p.n, inner = n / 2;
    uint64_t wrong = 0;
    for (uint64_t r = 0, e = 0; r < q.p.num_rows; r++) {
        const bool is_owned = r >= ROWS_BEFORE && r < (uint64_t)q.offsets.back();
        while (is_owned && r >= (uint64_t)q.offsets[e + 1]) e++;
        for (uint64_t c = 0; c < n; c++)
            wrong += is_owned ? !is_saved<C>(q, e, r, c) : q.saved[r * n + c] != EP_POISON;
        for (uint64_t c = 0; c < inner; c++) {
            const float gate = ep_widen(q.saved[r * n + c], C::F16);
            const float up = ep_widen(q.saved[r * n + inner + c], C::F16);
            const uint16_t want = is_owned ? ep_round(ep_save_value(gate, up), C::F16) : (uint16_t)EP_POISON;
            if (q.out[r * inner + c] != want && wrong++ == 0)
                printf("  row %llu column %llu: got %x, expected %x\n", (unsigned long long)r,
                       (unsigned long long)c, q.out[r * inner + c], want);
        }
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

/* Experts have no row, one row, half a tile, or slightly more than a tile. n and k are no multiples of a
 * tile. */
static const Case odd = {288, 208, 3, {1, 0, 64, 130, 17}, false};
static const Case full = {256, 448, 1, {128, 0, 70}, true};
static const Case narrow = {96, 80, 2, {16, 33, 0, 200}, true};
static const Case small = {160, 48, 2, {1, 0, 33, 70, 17}, true}; /* for ThreadSanitizer, which is slow */

#define RUN(BN, F16, CASE) ok = check<EpGemmSaveConfig<BN, F16>>(#BN " " #F16 " " #CASE, CASE) && ok;

static bool run_all(void) {
    bool ok = true;
#ifdef __SANITIZE_THREAD__
    RUN(128, false, small)
#else
    RUN(256, false, odd)
    RUN(256, true, full)
    RUN(128, true, odd)
    RUN(128, false, narrow)
    RUN(256, false, small)
#endif
    return ok;
}

int main(int argc, char **argv) { return gemm_main(argc, argv, run_all); }
