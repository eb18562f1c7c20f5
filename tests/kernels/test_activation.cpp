/* test_activation.cpp - compares the kernels of an activation and its gradient with the CPU backend.
 *
 * All bits must be the same. CPU threads emulate the kernels. Rows that belong to no expert are NaN and must
 * not be written.
 * Usage: test_activation [seed] */
#include "emulated_port.h"
#include "kernels/gemm/activation.cuh"

#include <random>

extern "C" void ep_cpu_activation(const EpActivationParams *p);

static std::mt19937 ep_random;

struct Case {
    uint32_t activation, num_cols;
    std::vector<int32_t> offsets;
    uint32_t num_rows, is_f16, has_weight, in_place;
    float alpha, limit;
};
static const Case cases[] = {
    {EP_ACT_SWIGLU, 8, {0, 3, 3, 9}, 9, 0, 1, 0, 0, 0},
    {EP_ACT_SWIGLU, 520, {2, 20}, 23, 1, 1, 1, 0, 0},
    {EP_ACT_SWIGLU_NUMBERS, 264, {0, 17}, 17, 0, 1, 1, 1.3f, 0.6f},
    {EP_ACT_SWIGLU_PLUS_ONE, 40, {0, 5, 11}, 11, 1, 0, 0, 1.7f, 0.9f},
    {EP_ACT_GPT_OSS, 296, {1, 5, 12}, 14, 0, 1, 0, 1.702f, 0.8f},
    {EP_ACT_GEGLU_TANH, 48, {0, 10}, 10, 0, 1, 1, 0, 0},
    {EP_ACT_GELU, 264, {0, 9}, 9, 1, 1, 0, 0, 0},
    {EP_ACT_GELU_TANH, 72, {0, 9}, 12, 0, 0, 1, 0, 0},
    {EP_ACT_SILU, 24, {0, 9}, 9, 0, 1, 0, 0, 0},
    {EP_ACT_RELU2, 24, {0, 9}, 9, 1, 1, 0, 0, 0},
    {EP_ACT_NONE, 24, {0, 9}, 9, 0, 1, 0, 0, 0},
    {EP_ACT_SWIGLU, 16, {4, 4}, 6, 0, 1, 0, 0, 0}, /* no rows */
    /* Columns that are quantised: whole groups of 128, also half of a warp's columns. */
    {EP_ACT_SWIGLU, 128, {1, 3, 3, 12}, 14, 0, 1, 0, 0, 0},
    {EP_ACT_SWIGLU, 384, {0, 7}, 9, 1, 1, 0, 0, 0},
    {EP_ACT_GPT_OSS, 128, {2, 9}, 9, 0, 1, 0, 1.7f, 7},
    {EP_ACT_GPT_OSS, 640, {0, 5}, 5, 1, 0, 0, 1.7f, 7},
    {EP_ACT_SWIGLU_PLUS_ONE, 256, {0, 6}, 6, 0, 1, 0, 1.3f, 2},
    {EP_ACT_GELU, 384, {0, 6}, 7, 0, 1, 0, 0, 0},
    {EP_ACT_RELU2, 128, {1, 6}, 7, 1, 1, 0, 0, 0},
};

/* The tensors of a case, the same for both backends. */
struct Tensors {
    std::vector<uint16_t> h, d, d_h, weighted;
    std::vector<uint8_t> d_h8, weighted8;
    std::vector<float> row_weight, dots, d_h_scales, weighted_scales;
    EpActivationParams p = {};

    explicit Tensors(const Case &c) {
        const uint64_t num = (uint64_t)c.num_rows * c.num_cols, halves = 1 + EP_ACT_IS_GATED(c.activation);
        std::normal_distribution<float> normal;
        const auto numbers = [&](uint64_t n) {
            std::vector<uint16_t> v(n);
            for (uint64_t i = 0; i < n; i++) {
                const uint64_t row = i / (n / c.num_rows);
                const bool used = row >= (uint32_t)c.offsets[0] && row < (uint32_t)c.offsets.back();
                const float f = used ? (i % 31 ? 1 : 40) * normal(ep_random) : NAN;
                const __half half = __float2half(f);
                const __nv_bfloat16 brain = __float2bfloat16(f);
                memcpy(&v[i], c.is_f16 ? (const void *)&half : (const void *)&brain, 2);
            }
            return v;
        };
        h = numbers(halves * num);
        d = numbers(num);
        d_h.assign(halves * num, 0x7ffe);
        weighted.assign(num, 0x7ffe);
        for (uint32_t i = 0; i < c.num_rows; i++) row_weight.push_back(normal(ep_random));
        dots.assign(c.num_rows, NAN);
        d_h8.assign(halves * num, 0x5a);
        weighted8.assign(num, 0x5a);
        d_h_scales.assign(halves * num / EP_QUANTIZE_GROUP, -7);
        weighted_scales.assign(num / EP_QUANTIZE_GROUP, -7);
        p.activation = ep_act_with_numbers({c.activation, c.alpha, c.limit});
        p.num_rows = c.num_rows;
        p.num_experts = (uint32_t)c.offsets.size() - 1;
        p.num_cols = c.num_cols;
        p.is_f16 = c.is_f16;
        p.offsets = c.offsets.data();
    }
    /* Call this after the last move or copy of the tensors. */
    const EpActivationParams &params(const Case &c, bool quantizes) {
        if (quantizes) {
            p.d_h8 = d_h8.data();
            p.weighted8 = weighted8.data();
            p.d_h_scales = d_h_scales.data();
            p.weighted_scales = weighted_scales.data();
        }
        p.h = h.data();
        p.d = d.data();
        p.row_weight = c.has_weight ? row_weight.data() : NULL;
        p.d_h = d_h.data();
        p.weighted = c.in_place ? d.data() : weighted.data();
        p.dots = dots.data();
        return p;
    }
};

template <int DTYPE, bool QUANTIZES> static void emulate(const EpActivationParams &p) {
    gridDim = dim3(2);
    blockDim = dim3(64);
    for (uint32_t block = 0; block < 2; block++) {
        std::vector<std::thread> threads;
        for (uint32_t i = 0; i < 64; i++)
            threads.emplace_back([&, i, block] {
                threadIdx.x = i;
                blockIdx.x = block;
#define EP_CASE(ACT) \
    if (EP_ACT_KERNEL(p.activation.kind) == ACT) ep_act_all_rows<ACT, DTYPE, QUANTIZES>(p)
                EP_CASE(EP_ACT_NONE);
                EP_CASE(EP_ACT_GELU);
                EP_CASE(EP_ACT_SWIGLU);
                EP_CASE(EP_ACT_GPT_OSS);
                EP_CASE(EP_ACT_ANY_GATE);
                EP_CASE(EP_ACT_ANY_UNGATED);
#undef EP_CASE
            });
        for (std::thread &t : threads) t.join();
    }
}

template <bool QUANTIZES> static bool check(const Case &c) {
    Tensors cpu(c), gpu = cpu;
    ep_cpu_activation(&cpu.params(c, QUANTIZES));
    if (c.is_f16) emulate<EP_F16, QUANTIZES>(gpu.params(c, QUANTIZES));
    else emulate<EP_BF16, QUANTIZES>(gpu.params(c, QUANTIZES));
    const bool ok = cpu.d_h8 == gpu.d_h8 && cpu.weighted8 == gpu.weighted8 &&
                    cpu.d_h_scales == gpu.d_h_scales && cpu.weighted_scales == gpu.weighted_scales &&
                    cpu.d_h == gpu.d_h && cpu.weighted == gpu.weighted && cpu.d == gpu.d &&
                    !memcmp(cpu.dots.data(), gpu.dots.data(), 4 * c.num_rows);
    uint32_t num_dots = 0;
    for (float v : gpu.dots) num_dots += v == v;
    const bool all = num_dots == (uint32_t)(c.offsets.back() - c.offsets[0]);
    printf("activation %u, %3u columns, %s%s: %s\n", c.activation, c.num_cols, c.is_f16 ? "f16" : "bf16",
           QUANTIZES ? ", quantised" : "",
           !ok   ? "WRONG"
           : all ? "ok"
                 : "WRONG ROWS");
    return ok && all;
}

int main(int argc, char **argv) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    bool ok = true;
    for (const Case &c : cases) {
        ok = check<false>(c) && ok;
        if (c.num_cols % EP_QUANTIZE_GROUP == 0 && !c.in_place) ok = check<true>(c) && ok;
    }
    puts(ok ? "ok" : "FAILED");
    return !ok;
}
