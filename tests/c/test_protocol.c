/* test_protocol.c - the CPU side of epmoe under test: steps against a brute-force oracle, the heap, and
 * every way in which ranks can fail, disagree, stay away, leave, or write nonsense.
 *
 *   test_protocol [-s seed] [-n per cent of the usual steps] [-t timeout in seconds] [part of a test's name ...]
 */
#include <signal.h>

#include "harness.h"

/* ---- steps ---- */

typedef struct {
    Case *cases;
    uint32_t num_cases, num_buffers;
    uint64_t first_epoch;
} Cases;

static bool steps_body(Rank *me, void *arg) {
    const Cases *s = (const Cases *)arg;
    if (s->first_epoch) WANT(me, 0, ep_layer_set_epoch(me->layer, 0, s->first_epoch, NULL));
    for (uint32_t i = 0; i < s->num_cases; i++) TRY(run_step(me, &s->cases[i], i % s->num_buffers));
    return true;
}

static bool run_cases(const EpLayerConfig *config, Body *body, uint32_t num_cases, uint64_t first_epoch, uint64_t seed, unsigned options) {
    Setup setup = {.num_ranks = config->shape.num_ranks, .config = *config};
    Cases s = {(Case *)calloc(num_cases, sizeof(Case)), num_cases, config->num_buffers, first_epoch};
    Rng rng = {test_seed * 7777 + seed};
    for (uint32_t i = 0; i < num_cases; i++) case_make(&s.cases[i], &config->shape, &rng, (Route)((i + seed) % NUM_ROUTES), options);
    setup.config.shape.capacity = most_rows(s.cases, num_cases); /* what just suffices */
    bool ok = run_team(&setup, body, &s);
    for (uint32_t i = 0; i < num_cases; i++) case_free(&s.cases[i]);
    free(s.cases);
    return ok;
}

static bool steps_of_mode(EpCombineMode mode) {
    for (uint32_t num_ranks = 1, seed = 0; num_ranks <= 4; num_ranks++)
        for (uint32_t num_sm = 1; num_sm <= 3; num_sm++, seed++) {
            uint32_t dtype = (uint32_t)(seed + mode + test_seed) % 3;
            EpShape shape = {num_ranks, num_ranks * (1 + seed % 4), 1 + (seed * 3 + 3) % 5, 9 + 5 * (seed % 4), 8u << seed % 3, dtype, mode,
                             0};
            EpLayerConfig config = {shape, 2, num_sm, 0};
            TRY(run_cases(&config, steps_body, scaled(40), 0, seed, 0));
        }
    return true;
}
static bool test_steps_local(void) { return steps_of_mode(EP_COMBINE_LOCAL); }
static bool test_steps_scatter(void) { return steps_of_mode(EP_COMBINE_SCATTER); }
static bool test_steps_gather(void) { return steps_of_mode(EP_COMBINE_GATHER); }

/* Rows, slots and tiles in number: the hot expert has more rows than a tile. */
static bool test_steps_large(void) {
    EpLayerConfig config = {{3, 12, 6, 96, 64, EP_BF16, EP_COMBINE_LOCAL, 0}, 1, 3, 0};
    for (uint32_t mode = 0; mode < 3; mode++) {
        config.shape.combine_mode = mode;
        TRY(run_cases(&config, steps_body, scaled(12), 0, ROUTE_HOT + mode, 0));
    }
    return true;
}

/* Two calls in flight, one per buffer, and their stages mixed. */
static bool buffers_body(Rank *me, void *arg) {
    const Cases *s = (const Cases *)arg;
    for (uint32_t i = 0; i + 1 < s->num_cases; i += 2) {
        Step a = step_open(me, &s->cases[i], 0), b = step_open(me, &s->cases[i + 1], 1);
        WANT(me, 0, call_plan(&a));
        WANT(me, 0, call_plan(&b));
        WANT(me, 0, call_dispatch(&b));
        WANT(me, 0, call_dispatch(&a));
        WANT(me, 0, call_combine(&a));
        WANT(me, 0, ep_layer_barrier(me->layer, 1, NULL));
        WANT(me, 0, call_combine(&b));
        TRY(check_plan(&a) && check_dispatch(&a) && check_combine(&a));
        TRY(check_plan(&b) && check_dispatch(&b) && check_combine(&b));
        step_close(&a), step_close(&b);
    }
    WANT(me, 0, ep_layer_sync(me->layer, NULL));
    return true;
}
static bool test_buffers(void) {
    for (uint32_t mode = 0; mode < 3; mode++) {
        EpLayerConfig config = {{3, 6, 4, 12, 16, EP_BF16, mode, 0}, 2, 2, 0};
        TRY(run_cases(&config, buffers_body, scaled(50) + 2, 0, mode, 0));
    }
    return true;
}

/* One plan for many dispatches and combines, each with new tokens. */
static bool reuse_body(Rank *me, void *arg) {
    const Cases *s = (const Cases *)arg;
    Case c = s->cases[0];
    Step st = step_open(me, &c, 0);
    WANT(me, 0, call_plan(&st));
    for (uint32_t i = 0; i < 2 * scaled(30); i++) {
        Case *now = &s->cases[i % 2]; /* the second has the same routing */
        st.c = now;
        WANT(me, 0, call_dispatch(&st));
        TRY(check_dispatch(&st));
        WANT(me, 0, call_combine(&st));
        TRY(check_combine(&st));
    }
    step_close(&st);
    return true;
}
static bool test_reuse(void) {
    for (uint32_t mode = 0; mode < 3; mode++) {
        EpLayerConfig config = {{2, 6, 3, 12, 8, EP_F32, mode, 0}, 1, 2, 0};
        Setup setup = {.num_ranks = 2, .config = config};
        Case cases[2];
        Cases s = {cases, 2, 1, 0};
        for (uint32_t i = 0; i < 2; i++) { /* from the same seed */
            Rng rng = {test_seed + mode};
            case_make(&cases[i], &config.shape, &rng, ROUTE_RANDOM, WITH_WEIGHTS | WITHOUT_SLACK);
        }
        for (uint32_t w = 0; w < 2; w++) { /* the same routing, all numbers doubled: exact in float32 */
            float *doubled[] = {(float *)cases[1].x[w], (float *)cases[1].y[w], (float *)cases[1].out[w]};
            uint32_t n[] = {cases[1].num_tokens[w], cases[1].num_rows[w], cases[1].num_tokens[w]};
            for (uint32_t j = 0; j < 3; j++)
                for (uint32_t i = 0; i < n[j] * config.shape.hidden; i++) doubled[j][i] *= 2;
        }
        setup.config.shape.capacity = most_rows(cases, 2);
        bool ok = run_team(&setup, reuse_body, &s);
        case_free(&cases[0]), case_free(&cases[1]);
        TRY(ok);
    }
    return true;
}

/* The caller chooses the rows. */
static bool test_scatter(void) {
    for (uint32_t num_ranks = 1; num_ranks <= 4; num_ranks++)
        for (uint32_t mode = 0; mode < 3; mode++) {
            EpLayerConfig config = {{num_ranks, 4 * num_ranks, 3, 10, 8, EP_F32, mode, 0}, 1, 2, 0};
            TRY(run_cases(&config, steps_body, scaled(14), 0, num_ranks, WITH_SCATTER));
        }
    return true;
}

/* Where a half of the epoch, or a sign bit, turns over. */
static bool test_epochs(void) {
    static const uint64_t turns[] = {1ull << 31, 1ull << 32, 1ull << 63};
    for (uint32_t i = 0; i < 3; i++)
        for (uint64_t before = 1; before <= 5; before++) {
            EpLayerConfig config = {{3, 6, 2, 8, 8, EP_F32, (uint32_t)(before % 3), 0}, 1, 2, 0};
            TRY(run_cases(&config, steps_body, 4, turns[i] - before, before, 0));
        }
    return true;
}

/* ---- calls that fail, and the calls after them ---- */

static bool bad_index_body(Rank *me, void *arg) {
    Case *cases = (Case *)arg;
    static const int64_t nonsense[] = {-2, 7, 1000000, INT32_MIN, INT64_MAX};
    for (uint32_t i = 0; i < 5; i++) {
        Case c = cases[0];
        uint32_t K = c.shape.num_topk, T = c.num_tokens[me->rank];
        int64_t *wide = (int64_t *)malloc(8ull * T * K);
        for (uint32_t j = 0; j < T * K; j++) wide[j] = c.expert[me->rank][j];
        uint32_t at = T * K / 2;
        if (me->rank == 1) wide[at] = nonsense[i], wide[T * K - 1] = -9;
        c.index[me->rank] = wide, c.has_wide_index = true;
        Step st = step_open(me, &c, 0);
        WANT(me, EP_EINDEX, call_plan(&st));
        char want[80];
        uint32_t last = c.num_tokens[1] * K - 1, bad = c.num_tokens[1] * K / 2;
        snprintf(want, sizeof want, "rank 1: expert index %lld of token %u, choice %u ", bad == last ? -9ll : (long long)nonsense[i],
                 bad / K, bad % K);
        CHECK(me, strstr(ep_error_text(), want));
        uint32_t num_rows;
        WANT(me, EP_EPEER, ep_layer_num_rows(me->layer, 0, NULL, NULL, &num_rows));
        if (i % 2) WANT(me, EP_EPEER, call_dispatch(&st)); /* a failed plan is good for nothing */
        if (i % 2) CHECK(me, all_bytes_are(st.rows, st.num_rows * row_bytes(&c.shape), EP_FILL_NAN));
        step_close(&st);
        free(wide);
        TRY(run_step(me, &cases[i % 2], 0));
    }
    return true;
}
static bool test_bad_index(void) { return with_cases(bad_index_body, small_config(3), false, 2); }

static bool overflow_body(Rank *me, void *arg) {
    Case *cases = (Case *)arg;
    for (uint32_t i = 0; i < 3; i++) {
        Step st = step_open(me, &cases[0], 0);
        WANT(me, EP_EOVERFLOW, call_plan(&st));
        CHECK(me, strstr(ep_error_text(), "its capacity is 40"));
        step_close(&st);
        TRY(run_step(me, &cases[1], 0));
    }
    return true;
}
static bool test_overflow(void) {
    Case cases[2];
    Setup setup = {.num_ranks = 3, .config = small_config(3)};
    Rng rng = {test_seed};
    setup.config.shape.capacity = 40;
    case_make(&cases[0], &setup.config.shape, &rng, ROUTE_FULL, 0); /* 144 rows on 3 ranks: one has more than 40 */
    setup.config.shape.max_tokens = 4;
    case_make(&cases[1], &setup.config.shape, &rng, ROUTE_FULL, 0);
    setup.config.shape.max_tokens = cases[1].shape.max_tokens = 16;
    bool ok = run_team(&setup, overflow_body, cases);
    case_free(&cases[0]), case_free(&cases[1]);
    return ok;
}

static bool bad_scatter_body(Rank *me, void *arg) {
    Case *cases = (Case *)arg, c = cases[0];
    uint32_t T = c.num_tokens[me->rank], K = c.shape.num_topk;
    Step st = step_open(me, &c, 0);
    int32_t *scatter = (int32_t *)calloc((T + 1) * K, 4), num_words = (int32_t)st.plan_words;
    memcpy(scatter, c.row[me->rank], 4ull * T * K);
    int32_t *words = (int32_t *)malloc(4 * st.plan_words);
    EpTensor index = tensor2(c.expert[me->rank], EP_I32, T, K), plan = tensor1(words, EP_I32, num_words);
    EpTensor s = tensor2(scatter, EP_I32, T + (me->rank == 1), K);
    WANT(me, EP_EINVAL, ep_layer_plan(me->layer, 0, &index, &s, false, &plan, NULL)); /* the length of no one's tokens */
    CHECK(me, strstr(ep_error_text(), "rank 1"));
    s = tensor2(scatter, EP_I32, T, K);
    if (me->rank == 1) scatter[0] = 100000; /* only this rank knows that there is no such row; the others learn it in dispatch */
    st.plan = words;
    WANT(me, me->rank == 1 ? EP_EINVAL : 0, ep_layer_plan(me->layer, 0, &index, &s, false, &plan, NULL));
    if (me->rank != 1) WANT(me, EP_EPEER, call_dispatch(&st));
    free(scatter);
    step_close(&st);
    return run_step(me, &cases[1], 0);
}
static bool test_bad_scatter(void) { return with_cases(bad_scatter_body, small_config(3), false, 2); }

/* Rank 1's argument is wrong: it gets its own error, the others PeerError, and the next call works. */
static bool refuse_body(Rank *me, void *arg) {
    Case *cases = (Case *)arg, c = cases[0];
    bool wrong = me->rank == 1;
    Step st = step_open(me, &c, 0);
    if (wrong) st.plan_words += 4;
    WANT(me, wrong ? EP_EINVAL : EP_EPEER, call_plan(&st));
    CHECK(me, strstr(ep_error_text(), wrong ? "plan: wanted size" : "rank 1 failed before its plan: ValueError"));
    if (wrong) st.plan_words -= 4;
    WANT(me, 0, call_plan(&st));
    TRY(check_plan(&st));
    if (wrong) c.shape.hidden = 8;
    WANT(me, wrong ? EP_EINVAL : EP_EPEER, call_dispatch(&st));
    if (!wrong) CHECK(me, all_bytes_are(st.rows, st.num_rows * row_bytes(&c.shape), EP_FILL_NAN));
    c.shape.hidden = 16;
    if (wrong) c.shape.dtype = EP_BF16;
    WANT(me, wrong ? EP_ETYPE : EP_EPEER, call_dispatch(&st));
    CHECK(me, strstr(ep_error_text(), wrong ? "input: wanted float32, got bfloat16" : "rank 1 failed before its dispatch: TypeError"));
    c.shape.dtype = EP_F32;
    WANT(me, 0, call_dispatch(&st));
    TRY(check_dispatch(&st));
    if (wrong) st.recv_words--;
    WANT(me, wrong ? EP_EINVAL : EP_EPEER, call_combine(&st));
    if (!wrong) CHECK(me, all_bytes_are(st.out, st.num_tokens * row_bytes(&c.shape), EP_FILL_NAN));
    if (wrong) st.recv_words++;
    WANT(me, 0, call_combine(&st));
    TRY(check_combine(&st));
    for (uint32_t op = EP_OP_PLAN; op <= EP_OP_BARRIER; op++) { /* the refusal alone */
        if (wrong) WANT(me, 0, ep_layer_refuse(me->layer, 0, op, EP_ETYPE, NULL));
        else WANT(me, EP_EPEER, call_op(&st, op));
    }
    WANT(me, EP_EINVAL, ep_layer_refuse(me->layer, 0, EP_OP_PLAN, 0, NULL));
    WANT(me, EP_EINVAL, ep_layer_barrier(me->layer, 1, NULL));
    step_close(&st);
    return run_step(me, &cases[1], 0);
}
static bool test_refuse(void) { return with_cases(refuse_body, small_config(3), false, 2); }

/* Every rank is told, whoever it is that differs; and the call after it works. */
static bool disagree_body(Rank *me, void *arg) {
    Case *cases = (Case *)arg;
    for (uint32_t odd = 0; odd < 3; odd++) {
        Case c = cases[0];
        bool me_odd = me->rank == odd;
        Step st = step_open(me, &c, 0), old = step_open(me, &c, 0);
        WANT(me, 0, call_plan(&old));
        WANT(me, 0, call_plan(&st));
        WANT(me, 0, call_dispatch(&st));
        WANT(me, EP_EMISMATCH, me_odd ? call_combine(&st) : call_dispatch(&st));
        CHECK(me, strstr(ep_error_text(), "ranks disagree in op"));
        WANT(me, EP_EMISMATCH, me_odd ? ep_layer_barrier(me->layer, 0, NULL) : call_plan(&old));
        WANT(me, 0, call_plan(&old));
        c.has_weight = !me_odd;
        WANT(me, EP_EMISMATCH, call_dispatch(&st));
        CHECK(me, strstr(ep_error_text(), "ranks disagree in has_weight"));
        c.has_weight = true;
        WANT(me, EP_EMISMATCH, call_dispatch(me_odd ? &old : &st));
        CHECK(me, strstr(ep_error_text(), "ranks disagree in plan_idx"));
        CHECK(me, all_bytes_are(me_odd ? old.rows : st.rows, st.num_rows * row_bytes(&c.shape), EP_FILL_NAN));
        WANT(me, 0, call_dispatch(&st));
        TRY(check_dispatch(&st));
        c.has_scalar = !me_odd;
        WANT(me, EP_EMISMATCH, call_combine(&st));
        c.has_scalar = true;
        WANT(me, 0, call_combine(&st));
        TRY(check_combine(&st));
        step_close(&st), step_close(&old);
    }
    return true;
}
static bool test_disagree(void) { return with_cases(disagree_body, small_config(3), false, 1); }

/* Layers that differ: nobody gets one, both values are named, and the next one can be made. */
typedef struct {
    EpLayerConfig config[2];
    const char *text;
} Differing;
static bool configs_body(Rank *me, void *arg) {
    const Differing *d = (const Differing *)arg;
    WANT(me, EP_EMISMATCH, ep_layer_create(me->heap, &d->config[me->rank == 1], &me->layer));
    CHECK(me, strstr(ep_error_text(), d->text));
    EpLayerConfig same = d->config[0];
    same.num_sm += me->rank; /* the one thing that may differ */
    WANT(me, 0, ep_layer_create(me->heap, &same, &me->layer));
    return true;
}
static bool test_configs(void) {
    static const char *const texts[] = {
        "hidden: rank 1 has 32, rank 0 has 16", "topk", "dtype", "combine_mode", "capacity", "num_buffers", "max_tokens"};
    for (uint32_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        Differing d = {{small_config(2), small_config(2)}, texts[i]};
        EpShape *s = &d.config[1].shape;
        d.config[0].shape.combine_mode = s->combine_mode = EP_COMBINE_LOCAL;
        if (i == 0) s->hidden *= 2;
        if (i == 1) s->num_topk++;
        if (i == 2) d.config[0].shape.dtype = EP_F16, s->dtype = EP_BF16;
        if (i == 3) s->combine_mode = EP_COMBINE_SCATTER;
        if (i == 4) s->capacity++;
        if (i == 5) d.config[1].num_buffers++;
        if (i == 6) s->max_tokens++;
        Setup setup = {.num_ranks = 2, .heap_bytes = 1 << 20};
        TRY(run_team(&setup, configs_body, &d));
    }
    return true;
}

/* ---- ranks that stay away, leave, or give up ---- */

typedef enum { MISS_PLAN, MISS_DISPATCH, MISS_COMBINE, MISS_BARRIER, MISS_ALLOC, MISS_SIGNAL, NUM_MISSES } Miss;
static Miss missed;

static bool stay_away_body(Rank *me, void *arg) {
    Step st = step_open(me, (Case *)arg, 0);
    unsigned char none = 0, nones[EP_MAX_RANKS];
    uint64_t off;
    int code = 0;
    if (missed == MISS_DISPATCH || missed == MISS_COMBINE) WANT(me, 0, call_plan(&st));
    if (missed == MISS_COMBINE) WANT(me, 0, call_dispatch(&st));
    WANT(me, 0, ep_world_exchange(me->world, &none, 1, nones));
    WANT(me, 0, ep_world_set_timeout(me->world, short_timeout_s));
    double start = seconds_now();
    if (me->rank == 2) {
        while (!(code = ep_world_check(me->world)) && seconds_now() < start + 20) usleep(5000);
    } else {
        switch (missed) {
        case MISS_PLAN: code = call_plan(&st); break;
        case MISS_DISPATCH: code = call_dispatch(&st); break;
        case MISS_COMBINE: code = call_combine(&st); break;
        case MISS_BARRIER: code = ep_heap_barrier(me->heap, NULL); break;
        case MISS_ALLOC: code = take_heap(me, 8, &off); break;
        default: code = ep_heap_wait(me->heap, 0, UINT64_MAX, true, NULL); break;
        }
    }
    double waited = seconds_now() - start;
    WANT(me, EP_ETIMEOUT, code);
    if (missed != MISS_SIGNAL) CHECK(me, strstr(ep_error_text(), "in vain for rank 2"));
    CHECK(me, waited > 0.9 * short_timeout_s && waited < short_timeout_s + 3);
    WANT(me, EP_ETIMEOUT, call_plan(&st)); /* such a world does not come back */
    step_close(&st);
    return true;
}
static bool test_stay_away(void) {
    for (missed = MISS_PLAN; missed < NUM_MISSES; missed++)
        if (!with_cases(stay_away_body, small_config(3), true, 1)) {
            fprintf(stderr, "FAILED with rank 2 missing from call %d\n", (int)missed);
            return false;
        }
    return true;
}

static bool leave_body(Rank *me, void *arg) {
    Step st = step_open(me, (Case *)arg, 0);
    WANT(me, 0, ep_world_set_timeout(me->world, 20)); /* longer than the grace that a leaver has */
    WANT(me, 0, call_plan(&st));
    double start = seconds_now();
    if (me->rank == 1) {
        WANT(me, 0, ep_world_close(me->world, false));
    } else {
        WANT(me, EP_EPEERDIED, call_dispatch(&st));
        CHECK(me, strstr(ep_error_text(), "rank 1 left") && seconds_now() - start < 8);
        CHECK(me, all_bytes_are(st.rows, st.num_rows * row_bytes(&st.c->shape), EP_FILL_NAN));
    }
    step_close(&st);
    return true;
}
static bool test_leave(void) { return with_cases(leave_body, small_config(3), true, 1); }

/* All-to-all over the sockets; between them ranks that give another size, or nothing. */
static bool exchange_body(Rank *me, void *arg) {
    uint32_t mine[EP_EXCHANGE_BYTES / 4] = {0}, all[4 * EP_EXCHANGE_BYTES / 4];
    Rng rng = {test_seed};
    (void)arg;
    WANT(me, EP_EINVAL, ep_world_exchange(me->world, mine, EP_EXCHANGE_BYTES + 1, all));
    for (uint32_t i = 0; i < scaled(200); i++) {
        uint32_t n = 1 + rng_below(&rng, EP_EXCHANGE_BYTES / 4), odd = rng_below(&rng, 4), how = rng_below(&rng, 4);
        if (how == 0) WANT(me, EP_EMISMATCH, ep_world_exchange(me->world, mine, me->rank == odd ? 8 : 12, all));
        if (how == 1 && me->rank == odd) WANT(me, 0, ep_world_refuse(me->world, EP_EINVAL));
        if (how == 1 && me->rank != odd) WANT(me, EP_EPEER, ep_world_exchange(me->world, mine, 12, all));
        for (uint32_t j = 0; j < n; j++) mine[j] = i << 16 | me->rank << 8 | j;
        WANT(me, 0, ep_world_exchange(me->world, mine, 4 * n, all));
        for (uint32_t r = 0; r < 4; r++)
            for (uint32_t j = 0; j < n; j++) CHECK(me, all[r * n + j] == (i << 16 | r << 8 | j));
    }
    WANT(me, EP_EINVAL, ep_world_refuse(me->world, 1));
    WANT(me, 0, ep_world_check(me->world));
    return true;
}
static bool test_exchange(void) {
    Setup setup = {.num_ranks = 4};
    return run_team(&setup, exchange_body, NULL);
}

static bool abort_body(Rank *me, void *arg) {
    Step st = step_open(me, (Case *)arg, 0);
    int code = call_plan(&st); /* the end may come before this rank has left the plan */
    if (me->rank == 1) ep_world_abort(me->world, EP_ECUDA, 1, "the test says so");
    else WANT(me, EP_ECUDA, code ? code : call_dispatch(&st));
    WANT(me, EP_ECUDA, ep_world_check(me->world));
    CHECK(me, strstr(ep_error_text(), "the test says so"));
    step_close(&st);
    return true;
}
static bool test_abort(void) { return with_cases(abort_body, small_config(3), true, 1); }

/* ---- main ---- */

static const struct {
    const char *name;
    bool (*run)(void);
    bool not_tsan; /* it races on purpose, or runs in processes that the thread sanitizer cannot join */
} tests[] = {
    {"steps_local", test_steps_local, false},
    {"steps_scatter", test_steps_scatter, false},
    {"steps_gather", test_steps_gather, false},
    {"steps_large", test_steps_large, false},
    {"buffers", test_buffers, false},
    {"reuse", test_reuse, false},
    {"full_scatter", test_scatter, false},
    {"epochs", test_epochs, false},
    {"heap_alloc", test_heap_alloc, false},
    {"allocator", test_allocator, false},
    {"room", test_room, false},
    {"heap_huge", test_heap_huge, false},
    {"heap_layer", test_heap_layer, false},
    {"heap_words", test_heap_words, false},
    {"heap_create", test_heap_create, false},
    {"heap_full", test_heap_full, false},
    {"no_memory", test_no_memory, false},
    {"device", test_device, false},
    {"leave_busy", test_leave_busy, false},
    {"stuck_in_order", test_stuck_in_order, false},
    {"stuck_out_of_order", test_stuck_out_of_order, false},
    {"heap_abort", test_heap_abort, false},
    {"closed", test_closed, false},
    {"world_release", test_world_release, false},
    {"bad_index", test_bad_index, false},
    {"overflow", test_overflow, false},
    {"bad_scatter", test_bad_scatter, false},
    {"refuse", test_refuse, false},
    {"disagree", test_disagree, false},
    {"configs", test_configs, false},
    {"stay_away", test_stay_away, false},
    {"leave", test_leave, false},
    {"abort", test_abort, false},
    {"exchange", test_exchange, false},
    {"short_rows", test_short_rows, false},
    {"hostile", test_hostile, true},
    {"notes", test_hostile_notes, false},
    {"processes", test_processes, true},
    {"killed_process", test_killed_process, true},
    {"absent_process", test_absent_process, true},
};
static const char *running = "";

/* A hang is the one fault that no check sees. */
static void hang(int signal_number) {
    static const char text[] = "FAILED: hangs in ";
    (void)signal_number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0 || write(STDERR_FILENO, running, strlen(running)) < 0 ||
        write(STDERR_FILENO, "\n", 1) < 0)
        _exit(71);
    _exit(70);
}

int main(int argc, char **argv) {
    uint32_t num_passed = 0, num_failed = 0;
    int option = 1;
    for (; option + 1 < argc && argv[option][0] == '-'; option += 2) {
        const char *value = argv[option + 1];
        if (!strcmp(argv[option], "-s")) test_seed = strtoull(value, NULL, 10);
        if (!strcmp(argv[option], "-n")) test_scale = (uint32_t)strtoul(value, NULL, 10);
        if (!strcmp(argv[option], "-t")) long_timeout_s = strtod(value, NULL);
        if (!strcmp(argv[option], "--child")) return child_main((uint32_t)atoi(value), FATE_LIVES);
        if (!strcmp(argv[option], "--killed")) return child_main((uint32_t)atoi(value), FATE_KILLED);
        if (!strcmp(argv[option], "--absent")) return child_main((uint32_t)atoi(value), FATE_ABSENT);
    }
    signal(SIGALRM, hang);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool wanted = option == argc;
        for (int a = option; a < argc; a++) wanted = wanted || strstr(tests[i].name, argv[a]);
        if (!wanted || (HAVE_TSAN && tests[i].not_tsan)) continue;
        running = tests[i].name;
        double start = seconds_now();
        alarm(120);
        bool ok = tests[i].run();
        alarm(0);
        printf("%-16s %s %.2f s\n", running, ok ? "ok" : "FAILED", seconds_now() - start);
        fflush(stdout);
        if (ok) num_passed++;
        else num_failed++;
    }
    printf("%u passed, %u failed\n", num_passed, num_failed);
    return num_failed ? 1 : 0;
}
