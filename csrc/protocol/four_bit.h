/* four_bit.h - weights of 4 bits: their layout, and what a number of them is. The same for all backends.
 *
 * A weight is a code of 4 bits, and each group of `group` values of k of a row shares a scale:
 *   MXFP4  The code is an E2M1 number: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6. The scale is a power of two
 *          (E8M0), and held as a byte: 2^(byte - 127 - EP_MXFP4_BIAS). A group has 32 values.
 *   INT4   (code - zero) * scale. The scale has the dtype of the rows. Without zeros, each zero is 8.
 * The weight is that number, rounded once to the dtype of the rows. So a product has the same bits as that of
 * the weights in 16 bits.
 *
 * Memory. numbers: of an expert [N / 64], and of 64 rows the bytes [K / 64][32][4][2][8]: of 64 values of k
 * and two rows, the eight bytes that lane c of four needs of one row, and those of the other. This is the
 * order of the first operand of a wgmma (c = lane % 4), and a lane reads its codes of two rows at once. The
 * part of a tile that a pipeline stage holds is contiguous, because memory delivers pieces of some KB faster
 * than short lines, and each copy has a price. The eight bytes are two words of 32 bits. Word i / 4 has, for
 * i % 4 = 0 to 3, the codes of k = 8 i + 2 c and of the next k. In INT4 they are bits 4 (i % 4) to 4 (i % 4)
 * + 3, and 16 bits higher. In MXFP4 they are where a kernel gets them with few instructions, see
 * ep_mxfp4_pair.
 * scales: [L][N / 64][K / 256][64][256 / group], of bytes or of the rows' dtype, and zeros the
 * same, of bytes. K / 256 is rounded up, and what is past K is 0.
 *
 * Exports EpFourBitFormat, EpFourBit, EpExpandParams and ep_four_bit_*.
 * Invariant: the byte of a scale of MXFP4 is EP_MXFP4_BIAS to EP_MXFP4_MAX_SCALE, so a scale is at most 2.
 * Whoever packs weights checks it, because the exponents of the kernels end there. Past K, and in a place
 * without an expert, the byte is 0, and so are all codes: then it does not matter what a scale of 0 means. */
#ifndef EP_FOUR_BIT_H
#define EP_FOUR_BIT_H
#include <string.h>

#include "protocol/port.h"

#define EP_FOUR_BIT_UNIT 64u   /* N and K are multiples of this */
#define EP_FOUR_BIT_BLOCK 256u /* values of k whose scales are next to each other */
#define EP_MXFP4_GROUP 32u
/* In bf16, the bits of a code are a number that is too small by 2^126; see ep_mxfp4_pair. So this is added to
 * the E8M0 byte, and the byte is the exponent of the factor of the code. */
#define EP_MXFP4_BIAS 126u
#define EP_MXFP4_MAX_SCALE 254u

typedef enum { EP_MXFP4 = 0, EP_INT4 = 1, EP_NUM_FOUR_BIT_FORMATS } EpFourBitFormat;

typedef struct {
    const void *scales;
    const uint8_t *zeros; /* NULL: 8 */
    uint32_t format;      /* EpFourBitFormat */
    uint32_t group;       /* 32, 64 or 128; K is a multiple */
} EpFourBit;

/* Weights of 4 bits to e4m3, with a scale for each block of 128 by 128: each weight, rounded to `dtype`, is
 * quantised as EpQuantizeWeightParams (wgrad_fp8.h) quantises weights in that dtype. With `to`, all blocks of
 * a matrix have the given scale. */
typedef struct {
    const uint8_t *numbers; /* [num][n][k / 2] */
    EpFourBit weights;
    uint8_t *q;         /* [num][n][k] */
    float *q_scales;    /* [num][n / 128][k / 128], rounded up */
    const float *to;    /* NULL, or [num]: the scale of each matrix, a power of two */
    uint32_t num, n, k; /* n and k are multiples of EP_FOUR_BIT_UNIT */
    uint32_t dtype;     /* EP_BF16 or EP_F16 */
} EpExpandParams;

EP_PURE bool ep_four_bit_is_group(uint32_t format, int64_t group) {
    return group == 32 || (format == EP_INT4 && (group == 64 || group == 128));
}
EP_PURE uint32_t ep_four_bit_num_blocks(uint32_t k) {
    return k / EP_FOUR_BIT_BLOCK + (k % EP_FOUR_BIT_BLOCK != 0);
}
/* Where the scale and the zero of value k of row n of an expert's weights [n_size][k_size] are. */
EP_PURE uint64_t ep_four_bit_scale(const EpFourBit *w, uint32_t n_size, uint32_t k_size, uint32_t expert,
                                   uint32_t n, uint32_t k) {
    const uint64_t rows = (uint64_t)expert * (n_size / EP_FOUR_BIT_UNIT) + n / EP_FOUR_BIT_UNIT;
    const uint64_t block = rows * ep_four_bit_num_blocks(k_size) + k / EP_FOUR_BIT_BLOCK;
    const uint64_t row = block * EP_FOUR_BIT_UNIT + n % EP_FOUR_BIT_UNIT;
    return row * (EP_FOUR_BIT_BLOCK / w->group) + k % EP_FOUR_BIT_BLOCK / w->group;
}
/* Pair i of a word of MXFP4, each code in one half: its sign is bit 15, as in bf16, and the others are bits 8
 * to 6, the last ones of the exponent and the first one of the mantissa.
 * The pipe of a GPU for masks and shifts limits the kernel for few rows. A mask and an exclusive or are one
 * instruction, and a shift to the left may be a multiplication on another pipe. Four pairs take at least four
 * masks and four shifts, because no four shifts of the eight bits of a pair cover a word; and at least two of
 * these shifts are not to the left. */
EP_PURE uint32_t ep_mxfp4_pair(uint32_t word, uint32_t i) {
    const uint32_t all = 0x81c081c0u;
    if (i == 0) return word & all;
    if (i == 1) return word << 4 & all;
    if (i == 2) return (word << 10 | word >> 22) & all;
    return (word << 6 ^ word >> 2) & all;
}
/* The code of value k of row n of an expert, whose weights have k_size columns. */
EP_PURE uint32_t ep_four_bit_code(const EpFourBit *w, const uint8_t *expert, uint32_t k_size, uint32_t n,
                                  uint32_t k) {
    const uint32_t in_unit = k % EP_FOUR_BIT_UNIT, i = in_unit / 8, c = in_unit % 8 / 2, half = in_unit % 2;
    const uint64_t unit =
        (uint64_t)(n / EP_FOUR_BIT_UNIT) * (k_size / EP_FOUR_BIT_UNIT) + k / EP_FOUR_BIT_UNIT;
    const uint8_t *b =
        expert + unit * 2048 + n % EP_FOUR_BIT_UNIT / 2 * 64 + 16 * c + 8 * (n % 2) + i / 4 * 4;
    const uint32_t word = b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
    if (w->format == EP_INT4) return word >> (4 * (i % 4) + 16 * half) & 15;
    const uint32_t code = ep_mxfp4_pair(word, i % 4) >> 16 * half;
    return (code >> 12 & 8) | (code >> 6 & 7);
}
/* E2M1 as float32, without its scale: exactly. */
EP_PURE float ep_four_bit_e2m1(uint32_t code) {
    const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
    const uint32_t halves = exponent ? (2 + mantissa) << (exponent - 1) : mantissa; /* twice the magnitude */
    const float magnitude = 0.5f * (float)halves;
    return code & 8 ? -magnitude : magnitude;
}
/* A weight of MXFP4 as float32: exactly. scale: the byte of its scale. */
EP_PURE float ep_four_bit_mxfp4(uint32_t code, uint32_t scale) {
    const uint32_t bits = scale > EP_MXFP4_BIAS ? (scale - EP_MXFP4_BIAS) << 23 : 1u << 22; /* subnormal */
    float power;
    memcpy(&power, &bits, 4);
    return ep_four_bit_e2m1(code) * power;
}

#endif /* EP_FOUR_BIT_H */
