/* test_gemm_narrow.cpp - compares the GEMM for Hopper with few columns with sums in double.
 *
 * CPU threads emulate the kernel. Inputs are random, and NaN around the rows of the experts. The outputs are
 * poisoned, and rows of no expert must stay so. In a mixture each row has the adapter of its tag, and some
 * rows have none.
 * Usage: test_gemm_narrow [seed] */
#include "gemm_pair.h"
#include "kernels/gemm/gemm_narrow.cuh"

struct Case {
    uint32_t n, k, pairs;
    std::vector<int32_t> sizes;
    uint32_t of_adapter; /* 0: no mixture */
};

/* Number c of the product of row r of expert e, and in *size the sum of the sizes of its terms. */
template <typename C> static double product(const EpGemmParams &p, uint64_t e, uint64_t r, uint64_t c,
                                            double *size) {
    const uint16_t *a = (const uint16_t *)p.a, *b = (const uint16_t *)p.b + e * p.n * p.k;
    const uint64_t num = C::TRANS_B ? p.n : p.k;
    double sum = 0;
    *size = 0;
    for (uint64_t i = 0; i < num; i++) {
        const double term = (double)ep_widen(a[r * num + i], C::F16) *
                            ep_widen(C::TRANS_B ? b[i * p.k + c] : b[c * p.k + i], C::F16);
        sum += term;
        *size += fabs(term);
    }
    return sum;
}

template <int KIND, int BN, bool FEW, bool F16> static bool check(const char *name, const Case &c) {
    typedef EpGemmNarrowConfig<KIND, BN, FEW, F16> C;
    std::vector<int32_t> offsets;
    std::vector<uint16_t> a, b;
    const uint64_t rows = place_experts(c.sizes, &offsets);
    EpGemmNarrowParams q = {parameters(c, offsets, KIND, F16), {NULL, c.of_adapter}};
    EpGemmParams *p = &q.gemm;
    const uint64_t cols = ep_gemm_num_cols(p), num_tags = c.of_adapter ? cols / c.of_adapter : 1;
    std::vector<uint16_t> out(rows * cols, EP_POISON);
    std::vector<int32_t> tags(rows);
    uint64_t wrong = 0;
    fill_rows(a, offsets, C::TRANS_B ? c.n : c.k, F16);
    fill_all(b, c.sizes.size() * c.n * c.k, F16);
    for (uint64_t r = 0; r < rows; r++) /* neighbours often have the same, so that some tiles lack some */
        tags[r] = r % 3 && ep_random() % 4 ? tags[r - 1] : (int32_t)(ep_random() % (num_tags + 1)) - 1;
    if (c.of_adapter) q.own.row_tag = tags.data();
    p->a = a.data();
    p->b = b.data();
    p->out = out.data();
    const EpTensorMap map_a = ep_map_rows(p, p->a, C::TRANS_B ? p->n : p->k, C::A_ROWS);
    const EpTensorMap map_b = ep_map_b(p, 2 * BN);
    EpTensorMap group = map_b;
    if (c.of_adapter) group.box[1] = EP_NARROW_GROUP;
    const EpNarrowMaps maps = {&map_a, &map_b, &group};
    ep_cta_threads = C::THREADS;
    gridDim = dim3(2 * c.pairs);
    for (uint32_t first = 0; first < gridDim.x; first += 2) {
        std::vector<std::thread> threads;
        memset(ep_shared, 0xff, sizeof ep_shared);
        for (uint32_t i = 0; i < 2 * C::THREADS; i++)
            threads.emplace_back([&, i] {
                threadIdx.x = i / 2;
                blockIdx.x = first + i % 2;
                ep_rank = i % 2;
                ep_gemm_narrow_body<C>(&q, &maps);
            });
        for (std::thread &t : threads) t.join();
    }
    for (uint64_t r = 0, e = 0; r < rows; r++) {
        const bool is_owned = r >= ROWS_BEFORE && r < (uint64_t)offsets.back();
        while (is_owned && r >= (uint64_t)offsets[e + 1]) e++;
        for (uint64_t col = 0; col < cols; col++) {
            const uint16_t v = out[r * cols + col];
            const bool keeps = !c.of_adapter || tags[r] == (int32_t)(col / c.of_adapter);
            double size = 0, exact = is_owned && keeps ? product<C>(*p, e, r, col, &size) : 0;
            const double bound = fabs(exact) * (F16 ? 0x1p-11 : 0x1p-8) + 1e-5 * size + 1e-7;
            const bool ok = !is_owned ? v == EP_POISON
                            : keeps   ? fabs(ep_widen(v, F16) - exact) <= bound
                                      : v == 0;
            if (!ok && wrong++ == 0)
                printf("  row %llu column %llu: got %g, expected %g\n", (unsigned long long)r,
                       (unsigned long long)col, ep_widen(v, F16), exact);
        }
    }
    printf("%-36s %u experts of %u x %u: %s\n", name, p->num_experts, c.n, c.k, wrong ? "WRONG" : "ok");
    fflush(stdout);
    return wrong == 0;
}

/* 140 experts: more than the lanes of a warp look at once. Most have few rows, or none. */
static std::vector<int32_t> many(void) {
    std::vector<int32_t> sizes(140);
    for (size_t i = 0; i < sizes.size(); i++) sizes[i] = i % 3 ? 0 : i % 4;
    sizes[131] = 70;
    return sizes;
}
/* The contraction is a part of a stage, or no multiple of one; experts have no row, one, or some more than a
 * row block. */
static const Case one = {16, 208, 1, {1, 0, 64, 130, 17}, 0};
static const Case wide = {112, 144, 2, {70, 0, 5}, 0};
static const Case mixed = {96, 272, 2, {40, 0, 70, 3, 1}, 16};
/* several passes; the last 16 columns are padding */
static const Case mixed_wide = {208, 80, 2, {20, 66}, 24};
static const Case mixed_widest = {560, 32, 1, {9, 0, 66}, 40}; /* more groups than a word has bits */
static const Case gradient = {272, 16, 1, {1, 0, 64, 130, 17}, 0};
static const Case gradient_wide = {208, 48, 2, {33, 90}, 0};
static const Case experts = {16, 48, 3, many(), 0};

#define RUN(KIND, BN, FEW, F16, CASE) \
    ok = check<KIND, BN, FEW, F16>(#KIND " " #BN " " #FEW " " #F16 " " #CASE, CASE) && ok;

static bool run_all(void) {
    bool ok = true;
    ep_producer_lanes = 32; /* warp 0 is one of the MMA warps */
    RUN(EP_GEMM_FORWARD, 16, false, false, one)
    RUN(EP_GEMM_FORWARD, 32, true, true, mixed)
#ifndef __SANITIZE_THREAD__
    RUN(EP_GEMM_FORWARD, 16, true, true, experts)
    RUN(EP_GEMM_FORWARD, 64, true, false, mixed_wide)
    RUN(EP_GEMM_FORWARD, 128, true, true, mixed)
    RUN(EP_GEMM_FORWARD, 64, false, true, mixed_widest)
    RUN(EP_GEMM_FORWARD, 128, false, false, wide)
    RUN(EP_GEMM_FORWARD, 128, false, true, mixed)
    RUN(EP_GEMM_FORWARD, 128, false, false, mixed_wide)
    RUN(EP_GEMM_FORWARD, 32, false, false, one)
    RUN(EP_GEMM_DGRAD, 16, false, false, gradient)
    RUN(EP_GEMM_DGRAD, 64, false, true, gradient_wide)
#endif
    return ok;
}

int main(int argc, char **argv) { return gemm_main(argc, argv, run_all); }
