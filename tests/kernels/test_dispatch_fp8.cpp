/* test_dispatch_fp8.cpp - compares the CUDA kernel of dispatch in FP8 with the CPU backend, bit by bit.
 *
 * CPU threads emulate the kernel, as in test_stages.cpp. Scales are random bits. The communication warps of
 * the megakernel dispatch + GEMM in FP8 are compared, too: another thread reads the rows and the scales of a
 * row block when its ready counter is complete.
 * Usage: test_dispatch_fp8 [seed [CTAs per rank]] */
#include "stages.h"

#include "kernels/stage/dispatch.cu"
#include "kernels/stage/plan.cu"

/* The parameters of a dispatch in FP8. */
struct DispatchInFp8 {
    EpDispatchParams dispatch;
    EpScales scales;
};
static constexpr uint32_t FUSED_OP = EP_OP_WORD(EP_OP_DISPATCH_GEMM, EP_IN_FP8);

enum { NUM_ROUNDS = 2 };

/* The scales of a problem: of the inputs, in an order of its own for every other rank, and of the rows. */
struct Scales {
    const Problem &q;
    uint32_t num_groups;
    uint64_t num; /* of the rows */
    float *input[MAX_RANKS], *rows[2][MAX_RANKS][NUM_ROUNDS];

    explicit Scales(const Problem &problem) : q(problem) {
        num_groups = ep_ceil_div_u32(q.c->shape.hidden, EP_FP8_GROUP);
        num = (uint64_t)num_groups * q.c->shape.capacity;
        for (uint32_t r = 0; r < q.c->shape.num_ranks; r++) {
            const uint64_t num_input = (uint64_t)q.rank[r].num_tokens * num_groups;
            fill(input[r] = (float *)shared(4 * num_input), 4 * num_input);
            for (uint32_t b = 0; b < 2; b++)
                for (uint32_t i = 0; i < NUM_ROUNDS; i++) rows[b][r][i] = (float *)poisoned(4 * num);
        }
    }
    DispatchInFp8 dispatch(uint32_t backend, uint32_t r, uint32_t round) const {
        const bool by_group = r % 2;
        DispatchInFp8 p = {};
        p.dispatch = q.dispatch(backend ? q.gpu : q.cpu, r, round);
        p.dispatch.comm.layout.row_bytes = q.c->shape.hidden;
        p.scales.dtype = EP_IN_FP8;
        p.scales.rows.x = input[r];
        p.scales.rows.x_row = by_group ? 1 : num_groups;
        p.scales.rows.x_group = by_group ? q.rank[r].num_tokens : 1;
        p.scales.rows.rows = rows[backend][r][round];
        p.scales.rows.row_step = num_groups;
        p.scales.rows.group_step = 1;
        p.scales.rows.num_groups = num_groups;
        return p;
    }
};

/* ---- the megakernel's communication warps, without the GEMM ---- */

enum { COMM_WARPS = 2 };
struct FusedParams {
    DispatchInFp8 d;
    EpComm comm; /* for ep_launch_resident */
    uint32_t num_move, num_tail;
    unsigned char
        *read; /* the rows, and the scales, copied when the ready counter of their block was complete */
    float *read_scales;
};

__shared__ uint64_t shared_epoch;
struct SharedEpoch {
    operator uint64_t() const { return shared_epoch; }
};

static void read_blocks(const FusedParams &p) {
    const EpDispatchParams &d = p.d.dispatch;
    const EpComm *c = &d.comm;
    const uint32_t m = (uint32_t)d.plan[EP_HEAD_NUM_ROWS];
    EpBackoff w = {0, 0, 0};
    for (uint32_t b = blockIdx.x; b < ep_ceil_div_u32(m, EP_TILE_ROWS); b += gridDim.x) {
        const uint64_t first = b * EP_TILE_ROWS, num = ep_ready_count(b, m, 1);
        if (!ep_ready_await(c, FUSED_OP, b, num, SharedEpoch(), &w)) return;
        memcpy(p.read + first * c->layout.row_bytes, (unsigned char *)d.rows + first * c->layout.row_bytes,
               num * c->layout.row_bytes);
        const uint64_t groups = p.d.scales.rows.num_groups;
        memcpy(p.read_scales + first * groups, p.d.scales.rows.rows + first * groups, 4 * num * groups);
    }
}
static void fused_run(FusedParams p) {
    const EpDispatchParams &d = p.d.dispatch;
    const uint32_t warp = threadIdx.x / 32;
    const uint64_t epoch = ep_begin(&d.comm);
    const bool ok = epoch && ep_cta_enter(&d.comm, FUSED_OP, d.plan, NULL, d.layout.num_tokens, d.num_rows,
                                          d.has_weight, 0, epoch);
    if (threadIdx.x == 0) shared_epoch = epoch;
    __syncthreads();
    if (ok && warp < COMM_WARPS && blockIdx.x < p.num_move) {
        const EpMoveWhat what = p.num_tail == 0           ? EP_MOVE_ALL
                                : blockIdx.x < p.num_tail ? EP_MOVE_RECEIVES
                                                          : EP_MOVE_SENDS;
        move_tokens<true>(d, FUSED_OP, SharedEpoch(), what, warp * EpFusedFifo::BYTES, p.d.scales.rows);
    }
    if (ok && threadIdx.x == 32 * COMM_WARPS) read_blocks(p);
    if (ep_cta_leave(&d.comm, SharedEpoch()) == EP_LEFT) return;
    for (uint32_t b = threadIdx.x; b < d.comm.layout.num_row_blocks; b += blockDim.x)
        *ep_ready_word(&d.comm, b) = 0;
}

static void run_cpu_fp8(const Problem &q, const Scales &s) {
    std::vector<std::thread> ranks;
    for (uint32_t r = 0; r < q.c->shape.num_ranks; r++)
        ranks.emplace_back([&, r] {
            for (uint32_t i = 0; i < NUM_ROUNDS; i++) {
                const EpPlanParams plan = q.plan(q.cpu, r, i);
                ep_cpu_plan(&plan);
                const DispatchInFp8 d = s.dispatch(0, r, i);
                ep_cpu_dispatch(&d.dispatch, &d.scales, 0, 1);
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
            const DispatchInFp8 d = s.dispatch(1, r, i);
            ep_few_chunks = (r + i) % 2 ? 1000 : 0; /* both ways of moving chunks; see test_stages.cpp */
            return ep_launch_dispatch(&d.dispatch, &d.scales, num_sm, NULL);
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
            ok = same_tags(q, r, i) && ok;
            ok =
                same("the scales", r, i, s.rows[0][r][i], s.rows[1][r][i], 4 * s.num_groups * num_rows) && ok;
        }
    }
    printf("%-40s %s\n", c->name, ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

/* The same with the megakernel's warps: every CTA moves tokens, then one; and where there are two, one only
 * receives and the other one only sends. */
static bool check_fused(const Case *c) {
    const Problem q(c);
    const Scales s(q);
    FusedParams runs[MAX_RANKS][NUM_ROUNDS];
    run_cpu_fp8(q, s);
    const Kernel kernels[] = {
        [&](uint32_t r, uint32_t i) {
            const EpPlanParams plan = q.plan(q.gpu, r, i);
            return ep_launch_plan(&plan, NULL);
        },
        [&](uint32_t r, uint32_t i) {
            return (int)ep_launch_resident(fused_run, num_sm, COMM_WARPS + 1, COMM_WARPS * EpFusedFifo::BYTES,
                                           NULL, runs[r][i]);
        },
    };
    for (uint32_t r = 0; r < c->shape.num_ranks; r++)
        for (uint32_t i = 0; i < NUM_ROUNDS; i++) {
            const DispatchInFp8 d = s.dispatch(1, r, i);
            const bool divided = i == 0 && num_sm > 1;
            runs[r][i] = {d,
                          d.dispatch.comm,
                          divided ? 2u : 1u,
                          divided ? 1u : 0u,
                          (unsigned char *)poisoned(q.rank[r].num_rows * (uint64_t)c->shape.hidden),
                          (float *)poisoned(4 * s.num)};
        }
    bool ok = run_ctas(q, NUM_ROUNDS, kernels);
    for (uint32_t r = 0; r < c->shape.num_ranks; r++)
        for (uint32_t i = 0; i < NUM_ROUNDS; i++) {
            const Out &a = q.cpu.out[r][i], &b = q.gpu.out[r][i];
            const uint64_t m = (uint32_t)a.plan[EP_HEAD_NUM_ROWS];
            bool has_plan;
            ok = same_plan(q, r, i, &has_plan) && has_plan && ok;
            ok = same("recv", r, i, a.recv, b.recv, 4 * q.recv_words) && ok;
            ok = same("the rows", r, i, a.rows, runs[r][i].read, m * c->shape.hidden) && ok;
            if (c->weighted) ok = same("the row weights", r, i, a.row_weight, b.row_weight, 4 * m) && ok;
            ok =
                same("the scales", r, i, s.rows[0][r][i], runs[r][i].read_scales, 4 * s.num_groups * m) && ok;
        }
    printf("fused: %-33s %s\n", c->name, ok ? "ok" : "WRONG");
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

static const Case fused_cases[] = {
    {"several row blocks", {2, 8, 8, 40, 48, EP_BF16, EP_COMBINE_LOCAL, 700}, {40, 37}, 1},
    {"more than 32 groups", {2, 8, 4, 6, 4240, EP_BF16, EP_COMBINE_LOCAL, 60}, {6, 5}, 1},
    {"a rank without tokens", {3, 6, 3, 20, 272, EP_F16, EP_COMBINE_SCATTER, 200}, {13, 0, 20}, 0},
    {"rows of more than 1024 bytes", {2, 8, 4, 30, 1168, EP_BF16, EP_COMBINE_GATHER, 240}, {30, 23}, 0},
    Case{"one rank, 32 choices, none dropped", {1, 64, 32, 11, 272, EP_BF16, EP_COMBINE_LOCAL, 352}, {11}, 1}
        .with_drops(0),
    Case{"without weights", {2, 6, 5, 22, 144, EP_BF16, EP_COMBINE_LOCAL, 240}, {22, 19}, 1}.unweighted(),
};

int main(int argc, char **argv) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    if (argc > 2) num_sm = (uint32_t)atoi(argv[2]);
    bool ok = true;
    for (const Case &c : cases) ok = check(&c) && ok;
    for (const Case &c : fused_cases) ok = check_fused(&c) && ok;
    return ok ? 0 : 1;
}
