/* ll_cases.c - random cases of the low-latency dispatch and combine; see ll_cases.h. */
#include "ll_cases.h"

/* Rows of an expert are in the order of source and token. A token has one row at an expert. */
static void place(LlCase *c, uint32_t r) {
    const EpShape *s = &c->base.shape;
    const uint32_t K = s->num_topk, L = s->num_experts / s->num_ranks;
    uint32_t row = 0;
    c->origin[r] = (int32_t *)alloc_exact(4 * c->num_rows);
    c->counts[r] = (int32_t *)calloc(L, 4);
    memset(c->origin[r], 0xff, 4 * c->num_rows);
    for (uint32_t l = 0; l < L; l++) {
        if (c->is_masked) row = l * s->num_ranks * s->max_tokens;
        for (uint32_t w = 0; w < s->num_ranks; w++)
            for (uint32_t t = 0; t < c->base.num_tokens[w]; t++) {
                int32_t has_row = 0;
                for (uint32_t k = 0; k < K; k++) {
                    if (c->base.expert[w][t * K + k] != (int32_t)(r * L + l)) continue;
                    c->row[w][t * K + k] = (int32_t)row;
                    has_row = 1;
                }
                if (has_row) c->origin[r][row++] = (int32_t)(w * s->max_tokens + t);
                c->counts[r][l] += has_row;
            }
    }
}

/* The sum of a token's rows at rank r, times their weights, in the order of choices; of all ranks if r is
 * EP_MAX_RANKS. */
static float sum_at(const LlCase *c, uint32_t w, uint32_t t, uint32_t r, uint32_t h) {
    const EpShape *s = &c->base.shape;
    const uint32_t K = s->num_topk, L = s->num_experts / s->num_ranks;
    float sum = 0;
    for (uint32_t k = 0; k < K; k++) {
        const int32_t e = c->base.expert[w][t * K + k];
        if (e < 0 || (r != EP_MAX_RANKS && (uint32_t)e / L != r)) continue;
        const float weight = c->base.has_weight ? c->base.weight[w][t * K + k] : 1.0f;
        const float term = weight * load_number(c->y[(uint32_t)e / L], s->dtype,
                                                (uint64_t)c->row[w][t * K + k] * s->hidden + h);
        sum += term;
    }
    return sum;
}

/* Each rank adds up its rows, and rounds. The source adds up these in the order of ranks, and rounds. In mode
 * EP_LOW_LATENCY_SCATTER the source adds up all rows. */
static void expect_out(LlCase *c, uint32_t w, uint32_t t) {
    const EpShape *s = &c->base.shape;
    float cell;
    for (uint32_t h = 0; h < s->hidden; h++) {
        float sum = 0;
        for (uint32_t r = 0; r < s->num_ranks; r++) {
            store_number(&cell, s->dtype, 0, sum_at(c, w, t, r, h));
            sum += load_number(&cell, s->dtype, 0);
        }
        if (s->combine_mode == EP_LOW_LATENCY_SCATTER) sum = sum_at(c, w, t, EP_MAX_RANKS, h);
        store_number(c->out[w], s->dtype, (uint64_t)t * s->hidden + h, sum);
    }
}

void ll_make(LlCase *c, const EpShape *s, Rng *rng, Route route, uint32_t fp8) {
    case_make(&c->base, s, rng, route, 0);
    c->is_masked = rng_below(rng, 2);
    c->fp8 = fp8;
    c->num_rows = c->is_masked ? (uint64_t)s->num_experts * s->max_tokens : s->capacity;
    for (uint32_t w = 0; w < s->num_ranks; w++) {
        const uint64_t T = c->base.num_tokens[w];
        c->row[w] = (int32_t *)alloc_exact(4 * T * s->num_topk);
        memset(c->row[w], 0xff, 4 * T * s->num_topk);
        c->out[w] = (unsigned char *)alloc_exact(T * row_bytes(s));
        c->y[w] = random_rows(rng, s, c->num_rows);
    }
    for (uint32_t r = 0; r < s->num_ranks; r++) place(c, r);
    for (uint32_t w = 0; w < s->num_ranks; w++)
        for (uint32_t t = 0; t < c->base.num_tokens[w]; t++) expect_out(c, w, t);
}
void ll_free(LlCase *c) {
    for (uint32_t w = 0; w < EP_MAX_RANKS; w++) {
        void *all[] = {c->row[w], c->origin[w], c->counts[w], c->y[w], c->out[w]};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    }
    case_free(&c->base);
}
