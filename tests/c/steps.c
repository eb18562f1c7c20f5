/* steps.c - the calls of one rank for a case, and the comparison of their results with the expected
 * results. */
#include "harness.h"
#include "protocol/layout.h"

EpTensor tensor1(const void *data, uint32_t dtype, int64_t d0) {
    EpTensor t;
    memset(&t, 0, sizeof t);
    /* A tensor without elements has no address, as in torch. */
    t.data = d0 ? (void *)(uintptr_t)data : NULL;
    t.dtype = dtype;
    t.element_bytes = ep_dtype_bytes(dtype);
    if (!t.element_bytes) t.element_bytes = dtype == EP_U8 ? 1 : dtype == EP_I64 ? 8 : 4;
    t.num_dims = 1;
    t.shape[0] = d0;
    t.stride[0] = 1;
    t.kind = EP_CPU;
    return t;
}
EpTensor tensor2(const void *data, uint32_t dtype, int64_t d0, int64_t d1) {
    EpTensor t = tensor1(data, dtype, d0);
    t.num_dims = 2;
    t.shape[1] = d1;
    t.stride[0] = d1;
    t.stride[1] = 1;
    return t;
}

static void *alloc_poisoned(void *old, uint64_t num_bytes) {
    free(old);
    void *at = alloc_exact(num_bytes);
    if (num_bytes) memset(at, 0x5a, num_bytes);
    return at;
}

Step step_open(Rank *me, const Case *c, uint32_t buffer) {
    Step st;
    memset(&st, 0, sizeof st);
    st.me = me;
    st.c = c;
    st.buffer = buffer;
    st.num_tokens = c->num_tokens[me->rank];
    st.num_rows = c->num_rows[me->rank] + c->slack;
    st.plan_words = ep_plan_layout(&me->setup->config.shape, st.num_tokens).num_words;
    st.recv_words = (uint64_t)c->shape.num_ranks * c->shape.max_tokens * (1 + c->shape.num_topk);
    return st;
}

void step_close(Step *st) {
    void *all[] = {st->plan,       st->recv,       st->rows, st->out,
                   st->row_weight, st->out_scalar, st->tag,  st->row_tag};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    memset(st, 0, sizeof *st);
}

int call_plan(Step *st) {
    const Case *c = st->c;
    uint32_t me = st->me->rank, before = 0, total = 0, K = c->shape.num_topk;
    st->plan = (int32_t *)alloc_poisoned(st->plan, 4 * st->plan_words);
    for (uint32_t w = 0; w < c->shape.num_ranks; total += c->num_tokens[w++])
        if (w < me) before += c->num_tokens[w];
    EpTensor index = tensor2(c->index[me], c->has_wide_index ? EP_I64 : EP_I32, st->num_tokens, K);
    EpTensor plan = tensor1(st->plan, EP_I32, (int64_t)st->plan_words), scatter;
    /* The scatter indices of all ranks, or only those of this rank. */
    if ((me + total) % 2) scatter = tensor2(c->scatter, EP_I32, total, K);
    else scatter = tensor2(c->scatter + (uint64_t)before * K, EP_I32, st->num_tokens, K);
    const EpPlanArgs args = {&index, c->has_scatter ? &scatter : NULL, &plan, 0};
    return ep_layer_plan(st->me->layer, st->buffer, &args, NULL);
}

bool has_tags(uint32_t rank) { return rank != 1; }
int32_t tag_of(uint32_t rank, uint32_t token) {
    return !has_tags(rank) ? 0 : token % 3 == 0 ? -1 : token % 3 == 1 ? INT32_MIN : (int32_t)(token + rank);
}

int call_dispatch(Step *st) {
    const Case *c = st->c;
    const EpShape *s = &c->shape;
    uint32_t me = st->me->rank;
    st->recv = (int32_t *)alloc_poisoned(st->recv, 4 * st->recv_words);
    st->rows = alloc_poisoned(st->rows, st->num_rows * row_bytes(s));
    st->row_weight = (float *)alloc_poisoned(st->row_weight, 4ull * st->num_rows);
    st->tag = (int32_t *)alloc_poisoned(st->tag, 4ull * st->num_tokens);
    st->row_tag = (int32_t *)alloc_poisoned(st->row_tag, 4ull * st->num_rows);
    for (uint32_t t = 0; t < st->num_tokens; t++) st->tag[t] = tag_of(me, t);
    EpTensor x = tensor2(c->x[me], s->dtype, st->num_tokens, s->hidden),
             weight = tensor2(c->weight[me], EP_F32, st->num_tokens, s->num_topk),
             tag = tensor1(st->tag, EP_I32, st->num_tokens);
    EpTensor plan = tensor1(st->plan, EP_I32, (int64_t)st->plan_words),
             recv = tensor1(st->recv, EP_I32, (int64_t)st->recv_words);
    EpTensor rows = tensor2(st->rows, s->dtype, st->num_rows, s->hidden),
             row_weight = tensor1(st->row_weight, EP_F32, st->num_rows),
             row_tag = tensor1(st->row_tag, EP_I32, st->num_rows);
    const EpDispatchArgs args = {.x = &x,
                                 .weight = c->has_weight ? &weight : NULL,
                                 .plan = &plan,
                                 .rows = &rows,
                                 .row_weight = c->has_weight ? &row_weight : NULL,
                                 .recv = &recv,
                                 .tag = has_tags(me) ? &tag : NULL,
                                 .row_tag = &row_tag,
                                 .requires_grad = st->requires_grad};
    return ep_layer_dispatch(st->me->layer, st->buffer, &args, NULL);
}

int call_combine(Step *st) {
    const Case *c = st->c;
    const EpShape *s = &c->shape;
    uint32_t me = st->me->rank;
    st->out = alloc_poisoned(st->out, st->num_tokens * row_bytes(s));
    st->out_scalar = (float *)alloc_poisoned(st->out_scalar, 4ull * st->num_tokens * s->num_topk);
    EpTensor y = tensor2(c->y[me], s->dtype, st->num_rows, s->hidden),
             row_weight = tensor1(c->row_weight[me], EP_F32, st->num_rows);
    EpTensor row_scalar = tensor1(c->row_scalar[me], EP_F32, st->num_rows);
    EpTensor plan = tensor1(st->plan, EP_I32, (int64_t)st->plan_words),
             recv = tensor1(st->recv, EP_I32, (int64_t)st->recv_words);
    EpTensor out = tensor2(st->out, s->dtype, st->num_tokens, s->hidden),
             out_scalar = tensor2(st->out_scalar, EP_F32, st->num_tokens, s->num_topk);
    const EpCombineArgs args = {.rows = &y,
                                .row_weight = c->has_row_weight ? &row_weight : NULL,
                                .row_scalar = c->has_scalar ? &row_scalar : NULL,
                                .plan = &plan,
                                .recv = &recv,
                                .out = &out,
                                .out_scalar = c->has_scalar ? &out_scalar : NULL,
                                .requires_grad = st->requires_grad};
    return ep_layer_combine(st->me->layer, st->buffer, &args, NULL);
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
    uint32_t K = s->num_topk, W = s->num_ranks, L = s->num_experts / W, T = st->num_tokens, num_rows, n = 0,
             tile = 0, row = 0;
    CHECK_CODE(me, 0, ep_layer_num_rows(me->layer, st->buffer, NULL, NULL, &num_rows));
    CHECK(me, num_rows == c->num_rows[me->rank]);
    CHECK(me, p[EP_HEAD_STATUS] == 0 && p[EP_HEAD_NUM_TOKENS] == (int32_t)T &&
                  p[EP_HEAD_NUM_ROWS] == (int32_t)num_rows);
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
    for (uint32_t l = 0; l < L; l++) { /* A tile has at most 128 rows, all of one expert. */
        uint32_t end = row;
        for (uint32_t i = 0; i < c->num_rows[me->rank]; i++)
            end += c->origin[me->rank][i].expert == me->rank * L + l;
        CHECK(me, p[at.expert_row_off + l] == (int32_t)row && p[at.expert_row_off + l + 1] == (int32_t)end);
        for (; row < end; row = end - row < 128 ? end : row + 128, tile++)
            CHECK(me,
                  p[at.tile_expert_off + tile] == (int32_t)l && p[at.tile_row_off + tile] == (int32_t)row);
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
        CHECK(me,
              memcmp((char *)st->rows + i * bytes, (char *)c->x[o->source] + o->token * bytes, bytes) == 0);
        CHECK(me, st->row_tag[i] == tag_of(o->source, o->token));
        if (c->has_weight)
            CHECK(me, memcmp(&st->row_weight[i], &c->weight[o->source][o->token * K + o->choice], 4) == 0);
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

bool run_moves(Step *st) {
    CHECK_CODE(st->me, 0, call_dispatch(st));
    TRY(check_dispatch(st));
    CHECK_CODE(st->me, 0, call_combine(st));
    return check_combine(st);
}

bool run_step(Rank *me, const Case *c, uint32_t buffer) {
    Step st = step_open(me, c, buffer);
    CHECK_CODE(me, 0, call_plan(&st));
    TRY(check_plan(&st));
    TRY(run_moves(&st));
    step_close(&st);
    return true;
}

bool with_cases(Body *body, EpLayerConfig config, bool world_ends, uint32_t num_cases) {
    const Setup setup = {.num_ranks = config.shape.num_ranks, .config = config, .world_ends = world_ends};
    return with_cases_of(&setup, body, num_cases);
}

bool with_cases_of(const Setup *setup, Body *body, uint32_t num_cases) {
    Case *cases = (Case *)calloc(num_cases, sizeof(Case));
    Rng rng = {test_seed * 31};
    for (uint32_t i = 0; i < num_cases; i++)
        case_make(&cases[i], &setup->config.shape, &rng, i ? ROUTE_RANDOM : ROUTE_FULL,
                  WITH_WEIGHTS | WITHOUT_SLACK);
    bool ok = run_team(setup, body, cases);
    for (uint32_t i = 0; i < num_cases; i++) case_free(&cases[i]);
    free(cases);
    return ok;
}
