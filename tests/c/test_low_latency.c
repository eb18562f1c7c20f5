/* test_low_latency.c - results of the low-latency dispatch and combine, compared with a brute-force
 * computation: shapes, halves, buffers, epochs, e4m3, and operations that one rank propagates an error. */
#include <math.h>

#include "e4m3.h"
#include "layer/test_hooks.h"
#include "ll_cases.h"
#include "protocol/low_latency.h"

/* ---- groups of e4m3 ---- */

/* Compare a group of 128 numbers of a row with what dispatch has made of it. */
static bool check_group(Rank *me, const LlCase *c, const uint8_t *got, float scale, const void *x,
                        uint64_t at) {
    const uint32_t dtype = c->base.shape.dtype;
    float most = 0, power = 1;
    for (uint32_t i = 0; i < 128; i++) most = fmaxf(most, fabsf(load_number(x, dtype, at + i)));
    while (power < most / 448.0f) power *= 2;
    while (power / 2 >= most / 448.0f) power /= 2;
    const float want = c->fp8 == EP_FP8_SCALED ? most / 448.0f : power;
    CHECK(me, scale == want);
    const float inverse = 1.0f / scale;
    for (uint32_t i = 0; i < 128; i++)
        CHECK(me, got[i] == nearest_e4m3(load_number(x, dtype, at + i) * inverse));
    return true;
}

/* ---- the calls of one rank ---- */

typedef struct {
    Rank *me;
    const LlCase *c;
    uint32_t buffer, num_tokens, num_groups, scale_line;
    uint64_t handle_words, rows_bytes;
    int32_t *handle, *counts, *tag, *row_tag;
    unsigned char *rows, *out;
    float *scales;
} LlStep;

static void *poisoned(uint64_t num_bytes) {
    void *at = alloc_exact(num_bytes);
    return num_bytes ? memset(at, 0x5a, num_bytes) : at;
}
static LlStep ll_open(Rank *me, const LlCase *c, uint32_t buffer) {
    const EpShape *s = &c->base.shape;
    const uint32_t L = s->num_experts / s->num_ranks;
    LlStep st = {.me = me, .c = c, .buffer = buffer, .num_tokens = c->base.num_tokens[me->rank]};
    st.handle_words = ep_ll_handle(s).num_words;
    st.handle = (int32_t *)poisoned(4 * st.handle_words);
    st.counts = (int32_t *)poisoned(4ull * L);
    st.tag = (int32_t *)poisoned(4ull * st.num_tokens);
    st.row_tag = (int32_t *)poisoned(4ull * c->num_rows);
    for (uint32_t t = 0; t < st.num_tokens; t++) st.tag[t] = tag_of(me->rank, t);
    st.rows_bytes = c->num_rows * (c->fp8 ? s->hidden : row_bytes(s));
    st.rows = (unsigned char *)poisoned(st.rows_bytes);
    st.out = (unsigned char *)poisoned(st.num_tokens * row_bytes(s));
    st.num_groups = s->hidden / 128;
    st.scale_line = (uint32_t)((c->is_masked ? s->num_ranks * s->max_tokens : s->capacity) + 3) / 4 * 4;
    st.scales = (float *)poisoned(4ull * (c->is_masked ? L : 1) * st.num_groups * st.scale_line);
    return st;
}
static void ll_close(LlStep *st) {
    void *all[] = {st->handle, st->counts, st->rows, st->out, st->scales, st->tag, st->row_tag};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

/* A tensor of `num` lines; masked: of L matrices with num / L lines each. */
static EpTensor rows_tensor(const LlCase *c, const void *data, uint32_t dtype, uint64_t num, uint32_t line) {
    const uint32_t L = c->base.shape.num_experts / c->base.shape.num_ranks;
    EpTensor t = tensor2(data, dtype, (int64_t)num, line);
    if (!c->is_masked) return t;
    t.num_dims = 3;
    t.shape[0] = L;
    t.shape[1] = (int64_t)num / L;
    t.shape[2] = line;
    t.stride[0] = t.shape[1] * line;
    t.stride[1] = line;
    t.stride[2] = 1;
    return t;
}

static int ll_dispatch(LlStep *st, uint32_t parts) {
    const LlCase *c = st->c;
    const EpShape *s = &c->base.shape;
    const uint32_t me = st->me->rank, L = s->num_experts / s->num_ranks, T = st->num_tokens;
    EpTensor x = tensor2(c->base.x[me], s->dtype, T, s->hidden),
             indices = tensor2(c->base.index[me], c->base.has_wide_index ? EP_I64 : EP_I32, T, s->num_topk),
             weight = tensor2(c->base.weight[me], EP_F32, T, s->num_topk),
             handle = tensor1(st->handle, EP_I32, (int64_t)st->handle_words),
             rows = rows_tensor(c, st->rows, c->fp8 ? EP_U8 : s->dtype, c->num_rows, s->hidden),
             scales =
                 rows_tensor(c, st->scales, c->fp8 == EP_FP8_UE8M0 ? EP_I32 : EP_F32,
                             (uint64_t)(c->is_masked ? L : 1) * ep_ll_scale_lines(s, c->fp8), st->scale_line),
             counts = tensor1(st->counts, EP_I32, L), tag = tensor1(st->tag, EP_I32, T),
             row_tag = tensor1(st->row_tag, EP_I32, (int64_t)c->num_rows);
    const bool has_room = s->num_topk < EP_MAX_TOPK;
    const EpLlDispatchArgs args = {.x = &x,
                                   .indices = &indices,
                                   .weight = c->base.has_weight ? &weight : NULL,
                                   .handle = &handle,
                                   .rows = &rows,
                                   .scales = c->fp8 ? &scales : NULL,
                                   .counts = &counts,
                                   .tag = has_room && has_tags(me) ? &tag : NULL,
                                   .row_tag = has_room ? &row_tag : NULL,
                                   .is_masked = c->is_masked,
                                   .fp8 = c->fp8,
                                   .parts = parts};
    return ep_layer_ll_dispatch(st->me->layer, st->buffer, &args, NULL);
}
static int ll_combine(LlStep *st, uint32_t fp8, uint32_t parts) {
    const LlCase *c = st->c;
    const EpShape *s = &c->base.shape;
    EpTensor rows = rows_tensor(c, c->y[st->me->rank], s->dtype, c->num_rows, s->hidden),
             handle = tensor1(st->handle, EP_I32, (int64_t)st->handle_words),
             out = tensor2(st->out, s->dtype, st->num_tokens, s->hidden);
    const EpLlCombineArgs args = {&rows, &handle, &out, c->is_masked, fp8, parts};
    return ep_layer_ll_combine(st->me->layer, st->buffer, &args, NULL);
}

/* The scale of group g of a row. */
static float scale_of(const LlStep *st, uint64_t row, uint32_t g) {
    const LlCase *c = st->c;
    const uint64_t each = (uint64_t)c->base.shape.num_ranks * c->base.shape.max_tokens;
    const uint32_t packed = c->fp8 == EP_FP8_UE8M0 ? 4 : 1; /* groups in a word */
    const uint64_t line = (c->is_masked ? row / each * st->num_groups : 0) / packed + g / packed;
    const float *word = &st->scales[line * st->scale_line + (c->is_masked ? row % each : row)];
    return packed == 1 ? *word : ldexpf(1, ((const uint8_t *)word)[g % 4] - 127);
}
static bool check_ll_dispatch(const LlStep *st) {
    const LlCase *c = st->c;
    const EpShape *s = &c->base.shape;
    Rank *me = st->me;
    const uint64_t bytes = row_bytes(s), H = s->hidden;
    CHECK(me, memcmp(st->counts, c->counts[me->rank], 4ull * (s->num_experts / s->num_ranks)) == 0);
    for (uint64_t row = 0; row < c->num_rows; row++) {
        const int32_t origin = c->origin[me->rank][row];
        if (origin < 0) continue;
        const uint32_t t = (uint32_t)origin % s->max_tokens;
        const void *x = c->base.x[(uint32_t)origin / s->max_tokens];
        if (s->num_topk < EP_MAX_TOPK)
            CHECK(me, st->row_tag[row] == tag_of((uint32_t)origin / s->max_tokens, t));
        if (!c->fp8) CHECK(me, memcmp(st->rows + row * bytes, (const char *)x + t * bytes, bytes) == 0);
        for (uint32_t g = 0; c->fp8 && g < st->num_groups; g++) {
            TRY(check_group(me, c, st->rows + row * H + 128ull * g, scale_of(st, row, g), x,
                            t * H + 128ull * g));
        }
    }
    return true;
}
static bool check_ll_combine(const LlStep *st) {
    const uint64_t num_bytes = st->num_tokens * row_bytes(&st->c->base.shape);
    CHECK(st->me, memcmp(st->out, st->c->out[st->me->rank], num_bytes) == 0);
    return true;
}

/* The sums of a combine in FP8: an e4m3 number is wrong by at most 1 / 16 of itself, and by little if it is
 * small in its group. Terms may cancel, so this compares norms. */
static bool check_ll_combine_fp8(const LlStep *st) {
    const EpShape *s = &st->c->base.shape;
    double error = 0, size = 1;
    for (uint64_t i = 0; i < (uint64_t)st->num_tokens * s->hidden; i++) {
        const double want = load_number(st->c->out[st->me->rank], s->dtype, i);
        error += pow(load_number(st->out, s->dtype, i) - want, 2);
        size += want * want;
    }
    CHECK(st->me, error <= 0.01 * size);
    return true;
}

/* A dispatch and a combine, each in one launch or in two. */
static bool run_ll_step(Rank *me, const LlCase *c, uint32_t buffer, bool halves) {
    const uint32_t parts = halves ? EP_LL_RECEIVE : EP_LL_BOTH;
    LlStep st = ll_open(me, c, buffer);
    if (halves) CHECK_CODE(me, 0, ll_dispatch(&st, EP_LL_SEND));
    CHECK_CODE(me, 0, ll_dispatch(&st, parts));
    TRY(check_ll_dispatch(&st));
    if (halves) CHECK_CODE(me, 0, ll_combine(&st, 0, EP_LL_SEND));
    CHECK_CODE(me, 0, ll_combine(&st, 0, parts));
    TRY(check_ll_combine(&st));
    if (c->fp8 && c->base.shape.combine_mode == EP_LOW_LATENCY) {
        if (halves) CHECK_CODE(me, 0, ll_combine(&st, EP_FP8_SCALED, EP_LL_SEND));
        CHECK_CODE(me, 0, ll_combine(&st, EP_FP8_SCALED, parts));
        TRY(check_ll_combine_fp8(&st));
    }
    ll_close(&st);
    return true;
}

/* ---- tests ---- */

typedef struct {
    LlCase *cases;
    uint32_t num_cases;
    uint64_t first_epoch;
} LlCases;

static EpLayerConfig ll_config(uint32_t num_ranks, uint32_t num_local, uint32_t num_topk, uint32_t max_tokens,
                               uint32_t hidden, uint32_t dtype) {
    const uint32_t per_token = num_topk < num_local ? num_topk : num_local;
    EpShape s = {num_ranks,      num_ranks * num_local,
                 num_topk,       max_tokens,
                 hidden,         dtype,
                 EP_LOW_LATENCY, num_ranks * max_tokens * per_token};
    return (EpLayerConfig){.shape = s, .num_buffers = 2, .num_sm = 2};
}

static bool run_ll(const EpLayerConfig *config, Body *body, uint32_t num_cases, uint64_t first_epoch,
                   uint64_t seed) {
    Setup setup = {.num_ranks = config->shape.num_ranks, .config = *config};
    LlCases s = {(LlCase *)calloc(num_cases, sizeof(LlCase)), num_cases, first_epoch};
    Rng rng = {test_seed * 4441 + seed};
    const uint32_t H = config->shape.hidden;
    const uint32_t kinds = config->shape.dtype == EP_F32 || H % 128 ? 1 : H % 512 ? 3 : 4; /* EpLlFp8 */
    for (uint32_t i = 0; i < num_cases; i++)
        ll_make(&s.cases[i], &config->shape, &rng, (Route)((i + seed) % NUM_ROUTES), i % kinds);
    bool ok = run_team(&setup, body, &s);
    for (uint32_t i = 0; i < num_cases; i++) ll_free(&s.cases[i]);
    free(s.cases);
    return ok;
}

/* Ranks choose halves independently of each other. */
static bool ll_steps_body(Rank *me, void *arg) {
    const LlCases *s = (const LlCases *)arg;
    if (s->first_epoch) CHECK_CODE(me, 0, ep_layer_set_epoch(me->layer, 0, s->first_epoch, NULL));
    for (uint32_t i = 0; i < s->num_cases; i++)
        TRY(run_ll_step(me, &s->cases[i], s->first_epoch ? 0 : i / 4 % 2, (i + me->rank) % 3 == 0));
    return true;
}
bool test_ll_steps(void) {
    static const uint32_t hiddens[] = {8, 640, 16, 512, 1056}; /* the last one has two pieces or more */
    for (uint32_t num_ranks = 1, seed = 0; num_ranks <= 4; num_ranks++)
        for (uint32_t num_sm = 1; num_sm <= 3; num_sm++, seed++) {
            EpLayerConfig config = ll_config(num_ranks, 1 + seed % 4, 1 + (seed * 3 + 3) % 5, 5 + seed % 6,
                                             hiddens[seed % 5], (uint32_t)(seed / 2 + test_seed) % 3);
            config.num_sm = num_sm;
            for (uint32_t mode = EP_LOW_LATENCY; mode < EP_NUM_COMBINE_MODES; mode++) {
                config.shape.combine_mode = mode;
                TRY(run_ll(&config, ll_steps_body, scaled(seed % 4 == 3 ? 5 : 20), 0, seed));
            }
        }
    return true;
}

/* Two steps at the same time, each in its own buffer. */
static bool ll_buffers_body(Rank *me, void *arg) {
    const LlCases *s = (const LlCases *)arg;
    for (uint32_t i = 0; i + 1 < s->num_cases; i += 2) {
        LlStep a = ll_open(me, &s->cases[i], 0), b = ll_open(me, &s->cases[i + 1], 1);
        CHECK_CODE(me, 0, ll_dispatch(&a, EP_LL_SEND));
        CHECK_CODE(me, 0, ll_dispatch(&b, EP_LL_SEND));
        CHECK_CODE(me, 0, ll_dispatch(&b, EP_LL_RECEIVE));
        CHECK_CODE(me, 0, ll_combine(&b, 0, EP_LL_SEND));
        CHECK_CODE(me, 0, ll_dispatch(&a, EP_LL_RECEIVE));
        CHECK_CODE(me, 0, ll_combine(&a, 0, EP_LL_BOTH));
        CHECK_CODE(me, 0, ep_layer_barrier(me->layer, 0, NULL));
        CHECK_CODE(me, 0, ll_combine(&b, 0, EP_LL_RECEIVE));
        TRY(check_ll_dispatch(&a) && check_ll_combine(&a));
        TRY(check_ll_dispatch(&b) && check_ll_combine(&b));
        ll_close(&a);
        ll_close(&b);
    }
    return true;
}
bool test_ll_buffers(void) {
    const EpLayerConfig config = ll_config(3, 2, 4, 9, 128, EP_BF16);
    return run_ll(&config, ll_buffers_body, scaled(60) + 2, 0, 1);
}

/* Epochs around values at which the lower half, the tag of a cell or a sign bit overflows. */
bool test_ll_epochs(void) {
    static const uint64_t overflows[] = {1ull << 16, 1ull << 31, 1ull << 32, 1ull << 48, 1ull << 63};
    const EpLayerConfig config = ll_config(3, 2, 2, 6, 8, EP_F32);
    for (uint32_t i = 0; i < 5; i++)
        for (uint64_t before = 1; before <= 4; before++)
            TRY(run_ll(&config, ll_steps_body, 4, overflows[i] - before, before));
    return true;
}

/* ---- propagated errors ---- */

static bool is_void(const LlStep *st) {
    const EpShape *s = &st->c->base.shape;
    CHECK(st->me, all_bytes_are(st->rows, st->rows_bytes, EP_FILL_NAN));
    CHECK(st->me, all_bytes_are(st->counts, 4ull * (s->num_experts / s->num_ranks), 0));
    return true;
}

/* Rank 1 has a wrong index. All ranks get the same error. Combine then refuses the handle. */
static bool wrong_index(Rank *me, const LlCase *of, int32_t value) {
    LlCase c = *of;
    const uint32_t K = c.base.shape.num_topk, T = c.base.num_tokens[me->rank];
    int32_t *index = (int32_t *)alloc_exact(4ull * T * K);
    memcpy(index, c.base.expert[me->rank], 4ull * T * K);
    if (me->rank == 1) index[T * K / 2] = value;
    c.base.index[me->rank] = index;
    c.base.has_wide_index = false;
    LlStep st = ll_open(me, &c, 0);
    CHECK_CODE(me, EP_EINDEX, ll_dispatch(&st, EP_LL_BOTH));
    TRY(is_void(&st));
    CHECK_CODE(me, me->rank ? EP_EPEER : EP_EINVAL, ll_combine(&st, 0, EP_LL_BOTH));
    CHECK(me, all_bytes_are(st.out, T * row_bytes(&c.base.shape), EP_FILL_NAN));
    ll_close(&st);
    free(index);
    return true;
}

static bool ll_error_propagation_body(Rank *me, void *arg) {
    const LlCases *s = (const LlCases *)arg;
    const bool wrong = me->rank == 1;
    for (uint32_t i = 0; i + 1 < s->num_cases; i += 2) {
        LlStep st = ll_open(me, &s->cases[i], 0), other = ll_open(me, &s->cases[i + 1], 0);
        st.handle_words -= wrong; /* rank 1 has a wrong argument */
        CHECK_CODE(me, wrong ? EP_EINVAL : EP_EPEER, ll_dispatch(&st, EP_LL_BOTH));
        st.handle_words += wrong;
        TRY(wrong || is_void(&st));
        /* No rank has a handle. The error is that of the first one. */
        CHECK_CODE(me, me->rank ? EP_EPEER : EP_EINVAL, ll_combine(&st, 0, EP_LL_BOTH));
        CHECK_CODE(me, 0, ll_dispatch(&st, EP_LL_BOTH));
        TRY(check_ll_dispatch(&st));
        CHECK_CODE(me, 0, ll_dispatch(&other, EP_LL_BOTH));
        /* Rank 1 has the handle of the other dispatch. */
        CHECK_CODE(me, EP_EMISMATCH, ll_combine(wrong ? &other : &st, 0, EP_LL_BOTH));
        /* Rank 1 calls another operation. */
        CHECK_CODE(me, EP_EMISMATCH,
                   wrong ? ll_dispatch(&other, EP_LL_BOTH) : ll_combine(&st, 0, EP_LL_BOTH));
        CHECK_CODE(me, 0, ll_combine(&st, 0, EP_LL_BOTH)); /* the handle can still be used */
        TRY(check_ll_combine(&st));
        ll_close(&st);
        ll_close(&other);
        TRY(wrong_index(me, &s->cases[0], i % 4 ? -2 : (int32_t)me->setup->config.shape.num_experts + 1));
        TRY(run_ll_step(me, &s->cases[i + 1], 0, i % 4 == 0));
    }
    return true;
}
bool test_ll_error_propagation(void) {
    EpLayerConfig config = ll_config(3, 2, 3, 8, 16, EP_F32);
    for (uint32_t mode = EP_LOW_LATENCY; mode < EP_NUM_COMBINE_MODES; mode++) {
        config.shape.combine_mode = mode;
        TRY(run_ll(&config, ll_error_propagation_body, scaled(10) + 2, 0, ROUTE_FULL));
    }
    return true;
}

/* A rank that propagates an error clears every slot of the operation before, if that was void. Otherwise a
 * later operation in the same bank reads the old words as if they had just arrived. */
bool test_ll_propagated_error_clears_slots(void) {
    static EpHostWords host;
    EpLlHead heads[EP_MAX_RANKS];
    const uint64_t epoch = 9;
    EpComm c = {
        .shape = {1, 2, 1, 5, 16, EP_F32, EP_LOW_LATENCY_SCATTER, 5}, .status = EP_EINVAL, .host = &host};
    c.layout = ep_comm_layout(&c.shape);
    c.base[0] = (unsigned char *)alloc_exact(c.layout.num_bytes);
    for (uint32_t is_void = 0; is_void < 2; is_void++) {
        memset(c.base[0], 0, c.layout.num_bytes);
        memset(c.base[0] + c.layout.stage_off, 0x5a, 2 * EP_LL_BANKS * 5 * c.layout.slot_stride);
        EP_AT(EpLocal, &c, 0, c.layout.local_off)->void_epoch = epoch - 2 + is_void;
        ep_ll_propagate_error(&c, EP_OP_LL_DISPATCH, epoch, heads);
        for (uint64_t of = epoch - EP_LL_BANKS; of < epoch; of++)
            for (uint32_t i = 0; i < 2 * 5; i++) /* of rank 0, and of choice 0 */
                CHECK(NULL, all_bytes_are(ep_ll_slot(&c, 0, i / 5, i % 5, of), c.layout.slot_stride,
                                          is_void && of == epoch - 1 ? 0 : 0x5a));
        CHECK(NULL, EP_AT(EpLocal, &c, 0, c.layout.local_off)->void_epoch == epoch);
    }
    free(c.base[0]);
    return true;
}

/* ---- leaving ---- */

/* Three workers leave an operation. One of them only sends, so it does not know whether the operation is
 * void. Whoever is the last, the local words afterwards say it. */
bool test_ll_leave(void) {
    for (uint32_t sender = 0; sender < 3; sender++)
        for (uint32_t is_void = 0; is_void < 2; is_void++) {
            EpLocal l = {.epoch = 6, .claim = 1, .void_epoch = 2};
            EpComm c = {.base = {(unsigned char *)&l}};
            for (uint32_t i = 0; i < 3; i++) {
                CHECK(NULL, l.epoch == 6 && l.faulted == 0 && l.claim == 1);
                ep_ll_leave(&c, 3, is_void && i != sender, 7);
            }
            CHECK(NULL, l.epoch == 7 && l.num_left == 0 && l.faulted == is_void);
            CHECK(NULL, l.claim == !is_void && l.void_epoch == (is_void ? 7 : 2));
        }
    return true;
}
