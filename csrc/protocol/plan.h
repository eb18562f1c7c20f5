/* plan.h - from counts to rows, and the errors that travel with the counts: arithmetic, the same on both
 * backends.
 *
 * Every rank writes the same line of cells to every rank. A cell is {tag of the epoch:32 | value:32}:
 *   cell e < E       choices that it routes to expert e
 *   cell E + r       distinct tokens that it sends to rank r
 *   cell E + W       error: 0, EP_BAD_SCATTER, or 1 + the lowest position t * K + k of a wrong index
 *   the next two     that index, lower half first
 *
 * The rows of a rank are grouped by local expert; within an expert by source rank, then token, then choice.
 * After the rows of an expert there may be padding rows (ep_padded_rows), which follow from the counts too.
 * So the counts alone tell the first row of source w for expert e, and ranks need not ask each other for
 * space.
 * Invariant: a count is a number from a peer, so it is clamped before it becomes an offset. */
#ifndef EP_PLAN_H
#define EP_PLAN_H
#include "protocol/params.h"

#define EP_BAD_SCATTER 0xffffffffu /* full_scatter_indices has a wrong length */

/* The error that a rank reports in its last cells, from ep_first_wrong on. */
typedef struct {
    uint32_t cell[EP_WRONG_CELLS];
} EpWrong;
EP_PURE uint32_t ep_first_wrong(const EpShape *s) { return s->num_experts + s->num_ranks; }
EP_PURE EpWrong ep_wrong_index(uint32_t position, int64_t index) {
    EpWrong w = {{position + 1, (uint32_t)index, (uint32_t)((uint64_t)index >> 32)}};
    return w;
}
/* Complete the fault record *f, which all ranks record when rank `peer` reports error *w. No error: *f is
 * unchanged. */
EP_PURE void ep_wrong_fault(const EpShape *s, uint32_t peer, const EpWrong *w, EpFaultRecord *f) {
    if (w->cell[0] == 0) return;
    f->peer = peer;
    if (w->cell[0] == EP_BAD_SCATTER) {
        f->code = EP_EINVAL;
        f->word = EP_WORD_SCATTER;
    } else {
        f->code = EP_EINDEX;
        f->word = EP_WORD_INDEX;
        f->field = w->cell[0] - 1;
        f->want = s->num_experts;
        f->got = (uint64_t)w->cell[2] << 32 | w->cell[1];
    }
}

/* The upper half of a cell, which tells the plan that it belongs to. Never 0, the content of a fresh heap. */
EP_PURE uint32_t ep_cell_tag(uint64_t epoch) { return (uint32_t)(epoch % 0xffffffffu) + 1; }
EP_PURE uint64_t ep_cell(uint64_t epoch, uint32_t value) {
    return (uint64_t)ep_cell_tag(epoch) << 32 | value;
}

/* Clamp a count from a peer: a rank can route at most T * K choices to one expert. */
EP_PURE uint32_t ep_clamp_count(const EpShape *s, uint32_t cell, uint32_t value) {
    uint32_t most = cell < s->num_experts ? s->max_tokens * s->num_topk : s->max_tokens;
    if (cell >= ep_first_wrong(s)) return value;
    return value < most ? value : most;
}

/* Choices that all ranks route to expert e; counts is [W][E]. */
EP_PURE uint32_t ep_expert_rows(const EpShape *s, const int32_t *counts, uint32_t e) {
    uint32_t n = 0;
    for (uint32_t w = 0; w < s->num_ranks; w++) n += (uint32_t)counts[(uint64_t)w * s->num_experts + e];
    return n;
}

/* The rows that an expert with n choices has in the plan, with padding. An expert with more choices than its
 * capacity has more rows than that, so the rank has more than L times as many: an overflow. */
EP_PURE uint32_t ep_padded_rows(const EpPadding *padding, uint32_t n) {
    if (padding->alignment == 0) return n;
    const uint32_t blocks = ep_ceil_div_u32(n, padding->alignment);
    return (blocks == 0 && padding->has_capacity ? 1 : blocks) * padding->alignment;
}
/* Complete the fault record *f, which all ranks record when rank `peer` would receive too many rows. counts:
 * [W][E]. */
EP_PURE void ep_overflow_fault(const EpShape *s, const EpPadding *padding, const int32_t *counts,
                               uint32_t peer, uint64_t rows, EpFaultRecord *f) {
    const uint32_t L = ep_num_local_experts(s);
    f->code = EP_EOVERFLOW;
    f->word = EP_WORD_ROWS;
    f->peer = peer;
    f->want = s->capacity;
    f->got = rows;
    for (uint32_t e = peer * L; padding->has_capacity && e < (peer + 1) * L && f->field == 0; e++)
        if (ep_expert_rows(s, counts, e) > padding->alignment) {
            f->field = 1 + e; /* the first expert with more choices than its capacity */
            f->want = padding->alignment;
            f->got = ep_expert_rows(s, counts, e);
        }
}

/* The number of expert e's rows that belong to source ranks before w. */
EP_PURE uint32_t ep_rows_before_rank(const EpShape *s, const int32_t *counts, uint32_t e, uint32_t w) {
    uint32_t n = 0;
    for (uint32_t v = 0; v < w; v++) n += (uint32_t)counts[(uint64_t)v * s->num_experts + e];
    return n;
}

/* True if slots are sorted by expert. The order changes only the speed. */
EP_PURE bool ep_plan_sorts(const EpPlanParams *p) { return p->sort_slots != 0; }

/* An index as the caller wrote it. */
EP_PURE int64_t ep_read_index(const void *exp_indices, uint32_t index_bytes, uint64_t i) {
    return index_bytes == 8 ? ((const int64_t *)exp_indices)[i] : ((const int32_t *)exp_indices)[i];
}
/* The meaning of an index: an expert, -1 for a dropped choice (-1 or E), or -2 for a wrong index. */
EP_PURE int32_t ep_read_expert(const void *exp_indices, uint32_t index_bytes, uint64_t i,
                               uint32_t num_experts) {
    int64_t v = ep_read_index(exp_indices, index_bytes, i);
    if (v == -1 || v == (int64_t)num_experts) return -1;
    return v < 0 || v > (int64_t)num_experts ? -2 : (int32_t)v;
}

#endif /* EP_PLAN_H */
