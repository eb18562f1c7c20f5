/* ll_cases.h - random cases of the low-latency dispatch and combine, and what they must give. */
#ifndef LL_CASES_H
#define LL_CASES_H
#include "harness.h"

/* A dispatch and a combine: the inputs of all ranks, and the expected results. */
typedef struct {
    Case base; /* only its tokens, indices and weights are used */
    bool is_masked;
    uint32_t fp8;
    uint64_t num_rows;                /* of the tensors */
    int32_t *row[EP_MAX_RANKS];       /* [T][K] of the source: row at the expert's rank, -1: dropped */
    int32_t *origin[EP_MAX_RANKS];    /* [num_rows] source * max_tokens + token, -1: none */
    int32_t *counts[EP_MAX_RANKS];    /* [L] */
    void *y[EP_MAX_RANKS];            /* [num_rows][H] outputs of the experts */
    unsigned char *out[EP_MAX_RANKS]; /* [T][H] */
} LlCase;

void ll_make(LlCase *c, const EpShape *s, Rng *rng, Route route, uint32_t fp8);
void ll_free(LlCase *c);

#endif
