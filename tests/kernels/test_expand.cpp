/* test_expand.cpp - compares the CUDA kernel that expands weights of 4 bits to e4m3 with the CPU backend.
 *
 * All bits must be the same. Codes, zeros and scales are random, with scales of very different size within a
 * block. CPU threads emulate the kernel, one CTA after another.
 * Usage: test_expand [seed] */
#include <math.h>

#include <random>

#include "emulated_port.h"

/* What the kernel takes of ptx.cuh, and of CUDA. */
#define EP_PTX_CUH
#define EP_PTX static inline
EP_PTX uint32_t ep_and_or(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }
template <bool F16> EP_PTX uint32_t ep_pack(float lo, float hi) {
    static_assert(F16, "the kernel packs powers of two, for fp16");
    const __half2 pair = __floats2half2_rn(lo, hi);
    uint32_t v;
    memcpy(&v, &pair, 4);
    return v;
}
static uint32_t __ldg(const uint32_t *p) { return *p; }
static uint16_t __ldg(const uint16_t *p) { return *p; }

#include "kernels/quantize/expand_fp8.cuh"

extern "C" void ep_cpu_expand(const EpExpandParams *p);

static std::mt19937 ep_random;
typedef std::vector<uint8_t> Bytes;
static Bytes random_bytes(uint64_t num, uint32_t least, uint32_t most) {
    Bytes bytes(num);
    for (uint8_t &b : bytes) b = (uint8_t)(least + ep_random() % (most - least + 1));
    return bytes;
}

static bool check(uint32_t format, uint32_t group, bool zeros, uint32_t num, uint32_t n, uint32_t k,
                  uint32_t dtype) {
    const uint64_t num_scales = (uint64_t)num * n * ep_four_bit_num_blocks(k) * (EP_FOUR_BIT_BLOCK / group);
    const Bytes codes = random_bytes((uint64_t)num * n * k / 2, 0, 255),
                of_zeros = random_bytes(num_scales, 0, 15);
    Bytes scales = random_bytes(num_scales, ep_random() % 2 ? EP_MXFP4_BIAS : 226, EP_MXFP4_MAX_SCALE);
    if (format == EP_INT4) {
        scales.resize(2 * num_scales);
        for (uint64_t i = 0; i < num_scales; i++) {
            const float s = ldexpf(1 + (float)(ep_random() % 1024) / 1024, -(int)(ep_random() % 14));
            const __half h = __float2half_rn(s);
            const __nv_bfloat16 b = __float2bfloat16_rn(s);
            memcpy(&scales[2 * i], dtype == EP_F16 ? (const void *)&h : (const void *)&b, 2);
        }
    }
    EpExpandParams p = {};
    p.numbers = codes.data();
    p.weights = {scales.data(), zeros ? of_zeros.data() : NULL, format, group};
    p.num = num;
    p.n = n;
    p.k = k;
    p.dtype = dtype;
    Bytes q[2], q_scales[2];
    for (int i = 0; i < 2; i++) {
        q[i].assign((uint64_t)num * n * k, 0xa5);
        q_scales[i].assign(4 * ep_expand_num_ctas(&p), 0xa5);
        p.q = q[i].data();
        p.q_scales = (float *)q_scales[i].data();
        if (i == 0) {
            ep_cpu_expand(&p);
            continue;
        }
        num_sm = (uint32_t)ep_expand_num_ctas(&p);
        for (my_block = 0; my_block < num_sm; my_block++)
            ep_launch_resident(ep_expand_kernel(format, dtype), num_sm, EP_EXPAND_THREADS / 32, 0, NULL, p);
    }
    const bool ok = q[0] == q[1] && q_scales[0] == q_scales[1];
    printf("%s, groups of %u%s, %u x %u x %u, %s: %s\n", format == EP_MXFP4 ? "MXFP4" : "INT4", group,
           zeros ? " with zeros" : "", num, n, k, dtype == EP_F16 ? "fp16" : "bf16", ok ? "ok" : "WRONG");
    return ok;
}

int main(int argc, char **argv) {
    bool ok = true;
    ep_random.seed(argc > 1 ? (unsigned)atoi(argv[1]) : 1);
    for (uint32_t dtype : {EP_F16, EP_BF16}) {
        ok = check(EP_MXFP4, 32, false, 2, 192, 320, dtype) && ok;
        ok = check(EP_MXFP4, 32, false, 1, 64, 64, dtype) && ok;
        for (uint32_t group : {32u, 64u, 128u})
            ok = check(EP_INT4, group, group != 64, 1, 192, 384, dtype) && ok;
    }
    puts(ok ? "ok" : "FAILED");
    return !ok;
}
