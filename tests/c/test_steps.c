/* test_steps.c - results of plan, dispatch and combine, compared with a brute-force computation: combine
 * modes, shapes, buffers, reuse of plans, epochs. */
#include "harness.h"
#include "layer/test_hooks.h"

typedef struct {
    Case *cases;
    uint32_t num_cases, num_buffers;
    uint64_t first_epoch;
} Cases;

static bool steps_body(Rank *me, void *arg) {
    const Cases *s = (const Cases *)arg;
    if (s->first_epoch) CHECK_CODE(me, 0, ep_layer_set_epoch(me->layer, 0, s->first_epoch, NULL));
    for (uint32_t i = 0; i < s->num_cases; i++) TRY(run_step(me, &s->cases[i], i % s->num_buffers));
    return true;
}

static bool run_cases(const EpLayerConfig *config, Body *body, uint32_t num_cases, uint64_t first_epoch,
                      uint64_t seed, unsigned options) {
    Setup setup = {.num_ranks = config->shape.num_ranks, .config = *config};
    Cases s = {(Case *)calloc(num_cases, sizeof(Case)), num_cases, config->num_buffers, first_epoch};
    Rng rng = {test_seed * 7777 + seed};
    for (uint32_t i = 0; i < num_cases; i++)
        case_make(&s.cases[i], &config->shape, &rng, (Route)((i + seed) % NUM_ROUTES), options);
    setup.config.shape.capacity = most_rows(s.cases, num_cases); /* the smallest sufficient capacity */
    bool ok = run_team(&setup, body, &s);
    for (uint32_t i = 0; i < num_cases; i++) case_free(&s.cases[i]);
    free(s.cases);
    return ok;
}

static bool steps_of_mode(EpCombineMode mode) {
    for (uint32_t num_ranks = 1, seed = 0; num_ranks <= 4; num_ranks++)
        for (uint32_t num_sm = 1; num_sm <= 3; num_sm++, seed++) {
            uint32_t dtype = (uint32_t)(seed + mode + test_seed) % 3;
            EpShape shape = {num_ranks,
                             num_ranks * (1 + seed % 4),
                             1 + (seed * 3 + 3) % 5,
                             9 + 5 * (seed % 4),
                             8u << seed % 3,
                             dtype,
                             mode,
                             0};
            EpLayerConfig config = {.shape = shape, .num_buffers = 2, .num_sm = num_sm};
            TRY(run_cases(&config, steps_body, scaled(40), 0, seed, 0));
        }
    return true;
}
bool test_steps_local(void) { return steps_of_mode(EP_COMBINE_LOCAL); }
bool test_steps_scatter(void) { return steps_of_mode(EP_COMBINE_SCATTER); }
bool test_steps_gather(void) { return steps_of_mode(EP_COMBINE_GATHER); }

/* Many rows, slots and tiles. The hot expert has more rows than a tile. */
bool test_steps_large(void) {
    EpLayerConfig config = {
        .shape = {3, 12, 6, 96, 64, EP_BF16, EP_COMBINE_LOCAL, 0}, .num_buffers = 1, .num_sm = 3};
    for (uint32_t mode = 0; mode < 3; mode++) {
        config.shape.combine_mode = mode;
        TRY(run_cases(&config, steps_body, scaled(12), 0, ROUTE_HOT + mode, 0));
    }
    return true;
}

/* Two steps at the same time, each in its own buffer, with interleaved stages. */
static bool buffers_body(Rank *me, void *arg) {
    const Cases *s = (const Cases *)arg;
    for (uint32_t i = 0; i + 1 < s->num_cases; i += 2) {
        Step a = step_open(me, &s->cases[i], 0), b = step_open(me, &s->cases[i + 1], 1);
        CHECK_CODE(me, 0, call_plan(&a));
        CHECK_CODE(me, 0, call_plan(&b));
        CHECK_CODE(me, 0, call_dispatch(&b));
        CHECK_CODE(me, 0, call_dispatch(&a));
        CHECK_CODE(me, 0, call_combine(&a));
        CHECK_CODE(me, 0, ep_layer_barrier(me->layer, 1, NULL));
        CHECK_CODE(me, 0, call_combine(&b));
        TRY(check_plan(&a) && check_dispatch(&a) && check_combine(&a));
        TRY(check_plan(&b) && check_dispatch(&b) && check_combine(&b));
        step_close(&a);
        step_close(&b);
    }
    CHECK_CODE(me, 0, ep_layer_sync(me->layer, NULL));
    return true;
}
bool test_buffers(void) {
    for (uint32_t mode = 0; mode < 3; mode++) {
        EpLayerConfig config = {.shape = {3, 6, 4, 12, 16, EP_BF16, mode, 0}, .num_buffers = 2, .num_sm = 2};
        TRY(run_cases(&config, buffers_body, scaled(50) + 2, 0, mode, 0));
    }
    return true;
}

/* Several threads of a rank call operations on one buffer. Each has the results of its own calls. */
typedef struct {
    Rank *me;
    const Case *c;
    bool ok;
} Caller;
static bool calls_of_thread(Rank *me, const Case *c) {
    for (uint32_t i = 0; i < scaled(30); i++) {
        Step st = step_open(me, c, 0);
        uint32_t num_rows;
        CHECK_CODE(me, 0, call_plan(&st));
        const EpTensor plan = tensor1(st.plan, EP_I32, (int64_t)st.plan_words);
        CHECK_CODE(me, 0, ep_layer_num_rows(me->layer, 0, &plan, NULL, &num_rows));
        CHECK(me, num_rows == c->num_rows[0]);
        TRY(run_moves(&st));
        CHECK_CODE(me, 0, ep_layer_sync(me->layer, NULL));
        step_close(&st);
    }
    return true;
}
static void *caller_main(void *arg) {
    Caller *caller = (Caller *)arg;
    caller->ok = calls_of_thread(caller->me, caller->c);
    return NULL;
}
static bool threads_body(Rank *me, void *arg) {
    const Cases *s = (const Cases *)arg;
    Caller callers[3];
    pthread_t threads[3];
    bool ok = true;
    for (uint32_t i = 0; i < 3; i++) {
        callers[i] = (Caller){me, &s->cases[i], false};
        if (pthread_create(&threads[i], NULL, caller_main, &callers[i])) abort();
    }
    for (uint32_t i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        ok = ok && callers[i].ok;
    }
    return ok;
}
bool test_threads_of_a_rank(void) {
    for (uint32_t mode = 0; mode < 3; mode++) {
        EpLayerConfig config = {.shape = {1, 4, 3, 12, 16, EP_F32, mode, 0}, .num_buffers = 1, .num_sm = 2};
        TRY(run_cases(&config, threads_body, 3, 0, mode, 0));
    }
    return true;
}

/* One plan for many dispatches and combines, which alternate between two sets of tokens. */
static bool plan_reuse_body(Rank *me, void *arg) {
    const Cases *s = (const Cases *)arg;
    Case c = s->cases[0];
    Step st = step_open(me, &c, 0);
    CHECK_CODE(me, 0, call_plan(&st));
    for (uint32_t i = 0; i < 2 * scaled(30); i++) {
        st.c = &s->cases[i % 2]; /* Both cases have the same routing. */
        TRY(run_moves(&st));
    }
    step_close(&st);
    return true;
}
bool test_plan_reuse(void) {
    for (uint32_t mode = 0; mode < 3; mode++) {
        EpLayerConfig config = {.shape = {2, 6, 3, 12, 8, EP_F32, mode, 0}, .num_buffers = 1, .num_sm = 2};
        Setup setup = {.num_ranks = 2, .config = config};
        Case cases[2];
        Cases s = {cases, 2, 1, 0};
        for (uint32_t i = 0; i < 2; i++) { /* Both cases have the same seed. */
            Rng rng = {test_seed + mode};
            case_make(&cases[i], &config.shape, &rng, ROUTE_RANDOM, WITH_WEIGHTS | WITHOUT_SLACK);
        }
        /* All numbers of the second case are doubled, which is exact in float32. */
        for (uint32_t w = 0; w < 2; w++) {
            float *doubled[] = {(float *)cases[1].x[w], (float *)cases[1].y[w], (float *)cases[1].out[w]};
            uint32_t n[] = {cases[1].num_tokens[w], cases[1].num_rows[w], cases[1].num_tokens[w]};
            for (uint32_t j = 0; j < 3; j++)
                for (uint32_t i = 0; i < n[j] * config.shape.hidden; i++) doubled[j][i] *= 2;
        }
        setup.config.shape.capacity = most_rows(cases, 2);
        bool ok = run_team(&setup, plan_reuse_body, &s);
        case_free(&cases[0]);
        case_free(&cases[1]);
        TRY(ok);
    }
    return true;
}

/* The caller chooses the row of each choice. */
bool test_scatter_indices(void) {
    for (uint32_t num_ranks = 1; num_ranks <= 4; num_ranks++)
        for (uint32_t mode = 0; mode < 3; mode++) {
            const EpShape shape = {num_ranks, 4 * num_ranks, 3, 10, 8, EP_F32, mode, 0};
            EpLayerConfig config = {.shape = shape, .num_buffers = 1, .num_sm = 2};
            TRY(run_cases(&config, steps_body, scaled(14), 0, num_ranks, WITH_SCATTER));
        }
    return true;
}

/* Epochs around values at which the lower half or a sign bit overflows. */
bool test_epochs(void) {
    static const uint64_t overflows[] = {1ull << 31, 1ull << 32, 1ull << 63};
    for (uint32_t i = 0; i < 3; i++)
        for (uint64_t before = 1; before <= 5; before++) {
            EpLayerConfig config = {
                .shape = {3, 6, 2, 8, 8, EP_F32, (uint32_t)(before % 3), 0}, .num_buffers = 1, .num_sm = 2};
            TRY(run_cases(&config, steps_body, 4, overflows[i] - before, before, 0));
        }
    return true;
}
