/* words.h - the structs in a communication buffer: the header of an operation, and the local words.
 *
 * When a rank enters an operation, it writes its header into the buffer of every rank. Only the workers of
 * the rank that owns a buffer use its local words. layout.h says where both are located. flags.h says which
 * rank writes and reads each word, and in which memory order.
 *
 * Exports EpHeader with EP_HEADER_FIELDS and EP_FIELD_*, EpLocal, EP_LINE, EP_ABI_VERSION.
 * Invariant: ranks compare every field of EP_HEADER_FIELDS, and these fields come first in a header. */
#ifndef EP_WORDS_H
#define EP_WORDS_H
#include "protocol/errors.h"
#include "protocol/ops.h"
#include "protocol/shape.h"

/* The version of everything that ranks write to each other. They compare it when they meet, in every frame
 * of a socket and in every header. */
#define EP_ABI_VERSION 0x6570000fu
#define EP_LINE 128u /* bytes; words with different writers are on different lines */

/* The header that a rank writes to every peer when it enters an operation. The fields of the X list must
 * be equal on all ranks. op is an EP_OP_WORD; dtype is that of the layer. */
#define EP_HEADER_FIELDS(X) \
    X(abi)                  \
    X(op)                   \
    X(dtype)                \
    X(hidden)               \
    X(num_topk)             \
    X(num_experts)          \
    X(max_tokens)           \
    X(combine_mode)         \
    X(capacity)             \
    X(has_weight)           \
    X(has_scalar)           \
    X(plan_idx)             \
    X(requires_grad)
typedef struct {
#define X(name) uint32_t name;
    EP_HEADER_FIELDS(X)
#undef X
    int32_t status;      /* 0, or the EpCode with which this rank has already failed */
    uint32_t num_tokens; /* T; may differ between ranks */
    /* of a plan: 0, or a number that is equal on ranks that can help each other, and EP_BALANCE_HOLDS; see
     * balance.h */
    uint32_t balance_key;
} EpHeader;
/* Indices of the fields that are compared; see ep_header_diff. */
enum {
#define X(name) EP_FIELD_##name,
    EP_HEADER_FIELDS(X)
#undef X
        EP_FIELD_COUNT,
    EP_FIELD_fp8 = EP_FIELD_COUNT, /* of a low-latency head */
    EP_FIELD_handle
};
#define EP_NUM_HEADER_FIELDS ((uint32_t)EP_FIELD_COUNT)

/* Words that only the workers of the owner's rank use. Each group is on a line of its own. */
typedef struct {
    uint64_t epoch, faulted, claim;
    uint64_t checked;              /* the newest tick in which a waiting worker read the abort word */
    uint64_t void_epoch, pad0[11]; /* low latency: the newest operation whose slots stay unread */
    uint64_t queue_send[EP_MAX_RANKS], pad1[8]; /* task counters: [0] alone, or one for each peer */
    uint64_t queue_recv, pad2[15];
    uint64_t num_left, num_copied, pad3[14];
    uint64_t grid_arrived, pad4[15];
    uint64_t queue_tiles, pad5[15];
    uint64_t waited_ns[EP_MAX_RANKS], pad6[8]; /* as host->waited_ns */
} EpLocal;

EP_STATIC_ASSERT(sizeof(EpHeader) == 64, "a header is one line of 64 bytes");
EP_STATIC_ASSERT(offsetof(EpHeader, status) == 4 * EP_NUM_HEADER_FIELDS,
                 "all fields of the list are compared");
EP_STATIC_ASSERT(sizeof(EpLocal) == 7 * EP_LINE, "groups of local words are on lines of their own");

#endif /* EP_WORDS_H */
