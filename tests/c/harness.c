/* harness.c - see harness.h.  The expected results are written from the documentation of the layer
 * (row order: local expert, source rank, token, choice; sums in float32 in a fixed order), by the
 * most direct loops there are, and share no code with the library. */
#include "harness.h"

#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

uint64_t test_seed = 1;
double long_timeout_s = 30;
double short_timeout_s = HAVE_TSAN ? 0.8 : 0.5;
uint32_t test_scale = 100;
static atomic_uint num_complaints;

double seconds_now(void) { return (double)ep_now_ns() * 1e-9; }

uint64_t rng_next(Rng *rng) {
    uint64_t z = rng->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
uint32_t rng_below(Rng *rng, uint32_t n) { return n ? (uint32_t)(rng_next(rng) >> 33) % n : 0; }

EpLayerConfig small_config(uint32_t num_ranks) {
    EpLayerConfig config = {{num_ranks, 2 * num_ranks, 3, 16, 16, EP_F32, EP_COMBINE_SCATTER, num_ranks * 16 * 3}, 1, 2, 0};
    return config;
}
uint32_t scaled(uint32_t steps) { return steps * test_scale / 100 ? steps * test_scale / 100 : 1; }

/* ---- chaos ---- */

static _Atomic uint32_t slow_rank;
#ifdef EP_CHAOS
static _Thread_local uint32_t chaos_rank = EP_MAX_RANKS;
static _Thread_local Rng chaos_rng;

/* Mostly nothing, sometimes another thread's turn, rarely a nap.  Every thread has one point where it
 * is slower than elsewhere, and one rank of a team is late to everything.  Only relaxed atomics: the
 * delays must not order anything that the protocol does not order. */
void ep_chaos(uint32_t point) {
    static _Atomic uint64_t num_threads;
    if (chaos_rng.state == 0)
        chaos_rng.state = test_seed * 1000003 + atomic_fetch_add_explicit(&num_threads, 1, memory_order_relaxed) * 7919 + 1;
    uint64_t x = rng_next(&chaos_rng);
    useconds_t nap = (useconds_t)(x >> 40) % 200;
    uint32_t late = chaos_rank == atomic_load_explicit(&slow_rank, memory_order_relaxed) && point == 1;
    uint32_t favourite = (uint32_t)(chaos_rng.state >> 61) == point;
    if (x % 256 == 0 || (x % 3 == 0 && late) || (x % 16 == 0 && favourite)) usleep(nap);
    else if (x % 8 == 0) sched_yield();
}
static void chaos_begin(uint32_t rank) { chaos_rank = rank; }
#else
static void chaos_begin(uint32_t rank) { (void)rank; }
#endif

/* What cpu.c takes for pthread_create (run_c_tests.py renames it there): sometimes there is no thread to
 * be had, and the operation must do without. */
int test_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg);
int test_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg) {
    static _Atomic uint32_t num_calls;
    if (atomic_fetch_add_explicit(&num_calls, 1, memory_order_relaxed) % 11 == 10) return EAGAIN;
    return pthread_create(thread, attr, start, arg);
}

/* What cpu.c takes for mmap: for this thread, the n-th memory of no file from now on is not there. */
static _Thread_local uint32_t mmaps_left;
void test_fail_mmap(uint32_t n) { mmaps_left = n; }
void *test_mmap(void *at, size_t num_bytes, int protection, int flags, int fd, off_t off);
void *test_mmap(void *at, size_t num_bytes, int protection, int flags, int fd, off_t off) {
    if (fd < 0 && mmaps_left && --mmaps_left == 0) return errno = ENOMEM, MAP_FAILED;
    return mmap(at, num_bytes, protection, flags, fd, off);
}

/* ---- ranks ---- */

static const char *code_name(int code) {
    switch (code) {
    case EP_OK: return "EP_OK";
#define X(name, value, exception, text) \
    case name: return #name;
        EP_ERRORS(X)
#undef X
    default: return "no code";
    }
}

bool complain(Rank *me, const char *file, int line, const char *what, int got, int want) {
    const char *slash = strrchr(file, '/');
    if (atomic_fetch_add(&num_complaints, 1) < 12) {
        fprintf(stderr, "FAILED %s:%d rank %u: %s", slash ? slash + 1 : file, line, me ? me->rank : 0, what);
        if (got != want) fprintf(stderr, ": got %s, wanted %s (%s)", code_name(got), code_name(want), ep_error_text());
        fprintf(stderr, "\n");
    }
    if (me && me->world) ep_world_abort(me->world, EP_ESYS, me->rank, "a check of the test failed");
    return false;
}

bool open_heap_and_layer(Rank *me) {
    uint64_t layer_bytes = 0;
    const EpLayerConfig *config = &me->setup->config;
    if (config->num_buffers) WANT(me, 0, ep_layer_check_config(config, &layer_bytes));
    WANT(me, 0, ep_heap_create(me->world, EP_CPU, 0, layer_bytes + me->setup->heap_bytes + 4096, 0, &me->heap));
    if (config->num_buffers && !me->setup->own_layer) WANT(me, 0, ep_layer_create(me->heap, config, &me->layer));
    return true;
}

bool close_together(Rank *me) {
    if (me->layer) WANT(me, 0, ep_layer_close(me->layer));
    if (me->heap) WANT(me, 0, ep_heap_close(me->heap));
    WANT(me, 0, ep_world_close(me->world, true));
    return true;
}

int take_heap(Rank *me, uint64_t num_bytes, uint64_t *off) { return ep_heap_alloc(me->heap, num_bytes, 64, 0, off); }

static void *rank_main(void *arg) {
    Rank *me = (Rank *)arg;
    chaos_begin(me->rank);
    me->ok = open_heap_and_layer(me) && me->body(me, me->arg) && (me->setup->dies || close_together(me));
    return NULL;
}

bool run_team(const Setup *setup, Body *body, void *arg) {
    Rank ranks[EP_MAX_RANKS];
    EpWorld *worlds[EP_MAX_RANKS];
    static uint32_t num_teams;
    bool ok = true;
    memset(ranks, 0, sizeof ranks);
    atomic_store(&slow_rank, num_teams++ % (setup->num_ranks + 1));
    WANT(NULL, 0, ep_world_create_threads(setup->num_ranks, setup->timeout_s > 0 ? setup->timeout_s : long_timeout_s, worlds));
    for (uint32_t r = 0; r < setup->num_ranks; r++) {
        Rank *me = &ranks[r];
        me->setup = setup, me->rank = r, me->world = worlds[r], me->body = body, me->arg = arg;
    }
    for (uint32_t r = 0; r < setup->num_ranks; r++)
        if (pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r])) abort();
    for (uint32_t r = 0; r < setup->num_ranks; r++) pthread_join(ranks[r].thread, NULL);
    for (uint32_t r = 0; r < setup->num_ranks; r++) {
        ok = ok && ranks[r].ok;
        ep_layer_release(ranks[r].layer);
        ep_heap_release(ranks[r].heap);
        ep_world_release(worlds[r]);
    }
    return ok;
}

/* ---- numbers of three kinds ---- */

__extension__ typedef _Float16 Half;

static float bits_as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
/* Of the two bfloat16 around f, the nearer one; of two equally near, the even one. */
static uint16_t nearest_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    uint32_t low = u & 0xffff0000u, high = low + 0x10000u;
    double to_low = (double)f - (double)bits_as_float(low), to_high = (double)bits_as_float(high) - (double)f;
    if (f < 0) to_low = -to_low, to_high = -to_high;
    bool up = to_high < to_low || (to_high == to_low && (low >> 16 & 1u));
    return (uint16_t)((up ? high : low) >> 16);
}
static float load_number(const void *at, uint32_t dtype, uint64_t i) {
    if (dtype == EP_F32) return ((const float *)at)[i];
    if (dtype == EP_BF16) return bits_as_float((uint32_t)((const uint16_t *)at)[i] << 16);
    return (float)((const Half *)at)[i];
}
static void store_number(void *at, uint32_t dtype, uint64_t i, float f) {
    if (dtype == EP_F32) ((float *)at)[i] = f;
    else if (dtype == EP_BF16) ((uint16_t *)at)[i] = nearest_bf16(f);
    else ((Half *)at)[i] = (Half)f;
}
/* Full mantissas of different sizes, so that another order of summation gives another sum. */
static float random_number(Rng *rng) {
    float f = (float)(rng_next(rng) >> 40) / 8388608.0f - 1.0f;
    return f * (float)(1u << rng_below(rng, 6));
}

/* ---- cases ---- */

uint64_t row_bytes(const EpShape *s) { return (uint64_t)s->hidden * (s->dtype == EP_F32 ? 4 : 2); }

static void *take(uint64_t num_bytes) {
    void *at = malloc(num_bytes); /* exact sizes: the address sanitizer then sees a byte too far */
    if (!at && num_bytes) abort();
    return at;
}
static void *random_rows(Rng *rng, const EpShape *s, uint64_t num_rows) {
    void *at = take(num_rows * row_bytes(s));
    for (uint64_t i = 0; i < num_rows * s->hidden; i++) store_number(at, s->dtype, i, random_number(rng));
    return at;
}
static float *random_floats(Rng *rng, uint64_t n) {
    float *at = (float *)take(4 * n);
    for (uint64_t i = 0; i < n; i++) at[i] = random_number(rng);
    return at;
}

static int32_t draw_expert(Rng *rng, const EpShape *s, Route route, uint32_t hot, int32_t before) {
    uint32_t E = s->num_experts, L = E / s->num_ranks;
    switch (route) {
    case ROUTE_REPEAT: return before >= 0 && rng_below(rng, 2) ? before : (int32_t)rng_below(rng, E);
    case ROUTE_HOT: return rng_below(rng, 10) ? (int32_t)hot : (int32_t)rng_below(rng, E);
    case ROUTE_ONE_RANK: return (int32_t)(hot / L * L + rng_below(rng, L));
    case ROUTE_DROPPED: return -1;
    case ROUTE_FULL: return (int32_t)rng_below(rng, E);
    default: return (int32_t)rng_below(rng, E + 2) - 1; /* -1 and E are dropped */
    }
}

static void draw_routing(Case *c, Rng *rng, Route route) {
    const EpShape *s = &c->shape;
    uint32_t hot = rng_below(rng, s->num_experts), K = s->num_topk;
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        uint32_t T = route == ROUTE_FULL ? s->max_tokens : rng_below(rng, s->max_tokens + 1);
        if (route == ROUTE_SOME_EMPTY && rng_below(rng, 2)) T = 0;
        c->num_tokens[w] = T;
        c->index[w] = take((uint64_t)T * K * (c->has_wide_index ? 8 : 4));
        c->expert[w] = (int32_t *)take(4ull * T * K), c->row[w] = (int32_t *)take(4ull * T * K);
        for (uint32_t i = 0; i < T * K; i++) {
            int32_t e = draw_expert(rng, s, route, hot, i % K ? c->expert[w][i - 1] : -1);
            if (e == -1 && rng_below(rng, 2)) e = (int32_t)s->num_experts;
            if (c->has_wide_index) ((int64_t *)c->index[w])[i] = e;
            else ((int32_t *)c->index[w])[i] = e;
            c->expert[w][i] = e == (int32_t)s->num_experts ? -1 : e;
            c->row[w][i] = -1;
        }
    }
}

/* Rows of rank r: everything sent to it, listed in order; or, with scatter, in an order drawn here. */
static void place_rows(Case *c, Rng *rng, uint32_t r) {
    const EpShape *s = &c->shape;
    uint32_t K = s->num_topk, L = s->num_experts / s->num_ranks, n = 0, most = s->num_ranks * s->max_tokens * K;
    c->origin[r] = (Origin *)take(most * sizeof(Origin));
    for (uint32_t e = r * L; e < (r + 1) * L; e++)
        for (uint32_t w = 0; w < s->num_ranks; w++)
            for (uint32_t t = 0; t < c->num_tokens[w]; t++)
                for (uint32_t k = 0; k < K; k++)
                    if (c->expert[w][t * K + k] == (int32_t)e) c->origin[r][n++] = (Origin){w, t, k, e};
    c->num_rows[r] = n;
    for (uint32_t i = n; c->has_scatter && i > 1; i--) {
        uint32_t j = rng_below(rng, i);
        Origin o = c->origin[r][i - 1];
        c->origin[r][i - 1] = c->origin[r][j], c->origin[r][j] = o;
    }
    for (uint32_t i = 0; i < n; i++) c->row[c->origin[r][i].source][c->origin[r][i].token * K + c->origin[r][i].choice] = (int32_t)i;
}

static void add_choice(const Case *c, float *acc, uint32_t r, int32_t row) {
    const EpShape *s = &c->shape;
    for (uint32_t h = 0; h < s->hidden; h++) {
        float v = load_number(c->y[r], s->dtype, (uint64_t)row * s->hidden + h);
        float term = c->has_row_weight ? c->row_weight[r][row] * v : v;
        acc[h] += term;
    }
}

static void expect_combine(Case *c, uint32_t w) {
    const EpShape *s = &c->shape;
    uint32_t K = s->num_topk, L = s->num_experts / s->num_ranks, T = c->num_tokens[w], H = s->hidden;
    bool local = s->combine_mode == EP_COMBINE_LOCAL;
    float *sum = (float *)take(4ull * H), *part = (float *)take(4ull * H);
    uint16_t rounded[2];
    float one;
    c->out[w] = take(T * row_bytes(s)), c->out_scalar[w] = (float *)take(4ull * T * K);
    for (uint32_t t = 0; t < T; t++) {
        for (uint32_t h = 0; h < H; h++) sum[h] = 0;
        for (uint32_t group = 0; group < (local ? s->num_ranks : 1); group++) {
            for (uint32_t h = 0; h < H; h++) part[h] = 0;
            for (uint32_t k = 0; k < K; k++) {
                int32_t e = c->expert[w][t * K + k];
                if (e < 0 || (local && (uint32_t)e / L != group)) continue;
                add_choice(c, part, (uint32_t)e / L, c->row[w][t * K + k]);
            }
            for (uint32_t h = 0; h < H; h++) { /* a partial sum travels in the dtype of the rows */
                void *cell = s->dtype == EP_F32 ? (void *)&one : (void *)rounded;
                store_number(cell, s->dtype, 0, part[h]);
                sum[h] = local ? sum[h] + load_number(cell, s->dtype, 0) : part[h];
            }
        }
        for (uint32_t h = 0; h < H; h++) store_number(c->out[w], s->dtype, (uint64_t)t * H + h, sum[h]);
        for (uint32_t k = 0; k < K; k++) {
            int32_t e = c->expert[w][t * K + k];
            c->out_scalar[w][t * K + k] = e < 0 ? 0 : c->row_scalar[(uint32_t)e / L][c->row[w][t * K + k]];
        }
    }
    free(sum), free(part);
}

void case_make(Case *c, const EpShape *shape, Rng *rng, Route route, unsigned options) {
    uint32_t W = shape->num_ranks, K = shape->num_topk, total = 0, at = 0;
    memset(c, 0, sizeof *c);
    c->shape = *shape;
    c->has_weight = options & WITH_WEIGHTS || rng_below(rng, 2), c->has_row_weight = options & WITH_WEIGHTS || rng_below(rng, 2);
    c->has_scalar = options & WITH_WEIGHTS || rng_below(rng, 2);
    c->has_wide_index = rng_below(rng, 2), c->has_scatter = options & WITH_SCATTER;
    c->slack = options & WITHOUT_SLACK || rng_below(rng, 2) ? 0 : 1 + rng_below(rng, 5);
    draw_routing(c, rng, route);
    for (uint32_t r = 0; r < W; r++) place_rows(c, rng, r);
    for (uint32_t w = 0; w < W; w++) {
        uint64_t T = c->num_tokens[w], M = c->num_rows[w] + c->slack;
        c->x[w] = random_rows(rng, shape, T), c->y[w] = random_rows(rng, shape, M);
        c->weight[w] = random_floats(rng, T * K), c->row_weight[w] = random_floats(rng, M), c->row_scalar[w] = random_floats(rng, M);
        total += c->num_tokens[w];
    }
    for (uint32_t w = 0; w < W; w++) expect_combine(c, w);
    c->scatter = (int32_t *)take(4ull * total * K);
    for (uint32_t w = 0; w < W; w++)
        for (uint32_t i = 0; i < c->num_tokens[w] * K; i++, at++) /* the place of a dropped choice means nothing */
            c->scatter[at] = c->row[w][i] >= 0 ? c->row[w][i] : (int32_t)rng_below(rng, 1000) - 500;
}

void case_free(Case *c) {
    for (uint32_t w = 0; w < EP_MAX_RANKS; w++) {
        void *all[] = {c->index[w],  c->x[w],   c->weight[w], c->y[w],   c->row_weight[w], c->row_scalar[w],
                       c->expert[w], c->row[w], c->origin[w], c->out[w], c->out_scalar[w]};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    }
    free(c->scatter);
}

uint32_t most_rows(const Case *cases, uint32_t num_cases) {
    uint32_t most = 1;
    for (uint32_t i = 0; i < num_cases; i++)
        for (uint32_t r = 0; r < cases[i].shape.num_ranks; r++)
            if (cases[i].num_rows[r] > most) most = cases[i].num_rows[r];
    return most;
}

/* ---- one rank's part of a case ---- */

EpTensor tensor1(const void *data, uint32_t dtype, int64_t d0) {
    EpTensor t;
    memset(&t, 0, sizeof t);
    t.data = d0 ? (void *)(uintptr_t)data : NULL; /* torch too gives an empty tensor no address */
    t.dtype = dtype, t.num_dims = 1, t.shape[0] = d0, t.stride[0] = 1, t.kind = EP_CPU;
    return t;
}
EpTensor tensor2(const void *data, uint32_t dtype, int64_t d0, int64_t d1) {
    EpTensor t = tensor1(data, dtype, d0);
    t.num_dims = 2, t.shape[1] = d1, t.stride[0] = d1, t.stride[1] = 1;
    return t;
}

static void *take_poisoned(void *old, uint64_t num_bytes) {
    free(old);
    void *at = take(num_bytes);
    if (num_bytes) memset(at, 0x5a, num_bytes);
    return at;
}

Step step_open(Rank *me, const Case *c, uint32_t buffer) {
    Step st;
    memset(&st, 0, sizeof st);
    st.me = me, st.c = c, st.buffer = buffer, st.num_tokens = c->num_tokens[me->rank];
    st.num_rows = c->num_rows[me->rank] + c->slack;
    st.plan_words = ep_plan_layout(&me->setup->config.shape, st.num_tokens).num_words;
    st.recv_words = (uint64_t)c->shape.num_ranks * c->shape.max_tokens * (1 + c->shape.num_topk);
    return st;
}

void step_close(Step *st) {
    void *all[] = {st->plan, st->recv, st->rows, st->out, st->row_weight, st->out_scalar};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    memset(st, 0, sizeof *st);
}

int call_plan(Step *st) {
    const Case *c = st->c;
    uint32_t me = st->me->rank, before = 0, total = 0, K = c->shape.num_topk;
    st->plan = (int32_t *)take_poisoned(st->plan, 4 * st->plan_words);
    for (uint32_t w = 0; w < c->shape.num_ranks; total += c->num_tokens[w++])
        if (w < me) before += c->num_tokens[w];
    EpTensor index = tensor2(c->index[me], c->has_wide_index ? EP_I64 : EP_I32, st->num_tokens, K);
    EpTensor plan = tensor1(st->plan, EP_I32, (int64_t)st->plan_words), scatter;
    if ((me + total) % 2) scatter = tensor2(c->scatter, EP_I32, total, K); /* of all ranks, or of this one */
    else scatter = tensor2(c->scatter + (uint64_t)before * K, EP_I32, st->num_tokens, K);
    return ep_layer_plan(st->me->layer, st->buffer, &index, c->has_scatter ? &scatter : NULL, false, &plan, NULL);
}

int call_dispatch(Step *st) {
    const Case *c = st->c;
    const EpShape *s = &c->shape;
    uint32_t me = st->me->rank;
    st->recv = (int32_t *)take_poisoned(st->recv, 4 * st->recv_words);
    st->rows = take_poisoned(st->rows, st->num_rows * row_bytes(s));
    st->row_weight = (float *)take_poisoned(st->row_weight, 4ull * st->num_rows);
    EpTensor x = tensor2(c->x[me], s->dtype, st->num_tokens, s->hidden),
             weight = tensor2(c->weight[me], EP_F32, st->num_tokens, s->num_topk);
    EpTensor plan = tensor1(st->plan, EP_I32, (int64_t)st->plan_words), recv = tensor1(st->recv, EP_I32, (int64_t)st->recv_words);
    EpTensor rows = tensor2(st->rows, s->dtype, st->num_rows, s->hidden), row_weight = tensor1(st->row_weight, EP_F32, st->num_rows);
    return ep_layer_dispatch(st->me->layer, st->buffer, &x, c->has_weight ? &weight : NULL, &plan, &rows,
                             c->has_weight ? &row_weight : NULL, &recv, NULL);
}

int call_combine(Step *st) {
    const Case *c = st->c;
    const EpShape *s = &c->shape;
    uint32_t me = st->me->rank;
    st->out = take_poisoned(st->out, st->num_tokens * row_bytes(s));
    st->out_scalar = (float *)take_poisoned(st->out_scalar, 4ull * st->num_tokens * s->num_topk);
    EpTensor y = tensor2(c->y[me], s->dtype, st->num_rows, s->hidden), row_weight = tensor1(c->row_weight[me], EP_F32, st->num_rows);
    EpTensor row_scalar = tensor1(c->row_scalar[me], EP_F32, st->num_rows);
    EpTensor plan = tensor1(st->plan, EP_I32, (int64_t)st->plan_words), recv = tensor1(st->recv, EP_I32, (int64_t)st->recv_words);
    EpTensor out = tensor2(st->out, s->dtype, st->num_tokens, s->hidden),
             out_scalar = tensor2(st->out_scalar, EP_F32, st->num_tokens, s->num_topk);
    return ep_layer_combine(st->me->layer, st->buffer, &y, c->has_row_weight ? &row_weight : NULL, c->has_scalar ? &row_scalar : NULL,
                            &plan, &recv, &out, c->has_scalar ? &out_scalar : NULL, NULL);
}

int call_op(Step *st, uint32_t op) {
    if (op == EP_OP_PLAN) return call_plan(st);
    if (op == EP_OP_DISPATCH) return call_dispatch(st);
    return op == EP_OP_COMBINE ? call_combine(st) : ep_layer_barrier(st->me->layer, st->buffer, NULL);
}

bool all_bytes_are(const void *at, uint64_t num_bytes, unsigned char value) {
    for (uint64_t i = 0; i < num_bytes; i++)
        if (((const unsigned char *)at)[i] != value) return false;
    return true;
}

static bool goes_to(const Case *c, uint32_t w, uint32_t t, uint32_t r) {
    uint32_t K = c->shape.num_topk, L = c->shape.num_experts / c->shape.num_ranks;
    for (uint32_t k = 0; k < K; k++)
        if (c->expert[w][t * K + k] >= 0 && (uint32_t)c->expert[w][t * K + k] / L == r) return true;
    return false;
}

bool check_plan(const Step *st) {
    const Case *c = st->c;
    Rank *me = st->me;
    const EpShape *s = &c->shape;
    const EpPlanLayout at = ep_plan_layout(&me->setup->config.shape, st->num_tokens);
    const int32_t *p = st->plan, *expert = c->expert[me->rank];
    uint32_t K = s->num_topk, W = s->num_ranks, L = s->num_experts / W, T = st->num_tokens, num_rows, n = 0, tile = 0, row = 0;
    WANT(me, 0, ep_layer_num_rows(me->layer, st->buffer, NULL, NULL, &num_rows));
    CHECK(me, num_rows == c->num_rows[me->rank]);
    CHECK(me, p[EP_HEAD_STATUS] == 0 && p[EP_HEAD_NUM_TOKENS] == (int32_t)T && p[EP_HEAD_NUM_ROWS] == (int32_t)num_rows);
    for (uint32_t i = 0; i < T * K; i++) {
        CHECK(me, p[at.token_expert_off + i] == expert[i]);
        CHECK(me, p[at.token_row_off + i] == c->row[me->rank][i]);
    }
    for (uint32_t r = 0; r < W; r++) {
        int32_t num_send = 0, num_recv = 0;
        for (uint32_t t = 0; t < T; t++) {
            bool sent = goes_to(c, me->rank, t, r);
            CHECK(me, p[at.token_slot_off + t * W + r] == (sent ? num_send : -1));
            if (!sent) continue;
            CHECK(me, p[at.send_token_off + r * T + (uint32_t)num_send] == (int32_t)t);
            num_send++;
        }
        for (uint32_t t = 0; t < c->num_tokens[r]; t++) num_recv += goes_to(c, r, t, me->rank);
        CHECK(me, p[EP_HEAD_NUM_SEND + r] == num_send && p[EP_HEAD_NUM_RECV + r] == num_recv);
        CHECK(me, p[EP_HEAD_RANK_ROWS + r] == (int32_t)c->num_rows[r]);
    }
    for (uint32_t w = 0; w < W; w++)
        for (uint32_t e = 0; e < s->num_experts; e++) {
            int32_t count = 0;
            for (uint32_t i = 0; i < c->num_tokens[w] * K; i++) count += c->expert[w][i] == (int32_t)e;
            CHECK(me, p[at.counts_off + w * s->num_experts + e] == count);
        }
    for (uint32_t e = 0; e < s->num_experts; e++)
        for (uint32_t i = 0; i < T * K; i++)
            if (expert[i] == (int32_t)e) CHECK(me, p[at.sort_off + n++] == (int32_t)i);
    while (n < T * K) CHECK(me, p[at.sort_off + n++] == -1);
    for (uint32_t l = 0; l < L; l++) { /* tiles of 128 rows, none across experts */
        uint32_t end = row;
        for (uint32_t i = 0; i < c->num_rows[me->rank]; i++) end += c->origin[me->rank][i].expert == me->rank * L + l;
        CHECK(me, p[at.expert_row_off + l] == (int32_t)row && p[at.expert_row_off + l + 1] == (int32_t)end);
        for (; row < end; row = end - row < 128 ? end : row + 128, tile++)
            CHECK(me, p[at.tile_expert_off + tile] == (int32_t)l && p[at.tile_row_off + tile] == (int32_t)row);
    }
    CHECK(me, p[EP_HEAD_NUM_TILES] == (int32_t)tile);
    return true;
}

bool check_dispatch(const Step *st) {
    const Case *c = st->c;
    Rank *me = st->me;
    const EpShape *s = &c->shape;
    uint64_t bytes = row_bytes(s), K = s->num_topk, L = s->num_experts / s->num_ranks;
    uint32_t num_rows = c->num_rows[me->rank];
    for (uint32_t i = 0; i < num_rows; i++) {
        const Origin *o = &c->origin[me->rank][i];
        CHECK(me, memcmp((char *)st->rows + i * bytes, (char *)c->x[o->source] + o->token * bytes, bytes) == 0);
        if (c->has_weight) CHECK(me, memcmp(&st->row_weight[i], &c->weight[o->source][o->token * K + o->choice], 4) == 0);
    }
    CHECK(me, all_bytes_are((char *)st->rows + num_rows * bytes, c->slack * bytes, 0));
    CHECK(me, all_bytes_are(st->row_weight + num_rows, 4ull * c->slack, c->has_weight ? 0 : 0x5a));
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        const int32_t *recv = st->recv + (uint64_t)w * s->max_tokens * (1 + K);
        for (uint32_t t = 0; t < c->num_tokens[w]; t++) {
            if (!goes_to(c, w, t, me->rank)) continue;
            CHECK(me, recv[0] == (int32_t)t);
            for (uint32_t k = 0; k < K; k++) {
                int32_t e = c->expert[w][t * K + k];
                CHECK(me, recv[1 + k] == (e >= 0 && (uint32_t)e / L == me->rank ? c->row[w][t * K + k] : -1));
            }
            recv += 1 + K;
        }
    }
    return true;
}

bool check_combine(const Step *st) {
    const Case *c = st->c;
    Rank *me = st->me;
    uint64_t bytes = row_bytes(&c->shape), K = c->shape.num_topk;
    for (uint32_t t = 0; t < st->num_tokens; t++)
        CHECK(me, memcmp((char *)st->out + t * bytes, (char *)c->out[me->rank] + t * bytes, bytes) == 0);
    for (uint32_t i = 0; i < st->num_tokens * K && c->has_scalar; i++)
        CHECK(me, memcmp(&st->out_scalar[i], &c->out_scalar[me->rank][i], 4) == 0);
    return true;
}

bool run_step(Rank *me, const Case *c, uint32_t buffer) {
    Step st = step_open(me, c, buffer);
    WANT(me, 0, call_plan(&st));
    TRY(check_plan(&st));
    WANT(me, 0, call_dispatch(&st));
    TRY(check_dispatch(&st));
    WANT(me, 0, call_combine(&st));
    TRY(check_combine(&st));
    step_close(&st);
    return true;
}

bool with_cases(Body *body, EpLayerConfig config, bool dies, uint32_t num_cases) {
    Setup setup = {.num_ranks = config.shape.num_ranks, .config = config, .dies = dies};
    Case *cases = (Case *)calloc(num_cases, sizeof(Case));
    Rng rng = {test_seed * 31};
    for (uint32_t i = 0; i < num_cases; i++)
        case_make(&cases[i], &config.shape, &rng, i ? ROUTE_RANDOM : ROUTE_FULL, WITH_WEIGHTS | WITHOUT_SLACK);
    bool ok = run_team(&setup, body, cases);
    for (uint32_t i = 0; i < num_cases; i++) case_free(&cases[i]);
    free(cases);
    return ok;
}
