/* prepare.h - the checks of an operation's arguments. Each operation of protocol/ops.h has a function
 * ep_prepare_NAME, which fills in the parameters for the backend.
 *
 * Exports these functions, and the checks that they share.
 * Invariant: after a successful check, a kernel may use every address and size in the parameters as it is. A
 * failed check has changed nothing but the parameters. */
#ifndef EP_PREPARE_H
#define EP_PREPARE_H
#include "backend.h"

/* The parameters of any operation. */
typedef union {
    EpPlanParams plan;
    EpDispatchParams dispatch;
    EpDispatchFp8Params dispatch_fp8;
    EpCombineParams combine;
    EpDispatchGemmParams dispatch_gemm;
    EpDispatchGemmFp8Params dispatch_gemm_fp8;
    EpGemmCombineParams gemm_combine;
    EpGemmCombineFp8Params gemm_combine_fp8;
    EpLlDispatchParams ll_dispatch;
    EpLlCombineParams ll_combine;
} EpOpParams;

/* 0, or an error. *p is zeroed before the call. */
#define X(NAME, name, Type, text) \
    int ep_prepare_##name(EpLayer *l, const EpCommBuffer *b, const Ep##Type##Args *a, Ep##Type##Params *p);
#define B(NAME, name, Type, text)
EP_OPERATIONS(X, B)
#undef X
#undef B

/* Check that t is a contiguous tensor on the layer's device. A size of -1 accepts any size. */
int ep_layer_check_tensor(const EpLayer *l, const char *name, const EpTensor *t, uint32_t dtype,
                          uint32_t num_dims, int64_t d0, int64_t d1);
/* Check rows [num_rows][H] of the layer's dtype. Workers copy a row in units of 16 bytes, so the address is
 * aligned to 16. */
int ep_layer_check_rows(const EpLayer *l, const char *name, const EpTensor *t, int64_t num_rows);
int ep_layer_check_num_tokens(const EpLayer *l, const char *name, const EpTensor *t);
/* The padding rows of a layer's plans. */
EpPadding ep_layer_padding(const EpLayer *l);
/* Check the arguments of a dispatch of rows of this dtype, and fill in p. x has one row for every num_copies
 * tokens. */
int ep_layer_check_dispatch(const EpLayer *l, const EpDispatchArgs *a, uint32_t dtype, uint32_t num_copies,
                            EpDispatchParams *p);
/* The same for a dispatch in FP8: fill in p, with its communicator, and the scales. */
int ep_layer_check_dispatch_fp8(const EpLayer *l, const EpCommBuffer *b, const EpDispatchFp8Args *a,
                                uint32_t num_copies, EpDispatchParams *p, EpRowScales *scales);
/* Check the scales of rows: f32 [rows][groups], with any strides. */
int ep_layer_check_scale(const EpLayer *l, const char *name, const EpTensor *scale, int64_t rows,
                         int64_t groups);
int ep_layer_check_combine(const EpLayer *l, const EpCombineArgs *a, EpCombineParams *p);

#endif /* EP_PREPARE_H */
