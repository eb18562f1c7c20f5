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
typedef struct {
    EpScales scales; /* dtype, of each operation; the rest only in FP8 */
    union {
        EpPlanParams plan;
        EpDispatchParams dispatch;
        EpCombineParams combine;
        EpDispatchGemmParams dispatch_gemm;
        EpGemmCombineParams gemm_combine;
        EpLlDispatchParams ll_dispatch;
        EpLlCombineParams ll_combine;
    };
} EpOpParams;

/* Check the arguments, and fill in params, which are zeroed before the call: 0, or an error. The dtype is set
 * first, so that the error is propagated in the operation that the other ranks have called. */
#define X(NAME, name, Type, text) \
    int ep_prepare_##name(EpLayer *l, const EpCommBuffer *b, const Ep##Type##Args *a, EpOpParams *params);
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
/* Check the arguments of a dispatch, and fill in p, with its communicator, the dtype and the scales of rows.
 * x has one row for every num_copies tokens. */
int ep_layer_check_dispatch(const EpLayer *l, const EpCommBuffer *b, const EpDispatchArgs *a,
                            uint32_t num_copies, EpDispatchParams *p, EpScales *scales);
/* Check the scales of rows: f32 [rows][groups], with any strides. */
int ep_layer_check_scale(const EpLayer *l, const char *name, const EpTensor *scale, int64_t rows,
                         int64_t groups);
int ep_layer_check_combine(const EpLayer *l, const EpCombineArgs *a, EpCombineParams *p);
/* Check what a caller gives as an activation. */
int ep_check_activation(EpActivation activation);
/* Give each row of e4m3 numbers [M][K] the largest of its scales [K / 128][M], see EpRescaleParams. num_rows:
 * NULL, or on the device: the rows that exist. M is not 0. */
int ep_rescale_rows(const EpTensor *q, float *scales, const int32_t *num_rows, void *stream);
/* Check a product of low rank that is added to a product whose sizes p has, and fill in low. */
int ep_check_low_rank(const EpTensor *low_a, const EpTensor *low_b, const EpGemmParams *p, EpBackendKind kind,
                      int device, EpLowRank *low);
/* Check the scales and zeros of weights [num][n][k] of 4 bits, and fill in four_bit. Their shapes and dtypes
 * say what the format is. dtype: of the rows. first: a tensor on the device. */
typedef struct {
    uint32_t num, n, k, dtype;
} EpFourBitSizes;
int ep_read_four_bit(const EpTensor *scale, const EpTensor *zero, const EpFourBitSizes *sizes,
                     const EpTensor *first, EpFourBit *four_bit);

#endif /* EP_PREPARE_H */
