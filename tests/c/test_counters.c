/* test_counters.c - which tile counter a stream gets, with a fake runtime.
 *
 * The counters of a stream are kept until the process ends. So each test has devices of its own. */
#include <cuda_runtime_api.h>

#include "cuda/capabilities.h"
#include "cuda/tile_counters.h"
#include "harness.h"
#include "protocol/words.h"

/* ---- the fake runtime; test_launch.c has cudaGetDevice ---- */

static struct FakeStream default_stream;
static _Thread_local bool memory_fails;
static uint64_t memory[EP_MAX_DEVICES][EP_NUM_COUNTERS * EP_COUNTER_STRIDE];

cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    const struct FakeStream *s = stream ? stream : &default_stream;
    *status = s->status;
    return s->error;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *number) {
    const struct FakeStream *s = stream ? stream : &default_stream;
    *number = s->number;
    return s->status == cudaStreamCaptureStatusNone ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}
int ep_counter_memory(uint64_t **out) {
    uint32_t device;
    if (memory_fails) return (int)cudaErrorInvalidValue;
    ep_current_device(&device);
    *out = memory[device];
    return 0;
}

static struct FakeStream stream_of(unsigned long long number) {
    const struct FakeStream s = {.number = number};
    return s;
}
/* The counter of a stream of a device, or NULL, also after an error. */
static uint64_t *counter_of(int device, struct FakeStream *stream) {
    uint64_t *counter = NULL;
    test_set_device(device);
    return ep_tile_counter(stream, &counter) ? NULL : counter;
}
static bool is_of(const uint64_t *counter, int device) {
    return counter >= memory[device] && counter < memory[device] + EP_NUM_COUNTERS * EP_COUNTER_STRIDE;
}

/* ---- tests ---- */

bool test_counters_of_streams(void) {
    struct FakeStream a = stream_of(7), b = stream_of(8), same_place = stream_of(7 + EP_NUM_COUNTERS);
    uint64_t *of_a = counter_of(20, &a);
    CHECK(NULL, is_of(of_a, 20) && counter_of(20, &a) == of_a);
    CHECK(NULL, is_of(counter_of(20, NULL), 20) && counter_of(20, NULL) == counter_of(20, NULL));
    struct FakeStream *others[] = {&b, &same_place, NULL};
    for (uint32_t i = 0; i < 3; i++) {
        const uint64_t *other = counter_of(20, others[i]);
        const int64_t distance = other - of_a;
        /* Counters of two streams are on two lines of the cache. */
        CHECK(NULL, is_of(other, 20) && llabs(distance) * (int64_t)sizeof *other >= (int64_t)EP_LINE);
    }
    CHECK(NULL, is_of(counter_of(21, &a), 21)); /* another device */
    /* The stream is destroyed, and a new one has its address. The work of the first may still run. */
    a.number = 9;
    CHECK(NULL, is_of(counter_of(20, &a), 20) && counter_of(20, &a) != of_a);
    a.number = 7;
    CHECK(NULL, counter_of(20, &a) == of_a);
    return true;
}

/* A captured launch runs when its graph is replayed, perhaps beside a launch of the same stream. */
bool test_counters_of_captured_launches(void) {
    struct FakeStream a = stream_of(3);
    uint64_t *before = counter_of(22, &a);
    a.status = cudaStreamCaptureStatusActive;
    CHECK(NULL, before && !counter_of(22, &a));
    a.status = cudaStreamCaptureStatusInvalidated;
    CHECK(NULL, !counter_of(22, &a));
    a.status = cudaStreamCaptureStatusNone;
    a.error = cudaErrorStreamCaptureImplicit; /* another stream is captured, and this is the default stream */
    CHECK(NULL, !counter_of(22, &a));
    a.error = cudaSuccess;
    CHECK(NULL, counter_of(22, &a) == before);
    return true;
}

/* No counter is taken from a stream, because its last launch may still run. */
bool test_counters_of_many_streams(void) {
    static uint64_t *counters[EP_NUM_COUNTERS];
    for (uint32_t i = 0; i < EP_NUM_COUNTERS; i++) {
        struct FakeStream s = stream_of(1000 + 3 * i);
        counters[i] = counter_of(23, &s);
        CHECK(NULL, is_of(counters[i], 23));
        for (uint32_t j = 0; j < i; j++) CHECK(NULL, counters[j] != counters[i]);
    }
    struct FakeStream late = stream_of(5);
    CHECK(NULL, !counter_of(23, &late));
    for (uint32_t i = 0; i < EP_NUM_COUNTERS; i++) {
        struct FakeStream s = stream_of(1000 + 3 * i);
        CHECK(NULL, counter_of(23, &s) == counters[i]);
    }
    return true;
}

enum { NUM_TEAM = 4, NUM_STREAMS = 100 };
typedef struct {
    pthread_barrier_t *start;
    uint64_t *counters[NUM_STREAMS];
} Asker;
static void *ask_for_all(void *arg) {
    Asker *a = (Asker *)arg;
    pthread_barrier_wait(a->start);
    for (uint32_t i = 0; i < NUM_STREAMS; i++) {
        struct FakeStream s =
            stream_of(i % 2 ? i : i * EP_NUM_COUNTERS); /* every second one has a place of its own */
        a->counters[i] = counter_of(24, &s);
    }
    return NULL;
}
/* Threads that ask for the same streams at once get the same counters. */
bool test_counters_of_threads(void) {
    static Asker askers[NUM_TEAM];
    pthread_barrier_t start;
    pthread_t threads[NUM_TEAM];
    pthread_barrier_init(&start, NULL, NUM_TEAM);
    for (uint32_t i = 0; i < NUM_TEAM; i++) {
        askers[i].start = &start;
        if (pthread_create(&threads[i], NULL, ask_for_all, &askers[i])) abort();
    }
    for (uint32_t i = 0; i < NUM_TEAM; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&start);
    for (uint32_t i = 0; i < NUM_STREAMS; i++) {
        CHECK(NULL, is_of(askers[0].counters[i], 24));
        for (uint32_t j = 0; j < NUM_TEAM; j++) CHECK(NULL, askers[j].counters[i] == askers[0].counters[i]);
        for (uint32_t j = 0; j < i; j++) CHECK(NULL, askers[0].counters[j] != askers[0].counters[i]);
    }
    return true;
}

bool test_counter_errors_are_not_cached(void) {
    struct FakeStream a = stream_of(3);
    uint64_t *counter;
    memory_fails = true;
    test_set_device(25);
    CHECK_CODE(NULL, (int)cudaErrorInvalidValue, ep_tile_counter(&a, &counter));
    CHECK(NULL, !counter);
    memory_fails = false;
    CHECK(NULL, is_of(counter_of(25, &a), 25));
    test_set_device(EP_MAX_DEVICES);
    CHECK_CODE(NULL, (int)cudaErrorInvalidDevice, ep_tile_counter(&a, &counter));
    return true;
}
