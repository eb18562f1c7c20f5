/* test_comm.cpp - compares the communication warps of the megakernels with the CPU backend, bit by bit.
 *
 * CPU threads emulate the kernels, on several ranks with several CTAs. The kernels are those of fused.cuh
 * without the GEMM. In dispatch, a warp reads the rows of a row block when the ready counter of the block
 * is complete. In combine, warps produce the rows, piece by piece in random order, and count them.
 * Usage: test_comm [seed [CTAs per rank]] */
#include "made_rows.h"

#include "kernels/stage/dispatch.cuh"

struct DispatchRunParams {
    EpDispatchParams d;
    Division division;
    unsigned char *read; /* a copy of the rows of each block, made when its ready counter was complete */
    uint64_t *ready;     /* the ready counters at the end */
};
__shared__ uint64_t shared_epoch;
struct SharedEpoch {
    operator uint64_t() const { return shared_epoch; }
};

static bool enter(const EpComm *c, uint32_t op, const int32_t *plan, const int32_t *recv, uint32_t num_tokens,
                  uint32_t num_rows, uint32_t has_weight, uint32_t has_scalar = 0) {
    const uint64_t epoch = ep_begin(c);
    const bool ok =
        epoch && ep_cta_enter(c, op, plan, recv, num_tokens, num_rows, has_weight, has_scalar, epoch);
    if (threadIdx.x == 0) shared_epoch = epoch;
    __syncthreads();
    return ok;
}
static void leave(const EpComm *c, uint64_t *ready) {
    if (ep_cta_leave(c, SharedEpoch()) == EP_LEFT) return;
    for (uint32_t b = threadIdx.x; b < c->layout.num_row_blocks; b += blockDim.x) {
        ready[b] = *ep_ready_word(c, b);
        *ep_ready_word(c, b) = 0;
    }
}

/* Read the data that this rank has published to a peer, after the same wait as the peer. So
 * ThreadSanitizer reports stores that were not published. */
static void check_published(const EpComm *c, uint32_t op, uint32_t r, uint32_t slot, const unsigned char *at,
                            uint64_t num_bytes) {
    const EpFaultRecord f = ep_fault_at(op, r, EP_WORD_FLAG, SharedEpoch());
    if (!ep_wait_u64(c, ep_flag(c, r, c->my_rank, slot / EP_CHUNK_SLOTS), EP_CMP_EQ, SharedEpoch(), &f))
        return;
    for (uint64_t i = 0; i < num_bytes; i++) (void)((const volatile unsigned char *)at)[i];
}

/* ---- dispatch, and a warp that reads the rows that dispatch has placed ---- */

static void read_rows(const DispatchRunParams &p) {
    const EpComm *c = &p.d.comm;
    const uint32_t m = (uint32_t)p.d.plan[EP_HEAD_NUM_ROWS];
    EpBackoff w = {0, 0, 0};
    for (uint32_t b = blockIdx.x; b < ep_ceil_div_u32(m, EP_TILE_ROWS); b += gridDim.x) {
        const uint64_t from = b * EP_TILE_ROWS * c->layout.row_bytes, num_rows = ep_ready_count(b, m, 1);
        if (!ep_ready_await(c, EP_OP_DISPATCH_GEMM, b, num_rows, SharedEpoch(), &w)) return;
        memcpy(p.read + from, (const unsigned char *)p.d.rows + from, num_rows * c->layout.row_bytes);
    }
}
static void check_sent(const EpDispatchParams &d) {
    const EpComm *c = &d.comm;
    const uint64_t num_bytes =
        c->layout.row_bytes +
        4 * (d.has_weight ? ep_trailer_words(c->shape.num_topk) : ep_trailer_weights(c->shape.num_topk));
    for (uint32_t r = 0; r < c->shape.num_ranks; r++)
        for (uint32_t i = 0; r != c->my_rank && i < (uint32_t)d.plan[EP_HEAD_NUM_SEND + r]; i++)
            check_published(c, EP_OP_DISPATCH_GEMM, r, i, ep_slot_at(c, r, c->my_rank, i), num_bytes);
}
static void dispatch_run(DispatchRunParams p) {
    const EpDispatchParams &d = p.d;
    const uint32_t warp = threadIdx.x / 32;
    const bool ok =
        enter(&d.comm, EP_OP_DISPATCH_GEMM, d.plan, NULL, d.layout.num_tokens, d.num_rows, d.has_weight);
    if (ok && warp < COMM_WARPS && blockIdx.x < p.division.num_move) {
        const EpMoveWhat what = p.division.num_tail == 0           ? EP_MOVE_ALL
                                : blockIdx.x < p.division.num_tail ? EP_MOVE_RECEIVES
                                                                   : EP_MOVE_SENDS;
        move_tokens<true>(d, EP_OP_DISPATCH_GEMM, SharedEpoch(), what, warp * EpFusedFifo::BYTES, NoScales());
    }
    if (ok && threadIdx.x == 32 * COMM_WARPS) read_rows(p);
    if (ok && threadIdx.x == 32 * COMM_WARPS + 1) check_sent(d);
    leave(&d.comm, p.ready);
}

/* ---- combine, while warps produce the rows ---- */

/* A warp has one chunk, as in the kernels of FP8. The operation is the same, because all ranks name it. */
template <int DTYPE, bool HAS_SMEM> struct OneChunk : EpCombineConfig<DTYPE, EP_OP_GEMM_COMBINE, HAS_SMEM> {
    static constexpr bool OPENS = false;
};
template <int DTYPE, bool HAS_SMEM> static void combine(const CombineRunParams &p, uint32_t fifo) {
    const EpCombineParts parts = {blockIdx.x < p.division.num_move, blockIdx.x < p.division.num_reduce};
    if (p.division.is_serial && !await_all_rows(p.k, EP_OP_GEMM_COMBINE, SharedEpoch())) return;
    if (p.division.opens_chunks)
        combine_tokens<EpCombineConfig<DTYPE, EP_OP_GEMM_COMBINE, HAS_SMEM>>(p.k, SharedEpoch(), parts, fifo);
    else combine_tokens<OneChunk<DTYPE, HAS_SMEM>>(p.k, SharedEpoch(), parts, fifo);
}
static void check_returned(const EpCombineParams &k) {
    const EpComm *c = &k.comm;
    const uint32_t K = c->shape.num_topk, mode = c->shape.combine_mode;
    for (uint32_t r = 0; mode != EP_COMBINE_GATHER && r < c->shape.num_ranks; r++)
        for (uint32_t i = 0; i < (uint32_t)k.plan[EP_HEAD_NUM_RECV + r]; i++) {
            const int32_t *slot = k.recv + ep_record_at(&c->shape, r, i);
            if (mode == EP_COMBINE_LOCAL)
                check_published(c, EP_OP_GEMM_COMBINE, r, i, ep_slot_at(c, r, c->my_rank, i),
                                c->layout.row_bytes);
            for (uint32_t j = 0; mode == EP_COMBINE_SCATTER && j < K; j++)
                if (slot[1 + j] >= 0 && r == c->my_rank) /* the flag tells that the row is ready */
                    check_published(c, EP_OP_GEMM_COMBINE, r, i,
                                    (const unsigned char *)k.rows + slot[1 + j] * c->layout.row_bytes,
                                    c->layout.row_bytes);
                else if (slot[1 + j] >= 0)
                    check_published(c, EP_OP_GEMM_COMBINE, r, i,
                                    ep_choice_at(c, r, (uint32_t)slot[0] * K + j), c->layout.row_bytes + 8);
        }
}
template <int DTYPE> static void combine_run(CombineRunParams p) {
    const EpCombineParams &k = p.k;
    const uint32_t warp = threadIdx.x / 32;
    clear_open_chunks();
    if (enter(&k.comm, EP_OP_GEMM_COMBINE, k.plan, k.recv, k.layout.num_tokens, k.num_rows, k.has_weight,
              k.has_scalar)) {
        if (warp < COMM_WARPS && p.division.comm_warps_combine)
            combine<DTYPE, false>(p, warp * EpFusedFifo::BYTES);
        if (warp >= COMM_WARPS && warp < COMM_WARPS + ROW_WARPS) {
            make_rows(p);
            if (p.division.row_warps_combine)
                combine<DTYPE, true>(p, COMM_WARPS * EpFusedFifo::BYTES +
                                            (warp - COMM_WARPS) * LargeFifo::BYTES);
        }
        if (threadIdx.x == 32 * (COMM_WARPS + ROW_WARPS)) check_returned(k);
    }
    leave(&k.comm, p.ready);
}

/* ---- the test ---- */

/* The memory of a rank for one round, in addition to Problem. */
struct FusedRound {
    unsigned char *read, *produced;
    uint32_t *order;
    uint64_t *ready[2];
};

static bool is_ready(const char *what, const Problem &q, uint32_t r, uint32_t round, const uint64_t *ready,
                     uint32_t pieces) {
    const uint32_t num_rows = (uint32_t)q.cpu.out[r][round].plan[EP_HEAD_NUM_ROWS];
    bool ok = true;
    for (uint32_t b = 0; b < q.layout.num_row_blocks; b++) {
        const uint64_t want = b * EP_TILE_ROWS < num_rows ? ep_ready_count(b, num_rows, pieces) : 0;
        if (ready[b] == want) continue;
        printf("  rank %u round %u: the counter of %s of row block %u is %llu, expected %llu\n", r, round,
               what, b, (unsigned long long)ready[b], (unsigned long long)want);
        ok = false;
    }
    return ok;
}
static bool untouched(const char *what, uint32_t r, uint32_t round, const void *at, uint64_t from,
                      uint64_t num_bytes) {
    for (uint64_t i = from; i < num_bytes; i++)
        if (((const unsigned char *)at)[i] != 0xee) {
            printf("  rank %u round %u: %s was written at byte %llu of %llu\n", r, round, what,
                   (unsigned long long)i, (unsigned long long)num_bytes);
            return false;
        }
    return true;
}

/* Whether a number returns with each row, as in the backward pass. */
static bool has_scalars(uint32_t round) { return round % 2 == 1; }

static bool check_round(const Problem &q, const FusedRound &f, uint32_t r, uint32_t i) {
    const Case *c = q.c;
    const Out &a = q.cpu.out[r][i], &b = q.gpu.out[r][i];
    const uint64_t row_bytes = q.layout.row_bytes;
    const uint64_t m = (uint32_t)a.plan[EP_HEAD_NUM_ROWS];
    const uint64_t room = q.rank[r].num_rows;
    bool has_plan, ok = same_plan(q, r, i, &has_plan);
    if (!has_plan) puts("  a plan failed, but every case must have a plan");
    ok = same("recv", r, i, a.recv, b.recv, 4 * q.recv_words) && ok && has_plan;
    ok = same("the rows", r, i, a.rows, b.rows, m * row_bytes) && ok;
    ok = untouched("the memory after the rows", r, i, b.rows, m * row_bytes, room * row_bytes) && ok;
    ok = same("the copy of the rows", r, i, a.rows, f.read, m * row_bytes) && ok;
    if (c->weighted) ok = same("the row weights", r, i, a.row_weight, b.row_weight, 4 * m) && ok;
    ok = untouched("the memory after the row weights", r, i, b.row_weight, c->weighted ? 4 * m : 0,
                   4 * room) &&
         ok;
    ok = is_ready("rows placed", q, r, i, f.ready[0], 1) && ok;
    ok = same("the sums", r, i, a.sums, b.sums, c->num_tokens[r] * row_bytes) && ok;
    ok = is_ready("rows produced", q, r, i, f.ready[1], PIECES) && ok;
    const uint64_t scalar_bytes = 4ull * c->num_tokens[r] * c->shape.num_topk;
    if (has_scalars(i)) return same("the scalars", r, i, a.scalars, b.scalars, scalar_bytes) && ok;
    return untouched("the scalars", r, i, b.scalars, 0, scalar_bytes) && ok;
}

/* Fill `order` with a random order. With by_block, the order is random only within a row block, so that
 * row blocks become complete at different times; with in_sequence, in the order of their numbers, as in a
 * GEMM. */
static void fill_order(uint32_t *order, uint32_t num, bool by_block, bool in_sequence) {
    const uint32_t size = by_block ? EP_TILE_ROWS / 16 * PIECES : 1;
    std::vector<uint32_t> blocks(ep_ceil_div_u32(num, size));
    for (uint32_t b = 0; b < blocks.size(); b++) blocks[b] = b;
    if (!in_sequence) std::shuffle(blocks.begin(), blocks.end(), ep_random);
    for (uint32_t b : blocks) {
        const uint32_t end = b * size + size < num ? b * size + size : num;
        uint32_t *const first = order;
        for (uint32_t n = b * size; n < end; n++) *order++ = n;
        std::shuffle(first, order, ep_random);
    }
}

static Division division_of(uint32_t round) {
    Division d = divisions[round];
    d.num_move = d.num_move < num_sm ? d.num_move : num_sm;
    d.num_tail = d.num_tail < d.num_move ? d.num_tail : 0;
    return d;
}

static void alloc_round(const Problem &q, uint32_t r, uint32_t round, FusedRound *f) {
    const uint32_t m = (uint32_t)q.cpu.out[r][round].plan[EP_HEAD_NUM_ROWS];
    const uint32_t num = num_groups(m) * PIECES;
    const uint64_t num_bytes = q.rank[r].num_rows * q.layout.row_bytes;
    f->read = (unsigned char *)poisoned(num_bytes);
    f->order = (uint32_t *)shared(4 * num);
    f->produced = (unsigned char *)memset(shared(num_bytes), EP_FILL_NAN, num_bytes);
    for (uint64_t *&ready : f->ready) ready = (uint64_t *)poisoned(8 * q.layout.num_row_blocks);
    fill_order(f->order, num, round % 2 == 0, round == 0);
}

static bool check(const Case *c) {
    const Problem q(c);
    FusedRound rounds[MAX_RANKS][ROUNDS];
    run_cpu(q, ROUNDS);
    for (uint32_t r = 0; r < c->shape.num_ranks; r++)
        for (uint32_t i = 0; i < ROUNDS; i++) alloc_round(q, r, i, &rounds[r][i]);
    const Kernel kernels[] = {
        [&](uint32_t r, uint32_t i) {
            const EpPlanParams plan = q.plan(q.gpu, r, i);
            if (my_block == 0) ep_cpu_plan(&plan);
            return 0;
        },
        [&](uint32_t r, uint32_t i) {
            const FusedRound &f = rounds[r][i];
            DispatchRunParams p = {q.dispatch(q.gpu, r, i), division_of(i), f.read, f.ready[0]};
            p.d.x = q.rank[r].x;
            p.d.num_copies = c->num_copies;
            return (int)ep_launch_resident(dispatch_run, num_sm, COMM_WARPS + 1, FIFO_BYTES, NULL, p);
        },
        [&](uint32_t r, uint32_t i) {
            const FusedRound &f = rounds[r][i];
            CombineRunParams p = {q.combine(q.gpu, r, i), division_of(i), q.rank[r].y, f.order, f.ready[1]};
            p.k.rows = f.produced;
            p.k.row_pieces = PIECES;
            if (!has_scalars(i)) {
                p.k.has_scalar = 0;
                p.k.row_scalar = NULL;
                p.k.out_scalar = NULL;
            }
            const auto kernel = c->shape.dtype == EP_F16 ? combine_run<EP_F16> : combine_run<EP_BF16>;
            return (int)ep_launch_resident(kernel, num_sm, COMM_WARPS + ROW_WARPS + 1, FIFO_BYTES, NULL, p);
        },
    };
    bool ok = run_ctas(q, ROUNDS, kernels);
    for (uint32_t r = 0; r < c->shape.num_ranks; r++) {
        const EpFaultRecord &a = q.cpu.host[r]->fault, &b = q.gpu.host[r]->fault;
        ok = same("the fault record", r, 0, &a, &b, sizeof a) && ok;
        for (uint32_t i = 0; i < ROUNDS; i++) ok = check_round(q, rounds[r][i], r, i) && ok;
    }
    printf("%-48s %s\n", c->name, ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

/* The shape: ranks, experts, topk, max tokens, hidden, dtype, combine mode, capacity. Then the numbers of
 * tokens, and whether the plan sorts the slots. */
static const Case cases[] = {
    {"local, bfloat16, several row blocks", {2, 8, 8, 40, 24, EP_BF16, EP_COMBINE_LOCAL, 700}, {40, 37}, 1},
    {"local, float16, a rank without tokens",
     {3, 6, 3, 20, 136, EP_F16, EP_COMBINE_LOCAL, 200},
     {13, 0, 20},
     1},
    {"local, float16, rows of more than 1024 bytes",
     {2, 8, 4, 30, 520, EP_F16, EP_COMBINE_LOCAL, 240},
     {30, 23},
     0},
    Case{"local, unweighted", {2, 6, 5, 22, 264, EP_BF16, EP_COMBINE_LOCAL, 240}, {22, 19}, 1}
        .with_drops(2)
        .unweighted(),
    Case{"local, one rank, 32 choices, none dropped",
         {1, 64, 32, 11, 264, EP_BF16, EP_COMBINE_LOCAL, 352},
         {11},
         1}
        .with_drops(0),
    Case{"local, 12 choices", {2, 16, 12, 21, 264, EP_BF16, EP_COMBINE_LOCAL, 400}, {21, 18}, 1}.with_drops(
        5),
    Case{"local, most choices dropped", {3, 6, 2, 37, 40, EP_BF16, EP_COMBINE_LOCAL, 222}, {37, 30, 9}, 1}
        .with_drops(6),
    Case{"local, two choices, several row blocks",
         {2, 8, 2, 250, 24, EP_BF16, EP_COMBINE_LOCAL, 1000},
         {250, 231},
         0}
        .with_drops(0),
    {"scatter, bfloat16", {2, 4, 4, 25, 200, EP_BF16, EP_COMBINE_SCATTER, 200}, {25, 18}, 1},
    {"scatter, 12 choices", {2, 16, 12, 19, 72, EP_F16, EP_COMBINE_SCATTER, 400}, {19, 14}, 1},
    {"scatter, 20 choices", {2, 24, 20, 13, 40, EP_BF16, EP_COMBINE_SCATTER, 400}, {13, 11}, 0},
    Case{"scatter, float16, most choices dropped",
         {3, 6, 3, 21, 264, EP_F16, EP_COMBINE_SCATTER, 180},
         {21, 0, 17},
         0}
        .with_drops(6),
    Case{"scatter, three tokens for each row of x",
         {2, 8, 1, 252, 48, EP_BF16, EP_COMBINE_SCATTER, 453},
         {252, 201},
         0}
        .with_copies(3),
    {"gather, bfloat16", {2, 4, 2, 33, 200, EP_BF16, EP_COMBINE_GATHER, 140}, {33, 5}, 1},
    Case{"gather, float16, unweighted", {3, 6, 6, 15, 520, EP_F16, EP_COMBINE_GATHER, 270}, {15, 11, 14}, 1}
        .with_drops(2)
        .unweighted(),
    {"gather, one rank, 32 choices", {1, 40, 32, 6, 264, EP_F16, EP_COMBINE_GATHER, 192}, {6}, 0},
    Case{"gather, all choices dropped", {2, 4, 2, 9, 24, EP_BF16, EP_COMBINE_GATHER, 36}, {9, 5}, 1}
        .with_drops(8),
};

int main(int argc, char **argv) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    if (argc > 2) num_sm = (uint32_t)atoi(argv[2]);
    bool ok = true;
    for (const Case &c : cases) ok = check(&c) && ok;
    puts(ok ? "ok" : "FAILED");
    return !ok;
}
