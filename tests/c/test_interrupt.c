/* test_interrupt.c - the program interrupts a wait: the rank leaves its operation, and the world ends. */
#include "harness.h"
#include "runtime/error.h"

/* What rank 0 answers when it is asked. Other ranks answer no. */
static _Thread_local bool is_wanted;
static atomic_uint num_asked;
static bool question(void) {
    if (is_wanted) atomic_fetch_add(&num_asked, 1);
    return is_wanted;
}

/* Rank 1 comes to no operation. Rank 0 waits for it, and ranks 0 and 2 must return long before the limit. */
static bool interrupt_body(Rank *me, void *arg) {
    const bool in_layer = *(const bool *)arg;
    const double begin = seconds_now();
    uint64_t off;
    CHECK_CODE(me, 0, alloc_heap(me, 8, &off));
    is_wanted = me->rank == 0;
    if (me->rank == 1) {
        while (ep_world_check(me->world) == 0) usleep(1000);
    } else if (in_layer) {
        CHECK_CODE(me, EP_ECLOSED, ep_layer_barrier(me->layer, 0, NULL));
    } else {
        CHECK_CODE(me, EP_ECLOSED, ep_heap_wait(me->heap, off, 1, false, NULL));
    }
    is_wanted = false;
    CHECK_CODE(me, EP_ECLOSED, ep_world_check(me->world));
    CHECK(me, strstr(ep_error_text(), "rank 0 was interrupted in an operation"));
    CHECK(me, is_within(begin, long_timeout_s / 4));
    return true;
}

bool test_interrupt(void) {
    for (uint32_t i = 0; i < 2; i++) {
        bool in_layer = i == 1;
        Setup setup = {.num_ranks = 3, .config = small_config(3), .world_ends = true};
        atomic_store(&num_asked, 0);
        ep_world_set_interrupt(question);
        bool ok = run_team(&setup, interrupt_body, &in_layer);
        ep_world_set_interrupt(NULL);
        CHECK(NULL, atomic_load(&num_asked) == 1);
        TRY(ok);
    }
    return true;
}
