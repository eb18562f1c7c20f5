/* stages.h - common parts of the emulated tests of plan, dispatch and combine.
 *
 * Each rank has its tensors twice, for the CPU backend and for the kernels. They are in memory that processes
 * share. A process is a CTA of a rank.
 *
 * A test with ThreadSanitizer has one CTA per rank. ThreadSanitizer sees one process only. With several CTAs
 * per rank, it would report races although another CTA orders the accesses. */
#ifndef STAGES_H
#define STAGES_H
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <random>

#include "emulated_port.h"
#include "kernels/stage/rows.cuh"

extern "C" { /* the CPU backend, compiled as C */
void ep_cpu_plan(const EpPlanParams *p);
void ep_cpu_dispatch(const EpDispatchParams *p, const EpScales *scales, uint32_t worker,
                     uint32_t num_workers);
void ep_cpu_combine(const EpCombineParams *p, uint32_t worker, uint32_t num_workers);
}

static std::mt19937 ep_random;
static uint32_t below(uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(ep_random); }

static void *shared(size_t num_bytes) {
    void *p = mmap(NULL, num_bytes + 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) ep_die("mmap");
    return p;
}
static void *poisoned(size_t num_bytes) { return memset(shared(num_bytes), 0xee, num_bytes); }

enum { MAX_RANKS = 3, ROUNDS = 4 };

/* The inputs of a rank. */
struct Rank {
    uint32_t num_tokens, num_rows;
    int64_t *idx;
    unsigned char *x, *every_x, *y; /* every_x: one row per token */
    unsigned char *bias[EP_MAX_BIASES];
    float *weight, *scalar, *row_weight_in;
    int32_t *tag; /* of each token; NULL on one rank */
};
/* The outputs of one round. */
struct Out {
    int32_t *plan, *recv;
    unsigned char *rows, *sums;
    float *row_weight, *scalars;
    int32_t *row_tag;
};
/* The memory of one backend: the CPU backend, or the kernels. */
struct Buffers {
    unsigned char *heap[MAX_RANKS];
    EpHostWords *host[MAX_RANKS];
    Out out[MAX_RANKS][ROUNDS];
};
struct Case {
    const char *name;
    EpShape shape;
    uint32_t num_tokens[MAX_RANKS];
    uint32_t sorts;
    int bad_index = -1, short_rows = -1; /* the rank with the wrong argument, or -1 */
    uint32_t drops = 1;                  /* how many of 8 choices are dropped, on average */
    uint32_t weighted = 1;
    uint32_t num_copies = 1; /* how many tokens use the same row of x */
    EpPadding padding = {0, 0};
    uint32_t host_counts = 0;
    uint32_t num_biases = 0, by_choice = 0; /* options of combine, of the last rank */

    Case with_bad_index(int rank) const {
        Case c = *this;
        c.bad_index = rank;
        return c;
    }
    Case with_short_rows(int rank) const {
        Case c = *this;
        c.short_rows = rank;
        return c;
    }
    Case with_drops(uint32_t of_8) const {
        Case c = *this;
        c.drops = of_8;
        return c;
    }
    Case unweighted() const {
        Case c = *this;
        c.weighted = 0;
        return c;
    }
    Case with_padding(uint32_t alignment, uint32_t has_capacity) const {
        Case c = *this;
        c.padding = {alignment, has_capacity};
        return c;
    }
    Case with_host_counts() const {
        Case c = *this;
        c.host_counts = 1;
        return c;
    }
    Case with_sums(uint32_t biases, uint32_t in_order_of_choices) const {
        Case c = *this;
        c.num_biases = biases;
        c.by_choice = in_order_of_choices;
        return c;
    }
    Case with_copies(uint32_t n) const {
        Case c = *this;
        c.num_copies = n;
        return c;
    }
};

static void fill(void *to, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i++) ((unsigned char *)to)[i] = (unsigned char)below(256);
}
/* Random finite numbers of a dtype. */
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
        const uint64_t words = ep_plan_layout(&c->shape, k.num_tokens).num_words;
        const uint64_t pairs = (uint64_t)k.num_tokens * c->shape.num_topk;
        return {(int32_t *)shared(4 * words),
                (int32_t *)poisoned(4 * recv_words),
                (unsigned char *)poisoned(k.num_rows * layout.row_bytes),
                (unsigned char *)poisoned(k.num_tokens * layout.row_bytes),
                (float *)poisoned(4ull * k.num_rows),
                (float *)poisoned(4 * pairs),
                (int32_t *)poisoned(4ull * k.num_rows)};
    }
    explicit Problem(const Case *the_case) : c(the_case), layout(ep_comm_layout(&the_case->shape)) {
        const EpShape &s = c->shape;
        recv_words = ep_recv_words(&s);
        for (uint32_t r = 0; r < s.num_ranks; r++) {
            Rank &k = rank[r];
            const uint64_t T = c->num_tokens[r];
            const uint64_t K = s.num_topk;
            const uint64_t size = ep_dtype_bytes(s.dtype);
            const uint64_t row_bytes = layout.row_bytes;
            k.num_tokens = (uint32_t)T;
            k.num_rows = s.capacity;
            k.idx = (int64_t *)shared(8 * T * K * ROUNDS);
            k.x = (unsigned char *)shared(T * row_bytes);
            k.every_x = (unsigned char *)shared(T * row_bytes);
            k.y = (unsigned char *)shared(s.capacity * row_bytes);
            k.weight = (float *)shared(4 * T * K);
            k.scalar = (float *)shared(4ull * s.capacity);
            k.tag = r == 1 ? NULL : (int32_t *)shared(4 * T); /* a rank may have none */
            for (uint64_t t = 0; t < T && k.tag; t++) k.tag[t] = (int32_t)(t / c->num_copies * 7919 + r) - 1;
            k.row_weight_in = (float *)shared(4ull * s.capacity);
            for (uint64_t i = 0; i < T * K * ROUNDS; i++)
                k.idx[i] = below(8) < c->drops ? -1 : (int64_t)below(below(2) ? s.num_experts : 2);
            if (c->bad_index == (int)r) k.idx[T * K / 2] = s.num_experts + 7;
            fill(k.x, T / c->num_copies * row_bytes);
            for (uint64_t t = 0; t < T; t++)
                memcpy(k.every_x + t * row_bytes, k.x + t / c->num_copies * row_bytes, row_bytes);
            fill_numbers(k.y, s.capacity * row_bytes / size, s.dtype);
            for (unsigned char *&bias : k.bias) {
                bias = (unsigned char *)shared(T * row_bytes);
                fill_numbers(bias, T * row_bytes / size, s.dtype);
            }
            fill_numbers((unsigned char *)k.weight, T * K, EP_F32);
            fill_numbers((unsigned char *)k.scalar, s.capacity, EP_F32);
            fill_numbers((unsigned char *)k.row_weight_in, s.capacity, EP_F32);
        }
        for (Buffers *b : {&cpu, &gpu})
            for (uint32_t r = 0; r < s.num_ranks; r++) {
                b->heap[r] = (unsigned char *)shared(layout.num_bytes);
                b->host[r] = (EpHostWords *)shared(sizeof(EpHostWords));
                for (uint32_t i = 0; i < ROUNDS; i++) b->out[r][i] = make_out(r);
            }
    }
    EpComm comm(const Buffers &b, uint32_t r) const {
        EpComm m = {};
        m.shape = c->shape;
        m.layout = layout;
        m.my_rank = r;
        m.host = b.host[r];
        m.timeout_ns = 120000000000ull;
        for (uint32_t i = 0; i < c->shape.num_ranks; i++) m.base[i] = b.heap[i];
        return m;
    }
    EpPlanParams plan(const Buffers &b, uint32_t r, uint32_t round) const {
        const Rank &k = rank[r];
        EpPlanParams p = {};
        p.comm = comm(b, r);
        p.layout = ep_plan_layout(&c->shape, k.num_tokens);
        p.plan = b.out[r][round].plan;
        p.exp_indices = k.idx + (uint64_t)round * k.num_tokens * c->shape.num_topk;
        p.index_bytes = 8;
        p.num_tokens = k.num_tokens;
        p.sort_slots = c->sorts;
        p.padding = c->padding;
        p.host_counts = c->host_counts;
        p.ticket = round + 1;
        return p;
    }
    EpDispatchParams dispatch(const Buffers &b, uint32_t r, uint32_t round) const {
        const Rank &k = rank[r];
        const Out &o = b.out[r][round];
        const bool fewer = c->short_rows == (int)r && o.plan[EP_HEAD_NUM_ROWS] > 0;
        EpDispatchParams p = {};
        p.comm = comm(b, r);
        p.layout = ep_plan_layout(&c->shape, k.num_tokens);
        p.plan = o.plan;
        p.recv = o.recv;
        p.x = k.every_x;
        p.rows = o.rows;
        p.tag = k.tag;
        p.row_tag = o.row_tag;
        p.num_copies = 1;
        p.has_padding = c->padding.alignment != 0;
        p.num_rows = fewer ? (uint32_t)o.plan[EP_HEAD_NUM_ROWS] - 1 : k.num_rows;
        if (c->weighted) {
            p.weight = k.weight;
            p.row_weight = o.row_weight;
            p.has_weight = 1;
        }
        return p;
    }
    EpCombineParams combine(const Buffers &b, uint32_t r, uint32_t round) const {
        const Rank &k = rank[r];
        const Out &o = b.out[r][round];
        EpCombineParams p = {};
        p.comm = comm(b, r);
        p.layout = ep_plan_layout(&c->shape, k.num_tokens);
        p.plan = o.plan;
        p.recv = o.recv;
        p.rows = k.y;
        p.num_rows = k.num_rows;
        p.out = o.sums;
        p.row_scalar = k.scalar;
        p.out_scalar = o.scalars;
        p.has_scalar = 1;
        if (c->weighted) {
            p.row_weight = k.row_weight_in;
            p.has_weight = 1;
        }
        if (r + 1 == c->shape.num_ranks) {
            p.num_biases = c->num_biases;
            p.by_choice = c->by_choice;
            for (uint32_t i = 0; i < c->num_biases; i++) p.bias[i] = k.bias[i];
        }
        return p;
    }
};

static const EpScales no_scales = {}; /* rows of the layer's dtype */

static void run_cpu(const Problem &q, uint32_t num_rounds) {
    std::vector<std::thread> ranks;
    for (uint32_t r = 0; r < q.c->shape.num_ranks; r++)
        ranks.emplace_back([&q, r, num_rounds] {
            for (uint32_t i = 0; i < num_rounds; i++) {
                const EpPlanParams plan = q.plan(q.cpu, r, i);
                ep_cpu_plan(&plan);
                const EpDispatchParams d = q.dispatch(q.cpu, r, i);
                ep_cpu_dispatch(&d, &no_scales, 0, 1);
                const EpCombineParams c = q.combine(q.cpu, r, i);
                ep_cpu_combine(&c, 0, 1);
            }
        });
    for (std::thread &t : ranks) t.join();
}

/* Run a process for each CTA of each rank. kernels[k] launches kernel k. The CTAs of a rank start a kernel
 * after all of them have finished the previous kernel. Returns false if a process has failed. */
typedef std::function<int(uint32_t rank, uint32_t round)> Kernel;
template <size_t N> static bool run_ctas(const Problem &q, uint32_t num_rounds, const Kernel (&kernels)[N]) {
    const uint32_t W = q.c->shape.num_ranks;
    pthread_barrier_t *stream = (pthread_barrier_t *)shared(W * sizeof *stream);
    pthread_barrierattr_t across;
    pthread_barrierattr_init(&across);
    pthread_barrierattr_setpshared(&across, PTHREAD_PROCESS_SHARED);
    for (uint32_t r = 0; r < W; r++) pthread_barrier_init(&stream[r], &across, num_sm);
    std::vector<pid_t> ctas;
    for (uint32_t n = 0; n < W * num_sm; n++) {
        const pid_t cta = fork();
        if (cta < 0) ep_die("fork");
        ctas.push_back(cta);
        if (cta) continue;
        const uint32_t r = n / num_sm;
        my_block = n % num_sm;
        alarm(900); /* longer than any case takes on a busy machine */
        for (uint32_t i = 0; i < num_rounds; i++)
            for (const Kernel &launch : kernels) {
                if (launch(r, i)) _exit(2);
                pthread_barrier_wait(&stream[r]);
            }
        _exit(0);
    }
    bool ok = true;
    for (uint32_t n = 0; n < W * num_sm; n++) {
        int status = 1;
        const pid_t ended = wait(&status);
        std::replace(ctas.begin(), ctas.end(), ended, 0);
        for (pid_t cta : ctas)
            if (status && cta) kill(cta, SIGKILL); /* This CTA may wait for the CTA that has failed. */
        ok = ok && status == 0;
    }
    if (!ok) puts("  a process failed");
    return ok;
}

static bool same(const char *what, uint32_t r, uint32_t round, const void *a, const void *b,
                 uint64_t num_bytes) {
    for (uint64_t i = 0; i < num_bytes; i++)
        if (((const unsigned char *)a)[i] != ((const unsigned char *)b)[i]) {
            printf("  rank %u round %u: %s differs at byte %llu of %llu\n", r, round, what,
                   (unsigned long long)i, (unsigned long long)num_bytes);
            return false;
        }
    return true;
}

/* Compare the defined words of the plans of rank r in both buffers. Stores in *has_plan whether both
 * backends have made a plan. */
static bool same_plan(const Problem &q, uint32_t r, uint32_t round, bool *has_plan) {
    const Case *c = q.c;
    const Out &a = q.cpu.out[r][round], &b = q.gpu.out[r][round];
    const EpPlanLayout l = ep_plan_layout(&c->shape, c->num_tokens[r]);
    const uint64_t tiles = 4ull * (uint32_t)a.plan[EP_HEAD_NUM_TILES];
    *has_plan = !a.plan[EP_HEAD_STATUS] && !b.plan[EP_HEAD_STATUS];
    /* Without a plan, only the head is defined. */
    if (!*has_plan) return same("the plan's head", r, round, a.plan, b.plan, 4 * EP_HEAD_WORDS);
    bool ok = same("the plan", r, round, a.plan, b.plan, 4 * l.send_token_off);
    /* The words after the slots in use are not defined. */
    for (uint32_t w = 0; w < c->shape.num_ranks; w++) {
        const uint64_t from = l.send_token_off + (uint64_t)w * c->num_tokens[r];
        ok = same("send tokens", r, round, a.plan + from, b.plan + from,
                  4ull * (uint32_t)a.plan[EP_HEAD_NUM_SEND + w]) &&
             ok;
    }
    return same("the tiles", r, round, a.plan + l.tile_expert_off, b.plan + l.tile_expert_off, tiles) &&
           same("the tiles' rows", r, round, a.plan + l.tile_row_off, b.plan + l.tile_row_off, tiles) && ok;
}
/* Compare the tags of the experts' rows of rank r; those of other rows are not defined. */
static bool same_tags(const Problem &q, uint32_t r, uint32_t round) {
    const EpShape &s = q.c->shape;
    const Out &a = q.cpu.out[r][round], &b = q.gpu.out[r][round];
    const EpPlanLayout l = ep_plan_layout(&s, q.c->num_tokens[r]);
    bool ok = true;
    for (uint32_t e = 0; e < ep_num_local_experts(&s); e++) {
        const uint32_t first = (uint32_t)a.plan[l.expert_row_off + e];
        const uint32_t num = ep_expert_rows(&s, a.plan + l.counts_off, r * ep_num_local_experts(&s) + e);
        ok = same("the tags", r, round, a.row_tag + first, b.row_tag + first, 4ull * num) && ok;
    }
    return ok;
}

#endif /* STAGES_H */
