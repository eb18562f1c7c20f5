/* flight_record.c - compares the call records of all ranks, and makes the page of the flight record.
 *
 * Exports: ep_record_page, ep_record_disagrees and ep_about_name.
 * Invariant: call records come from peers. So a number of theirs is compared with its limit before it is used
 * as an index, and the text of a page never exceeds its buffer. */
#include "runtime/flight_record.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "protocol/flags.h"
#include "runtime/error.h"

/* A buffer that is being filled: the next character goes to at. Text that does not fit is cut off. */
typedef struct {
    char *at, *end;
} Out;

__attribute__((format(printf, 2, 3))) static void put(Out *o, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(o->at, (size_t)(o->end - o->at), format, args);
    va_end(args);
    if (n > 0) o->at = n < o->end - o->at ? o->at + n : o->end - 1;
}

/* The name of an EpCallKind that is no operation of a layer. An invalid number is named "nothing". */
static const char *other_name(uint32_t what) {
    static const char *const names[] = {
#define OTHER(NAME, text) text,
        EP_OTHER_CALLS(OTHER)};
    return what > EP_CALL_LAST_OP && what < EP_NUM_CALLS ? names[what - EP_CALL_LAST_OP - 1] : "nothing";
}
/* The name of a call, for a text: call_name(n).text. */
static EpOpName call_name(const EpCallRecord *n) {
    EpOpName name;
    if (ep_call_is_layers(n)) return ep_op_name(EP_OP_WORD(n->what, n->dtype));
    snprintf(name.text, sizeof name.text, "%s", other_name(n->what));
    return name;
}

void ep_about_name(uint32_t about, char *text, size_t num_bytes) {
    uint32_t what = about >> 16, of = about & 0xffff;
    if (what == EP_CALL_LAYER_CLOSE) snprintf(text, num_bytes, "%s (layer %u)", other_name(what), of);
    else if (what >= EP_CALL_ALLOC && what <= EP_CALL_LAYER_CREATE)
        snprintf(text, num_bytes, "%s (heap %u)", other_name(what), of);
    else snprintf(text, num_bytes, "%s", other_name(what));
}

/* Milliseconds from a time to the end of the world. */
static double before_end(const EpRecord *r, uint64_t ns) { return ((double)r->end_ns - (double)ns) / 1e6; }

static void put_record(Out *o, const EpRecord *r, const EpCallRecord *n) {
    unsigned long long seq = n->seq, size = n->size;
    put(o, "%s", call_name(n).text);
    if (ep_call_is_layers(n)) put(o, " #%llu of layer %u buffer %u", seq, n->of, n->buffer);
    else if (n->what == EP_CALL_HEAP_BARRIER) put(o, " #%llu of heap %u", seq, n->of);
    else if (n->what == EP_CALL_ALL_GATHER) put(o, " #%llu", seq);
    if (ep_call_is_layers(n) && n->what != EP_OP_BARRIER) put(o, ", T %llu", size);
    if (n->what == EP_CALL_ALL_GATHER || n->what == EP_CALL_ALLOC || n->what == EP_CALL_HEAP_CREATE)
        put(o, " of %llu bytes", size);
    if (ep_call_is_counted(n) && n->what > EP_CALL_ALL_GATHER) put(o, " (exchange #%llu)", seq);
    if (n->code) put(o, ", error here (%s)", ep_error_name(n->code));
    if (n->end_ns == 0) put(o, ": in flight for %.1f ms", before_end(r, n->begin_ns));
    else
        put(o, ": %s %.1f ms before the end", n->on_stream ? "enqueued" : "finished",
            before_end(r, n->end_ns));
}

/* The number of call records of a rank. It comes from a peer, so it is clamped. */
static uint32_t num_records(const EpRankCalls *k) {
    return k->has_records ? k->records.num < EP_SENT_RECORDS ? k->records.num : EP_SENT_RECORDS : 0;
}
/* The last call record of a rank, or NULL. */
static const EpCallRecord *last_record(const EpRankCalls *k) {
    return num_records(k) ? &k->records.at[num_records(k) - 1] : NULL;
}
/* The step of the last call record, or 0. */
static uint64_t step_of(const EpRankCalls *k) { return num_records(k) ? last_record(k)->step : 0; }
/* Whether the steps of a rank can be compared with those of others: they follow the order of its calls. */
static bool is_sure(const EpRankCalls *k) { return k->has_records && !k->records.is_order_unknown; }
/* The rank's collective call at a step, or NULL. */
static const EpCallRecord *record_at(const EpRankCalls *k, uint64_t step) {
    for (uint32_t i = num_records(k); i-- > 0;)
        if (k->records.at[i].step == step && ep_call_is_counted(&k->records.at[i])) return &k->records.at[i];
    return NULL;
}

/* ---- the culprit ---- */

/* The newest operation that rank w has certainly entered. CPU: w wrote its epoch into this rank's memory.
 * GPU: the host sees only the newest plan that the GPU has finished, and all ranks have entered that. To see
 * more, the host would need a CUDA call, which can block. */
static const EpCallRecord *last_known(const EpRecord *r, uint32_t w) {
    const EpCallRecord *best = NULL;
    for (uint32_t i = 0; i < r->num_buffers; i++) {
        const EpCommBuffer *b = r->buffers[i];
        if (!b) continue;
        uint64_t epoch =
            b->on_stream ? ep_ld_relaxed_sys_u64(&b->comm.host->plan.epoch) : ep_entered(&b->comm, w);
        for (uint32_t k = 0; k < r->num_ranks; k++)
            for (uint32_t j = 0; j < num_records(&r->ranks[k]); j++) {
                const EpCallRecord *n = &r->ranks[k].records.at[j];
                if (ep_call_is_buffers(n, b) && n->seq == epoch && (!best || n->step > best->step)) best = n;
            }
    }
    return best;
}

/* True if two calls are the same, as far as the flight record can tell. A rank that propagates an error may
 * not know in which dtype it would have called the operation. */
static bool are_alike(const EpCallRecord *a, const EpCallRecord *b) {
    return a->what == b->what && a->of == b->of && a->buffer == b->buffer &&
           (a->dtype == b->dtype || a->code || b->code) &&
           (a->what != EP_CALL_ALL_GATHER || a->size == b->size);
}

/* True if ranks in these two operations meet: in the handshake of the same buffer, or in an all-gather over
 * the sockets. Then the handshake or the all-gather compares the calls and reports any difference. */
static bool can_meet(const EpCallRecord *a, const EpCallRecord *b) {
    if (ep_call_is_layers(a)) return ep_call_is_layers(b) && a->of == b->of && a->buffer == b->buffer;
    if (a->what == EP_CALL_HEAP_BARRIER) return b->what == a->what && a->of == b->of;
    return b->what >= EP_CALL_ALL_GATHER;
}

/* As record_at, but NULL if the rank's steps cannot be compared with those of the other ranks. */
static const EpCallRecord *sure_record_at(const EpRankCalls *k, uint64_t step) {
    return k->records.is_order_unknown ? NULL : record_at(k, step);
}

/* The minority at a step: the bits of the smallest group of ranks that made the same call (the first such
 * group on a tie); 0 if all made the same. *all: the ranks that have a record of the step in known order. */
static uint32_t odd_at(const EpRecord *r, uint64_t step,
                       bool (*is_same)(const EpCallRecord *, const EpCallRecord *), uint32_t *all) {
    uint32_t odd = 0;
    *all = 0;
    for (uint32_t a = 0; a < r->num_ranks; a++) {
        const EpCallRecord *n = sure_record_at(&r->ranks[a], step);
        uint32_t same = 0;
        for (uint32_t b = 0; b < r->num_ranks && n; b++) {
            const EpCallRecord *m = sure_record_at(&r->ranks[b], step);
            if (m && is_same(n, m)) same |= 1u << b;
        }
        if (n) *all |= 1u << a;
        if (n && (!odd || __builtin_popcount(same) < __builtin_popcount(odd))) odd = same;
    }
    return odd == *all ? 0 : odd;
}

/* The minority at the first step at which the calls of the ranks differ, or 0. */
static uint32_t out_of_order(const EpRecord *r, uint64_t *step, uint32_t *all) {
    uint32_t odd = 0;
    *step = UINT64_MAX;
    for (uint32_t a = 0; a < r->num_ranks; a++)
        for (uint32_t i = 0; i < num_records(&r->ranks[a]); i++) {
            uint64_t at = r->ranks[a].records.at[i].step;
            uint32_t there, some = at < *step ? odd_at(r, at, are_alike, &there) : 0;
            if (some) {
                odd = some;
                *all = there;
                *step = at;
            }
        }
    return odd;
}

static void put_ranks(Out *o, const char *before, uint32_t bits) {
    put(o, "%srank%s", before, bits & (bits - 1) ? "s" : "");
    for (const char *separator = " "; bits; separator = ", ") {
        put(o, "%s%d", separator, __builtin_ctz(bits));
        bits &= bits - 1; /* clear the lowest bit */
    }
}

static void put_last_known(Out *o, const EpRecord *r, uint32_t w) {
    const EpCallRecord *n = last_known(r, w);
    put(o, "; last known: ");
    if (n)
        put(o, "%s #%llu of %s %u", call_name(n).text, (unsigned long long)n->seq,
            ep_call_is_layers(n) ? "layer" : "heap", n->of);
    if (n && ep_call_is_layers(n)) put(o, " buffer %u", n->buffer);
    if (r->ranks[w].heard_ns)
        put(o, "%sexchange #%llu, received %.1f ms before the end", n ? ", " : "",
            (unsigned long long)r->ranks[w].heard_seq, before_end(r, r->ranks[w].heard_ns));
    else if (!n) put(o, "nothing");
}

/* The name of a call, and the detail in which it differs from the other call. */
static void put_call(Out *o, const char *before, const EpCallRecord *n, const EpCallRecord *other) {
    put(o, "%s%s", before, call_name(n).text);
    if (n->what != other->what || n->dtype != other->dtype) return;
    if (n->of != other->of) put(o, " of %s %u", ep_call_is_layers(n) ? "layer" : "heap", n->of);
    else if (n->buffer != other->buffer) put(o, " in buffer %u", n->buffer);
    else put(o, " of %llu bytes", (unsigned long long)n->size);
}

/* The ranks among `some` whose call at this step is the same as n. All of them have a record of the step. */
static uint32_t alike_at(const EpRecord *r, uint64_t step, uint32_t some, const EpCallRecord *n) {
    uint32_t alike = 0;
    for (uint32_t w = 0; w < r->num_ranks; w++)
        if (some >> w & 1 && are_alike(record_at(&r->ranks[w], step), n)) alike |= 1u << w;
    return alike;
}

static void put_odd(Out *o, const EpRecord *r, uint32_t odd, uint32_t all, uint64_t step) {
    const EpCallRecord *one = record_at(&r->ranks[__builtin_ctz(odd)], step),
                       *other = record_at(&r->ranks[__builtin_ctz(all & ~odd)], step);
    put_ranks(o, "", alike_at(r, step, odd, one));
    put_call(o, " called ", one, other);
    put(o, " as operation %llu, where ", (unsigned long long)step);
    put_ranks(o, "", alike_at(r, step, all & ~odd, other));
    put_call(o, " called ", other, one);
    if (2 * __builtin_popcount(odd) == __builtin_popcount(all))
        put(o, " (equally many ranks made each call)");
}

bool ep_record_disagrees(const EpRecord *r, uint64_t step, uint32_t *rank, char *text, size_t num_bytes) {
    Out o = {text, text + num_bytes};
    uint32_t all, odd = odd_at(r, step, can_meet, &all);
    if (!odd) return false;
    put(&o, "ranks disagree in the order of calls: ");
    put_odd(&o, r, odd, all, step);
    *rank = (uint32_t)__builtin_ctz(odd);
    return true;
}

static void put_behind(Out *o, const EpRecord *r, uint32_t behind, uint64_t step) {
    const EpCallRecord *n = last_record(&r->ranks[__builtin_ctz(behind)]);
    put_ranks(o, "", behind);
    put(o, " did not reach operation %llu; last: ", (unsigned long long)step);
    if (n) put_record(o, r, n);
    else put(o, "nothing");
}

/* The first line of the page. The first case that applies names the culprit: (1) a rank that has died or has
 * sent invalid data; (2) ranks that did not answer; (3) the minority at the first step at which calls differ;
 * (4) the rank that should have sent a signal, if the first wait that timed out was for a signal; (5) ranks
 * that are behind; (6) the rank for which that wait had waited, or else the rank that ended the world.
 * Operations on a stream are recorded when they are enqueued, not when they run. So if there are any, a rank
 * that is behind is blamed only if the failed wait was for that rank. */
static void put_culprit(Out *o, const EpRecord *r) {
    uint32_t silent = 0, behind = 0, all = 0, odd, end_bit = 1u << r->end_rank;
    uint64_t most = 0, step;
    bool enqueued = false;
    for (uint32_t w = 0; w < r->num_ranks; w++) {
        const EpCallRecord *n = last_record(&r->ranks[w]);
        if (!r->ranks[w].has_records) silent |= 1u << w;
        if (n && n->on_stream) enqueued = true;
        if (is_sure(&r->ranks[w])) most = ep_max_u64(most, step_of(&r->ranks[w]));
    }
    for (uint32_t w = 0; w < r->num_ranks; w++)
        if (is_sure(&r->ranks[w]) && step_of(&r->ranks[w]) < most) behind |= 1u << w;
    if (enqueued) behind &= end_bit;
    odd = out_of_order(r, &step, &all);
    put(o, "culprit: ");
    if (!r->end_code) {
        put(o, "none, because no fault has ended the world");
    } else if (r->is_elsewhere) {
        put(o, "on another node, as the next line says");
    } else if (r->end_code == EP_EPEERDIED || r->end_code == EP_ECORRUPT) {
        const char *did = r->end_code == EP_ECORRUPT           ? "sent invalid data"
                          : r->ranks[r->end_rank].said_goodbye ? "left before the others"
                                                               : "is gone";
        put(o, "rank %u %s, seen %.1f ms before this record", r->end_rank, did,
            ((double)ep_now_ns() - (double)r->end_ns) / 1e6);
        put_last_known(o, r, r->end_rank);
    } else if (silent) {
        put_ranks(o, "", silent);
        put(o, "%s",
            r->ranks[__builtin_ctz(silent)].is_gone ? " left before the others"
                                                    : " did not answer: stopped, or too slow");
        put_last_known(o, r, (uint32_t)__builtin_ctz(silent));
    } else if (odd) {
        put_odd(o, r, odd, all, step);
    } else if (r->end_word == EP_WORD_SIGNAL) {
        put(o, "the rank that had to signal rank %u, whose wait timed out", r->end_rank);
    } else if (behind) {
        put_behind(o, r, behind, most);
    } else if (r->end_code == EP_ETIMEOUT || r->end_code == EP_EMISMATCH) {
        put(o,
            "rank %u, for which another rank waited until the timeout; the calls themselves show no "
            "difference",
            r->end_rank);
    } else {
        put(o, "rank %u, which ended the world", r->end_rank);
    }
    put(o, "\n");
}

/* ---- the page ---- */

static void put_ranks_table(Out *o, const EpRecord *r) {
    uint64_t most = 0;
    for (uint32_t w = 0; w < r->num_ranks; w++) most = ep_max_u64(most, step_of(&r->ranks[w]));
    put(o, "\nrank  operations  behind  last operation\n");
    for (uint32_t w = 0; w < r->num_ranks; w++) {
        const EpRankCalls *k = &r->ranks[w];
        const EpCallRecord *n = last_record(k);
        if (k->has_records)
            put(o, "%4u  %10llu  %6llu  ", w, (unsigned long long)step_of(k),
                (unsigned long long)(most - step_of(k)));
        else put(o, "%4u  %10s  %6s  %s", w, "?", "?", k->is_gone ? "gone" : "no answer");
        if (n) put_record(o, r, n);
        else if (k->has_records) put(o, "nothing");
        else put_last_known(o, r, w);
        put(o, "\n");
    }
}

/* A row for each of the newest operations, a column for each rank. All cells of a row should be equal. */
static void put_steps_table(Out *o, const EpRecord *r) {
    uint64_t first = UINT64_MAX, last = 0;
    for (uint32_t w = 0; w < r->num_ranks; w++)
        for (uint32_t i = 0; i < num_records(&r->ranks[w]); i++) {
            uint64_t step = r->ranks[w].records.at[i].step;
            if (step < first) first = step;
            last = ep_max_u64(last, step);
        }
    if (last - first >= EP_SENT_RECORDS && first < last) first = last - EP_SENT_RECORDS + 1;
    put(o, "\noperation");
    for (uint32_t w = 0; w < r->num_ranks; w++) put(o, "  rank %-*u", w + 1 < r->num_ranks ? 11 : 1, w);
    put(o, "\n");
    for (uint64_t step = first; first <= last && step - first < EP_SENT_RECORDS && step <= last; step++) {
        put(o, "%9llu", (unsigned long long)step);
        for (uint32_t w = 0; w < r->num_ranks; w++) {
            const EpCallRecord *n = record_at(&r->ranks[w], step);
            char cell[80] = "-";
            if (n && ep_call_is_layers(n))
                snprintf(cell, sizeof cell, "%s %u.%u%s", call_name(n).text, n->of, n->buffer,
                         n->end_ns ? "" : " *");
            else if (n) snprintf(cell, sizeof cell, "%s%s", call_name(n).text, n->end_ns ? "" : " *");
            put(o, "  %-*.16s", w + 1 < r->num_ranks ? 16 : 1, cell);
        }
        put(o, "\n");
    }
    put(o, "(* in flight; layer.buffer)\n");
}

/* Of at most 6 buffers: the wait that timed out, and the epochs that the ranks entered, if these differ. */
static void put_buffers(Out *o, const EpRecord *r) {
    for (uint32_t i = 0, shown = 0; i < r->num_buffers && shown < 6; i++) {
        const EpCommBuffer *b = r->buffers[i];
        if (!b) continue;
        uint64_t least = UINT64_MAX, most = 0;
        char name[48];
        snprintf(name, sizeof name, b->is_heaps ? "heap %u" : "layer %u buffer %u", b->of, b->buffer);
        const EpFaultRecord *f = &b->comm.host->fault;
        if (ep_ld_acquire_sys_u64(&f->state) && f->code == EP_ETIMEOUT) { /* no worker changes it any more */
            const unsigned long long epoch = f->epoch, want = f->want, got = f->got;
            if (f->word == EP_WORD_SIGNAL)
                put(o, "%s: a wait for a signal wanted %llu and saw %llu\n", name, want, got);
            else
                put(o, "%s: a wait for rank %u in epoch %llu wanted %llu and saw %llu\n", name, f->peer,
                    epoch, want, got);
        }
        if (b->on_stream) {
            uint64_t epoch = ep_ld_relaxed_sys_u64(&b->comm.host->plan.epoch);
            if (epoch) {
                put(o, "%s: the GPU's newest finished plan is #%llu\n", name, (unsigned long long)epoch);
                shown++;
            }
            continue;
        }
        for (uint32_t w = 0; w < r->num_ranks; w++) {
            uint64_t epoch = ep_entered(&b->comm, w);
            if (epoch < least) least = epoch;
            most = ep_max_u64(most, epoch);
        }
        if (least == most) continue;
        put(o, "%s: entered by rank", name);
        shown++;
        for (uint32_t w = 0; w < r->num_ranks; w++)
            put(o, "%s %u: #%llu", w ? "," : "", w, (unsigned long long)ep_entered(&b->comm, w));
        put(o, "\n");
    }
}

/* How long this rank has waited for each other rank, in all operations that all ranks have entered. */
static void put_waits(Out *o, const EpRecord *r) {
    uint64_t ns[EP_MAX_RANKS] = {0}, sum = 0;
    for (uint32_t i = 0; i < r->num_buffers; i++)
        for (uint32_t w = 0; r->buffers[i] && w < r->num_ranks; w++) {
            const uint64_t of_rank = ep_ld_relaxed_sys_u64(&r->buffers[i]->comm.host->waited_ns[w]);
            ns[w] += of_rank;
            sum += of_rank;
        }
    if (!sum) return;
    const char *separator = "";
    put(o, "in earlier operations rank %u waited for", r->rank);
    for (uint32_t w = 0; w < r->num_ranks; w++)
        if (w != r->rank) put(o, "%s rank %u: %.3f s", separator, w, (double)ns[w] / 1e9), separator = ",";
    put(o, "\n");
}

void ep_record_page(const EpRecord *r, char page[EP_PAGE_BYTES]) {
    Out o = {page, page + EP_PAGE_BYTES};
    time_t now = time(NULL);
    struct tm t;
    char when[32] = "";
    if (gmtime_r(&now, &t)) strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S UTC", &t);
    put_culprit(&o, r);
    if (r->end_code) put(&o, "ended:   %s: %s\n", ep_error_name(r->end_code), r->end_text);
    put(&o, "written: by rank %u of %u, process %d, %s\n", r->rank, r->num_ranks, (int)getpid(), when);
    put_ranks_table(&o, r);
    put_buffers(&o, r);
    put_waits(&o, r);
    put_steps_table(&o, r);
}
