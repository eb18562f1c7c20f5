/* cpu/gemm_loops.h - the loops of cpu/gemm.c over vectors. gemm.c includes this file once for each
 * instruction set. LOOP(name) begins the definition of a function, and LOOPS names the table of these
 * functions. */

/* to[0 .. n) = the numbers of src from `at` on, as float32, and zeros up to a multiple of LANES. */
LOOP(load)(float *to, const void *src, uint32_t dtype, uint64_t at, uint32_t n) {
    const uint16_t *from = (const uint16_t *)src + at;
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Words h = __builtin_convertvector(*(const Halves *)(const void *)(from + i), Words);
        Words bits = h << 16;
        if (dtype == EP_F16) {
            /* The exponent of fp16 has a bias of 15, that of fp32 one of 127. Infinity and NaN keep the
             * largest exponent. */
            const Words magnitude = (h & 0x7fffu) << 13, special = (Words)((h & 0x7c00u) == 0x7c00u);
            const Words scaled = (Words)((Floats)magnitude * 0x1p112f);
            bits = (h & 0x8000u) << 16 | (special & (magnitude | 0x7f800000u)) | (~special & scaled);
        }
        *(Words *)(void *)(to + i) = bits;
    }
    for (; i < n; i++) to[i] = ep_cpu_number(src, dtype, at + i);
    for (; i % LANES; i++) to[i] = 0;
}

/* Round n numbers to dtype, from `at` on. */
LOOP(store)(void *dst, uint32_t dtype, uint64_t at, const float *from, uint32_t n) {
    EpF16 *half = (EpF16 *)dst + at;
    uint32_t i = 0;
    if (dtype == EP_F16)
        for (; i < n; i++) half[i] = (EpF16)from[i];
    for (; i + LANES <= n; i += LANES) {
        const Words bits = *(const Words *)(const void *)(from + i);
        const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, nan = bits >> 16 | 0x40u;
        const Words is_nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
        *(Halves *)(void *)((uint16_t *)dst + at + i) =
            __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), Halves);
    }
    for (; i < n; i++) ep_cpu_store(dst, dtype, at + i, from[i]);
}

/* sums[i] = the dot product of w and row i of a [STEP][padded]. */
LOOP(dot)(float *sums, const float *a, const float *w, uint32_t padded) {
    Floats part[STEP] = {{0}};
    for (uint32_t at = 0; at < padded; at += LANES) {
        const Floats b = *(const Floats *)(const void *)(w + at);
        part[0] += *(const Floats *)(const void *)(a + at) * b;
        part[1] += *(const Floats *)(const void *)(a + padded + at) * b;
        part[2] += *(const Floats *)(const void *)(a + 2ull * padded + at) * b;
        part[3] += *(const Floats *)(const void *)(a + 3ull * padded + at) * b;
    }
    for (uint32_t i = 0; i < STEP; i++) {
        for (uint32_t half = LANES / 2; half; half /= 2)
            for (uint32_t j = 0; j < half; j++) part[i][j] += part[i][j + half];
        sums[i] = part[i][0];
    }
}

/* sum[0 .. padded) += x[i] times row i of w [num][padded], one row after the other; num is at most STEP. */
LOOP(add)(float *sum, const float *x, const float *w, uint32_t padded, uint32_t num) {
    for (uint32_t at = 0; at < padded; at += LANES) {
        Floats s = *(const Floats *)(const void *)(sum + at);
        s += x[0] * *(const Floats *)(const void *)(w + at);
        if (num > 1) s += x[1] * *(const Floats *)(const void *)(w + padded + at);
        if (num > 2) s += x[2] * *(const Floats *)(const void *)(w + 2ull * padded + at);
        if (num > 3) s += x[3] * *(const Floats *)(const void *)(w + 3ull * padded + at);
        *(Floats *)(void *)(sum + at) = s;
    }
}

static const Loops LOOPS = {NAME(load), NAME(store), NAME(dot), NAME(add)};
#undef LOOP
#undef LOOPS
#undef NAME
