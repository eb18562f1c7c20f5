/* e4m3.h - e4m3 numbers by search, for tests. */
#ifndef E4M3_H
#define E4M3_H
#include <math.h>
#include <stdint.h>

static inline float e4m3_value(uint32_t code) { /* code < 127 */
    const float mantissa = (float)(code % 8) / 8;
    return code < 8 ? ldexpf(mantissa, -6) : ldexpf(1 + mantissa, (int)(code / 8) - 7);
}
/* The nearest number. If two are equally near, the one with an even code. */
static inline uint8_t nearest_e4m3(float f) {
    uint32_t best = 0;
    for (uint32_t code = 1; code < 127; code++) {
        const float before = fabsf(fabsf(f) - e4m3_value(best)), now = fabsf(fabsf(f) - e4m3_value(code));
        if (now < before || (now == before && code % 2 == 0)) best = code;
    }
    return (uint8_t)(best | (signbit(f) ? 0x80 : 0));
}

#endif /* E4M3_H */
