/* room.c - for how many rows the outputs of a call have room, before the plan has their number.
 *
 * The GPU has nothing to do from the moment when the plan has the number of rows until the launch that needs
 * the rows. So the host makes the outputs before that moment, with room for the most rows of recent calls and
 * some more. If they do not fit the number, the host makes others, and nothing was launched.
 *
 * A call with few tokens must not take the memory of a call with many tokens. So each power of two of the
 * number of tokens has a room of its own. A training step keeps its outputs until the backward. There the
 * room must fit, so calls with different weights have rooms of their own.
 *
 * Exports ep_layer_room, ep_layer_set_room and ep_layer_fits_room. */
#include <string.h>

#include "layer/layer_state.h"
#include "runtime/world.h"

/* The entry of these calls, or an unused one where it would be. */
static EpRoom *find(EpRooms *rooms, const EpRoom *key) {
    const uint64_t number = ((uint64_t)(uintptr_t)key->weight * 2 + key->is_kept) * 64 + key->magnitude;
    for (uint64_t i = number * 0x9e3779b97f4a7c15ull >> 32;; i++) { /* the upper bits are mixed best */
        EpRoom *r = &rooms->at[i % EP_ROOM_SLOTS];
        if (!r->is_used ||
            (r->weight == key->weight && r->is_kept == key->is_kept && r->magnitude == key->magnitude))
            return r;
    }
}
static EpRoom key_of(const EpRoomOf *of, int64_t num_rows) {
    EpRoom key = {.weight = of->is_kept ? of->weight : NULL,
                  .num_rows = num_rows,
                  .is_kept = of->is_kept,
                  .is_used = true};
    for (uint64_t n = of->num_tokens; n; n /= 2) key.magnitude++;
    return key;
}
static int64_t get(EpRooms *rooms, const EpRoomOf *of) {
    const EpRoom key = key_of(of, 0), *r = find(rooms, &key);
    return r->is_used ? r->num_rows : 0;
}
/* Addresses of weights may change from step to step. When there are too many entries, all begin anew. */
static void set(EpRooms *rooms, const EpRoomOf *of, int64_t num_rows) {
    const EpRoom key = key_of(of, num_rows);
    EpRoom *r = find(rooms, &key);
    if (!r->is_used && rooms->num++ == EP_MAX_ROOMS) {
        memset(rooms->at, 0, sizeof rooms->at);
        rooms->num = 1;
        r = find(rooms, &key);
    }
    *r = key;
}

/* In a forked child, the fork may have found the lock held, and no thread is left that gives it back. */
static bool has_lock(const EpLayer *l) { return !l->heap || !ep_world_is_forked(ep_heap_world(l->heap)); }

int64_t ep_layer_room(EpLayer *l, const EpRoomOf *of) {
    if (!has_lock(l)) return 0; /* the call that follows refuses to run */
    pthread_mutex_lock(&l->rooms.lock);
    const int64_t num_rows = get(&l->rooms, of);
    pthread_mutex_unlock(&l->rooms.lock);
    return num_rows;
}

void ep_layer_set_room(EpLayer *l, const EpRoomOf *of, int64_t num_rows) {
    if (!has_lock(l)) return;
    pthread_mutex_lock(&l->rooms.lock);
    set(&l->rooms, of, num_rows);
    pthread_mutex_unlock(&l->rooms.lock);
}

bool ep_layer_fits_room(EpLayer *l, const EpRoomOf *of, uint32_t room, uint32_t num_rows) {
    const bool is_too_large = of->is_kept && room > num_rows && room - num_rows > room / 8;
    const uint32_t most = l->config.shape.capacity > num_rows ? l->config.shape.capacity : num_rows;
    const uint64_t more = (uint64_t)num_rows + num_rows / (of->is_kept ? 32 : 16);
    const int64_t wanted = more < most ? (int64_t)more : most; /* more than most never come */
    /* Up at once, and down slowly, because the modules of a model may share a layer. */
    const int64_t slowly = room - (room - wanted) / 32;
    pthread_mutex_lock(&l->rooms.lock);
    if (get(&l->rooms, of) != EP_NO_ROOM)
        set(&l->rooms, of, is_too_large || slowly < wanted ? wanted : slowly);
    pthread_mutex_unlock(&l->rooms.lock);
    return num_rows <= room && !is_too_large;
}
