/* test_device.c - the device API of a heap (epmoe_device.h), called by CPU threads. The sanitizers check
 * it like the other tests. */
#include "epmoe_device.h"
#include "harness.h"

enum { MAX_BYTES = 4000 };

static void fill(unsigned char *at, uint64_t num_bytes, uint64_t seed) {
    Rng rng = {seed};
    for (uint64_t i = 0; i < num_bytes; i++) at[i] = (unsigned char)rng_next(&rng);
}
static bool is_filled(const unsigned char *at, uint64_t num_bytes, uint64_t seed) {
    unsigned char expected[MAX_BYTES];
    fill(expected, num_bytes, seed);
    return memcmp(at, expected, num_bytes) == 0;
}

/* In each round a rank puts its data to its right neighbour, gets the data of its left neighbour, and adds
 * to a counter on rank 0. */
static bool device_body(Rank *me, void *arg) {
    const uint32_t W = me->setup->num_ranks, right = (me->rank + 1) % W, left = (me->rank + W - 1) % W;
    const uint32_t num_rounds = scaled(200) + 20;
    EpDeviceHeap h;
    uint64_t off;
    unsigned char got[MAX_BYTES];
    Rng rng = {test_seed}; /* draws sizes and addresses, which are equal on every rank */
    (void)arg;
    CHECK_CODE(me, 0, alloc_heap(me, 8 * (W + 3) + 4 * MAX_BYTES, &off));
    CHECK_CODE(me, 0, ep_heap_handle(me->heap, &h));
    CHECK(me, h.my_rank == me->rank && h.num_ranks == W);
    uint64_t *words = (uint64_t *)(void *)(h.base[me->rank] + off), *arrived = words + W,
             *count = arrived + 1, *never = arrived + 2;
    unsigned char *outbox = (unsigned char *)(never + 1), *inbox = outbox + MAX_BYTES;
    for (uint64_t round = 1; round <= num_rounds; round++) {
        const uint64_t at = rng_below(&rng, 16);
        const bool any_size = rng_below(&rng, 2); /* false: a multiple of 8 bytes */
        const uint64_t num_bytes =
            any_size ? rng_below(&rng, MAX_BYTES - 16) : 8 * rng_below(&rng, MAX_BYTES / 8 - 2);
        fill(outbox + at, num_bytes, round * W + me->rank);
        ep_dev_put(&h, inbox + at, outbox + at, num_bytes, right);
        ep_dev_signal_set(&h, arrived, round, right);
        CHECK(me, ep_dev_wait(&h, arrived, round) && is_filled(inbox + at, num_bytes, round * W + left));
        ep_dev_signal_add(&h, count, me->rank + 1, 0);
        CHECK(me, ep_dev_barrier(&h, words, 2 * round));
        ep_dev_get(&h, got, outbox + at, num_bytes, left);
        CHECK(me, is_filled(got, num_bytes, round * W + left));
        if (me->rank == 0)
            CHECK(me, ep_dev_wait(&h, count, round * W * (W + 1) / 2) && *count == round * W * (W + 1) / 2);
        /* After this barrier, no rank reads the outbox that another rank fills next. */
        CHECK(me, ep_dev_barrier(&h, words, 2 * round + 1));
    }
    h.timeout_ns = 20000000;
    double begin = seconds_now();
    CHECK(me, !ep_dev_wait(&h, never, 1) && is_within(begin, 2));
    if (me->rank == 0) ep_world_abort(me->world, EP_ECUDA, 0, "the test aborts the world");
    h.timeout_ns = 60000000000ull;
    CHECK(me, !ep_dev_wait(&h, never, 1) && is_within(begin, 5)); /* the world has ended */
    CHECK_CODE(me, EP_ECUDA, ep_heap_handle(me->heap, &h));
    return true;
}
bool test_device(void) {
    Setup setup = {.num_ranks = 3, .heap_bytes = 8 * MAX_BYTES, .world_ends = true};
    return run_team(&setup, device_body, NULL);
}
