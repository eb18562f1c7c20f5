/* test_tables.c - the lists from which numbers, names and sizes follow. */
#include "backend.h"
#include "harness.h"
#include "protocol/host.h"
#include "runtime/error.h"
#include "runtime/tensor.h"

/* A dtype of rows has a size. A dtype that no row can have, or a number that is no dtype, has none: a layout
 * must not be computed from a guess. */
bool test_dtypes(void) {
    CHECK(NULL, ep_dtype_bytes(EP_F32) == 4 && ep_dtype_bytes(EP_F16) == 2 && ep_dtype_bytes(EP_BF16) == 2);
    for (uint32_t dtype = EP_BF16 + 1; dtype < 64; dtype++) CHECK(NULL, ep_dtype_bytes(dtype) == 0);
    CHECK(NULL, ep_dtype_bytes(UINT32_MAX) == 0);
    CHECK(NULL, !strcmp(ep_dtype_name(EP_BF16), "bfloat16") && !strcmp(ep_dtype_name(EP_I32), "int32"));
    CHECK(NULL,
          !strcmp(ep_dtype_name(EP_F64), "float64") && !strcmp(ep_dtype_name(EP_OTHER), "another dtype"));
    CHECK(NULL, !strcmp(ep_dtype_name(EP_BEFORE_OTHER_DTYPES), "another dtype") && EP_I32 == 16);
    return true;
}

/* The words of fault records have the names that users read, and an unknown number has none. */
bool test_word_names(void) {
    CHECK(NULL, !strcmp(ep_word_name(EP_WORD_ENTER), "enter") && EP_WORD_ENTER == 1);
    CHECK(NULL, !strcmp(ep_word_name(EP_WORD_GRID), "grid barrier") && EP_WORD_GRID == 8);
    CHECK(NULL, !strcmp(ep_word_name(EP_WORD_READY), "ready") && EP_WORD_READY == 10);
    CHECK(NULL, !strcmp(ep_word_name(EP_WORD_ROUTE), "route") && EP_WORD_ROUTE == 11);
    CHECK(NULL, !strcmp(ep_word_name(EP_WORD_SLOT), "slot") && EP_WORD_SLOT == 12);
    CHECK(NULL, !*ep_word_name(EP_WORD_NONE) && !*ep_word_name(EP_WORD_SLOT + 1));
    return true;
}

/* Operations have names in each dtype, and an unknown number is no operation, or no dtype. */
bool test_op_names(void) {
    const struct {
        uint32_t word;
        const char *text;
    } names[] = {
        {EP_OP_PLAN, "plan"},
        {EP_OP_LL_COMBINE, "low-latency combine"},
        {EP_OP_WORD(EP_OP_DISPATCH, EP_IN_FP8), "dispatch in FP8"},
        {EP_OP_WORD(EP_OP_GEMM_COMBINE, EP_IN_FP8), "gemm + combine in FP8"},
        {EP_OP_WORD(EP_OP_DISPATCH, EP_NUM_OP_DTYPES), "dispatch"},
        {EP_OP_NONE, "wait"},
        {EP_NUM_OPS, "wait"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK(NULL, !strcmp(ep_op_name(names[i].word).text, names[i].text));
    const EpShape s = {.num_ranks = 2};
    EpFaultRecord f = {.code = EP_EMISMATCH, .op = EP_OP_DISPATCH, .peer = 1, .field = 1 + EP_FIELD_op};
    f.want = EP_OP_DISPATCH;
    f.got = EP_OP_WORD(EP_OP_DISPATCH, EP_IN_FP8);
    CHECK_CODE(NULL, EP_EMISMATCH, ep_fault_error(&f, &s, 0));
    CHECK(NULL, strstr(ep_error_text(), "rank 1 called dispatch in FP8, rank 0 called dispatch."));
    return true;
}

/* A product that waits for a row which no rank sends, though none is late: its cause is named. */
bool test_text_of_missing_rows(void) {
    const EpShape s = {.num_ranks = 2};
    EpFaultRecord f = {.code = EP_ETIMEOUT, .word = EP_WORD_READY, .peer = 1, .want = 128, .got = 127};
    const uint32_t ops[] = {EP_OP_DISPATCH_GEMM, EP_OP_WORD(EP_OP_DISPATCH_GEMM, EP_IN_FP8)};
    for (int i = 0; i < 2; i++) {
        f.op = ops[i];
        CHECK_CODE(NULL, EP_ETIMEOUT, ep_fault_error(&f, &s, 1));
        CHECK(NULL,
              strstr(ep_error_text(), "127 of 128 rows") && strstr(ep_error_text(), "full_scatter_indices"));
    }
    f.op = EP_OP_GEMM_COMBINE; /* waits for the product of its own rank */
    CHECK_CODE(NULL, EP_ETIMEOUT, ep_fault_error(&f, &s, 1));
    CHECK(NULL, !strstr(ep_error_text(), "full_scatter_indices"));
    f.word = EP_WORD_FLAG; /* a rank is late */
    CHECK_CODE(NULL, EP_ETIMEOUT, ep_fault_error(&f, &s, 0));
    CHECK(NULL, strstr(ep_error_text(), "rank 1") && !strstr(ep_error_text(), "full_scatter_indices"));
    return true;
}

/* What a CTA of the low-latency dispatch holds in shared memory. A wrong size is a wrong limit of max_tokens,
 * or a kernel that writes beyond its memory. */
bool test_ll_smem_bytes(void) {
    EpShape s = {.num_ranks = 3, .num_experts = 6, .num_topk = 3, .max_tokens = 11};
    /* 33 tokens: 99 choices, 2 words of 32 tokens for each of 2 experts, and 3 offsets. */
    CHECK(NULL, ep_ll_smem_bytes(&s) == 200 + 8 * 2 * 2 + 4 * 3);
    s = (EpShape){.num_ranks = 1, .num_experts = 5, .num_topk = 1, .max_tokens = 32};
    CHECK(NULL, ep_ll_smem_bytes(&s) == 64 + 8 * 5 + 4 * 6);
    return true;
}

/* A slot has room for the row, the token, the return slot, the tag, and a row and a weight for each choice.
 * Slots begin on a line of 128 bytes. So here one choice more doubles the staging buffer. */
bool test_slot_bytes(void) {
    EpShape s = {.num_ranks = 2, .num_experts = 16, .num_topk = 6, .max_tokens = 4, .hidden = 16};
    s.dtype = EP_F32;
    s.capacity = 8;
    CHECK(NULL, 64 + 4 * (3 + 6 + 6) <= 128 && ep_comm_layout(&s).slot_stride == 128);
    s.num_topk = 7;
    CHECK(NULL, ep_comm_layout(&s).slot_stride == 256);
    return true;
}
