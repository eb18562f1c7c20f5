/* test_quantize.cpp - compares the CUDA kernels that quantise rows with the CPU backend.
 *
 * All bits must be the same, and what must not be written keeps its poison. CPU threads emulate the kernels,
 * one CTA after another.
 * Usage: test_quantize [seed] */
#include <math.h>

#include <random>

#include "emulated_port.h"
#include "kernels/quantize/quantize.cuh"

extern "C" void ep_cpu_quantize_rows(const EpQuantizeParams *p);

static std::mt19937 ep_random;
enum { POISON = 0xa5, NUM_CTAS = 3 };

struct Case {
    uint32_t max_rows, k, dtype, activation;
    int32_t num_rows; /* -2: no number on the device */
};

struct Output {
    std::vector<uint8_t> q;
    std::vector<float> scales;
    Output(const Case &c)
        : q((uint64_t)c.max_rows * c.k, POISON), scales(ep_gemm_num_blocks(c.k) * (uint64_t)c.max_rows) {
        memset((void *)scales.data(), POISON, 4 * scales.size());
    }
};

/* Random numbers as they are in memory: rows of different magnitude, and some of any bits at all. */
static std::vector<uint32_t> random_rows(uint64_t num, uint32_t dtype) {
    std::vector<uint32_t> words(dtype == EP_F32 ? num : (num + 1) / 2);
    std::normal_distribution<float> normal;
    auto bits = [&] {
        const float f = ldexpf(normal(ep_random), (int)(ep_random() % 16) - 8);
        uint32_t u;
        memcpy(&u, &f, 4);
        if (dtype == EP_F32) return u;
        if (dtype == EP_BF16) return u >> 16;
        const __half h = __float2half_rn(f);
        uint16_t v;
        memcpy(&v, &h, 2);
        return (uint32_t)v;
    };
    for (uint32_t &word : words) {
        word = bits();
        if (dtype != EP_F32) word |= bits() << 16;
        if (ep_random() % 200 == 0) word = (uint32_t)ep_random();
    }
    return words;
}

static bool same(const char *what, const Case &c, const void *want, const void *got, uint64_t num_bytes) {
    for (uint64_t i = 0; i < num_bytes; i++)
        if (((const uint8_t *)want)[i] != ((const uint8_t *)got)[i]) {
            printf("%u x %u, dtype %u, activation %u: %s: byte %llu is %02x, wanted %02x\n", c.max_rows, c.k,
                   c.dtype, c.activation, what, (unsigned long long)i, ((const uint8_t *)got)[i],
                   ((const uint8_t *)want)[i]);
            return false;
        }
    return true;
}

static bool check(const Case &c) {
    const uint64_t width = (uint64_t)c.k * (EP_ACT_IS_GATED(c.activation) ? 2 : 1);
    const std::vector<uint32_t> x = random_rows(c.max_rows * width, c.dtype);
    Output want(c), got(c);
    EpQuantizeParams p = {};
    p.x = x.data();
    p.num_rows = c.num_rows == -2 ? NULL : &c.num_rows;
    p.max_rows = c.max_rows;
    p.k = c.k;
    p.dtype = c.dtype;
    ep_quantize_set_activation(&p, {c.activation, 1.3f, 2.5f});
    p.q = want.q.data();
    p.scales = want.scales.data();
    ep_cpu_quantize_rows(&p);
    p.q = got.q.data();
    p.scales = got.scales.data();
    for (my_block = 0; my_block < NUM_CTAS; my_block++)
        ep_launch_resident(ep_quantize_kernel(c.dtype, c.activation), NUM_CTAS, EP_QUANTIZE_WARPS, 0, NULL,
                           p);
    return same("q", c, want.q.data(), got.q.data(), want.q.size()) &&
           same("scales", c, want.scales.data(), got.scales.data(), 4 * want.scales.size());
}

int main(int argc, char **argv) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    num_sm = NUM_CTAS;
    bool ok = true;
    for (uint32_t dtype = EP_F32; dtype <= EP_BF16; dtype++) {
        ok = check({19, 264, dtype, EP_ACT_NONE, -2}) && check({9, 131, dtype, EP_ACT_NONE, -2}) && ok;
        ok = check({24, 392, dtype, EP_ACT_NONE, 11}) && check({3, 130, dtype, EP_ACT_SWIGLU, 2}) && ok;
        for (uint32_t activation = EP_ACT_GELU; activation < EP_NUM_ACTIVATIONS; activation++)
            ok = check({5, 136, dtype, activation, -2}) && check({9, 13, dtype, activation, -2}) && ok;
    }
    ok = check({8, 128, EP_BF16, EP_ACT_NONE, 0}) && check({8, 128, EP_BF16, EP_ACT_SWIGLU, -1}) && ok;
    ok = check({17, 16, EP_BF16, EP_ACT_NONE, 1000}) && ok;
    puts(ok ? "ok" : "FAILED");
    return !ok;
}
