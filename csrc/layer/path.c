/* path.c - which path the calls of a layer take. Exports ep_layer_expected_rows, ep_layer_has_many_rows,
 * ep_layer_decodes, ep_layer_unread_rows, ep_multiplies and ep_layer_fuses; epmoe.h says what they answer.
 *
 * Invariant: the answers depend on the configuration and on the sizes of the weights, which all ranks have
 * alike, so all ranks take the same path. The limits are measured: docs/experiments has them by their
 * numbers. */
#include "epmoe.h"
#include "protocol/gemm_params.h"

/* A low-latency layer has a slab for each expert and rank, whose memory grows with the number of tokens. */
enum { MOST_DECODED_TOKENS = 512 };
/* With so few bytes of rows, memory for the most rows that can come costs less than a wait of the host. */
enum { MOST_UNREAD_BYTES = 16 << 20 };
/* A product in FP8 of few columns ends before the warps beside it have moved the tokens. With few tokens the
 * launches count (E-119). */
enum { MANY_FP8_COLUMNS = 4096, FEW_FP8_TOKENS = 1024 };
/* With many tokens, a product in FP8 gains from sharing its launch only where the links are slow beside it.
 * With at most one peer the stages take less time (E-157). */
enum { FEW_FP8_RANKS = 2 };
/* With wide experts, communication takes a small part of a training step, so a fused launch can hide little.
 * And a GEMM takes a few percent longer when it shares its launch (E-136). */
enum { WIDE_COLUMNS = 16384 };

uint64_t ep_layer_expected_rows(const EpShape *s) { return (uint64_t)s->max_tokens * s->num_topk; }

/* With few rows only the GEMM without communication has kernels for small M. */
bool ep_layer_has_many_rows(const EpShape *s) {
    if (!s->num_ranks) return false; /* nobody has checked this configuration */
    return ep_layer_expected_rows(s) > (uint64_t)EP_GEMM_FEW_ROWS * ep_num_local_experts(s);
}

bool ep_layer_decodes(const EpLayerConfig *c) {
    return c->fused != EP_FUSED_ALWAYS &&
           c->shape.max_tokens / ep_layer_num_copies(c) <= MOST_DECODED_TOKENS &&
           !ep_layer_has_many_rows(&c->shape);
}

uint32_t ep_layer_unread_rows(const EpShape *s) {
    const uint64_t row_bytes = (uint64_t)s->hidden * ep_dtype_bytes(s->dtype);
    return s->capacity * row_bytes <= MOST_UNREAD_BYTES ? s->capacity : 0;
}

bool ep_multiplies(EpBackendKind kind, uint32_t dtype) {
    return dtype == EP_IN_LAYER_DTYPE || kind == EP_CUDA;
}

static bool is_best(const EpLayerConfig *c, const EpProduct *p) {
    if (!ep_layer_has_many_rows(&c->shape)) return false;
    if (p->is_fp8)
        return c->shape.max_tokens <= FEW_FP8_TOKENS ||
               (c->shape.num_ranks > FEW_FP8_RANKS && (!p->columns || p->columns >= MANY_FP8_COLUMNS));
    return !p->trains || p->columns < WIDE_COLUMNS;
}

bool ep_layer_fuses(const EpLayerConfig *c, bool has_kernels, const EpProduct *p) {
    if (!has_kernels || c->fused == EP_FUSED_NEVER || p->has_four_bits) return false;
    if (c->shape.dtype != EP_BF16 && c->shape.dtype != EP_F16) return false;
    if (c->shape.hidden % 16 || p->n % 16 || p->k % 16) return false;
    /* In FP8 each 64 gates and the ups beside them in a tile must have one scale. */
    if (p->is_fp8 && p->has_split_gates && p->columns % EP_GEMM_SCALE_BLOCK) return false;
    return c->fused == EP_FUSED_ALWAYS || is_best(c, p);
}
