/* test_stages.cpp - the CUDA kernels of plan, dispatch and combine, thread by thread on the CPU, against the CPU
 * backend: bit by bit, on several ranks of several blocks, each block a process.  Usage: test_stages [seed [blocks]]
 *
 * ThreadSanitizer sees one process, so it wants one block: what a rank's blocks order among themselves is a race to it. */
#include "emulated_port.h"

#include "kernels/plan.cu"
namespace dispatching {
#include "kernels/dispatch.cu"
}
namespace combining {
#include "kernels/combine.cu"
}

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

extern "C" { /* the CPU backend, compiled as C */
void ep_cpu_plan(const EpPlanParams *p);
void ep_cpu_dispatch(const EpDispatchParams *p, uint32_t worker, uint32_t num_workers);
void ep_cpu_combine(const EpCombineParams *p, uint32_t worker, uint32_t num_workers);
}

static std::mt19937 ep_random;
static uint32_t below(uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(ep_random); }

static void *shared(size_t num_bytes) {
    void *p = mmap(NULL, num_bytes + 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) ep_die("mmap");
    return p;
}

enum { MAX_RANKS = 3, ROUNDS = 2 };

/* What a rank's tensors are; everything in memory that processes share. */
struct Rank {
    uint32_t num_tokens, num_rows;
    int64_t *idx;
    unsigned char *x, *y;
    float *weight, *scalar, *row_weight_in;
};
/* What came out of one round. */
struct Out {
    int32_t *plan, *recv;
    unsigned char *rows, *sums;
    float *row_weight, *scalars;
};
struct Buffers { /* of the CPU's run, and of the kernels' */
    unsigned char *heap[MAX_RANKS];
    EpHostWords *host[MAX_RANKS];
    Out out[MAX_RANKS][ROUNDS];
};
struct Case {
    const char *name;
    EpShape shape;
    uint32_t num_tokens[MAX_RANKS];
    int bad_index, short_rows; /* the rank that is wrong, or -1 */
};

static void fill(void *to, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i++) ((unsigned char *)to)[i] = (unsigned char)below(256);
}
/* Random numbers of a dtype, none of them NaN or infinite. */
static void fill_numbers(unsigned char *to, size_t num, uint32_t dtype) {
    for (size_t i = 0; i < num; i++) {
        const float f = std::uniform_real_distribution<float>(-2, 2)(ep_random);
        uint32_t bits;
        memcpy(&bits, &f, 4);
        const __half h = __float2half_rn(f);
        if (dtype == EP_F32) memcpy(to + 4 * i, &f, 4);
        if (dtype == EP_BF16) memcpy(to + 2 * i, (unsigned char *)&bits + 2, 2);
        if (dtype == EP_F16) memcpy(to + 2 * i, (const void *)&h, 2);
    }
}

struct Problem {
    const Case *c;
    EpCommLayout layout;
    uint64_t recv_words;
    Rank rank[MAX_RANKS];
    Buffers cpu, gpu;

    Out make_out(uint32_t r) const {
        const Rank &k = rank[r];
        const uint64_t words = ep_plan_layout(&c->shape, k.num_tokens).num_words, pairs = (uint64_t)k.num_tokens * c->shape.num_topk;
        Out o = {(int32_t *)shared(4 * words), (int32_t *)shared(4 * recv_words), (unsigned char *)shared(k.num_rows * layout.row_bytes),
                 (unsigned char *)shared(k.num_tokens * layout.row_bytes), (float *)shared(4ull * k.num_rows), (float *)shared(4 * pairs)};
        memset(o.rows, 0xee, k.num_rows * layout.row_bytes), memset(o.sums, 0xee, k.num_tokens * layout.row_bytes);
        memset(o.row_weight, 0xee, 4ull * k.num_rows), memset(o.scalars, 0xee, 4 * pairs), memset(o.recv, 0xee, 4 * recv_words);
        return o;
    }
    explicit Problem(const Case *of) : c(of), layout(ep_comm_layout(&of->shape)) {
        const EpShape &s = c->shape;
        recv_words = (uint64_t)s.num_ranks * s.max_tokens * (1 + s.num_topk);
        for (uint32_t r = 0; r < s.num_ranks; r++) {
            Rank &k = rank[r];
            const uint64_t T = c->num_tokens[r], K = s.num_topk, size = ep_dtype_bytes(s.dtype);
            k.num_tokens = (uint32_t)T, k.num_rows = s.capacity;
            k.idx = (int64_t *)shared(8 * T * K * ROUNDS), k.x = (unsigned char *)shared(T * layout.row_bytes);
            k.y = (unsigned char *)shared(s.capacity * layout.row_bytes), k.weight = (float *)shared(4 * T * K);
            k.scalar = (float *)shared(4ull * s.capacity), k.row_weight_in = (float *)shared(4ull * s.capacity);
            for (uint64_t i = 0; i < T * K * ROUNDS; i++) k.idx[i] = below(8) == 0 ? -1 : (int64_t)below(below(2) ? s.num_experts : 2);
            if (c->bad_index == (int)r) k.idx[T * K / 2] = s.num_experts + 7;
            fill(k.x, T * layout.row_bytes);
            fill_numbers(k.y, s.capacity * layout.row_bytes / size, s.dtype);
            fill_numbers((unsigned char *)k.weight, T * K, EP_F32), fill_numbers((unsigned char *)k.scalar, s.capacity, EP_F32);
            fill_numbers((unsigned char *)k.row_weight_in, s.capacity, EP_F32);
        }
        for (Buffers *b : {&cpu, &gpu})
            for (uint32_t r = 0; r < s.num_ranks; r++) {
                b->heap[r] = (unsigned char *)shared(layout.num_bytes), b->host[r] = (EpHostWords *)shared(sizeof(EpHostWords));
                for (uint32_t i = 0; i < ROUNDS; i++) b->out[r][i] = make_out(r);
            }
    }
    EpComm comm(const Buffers &b, uint32_t r) const {
        EpComm m = {c->shape, layout, {0}, r, 0, b.host[r], 20000000000ull};
        for (uint32_t i = 0; i < c->shape.num_ranks; i++) m.base[i] = b.heap[i];
        return m;
    }
    EpPlanParams plan(const Buffers &b, uint32_t r, uint32_t round) const {
        const Rank &k = rank[r];
        return {comm(b, r), ep_plan_layout(&c->shape, k.num_tokens), k.idx + (uint64_t)round * k.num_tokens * c->shape.num_topk,
                NULL, b.out[r][round].plan, k.num_tokens, 8, 0, 0, round + 1};
    }
    EpDispatchParams dispatch(const Buffers &b, uint32_t r, uint32_t round) const {
        const Rank &k = rank[r];
        const Out &o = b.out[r][round];
        const bool fewer = c->short_rows == (int)r && o.plan[EP_HEAD_NUM_ROWS] > 0;
        return {comm(b, r), ep_plan_layout(&c->shape, k.num_tokens), k.x, k.weight, o.plan, o.recv, o.rows, o.row_weight,
                fewer ? (uint32_t)o.plan[EP_HEAD_NUM_ROWS] - 1 : k.num_rows, 1};
    }
    EpCombineParams combine(const Buffers &b, uint32_t r, uint32_t round) const {
        const Rank &k = rank[r];
        const Out &o = b.out[r][round];
        return {comm(b, r), ep_plan_layout(&c->shape, k.num_tokens), k.y, k.row_weight_in, k.scalar, o.plan, o.recv, o.sums, o.scalars,
                k.num_rows, 1, 1};
    }
};

static void run_cpu(const Problem &q) {
    std::vector<std::thread> ranks;
    for (uint32_t r = 0; r < q.c->shape.num_ranks; r++)
        ranks.emplace_back([&q, r] {
            for (uint32_t i = 0; i < ROUNDS; i++) {
                const EpPlanParams plan = q.plan(q.cpu, r, i);
                ep_cpu_plan(&plan);
                const EpDispatchParams d = q.dispatch(q.cpu, r, i);
                ep_cpu_dispatch(&d, 0, 1);
                const EpCombineParams c = q.combine(q.cpu, r, i);
                ep_cpu_combine(&c, 0, 1);
            }
        });
    for (std::thread &t : ranks) t.join();
}

/* A process for each block of each rank; a rank's blocks begin a kernel when all have ended the one before. */
static bool run_kernels(const Problem &q) {
    const uint32_t W = q.c->shape.num_ranks;
    pthread_barrier_t *stream = (pthread_barrier_t *)shared(W * sizeof *stream);
    pthread_barrierattr_t across;
    pthread_barrierattr_init(&across);
    pthread_barrierattr_setpshared(&across, PTHREAD_PROCESS_SHARED);
    for (uint32_t r = 0; r < W; r++) pthread_barrier_init(&stream[r], &across, num_sm);
    for (uint32_t n = 0; n < W * num_sm; n++) {
        if (fork()) continue;
        const uint32_t r = n / num_sm;
        my_block = n % num_sm;
        alarm(120);
        for (uint32_t i = 0; i < ROUNDS; i++) {
            const EpPlanParams plan = q.plan(q.gpu, r, i);
            if (ep_launch_plan(&plan, NULL)) _exit(2);
            pthread_barrier_wait(&stream[r]);
            const EpDispatchParams d = q.dispatch(q.gpu, r, i);
            if (dispatching::ep_launch_dispatch(&d, num_sm, NULL)) _exit(3);
            pthread_barrier_wait(&stream[r]);
            const EpCombineParams c = q.combine(q.gpu, r, i);
            if (combining::ep_launch_combine(&c, num_sm, NULL)) _exit(4);
            pthread_barrier_wait(&stream[r]);
        }
        _exit(0);
    }
    bool ok = true;
    for (uint32_t n = 0; n < W * num_sm; n++) {
        int status = 1;
        wait(&status);
        ok = ok && status == 0;
    }
    return ok;
}

static bool same(const char *what, uint32_t r, uint32_t round, const void *a, const void *b, uint64_t num_bytes) {
    for (uint64_t i = 0; i < num_bytes; i++)
        if (((const unsigned char *)a)[i] != ((const unsigned char *)b)[i]) {
            printf("  rank %u round %u: %s differs from byte %llu of %llu on\n", r, round, what, (unsigned long long)i, (unsigned long long)num_bytes);
            return false;
        }
    return true;
}

static bool check(const Case *c) {
    const Problem q(c);
    run_cpu(q);
    bool ok = run_kernels(q);
    if (!ok) puts("  a block did not end well");
    for (uint32_t r = 0; r < c->shape.num_ranks; r++) {
        const EpFaultRecord &f = q.cpu.host[r]->fault, &g = q.gpu.host[r]->fault;
        ok = same("the fault record", r, 0, &f, &g, sizeof f) && ok;
        for (uint32_t i = 0; i < ROUNDS; i++) {
            const Out &a = q.cpu.out[r][i], &b = q.gpu.out[r][i];
            const EpPlanLayout l = ep_plan_layout(&c->shape, c->num_tokens[r]);
            if (a.plan[EP_HEAD_STATUS] || b.plan[EP_HEAD_STATUS]) { /* no plan: its head says so, the rest means nothing */
                ok = same("the plan's head", r, i, a.plan, b.plan, 4 * EP_HEAD_WORDS) && ok;
                continue;
            }
            const uint64_t slot_words = 1 + c->shape.num_topk, sent = (uint64_t)c->num_tokens[r] * 4;
            for (uint32_t w = 0; w < c->shape.num_ranks; w++) { /* behind the slots in use nothing is written */
                const uint64_t from = (uint64_t)w * c->shape.max_tokens * slot_words;
                ok = same("recv", r, i, a.recv + from, b.recv + from, 4 * slot_words * (uint32_t)a.plan[EP_HEAD_NUM_RECV + w]) && ok;
                ok = same("send tokens", r, i, a.plan + l.send_token_off + (uint64_t)w * c->num_tokens[r],
                          b.plan + l.send_token_off + (uint64_t)w * c->num_tokens[r], 4ull * (uint32_t)a.plan[EP_HEAD_NUM_SEND + w]) &&
                     ok;
            }
            ok = same("the plan", r, i, a.plan, b.plan, 4 * l.send_token_off) && ok;
            ok = same("the tiles", r, i, a.plan + l.tile_expert_off, b.plan + l.tile_expert_off, 4ull * (uint32_t)a.plan[EP_HEAD_NUM_TILES]) && ok;
            ok = same("the rows", r, i, a.rows, b.rows, q.rank[r].num_rows * q.layout.row_bytes) && ok;
            ok = same("the row weights", r, i, a.row_weight, b.row_weight, 4ull * q.rank[r].num_rows) && ok;
            ok = same("the sums", r, i, a.sums, b.sums, c->num_tokens[r] * q.layout.row_bytes) && ok;
            ok = same("the scalars", r, i, a.scalars, b.scalars, sent * c->shape.num_topk) && ok;
        }
    }
    printf("%-40s %s\n", c->name, ok ? "ok" : "WRONG");
    fflush(stdout);
    return ok;
}

int main(int argc, char **argv) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    if (argc > 2) num_sm = (uint32_t)atoi(argv[2]);
    const Case cases[] = { /* shape: ranks, experts, topk, max tokens, hidden, dtype, form of combine, capacity */
        {"pre-reduced, bfloat16, two blocks of plan", {2, 8, 8, 40, 24, EP_BF16, EP_COMBINE_LOCAL, 700}, {40, 37}, -1, -1},
        {"pushed, float32, a rank without tokens", {3, 6, 3, 20, 12, EP_F32, EP_COMBINE_SCATTER, 200}, {13, 0, 20}, -1, -1},
        {"pulled, float16", {2, 4, 2, 33, 136, EP_F16, EP_COMBINE_GATHER, 140}, {33, 5}, -1, -1},
        {"17 choices, a token a round of plan", {2, 34, 17, 24, 8, EP_BF16, EP_COMBINE_LOCAL, 800}, {24, 21}, -1, -1},
        {"32 choices", {2, 64, 32, 9, 4, EP_F32, EP_COMBINE_SCATTER, 600}, {9, 7}, -1, -1},
        {"one rank", {1, 3, 4, 12, 8, EP_BF16, EP_COMBINE_LOCAL, 48}, {12}, -1, -1},
        {"an index out of range", {2, 4, 2, 16, 16, EP_BF16, EP_COMBINE_LOCAL, 64}, {16, 9}, 1, -1},
        {"more rows than the capacity", {2, 4, 4, 16, 16, EP_BF16, EP_COMBINE_LOCAL, 20}, {16, 16}, -1, -1},
        {"fewer rows than the plan has", {2, 4, 2, 16, 16, EP_BF16, EP_COMBINE_LOCAL, 64}, {16, 9}, -1, 1},
    };
    bool ok = true;
    for (const Case &c : cases) ok = check(&c) && ok;
    puts(ok ? "all right" : "FAILED");
    return !ok;
}
