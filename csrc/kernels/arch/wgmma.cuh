/* wgmma.cuh - the products of the tensor cores of sm_90a: one function for each instruction; see ptx.cuh.
 *
 * Exports ep_wgmma_desc, ep_wgmma_desc_rows, ep_wgmma_fence, ep_wgmma_commit, ep_wgmma_wait,
 * ep_wgmma_keep_order, ep_wgmma, ep_wgmma_rows, ep_wgmma_e4m3 and ep_wgmma_e4m3_rows. */
#ifndef EP_WGMMA_CUH
#define EP_WGMMA_CUH
#include "kernels/arch/ptx.cuh"

/* The wgmma descriptor of a tile in shared memory, swizzled within lines of 128 bytes. k counts along the
 * contraction.
 * K-major (a line is 64 values of k of one row): 8 rows are 1024 bytes; 16 values of k are 32 bytes.
 * MN-major (a line is 64 rows at one k): 8 values of k are 1024 bytes, 16 are 2048 bytes; the next 64 rows
 * are located `slab` bytes later. */
EP_PTX uint64_t ep_wgmma_desc(uint32_t smem, uint32_t slab) {
    return (uint64_t)((smem & 0x3ffff) >> 4) | (uint64_t)(slab >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           1ull << 62;
}
/* That of a K-major tile, of which each 8 rows are located `stride` bytes after the 8 before. */
EP_PTX uint64_t ep_wgmma_desc_rows(uint32_t smem, uint32_t stride) {
    return (uint64_t)((smem & 0x3ffff) >> 4) | (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}
EP_PTX void ep_wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
EP_PTX void ep_wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> EP_PTX void ep_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from moving reads of an accumulator before the wait for it. */
template <int N> EP_PTX void ep_wgmma_keep_order(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* d += a b, by one warp: 16 rows, 8 columns and 16 values of k. a is as in ep_wgmma_rows. b is two matrices
 * of ep_ldmatrix_x4, whose lines are columns. */
template <bool F16> EP_PTX void ep_mma(float *d, const uint32_t *a, const uint32_t *b) {
#define EP_MMA(TYPE)                                                   \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 " \
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"        \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (F16) EP_MMA("f16");
    else EP_MMA("bf16");
#undef EP_MMA
}

/* clang-format off */
#define EP_R4 "%0,%1,%2,%3"
#define EP_R8 EP_R4 ",%4,%5,%6,%7"
#define EP_R12 EP_R8 ",%8,%9,%10,%11"
#define EP_R16 EP_R12 ",%12,%13,%14,%15"
#define EP_R32 EP_R16 "," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define EP_R64 EP_R32 "," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define EP_R96 EP_R64 "," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define EP_R128 EP_R96 "," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define EP_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EP_D8(i) EP_D4(i), EP_D4(i + 4)
#define EP_D12(i) EP_D8(i), EP_D4(i + 8)
#define EP_D16(i) EP_D8(i), EP_D8(i + 8)
#define EP_D32(i) EP_D8(i), EP_D8(i + 8), EP_D8(i + 16), EP_D8(i + 24)
#define EP_WGMMA(N, TYPE, REGS, A, B, P, TA, TB, ...)                                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGS "}, "         \
                 "%" A ", %" B ", p, 1, 1, %" TA ", %" TB ";\n}"                                       \
                 : __VA_ARGS__                                                                         \
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B))
/* clang-format on */

/* d[64][N] = a * b, plus d if `add`, for one warpgroup. TRANS: the operand is MN-major. */
template <int N, bool F16, int TRANS_A, int TRANS_B> EP_PTX void ep_wgmma(float (&d)[N / 2], uint64_t a,
                                                                          uint64_t b, uint32_t add) {
    static_assert(N <= 32 ? N % 8 == 0 : N == 64 || N == 128 || N == 192 || N == 256,
                  "an N that a kernel has");
#define EP_WGMMA_N(TYPE)                                                                                 \
    if constexpr (N == 8) EP_WGMMA("8", TYPE, EP_R4, "4", "5", "6", "7", "8", EP_D4(0));                 \
    if constexpr (N == 16) EP_WGMMA("16", TYPE, EP_R8, "8", "9", "10", "11", "12", EP_D8(0));            \
    if constexpr (N == 24) EP_WGMMA("24", TYPE, EP_R12, "12", "13", "14", "15", "16", EP_D12(0));        \
    if constexpr (N == 32) EP_WGMMA("32", TYPE, EP_R16, "16", "17", "18", "19", "20", EP_D16(0));        \
    if constexpr (N == 64) EP_WGMMA("64", TYPE, EP_R32, "32", "33", "34", "35", "36", EP_D32(0));        \
    if constexpr (N == 128)                                                                              \
        EP_WGMMA("128", TYPE, EP_R64, "64", "65", "66", "67", "68", EP_D32(0), EP_D32(32));              \
    if constexpr (N == 192)                                                                              \
        EP_WGMMA("192", TYPE, EP_R96, "96", "97", "98", "99", "100", EP_D32(0), EP_D32(32), EP_D32(64)); \
    if constexpr (N == 256)                                                                              \
    EP_WGMMA("256", TYPE, EP_R128, "128", "129", "130", "131", "132", EP_D32(0), EP_D32(32), EP_D32(64), \
             EP_D32(96))
    if constexpr (F16) {
        EP_WGMMA_N("f16");
    } else {
        EP_WGMMA_N("bf16");
    }
#undef EP_WGMMA_N
}
/* The same with a in registers: of a warp's 16 rows a lane has rows lane / 4 and 8 + lane / 4, at k = lane %
 * 4 * 2 and the next one (a[0], a[1]) and 8 values of k later (a[2], a[3]). b is K-major. */
#define EP_WGMMA_ROWS(N, TYPE, REGS, A0, A1, A2, A3, B, P, ...)                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGS "}, {%" A0 \
                 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, 0;\n}"                              \
                 : __VA_ARGS__                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
template <int N, bool F16> EP_PTX void ep_wgmma_rows(float (&d)[N / 2], const uint32_t *a, uint64_t b,
                                                     uint32_t add) {
    static_assert(N <= 32 ? N % 8 == 0 : N % 64 == 0 && N <= 256, "an N that a kernel has");
#define EP_WGMMA_N(TYPE)                                                                                     \
    if constexpr (N == 8) EP_WGMMA_ROWS("8", TYPE, EP_R4, "4", "5", "6", "7", "8", "9", EP_D4(0));           \
    if constexpr (N == 16) EP_WGMMA_ROWS("16", TYPE, EP_R8, "8", "9", "10", "11", "12", "13", EP_D8(0));     \
    if constexpr (N == 24) EP_WGMMA_ROWS("24", TYPE, EP_R12, "12", "13", "14", "15", "16", "17", EP_D12(0)); \
    if constexpr (N == 32) EP_WGMMA_ROWS("32", TYPE, EP_R16, "16", "17", "18", "19", "20", "21", EP_D16(0)); \
    if constexpr (N == 64) EP_WGMMA_ROWS("64", TYPE, EP_R32, "32", "33", "34", "35", "36", "37", EP_D32(0)); \
    if constexpr (N == 128)                                                                                  \
        EP_WGMMA_ROWS("128", TYPE, EP_R64, "64", "65", "66", "67", "68", "69", EP_D32(0), EP_D32(32));       \
    if constexpr (N == 192)                                                                                  \
        EP_WGMMA_ROWS("192", TYPE, EP_R96, "96", "97", "98", "99", "100", "101", EP_D32(0), EP_D32(32),      \
                      EP_D32(64));                                                                           \
    if constexpr (N == 256)                                                                                  \
    EP_WGMMA_ROWS("256", TYPE, EP_R128, "128", "129", "130", "131", "132", "133", EP_D32(0), EP_D32(32),     \
                  EP_D32(64), EP_D32(96))
    if constexpr (F16) {
        EP_WGMMA_N("f16");
    } else {
        EP_WGMMA_N("bf16");
    }
#undef EP_WGMMA_N
}
/* The same with e4m3 numbers: 32 values of k, both operands K-major. A line is 128 values of k. */
template <int N> EP_PTX void ep_wgmma_e4m3(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t add) {
    static_assert(N <= 32 ? N % 8 == 0 : N == 128 || N == 256, "an N that a kernel has");
#define EP_WGMMA_E4M3(COLS, REGS, A, B, P, ...)                                                        \
    if constexpr (N == COLS)                                                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #COLS "k32.f32.e4m3.e4m3 {" REGS "}, %" A ", %" B \
                 ", p, 1, 1;\n}"                                                                       \
                 : __VA_ARGS__                                                                         \
                 : "l"(a), "l"(b), "r"(add))
    EP_WGMMA_E4M3(8, EP_R4, "4", "5", "6", EP_D4(0));
    EP_WGMMA_E4M3(16, EP_R8, "8", "9", "10", EP_D8(0));
    EP_WGMMA_E4M3(24, EP_R12, "12", "13", "14", EP_D12(0));
    EP_WGMMA_E4M3(32, EP_R16, "16", "17", "18", EP_D16(0));
    EP_WGMMA_E4M3(128, EP_R64, "64", "65", "66", EP_D32(0), EP_D32(32));
    EP_WGMMA_E4M3(256, EP_R128, "128", "129", "130", EP_D32(0), EP_D32(32), EP_D32(64), EP_D32(96));
#undef EP_WGMMA_E4M3
}
/* The same with 128 columns, and with rows in registers: a warp has 16 of them, as ep_ldmatrix_x4 loads the
 * matrices of rows 0 to 7 and of rows 8 to 15, with k from 0 on, and then both with k from 16 on. */
EP_PTX void ep_wgmma_e4m3_rows(float (&d)[64], const uint32_t *a, uint64_t b, uint32_t add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" EP_R64 "}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1;\n}"
                 : EP_D32(0), EP_D32(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#endif /* EP_WGMMA_CUH */
