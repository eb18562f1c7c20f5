/* test_transpose.cpp - compares the CUDA kernels that transpose, and quantise weights, with the CPU backend.
 *
 * All bits must be the same, and what must not be written keeps its poison. CPU threads emulate the kernels,
 * one CTA after another. Rows of no expert are NaN.
 * Usage: test_transpose [seed] */
#include <math.h>

#include <random>

#include "emulated_port.h"
#include "kernels/quantize/transpose.cuh"

extern "C" void ep_cpu_transpose(const EpTransposeParams *p);
extern "C" void ep_cpu_quantize_weight(const EpQuantizeWeightParams *p);

static std::mt19937 ep_random;
enum { POISON = 0xa5, ROWS_BEFORE = 3, ROWS_AFTER = 5 };

typedef std::vector<uint8_t> Bytes;
static Bytes poisoned(uint64_t num) { return Bytes(num, POISON); }

enum { E4M3 = EP_NUM_DTYPES }; /* of a random number, beside the EpDtypes */
/* A random number as it is in memory: of different magnitudes, and some of any bits at all. */
static uint32_t random_bits(uint32_t dtype, int exponent) {
    std::normal_distribution<float> normal;
    const float f = ldexpf(normal(ep_random), exponent);
    const __half h = __float2half_rn(f);
    uint32_t u;
    uint16_t v;
    if (ep_random() % 300 == 0) return (uint32_t)ep_random();
    memcpy(&u, &f, 4);
    memcpy(&v, &h, 2);
    if (dtype == E4M3) return __nv_cvt_float_to_fp8(f, __NV_SATFINITE, __NV_E4M3);
    return dtype == EP_F32 ? u : dtype == EP_BF16 ? u >> 16 : v;
}
static uint32_t bytes_of(uint32_t dtype) { return dtype == E4M3 ? 1 : ep_dtype_bytes(dtype); }
static Bytes random_numbers(uint64_t rows, uint64_t cols, uint32_t dtype) {
    const uint32_t size = bytes_of(dtype);
    Bytes x(rows * cols * size);
    for (uint64_t i = 0; i < rows * cols; i++) {
        const uint32_t bits = random_bits(dtype, (int)(i / cols % 7) - (int)(i % cols % 5));
        memcpy(&x[i * size], &bits, size);
    }
    return x;
}

static bool same(const char *what, const Bytes &want, const Bytes &got) {
    for (uint64_t i = 0; i < want.size(); i++)
        if (want[i] != got[i]) {
            printf("  %s: byte %llu is %02x, wanted %02x\n", what, (unsigned long long)i, got[i], want[i]);
            return false;
        }
    return true;
}
template <typename P> static void run(void (*kernel)(P), uint64_t num_ctas, uint32_t num_warps, const P &p) {
    num_sm = (uint32_t)num_ctas;
    for (my_block = 0; my_block < num_ctas; my_block++)
        ep_launch_resident(kernel, (uint32_t)num_ctas, num_warps, 0, NULL, p);
}

/* ---- rows ---- */

struct Rows {
    std::vector<uint32_t> sizes;
    uint32_t cols;
    bool by_col; /* the scales of 128 columns are next to each other */
};

static bool check(const Rows &c) {
    std::vector<int32_t> offsets(1, ROWS_BEFORE);
    for (uint32_t s : c.sizes) offsets.push_back(offsets.back() + (int32_t)s);
    EpTransposeParams p = {};
    p.num_rows = (uint32_t)offsets.back() + ROWS_AFTER;
    p.num_cols = c.cols;
    p.num_experts = (uint32_t)c.sizes.size();
    p.offsets = offsets.data();
    const uint64_t groups = ep_gemm_num_blocks(c.cols);
    Bytes x = random_numbers(p.num_rows, c.cols, E4M3);
    std::vector<float> scale(groups * p.num_rows);
    for (float &s : scale) s = ldexpf(1, -(int)(ep_random() % (ep_random() % 8 ? 6 : 30)));
    memset(x.data(), 0xff, ROWS_BEFORE * c.cols);
    memset(x.data() + (uint64_t)offsets.back() * c.cols, 0xff, ROWS_AFTER * c.cols);
    p.x = x.data();
    p.x_scale = scale.data();
    p.scale_row = c.by_col ? 1 : groups;
    p.scale_col = c.by_col ? p.num_rows : 1;
    const uint64_t blocks = ep_transposed_num_blocks(p.num_rows, p.num_experts);
    Bytes q[2], scales[2];
    for (int i = 0; i < 2; i++) {
        q[i] = poisoned(blocks * 128 * c.cols);
        scales[i] = poisoned(4 * p.num_experts * groups);
        p.q = q[i].data();
        p.scales = (float *)scales[i].data();
        if (i == 0) ep_cpu_transpose(&p);
        else {
            run(expert_scales_kernel, p.num_experts * groups, EP_EXPERT_SCALES_THREADS / 32, p);
            run(transpose_e4m3_kernel, ep_transpose_num_ctas(&p), EP_SHIFT_THREADS / 32, p);
        }
    }
    const bool ok = same("q", q[0], q[1]) && same("scales", scales[0], scales[1]);
    printf("rows %u x %u: %s\n", p.num_rows, c.cols, ok ? "ok" : "WRONG");
    return ok;
}

/* ---- weights ---- */

static bool check_weight(uint32_t num, uint32_t n, uint32_t k, uint32_t dtype) {
    const Bytes x = random_numbers((uint64_t)num * n, k, dtype);
    const uint64_t blocks = (uint64_t)num * ep_gemm_num_blocks(n) * ep_gemm_num_blocks(k);
    EpQuantizeWeightParams p = {};
    Bytes out[2][4];
    p.x = x.data();
    p.num = num;
    p.n = n;
    p.k = k;
    p.dtype = dtype;
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 4; j++) out[i][j] = poisoned(j < 2 ? (uint64_t)num * n * k : 4 * blocks);
        p.q = out[i][0].data();
        p.transposed = out[i][1].data();
        p.scales = (float *)out[i][2].data();
        p.transposed_scales = (float *)out[i][3].data();
        if (i == 0) ep_cpu_quantize_weight(&p);
        else
            run(ep_quantize_weight_kernel(dtype), ep_quantize_weight_num_ctas(&p),
                ep_quantize_weight_num_warps(dtype), p);
    }
    bool ok = true;
    for (int j = 0; j < 4; j++) ok = same("weights", out[0][j], out[1][j]) && ok;
    printf("weights %u x %u x %u, dtype %u: %s\n", num, n, k, dtype, ok ? "ok" : "WRONG");
    return ok;
}

int main(int argc, char **argv) {
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    const std::vector<uint32_t> mixed = {1, 0, 128, 300, 17}, full = {256}, none = {0, 0};
    bool ok = true;
    ok = check({mixed, 400, true}) && ok;
    ok = check({mixed, 272, false}) && ok;
    ok = check({full, 16, true}) && ok;
    ok = check({none, 128, false}) && ok;
    for (uint32_t dtype = EP_F32; dtype <= EP_BF16; dtype++)
        ok = check_weight(2, 144, 272, dtype) && check_weight(1, 128, 16, dtype) && ok;
    puts(ok ? "ok" : "FAILED");
    return !ok;
}
