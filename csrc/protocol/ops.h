/* ops.h - the operations of a layer, a row each, their dtypes, and the calls that run several of them. The
 * numbers of the operations, their names in errors and call records, the structs of their arguments (epmoe.h)
 * and the parsing of these in the Python module follow from the rows.
 *
 * A new operation is a row here, a prepare function and a launch in layer_ops.c, its line in _C.pyi, and its
 * stage in the backends. */
#ifndef EP_OPS_H
#define EP_OPS_H
#include "protocol/port.h"

/* X(NAME, name, Type, text): an operation with arguments. B(NAME, name, Type, text): the barrier, which has
 * none. */
#define EP_OPERATIONS(X, B)                                          \
    X(PLAN, plan, Plan, "plan")                                      \
    X(DISPATCH, dispatch, Dispatch, "dispatch")                      \
    X(COMBINE, combine, Combine, "combine")                          \
    B(BARRIER, barrier, Barrier, "barrier")                          \
    X(DISPATCH_GEMM, dispatch_gemm, DispatchGemm, "dispatch + gemm") \
    X(GEMM_COMBINE, gemm_combine, GemmCombine, "gemm + combine")     \
    X(LL_DISPATCH, ll_dispatch, LlDispatch, "low-latency dispatch")  \
    X(LL_COMBINE, ll_combine, LlCombine, "low-latency combine")

/* EP_OP_PLAN = 1, EP_OP_DISPATCH = 2, ... */
typedef enum {
    EP_OP_NONE = 0,
#define X(NAME, name, Type, text) EP_OP_##NAME,
    EP_OPERATIONS(X, X)
#undef X
        EP_NUM_OPS /* one more than the largest number */
} EpOpKind;

/* The dtypes in which an operation sends rows, or multiplies them: X(NAME, text after the operation's name).
 * LAYER_DTYPE: that of the layer. FP8: e4m3, with scales. Low-latency operations have an EpLlFp8 instead. */
#define EP_OP_DTYPES(X) \
    X(LAYER_DTYPE, "")  \
    X(FP8, " in FP8")
typedef enum {
#define X(NAME, text) EP_IN_##NAME,
    EP_OP_DTYPES(X)
#undef X
        EP_NUM_OP_DTYPES
} EpOpDtype;

/* An operation and its dtype in one word. Ranks compare it (EpHeader), and errors name it (EpFaultRecord). */
#define EP_OP_WORD(op, dtype) ((uint32_t)(op) | (uint32_t)(dtype) << 8)
EP_PURE uint32_t ep_op_of(uint32_t word) { return word & 0xffu; }
EP_PURE uint32_t ep_op_dtype_of(uint32_t word) { return word >> 8; }

/* clang-format off */
/* The arguments of an operation: X(S, kind, name), where S is handed through. The kinds are
 *   TENSOR    a tensor that the operation reads
 *   OPTIONAL  the same, or NULL
 *   OUT       a tensor that the operation writes. It shares no memory with another tensor of the call, which
 *             ep_layer_run checks
 *   OWN, OWN_OUT       the same as TENSOR and OUT, allocated by epmoe itself
 *   OWN_OUT_OPTIONAL   OWN_OUT, or NULL
 *   PLAN, PLAN_OUT     OWN and OWN_OUT: the tensor of the plan, or the handle of a low-latency operation. The
 *             operation runs on the current stream of its framework
 *   U32       a number. Numbers come after the tensors
 *   ACTIVATION  an EpActivation
 *   PLANNED   U32; if 0, the call makes the plan by itself
 *   AWAITS    U32; if not 0, the operation waits until its plan has the number of rows, and its outputs have
 *             the room that ep_layer_room says */

/* indices [T][K] i32 or i64. scatter: i32 [T][K] of this rank, or those of all ranks in rank order. plan: i32
 * [ep_layer_plan_words(T)]. balance_key: 0, or how this rank can help others in the call that follows. */
#define EP_ARGS_plan(X, S)  \
    X(S, TENSOR, indices)   \
    X(S, OPTIONAL, scatter) \
    X(S, PLAN_OUT, plan)    \
    X(S, U32, balance_key)

/* Inputs: x [T][H], weight f32 [T][K], plan. Outputs: rows [>= M][H], row_weight f32 [>= M], and for combine
 * recv i32 [W * max_tokens * (1 + K)], the records of slot.h. The kernel checks that the plan is for T tokens
 * and for at most as many rows as the outputs have. If not, this rank's operation fails with EP_EINVAL, and
 * those of the others with EP_EPEER. requires_grad: the caller's framework will run a backward pass. The
 * value must be the same on all ranks, and the operation fails if it is not. awaits_rows: 0: the caller knows
 * M. Otherwise the host waits until the plan has it, directly before the launch. Nothing is launched if the
 * outputs have fewer than M rows, or if a backward keeps them and they have many more than M (room.c): the
 * caller calls again, with other outputs.
 * x_scale, row_scale: both, and the operation is in FP8, or neither. In FP8 the caller has quantised the
 * tokens: x and rows are u8, the bytes of e4m3 numbers, and H is a multiple of 16. x_scale f32 [T][groups],
 * row_scale f32 [as many as rows][groups], with any strides; groups is H / 128, rounded up. There is no
 * gradient.
 * tag i32 [T]: a number of the caller that travels with each token, or NULL: 0. row_tag i32 [as many as
 * rows], or NULL: becomes the tag of each row that belongs to an expert. A rank has them for itself. */
#define EP_ARGS_dispatch(X, S)         \
    X(S, TENSOR, x)                    \
    X(S, OPTIONAL, x_scale)            \
    X(S, OPTIONAL, weight)             \
    X(S, PLAN, plan)                   \
    X(S, OWN_OUT, rows)                \
    X(S, OWN_OUT_OPTIONAL, row_scale)  \
    X(S, OWN_OUT_OPTIONAL, row_weight) \
    X(S, OWN_OUT, recv)                \
    X(S, OPTIONAL, tag)                \
    X(S, OWN_OUT_OPTIONAL, row_tag)    \
    X(S, U32, requires_grad)           \
    X(S, AWAITS, awaits_rows)

/* rows [>= M][H], row_weight and row_scalar f32 [>= M]; out [T][H], out_scalar f32 [T][K]. bias_0 and bias_1
 * [T][H], by_choice: see EpCombineParams. A rank has them for itself: the other ranks may have others, or
 * none. bias_1 needs bias_0. */
#define EP_ARGS_combine(X, S)      \
    X(S, TENSOR, rows)             \
    X(S, OPTIONAL, row_weight)     \
    X(S, OPTIONAL, row_scalar)     \
    X(S, OPTIONAL, bias_0)         \
    X(S, OPTIONAL, bias_1)         \
    X(S, PLAN, plan)               \
    X(S, OWN, recv)                \
    X(S, OWN_OUT, out)                 \
    X(S, OWN_OUT_OPTIONAL, out_scalar) \
    X(S, U32, requires_grad)       \
    X(S, U32, by_choice)

/* Dispatch, and the grouped GEMM of the rows that it places, on CUDA in one launch. gemm_weight [L][N][H],
 * bias [L][N]; out [>= M][N], or [>= M][N / 2] if the activation is gated. The rest is as in dispatch, except
 * that rows from M on are left unchanged. activation: see EpGemmParams.
 * saved: NULL, or with an activation the product with its bias, rounded, [>= M][N]. kind: EpGemmKind; for
 * EP_GEMM_DGRAD gemm_weight is [L][H][K], out [>= M][K], and there is no bias and no activation.
 * x_scale, row_scale, gemm_scale: all, and the operation is in FP8, or none. In FP8, which is on CUDA and
 * EP_GEMM_FORWARD only: gemm_weight u8, gemm_scale f32 [L][N / 128][H / 128], both sizes rounded up; out of
 * the layer's dtype; no saved. For gates in front of ups N must be a multiple of 128. The rest is as in
 * dispatch. */
#define EP_ARGS_dispatch_gemm(X, S)    \
    X(S, TENSOR, x)                    \
    X(S, OPTIONAL, x_scale)            \
    X(S, OPTIONAL, weight)             \
    X(S, PLAN, plan)                   \
    X(S, OWN_OUT, rows)                \
    X(S, OWN_OUT_OPTIONAL, row_scale)  \
    X(S, OWN_OUT_OPTIONAL, row_weight) \
    X(S, OWN_OUT, recv)                \
    X(S, TENSOR, gemm_weight)          \
    X(S, OPTIONAL, gemm_scale)         \
    X(S, OPTIONAL, bias)               \
    X(S, OWN_OUT, out)                 \
    X(S, OWN_OUT_OPTIONAL, saved)      \
    X(S, ACTIVATION, activation)       \
    X(S, U32, requires_grad)           \
    X(S, U32, kind)                    \
    X(S, AWAITS, awaits_rows)

/* The grouped GEMM of a [>= M][K] with gemm_weight [L][H][K] into rows [>= M][H], and the combine of these
 * rows, on CUDA in one launch. kind: EpGemmKind; for EP_GEMM_DGRAD gemm_weight is [L][K][H], and there is no
 * bias; only then there may be a row_scalar.
 * a_scale, gemm_scale: both, and the operation is in FP8, or neither. In FP8, which is on CUDA and
 * EP_GEMM_FORWARD only: a and gemm_weight u8; a_scale f32 [>= M][K / 128], with any strides; gemm_scale f32
 * [L][H / 128][K / 128]; all sizes of scales rounded up. Rows return in the layer's dtype.
 * low_a, low_b: in 16 bits, a product of low rank that is added to the GEMM, [rows of a][R] and [L][H][R], or
 * [L][R][H] for EP_GEMM_DGRAD (EpLowRank); or neither. */
#define EP_ARGS_gemm_combine(X, S)     \
    X(S, TENSOR, a)                    \
    X(S, OPTIONAL, a_scale)            \
    X(S, TENSOR, gemm_weight)          \
    X(S, OPTIONAL, gemm_scale)         \
    X(S, OPTIONAL, bias)               \
    X(S, OPTIONAL, low_a)              \
    X(S, OPTIONAL, low_b)              \
    X(S, OWN_OUT, rows)                \
    X(S, OPTIONAL, row_weight)         \
    X(S, OPTIONAL, row_scalar)         \
    X(S, PLAN, plan)                   \
    X(S, OWN, recv)                    \
    X(S, OWN_OUT, out)                 \
    X(S, OWN_OUT_OPTIONAL, out_scalar) \
    X(S, U32, requires_grad)           \
    X(S, U32, kind)

/* For a low-latency layer. x [T][H], indices [T][K] i32 or i64, weight f32 [T][K]; handle i32
 * [ep_ll_handle_words], for combine. Masked: rows [L][W * max_tokens][H] and scales [L][lines][..]; else rows
 * [capacity][H] and scales [lines][..], where a line has a multiple of 4 scales, at least as many as there
 * are rows. Scales are f32 with H / 128 lines, or for UE8M0 i32 with H / 512 lines. counts i32 [L]: the rows
 * of each expert. fp8: EpLlFp8; without it rows have the layer's dtype and scales are NULL. tag i32 [T],
 * without INT32_MAX, and row_tag i32, for each row: as in dispatch; with fewer than 32 choices. parts:
 * EpLlParts. */
#define EP_ARGS_ll_dispatch(X, S)   \
    X(S, TENSOR, x)                 \
    X(S, TENSOR, indices)           \
    X(S, OPTIONAL, weight)          \
    X(S, PLAN_OUT, handle)          \
    X(S, OWN_OUT, rows)             \
    X(S, OWN_OUT_OPTIONAL, scales)  \
    X(S, OWN_OUT, counts)           \
    X(S, OPTIONAL, tag)             \
    X(S, OWN_OUT_OPTIONAL, row_tag) \
    X(S, U32, is_masked)            \
    X(S, U32, fp8)                  \
    X(S, U32, parts)

/* rows: as dispatch has them, in the layer's dtype; out [T][H]. */
#define EP_ARGS_ll_combine(X, S) \
    X(S, TENSOR, rows)           \
    X(S, PLAN, handle)           \
    X(S, OUT, out)               \
    X(S, U32, is_masked)         \
    X(S, U32, fp8)               \
    X(S, U32, parts)

/* ---- calls that run several operations, one after the other ---- */

/* C(name, Type, NAME): a call. The caller's error is reported in operation NAME, the first of the call. */
#define EP_CALLS(C)                             \
    C(experts, Experts, PLAN)                   \
    C(experts_down, ExpertsDown, DISPATCH)      \
    C(experts_up, ExpertsUp, COMBINE)           \
    C(ll_experts, LlExperts, LL_DISPATCH)

/* The experts, from tokens to tokens: plan, dispatch, activation(rows * gate_up^T + bias), rows * down^T +
 * bias, combine. x, indices, weight, plan, rows, row_weight and recv are as in plan and dispatch; weight is
 * given. gate_up [L][N][H], down [L][H][I], biases [L][N] and [L][H]. Outputs: a [>= M][I], out_rows
 * [>= M][H] (may be rows where h is NULL), out [T][H]. h: NULL, or [>= M][N], which saves the input of the
 * activation, rounded, for a backward; the other outputs have the same bits with it and without. Where
 * ep_layer_fuses says so, each product shares a launch with the communication beside it. is_planned: the plan
 * exists, and indices is not read. If nothing was launched after the plan, because the outputs do not fit
 * (awaits_rows), the caller calls again, with is_planned. The rest is as in dispatch_gemm and gemm_combine.
 * Scales and zeros are those of weights of 4 bits, as EpGemm has them; NULL in 16 bits.
 * helper_slots: 0, or in a layer with host_counts and a staging (ep_layer_set_staging) how many of the last
 * experts of each rank are helper slots; min_helped_rows: see EpBalance. balance_key: not 0; ranks help each
 * other only if all have the same. After the plan the host waits for its counts. If ranks shall help others
 * (ep_layer_helps), weights travel to the slots, into gate_up, down and the biases, and a second plan has the
 * choices of the slots, in moved i32 [T][K], which is scratch. held: NULL, or i32 [E + 1][2] in memory of the
 * host, on all ranks alike: what the slots hold (EpHeld), so that this does not travel. Read if the
 * balance_key of all ranks has EP_BALANCE_HOLDS, and written.
 * LoRA: beside the product of some rows with a weight of 16 bits, low_in multiplies the same rows, low_rows
 * gets the result, and its product with low_out is added (EpLowRank). gate_up_low_in [L][R][H],
 * gate_up_low_out [L][N][R] and gate_up_low_rows [>= M][R], or none of them; down_low_in [L][R][I],
 * down_low_out [L][H][R] and down_low_rows likewise. With gate_up_low or tags, dispatch shares no launch.
 * A mixture of adapters: tag and row_tag are those of dispatch, both or neither. R has adapter_columns for
 * each adapter, a multiple of 8, and a row's tag is the number of its own one (EpOwnColumns). */
#define EP_ARGS_experts(X, S)                \
    X(S, TENSOR, x)                          \
    X(S, OPTIONAL, indices)                  \
    X(S, TENSOR, weight)                     \
    X(S, TENSOR, gate_up)                    \
    X(S, OPTIONAL, gate_up_bias)             \
    X(S, OPTIONAL, gate_up_scale)            \
    X(S, OPTIONAL, gate_up_zero)             \
    X(S, TENSOR, down)                       \
    X(S, OPTIONAL, down_bias)                \
    X(S, OPTIONAL, down_scale)               \
    X(S, OPTIONAL, down_zero)                \
    X(S, PLAN, plan)                         \
    X(S, OWN_OUT_OPTIONAL, moved)            \
    X(S, OPTIONAL, held)                     \
    X(S, OWN, recv)                          \
    X(S, OWN, rows)                          \
    X(S, OWN, row_weight)                    \
    X(S, OWN_OUT_OPTIONAL, h)                \
    X(S, OWN, a)                             \
    X(S, OWN, out_rows)                      \
    X(S, OWN, out)                           \
    X(S, OPTIONAL, gate_up_low_in)           \
    X(S, OPTIONAL, gate_up_low_out)          \
    X(S, OWN_OUT_OPTIONAL, gate_up_low_rows) \
    X(S, OPTIONAL, down_low_in)              \
    X(S, OPTIONAL, down_low_out)             \
    X(S, OWN_OUT_OPTIONAL, down_low_rows)    \
    X(S, OPTIONAL, tag)                      \
    X(S, OWN_OUT_OPTIONAL, row_tag)          \
    X(S, U32, adapter_columns)               \
    X(S, ACTIVATION, activation)             \
    X(S, U32, requires_grad)                 \
    X(S, U32, helper_slots)                  \
    X(S, U32, min_helped_rows)               \
    X(S, U32, balance_key)                   \
    X(S, PLANNED, is_planned)                \
    X(S, AWAITS, awaits_rows)

/* The first half of the backward of experts, before experts_up: dispatch of dy [T][H], its product with down,
 * and the gradient of the activation. h and row_weight are those of experts. Outputs: g [>= M][H], dy of each
 * row; weighted [>= M][I], the rows of the activation times their weights; d_h [>= M][N]; dots [>= M], the
 * gradient of the weights of the rows without that of down_bias; recv is scratch. LoRA as in experts, but
 * down_low_in is [L][H][R], and down_low_out [L][R][I]. */
#define EP_ARGS_experts_down(X, S)        \
    X(S, TENSOR, dy)                      \
    X(S, TENSOR, down)                    \
    X(S, PLAN, plan)                      \
    X(S, OWN, h)                          \
    X(S, OWN, row_weight)                 \
    X(S, OWN, recv)                       \
    X(S, OWN, g)                          \
    X(S, OWN, weighted)                   \
    X(S, OWN, d_h)                        \
    X(S, OWN, dots)                       \
    X(S, OPTIONAL, down_low_in)           \
    X(S, OPTIONAL, down_low_out)          \
    X(S, OWN_OUT_OPTIONAL, down_low_rows) \
    X(S, ACTIVATION, activation)

/* The second half: d_down [L][H][I] of g and weighted, or NULL; d_h times gate_up, whose rows (out_rows,
 * which may be g) return and are added up in dx [T][H], with the dots in d_weight [T][K]; and d_gate_up
 * [L][N][H] of d_h and rows, or NULL. LoRA as in experts, but gate_up_low_in is [L][N][R], and
 * gate_up_low_out [L][R][H]. */
#define EP_ARGS_experts_up(X, S)      \
    X(S, OWN, d_h)                    \
    X(S, TENSOR, gate_up)             \
    X(S, OWN, dots)                   \
    X(S, PLAN, plan)                  \
    X(S, OWN, recv)                   \
    X(S, OWN, rows)                   \
    X(S, OWN, g)                      \
    X(S, OWN, weighted)               \
    X(S, OWN_OUT_OPTIONAL, d_down)    \
    X(S, OWN, out_rows)               \
    X(S, OWN, dx)                     \
    X(S, OWN, d_weight)               \
    X(S, OWN_OUT_OPTIONAL, d_gate_up) \
    X(S, OPTIONAL, gate_up_low_in)    \
    X(S, OPTIONAL, gate_up_low_out)   \
    X(S, OWN_OUT_OPTIONAL, gate_up_low_rows)

/* The experts of few tokens, in a low-latency layer: ll_dispatch into compact rows, both products,
 * ll_combine. handle, rows and counts are as there; a [capacity][I], out_rows [capacity][H], out [T][H]. LoRA
 * and mixtures as in experts, with the tags of ll_dispatch. */
#define EP_ARGS_ll_experts(X, S)             \
    X(S, TENSOR, x)                          \
    X(S, TENSOR, indices)                    \
    X(S, TENSOR, weight)                     \
    X(S, TENSOR, gate_up)                    \
    X(S, OPTIONAL, gate_up_bias)             \
    X(S, OPTIONAL, gate_up_scale)            \
    X(S, OPTIONAL, gate_up_zero)             \
    X(S, TENSOR, down)                       \
    X(S, OPTIONAL, down_bias)                \
    X(S, OPTIONAL, down_scale)               \
    X(S, OPTIONAL, down_zero)                \
    X(S, PLAN, handle)                       \
    X(S, OWN, rows)                          \
    X(S, OWN, counts)                        \
    X(S, OWN, a)                             \
    X(S, OWN, out_rows)                      \
    X(S, OWN, out)                           \
    X(S, OPTIONAL, gate_up_low_in)           \
    X(S, OPTIONAL, gate_up_low_out)          \
    X(S, OWN_OUT_OPTIONAL, gate_up_low_rows) \
    X(S, OPTIONAL, down_low_in)              \
    X(S, OPTIONAL, down_low_out)             \
    X(S, OWN_OUT_OPTIONAL, down_low_rows)    \
    X(S, OPTIONAL, tag)                      \
    X(S, OWN_OUT_OPTIONAL, row_tag)          \
    X(S, U32, adapter_columns)               \
    X(S, ACTIVATION, activation)
/* clang-format on */

#endif /* EP_OPS_H */
