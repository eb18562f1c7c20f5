/* harness.h - ranks as threads, random cases with their expected results, and checks.
 *
 * A Case has the inputs of all ranks for one plan + dispatch + combine, and the expected results, computed
 * by brute force before the ranks start. So the ranks share nothing but the library while they run, and
 * synchronisation in the tests cannot hide a missing synchronisation in the library. */
#ifndef HARNESS_H
#define HARNESS_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "epmoe.h"

#if defined(__SANITIZE_THREAD__)
#define HAVE_TSAN 1
#else
#define HAVE_TSAN 0
#endif
#if defined(__SANITIZE_ADDRESS__)
#define HAVE_ASAN 1
#include <sanitizer/asan_interface.h>
#else
#define HAVE_ASAN 0
#define ASAN_POISON_MEMORY_REGION(at, num_bytes) ((void)(at), (void)(num_bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, num_bytes) ((void)(at), (void)(num_bytes))
#endif

/* ---- random numbers ---- */

typedef struct {
    uint64_t state;
} Rng;
uint64_t rng_next(Rng *rng);
uint32_t rng_below(Rng *rng, uint32_t n);

/* ---- ranks ---- */

typedef struct {
    uint32_t num_ranks;
    double timeout_s;     /* 0: long enough for any machine */
    EpLayerConfig config; /* num_buffers 0: the body creates its own layer, or none */
    uint64_t heap_bytes;  /* for the body, in addition to the layer */
    bool dies;            /* the world is expected to end: do not close it together */
    bool own_layer;       /* there is memory for the layer, but the body creates it */
} Setup;

typedef struct Rank Rank;
typedef bool Body(Rank *me, void *arg);
struct Rank {
    const Setup *setup;
    uint32_t rank;
    EpWorld *world;
    EpHeap *heap;
    EpLayer *layer;
    pthread_t thread;
    Body *body;
    void *arg;
    bool ok;
};

/* Run body on every rank, each in a thread. The memory of all ranks exists until all have returned. */
bool run_team(const Setup *setup, Body *body, void *arg);
bool open_heap_and_layer(Rank *me);
bool close_together(Rank *me);
int take_heap(Rank *me, uint64_t num_bytes, uint64_t *off);
/* Let the n-th anonymous mapping of this thread from now on fail, counted from 1. */
void test_fail_mmap(uint32_t n);

extern uint64_t test_seed;
extern double long_timeout_s;  /* of worlds in which no wait is expected to time out */
extern double short_timeout_s; /* of worlds in which a wait must time out; times slowness() */
extern uint32_t test_scale;    /* per cent of the usual number of steps */
double seconds_now(void);
/* How many times longer work takes now than on an idle machine; 1 on an idle machine, never less. */
double slowness(void);
/* Did less than limit_s pass since `begin`, on an idle machine?  Measures the slowness if it needs to. */
bool is_soon(double begin, double limit_s);
uint32_t scaled(uint32_t num_steps);
/* A layer with one buffer and two workers, for tests in which the shape does not matter. */
EpLayerConfig small_config(uint32_t num_ranks);

/* Report a failure, end the world so that the other ranks leave their waits, return false. */
bool complain(Rank *me, const char *file, int line, const char *what, int got, int want);
#define CHECK(me, cond)                                                    \
    do {                                                                   \
        if (!(cond)) return complain(me, __FILE__, __LINE__, #cond, 0, 0); \
    } while (0)
#define WANT(me, code, call)                                                            \
    do {                                                                                \
        int got_ = (call), want_ = (code);                                              \
        if (got_ != want_) return complain(me, __FILE__, __LINE__, #call, got_, want_); \
    } while (0)
#define TRY(call)                  \
    do {                           \
        if (!(call)) return false; \
    } while (0)

/* ---- cases ---- */

typedef enum {
    ROUTE_RANDOM,     /* drops and repetitions at random */
    ROUTE_REPEAT,     /* all choices of a token are often equal */
    ROUTE_SOME_EMPTY, /* no tokens on some ranks */
    ROUTE_HOT,        /* nearly all choices go to one expert */
    ROUTE_ONE_RANK,   /* all choices go to the experts of one rank */
    ROUTE_DROPPED,    /* all choices are dropped */
    ROUTE_FULL,       /* the largest number of tokens, none dropped */
    NUM_ROUTES
} Route;

typedef struct {
    uint32_t source, token, choice, expert;
} Origin;

typedef struct {
    EpShape shape;
    bool has_weight, has_row_weight, has_scalar, has_wide_index, has_scatter;
    uint32_t num_tokens[EP_MAX_RANKS], num_rows[EP_MAX_RANKS], slack;
    void *index[EP_MAX_RANKS];   /* [T][K], i64 with has_wide_index, else i32 */
    int32_t *scatter;            /* [sum of T][K] */
    void *x[EP_MAX_RANKS];       /* [T][H] */
    float *weight[EP_MAX_RANKS]; /* [T][K] */
    void *y[EP_MAX_RANKS];       /* [M + slack][H]: output of the experts */
    float *row_weight[EP_MAX_RANKS], *row_scalar[EP_MAX_RANKS]; /* [M + slack] */
    int32_t *expert[EP_MAX_RANKS];                              /* [T][K], -1: dropped */
    int32_t *row[EP_MAX_RANKS];      /* [T][K], row at the expert's rank, -1: dropped */
    Origin *origin[EP_MAX_RANKS];    /* [M] */
    void *out[EP_MAX_RANKS];         /* [T][H] */
    float *out_scalar[EP_MAX_RANKS]; /* [T][K] */
} Case;

/* options: any of these; all else is random. */
enum { WITH_SCATTER = 1, WITH_WEIGHTS = 2, WITHOUT_SLACK = 4 };
void case_make(Case *c, const EpShape *shape, Rng *rng, Route route, unsigned options);
void case_free(Case *c);
void *take(uint64_t num_bytes); /* exactly this many bytes, or the program ends */
/* Rows of the fullest rank, at least 1: the smallest capacity that suffices. */
uint32_t most_rows(const Case *cases, uint32_t num_cases);

/* What one rank has of a case while it runs. */
typedef struct {
    Rank *me;
    const Case *c;
    uint32_t buffer, num_tokens, num_rows;
    uint64_t plan_words, recv_words;
    int32_t *plan, *recv;
    void *rows, *out;
    float *row_weight, *out_scalar;
    bool requires_grad;
} Step;

EpTensor tensor1(const void *data, uint32_t dtype, int64_t d0);
EpTensor tensor2(const void *data, uint32_t dtype, int64_t d0, int64_t d1);
uint64_t row_bytes(const EpShape *s);
Step step_open(Rank *me, const Case *c, uint32_t buffer);
void step_close(Step *st);
/* Call the library with poisoned outputs. Returns the library's code. */
int call_plan(Step *st);
int call_dispatch(Step *st);
int call_combine(Step *st);
int call_op(Step *st, uint32_t op); /* one of these, or the barrier, by its EpOpKind */
/* Compare with the expected results. */
bool check_plan(const Step *st);
bool check_dispatch(const Step *st);
bool check_combine(const Step *st);
/* Dispatch and combine with the step's plan; or plan, dispatch and combine. Each result is checked. */
bool run_moves(Step *st);
bool run_step(Rank *me, const Case *c, uint32_t buffer);
/* Run body with num_cases cases as its argument. The first one has the largest number of tokens. */
bool with_cases(Body *body, EpLayerConfig config, bool dies, uint32_t num_cases);
bool all_bytes_are(const void *at, uint64_t num_bytes, unsigned char value);

/* ---- tests ---- */

bool test_steps_local(void);
bool test_steps_scatter(void);
bool test_steps_gather(void);
bool test_steps_large(void);
bool test_buffers(void);
bool test_reuse(void);
bool test_scatter(void);
bool test_epochs(void);
bool test_bad_index(void);
bool test_overflow(void);
bool test_bad_scatter(void);
bool test_refuse(void);
bool test_disagree(void);
bool test_configs(void);
bool test_stay_away(void);
bool test_leave(void);
bool test_abort(void);
bool test_exchange(void);
bool test_unsent(void);
bool test_heap_alloc(void);
bool test_allocator(void);
bool test_room(void);
bool test_sharing_is_refused(void);
bool test_sharing_counts_memory(void);
bool test_sharing_divides_sms(void);
bool test_heap_huge(void);
bool test_heap_layer(void);
bool test_heap_words(void);
bool test_closed(void);
bool test_world_release(void);
bool test_short_rows(void);
bool test_no_memory(void);
bool test_device(void);
bool test_leave_busy(void);
bool test_stuck_in_order(void);
bool test_stuck_out_of_order(void);
bool test_hostile(void);
bool test_wire_words(void);
bool test_wire_notes(void);
bool test_wire_frames(void);
bool test_wire_callers(void);
bool test_hostile_heap(void);
bool test_processes(void);
bool test_killed_process(void);
bool test_heap_create(void);
bool test_heap_full(void);
bool test_heap_abort(void);
bool test_absent_process(void);
/* The body of a process that is a rank: all ranks survive, or one is killed, or one never joins. */
typedef enum { FATE_LIVES, FATE_KILLED, FATE_ABSENT } Fate;
int child_main(uint32_t rank, Fate fate);

#endif /* HARNESS_H */
