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

/* Where rank 0 waits. At a lock: for another of its threads, which is in an operation. */
typedef enum { IN_HEAP, IN_LAYER, AT_LOCK, NUM_PLACES } Place;

static void *barrier_main(void *layer) {
    ep_layer_barrier((EpLayer *)layer, 0, NULL);
    return NULL;
}

/* Rank 1 comes to no operation. Rank 0 waits for it, and ranks 0 and 2 must return long before the limit. */
static bool interrupt_body(Rank *me, void *arg) {
    const Place place = *(const Place *)arg;
    const bool has_thread = place == AT_LOCK && me->rank == 0;
    pthread_t thread;
    const double begin = seconds_now();
    uint64_t off;
    CHECK_CODE(me, 0, alloc_heap(me, 8, &off));
    if (has_thread) {
        if (pthread_create(&thread, NULL, barrier_main, me->layer)) abort();
        usleep(20000); /* until it has the lock, or else it waits for this thread */
    }
    is_wanted = me->rank == 0;
    if (me->rank == 1) {
        while (ep_world_check(me->world) == 0) usleep(1000);
    } else if (place != IN_HEAP) {
        CHECK_CODE(me, EP_ECLOSED, ep_layer_barrier(me->layer, 0, NULL));
    } else {
        CHECK_CODE(me, EP_ECLOSED, ep_heap_wait(me->heap, off, 1, false, NULL));
    }
    is_wanted = false;
    if (has_thread) pthread_join(thread, NULL);
    CHECK_CODE(me, EP_ECLOSED, ep_world_check(me->world));
    CHECK(me, strstr(ep_error_text(), "rank 0 was interrupted in an operation"));
    CHECK(me, is_within(begin, long_timeout_s / 4));
    return true;
}

bool test_interrupt(void) {
    for (Place place = IN_HEAP; place < NUM_PLACES; place = (Place)(place + 1)) {
        Setup setup = {.num_ranks = 3, .config = small_config(3), .world_ends = true};
        atomic_store(&num_asked, 0);
        ep_world_set_interrupt(question);
        bool ok = run_team(&setup, interrupt_body, &place);
        ep_world_set_interrupt(NULL);
        CHECK(NULL, atomic_load(&num_asked) == 1);
        TRY(ok);
    }
    return true;
}
