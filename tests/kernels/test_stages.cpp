/* test_stages.cpp - compares the CUDA kernels of plan, dispatch and combine with the CPU backend, bit by bit.
 *
 * CPU threads emulate the kernels, on several ranks with several CTAs.
 * Usage: test_stages [seed [CTAs per rank]] */
#include "stages.h"

#include "kernels/stage/combine.cu"
#include "kernels/stage/dispatch.cu"
#include "kernels/stage/plan.cu"

enum { NUM_ROUNDS = 2 };

/* Each rank moves chunks in both ways (few_tokens.cuh), one in each round. Its peer does the other. */
static void choose_few(uint32_t r, uint32_t round) { ep_few_chunks = (r + round) % 2 ? 1000 : 0; }

static bool check(const Case *c) {
    const Problem q(c);
    run_cpu(q, NUM_ROUNDS);
    const Kernel kernels[] = {
        [&](uint32_t r, uint32_t i) {
            const EpPlanParams plan = q.plan(q.gpu, r, i);
            return ep_launch_plan(&plan, NULL);
        },
        [&](uint32_t r, uint32_t i) {
            const EpDispatchParams d = q.dispatch(q.gpu, r, i);
            choose_few(r, i);
            return ep_launch_dispatch(&d, &no_scales, num_sm, NULL);
        },
        [&](uint32_t r, uint32_t i) {
            const EpCombineParams k = q.combine(q.gpu, r, i);
            choose_few(r, i);
            return ep_launch_combine(&k, num_sm, NULL);
        },
    };
    bool ok = run_ctas(q, NUM_ROUNDS, kernels);
    for (uint32_t r = 0; r < c->shape.num_ranks; r++) {
        const EpFaultRecord &f = q.cpu.host[r]->fault, &g = q.gpu.host[r]->fault;
        ok = same("the fault record", r, 0, &f, &g, sizeof f) && ok;
        ok = same("the host's counts", r, 0, q.cpu.host[r]->expert_choices, q.gpu.host[r]->expert_choices,
                  sizeof q.cpu.host[r]->expert_choices) &&
             ok;
        for (uint32_t i = 0; i < NUM_ROUNDS; i++) {
            const Out &a = q.cpu.out[r][i], &b = q.gpu.out[r][i];
            bool has_plan;
            ok = same_plan(q, r, i, &has_plan) && ok;
            if (!has_plan) continue;
            ok = same("recv", r, i, a.recv, b.recv, 4 * q.recv_words) && ok;
            ok = same("the rows", r, i, a.rows, b.rows, q.rank[r].num_rows * q.layout.row_bytes) && ok;
            ok = same("the row weights", r, i, a.row_weight, b.row_weight, 4ull * q.rank[r].num_rows) && ok;
            ok = same_tags(q, r, i) && ok;
            ok = same("the sums", r, i, a.sums, b.sums, c->num_tokens[r] * q.layout.row_bytes) && ok;
            ok = same("the scalars", r, i, a.scalars, b.scalars,
                      4ull * c->num_tokens[r] * c->shape.num_topk) &&
                 ok;
        }
    }
    printf("%-40s %s\n", c->name, ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

/* The shape: ranks, experts, topk, max tokens, hidden, dtype, combine mode, capacity. Then the numbers of
 * tokens, and whether the plan sorts the slots. */
static const Case cases[] = {
    {"local, bfloat16, two CTAs of plan", {2, 8, 8, 40, 24, EP_BF16, EP_COMBINE_LOCAL, 700}, {40, 37}, 0},
    {"scatter, float32, a rank without tokens",
     {3, 6, 3, 20, 12, EP_F32, EP_COMBINE_SCATTER, 200},
     {13, 0, 20},
     0},
    {"gather, float16", {2, 4, 2, 33, 136, EP_F16, EP_COMBINE_GATHER, 140}, {33, 5}, 0},
    {"17 choices, one token per round of plan",
     {2, 34, 17, 24, 8, EP_BF16, EP_COMBINE_LOCAL, 800},
     {24, 21},
     0},
    {"32 choices", {2, 64, 32, 9, 4, EP_F32, EP_COMBINE_SCATTER, 600}, {9, 7}, 0},
    {"200 experts, two counts per thread", {2, 200, 3, 40, 8, EP_BF16, EP_COMBINE_LOCAL, 240}, {40, 33}, 0},
    {"warps share long rows, local", {2, 8, 5, 13, 1000, EP_BF16, EP_COMBINE_LOCAL, 130}, {13, 10}, 0},
    {"warps share long rows, scatter", {3, 6, 3, 9, 300, EP_F32, EP_COMBINE_SCATTER, 90}, {9, 0, 7}, 1},
    {"warps share long rows, gather", {2, 4, 2, 9, 520, EP_F16, EP_COMBINE_GATHER, 40}, {9, 6}, 0},
    {"one rank", {1, 3, 4, 12, 8, EP_BF16, EP_COMBINE_LOCAL, 48}, {12}, 0},
    {"sorted, local, two CTAs of plan", {2, 8, 8, 40, 24, EP_BF16, EP_COMBINE_LOCAL, 700}, {40, 37}, 1},
    {"sorted, scatter, a rank without tokens",
     {3, 6, 3, 20, 12, EP_F32, EP_COMBINE_SCATTER, 200},
     {13, 0, 20},
     1},
    {"sorted, gather, many rounds of plan", {2, 4, 2, 211, 8, EP_F16, EP_COMBINE_GATHER, 850}, {211, 150}, 1},
    {"sorted, 17 choices", {2, 34, 17, 24, 8, EP_BF16, EP_COMBINE_LOCAL, 800}, {24, 21}, 1},
    {"sorted, 32 choices", {2, 64, 32, 9, 4, EP_F32, EP_COMBINE_LOCAL, 600}, {9, 7}, 1},
    {"sorted, one expert per rank", {3, 3, 3, 30, 8, EP_BF16, EP_COMBINE_LOCAL, 270}, {30, 17, 29}, 1},
    {"sorted, one rank", {1, 3, 4, 12, 8, EP_BF16, EP_COMBINE_LOCAL, 48}, {12}, 1},
    Case{"a bias, local, sums by choice", {3, 9, 5, 20, 520, EP_BF16, EP_COMBINE_LOCAL, 400}, {13, 0, 20}, 1}
        .with_sums(1, 1),
    Case{"sums by choice, local, float32", {3, 9, 8, 20, 12, EP_F32, EP_COMBINE_LOCAL, 500}, {13, 5, 20}, 0}
        .with_sums(0, 1),
    Case{
        "two biases and 32 choices, scatter", {2, 64, 32, 9, 136, EP_F32, EP_COMBINE_SCATTER, 600}, {9, 7}, 0}
        .with_drops(0)
        .with_sums(2, 0),
    Case{"two biases, local, one rank", {1, 3, 4, 12, 8, EP_F16, EP_COMBINE_LOCAL, 48}, {12}, 0}.with_sums(2,
                                                                                                           0),
    Case{"two biases, gather", {2, 4, 2, 33, 136, EP_F16, EP_COMBINE_GATHER, 140}, {33, 5}, 0}.with_sums(2,
                                                                                                         0),
    Case{"padded, scatter", {3, 12, 3, 20, 12, EP_F32, EP_COMBINE_SCATTER, 400}, {13, 0, 20}, 0}.with_padding(
        16, 0),
    Case{"padded, 70 experts per rank, counts for the host",
         {2, 140, 3, 20, 136, EP_BF16, EP_COMBINE_LOCAL, 900},
         {20, 17},
         1}
        .with_padding(6, 0)
        .with_host_counts(),
    Case{"a capacity for each expert, gather", {2, 6, 2, 9, 520, EP_F16, EP_COMBINE_GATHER, 108}, {9, 6}, 0}
        .with_padding(36, 1)
        .with_host_counts(),
    Case{"one row for each expert", {1, 8, 1, 1, 8, EP_BF16, EP_COMBINE_LOCAL, 8}, {1}, 1}.with_padding(1, 1),
    Case{"counts for the host", {2, 8, 8, 40, 24, EP_BF16, EP_COMBINE_LOCAL, 700}, {40, 37}, 0}
        .with_host_counts(),
    Case{"more rows than the capacity of an expert",
         {2, 4, 4, 16, 16, EP_BF16, EP_COMBINE_LOCAL, 40},
         {16, 16},
         1}
        .with_padding(20, 1),
    Case{"an index out of range", {2, 4, 2, 16, 16, EP_BF16, EP_COMBINE_LOCAL, 64}, {16, 9}, 1}
        .with_bad_index(1),
    {"more rows than the capacity", {2, 4, 4, 16, 16, EP_BF16, EP_COMBINE_LOCAL, 20}, {16, 16}, 1},
    Case{"fewer rows than the plan has", {2, 4, 2, 16, 16, EP_BF16, EP_COMBINE_LOCAL, 64}, {16, 9}, 0}
        .with_short_rows(1),
};

int main(int argc, char **argv) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    if (argc > 2) num_sm = (uint32_t)atoi(argv[2]);
    bool ok = true;
    for (const Case &c : cases) ok = check(&c) && ok;
    puts(ok ? "ok" : "FAILED");
    return !ok;
}
