/* test_order.c - what ranks conclude about each other when their GPUs are stuck. The test plays the GPUs. */
#include "backend.h"
#include "harness.h"
#include "protocol/flags.h"
#include "runtime/flight_record.h"
#include "runtime/world.h"

typedef struct {
    uint32_t num_ahead; /* operations that the host has enqueued after the one that is stuck */
    bool alike;         /* false: rank 1 is in an operation of another layer */
    bool
        failed; /* an operation of rank 1 has failed before; the others may have seen the failure in another operation */
    bool waits; /* the host is in an allocation by then, for longer than the GPU is stuck */
} Order;

/* The host records more and more operations, while the GPU reports each millisecond that it is stuck in
 * the third. */
static bool stuck_body(Rank *me, void *arg) {
    const Order *o = (const Order *)arg;
    bool other = me->rank == 1 && !o->alike, ends = !o->alike && !o->failed;
    EpHostWords words = {0};
    EpCommBuffer b = {.of = other ? 9 : 7, .on_stream = true};
    EpNote note = {.what = EP_DID_PLAN, .on_stream = 1};
    int code = 0;
    b.comm.host = &words;
    WANT(me, 0, ep_world_watch(me->world, &b));
    for (note.seq = 1; note.seq <= 3 + o->num_ahead; note.seq++) {
        note.of = note.seq == 3 && other ? 9 : 7;
        ep_world_noted(me->world, ep_world_note(me->world, &note),
                       o->failed && me->rank == 1 && note.seq == 2 ? EP_EOVERFLOW : 0);
    }
    uint64_t waiting = o->waits ? ep_world_note(me->world, &(EpNote){.what = EP_DID_ALLOC}) : 0;
    if (o->waits) usleep(1200000 + 3000 * me->rank);
    double begin = seconds_now();
    while (!code && seconds_now() - begin < (ends ? long_timeout_s : 1)) {
        ep_st_relaxed_sys_u64(&words.stuck, 3);
        code = ep_world_check(me->world);
        usleep(1000);
    }
    CHECK(me, code == (ends ? EP_EMISMATCH : 0) && (!ends || is_soon(begin, 2)));
    if (code) CHECK(me, strstr(ep_error_text(), "rank 1 called plan of layer 9 as operation "));
    if (code) CHECK(me, strstr(ep_error_text(), ", where ranks 0, 2 called plan of layer 7"));
    if (code) CHECK(me, ep_ld_relaxed_sys_u64(&words.abort) == 1);
    if (waiting) ep_world_noted(me->world, waiting, 0);
    ep_world_unwatch(me->world, &b);
    return true;
}
bool test_stuck_in_order(void) {
    Setup setup = {.num_ranks = 3};
    bool ok = run_team(&setup, stuck_body, &(Order){.num_ahead = 5, .alike = true});
    ok = run_team(&setup, stuck_body, &(Order){.num_ahead = 5, .alike = true, .waits = true}) && ok;
    return run_team(&setup, stuck_body, &(Order){.failed = true}) && ok;
}
bool test_stuck_out_of_order(void) {
    Setup setup = {.num_ranks = 3, .dies = true};
    bool ok = run_team(&setup, stuck_body, &(Order){.num_ahead = 0});
    ok = run_team(&setup, stuck_body, &(Order){.num_ahead = 40, .waits = true}) && ok;
    return run_team(&setup, stuck_body, &(Order){.num_ahead = 1500}) && ok;
}
