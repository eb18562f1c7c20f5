/* test_order.c - what ranks make of each other when their GPUs are stuck: this test plays the GPUs. */
#include "backend.h"
#include "harness.h"
#include "protocol/flags.h"
#include "record.h"
#include "world.h"

typedef struct {
    uint32_t num_ahead; /* operations that the host has put on the stream behind the one that is stuck */
    bool alike;
} Order;

/* The host notes ever more operations, while the GPU says each millisecond that it is stuck in the third. */
static bool stuck_body(Rank *me, void *arg) {
    const Order *o = (const Order *)arg;
    EpHostWords words = {0};
    EpCommBuffer b = {.of = 7, .on_stream = true};
    EpNote note = {.what = EP_DID_PLAN, .on_stream = 1, .of = 7};
    int code = 0;
    b.comm.host = &words;
    WANT(me, 0, ep_world_watch(me->world, &b));
    for (note.seq = 1; note.seq <= 3 + o->num_ahead; note.seq++) {
        note.what = note.seq == 3 && me->rank == 1 && !o->alike ? EP_DID_COMBINE : EP_DID_PLAN;
        ep_world_noted(me->world, ep_world_note(me->world, &note));
    }
    double begin = seconds_now();
    while (!code && seconds_now() - begin < (o->alike ? 1 : 5)) {
        ep_st_relaxed_sys_u64(&words.stuck, 3);
        code = ep_world_check(me->world);
        usleep(1000);
    }
    CHECK(me, code == (o->alike ? 0 : EP_EMISMATCH));
    if (code)
        CHECK(me, strstr(ep_error_text(), "rank 1 called combine as operation") && strstr(ep_error_text(), "where ranks 0, 2 called plan"));
    if (code) CHECK(me, ep_ld_relaxed_sys_u64(&words.abort) == 1);
    ep_world_unwatch(me->world, &b);
    return true;
}
bool test_stuck_in_order(void) {
    Setup setup = {.num_ranks = 3};
    return run_team(&setup, stuck_body, &(Order){.num_ahead = 5, .alike = true});
}
bool test_stuck_out_of_order(void) {
    Setup setup = {.num_ranks = 3, .dies = true};
    bool ok = run_team(&setup, stuck_body, &(Order){.num_ahead = 0});
    return run_team(&setup, stuck_body, &(Order){.num_ahead = 1500}) && ok;
}
