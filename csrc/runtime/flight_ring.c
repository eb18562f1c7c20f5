/* flight_ring.c - the ring buffer of call records of one rank; see flight_record.h.
 *
 * Exports: the functions ep_ring_*. Host threads write the ring while the watchdog thread reads it, without a
 * lock. Each entry is a sequence lock: `place` is 0 while the entry is written, and otherwise its number.
 * Invariant: a reader that sees the same `place` before and after it has read the words has read one record.
 * The end time and the all-gather number are stored later into a finished entry, each as one word. */
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/flight_record.h"

/* A call record as the six words that the ring stores. */
typedef union {
    EpCallRecord record;
    uint64_t word[6];
} Words;
enum { WORD_SEQ = 1, WORD_END = 4 };
_Static_assert(offsetof(EpCallRecord, seq) == 8 * WORD_SEQ && offsetof(EpCallRecord, end_ns) == 8 * WORD_END,
               "words of a call record");

void ep_ring_order_unknown(EpRing *ring) {
    atomic_store_explicit(&ring->is_order_unknown, true, memory_order_relaxed);
}

/* The collective call that this thread is in, or ring NULL. What the thread begins meanwhile is part of it.
 * It belongs to the thread and not to the ring: other threads of the rank may be in calls of their own. A
 * call that took the record of another thread's call for its own would tell the peers a wrong name. */
static _Thread_local struct {
    const EpRing *ring;
    uint64_t place;
    uint32_t about;
} mine;

/* The entry of a place, or NULL if a newer record has replaced it, because other threads have made very many
 * calls since. */
static EpRingEntry *entry_of(EpRing *ring, uint64_t place) {
    EpRingEntry *e = &ring->entries[place % EP_RING_ENTRIES];
    return atomic_load_explicit(&e->place, memory_order_relaxed) == place ? e : NULL;
}

/* Decide whether the calling thread makes the order of steps unknown.
 * CPU: several threads may use one world, each with its own buffer. Their calls come in any order, so a
 * second thread makes the order unknown.
 * GPU: the order must be the same on all ranks, whichever thread calls. (Autograd calls from a thread of its
 * own.) So a second thread is no problem, unless it calls while another thread's call is in flight
 * (is_others). */
static void check_thread(EpRing *ring, const EpCallRecord *record, bool is_others) {
    uint64_t me = (uint64_t)pthread_self(), first = 0;
    if (!record->on_stream && !atomic_compare_exchange_strong_explicit(
                                  &ring->thread, &first, me, memory_order_relaxed, memory_order_relaxed))
        is_others |= first != me;
    if (is_others) ep_ring_order_unknown(ring);
}

uint64_t ep_ring_begin(EpRing *ring, const EpCallRecord *record) {
    const bool is_counted = ep_call_is_counted(record);
    if (is_counted && mine.ring == ring) return 0;
    /* Other threads in a call: the calls of this rank come in any order. */
    if (is_counted)
        check_thread(ring, record, atomic_fetch_add_explicit(&ring->num_open, 1, memory_order_relaxed) != 0);
    Words w = {*record};
    uint64_t place = atomic_fetch_add_explicit(&ring->num, 1, memory_order_relaxed) + 1;
    uint64_t step = atomic_fetch_add_explicit(&ring->step, is_counted, memory_order_relaxed) + is_counted;
    EpRingEntry *to = &ring->entries[place % EP_RING_ENTRIES];
    w.record.step = step;
    w.record.begin_ns = ep_now_ns();
    w.record.end_ns = 0;
    atomic_store_explicit(&to->place, 0, memory_order_relaxed);
    /* release: a reader that reads one of these new words then sees place 0 or a later place. */
    for (uint32_t i = 0; i < 6; i++) atomic_store_explicit(&to->word[i], w.word[i], memory_order_release);
    atomic_store_explicit(&to->place, place, memory_order_release);
    if (is_counted) {
        mine.ring = ring;
        mine.place = place;
        mine.about = (uint32_t)record->what << 16 | record->of;
    }
    return place;
}

void ep_ring_end(EpRing *ring, uint64_t record, int code) {
    /* After a failure, ranks may continue at different steps. The three codes below end the world, so no rank
     * continues, and the steps stay comparable for the flight record. */
    if (code && code != EP_ETIMEOUT && code != EP_EPEERDIED && code != EP_ECORRUPT)
        ep_ring_order_unknown(ring);
    if (record == 0) return;
    EpRingEntry *e = entry_of(ring, record);
    if (e) atomic_store_explicit(&e->word[WORD_END], ep_now_ns(), memory_order_release);
    if (mine.ring != ring || mine.place != record) return;
    mine.ring = NULL;
    atomic_fetch_sub_explicit(&ring->num_open, 1, memory_order_relaxed);
}

bool ep_ring_is_in_call(const EpRing *ring) { return mine.ring == ring; }

uint32_t ep_ring_all_gather(EpRing *ring, uint64_t seq) {
    if (mine.ring != ring) return 0;
    EpRingEntry *e = entry_of(ring, mine.place);
    if (e) atomic_store_explicit(&e->word[WORD_SEQ], seq, memory_order_release);
    return mine.about;
}

/* Read the record at a place. False: it has been overwritten, or is being written. */
static bool ring_read(EpRing *ring, uint64_t place, EpCallRecord *record) {
    EpRingEntry *from = &ring->entries[place % EP_RING_ENTRIES];
    Words w;
    bool same = atomic_load_explicit(&from->place, memory_order_acquire) == place;
    for (uint32_t i = 0; i < 6; i++) w.word[i] = atomic_load_explicit(&from->word[i], memory_order_acquire);
    *record = w.record;
    return same && atomic_load_explicit(&from->place, memory_order_relaxed) == place;
}

/* The newest EP_SENT_RECORDS records among the places up to last. */
static void ring_until(EpRing *ring, uint64_t last, EpCallRecords *out) {
    memset(out, 0, sizeof *out);
    out->is_order_unknown = atomic_load_explicit(&ring->is_order_unknown, memory_order_relaxed);
    for (uint64_t place = last > EP_SENT_RECORDS ? last - EP_SENT_RECORDS + 1 : 1; place <= last; place++)
        if (ring_read(ring, place, &out->at[out->num])) out->num++;
}

void ep_ring_newest(EpRing *ring, EpCallRecords *out) {
    ring_until(ring, atomic_load_explicit(&ring->num, memory_order_acquire), out);
}

uint64_t ep_ring_about(EpRing *ring, const EpCommBuffer *b, uint64_t epoch, EpCallRecords *out) {
    uint64_t num = atomic_load_explicit(&ring->num, memory_order_acquire);
    EpCallRecord n;
    for (uint64_t place = num; place > 0 && num - place < EP_RING_ENTRIES; place--) {
        if (!ring_read(ring, place, &n) || n.seq != epoch || !ep_call_is_buffers(&n, b)) continue;
        ring_until(ring, num - place > EP_SENT_RECORDS / 2 ? place + EP_SENT_RECORDS / 2 : num, out);
        return n.step;
    }
    return 0;
}
