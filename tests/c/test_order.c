/* test_order.c - ranks whose GPUs are stuck compare their call records. The test writes the words that the
 * GPUs would write. */
#include "backend.h"
#include "harness.h"
#include "protocol/flags.h"
#include "runtime/flight_record.h"
#include "runtime/world.h"

typedef struct {
    uint32_t num_ahead;   /* operations that the host enqueues after the stuck operation */
    bool calls_are_equal; /* false: the stuck operation of rank 1 belongs to another layer */
    /* An earlier operation of rank 1 has failed. The other ranks may have seen this failure in another
     * operation, so they cannot compare the order. */
    bool has_failed;
    bool in_allocation; /* the host is in an allocation that began before the GPU became stuck */
} Order;

/* The host records its operations. Then the GPU reports every millisecond that it is stuck in operation 3. */
static bool stuck_body(Rank *me, void *arg) {
    const Order *o = (const Order *)arg;
    bool other = me->rank == 1 && !o->calls_are_equal, ends = !o->calls_are_equal && !o->has_failed;
    EpHostWords words = {0};
    EpCommBuffer b = {.of = other ? 9 : 7, .on_stream = true};
    EpCallRecord record = {.what = EP_OP_PLAN, .on_stream = 1};
    int code = 0;
    b.comm.host = &words;
    CHECK_CODE(me, 0, ep_world_watch(me->world, &b));
    for (record.seq = 1; record.seq <= 3 + o->num_ahead; record.seq++) {
        record.of = record.seq == 3 && other ? 9 : 7;
        ep_world_end_call(me->world, ep_world_begin_call(me->world, &record),
                          o->has_failed && me->rank == 1 && record.seq == 2 ? EP_EOVERFLOW : 0);
    }
    uint64_t allocation =
        o->in_allocation ? ep_world_begin_call(me->world, &(EpCallRecord){.what = EP_CALL_ALLOC}) : 0;
    if (o->in_allocation) usleep(1200000 + 3000 * me->rank);
    double begin = seconds_now();
    while (!code && seconds_now() - begin < (ends ? long_timeout_s : 1)) {
        ep_st_relaxed_sys_u64(&words.stuck, 3);
        code = ep_world_check(me->world);
        usleep(1000);
    }
    bool is_in_time = is_within(begin, 2);
    if (allocation) ep_world_end_call(me->world, allocation, 0);
    /* A failed CHECK returns, so nothing may read b and the words any more. */
    ep_world_unwatch(me->world, &b);
    CHECK(me, code == (ends ? EP_EMISMATCH : 0) && (!ends || is_in_time));
    if (!code) return true;
    const char *text = ep_error_text();
    CHECK(me, strstr(text, "rank 1 called plan of layer 9 as operation "));
    /* A rank compares as soon as it has the records of two ranks, also if the third is late. */
    CHECK(me, strstr(text, ", where ranks 0, 2 called plan of layer 7") ||
                  strstr(text, ", where rank 0 called plan of layer 7") ||
                  strstr(text, ", where rank 2 called plan of layer 7"));
    CHECK(me, ep_ld_relaxed_sys_u64(&words.abort) == 1);
    return true;
}
bool test_stuck_with_equal_calls(void) {
    Setup setup = {.num_ranks = 3};
    bool ok = run_team(&setup, stuck_body, &(Order){.num_ahead = 5, .calls_are_equal = true});
    ok = run_team(&setup, stuck_body,
                  &(Order){.num_ahead = 5, .calls_are_equal = true, .in_allocation = true}) &&
         ok;
    return run_team(&setup, stuck_body, &(Order){.has_failed = true}) && ok;
}
bool test_stuck_with_different_calls(void) {
    Setup setup = {.num_ranks = 3, .world_ends = true};
    bool ok = run_team(&setup, stuck_body, &(Order){.num_ahead = 0});
    ok = run_team(&setup, stuck_body, &(Order){.num_ahead = 40, .in_allocation = true}) && ok;
    return run_team(&setup, stuck_body, &(Order){.num_ahead = 1500}) && ok;
}
