/* main.c - runs the C tests of the CPU side of epmoe, and prints one line for each test.
 *
 * Usage: [-s seed] [-n percentage of the usual steps] [-t timeout in seconds] [part of a test's name ...]
 */
#include <signal.h>

#include "harness.h"

static const struct {
    const char *name;
    bool (*run)(void);
    /* The test races on purpose, or it starts processes that ThreadSanitizer cannot join. */
    bool not_tsan;
} tests[] = {
    {"steps_local", test_steps_local, false},
    {"steps_scatter", test_steps_scatter, false},
    {"steps_gather", test_steps_gather, false},
    {"steps_large", test_steps_large, false},
    {"buffers", test_buffers, false},
    {"threads_of_a_rank", test_threads_of_a_rank, false},
    {"calls_beside_operations", test_calls_beside_operations, false},
    {"unordered_calls_of_threads", test_unordered_calls_of_threads, false},
    {"close_beside_operations", test_close_beside_operations, false},
    {"plan_reuse", test_plan_reuse, false},
    {"scatter_indices", test_scatter_indices, false},
    {"epochs", test_epochs, false},
    {"ll_steps", test_ll_steps, false},
    {"ll_buffers", test_ll_buffers, false},
    {"ll_epochs", test_ll_epochs, false},
    {"ll_error_propagation", test_ll_error_propagation, false},
    {"ll_leave", test_ll_leave, false},
    {"ll_propagated_error_clears_slots", test_ll_propagated_error_clears_slots, false},
    {"heap_alloc", test_heap_alloc, false},
    {"dropped_layers", test_dropped_layers, false},
    {"allocator", test_allocator, false},
    {"dtypes", test_dtypes, false},
    {"word_names", test_word_names, false},
    {"op_names", test_op_names, false},
    {"text_of_missing_rows", test_text_of_missing_rows, false},
    {"room_follows_the_rows", test_room_follows_the_rows, false},
    {"room_that_is_kept_fits", test_room_that_is_kept_fits, false},
    {"room_of_calls_that_differ", test_room_of_calls_that_differ, false},
    {"room_without_memory", test_room_without_memory, false},
    {"room_of_many_weights", test_room_of_many_weights, false},
    {"room_in_a_forked_child", test_room_in_a_forked_child, false},
    {"room_ends_at_the_capacity", test_room_ends_at_the_capacity, false},
    {"quantize_activations", test_quantize_activations, false},
    {"quantize_functions", test_quantize_functions, false},
    {"quantize_refuses_numbers", test_quantize_refuses_numbers, false},
    {"ll_smem_bytes", test_ll_smem_bytes, false},
    {"slot_bytes", test_slot_bytes, false},
    {"available_memory", test_available_memory, false},
    {"memory_of_deep_group", test_memory_of_deep_group, false},
    {"sharing_needs_permission", test_sharing_needs_permission, false},
    {"sharing_counts_memory", test_sharing_counts_memory, false},
    {"sharing_divides_sms", test_sharing_divides_sms, false},
    {"heap_huge", test_heap_huge, false},
    {"layer_exceeds_heap", test_layer_exceeds_heap, false},
    {"heap_put_get_signal", test_heap_put_get_signal, false},
    {"heap_create", test_heap_create, false},
    {"heap_full", test_heap_full, false},
    {"interrupt", test_interrupt, false},
    {"alloc_fails_on_one_rank", test_alloc_fails_on_one_rank, false},
    {"device", test_device, false},
    {"close_during_barrier", test_close_during_barrier, false},
    {"unsent_signal_on_gpu", test_unsent_signal_on_gpu, false},
    {"stuck_with_equal_calls", test_stuck_with_equal_calls, false},
    {"stuck_with_different_calls", test_stuck_with_different_calls, false},
    {"abort_during_heap_create", test_abort_during_heap_create, false},
    {"calls_after_close", test_calls_after_close, false},
    {"world_release_callbacks", test_world_release_callbacks, false},
    {"plan_rejects_bad_index", test_plan_rejects_bad_index, false},
    {"plan_rejects_overflow", test_plan_rejects_overflow, false},
    {"plan_rejects_bad_scatter", test_plan_rejects_bad_scatter, false},
    {"wrong_argument_on_one_rank", test_wrong_argument_on_one_rank, false},
    {"combine_after_failed_dispatch", test_combine_after_failed_dispatch, false},
    {"different_calls_fail", test_different_calls_fail, false},
    {"different_configs_fail", test_different_configs_fail, false},
    {"missing_rank_times_out", test_missing_rank_times_out, false},
    {"rank_leaves", test_rank_leaves, false},
    {"rank_aborts", test_rank_aborts, false},
    {"all_gather", test_all_gather, false},
    {"unsent_message", test_unsent_message, false},
    {"too_few_rows", test_too_few_rows, false},
    {"wrong_slot_of_peer", test_wrong_slot_of_peer, false},
    {"hostile_peer", test_hostile_peer, true},
    {"wire_last_messages", test_wire_last_messages, false},
    {"wire_call_records", test_wire_call_records, false},
    {"wire_frames", test_wire_frames, false},
    {"bootstrap_in_flood", test_bootstrap_in_flood, false},
    {"bootstrap_answers", test_bootstrap_answers, false},
    {"bootstrap_full_queue", test_bootstrap_full_queue, false},
    {"fork_during_creation", test_fork_during_creation, false},
    {"record_of_stuck_file_system", test_record_of_stuck_file_system, false},
    {"record_of_each_call", test_record_of_each_call, false},
    {"record_of_dtypes", test_record_of_dtypes, false},
    {"names_of_all_gathers", test_names_of_all_gathers, false},
    {"wire_connections", test_wire_connections, false},
    {"wire_another_user", test_wire_another_user, false},
    {"wire_descriptors", test_wire_descriptors, false},
    {"import_rejects_unsafe_memory", test_import_rejects_unsafe_memory, false},
    {"launch_again", test_launch_again, false},
    {"launch_errors_are_not_cached", test_launch_errors_are_not_cached, false},
    {"launch_replaces_old_shapes", test_launch_replaces_old_shapes, false},
    {"launch_capabilities", test_launch_capabilities, false},
    {"launch_threads", test_launch_threads, false},
    {"counters_of_streams", test_counters_of_streams, false},
    {"counters_of_captured_launches", test_counters_of_captured_launches, false},
    {"counters_of_many_streams", test_counters_of_many_streams, false},
    {"counters_of_threads", test_counters_of_threads, false},
    {"counter_errors_are_not_cached", test_counter_errors_are_not_cached, false},
    {"launch_order_streams", test_launch_order_streams, false},
    {"launch_order_graphs", test_launch_order_graphs, false},
    {"guard_makes_no_context", test_guard_makes_no_context, false},
    {"deferred_free_dropped_heap", test_deferred_free_dropped_heap, false},
    {"deferred_free_closed_heap", test_deferred_free_closed_heap, false},
    {"deferred_free_viewed_heap", test_deferred_free_viewed_heap, false},
    {"processes", test_processes, true},
    {"killed_process", test_killed_process, true},
    {"absent_process", test_absent_process, true},
};
static const char *running = "";

/* The checks of a test cannot detect a hang. So a timer calls this function. */
static void hang(int signal_number) {
    static const char text[] = "FAILED: hangs in ";
    (void)signal_number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0 ||
        write(STDERR_FILENO, running, strlen(running)) < 0 || write(STDERR_FILENO, "\n", 1) < 0)
        _exit(71);
    _exit(70);
}

int main(int argc, char **argv) {
    uint32_t num_passed = 0, num_failed = 0;
    int option = 1;
    for (; option + 1 < argc && argv[option][0] == '-'; option += 2) {
        const char *value = argv[option + 1];
        if (!strcmp(argv[option], "-s")) test_seed = strtoull(value, NULL, 10);
        if (!strcmp(argv[option], "-n")) test_scale = (uint32_t)strtoul(value, NULL, 10);
        if (!strcmp(argv[option], "-t")) long_timeout_s = strtod(value, NULL);
        if (!strcmp(argv[option], "--child")) return child_main((uint32_t)atoi(value), SCENARIO_NORMAL);
        if (!strcmp(argv[option], "--killed")) return child_main((uint32_t)atoi(value), SCENARIO_KILLED);
        if (!strcmp(argv[option], "--absent")) return child_main((uint32_t)atoi(value), SCENARIO_ABSENT);
    }
    signal(SIGALRM, hang);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool wanted = option == argc;
        for (int a = option; a < argc; a++) wanted = wanted || strstr(tests[i].name, argv[a]);
        if (!wanted || (HAVE_TSAN && tests[i].not_tsan)) continue;
        running = tests[i].name;
        double start = seconds_now();
        alarm(900); /* longer than any test takes on a busy machine */
        bool ok = tests[i].run();
        alarm(0);
        printf("%-30s %s %.2f s\n", running, ok ? "ok" : "FAILED", seconds_now() - start);
        fflush(stdout);
        if (ok) num_passed++;
        else num_failed++;
    }
    printf("%u passed, %u failed\n", num_passed, num_failed);
    return num_failed ? 1 : 0;
}
