/* test_error_propagation.c - calls that fail on one rank or differ between ranks, ranks that are missing,
 * leave or abort, and the calls after such an event. */
#include "harness.h"
#include "protocol/layout.h"
#include "runtime/world.h"

/* ---- calls that fail, and the calls after them ---- */

/* A failed plan has no row, no tile and no token to move. A kernel may read it before the host knows of the
 * error. */
static bool is_empty_plan(const Step *st) {
    const EpShape *s = &st->c->shape;
    const int32_t *p = st->plan, *expert_row = p + ep_plan_layout(s, st->num_tokens).expert_row_off;
    return p[EP_HEAD_STATUS] != 0 && p[EP_HEAD_NUM_ROWS] == 0 && p[EP_HEAD_NUM_TILES] == 0 &&
           all_bytes_are(p + EP_HEAD_NUM_SEND, 4ull * (EP_HEAD_WORDS - EP_HEAD_NUM_SEND), 0) &&
           all_bytes_are(expert_row, 4ull * (s->num_experts / s->num_ranks + 1), 0);
}

static bool bad_index_body(Rank *me, void *arg) {
    Case *cases = (Case *)arg;
    static const int64_t bad_values[] = {-2, 7, 1000000, INT32_MIN, INT64_MAX};
    for (uint32_t i = 0; i < 5; i++) {
        Case c = cases[0];
        uint32_t K = c.shape.num_topk, T = c.num_tokens[me->rank];
        int64_t *wide = (int64_t *)malloc(8ull * T * K);
        for (uint32_t j = 0; j < T * K; j++) wide[j] = c.expert[me->rank][j];
        if (me->rank == 1) {
            wide[T * K / 2] = bad_values[i];
            wide[T * K - 1] = -9;
        }
        c.index[me->rank] = wide;
        c.has_wide_index = true;
        Step st = step_open(me, &c, 0);
        CHECK_CODE(me, EP_EINDEX, call_plan(&st));
        char text[80];
        uint32_t last = c.num_tokens[1] * K - 1, bad = c.num_tokens[1] * K / 2;
        snprintf(text, sizeof text, "rank 1: expert index %lld of token %u, choice %u ",
                 bad == last ? -9ll : (long long)bad_values[i], bad / K, bad % K);
        CHECK(me, strstr(ep_error_text(), text) && is_empty_plan(&st));
        uint32_t num_rows;
        CHECK_CODE(me, EP_EPEER, ep_layer_num_rows(me->layer, 0, NULL, NULL, &num_rows));
        if (i % 2) CHECK_CODE(me, EP_EPEER, call_dispatch(&st)); /* Dispatch cannot use a failed plan. */
        if (i % 2) CHECK(me, all_bytes_are(st.rows, st.num_rows * row_bytes(&c.shape), EP_FILL_NAN));
        step_close(&st);
        free(wide);
        TRY(run_step(me, &cases[i % 2], 0));
    }
    return true;
}
bool test_plan_rejects_bad_index(void) { return with_cases(bad_index_body, small_config(3), false, 2); }

static bool overflow_body(Rank *me, void *arg) {
    Case *cases = (Case *)arg;
    for (uint32_t i = 0; i < 3; i++) {
        Step st = step_open(me, &cases[0], 0);
        CHECK_CODE(me, EP_EOVERFLOW, call_plan(&st));
        CHECK(me, strstr(ep_error_text(), "its capacity is 40") && is_empty_plan(&st));
        step_close(&st);
        TRY(run_step(me, &cases[1], 0));
    }
    return true;
}
bool test_plan_rejects_overflow(void) {
    Case cases[2];
    Setup setup = {.num_ranks = 3, .config = small_config(3)};
    Rng rng = {test_seed};
    setup.config.shape.capacity = 40;
    /* There are 144 rows on 3 ranks, so at least one rank has more than 40. */
    case_make(&cases[0], &setup.config.shape, &rng, ROUTE_FULL, 0);
    setup.config.shape.max_tokens = 4;
    case_make(&cases[1], &setup.config.shape, &rng, ROUTE_FULL, 0);
    setup.config.shape.max_tokens = 16;
    cases[1].shape.max_tokens = 16;
    bool ok = run_team(&setup, overflow_body, cases);
    case_free(&cases[0]);
    case_free(&cases[1]);
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
    /* The length of the scatter tensor of rank 1 matches neither its own number of tokens nor that of all
     * ranks. */
    const EpPlanArgs args = {&index, &s, &plan, 0};
    CHECK_CODE(me, EP_EINVAL, ep_layer_plan(me->layer, 0, &args, NULL));
    CHECK(me, strstr(ep_error_text(), "rank 1"));
    s = tensor2(scatter, EP_I32, T, K);
    /* Only rank 1 detects that this row does not exist. The other ranks get the error in dispatch. */
    if (me->rank == 1) scatter[0] = 100000;
    st.plan = words;
    CHECK_CODE(me, me->rank == 1 ? EP_EINVAL : 0, ep_layer_plan(me->layer, 0, &args, NULL));
    if (me->rank != 1) CHECK_CODE(me, EP_EPEER, call_dispatch(&st));
    free(scatter);
    step_close(&st);
    return run_step(me, &cases[1], 0);
}
bool test_plan_rejects_bad_scatter(void) { return with_cases(bad_scatter_body, small_config(3), false, 2); }

/* An argument of rank 1 is wrong. Rank 1 gets its own error, the others get EP_EPEER, and the next call
 * works. */
static bool wrong_argument_body(Rank *me, void *arg) {
    Case *cases = (Case *)arg, c = cases[0];
    bool wrong = me->rank == 1;
    Step st = step_open(me, &c, 0);
    if (wrong) st.plan_words += 4;
    CHECK_CODE(me, wrong ? EP_EINVAL : EP_EPEER, call_plan(&st));
    CHECK(me,
          strstr(ep_error_text(), wrong ? "plan: wanted size" : "rank 1 failed before its plan: ValueError"));
    if (wrong) st.plan_words -= 4;
    CHECK_CODE(me, 0, call_plan(&st));
    TRY(check_plan(&st));
    if (wrong) c.shape.hidden = 8;
    CHECK_CODE(me, wrong ? EP_EINVAL : EP_EPEER, call_dispatch(&st));
    if (!wrong) CHECK(me, all_bytes_are(st.rows, st.num_rows * row_bytes(&c.shape), EP_FILL_NAN));
    c.shape.hidden = 16;
    if (wrong) c.shape.dtype = EP_BF16;
    CHECK_CODE(me, wrong ? EP_ETYPE : EP_EPEER, call_dispatch(&st));
    CHECK(me, strstr(ep_error_text(), wrong ? "input: wanted float32, got bfloat16"
                                            : "rank 1 failed before its dispatch: TypeError"));
    c.shape.dtype = EP_F32;
    CHECK_CODE(me, 0, call_dispatch(&st));
    TRY(check_dispatch(&st));
    if (wrong) st.recv_words--;
    CHECK_CODE(me, wrong ? EP_EINVAL : EP_EPEER, call_combine(&st));
    if (!wrong) CHECK(me, all_bytes_are(st.out, st.num_tokens * row_bytes(&c.shape), EP_FILL_NAN));
    if (wrong) st.recv_words++;
    CHECK_CODE(me, 0, call_combine(&st));
    TRY(check_combine(&st));
    for (uint32_t op = EP_OP_PLAN; op <= EP_OP_BARRIER;
         op++) { /* Rank 1 propagates an error instead of calling op. */
        if (wrong) CHECK_CODE(me, 0, ep_layer_propagate_error(me->layer, 0, op, EP_ETYPE, NULL));
        else CHECK_CODE(me, EP_EPEER, call_op(&st, op));
    }
    CHECK_CODE(me, EP_EINVAL, ep_layer_propagate_error(me->layer, 0, EP_OP_PLAN, 0, NULL));
    CHECK_CODE(me, EP_EINVAL, ep_layer_barrier(me->layer, 1, NULL));
    step_close(&st);
    return run_step(me, &cases[1], 0);
}
bool test_wrong_argument_on_one_rank(void) {
    return with_cases(wrong_argument_body, small_config(3), false, 2);
}

/* Combine refuses what a failed dispatch leaves, also if no rank sends more than one token to another. The
 * first rank that has received nothing propagates the error. */
static bool failed_dispatch_body(Rank *me, void *arg) {
    Case c = *(const Case *)arg;
    Step st = step_open(me, &c, 0);
    CHECK_CODE(me, 0, call_plan(&st));
    c.has_weight = me->rank != 1;
    CHECK_CODE(me, EP_EMISMATCH, call_dispatch(&st));
    c.has_weight = true;
    const int code = call_combine(&st);
    CHECK(me, code == EP_EINVAL || code == EP_EPEER);
    CHECK(me, all_bytes_are(st.out, st.num_tokens * row_bytes(&c.shape), EP_FILL_NAN));
    TRY(run_moves(&st));
    step_close(&st);
    return true;
}
bool test_combine_after_failed_dispatch(void) {
    EpLayerConfig config = small_config(3);
    config.shape.max_tokens = 1;
    return with_cases(failed_dispatch_body, config, false, 1);
}

/* One rank makes another call than the others. Every rank gets an error, and the next call works. */
static bool different_calls_body(Rank *me, void *arg) {
    Case *cases = (Case *)arg;
    for (uint32_t odd_rank = 0; odd_rank < 3; odd_rank++) {
        Case c = cases[0];
        bool differs = me->rank == odd_rank;
        Step st = step_open(me, &c, 0), old = step_open(me, &c, 0);
        CHECK_CODE(me, 0, call_plan(&old));
        CHECK_CODE(me, 0, call_plan(&st));
        CHECK_CODE(me, 0, call_dispatch(&st));
        CHECK_CODE(me, EP_EMISMATCH, differs ? call_combine(&st) : call_dispatch(&st));
        CHECK(me, strstr(ep_error_text(), "ranks disagree in op"));
        CHECK_CODE(me, EP_EMISMATCH, differs ? ep_layer_barrier(me->layer, 0, NULL) : call_plan(&old));
        CHECK_CODE(me, 0, call_plan(&old));
        c.has_weight = !differs;
        CHECK_CODE(me, EP_EMISMATCH, call_dispatch(&st));
        CHECK(me, strstr(ep_error_text(), "ranks disagree in has_weight"));
        c.has_weight = true;
        st.requires_grad = differs;
        CHECK_CODE(me, EP_EMISMATCH, call_dispatch(&st));
        CHECK(me, strstr(ep_error_text(), "ranks disagree in requires_grad"));
        st.requires_grad = true;
        CHECK_CODE(me, EP_EMISMATCH, call_dispatch(differs ? &old : &st));
        CHECK(me, strstr(ep_error_text(), "ranks disagree in plan_idx"));
        CHECK(me,
              all_bytes_are(differs ? old.rows : st.rows, st.num_rows * row_bytes(&c.shape), EP_FILL_NAN));
        CHECK_CODE(me, 0, call_dispatch(&st));
        TRY(check_dispatch(&st));
        c.has_scalar = !differs;
        CHECK_CODE(me, EP_EMISMATCH, call_combine(&st));
        c.has_scalar = true;
        st.requires_grad = differs;
        CHECK_CODE(me, EP_EMISMATCH, call_combine(&st));
        st.requires_grad = false;
        CHECK_CODE(me, 0, call_combine(&st));
        TRY(check_combine(&st));
        step_close(&st);
        step_close(&old);
    }
    return true;
}
bool test_different_calls_fail(void) { return with_cases(different_calls_body, small_config(3), false, 1); }

/* The configurations of two ranks differ. No rank gets a layer, the error names the difference, and the
 * next layer can be created. */
typedef struct {
    EpLayerConfig config[2];
    const char *text;
} DifferentConfigs;
static bool different_configs_body(Rank *me, void *arg) {
    const DifferentConfigs *d = (const DifferentConfigs *)arg;
    CHECK_CODE(me, EP_EMISMATCH, ep_layer_create(me->heap, &d->config[me->rank == 1], &me->layer));
    CHECK(me, strstr(ep_error_text(), d->text));
    EpLayerConfig same = d->config[0];
    same.num_sm += me->rank; /* Only this field may differ between ranks. */
    CHECK_CODE(me, 0, ep_layer_create(me->heap, &same, &me->layer));
    return true;
}
bool test_different_configs_fail(void) {
    static const char *const texts[] = {"hidden: rank 1 has 32, rank 0 has 16",
                                        "topk",
                                        "dtype",
                                        "combine_mode",
                                        "capacity",
                                        "num_buffers",
                                        "max_tokens"};
    for (uint32_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        DifferentConfigs d = {{small_config(2), small_config(2)}, texts[i]};
        EpShape *s = &d.config[1].shape;
        d.config[0].shape.combine_mode = EP_COMBINE_LOCAL;
        s->combine_mode = EP_COMBINE_LOCAL;
        if (i == 0) s->hidden *= 2;
        if (i == 1) s->num_topk++;
        if (i == 2) {
            d.config[0].shape.dtype = EP_F16;
            s->dtype = EP_BF16;
        }
        if (i == 3) s->combine_mode = EP_COMBINE_SCATTER;
        if (i == 4) s->capacity++;
        if (i == 5) d.config[1].num_buffers++;
        if (i == 6) s->max_tokens++;
        Setup setup = {.num_ranks = 2, .heap_bytes = 1 << 20};
        TRY(run_team(&setup, different_configs_body, &d));
    }
    return true;
}

/* ---- ranks that are missing, leave, or abort ---- */

typedef enum {
    MISS_PLAN,
    MISS_DISPATCH,
    MISS_COMBINE,
    MISS_BARRIER,
    MISS_ALLOC,
    MISS_SIGNAL,
    NUM_MISSED_CALLS
} MissedCall;
/* The call that rank 2 does not make. */
static MissedCall missed;

static bool missing_rank_body(Rank *me, void *arg) {
    Step st = step_open(me, (Case *)arg, 0);
    unsigned char none = 0, nones[EP_MAX_RANKS];
    uint64_t off;
    int code = 0;
    if (missed == MISS_DISPATCH || missed == MISS_COMBINE) CHECK_CODE(me, 0, call_plan(&st));
    if (missed == MISS_COMBINE) CHECK_CODE(me, 0, call_dispatch(&st));
    const double limit = short_timeout_s * slowness();
    /* The time starts before the all-gather. No rank waits for rank 2 before the end of the all-gather. */
    double start = seconds_now();
    CHECK_CODE(me, 0, ep_world_all_gather(me->world, &none, 1, nones));
    CHECK_CODE(me, 0, ep_world_set_timeout(me->world, limit));
    if (me->rank == 2) {
        /* Without a limit of its own, because on a busy machine the others reach theirs much later. The
         * runner ends a program that hangs. */
        while (!(code = ep_world_check(me->world))) usleep(5000);
    } else {
        switch (missed) {
        case MISS_PLAN: code = call_plan(&st); break;
        case MISS_DISPATCH: code = call_dispatch(&st); break;
        case MISS_COMBINE: code = call_combine(&st); break;
        case MISS_BARRIER: code = ep_heap_barrier(me->heap, NULL); break;
        case MISS_ALLOC: code = alloc_heap(me, 8, &off); break;
        default: code = ep_heap_wait(me->heap, 0, UINT64_MAX, true, NULL); break;
        }
    }
    bool is_late = !is_within(start, limit + 30);
    double waited = seconds_now() - start;
    CHECK_CODE(me, EP_ETIMEOUT, code);
    if (missed != MISS_SIGNAL) CHECK(me, strstr(ep_error_text(), "timed out waiting for rank 2"));
    CHECK(me, waited > 0.9 * short_timeout_s && !is_late);
    CHECK_CODE(me, EP_ETIMEOUT, call_plan(&st)); /* A world does not recover from a timeout. */
    step_close(&st);
    return true;
}
bool test_missing_rank_times_out(void) {
    for (missed = MISS_PLAN; missed < NUM_MISSED_CALLS; missed++)
        if (!with_cases(missing_rank_body, small_config(3), true, 1)) {
            fprintf(stderr, "FAILED when rank 2 misses call %d\n", (int)missed);
            return false;
        }
    return true;
}

static bool rank_leaves_body(Rank *me, void *arg) {
    Step st = step_open(me, (Case *)arg, 0);
    /* The timeout is longer than the grace period of a leaving rank. */
    CHECK_CODE(me, 0, ep_world_set_timeout(me->world, long_timeout_s));
    CHECK_CODE(me, 0, call_plan(&st));
    double start = seconds_now();
    if (me->rank == 1) {
        CHECK_CODE(me, 0, ep_world_close(me->world, false));
    } else {
        CHECK_CODE(me, EP_EPEERDIED, call_dispatch(&st));
        CHECK(me, strstr(ep_error_text(), "rank 1 left") && is_within(start, 8));
        CHECK(me, ep_world_lost_ranks(me->world) == 2);
        CHECK(me, all_bytes_are(st.rows, st.num_rows * row_bytes(&st.c->shape), EP_FILL_NAN));
    }
    step_close(&st);
    return true;
}
bool test_rank_leaves(void) { return with_cases(rank_leaves_body, small_config(3), true, 1); }

/* All-gathers over the sockets. In some of them, a rank passes another size, or it propagates an error. */
static bool all_gather_body(Rank *me, void *arg) {
    uint32_t mine[EP_ALL_GATHER_BYTES / 4] = {0}, all[4 * EP_ALL_GATHER_BYTES / 4];
    Rng rng = {test_seed};
    (void)arg;
    CHECK_CODE(me, EP_EINVAL, ep_world_all_gather(me->world, mine, EP_ALL_GATHER_BYTES + 1, all));
    for (uint32_t i = 0; i < scaled(200); i++) {
        uint32_t n = 1 + rng_below(&rng, EP_ALL_GATHER_BYTES / 4), odd_rank = rng_below(&rng, 4),
                 how = rng_below(&rng, 4);
        if (how == 0)
            CHECK_CODE(me, EP_EMISMATCH,
                       ep_world_all_gather(me->world, mine, me->rank == odd_rank ? 8 : 12, all));
        if (how == 1 && me->rank == odd_rank)
            CHECK_CODE(me, 0, ep_world_propagate_error(me->world, EP_EINVAL));
        if (how == 1 && me->rank != odd_rank)
            CHECK_CODE(me, EP_EPEER, ep_world_all_gather(me->world, mine, 12, all));
        for (uint32_t j = 0; j < n; j++) mine[j] = i << 16 | me->rank << 8 | j;
        CHECK_CODE(me, 0, ep_world_all_gather(me->world, mine, 4 * n, all));
        for (uint32_t r = 0; r < 4; r++)
            for (uint32_t j = 0; j < n; j++) CHECK(me, all[r * n + j] == (i << 16 | r << 8 | j));
    }
    CHECK_CODE(me, EP_EINVAL, ep_world_propagate_error(me->world, 1));
    CHECK_CODE(me, 0, ep_world_check(me->world));
    return true;
}
bool test_all_gather(void) {
    Setup setup = {.num_ranks = 4};
    return run_team(&setup, all_gather_body, NULL);
}

/* Rank 1 cannot send a message to a live rank. Then no rank waits for the message, and all ranks get the
 * reason. */
static bool unsent_body(Rank *me, void *arg) {
    enum { NO_FD = 1 << 20 };
    unsigned char mine = 0, all[3];
    int fds[3] = {-1, -1, -1};
    const double start = seconds_now();
    (void)arg;
    /* After this all-gather, every rank has created the heap of the team. */
    int code = ep_world_all_gather(me->world, &mine, 1, all);
    if (!code) code = ep_world_all_gather_fd(me->world, &mine, 1, all, me->rank == 1 ? NO_FD : -1, fds);
    CHECK_CODE(me, EP_ESYS, code);
    CHECK(me, strstr(ep_error_text(),
                     "rank 1, in an exchange with rank 0: cannot send to a peer: Bad file descriptor"));
    CHECK(me, seconds_now() - start < 8 && fds[0] + fds[1] + fds[2] == -3);
    return true;
}
bool test_unsent_message(void) {
    Setup setup = {.num_ranks = 3, .world_ends = true};
    return run_team(&setup, unsent_body, NULL);
}

static bool rank_aborts_body(Rank *me, void *arg) {
    Step st = step_open(me, (Case *)arg, 0);
    int code = call_plan(&st); /* The world may end before this rank returns from the plan. */
    if (me->rank == 1) ep_world_abort(me->world, EP_ECUDA, 1, "the test aborts the world");
    else CHECK_CODE(me, EP_ECUDA, code ? code : call_dispatch(&st));
    CHECK_CODE(me, EP_ECUDA, ep_world_check(me->world));
    CHECK(me, strstr(ep_error_text(), "the test aborts the world"));
    step_close(&st);
    return true;
}
bool test_rank_aborts(void) { return with_cases(rank_aborts_body, small_config(3), true, 1); }
