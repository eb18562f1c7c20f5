/* harness.h - ranks as threads, random cases with their expected results, and checks.
 *
 * A Case has the inputs of all ranks for one plan + dispatch + combine, and the expected results. The
 * harness computes these results by brute force before the ranks start. So the ranks share only the
 * library while they run, and synchronisation in the tests cannot hide a missing synchronisation in the
 * library. */
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
    double timeout_s;     /* 0: a limit that is long enough for any machine */
    EpLayerConfig config; /* num_buffers 0: run_team creates no layer */
    uint64_t heap_bytes;  /* heap memory for the body, in addition to the layer */
    bool world_ends;      /* the test ends the world, so run_team does not close it */
    bool own_layer;       /* the heap has memory for the layer, but the body creates the layer */
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

/* Run body on every rank, one thread for each rank. The memory of all ranks exists until all threads have
 * returned. Returns true if the body returned true on every rank. */
bool run_team(const Setup *setup, Body *body, void *arg);
bool open_heap_and_layer(Rank *me);
bool close_together(Rank *me);
int alloc_heap(Rank *me, uint64_t num_bytes, uint64_t *off);
/* Make the n-th next anonymous mapping of this thread fail. The count begins with 1. */
void test_fail_mmap(uint32_t n);
/* To this thread, sockets of this process belong to another user from now on. */
void test_be_another_user(void);

extern uint64_t test_seed;
extern double long_timeout_s;  /* for worlds in which no wait is expected to time out */
extern double short_timeout_s; /* for worlds in which a wait must time out; multiply it by slowness() */
extern uint32_t test_scale;    /* percentage of the usual number of steps */
double seconds_now(void);
/* How many times longer work takes now than on an idle machine; at least 1. */
double slowness(void);
/* Whether less than limit_s has passed since `begin`. On a busy machine the limit is multiplied by
 * slowness(). */
bool is_within(double begin, double limit_s);
uint32_t scaled(uint32_t num_steps);
/* The configuration of a layer with one buffer and two workers, for tests that need no particular shape. */
EpLayerConfig small_config(uint32_t num_ranks);

/* Print the failure, end the world so that the waits of the other ranks end, and return false. */
bool report_failure(Rank *me, const char *file, int line, const char *what, int got, int want);
#define CHECK(me, cond)                                                          \
    do {                                                                         \
        if (!(cond)) return report_failure(me, __FILE__, __LINE__, #cond, 0, 0); \
    } while (0)
#define CHECK_CODE(me, code, call)                                                            \
    do {                                                                                      \
        int got_ = (call), want_ = (code);                                                    \
        if (got_ != want_) return report_failure(me, __FILE__, __LINE__, #call, got_, want_); \
    } while (0)
#define TRY(call)                  \
    do {                           \
        if (!(call)) return false; \
    } while (0)

/* ---- cases ---- */

typedef enum {
    ROUTE_RANDOM,     /* random experts, some choices dropped, some repeated */
    ROUTE_REPEAT,     /* the choices of a token are often equal */
    ROUTE_SOME_EMPTY, /* some ranks have no tokens */
    ROUTE_HOT,        /* nearly all choices go to one expert */
    ROUTE_ONE_RANK,   /* all choices go to the experts of one rank */
    ROUTE_DROPPED,    /* all choices are dropped */
    ROUTE_FULL,       /* every rank has the largest number of tokens, and no choice is dropped */
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

/* options: a sum of these values. Every property that is not selected is random. */
enum { WITH_SCATTER = 1, WITH_WEIGHTS = 2, WITHOUT_SLACK = 4 };
void case_make(Case *c, const EpShape *shape, Rng *rng, Route route, unsigned options);
void case_free(Case *c);
/* Allocate exactly num_bytes bytes. Ends the program if there is no memory. */
void *alloc_exact(uint64_t num_bytes);
/* A number of a row, in one of three dtypes, and f rounded to the nearest. */
float load_number(const void *at, uint32_t dtype, uint64_t i);
void store_number(void *at, uint32_t dtype, uint64_t i, float f);
void *random_rows(Rng *rng, const EpShape *s, uint64_t num_rows);
/* The smallest sufficient capacity: the largest number of rows of any rank, at least 1. */
uint32_t most_rows(const Case *cases, uint32_t num_cases);

/* The state of one rank while it runs a case. */
typedef struct {
    Rank *me;
    const Case *c;
    uint32_t buffer, num_tokens, num_rows;
    uint64_t plan_words, recv_words;
    int32_t *plan, *recv, *tag, *row_tag;
    void *rows, *out;
    float *row_weight, *out_scalar;
    bool requires_grad;
} Step;

/* The tag of a token: some ranks give none, which is 0. */
bool has_tags(uint32_t rank);
int32_t tag_of(uint32_t rank, uint32_t token);
EpTensor tensor1(const void *data, uint32_t dtype, int64_t d0);
EpTensor tensor2(const void *data, uint32_t dtype, int64_t d0, int64_t d1);
uint64_t row_bytes(const EpShape *s);
Step step_open(Rank *me, const Case *c, uint32_t buffer);
void step_close(Step *st);
/* Call the library with poisoned outputs. Returns the library's code. */
int call_plan(Step *st);
int call_dispatch(Step *st);
int call_combine(Step *st);
int call_op(Step *st, uint32_t op); /* calls one of these, or the barrier; op is an EpOpKind */
/* Compare the outputs with the expected results. */
bool check_plan(const Step *st);
bool check_dispatch(const Step *st);
bool check_combine(const Step *st);
/* Run dispatch and combine with the plan of the step, and check each result. */
bool run_moves(Step *st);
/* Run plan, dispatch and combine of a case, and check each result. */
bool run_step(Rank *me, const Case *c, uint32_t buffer);
/* Run body with num_cases cases as its argument. Case 0 has the largest number of tokens. */
bool with_cases(Body *body, EpLayerConfig config, bool world_ends, uint32_t num_cases);
bool with_cases_of(const Setup *setup, Body *body, uint32_t num_cases);
bool all_bytes_are(const void *at, uint64_t num_bytes, unsigned char value);

/* Set the current device of this thread in the fake runtime of CUDA. */
void test_set_device(int device);
/* Of the fake driver: put the function for contexts with this name into *function, or return false. */
bool test_find_context_function(const char *name, unsigned version, void **function);

/* ---- tests ---- */

bool test_steps_local(void);
bool test_steps_scatter(void);
bool test_steps_gather(void);
bool test_steps_large(void);
bool test_buffers(void);
bool test_threads_of_a_rank(void);
bool test_calls_beside_operations(void);
bool test_unordered_calls_of_threads(void);
bool test_close_beside_operations(void);
bool test_plan_reuse(void);
bool test_scatter_indices(void);
bool test_epochs(void);
bool test_ll_steps(void);
bool test_ll_buffers(void);
bool test_ll_epochs(void);
bool test_ll_error_propagation(void);
bool test_ll_leave(void);
bool test_ll_propagated_error_clears_slots(void);
bool test_plan_rejects_bad_index(void);
bool test_plan_rejects_overflow(void);
bool test_plan_rejects_bad_scatter(void);
bool test_wrong_argument_on_one_rank(void);
bool test_combine_after_failed_dispatch(void);
bool test_different_calls_fail(void);
bool test_different_configs_fail(void);
bool test_missing_rank_times_out(void);
bool test_rank_leaves(void);
bool test_rank_aborts(void);
bool test_all_gather(void);
bool test_unsent_message(void);
bool test_heap_alloc(void);
bool test_dropped_layers(void);
bool test_allocator(void);
bool test_dtypes(void);
bool test_word_names(void);
bool test_op_names(void);
bool test_text_of_missing_rows(void);
bool test_room_follows_the_rows(void);
bool test_room_that_is_kept_fits(void);
bool test_room_of_calls_that_differ(void);
bool test_room_without_memory(void);
bool test_room_of_many_weights(void);
bool test_room_in_a_forked_child(void);
bool test_room_ends_at_the_capacity(void);
bool test_quantize_activations(void);
bool test_quantize_functions(void);
bool test_quantize_refuses_numbers(void);
bool test_available_memory(void);
bool test_memory_of_deep_group(void);
bool test_ll_smem_bytes(void);
bool test_slot_bytes(void);
bool test_sharing_needs_permission(void);
bool test_sharing_counts_memory(void);
bool test_sharing_divides_sms(void);
bool test_heap_huge(void);
bool test_layer_exceeds_heap(void);
bool test_heap_put_get_signal(void);
bool test_calls_after_close(void);
bool test_world_release_callbacks(void);
bool test_too_few_rows(void);
bool test_wrong_slot_of_peer(void);
bool test_alloc_fails_on_one_rank(void);
bool test_device(void);
bool test_close_during_barrier(void);
bool test_unsent_signal_on_gpu(void);
bool test_stuck_with_equal_calls(void);
bool test_stuck_with_different_calls(void);
bool test_hostile_peer(void);
bool test_wire_last_messages(void);
bool test_wire_call_records(void);
bool test_wire_frames(void);
bool test_bootstrap_in_flood(void);
bool test_bootstrap_answers(void);
bool test_bootstrap_full_queue(void);
bool test_fork_during_creation(void);
bool test_record_of_stuck_file_system(void);
bool test_record_of_each_call(void);
bool test_record_of_dtypes(void);
bool test_names_of_all_gathers(void);
bool test_wire_connections(void);
bool test_wire_another_user(void);
bool test_wire_descriptors(void);
bool test_import_rejects_unsafe_memory(void);
bool test_processes(void);
bool test_killed_process(void);
bool test_heap_create(void);
bool test_heap_full(void);
bool test_interrupt(void);
bool test_abort_during_heap_create(void);
bool test_absent_process(void);
bool test_counters_of_streams(void);
bool test_counters_of_captured_launches(void);
bool test_counters_of_many_streams(void);
bool test_counters_of_threads(void);
bool test_counter_errors_are_not_cached(void);
bool test_launch_order_streams(void);
bool test_launch_order_graphs(void);
bool test_guard_makes_no_context(void);
bool test_deferred_free_dropped_heap(void);
bool test_deferred_free_closed_heap(void);
bool test_deferred_free_viewed_heap(void);
bool test_launch_again(void);
bool test_launch_errors_are_not_cached(void);
bool test_launch_replaces_old_shapes(void);
bool test_launch_capabilities(void);
bool test_launch_threads(void);
/* The main function of a process that is a rank. NORMAL: all ranks survive. KILLED: rank 1 is killed.
 * ABSENT: rank 2 never joins the world. */
typedef enum { SCENARIO_NORMAL, SCENARIO_KILLED, SCENARIO_ABSENT } Scenario;
int child_main(uint32_t rank, Scenario scenario);

#endif /* HARNESS_H */
