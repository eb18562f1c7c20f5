/* slot.h - the formats of what travels between ranks, and of what dispatch saves for combine. The only place
 * that knows where a number is located in them.
 *
 *   slot    what a rank sends to another rank for one token: the row, then a trailer of 32-bit words.
 *           dispatch:       i32 token, i32 return slot, i32 tag (0 without tags), i32 row[K] (-1: not on this
 *                           rank), f32 weight[K] if weights travel; then, for rows in FP8, f32 scale[H / 128]
 *           LOCAL combine:  f32 scalar[K]
 *   choice  what SCATTER and GATHER combine move for one choice: the row, then f32 weight, f32 scalar
 *   record  what a rank saves of a slot that it has received, for combine: i32 token, i32 row[K] (-1: none).
 *           The tensor `recv` has a record for each source rank and return slot: [W][max_tokens] records.
 *
 * The number of a slot is the position of its token among the distinct tokens that one rank sends to another.
 * It numbers a row of the staging buffer. A token is sent once per rank, also if several of its experts are
 * there. The slot in which a token returns may differ from the slot in which it was sent
 * (EpPlanParams.sort_slots).
 *
 * The numbers in a slot come from a peer. Its reader clamps them before they become an offset. */
#ifndef EP_SLOT_H
#define EP_SLOT_H
#include "protocol/port.h"

/* Words of the trailer of a slot in dispatch. */
enum { EP_TRAILER_TOKEN = 0, EP_TRAILER_RETURN_SLOT = 1, EP_TRAILER_TAG = 2, EP_TRAILER_ROWS = 3 };
/* The word of the first weight: the number of words without weights. */
EP_PURE uint32_t ep_trailer_weights(uint32_t num_topk) { return EP_TRAILER_ROWS + num_topk; }
/* All words. The trailer of a slot in LOCAL combine is shorter. Scales come after it: rows in FP8 are shorter
 * than those for which the slot was made, by more bytes than the scales have. */
EP_PURE uint32_t ep_trailer_words(uint32_t num_topk) { return ep_trailer_weights(num_topk) + num_topk; }

/* Words of the trailer of a choice. */
enum { EP_CHOICE_WEIGHT = 0, EP_CHOICE_SCALAR = 1, EP_CHOICE_WORDS = 2 };

/* Words of a record. */
enum { EP_RECORD_TOKEN = 0, EP_RECORD_ROWS = 1 };
EP_PURE uint32_t ep_record_words(uint32_t num_topk) { return EP_RECORD_ROWS + num_topk; }

#endif /* EP_SLOT_H */
