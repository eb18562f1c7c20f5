/* cases.c - random cases with their expected results.
 *
 * The expected results are computed by brute force from the documentation of the layer. Rows are ordered
 * by local expert, source rank, token and choice. Sums are computed in float32 in a fixed order. This file
 * shares no code with the library. */
#include "harness.h"

/* ---- numbers of three dtypes ---- */

__extension__ typedef _Float16 Half;

static float bits_as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
/* Round f to the nearest bfloat16. If two are equally near, choose the even one. */
static uint16_t nearest_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    uint32_t low = u & 0xffff0000u, high = low + 0x10000u;
    double to_low = (double)f - (double)bits_as_float(low), to_high = (double)bits_as_float(high) - (double)f;
    if (f < 0) {
        to_low = -to_low;
        to_high = -to_high;
    }
    bool up = to_high < to_low || (to_high == to_low && (low >> 16 & 1u));
    return (uint16_t)((up ? high : low) >> 16);
}
float load_number(const void *at, uint32_t dtype, uint64_t i) {
    if (dtype == EP_F32) return ((const float *)at)[i];
    if (dtype == EP_BF16) return bits_as_float((uint32_t)((const uint16_t *)at)[i] << 16);
    return (float)((const Half *)at)[i];
}
void store_number(void *at, uint32_t dtype, uint64_t i, float f) {
    if (dtype == EP_F32) ((float *)at)[i] = f;
    else if (dtype == EP_BF16) ((uint16_t *)at)[i] = nearest_bf16(f);
    else ((Half *)at)[i] = (Half)f;
}
/* A random number with a full mantissa and a random magnitude. So another order of summation gives another
 * sum. */
static float random_number(Rng *rng) {
    float f = (float)(rng_next(rng) >> 40) / 8388608.0f - 1.0f;
    return f * (float)(1u << rng_below(rng, 6));
}

/* ---- cases ---- */

uint64_t row_bytes(const EpShape *s) { return (uint64_t)s->hidden * (s->dtype == EP_F32 ? 4 : 2); }

void *alloc_exact(uint64_t num_bytes) {
    /* The exact size, so that AddressSanitizer detects an access one byte after the end. */
    void *at = malloc(num_bytes);
    if (!at && num_bytes) abort();
    return at;
}
void *random_rows(Rng *rng, const EpShape *s, uint64_t num_rows) {
    void *at = alloc_exact(num_rows * row_bytes(s));
    for (uint64_t i = 0; i < num_rows * s->hidden; i++) store_number(at, s->dtype, i, random_number(rng));
    return at;
}
static float *random_floats(Rng *rng, uint64_t n) {
    float *at = (float *)alloc_exact(4 * n);
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
    default: return (int32_t)rng_below(rng, E + 2) - 1; /* -1 and E mean dropped */
    }
}

static void draw_routing(Case *c, Rng *rng, Route route) {
    const EpShape *s = &c->shape;
    uint32_t hot = rng_below(rng, s->num_experts), K = s->num_topk;
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        uint32_t T = route == ROUTE_FULL ? s->max_tokens : rng_below(rng, s->max_tokens + 1);
        if (route == ROUTE_SOME_EMPTY && rng_below(rng, 2)) T = 0;
        c->num_tokens[w] = T;
        c->index[w] = alloc_exact((uint64_t)T * K * (c->has_wide_index ? 8 : 4));
        c->expert[w] = (int32_t *)alloc_exact(4ull * T * K);
        c->row[w] = (int32_t *)alloc_exact(4ull * T * K);
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

/* Assign a row of rank r to every choice that is sent to rank r. The rows are in the order of the layer, or
 * with has_scatter in a random order. */
static void place_rows(Case *c, Rng *rng, uint32_t r) {
    const EpShape *s = &c->shape;
    uint32_t K = s->num_topk, L = s->num_experts / s->num_ranks, n = 0,
             most = s->num_ranks * s->max_tokens * K;
    c->origin[r] = (Origin *)alloc_exact(most * sizeof(Origin));
    for (uint32_t e = r * L; e < (r + 1) * L; e++)
        for (uint32_t w = 0; w < s->num_ranks; w++)
            for (uint32_t t = 0; t < c->num_tokens[w]; t++)
                for (uint32_t k = 0; k < K; k++)
                    if (c->expert[w][t * K + k] == (int32_t)e) c->origin[r][n++] = (Origin){w, t, k, e};
    c->num_rows[r] = n;
    for (uint32_t i = n; c->has_scatter && i > 1; i--) {
        uint32_t j = rng_below(rng, i);
        Origin o = c->origin[r][i - 1];
        c->origin[r][i - 1] = c->origin[r][j];
        c->origin[r][j] = o;
    }
    for (uint32_t i = 0; i < n; i++)
        c->row[c->origin[r][i].source][c->origin[r][i].token * K + c->origin[r][i].choice] = (int32_t)i;
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
    float *sum = (float *)alloc_exact(4ull * H), *part = (float *)alloc_exact(4ull * H);
    uint16_t rounded[2];
    float one;
    c->out[w] = alloc_exact(T * row_bytes(s));
    c->out_scalar[w] = (float *)alloc_exact(4ull * T * K);
    for (uint32_t t = 0; t < T; t++) {
        for (uint32_t h = 0; h < H; h++) sum[h] = 0;
        for (uint32_t group = 0; group < (local ? s->num_ranks : 1); group++) {
            for (uint32_t h = 0; h < H; h++) part[h] = 0;
            for (uint32_t k = 0; k < K; k++) {
                int32_t e = c->expert[w][t * K + k];
                if (e < 0 || (local && (uint32_t)e / L != group)) continue;
                add_choice(c, part, (uint32_t)e / L, c->row[w][t * K + k]);
            }
            for (uint32_t h = 0; h < H; h++) { /* A rank sends its partial sum in the dtype of the rows. */
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
    free(sum);
    free(part);
}

void case_make(Case *c, const EpShape *shape, Rng *rng, Route route, unsigned options) {
    uint32_t W = shape->num_ranks, K = shape->num_topk, total = 0, at = 0;
    memset(c, 0, sizeof *c);
    c->shape = *shape;
    c->has_weight = options & WITH_WEIGHTS || rng_below(rng, 2);
    c->has_row_weight = options & WITH_WEIGHTS || rng_below(rng, 2);
    c->has_scalar = options & WITH_WEIGHTS || rng_below(rng, 2);
    c->has_wide_index = rng_below(rng, 2);
    c->has_scatter = options & WITH_SCATTER;
    c->slack = options & WITHOUT_SLACK || rng_below(rng, 2) ? 0 : 1 + rng_below(rng, 5);
    draw_routing(c, rng, route);
    for (uint32_t r = 0; r < W; r++) place_rows(c, rng, r);
    for (uint32_t w = 0; w < W; w++) {
        uint64_t T = c->num_tokens[w], M = c->num_rows[w] + c->slack;
        c->x[w] = random_rows(rng, shape, T);
        c->y[w] = random_rows(rng, shape, M);
        c->weight[w] = random_floats(rng, T * K);
        c->row_weight[w] = random_floats(rng, M);
        c->row_scalar[w] = random_floats(rng, M);
        total += c->num_tokens[w];
    }
    for (uint32_t w = 0; w < W; w++) expect_combine(c, w);
    c->scatter = (int32_t *)alloc_exact(4ull * total * K);
    for (uint32_t w = 0; w < W; w++)
        for (uint32_t i = 0; i < c->num_tokens[w] * K; i++) {
            /* The scatter index of a dropped choice has no meaning, so it is random. */
            c->scatter[at++] = c->row[w][i] >= 0 ? c->row[w][i] : (int32_t)rng_below(rng, 1000) - 500;
        }
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
