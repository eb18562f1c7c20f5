/* main.c - the CPU side of epmoe under test.
 *
 *  [-s seed] [-n per cent of the usual steps] [-t timeout in seconds] [part of a test's name ...]
 */
#include <signal.h>

#include "harness.h"

static const struct {
    const char *name;
    bool (*run)(void);
    bool not_tsan; /* it races on purpose, or runs in processes that the thread sanitizer cannot join */
} tests[] = {
    {"steps_local", test_steps_local, false},
    {"steps_scatter", test_steps_scatter, false},
    {"steps_gather", test_steps_gather, false},
    {"steps_large", test_steps_large, false},
    {"buffers", test_buffers, false},
    {"reuse", test_reuse, false},
    {"full_scatter", test_scatter, false},
    {"epochs", test_epochs, false},
    {"heap_alloc", test_heap_alloc, false},
    {"allocator", test_allocator, false},
    {"room", test_room, false},
    {"sharing_is_refused", test_sharing_is_refused, false},
    {"sharing_counts_memory", test_sharing_counts_memory, false},
    {"sharing_divides_sms", test_sharing_divides_sms, false},
    {"heap_huge", test_heap_huge, false},
    {"heap_layer", test_heap_layer, false},
    {"heap_words", test_heap_words, false},
    {"heap_create", test_heap_create, false},
    {"heap_full", test_heap_full, false},
    {"no_memory", test_no_memory, false},
    {"device", test_device, false},
    {"leave_busy", test_leave_busy, false},
    {"stuck_in_order", test_stuck_in_order, false},
    {"stuck_out_of_order", test_stuck_out_of_order, false},
    {"heap_abort", test_heap_abort, false},
    {"closed", test_closed, false},
    {"world_release", test_world_release, false},
    {"bad_index", test_bad_index, false},
    {"overflow", test_overflow, false},
    {"bad_scatter", test_bad_scatter, false},
    {"refuse", test_refuse, false},
    {"disagree", test_disagree, false},
    {"configs", test_configs, false},
    {"stay_away", test_stay_away, false},
    {"leave", test_leave, false},
    {"abort", test_abort, false},
    {"exchange", test_exchange, false},
    {"unsent", test_unsent, false},
    {"short_rows", test_short_rows, false},
    {"hostile", test_hostile, true},
    {"wire_words", test_wire_words, false},
    {"wire_notes", test_wire_notes, false},
    {"wire_frames", test_wire_frames, false},
    {"wire_callers", test_wire_callers, false},
    {"strange_heap", test_hostile_heap, false},
    {"processes", test_processes, true},
    {"killed_process", test_killed_process, true},
    {"absent_process", test_absent_process, true},
};
static const char *running = "";

/* No check detects a hang, so a timer does. */
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
        if (!strcmp(argv[option], "--child")) return child_main((uint32_t)atoi(value), FATE_LIVES);
        if (!strcmp(argv[option], "--killed")) return child_main((uint32_t)atoi(value), FATE_KILLED);
        if (!strcmp(argv[option], "--absent")) return child_main((uint32_t)atoi(value), FATE_ABSENT);
    }
    signal(SIGALRM, hang);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool wanted = option == argc;
        for (int a = option; a < argc; a++) wanted = wanted || strstr(tests[i].name, argv[a]);
        if (!wanted || (HAVE_TSAN && tests[i].not_tsan)) continue;
        running = tests[i].name;
        double start = seconds_now();
        alarm(900); /* longer than any test takes on the busiest machine */
        bool ok = tests[i].run();
        alarm(0);
        printf("%-16s %s %.2f s\n", running, ok ? "ok" : "FAILED", seconds_now() - start);
        fflush(stdout);
        if (ok) num_passed++;
        else num_failed++;
    }
    printf("%u passed, %u failed\n", num_passed, num_failed);
    return num_failed ? 1 : 0;
}
