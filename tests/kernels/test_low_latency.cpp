/* test_low_latency.cpp - compares the CUDA kernels of low-latency dispatch and combine with the CPU backend.
 *
 * All bits must be the same. CPU threads emulate the kernels, on several ranks with several CTAs.
 * Usage: test_low_latency [seed [CTAs per rank]] */
#include "stages.h"

#include "kernels/low_latency/low_latency.cu"

extern "C" {
void ep_cpu_ll_dispatch(const EpLlDispatchParams *p, uint32_t worker, uint32_t num_workers);
void ep_cpu_ll_combine(const EpLlCombineParams *p, uint32_t worker, uint32_t num_workers);
}

enum { NUM_ROUNDS = 3 };

/* How a case calls the operations. */
struct Calls {
    uint32_t is_masked, fp8, halves, returns_fp8;
};

/* The outputs of a round on one backend. */
struct Results {
    unsigned char *rows, *sums;
    float *scales;
    int32_t *handle, *counts, *row_tag;
};

struct Test {
    Problem q;
    Calls calls;
    uint32_t scale_line;
    Results results[2][MAX_RANKS][NUM_ROUNDS]; /* [0]: CPU backend, [1]: kernels */

    Test(const Case *c, Calls the_calls) : q(c), calls(the_calls) {
        const EpShape &s = c->shape;
        const uint64_t L = ep_num_local_experts(&s), num_rows = ep_ll_num_rows(&s, calls.is_masked);
        const uint64_t slabs = calls.is_masked ? L : 1;
        scale_line = (uint32_t)ep_align_u64(num_rows / slabs, 4);
        for (auto &backend : results)
            for (uint32_t r = 0; r < s.num_ranks; r++)
                for (Results &to : backend[r])
                    to = {(unsigned char *)poisoned(num_rows * q.layout.row_bytes),
                          (unsigned char *)poisoned(c->num_tokens[r] * q.layout.row_bytes),
                          (float *)poisoned(4 * slabs * (s.hidden / EP_FP8_GROUP) * scale_line),
                          (int32_t *)poisoned(4 * ep_ll_handle(&s).num_words),
                          (int32_t *)poisoned(4 * L),
                          (int32_t *)poisoned(4 * num_rows)};
    }
    EpLlDispatchParams dispatch(uint32_t backend, uint32_t r, uint32_t round, uint32_t parts) const {
        const Rank &k = q.rank[r];
        const Results &to = results[backend][r][round];
        EpLlDispatchParams p = {};
        p.comm = q.comm(backend ? q.gpu : q.cpu, r);
        p.x = k.every_x;
        p.indices = k.idx + (uint64_t)round * k.num_tokens * q.c->shape.num_topk;
        p.weight = q.c->weighted ? k.weight : NULL;
        p.tag = k.tag;
        p.row_tag = q.c->shape.num_topk < EP_MAX_TOPK ? to.row_tag : NULL;
        p.handle = to.handle;
        p.rows = to.rows;
        p.scales = calls.fp8 ? (void *)to.scales : NULL;
        p.counts = to.counts;
        p.num_tokens = k.num_tokens;
        p.index_bytes = 8;
        p.scale_line = scale_line;
        p.is_masked = calls.is_masked;
        p.fp8 = calls.fp8;
        p.parts = parts;
        return p;
    }
    EpLlCombineParams combine(uint32_t backend, uint32_t r, uint32_t round, uint32_t parts) const {
        const Results &to = results[backend][r][round];
        EpLlCombineParams p = {};
        p.comm = q.comm(backend ? q.gpu : q.cpu, r);
        p.rows = q.rank[r].y;
        p.handle = to.handle;
        p.out = to.sums;
        p.num_tokens = q.rank[r].num_tokens;
        p.is_masked = calls.is_masked;
        p.fp8 = calls.returns_fp8;
        p.parts = parts;
        return p;
    }
    void run_cpu_rank(uint32_t r) const {
        for (uint32_t i = 0; i < NUM_ROUNDS; i++) {
            const EpLlDispatchParams d = dispatch(0, r, i, EP_LL_BOTH);
            ep_cpu_ll_dispatch(&d, 0, 1);
            const EpLlCombineParams k = combine(0, r, i, EP_LL_BOTH);
            ep_cpu_ll_combine(&k, 0, 1);
        }
    }
    Kernel dispatch_kernel(uint32_t parts) const {
        return [this, parts](uint32_t r, uint32_t i) {
            const EpLlDispatchParams d = dispatch(1, r, i, parts);
            return ep_launch_ll_dispatch(&d, num_sm, NULL);
        };
    }
    Kernel combine_kernel(uint32_t parts) const {
        return [this, parts](uint32_t r, uint32_t i) {
            const EpLlCombineParams k = combine(1, r, i, parts);
            return ep_launch_ll_combine(&k, num_sm, NULL);
        };
    }
    bool run_kernels() const {
        const Kernel whole[] = {dispatch_kernel(EP_LL_BOTH), combine_kernel(EP_LL_BOTH)};
        const Kernel halves[] = {dispatch_kernel(EP_LL_SEND), dispatch_kernel(EP_LL_RECEIVE),
                                 combine_kernel(EP_LL_SEND), combine_kernel(EP_LL_RECEIVE)};
        return calls.halves ? run_ctas(q, NUM_ROUNDS, halves) : run_ctas(q, NUM_ROUNDS, whole);
    }
};

/* Rows and scales of the experts. What is after an expert's last row is not defined. */
static bool same_rows(const Test &t, uint32_t r, uint32_t round) {
    const EpShape &s = t.q.c->shape;
    const Results &a = t.results[0][r][round], &b = t.results[1][r][round];
    const uint64_t num_bytes = t.calls.fp8 ? s.hidden : t.q.layout.row_bytes;
    const uint64_t lines = t.calls.fp8 ? ep_ll_scale_lines(&s, t.calls.fp8) : 0;
    uint32_t first = 0;
    bool ok = true;
    for (uint32_t e = 0; e < ep_num_local_experts(&s); first += (uint32_t)a.counts[e++])
        for (uint32_t i = 0; i < (uint32_t)a.counts[e]; i++) {
            const uint64_t row = ep_ll_row(&s, t.calls.is_masked, e, first, i);
            ok = same("a row", r, round, a.rows + row * num_bytes, b.rows + row * num_bytes, num_bytes) && ok;
            ok = same("a tag", r, round, a.row_tag + row, b.row_tag + row, 4) && ok;
            for (uint64_t g = 0; g < lines; g++) {
                const uint64_t line = t.calls.is_masked ? e * lines + g : g;
                const uint64_t at = line * t.scale_line + (t.calls.is_masked ? i : row);
                ok = same("a scale", r, round, a.scales + at, b.scales + at, 4) && ok;
            }
        }
    return ok;
}

static bool same_handle(const Test &t, uint32_t r, uint32_t round) {
    const EpShape &s = t.q.c->shape;
    const EpLlHandle h = ep_ll_handle(&s);
    const int32_t *a = t.results[0][r][round].handle, *b = t.results[1][r][round].handle;
    bool ok =
        same("the head of the handle", r, round, a, b, 4 * (EP_LL_ID + 1)) &&
        same("the sources", r, round, a + EP_LL_SOURCES, b + EP_LL_SOURCES, 4 * s.num_ranks) &&
        same("the targets", r, round, a + h.targets_off, b + h.targets_off, 4ull * t.q.rank[r].num_tokens);
    if (!t.calls.is_masked)
        ok = same("the offsets", r, round, a + h.offsets_off, b + h.offsets_off,
                  4ull * (ep_num_local_experts(&s) + 1)) &&
             ok;
    for (uint32_t w = 0; w < s.num_ranks; w++) {
        const uint64_t rows = h.rows_off + ep_ll_choices_at(&s, w, 0);
        ok = same("the rows of choices", r, round, a + rows, b + rows,
                  4ull * t.q.c->num_tokens[w] * s.num_topk) &&
             ok;
    }
    return ok;
}

static bool check(const Case *c, Calls calls) {
    const Test t(c, calls);
    const EpShape &s = c->shape;
    std::vector<std::thread> ranks;
    for (uint32_t r = 0; r < s.num_ranks; r++) ranks.emplace_back([&t, r] { t.run_cpu_rank(r); });
    for (std::thread &rank : ranks) rank.join();
    bool ok = t.run_kernels();
    for (uint32_t r = 0; r < s.num_ranks; r++) {
        const EpFaultRecord &f = t.q.cpu.host[r]->fault, &g = t.q.gpu.host[r]->fault;
        ok = same("the fault record", r, 0, &f, &g, sizeof f) && ok;
        for (uint32_t i = 0; i < NUM_ROUNDS; i++) {
            const Results &a = t.results[0][r][i], &b = t.results[1][r][i];
            ok = same("the counts", r, i, a.counts, b.counts, 4ull * ep_num_local_experts(&s)) && ok;
            ok = same("the sums", r, i, a.sums, b.sums, c->num_tokens[r] * t.q.layout.row_bytes) && ok;
            if (!f.state) ok = same_rows(t, r, i) && same_handle(t, r, i) && ok;
        }
    }
    printf("%-40s %s\n", c->name, ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

/* The shape: ranks, experts, topk, max tokens, hidden, dtype, mode, capacity. Then the numbers of tokens. */
static const struct {
    Case c;
    Calls calls;
} cases[] = {
    {{"compact, bfloat16", {2, 8, 4, 20, 24, EP_BF16, EP_LOW_LATENCY, 160}, {20, 17}, 0}, {0, 0, 0, 0}},
    {{"masked, float16, halves", {2, 4, 2, 33, 136, EP_F16, EP_LOW_LATENCY, 132}, {33, 5}, 0}, {1, 0, 1, 0}},
    {{"float32, a rank without tokens", {3, 6, 3, 9, 516, EP_F32, EP_LOW_LATENCY, 54}, {9, 0, 4}, 0},
     {0, 0, 0, 0}},
    {{"rows of two pieces, FP8", {2, 4, 2, 7, 640, EP_BF16, EP_LOW_LATENCY, 28}, {7, 6}, 0},
     {0, EP_FP8_SCALED, 0, 0}},
    {{"FP8 on both ways", {3, 6, 4, 7, 640, EP_BF16, EP_LOW_LATENCY, 84}, {7, 0, 6}, 0},
     {0, EP_FP8_SCALED, 0, EP_FP8_SCALED}},
    {{"FP8 only on the way back, halves", {2, 4, 2, 9, 1152, EP_F16, EP_LOW_LATENCY, 36}, {9, 7}, 0},
     {1, 0, 1, EP_FP8_SCALED}},
    {{"FP8, powers of two, halves", {2, 4, 2, 7, 256, EP_F16, EP_LOW_LATENCY, 28}, {5, 7}, 0},
     {0, EP_FP8_POW2, 1, 0}},
    {{"FP8, scales in bytes, masked", {2, 4, 2, 7, 1024, EP_BF16, EP_LOW_LATENCY, 28}, {6, 7}, 0},
     {1, EP_FP8_UE8M0, 0, 0}},
    {{"more routes than early ones", {3, 6, 4, 64, 8, EP_BF16, EP_LOW_LATENCY, 384}, {64, 3, 61}, 0},
     {0, 0, 0, 0}},
    {Case{"more routes, an index out of range", {2, 8, 8, 70, 8, EP_BF16, EP_LOW_LATENCY, 560}, {65, 70}, 0}
         .with_bad_index(1),
     {1, 0, 0, 0}},
    {{"one rank", {1, 3, 4, 12, 8, EP_BF16, EP_LOW_LATENCY, 36}, {12}, 0}, {0, 0, 0, 0}},
    {{"32 choices, more experts than threads", {1, 200, 32, 3, 8, EP_BF16, EP_LOW_LATENCY, 96}, {3}, 0},
     {0, 0, 0, 0}},
    {{"31 choices, which leave a lane for the tag",
      {2, 40, 31, 3, 24, EP_BF16, EP_LOW_LATENCY, 186},
      {3, 2},
      0},
     {0, 0, 0, 0}},
    {Case{"an index out of range", {2, 4, 2, 16, 16, EP_BF16, EP_LOW_LATENCY, 64}, {16, 9}, 0}.with_bad_index(
         1),
     {0, 0, 0, 0}},
    {Case{"without weights", {2, 4, 2, 16, 16, EP_BF16, EP_LOW_LATENCY, 64}, {16, 9}, 0}.unweighted(),
     {0, 0, 0, 0}},
    {{"by choice, bfloat16", {3, 9, 5, 13, 536, EP_BF16, EP_LOW_LATENCY_SCATTER, 117}, {13, 0, 8}, 0},
     {0, 0, 0, 0}},
    {{"by choice, FP8, masked, halves", {2, 4, 2, 7, 640, EP_F16, EP_LOW_LATENCY_SCATTER, 28}, {7, 6}, 0},
     {1, EP_FP8_SCALED, 1, 0}},
    {{"by choice, float32, 32 choices", {1, 200, 32, 3, 8, EP_F32, EP_LOW_LATENCY_SCATTER, 96}, {3}, 0},
     {0, 0, 0, 0}},
    {Case{"by choice, an index out of range",
          {2, 4, 2, 16, 16, EP_BF16, EP_LOW_LATENCY_SCATTER, 64},
          {16, 9},
          0}
         .with_bad_index(1),
     {0, 0, 0, 0}},
};

int main(int argc, char **argv) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    if (argc > 2) num_sm = (uint32_t)atoi(argv[2]);
    bool ok = true;
    for (const auto &one : cases) ok = check(&one.c, one.calls) && ok;
    puts(ok ? "ok" : "FAILED");
    return !ok;
}
