/* test_gemm.cpp - compares the grouped GEMM kernel for Hopper with sums in double.
 *
 * CPU threads emulate the kernel, without hooks and with the hooks of a megakernel. Inputs are random. The
 * rows around the rows of the experts are NaN, because a tile may read them but must not use them. The
 * output is poisoned. Rows that belong to no expert must still be poisoned afterwards.
 * Usage: test_gemm [seed] */
#include "gemm_pair.h"
#include "kernels/gemm/gemm_tune.h"

struct Case {
    uint32_t n, k, pairs;
    std::vector<int32_t> sizes;
    bool bias, row_weight;
};

/* The hooks of one thread, as in a megakernel. Rows arrive when the producer waits for them. The hooks
 * count the rows that the kernel writes, and check the order of the calls. */
template <typename C> struct CountingHooks : EpGemmNoHooks {
    static constexpr bool FUSED = true;
    const EpGemmParams *p;
    const uint16_t *rows_to_come;
    uint32_t *counts;       /* for each row, the number of pieces written */
    uint32_t *num_wrong;    /* hook calls in a wrong state, and rows counted before they were written */
    uint32_t *num_finished; /* threads that have called after_last_tile */
    enum { IDLE, STARTED, IN_FLIGHT, WRITES, FINISHED } state;

    void expect(bool right) {
        if (!right) __atomic_fetch_add(num_wrong, 1, __ATOMIC_RELAXED);
    }
    void comm(uint32_t) { expect(false); } /* communication warps are not emulated here */
    void await_rows(const EpGemmTile &t) {
        const uint64_t cols = C::KIND == EP_GEMM_DGRAD ? p->n : p->k;
        const uint64_t from = t.row0 * cols, num = min(t.num_rows, (uint32_t)C::BM) * cols;
        for (uint64_t i = from; i < from + num; i++)
            __atomic_store_n((uint16_t *)p->a + i, rows_to_come[i], __ATOMIC_RELAXED);
    }
    uint64_t tile_started() {
        expect(state == IDLE);
        state = STARTED;
        return 7;
    }
    void mma_in_flight() {
        expect(state == STARTED || state == IN_FLIGHT);
        state = state == STARTED ? IN_FLIGHT : WRITES;
    }
    void tile_written(const EpGemmTile &t, uint32_t group, uint64_t started) {
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t first = 64 * group + threadIdx.x / 32 % 4 * 16;
        const uint32_t out_cols = ep_gemm_out_cols(p);
        const uint32_t col = C::GATED ? t.col0 / 2 : t.col0;
        const uint32_t last_col = min(out_cols, col + 8 * C::OUT_GROUPS);
        expect(started == 7 && state == (64 * group < t.num_rows ? WRITES : IN_FLIGHT));
        state = IDLE;
        __syncwarp();
        if (lane >= 16 || first + lane >= t.num_rows || col >= out_cols) return;
        const uint32_t row = t.row0 + first + lane;
        for (uint32_t c = col; c < last_col; c++)
            expect(((const uint16_t *)p->out)[(uint64_t)row * out_cols + c] != EP_POISON);
        __atomic_fetch_add(&counts[row], 1, __ATOMIC_RELAXED);
    }
    void after_last_tile(uint32_t stages) {
        /* Overwrite the pipeline stages, because no thread may need them now. */
        expect(state == IDLE);
        state = FINISHED;
        for (uint32_t i = threadIdx.x - 128; i < C::STAGES * C::STAGE_BYTES / 16; i += 256)
            ep_st_shared(stages + 16 * i, ~0u, ~0u, ~0u, ~0u);
        __atomic_fetch_add(num_finished, 1, __ATOMIC_RELAXED);
    }
};

static double activated(const EpGemmParams &p, double v, double u) {
    const double gelu_tanh = 0.5 * v * (1 + tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
    const double max_v = std::min(v, (double)p.activation.limit);
    const double max_u = std::max(-(double)p.activation.limit, std::min(u, (double)p.activation.limit));
    switch (p.activation.kind) {
    case EP_ACT_GELU: return v * 0.5 * (1 + erf(v / sqrt(2.0)));
    case EP_ACT_SWIGLU: return v / (1 + exp(-v)) * u;
    case EP_ACT_SWIGLU_NUMBERS: return max_u * max_v / (1 + exp(-p.activation.alpha * max_v));
    case EP_ACT_GPT_OSS:
    case EP_ACT_SWIGLU_PLUS_ONE: return (max_u + 1) * max_v / (1 + exp(-p.activation.alpha * max_v));
    case EP_ACT_GEGLU_TANH: return gelu_tanh * u;
    case EP_ACT_RELU2: return v > 0 ? v * v : 0;
    case EP_ACT_GELU_TANH: return gelu_tanh;
    case EP_ACT_SILU: return v / (1 + exp(-v));
    default: return v;
    }
}

struct Problem {
    EpGemmParams p;
    std::vector<uint16_t> a, b, bias, out;
    std::vector<float> row_weight;
    std::vector<int32_t> offsets;
    uint64_t out_rows, out_cols;

    double a_at(uint64_t i) const { return ep_widen(a[i], p.is_f16); }
    double b_at(uint64_t i) const { return ep_widen(b[i], p.is_f16); }

    /* Return the dot product of output row r (of expert e) and column c. Stores the sum of the absolute
     * values of its terms in *size. */
    double product(uint32_t e, uint64_t r, uint64_t c, double *size) const {
        double sum = 0;
        *size = 0;
        auto add = [&](double x) {
            sum += x;
            *size += fabs(x);
        };
        const uint64_t n = p.n, k = p.k;
        if (p.kind == EP_GEMM_FORWARD)
            for (uint64_t i = 0; i < k; i++) add(a_at(r * k + i) * b_at((e * n + c) * k + i));
        if (p.kind == EP_GEMM_DGRAD)
            for (uint64_t i = 0; i < n; i++) add(a_at(r * n + i) * b_at((e * n + i) * k + c));
        if (p.kind == EP_GEMM_WGRAD)
            for (int32_t i = offsets[e]; i < offsets[e + 1]; i++) add(a_at(i * n + r) * b_at(i * k + c));
        return sum;
    }
    /* Return the expected value of row r and column c of expert e. Stores a bound of the error in *bound. */
    double expected(uint32_t e, uint64_t r, uint64_t c, double *bound) const {
        const bool gated = EP_ACT_IS_GATED(p.activation.kind), mixed = p.activation.kind == EP_ACT_GPT_OSS;
        const uint64_t of_v = gated && mixed ? 2 * c : c, of_u = mixed ? of_v + 1 : of_v + p.n / 2;
        double size_v;
        double size_u = 0;
        double v = product(e, r, of_v, &size_v);
        double u = gated ? product(e, r, of_u, &size_u) : 0;
        if (p.bias) v += ep_widen(bias[e * p.n + of_v], p.is_f16);
        if (p.bias && gated) u += ep_widen(bias[e * p.n + of_u], p.is_f16);
        const double weight = p.row_weight ? row_weight[r] : 1, y = activated(p, v, u) * weight;
        *bound = fabs(y) * (p.is_f16 ? 1e-3 : 8e-3) + 1e-4 +
                 1e-5 * fabs(weight) * (size_v + size_u) * (1 + fabs(v) + fabs(u));
        return y;
    }
};

/* Fill the inputs, poison the output, and set the parameters of a case. */
template <typename C> static void make_problem(const Case &c, uint32_t activation, Problem *q) {
    const uint64_t L = c.sizes.size(), rows = place_experts(c.sizes, &q->offsets);
    const bool forward = C::KIND == EP_GEMM_FORWARD;
    fill_rows(q->a, q->offsets, forward ? c.k : c.n, C::F16);
    if (C::KIND == EP_GEMM_WGRAD) fill_rows(q->b, q->offsets, c.k, C::F16);
    else fill_all(q->b, L * c.n * c.k, C::F16);
    fill_all(q->bias, L * c.n, C::F16);
    for (uint64_t i = 0; i < rows; i++) q->row_weight.push_back((float)uniform(0, 2));
    q->p = parameters(c, q->offsets, C::KIND, C::F16);
    q->p.a = q->a.data();
    q->p.b = q->b.data();
    q->p.bias = forward && c.bias ? q->bias.data() : NULL;
    q->p.row_weight = forward && c.row_weight ? q->row_weight.data() : NULL;
    ep_gemm_set_activation(&q->p, {activation, 1.3f, 0.6f});
    q->out_cols = ep_gemm_out_cols(&q->p);
    q->out_rows = C::KIND == EP_GEMM_WGRAD ? L * c.n : rows;
    q->out.assign(q->out_rows * q->out_cols, EP_POISON);
    q->p.out = q->out.data();
}

/* Run all pairs of CTAs with hooks. The input rows are NaN until the producer waits for them. Returns the
 * number of errors that the hooks have found. */
template <typename C> static uint64_t run_with_hooks(const char *name, const Case &c, const Problem &q) {
    std::vector<uint16_t> arrived(q.a.size(), EP_NOT_A_NUMBER);
    std::vector<uint32_t> counts(q.p.num_rows, 0);
    uint32_t num_bad_calls = 0, num_finished = 0;
    EpGemmParams p = q.p;
    p.a = arrived.data();
    const CountingHooks<C> hooks = {
        {}, &p, q.a.data(), counts.data(), &num_bad_calls, &num_finished, CountingHooks<C>::IDLE};
    run_pairs<C>(&p, c.pairs, hooks);
    num_bad_calls += num_finished != 256 * gridDim.x;
    if (num_bad_calls) printf("  %s: %u hook calls or counts are wrong\n", name, num_bad_calls);

    uint64_t num_wrong = num_bad_calls;
    for (uint32_t r = 0; r < q.p.num_rows; r++) {
        const bool is_owned = r >= ROWS_BEFORE && r < (uint32_t)q.offsets.back();
        const uint32_t pieces = is_owned ? (ep_gemm_num_cols(&q.p) + C::BN - 1) / C::BN : 0;
        if (counts[r] != pieces && num_wrong++ == 0)
            printf("  %s: row %u: %u pieces were counted, expected %u\n", name, r, counts[r], pieces);
    }
    return num_wrong;
}

/* Compare the output with the expected values. *num is the number of rows that belong to an expert. */
template <typename C> static uint64_t check_output(const char *name, const Case &c, const Problem &q,
                                                   uint64_t *num) {
    const bool wgrad = C::KIND == EP_GEMM_WGRAD;
    uint64_t num_wrong = 0;
    std::vector<bool> owned(q.out_rows, false);
    for (uint32_t e = 0; e < c.sizes.size(); e++) {
        const uint64_t first = wgrad ? (uint64_t)e * c.n : (uint64_t)q.offsets[e];
        const uint64_t count = wgrad ? c.n : (uint64_t)c.sizes[e];
        for (uint64_t i = 0; i < count; i++, ++*num) {
            owned[first + i] = true;
            for (uint64_t j = 0; j < q.out_cols; j++) {
                double bound;
                const double want = q.expected(e, wgrad ? i : first + i, j, &bound);
                const double got = ep_widen(q.out[(first + i) * q.out_cols + j], C::F16);
                if (fabs(got - want) <= bound) continue;
                if (num_wrong++ == 0)
                    printf("  %s n %u k %u: expert %u row %llu column %llu: got %g, expected %g\n", name, c.n,
                           c.k, e, (unsigned long long)i, (unsigned long long)j, got, want);
            }
        }
    }
    for (uint64_t r = 0; r < q.out_rows; r++)
        for (uint64_t j = 0; j < q.out_cols && !owned[r]; j++)
            if (q.out[r * q.out_cols + j] != EP_POISON && num_wrong++ == 0)
                printf("  %s: row %llu belongs to no expert, but was written\n", name, (unsigned long long)r);
    return num_wrong;
}

template <typename C, bool HOOKED>
static bool check(const char *name, uint32_t activation, const Case &c) {
    Problem q;
    uint64_t drawn_tiles = 0, num = 0, num_wrong = 0;
    make_problem<C>(c, activation, &q);
    q.p.tile_counter = &drawn_tiles;
    if constexpr (HOOKED) num_wrong = run_with_hooks<C>(name, c, q);
    else run_pairs<C>(&q.p, c.pairs, EpGemmNoHooks());

    /* The GEMM alone resets the tile counter. A megakernel resets it later, so here it has its last value. */
    if ((drawn_tiles != 0) != HOOKED) {
        printf("  %s: the tile counter is %llu, expected %s\n", name, (unsigned long long)drawn_tiles,
               HOOKED ? "another value than 0" : "0");
        num_wrong++;
    }
    num_wrong += check_output<C>(name, c, q, &num);
    printf("%-44s %6llu rows of %4llu: %s\n", name, (unsigned long long)num, (unsigned long long)q.out_cols,
           num_wrong ? "WRONG" : "ok");
    fflush(stdout);
    return num_wrong == 0;
}

/* ---- cases: n, k, pairs of CTAs, rows of the experts, bias, row weights ---- */

/* Experts have no row, one row, half a tile, or slightly more than a tile. n and k are no multiples of a
 * tile. */
static const Case odd = {272, 208, 3, {1, 0, 64, 130, 17}, false, false};
static const Case full = {256, 448, 1, {128, 0, 70}, true, true};
static const Case narrow = {96, 80, 2, {16, 33, 0, 200}, true, false};
static const Case tall = {272, 32, 4, {1100, 5, 700}, false, true};
/* Two row blocks (of rows, or of n). The second one is half empty. */
static const Case even = {160, 272, 2, {5, 0, 192}, false, false};
static const Case small_m = {272, 1040, 3, {1, 16, 17, 0, 31, 33, 5, 70, 100, 15}, true, true};
/* More groups per tile than the mean. So the shared memory is full before a burst of writes is due. */
static const Case crowded = {272, 80, 1, {32, 0, 32, 0, 32, 0}, false, true};
/* For ThreadSanitizer, which is slow. */
static const Case small = {144, 48, 2, {1, 0, 33, 70, 17}, true, true};
static const Case held = {400, 80, 1, {130, 0, 70, 260}, true, true};
static const Case bursts = {272, 48, 1, {32, 0, 32, 0, 32, 0, 9, 24, 8, 1, 16, 17}, false, true};

#define RUN(KIND, BN, ACT, F16, CASE)                                                                        \
    ok = check<EpGemmConfig<KIND, BN, EP_ACT_KERNEL(ACT), F16>, false>(#KIND " " #BN " " #ACT, ACT, CASE) && \
         ok;
#define RUN_HOOKED(KIND, BN, ACT, F16, CASE) \
    ok = check<EpGemmConfig<KIND, BN, EP_ACT_KERNEL(ACT), F16>, true>("hooks " #BN " " #ACT, ACT, CASE) && ok;

#ifdef __SANITIZE_THREAD__
/* One case for each way of writing a tile. ThreadSanitizer reports a missing barrier. */
static bool run_all(void) {
    bool ok = true;
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_NONE, false, bursts)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_SWIGLU, true, small)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_NONE, false, held)
    RUN(EP_GEMM_FORWARD, 192, EP_ACT_NONE, false, small)
    RUN(EP_GEMM_WGRAD, 128, EP_ACT_NONE, false, small)
    RUN(EP_GEMM_DGRAD, 128, EP_ACT_NONE, false, small)
    return ok;
}
#else
static bool run_forward(void) {
    bool ok = true;
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_NONE, false, odd)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_NONE, true, full)
    RUN(EP_GEMM_FORWARD, 192, EP_ACT_NONE, false, odd)
    RUN(EP_GEMM_FORWARD, 128, EP_ACT_NONE, false, narrow)
    RUN(EP_GEMM_FORWARD, 128, EP_ACT_GELU, true, narrow)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU, false, odd)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU, false, full)
    RUN(EP_GEMM_FORWARD, 128, EP_ACT_SWIGLU, true, narrow)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_GPT_OSS, false, full)
    RUN(EP_GEMM_FORWARD, 128, EP_ACT_GPT_OSS, true, odd)
    RUN(EP_GEMM_FORWARD, 128, EP_ACT_NONE, false, tall)
    RUN(EP_GEMM_FORWARD, 128, EP_ACT_GPT_OSS, false, narrow)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_NONE, false, small_m)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_NONE, false, odd)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_NONE, true, tall)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_NONE, false, narrow)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_NONE, false, crowded)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_GELU, true, full)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_SWIGLU, false, small_m)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_SWIGLU, true, narrow)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_GPT_OSS, true, small_m)
    return ok;
}
static bool run_shared_activations(void) {
    bool ok = true;
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU_NUMBERS, false, full)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_GEGLU_TANH, true, odd)
    RUN(EP_GEMM_FORWARD, 128, EP_ACT_SWIGLU_PLUS_ONE, false, narrow)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_SWIGLU_PLUS_ONE, true, small_m)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_GEGLU_TANH, false, narrow)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_RELU2, false, full)
    RUN(EP_GEMM_FORWARD, 256, EP_ACT_SILU, true, odd)
    RUN(EP_GEMM_FORWARD, 128, EP_ACT_GELU_TANH, false, narrow)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_RELU2, true, small_m)
    RUN(EP_GEMM_FORWARD, 64, EP_ACT_GELU_TANH, false, odd)
    return ok;
}
static bool run_backward(void) {
    bool ok = true;
    RUN(EP_GEMM_DGRAD, 256, EP_ACT_NONE, false, odd)
    RUN(EP_GEMM_DGRAD, 192, EP_ACT_NONE, true, odd)
    RUN(EP_GEMM_DGRAD, 128, EP_ACT_NONE, false, narrow)
    RUN(EP_GEMM_WGRAD, 256, EP_ACT_NONE, false, odd)
    RUN(EP_GEMM_WGRAD, 192, EP_ACT_NONE, true, odd)
    RUN(EP_GEMM_WGRAD, 128, EP_ACT_NONE, false, narrow)
    RUN(EP_GEMM_DGRAD, 128, EP_ACT_NONE, false, odd)
    RUN(EP_GEMM_WGRAD, 128, EP_ACT_NONE, true, odd)
    RUN(EP_GEMM_WGRAD, 128, EP_ACT_NONE, false, even)
    RUN(EP_GEMM_DGRAD, 256, EP_ACT_NONE, false, even)
    return ok;
}
/* The scheduler finds the tiles of few rows, whatever tiles a pair of CTAs draws, and after the last one it
 * has counted them all. Most experts have no rows, one row block, or two. Offsets may be wrong, too: they
 * fall, or go beyond the rows. */
static bool find_tiles(void) {
    const uint32_t bm = 32, bn = 64, num_n = 3, num_experts = 1 + ep_random() % 60, empty = ep_random() % 8;
    std::vector<int32_t> sizes, offsets;
    std::vector<EpGemmTile> wanted; /* where each tile begins */
    for (uint32_t e = 0; e < num_experts; e++)
        sizes.push_back(ep_random() % 8 < empty ? 0 : (int32_t)(ep_random() % (ep_random() % 6 ? 8 : 70)));
    place_experts(sizes, &offsets);
    const Case c = {bn * num_n, 64, 1, sizes};
    EpGemmParams p = parameters(c, offsets, EP_GEMM_FORWARD, false);
    if (ep_random() % 4 == 0) p.num_rows = ep_random() % p.num_rows;
    for (uint32_t i = ep_random() % 4 ? 0 : 5; i; i--)
        offsets[ep_random() % offsets.size()] = ep_random() % 2 ? (int32_t)ep_random() : ep_random() % 90;
    for (uint32_t e = 0; e < num_experts; e++) {
        const uint32_t row0 = ep_gemm_clamp_row(&p, offsets[e]), end = ep_gemm_clamp_row(&p, offsets[e + 1]);
        const uint32_t num_m = end > row0 ? (end - row0 + bm - 1) / bm : 0, num_pairs = num_m / 2;
        for (uint32_t i = 0; i < num_pairs * num_n + num_m % 2 * ((num_n + 1) / 2); i++)
            wanted.push_back({e, row0 + (i < num_pairs * num_n ? 0 : num_pairs * 2 * bm)});
    }
    EpGemmTileScheduler sched = {};
    EpGemmTile tile = {};
    uint32_t t = ep_random() % 9;
    ep_tile_scheduler_enter(&p, bm, 2, &sched);
    for (; ep_gemm_tile(&p, bm, bn, 2, 0, &sched, t, &tile); t += 1 + ep_random() % 20)
        if (t >= wanted.size() || tile.expert != wanted[t].expert || tile.row0 < wanted[t].row0) return false;
    return t >= wanted.size() && sched.first_tile == wanted.size();
}
static bool run_scheduler(void) {
    uint32_t num_wrong = 0;
    for (uint32_t i = 0; i < 20000; i++) num_wrong += !find_tiles();
    printf("tiles of few rows: %s\n", num_wrong ? "WRONG" : "ok");
    return num_wrong == 0;
}
static bool run_hooked(void) {
    bool ok = true;
    RUN_HOOKED(EP_GEMM_FORWARD, 256, EP_ACT_NONE, false, odd)
    RUN_HOOKED(EP_GEMM_FORWARD, 192, EP_ACT_NONE, true, full)
    RUN_HOOKED(EP_GEMM_FORWARD, 128, EP_ACT_NONE, false, tall)
    RUN_HOOKED(EP_GEMM_FORWARD, 128, EP_ACT_NONE, false, small_m)
    RUN_HOOKED(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU, false, full)
    RUN_HOOKED(EP_GEMM_FORWARD, 128, EP_ACT_SWIGLU, true, narrow)
    RUN_HOOKED(EP_GEMM_FORWARD, 192, EP_ACT_NONE, false, odd)
    RUN_HOOKED(EP_GEMM_FORWARD, 128, EP_ACT_GPT_OSS, true, odd)
    RUN_HOOKED(EP_GEMM_FORWARD, 256, EP_ACT_SWIGLU_PLUS_ONE, false, odd)
    RUN_HOOKED(EP_GEMM_FORWARD, 128, EP_ACT_RELU2, true, odd)
    RUN_HOOKED(EP_GEMM_DGRAD, 256, EP_ACT_NONE, false, odd)
    RUN_HOOKED(EP_GEMM_DGRAD, 192, EP_ACT_NONE, true, even)
    RUN_HOOKED(EP_GEMM_DGRAD, 128, EP_ACT_NONE, false, narrow)
    return ok;
}
static bool run_all(void) {
    const bool forward = run_forward(), shared = run_shared_activations(), backward = run_backward(),
               hooked = run_hooked(), scheduler = run_scheduler();
    return forward && shared && backward && hooked && scheduler;
}
#endif

int main(int argc, char **argv) { return gemm_main(argc, argv, run_all); }
