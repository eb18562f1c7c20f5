/* eight.cuh - how a lane reads 8 consecutive numbers of any dtype. Exports EpEight and ep_read_eight. */
#ifndef EP_EIGHT_CUH
#define EP_EIGHT_CUH
#include "kernels/stage/rows.cuh"

/* 8 consecutive numbers as they are in memory. */
template <int DTYPE> struct EpEight {
    enum { VECS = 8 / EpVec<DTYPE>::N };
    uint4 v[VECS];
    EP_FN void unpack(const EpEight &e, float *f) {
#pragma unroll
        for (int i = 0; i < VECS; i++) EpVec<DTYPE>::unpack(e.v[i], f + EpVec<DTYPE>::N * i);
    }
};
template <int DTYPE> struct EpNumber {
    typedef uint16_t Bits;
};
template <> struct EpNumber<EP_F32> {
    typedef uint32_t Bits;
};
/* Read numbers at, .., at + num - 1 of x; the rest of the 8 are 0. WHOLE: num is 0 or 8, and the address is a
 * multiple of 16 bytes. */
template <int DTYPE, bool WHOLE> EP_FN EpEight<DTYPE> ep_read_eight(const void *x, uint64_t at, int32_t num) {
    typedef typename EpNumber<DTYPE>::Bits Bits;
    const Bits *from = (const Bits *)x + at;
    EpEight<DTYPE> e = {};
    if (WHOLE) {
#pragma unroll
        for (int i = 0; i < EpEight<DTYPE>::VECS; i++)
            if (num > 0) e.v[i] = __ldg((const uint4 *)from + i);
    } else {
        Bits bits[8];
#pragma unroll
        for (int i = 0; i < 8; i++) bits[i] = i < num ? from[i] : Bits(0);
        memcpy(&e, bits, sizeof e);
    }
    return e;
}

#endif /* EP_EIGHT_CUH */
