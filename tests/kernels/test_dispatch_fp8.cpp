/* test_dispatch_fp8.cpp - compares the CUDA kernel of dispatch in FP8 with the CPU backend, bit by bit.
 *
 * CPU threads emulate the kernel, as in test_stages.cpp. Scales are random bits.
 * Usage: test_dispatch_fp8 [seed [CTAs per rank]] */
#include "stages.h"

#include "kernels/stage/dispatch.cu"
#include "kernels/stage/plan.cu"

extern "C" void ep_cpu_dispatch_fp8(const EpDispatchFp8Params *p, uint32_t worker, uint32_t num_workers);

enum { NUM_ROUNDS = 2 };

/* The scales of a problem: of the inputs, in an order of its own for every other rank, and of the rows. */
struct Scales {
    const Problem &q;
    uint32_t num_groups;
    uint64_t line;
    float *input[MAX_RANKS], *rows[2][MAX_RANKS][NUM_ROUNDS];

    explicit Scales(const Problem &problem) : q(problem) {
        num_groups = ep_ceil_div_u32(q.c->shape.hidden, EP_FP8_GROUP);
        line = ep_align_u64(q.c->shape.capacity, 4);
        for (uint32_t r = 0; r < q.c->shape.num_ranks; r++) {
            const uint64_t num = (uint64_t)q.rank[r].num_tokens * num_groups;
            fill(input[r] = (float *)shared(4 * num), 4 * num);
            for (uint32_t b = 0; b < 2; b++)
                for (uint32_t i = 0; i < NUM_ROUNDS; i++)
                    rows[b][r][i] = (float *)poisoned(4 * num_groups * line);
        }
    }
    EpDispatchFp8Params dispatch(uint32_t backend, uint32_t r, uint32_t round) const {
        const bool by_group = r % 2;
        EpDispatchFp8Params p = {};
        p.dispatch = q.dispatch(backend ? q.gpu : q.cpu, r, round);
        p.dispatch.comm.layout.row_bytes = q.c->shape.hidden;
        p.scales.x = input[r];
        p.scales.x_row = by_group ? 1 : num_groups;
        p.scales.x_group = by_group ? q.rank[r].num_tokens : 1;
        p.scales.rows = rows[backend][r][round];
        p.scales.line = line;
        p.scales.num_groups = num_groups;
        return p;
    }
};

static void run_cpu_fp8(const Problem &q, const Scales &s) {
    std::vector<std::thread> ranks;
    for (uint32_t r = 0; r < q.c->shape.num_ranks; r++)
        ranks.emplace_back([&, r] {
            for (uint32_t i = 0; i < NUM_ROUNDS; i++) {
                const EpPlanParams plan = q.plan(q.cpu, r, i);
                ep_cpu_plan(&plan);
                const EpDispatchFp8Params d = s.dispatch(0, r, i);
                ep_cpu_dispatch_fp8(&d, 0, 1);
            }
        });
    for (std::thread &t : ranks) t.join();
}

static bool check(const Case *c) {
    const Problem q(c);
    const Scales s(q);
    run_cpu_fp8(q, s);
    const Kernel kernels[] = {
        [&](uint32_t r, uint32_t i) {
            const EpPlanParams plan = q.plan(q.gpu, r, i);
            return ep_launch_plan(&plan, NULL);
        },
        [&](uint32_t r, uint32_t i) {
            const EpDispatchFp8Params d = s.dispatch(1, r, i);
            ep_few_chunks = (r + i) % 2 ? 1000 : 0; /* both ways of moving chunks; see test_stages.cpp */
            return ep_launch_dispatch_fp8(&d, num_sm, NULL);
        },
    };
    bool ok = run_ctas(q, NUM_ROUNDS, kernels);
    for (uint32_t r = 0; r < c->shape.num_ranks; r++) {
        const EpFaultRecord &f = q.cpu.host[r]->fault, &g = q.gpu.host[r]->fault;
        ok = same("the fault record", r, 0, &f, &g, sizeof f) && ok;
        for (uint32_t i = 0; i < NUM_ROUNDS; i++) {
            const Out &a = q.cpu.out[r][i], &b = q.gpu.out[r][i];
            const uint64_t num_rows = q.rank[r].num_rows;
            bool has_plan;
            ok = same_plan(q, r, i, &has_plan) && ok;
            if (!has_plan) continue;
            ok = same("recv", r, i, a.recv, b.recv, 4 * q.recv_words) && ok;
            ok = same("the rows", r, i, a.rows, b.rows, num_rows * c->shape.hidden) && ok;
            ok = same("the row weights", r, i, a.row_weight, b.row_weight, 4 * num_rows) && ok;
            for (uint32_t group = 0; group < s.num_groups; group++)
                ok = same("the scales", r, i, s.rows[0][r][i] + group * s.line,
                          s.rows[1][r][i] + group * s.line, 4 * num_rows) &&
                     ok;
        }
    }
    printf("%-40s %s\n", c->name, ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

/* As in test_stages.cpp. */
static const Case cases[] = {
    {"more than 32 groups, few slots", {2, 8, 4, 6, 4240, EP_BF16, EP_COMBINE_LOCAL, 60}, {6, 5}, 1},
    {"a rank without tokens", {3, 6, 3, 20, 272, EP_BF16, EP_COMBINE_SCATTER, 200}, {13, 0, 20}, 0},
    {"one group, float32", {2, 4, 2, 33, 16, EP_F32, EP_COMBINE_GATHER, 140}, {33, 5}, 0},
    {"32 choices", {2, 64, 32, 9, 128, EP_F16, EP_COMBINE_LOCAL, 600}, {9, 7}, 0},
    {"one rank", {1, 3, 4, 12, 400, EP_BF16, EP_COMBINE_LOCAL, 48}, {12}, 0},
    Case{"without weights", {2, 8, 8, 40, 32, EP_BF16, EP_COMBINE_LOCAL, 700}, {40, 37}, 0}.unweighted(),
    Case{"padded", {3, 12, 3, 20, 144, EP_BF16, EP_COMBINE_SCATTER, 400}, {13, 0, 20}, 0}.with_padding(16, 0),
    Case{"a capacity for each expert", {2, 6, 2, 9, 528, EP_F16, EP_COMBINE_GATHER, 108}, {9, 6}, 0}
        .with_padding(36, 1),
    Case{"an index out of range", {2, 4, 2, 16, 16, EP_BF16, EP_COMBINE_LOCAL, 64}, {16, 9}, 1}
        .with_bad_index(1),
    Case{"fewer rows than the plan has", {2, 4, 2, 16, 32, EP_BF16, EP_COMBINE_LOCAL, 64}, {16, 9}, 0}
        .with_short_rows(1),
};

int main(int argc, char **argv) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    if (argc > 2) num_sm = (uint32_t)atoi(argv[2]);
    bool ok = true;
    for (const Case &c : cases) ok = check(&c) && ok;
    return ok ? 0 : 1;
}
