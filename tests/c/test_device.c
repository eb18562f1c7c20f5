/* test_device.c - the device API of a heap (epmoe_device.h), used by threads, with the same race checks as
 * the rest. */
#include "epmoe_device.h"
#include "harness.h"

enum { MOST = 4000 };

static void fill(unsigned char *at, uint64_t num_bytes, uint64_t seed) {
    Rng rng = {seed};
    for (uint64_t i = 0; i < num_bytes; i++) at[i] = (unsigned char)rng_next(&rng);
}
static bool is_filled(const unsigned char *at, uint64_t num_bytes, uint64_t seed) {
    unsigned char wanted[MOST];
    fill(wanted, num_bytes, seed);
    return memcmp(at, wanted, num_bytes) == 0;
}

/* In each turn a rank puts its data to its right neighbour, gets that of its left one, and adds to a
 * counter on rank 0. */
static bool device_body(Rank *me, void *arg) {
    const uint32_t W = me->setup->num_ranks, right = (me->rank + 1) % W, left = (me->rank + W - 1) % W,
                   turns = scaled(200) + 20;
    EpDeviceHeap h;
    uint64_t off;
    unsigned char got[MOST];
    Rng rng = {test_seed}; /* sizes and addresses: equal on every rank */
    (void)arg;
    WANT(me, 0, take_heap(me, 8 * (W + 3) + 4 * MOST, &off));
    WANT(me, 0, ep_heap_handle(me->heap, &h));
    CHECK(me, h.my_rank == me->rank && h.num_ranks == W);
    uint64_t *words = (uint64_t *)(void *)(h.base[me->rank] + off), *arrived = words + W,
             *count = arrived + 1, *never = arrived + 2;
    unsigned char *outbox = (unsigned char *)(never + 1), *inbox = outbox + MOST;
    for (uint64_t turn = 1; turn <= turns; turn++) {
        const uint64_t at = rng_below(&rng, 16), num_bytes = rng_below(&rng, 2)
                                                                 ? rng_below(&rng, MOST - 16)
                                                                 : 8 * rng_below(&rng, MOST / 8 - 2);
        fill(outbox + at, num_bytes, turn * W + me->rank);
        ep_dev_put(&h, inbox + at, outbox + at, num_bytes, right);
        ep_dev_signal_set(&h, arrived, turn, right);
        CHECK(me, ep_dev_wait(&h, arrived, turn) && is_filled(inbox + at, num_bytes, turn * W + left));
        ep_dev_signal_add(&h, count, me->rank + 1, 0);
        CHECK(me, ep_dev_barrier(&h, words, 2 * turn));
        ep_dev_get(&h, got, outbox + at, num_bytes, left);
        CHECK(me, is_filled(got, num_bytes, turn * W + left));
        if (me->rank == 0)
            CHECK(me, ep_dev_wait(&h, count, turn * W * (W + 1) / 2) && *count == turn * W * (W + 1) / 2);
        CHECK(me,
              ep_dev_barrier(&h, words, 2 * turn + 1)); /* no rank refills memory that another still reads */
    }
    h.timeout_ns = 20000000;
    double begin = seconds_now();
    CHECK(me, !ep_dev_wait(&h, never, 1) && is_soon(begin, 2));
    if (me->rank == 0) ep_world_abort(me->world, EP_ECUDA, 0, "the test says so");
    h.timeout_ns = 60000000000ull;
    CHECK(me, !ep_dev_wait(&h, never, 1) && is_soon(begin, 5)); /* the world has ended */
    WANT(me, EP_ECUDA, ep_heap_handle(me->heap, &h));
    return true;
}
bool test_device(void) {
    Setup setup = {.num_ranks = 3, .heap_bytes = 8 * MOST, .dies = true};
    return run_team(&setup, device_body, NULL);
}
