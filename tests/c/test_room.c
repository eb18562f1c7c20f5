/* test_room.c - for how many rows calls make room, after calls with other numbers of rows. */
#include <sys/wait.h>

#include "harness.h"
#include "layer/layer_state.h"

static EpLayer *open_rooms(void) {
    EpLayer *l = (EpLayer *)calloc(1, sizeof *l);
    if (l) {
        pthread_mutex_init(&l->rooms.lock, NULL);
        l->config.shape.capacity = 1 << 20; /* the most rows that can come */
    }
    return l;
}
static bool close_rooms(EpLayer *l) {
    pthread_mutex_destroy(&l->rooms.lock);
    free(l);
    return true;
}
/* Make a call with the room that there is. Returns the room of the next one. */
static int64_t call(EpLayer *l, const EpRoomOf *of, uint32_t num_rows, bool *fits) {
    const int64_t room = ep_layer_room(l, of);
    *fits = ep_layer_fits_room(l, of, (uint32_t)(room < 0 ? 0 : room), num_rows);
    return ep_layer_room(l, of);
}

/* The room goes up at once and down slowly, and is at most a few percent above a number that stays. */
bool test_room_follows_the_rows(void) {
    EpLayer *l = open_rooms();
    const EpRoomOf of = {.num_tokens = 100};
    bool fits;
    CHECK(NULL, l && ep_layer_room(l, &of) == 0);
    CHECK(NULL, call(l, &of, 1000, &fits) == 1000 + 1000 / 16 && !fits);
    CHECK(NULL, call(l, &of, 1010, &fits) == 1010 + 1010 / 16 && fits);
    CHECK(NULL, call(l, &of, 2000, &fits) == 2000 + 2000 / 16 && !fits);
    int64_t room = 2000 + 2000 / 16;
    for (uint32_t i = 0; i < 300; i++) {
        const int64_t next = call(l, &of, 1000, &fits);
        CHECK(NULL, fits && next <= room && next >= room - room / 32);
        room = next;
    }
    CHECK(NULL, room >= 1000 && room < 1120);
    CHECK(NULL, call(l, &of, 0, &fits) > 0 && fits);
    return close_rooms(l);
}

/* Outputs that are kept for a backward may have an eighth more room than rows. */
bool test_room_that_is_kept_fits(void) {
    EpLayer *l = open_rooms();
    const EpRoomOf of = {.num_tokens = 100, .is_kept = true, .weight = &of};
    const uint32_t most = 1000 + 142; /* 142 is an eighth of 1142, rounded down */
    CHECK(NULL, l && most - 1000 == most / 8 && most + 1 - 1000 > (most + 1) / 8);
    CHECK(NULL, !ep_layer_fits_room(l, &of, 999, 1000));
    CHECK(NULL, ep_layer_fits_room(l, &of, 1000, 1000));
    CHECK(NULL, ep_layer_fits_room(l, &of, most, 1000));
    CHECK(NULL, ep_layer_room(l, &of) == most - (most - 1031) / 32);
    CHECK(NULL, !ep_layer_fits_room(l, &of, most + 1, 1000));
    CHECK(NULL, ep_layer_room(l, &of) == 1000 + 1000 / 32);
    return close_rooms(l);
}

/* There is room for as many rows as can come at all, and no more. */
bool test_room_ends_at_the_capacity(void) {
    EpLayer *l = open_rooms();
    CHECK(NULL, l);
    for (uint32_t is_kept = 0; is_kept < 2; is_kept++) {
        const EpRoomOf of = {.num_tokens = 100, .is_kept = is_kept};
        const uint32_t rows[] = {999, 1000, 1 << 20, UINT32_MAX};
        for (uint32_t i = 0; i < 4; i++) {
            l->config.shape.capacity = 1000;
            CHECK(NULL, !ep_layer_fits_room(l, &of, 0, rows[i]));
            CHECK(NULL, ep_layer_room(l, &of) == (i ? rows[i] : 1000));
        }
    }
    return close_rooms(l);
}

/* Calls share a room if their numbers of tokens have as many bits. Those that keep outputs have one for each
 * address of weights. */
bool test_room_of_calls_that_differ(void) {
    EpLayer *l = open_rooms();
    int weight;
    const EpRoomOf of[] = {{.num_tokens = 0},
                           {.num_tokens = 64},
                           {.num_tokens = 128},
                           {.num_tokens = UINT64_MAX},
                           {.num_tokens = 64, .is_kept = true},
                           {.num_tokens = 64, .is_kept = true, .weight = &weight},
                           {.num_tokens = 64, .is_kept = true, .weight = l}};
    enum { NUM = sizeof of / sizeof *of };
    CHECK(NULL, l);
    for (int64_t i = 0; i < NUM; i++) ep_layer_set_room(l, &of[i], 10 + i);
    for (int64_t i = 0; i < NUM; i++) CHECK(NULL, ep_layer_room(l, &of[i]) == 10 + i);
    CHECK(NULL, ep_layer_room(l, &(EpRoomOf){.num_tokens = 127}) == 11);
    CHECK(NULL, ep_layer_room(l, &(EpRoomOf){.num_tokens = 64, .weight = &weight}) == 11);
    CHECK(NULL, ep_layer_room(l, &(EpRoomOf){.num_tokens = 32}) == 0);
    return close_rooms(l);
}

/* A room for which there was no memory stays so. */
bool test_room_without_memory(void) {
    EpLayer *l = open_rooms();
    const EpRoomOf of = {.num_tokens = 100};
    bool fits;
    CHECK(NULL, l);
    ep_layer_set_room(l, &of, EP_NO_ROOM);
    CHECK(NULL, call(l, &of, 5, &fits) == EP_NO_ROOM && !fits);
    CHECK(NULL, call(l, &of, 0, &fits) == EP_NO_ROOM && fits);
    return close_rooms(l);
}

/* Weights whose address changes from step to step do not fill memory: then all rooms begin anew. */
bool test_room_of_many_weights(void) {
    static char weights[3 * EP_MAX_ROOMS];
    EpLayer *l = open_rooms();
    CHECK(NULL, l);
    for (uint32_t i = 0; i < sizeof weights; i++) {
        const uint32_t first = i / EP_MAX_ROOMS * EP_MAX_ROOMS; /* of the last beginning */
        ep_layer_set_room(l, &(EpRoomOf){.is_kept = true, .weight = weights + i}, i + 1);
        for (uint32_t j = i < 40 ? 0 : i - 40; j <= i; j++)
            CHECK(NULL, ep_layer_room(l, &(EpRoomOf){.is_kept = true, .weight = weights + j}) ==
                            (j < first ? 0 : (int64_t)j + 1));
    }
    CHECK(NULL, l->rooms.num == EP_MAX_ROOMS);
    return close_rooms(l);
}

/* A child that is forked while another thread is in a room does not wait for that thread. */
static bool forked_body(Rank *me, void *arg) {
    const EpRoomOf of = {.num_tokens = 100};
    int status = 0;
    (void)arg;
    pthread_mutex_lock(&me->layer->rooms.lock); /* as the other thread */
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        ep_layer_set_room(me->layer, &of, 5);
        _exit(ep_layer_room(me->layer, &of) != 0);
    }
    pthread_mutex_unlock(&me->layer->rooms.lock);
    CHECK(me, child > 0 && waitpid(child, &status, 0) == child && status == 0);
    return true;
}
bool test_room_in_a_forked_child(void) {
    Setup setup = {.num_ranks = 1, .config = small_config(1)};
    return run_team(&setup, forked_body, NULL);
}
