/* cpu/gemm.c - the grouped GEMM of the CPU backend; see protocol/gemm_params.h for what each kind computes.
 *
 * Exports ep_cpu_gemm, and its parts ep_cpu_gemm_memory and ep_cpu_gemm_in. It runs in the calling thread.
 * Invariant: each number of the output is a sum in an order that depends on the sizes of the weights only:
 * not on the other rows, on their number, on the processor or on its vector instructions. FORWARD adds the
 * products of column k to partial sum k % VECTOR, in the order of the columns, and then adds the partial sums
 * in pairs. DGRAD adds the columns of a row in their order, and WGRAD the rows of an expert in theirs. The
 * sum of a product of low rank is made likewise. FORWARD adds it to that of the weights, and DGRAD continues
 * that of the weights. No product is fused with a sum (-ffp-contract=off). */
#include <stdlib.h>
#include <string.h>

#include "cpu/ops.h"
#include "cpu/quantize.h"
#include "cpu/rows.h"
#include "protocol/activation_math.h"
#include "runtime/error.h"

enum {
    VECTOR = 16, /* partial sums of a dot product; numbers of a vector */
    STEP = 4,    /* dot products, or terms of a sum, that share a pass over memory */
    BLOCK = 64 /* rows (WGRAD: columns of a) for which a row of the weights (WGRAD: of b) is converted once */
};
__extension__ typedef _Float16 EpF16;
typedef float Floats __attribute__((vector_size(4 * VECTOR), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * VECTOR), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * VECTOR), aligned(2)));

/* The loops over vectors: for any processor, and for two of the instruction sets of x86. All give the same
 * bits. */
typedef struct {
    void (*load)(float *to, const void *src, uint32_t dtype, uint64_t at, uint32_t n);
    void (*store)(void *dst, uint32_t dtype, uint64_t at, const float *from, uint32_t n);
    void (*dot)(float *sums, const float *a, const float *w, uint32_t padded);
    void (*add)(float *sum, const float *x, const float *w, uint32_t padded, uint32_t num);
} Loops;
#define NAME(name) name##_any
#define LOOP(name) static void NAME(name)
#define LOOPS loops_any
#include "cpu/gemm_loops.inc"
#ifdef __x86_64__
#define NAME(name) name##_avx2
#define LOOP(name) static __attribute__((target("avx2,f16c"))) void NAME(name)
#define LOOPS loops_avx2
#include "cpu/gemm_loops.inc"
#define NAME(name) name##_avx512
#define LOOP(name) static __attribute__((target("avx512f,f16c"))) void NAME(name)
#define LOOPS loops_avx512
#include "cpu/gemm_loops.inc"
#endif

static const Loops *choose_loops(void) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f")) return &loops_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return &loops_avx2;
#endif
    return &loops_any;
}

typedef struct {
    const EpGemmParams *p;
    const EpFourBit *four_bit; /* NULL, or how the weights have 4 bits */
    const EpLowRank *low;      /* NULL, or what is added */
    const Loops *loop;
    uint32_t dtype;           /* of a, b, bias and out */
    uint32_t padded;          /* K, rounded up to a multiple of VECTOR */
    float *panel, *block, *y; /* [STEP][padded], [BLOCK][padded], [BLOCK][N rounded up to VECTOR] */
    uint32_t wide;            /* N, rounded up to a multiple of VECTOR */
    float *low_rows;          /* [BLOCK][low_padded] */
    float *low_panel;         /* [low_padded] */
    uint32_t low_padded;      /* R, rounded up to a multiple of VECTOR; 0: nothing is added */
} Work;

/* Load rows of a product of low rank, num from `row` on. */
static void load_low_rows(const Work *g, uint32_t row, uint32_t num) {
    for (uint32_t r = 0; r < num && g->low; r++)
        g->loop->load(g->low_rows + (uint64_t)r * g->low_padded, g->low->a, g->dtype,
                      (uint64_t)(row + r) * g->low->r, g->low->r);
}

/* Bias, activation and row weight of a row of the product, in float32, rounded once. */
static void store_row(const Work *g, uint32_t expert, uint32_t row, float *y) {
    const EpGemmParams *p = g->p;
    const uint32_t num = ep_gemm_out_cols(p), act = p->activation.kind;
    const float weight = !p->saves && p->row_weight ? p->row_weight[row] : 1.0f;
    if (p->bias)
        for (uint32_t n = 0; n < p->n; n++)
            y[n] += ep_cpu_number(p->bias, g->dtype, (uint64_t)expert * p->n + n);
    if (p->saves) g->loop->store(p->saved, g->dtype, (uint64_t)row * p->n, y, p->n);
    for (uint32_t c = 0; c < num;
         c++) { /* in place: column c of the output needs column c of the product or later */
        float value = y[c];
        if (act) {
            const float up = EP_ACT_IS_GATED(act) ? y[ep_act_up_col(act, c, num)] : 0;
            value = ep_act_gradient(&p->activation, y[ep_act_gate_col(act, c)], up).value;
        }
        y[c] = weight * value;
    }
    g->loop->store(p->out, g->dtype, (uint64_t)row * num, y, num);
}

/* num rows from `row` on, at most BLOCK. */
static void forward(const Work *g, uint32_t expert, uint32_t row, uint32_t num) {
    const EpGemmParams *p = g->p;
    const uint64_t padded = g->padded;
    for (uint32_t r = 0; r < num; r++)
        g->loop->load(g->block + r * padded, p->a, g->dtype, (uint64_t)(row + r) * p->k, p->k);
    load_low_rows(g, row, num);
    for (uint32_t n = 0; n < p->n; n++) {
        float sums[STEP], low[STEP];
        if (g->four_bit) ep_cpu_expand_row(g->four_bit, p, expert, n, g->panel);
        else g->loop->load(g->panel, p->b, g->dtype, ((uint64_t)expert * p->n + n) * p->k, p->k);
        if (g->low)
            g->loop->load(g->low_panel, g->low->b, g->dtype, ((uint64_t)expert * p->n + n) * g->low->r,
                          g->low->r);
        for (uint32_t r = 0; r < num;
             r += STEP) { /* rows after the last have old numbers, which are not used */
            g->loop->dot(sums, g->block + r * padded, g->panel, g->padded);
            if (g->low)
                g->loop->dot(low, g->low_rows + (uint64_t)r * g->low_padded, g->low_panel, g->low_padded);
            for (uint32_t i = 0; i < STEP && r + i < num; i++)
                g->y[(uint64_t)(r + i) * g->wide + n] = g->low ? sums[i] + low[i] : sums[i];
        }
    }
    for (uint32_t r = 0; r < num; r++) store_row(g, expert, row + r, g->y + (uint64_t)r * g->wide);
}

/* block [num][padded] += rows [num][pitch] times the lines of b [L][lines][K] of an expert. */
static void add_lines(const Work *g, const float *rows, uint32_t pitch, uint32_t num, const void *b,
                      uint32_t expert, uint32_t lines) {
    const uint32_t k = g->p->k;
    const uint64_t padded = g->padded;
    for (uint32_t n = 0; n < lines; n += STEP) {
        const uint32_t terms = lines - n < STEP ? lines - n : STEP;
        for (uint32_t i = 0; i < terms; i++)
            g->loop->load(g->panel + i * padded, b, g->dtype, ((uint64_t)expert * lines + n + i) * k, k);
        for (uint32_t r = 0; r < num; r++)
            g->loop->add(g->block + r * padded, rows + (uint64_t)r * pitch + n, g->panel, g->padded, terms);
    }
}

static void dgrad(const Work *g, uint32_t expert, uint32_t row, uint32_t num) {
    const EpGemmParams *p = g->p;
    const uint64_t padded = g->padded;
    memset(g->block, 0, sizeof(float) * num * padded);
    for (uint32_t r = 0; r < num; r++)
        g->loop->load(g->y + (uint64_t)r * g->wide, p->a, g->dtype, (uint64_t)(row + r) * p->n, p->n);
    load_low_rows(g, row, num);
    add_lines(g, g->y, g->wide, num, p->b, expert, p->n);
    if (g->low) add_lines(g, g->low_rows, g->low_padded, num, g->low->b, expert, g->low->r);
    for (uint32_t r = 0; r < num; r++)
        g->loop->store(p->out, g->dtype, (uint64_t)(row + r) * p->k, g->block + r * padded, p->k);
}

static void wgrad(const Work *g, uint32_t expert, uint32_t begin, uint32_t end) {
    const EpGemmParams *p = g->p;
    const uint64_t padded = g->padded;
    for (uint32_t first = 0; first < p->n; first += BLOCK) {
        const uint32_t num = p->n - first < BLOCK ? p->n - first : BLOCK;
        memset(g->block, 0, sizeof(float) * num * padded);
        for (uint32_t row = begin; row < end; row += STEP) {
            const uint32_t terms = end - row < STEP ? end - row : STEP;
            float factors[STEP][BLOCK] = {{0}};
            for (uint32_t i = 0; i < terms; i++) {
                g->loop->load(g->panel + i * padded, p->b, g->dtype, (uint64_t)(row + i) * p->k, p->k);
                g->loop->load(factors[i], p->a, g->dtype, (uint64_t)(row + i) * p->n + first, num);
            }
            for (uint32_t n = 0; n < num; n++) {
                const float x[STEP] = {factors[0][n], factors[1][n], factors[2][n], factors[3][n]};
                g->loop->add(g->block + n * padded, x, g->panel, g->padded, terms);
            }
        }
        for (uint32_t n = 0; n < num; n++) {
            const uint64_t at = ((uint64_t)expert * p->n + first + n) * p->k;
            const float *sum = g->block + n * padded;
            if (!p->accumulates) g->loop->store(p->out, g->dtype, at, sum, p->k);
            for (uint32_t k = 0; k < p->k && p->accumulates; k++)
                ((float *)p->out)[at + k] += p->scale * sum[k];
        }
    }
}

/* A row of an expert, within the rows that exist: a caller's offsets may be anything. */
static uint32_t clamp_row(const EpGemmParams *p, int32_t row) {
    return row < 0 ? 0 : (uint32_t)row < p->num_rows ? (uint32_t)row : p->num_rows;
}

/* Set the rows of out that belong to no expert to zero. */
static void clear(const EpGemmParams *p) {
    const uint64_t bytes = 2 * (uint64_t)ep_gemm_out_cols(p), end = clamp_row(p, p->offsets[p->num_experts]);
    if (!p->num_rows) return; /* then there may be no memory */
    memset(p->out, 0, bytes * clamp_row(p, p->offsets[0]));
    memset((char *)p->out + bytes * end, 0, bytes * (p->num_rows - end));
}

/* The sizes of a product, and its parts of the memory, or of NULL. Returns how many numbers they are. */
static uint64_t divide(Work *g, const EpGemmParams *p, const EpLowRank *low_rank, float *memory) {
    g->low_padded = low_rank ? (low_rank->r + VECTOR - 1) / VECTOR * VECTOR : 0;
    g->padded = (p->k + VECTOR - 1) / VECTOR * VECTOR;
    g->wide = (p->n + VECTOR - 1) / VECTOR * VECTOR;
    const uint64_t of_panel = (uint64_t)STEP * g->padded, of_block = (uint64_t)BLOCK * g->padded;
    const uint64_t of_y = p->kind == EP_GEMM_WGRAD ? 0 : (uint64_t)BLOCK * g->wide;
    const uint64_t of_low_rows = (uint64_t)BLOCK * g->low_padded;
    if (memory) {
        g->panel = memory;
        g->block = g->panel + of_panel;
        g->y = g->block + of_block;
        g->low_rows = g->y + of_y;
        g->low_panel = g->low_rows + of_low_rows;
    }
    return of_panel + of_block + of_y + of_low_rows + g->low_padded;
}

int ep_cpu_gemm_memory(const EpGemmParams *p, const EpLowRank *low_rank, float **memory) {
    Work g;
    *memory = (float *)calloc(divide(&g, p, low_rank, NULL), sizeof(float));
    if (*memory) return 0;
    return ep_error(EP_ENOMEM, "a product with weights of %u by %u: this process is out of memory", p->n,
                    p->k);
}

void ep_cpu_gemm_in(const EpGemmParams *p, const EpFourBit *four_bit, const EpLowRank *low_rank,
                    float *memory) {
    Work g = {.p = p,
              .four_bit = four_bit,
              .low = low_rank,
              .loop = choose_loops(),
              .dtype = p->is_f16 ? EP_F16 : EP_BF16};
    divide(&g, p, low_rank, memory);
    if (p->clears) clear(p);
    for (uint32_t e = 0; e < p->num_experts; e++) {
        const uint32_t begin = clamp_row(p, p->offsets[e]), end = clamp_row(p, p->offsets[e + 1]);
        if (p->kind == EP_GEMM_WGRAD) wgrad(&g, e, begin, end);
        for (uint32_t row = begin; row < end && p->kind != EP_GEMM_WGRAD; row += BLOCK) {
            const uint32_t num = end - row < BLOCK ? end - row : BLOCK;
            if (p->kind == EP_GEMM_DGRAD) dgrad(&g, e, row, num);
            else forward(&g, e, row, num);
        }
    }
}

int ep_cpu_gemm(const EpGemmParams *p, const EpFourBit *four_bit, const EpLowRank *low_rank) {
    float *memory;
    EP_TRY(ep_cpu_gemm_memory(p, low_rank, &memory));
    ep_cpu_gemm_in(p, four_bit, low_rank, memory);
    free(memory);
    return 0;
}
