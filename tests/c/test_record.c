/* test_record.c - the flight record: its file on a file system that does not answer, and the texts of
 * calls. */
#include <fcntl.h>
#include <stdarg.h>

#include "harness.h"
#include "runtime/flight_record.h"

/* record_file.c calls this function instead of open: run_c_tests.py defines a macro. It blocks while the test
 * says so. */
static atomic_bool is_stuck;
int test_open(const char *path, int flags, ...);
int test_open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    const mode_t mode = va_arg(args, mode_t);
    va_end(args);
    double until = seconds_now() + long_timeout_s;
    while (atomic_load(&is_stuck) && seconds_now() < until) usleep(1000);
    return open(path, flags, mode);
}

/* record_file.c calls this function instead of free. It frees nothing but the job that the caller and the
 * writer share. */
static atomic_uint num_freed;
void test_free(void *memory);
void test_free(void *memory) {
    atomic_fetch_add(&num_freed, 1);
    free(memory);
}
static bool is_freed(uint32_t num) {
    double until = seconds_now() + long_timeout_s;
    while (atomic_load(&num_freed) < num && seconds_now() < until) usleep(1000);
    return atomic_load(&num_freed) == num;
}

/* Wait until the file has exactly this text. */
static bool is_written(const char *path, const char *text) {
    char got[2 * EP_PAGE_BYTES];
    double until = seconds_now() + long_timeout_s;
    for (; seconds_now() < until; usleep(1000)) {
        FILE *file = fopen(path, "re");
        if (!file) continue;
        size_t n = fread(got, 1, sizeof got, file);
        fclose(file);
        if (n == strlen(text) && memcmp(got, text, n) == 0) return true;
    }
    return false;
}

/* The open of the file blocks until the record and the world have been released. Neither waits for it: the
 * page says that the file could not be written. When the file system answers, the file gets the page as it
 * was before that remark. The writer uses the job until then, and frees it after the write. */
bool test_record_of_stuck_file_system(void) {
    char folder[] = "/tmp/epmoe-test-XXXXXX", path[64], page[EP_PAGE_BYTES], again[EP_PAGE_BYTES],
         remark[192];
    EpWorld *worlds[1];
    const uint32_t num_before = atomic_load(&num_freed);
    Rank *me = NULL;
    CHECK(me, mkdtemp(folder));
    snprintf(path, sizeof path, "%s/epmoe-rank0-pid%d.txt", folder, (int)getpid());
    snprintf(remark, sizeof remark, "could not be written to %s: the file system did not answer in time\n",
             path);
    setenv("EPMOE_FLIGHT_RECORD", folder, 1);
    CHECK_CODE(me, 0, ep_world_create_threads(1, long_timeout_s, worlds));
    unsetenv("EPMOE_FLIGHT_RECORD");
    atomic_store(&is_stuck, true);
    ep_world_abort(worlds[0], EP_ETIMEOUT, 0, "because");
    CHECK_CODE(me, 0, ep_world_flight_record(worlds[0], page));
    CHECK_CODE(me, 0, ep_world_flight_record(worlds[0], again));
    ep_world_release(worlds[0]);
    CHECK(me, access(path, F_OK) != 0); /* the open is still blocked */
    CHECK(me, atomic_load(&num_freed) == num_before);
    CHECK(me, strcmp(page, again) == 0);
    char *at = strstr(page, remark);
    CHECK(me, at && strlen(at) == strlen(remark));
    snprintf(at, strlen(remark), "\n");
    atomic_store(&is_stuck, false);
    CHECK(me, is_written(path, page));
    CHECK(me, is_freed(num_before + 1));
    unlink(path);
    rmdir(folder);
    return true;
}

/* The page says of each call what it has: layer, buffer and tokens; heap; bytes; or the last all-gather. */
bool test_record_of_each_call(void) {
    static const struct {
        uint8_t what;
        const char *text;
    } calls[] = {
        {EP_OP_PLAN, "  plan #7 of layer 1 buffer 2, T 5: finished 3.0 ms before the end\n"},
        {EP_OP_LL_COMBINE, "  low-latency combine #7 of layer 1 buffer 2, T 5: finished "},
        {EP_OP_BARRIER, "  barrier #7 of layer 1 buffer 2: finished "},
        {EP_CALL_HEAP_BARRIER, "  heap barrier #7 of heap 1: finished "},
        {EP_CALL_ALL_GATHER, "  exchange #7 of 5 bytes: finished "},
        {EP_CALL_HEAP_CREATE, "  heap creation of 5 bytes (exchange #7): finished "},
        {EP_CALL_ALLOC, "  allocation of 5 bytes (exchange #7): finished "},
        {EP_CALL_FREE, "  free (exchange #7): finished "},
        {EP_CALL_WAIT, "  wait for a signal: finished "},
    };
    static EpRecord r;
    char page[EP_PAGE_BYTES];
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        r = (EpRecord){.num_ranks = 1, .end_ns = 9000000};
        r.ranks[0].has_records = true;
        r.ranks[0].records.num = 1;
        r.ranks[0].records.at[0] = (EpCallRecord){
            .step = 1, .seq = 7, .size = 5, .end_ns = 6000000, .what = calls[i].what, .of = 1, .buffer = 2};
        ep_record_page(&r, page);
        if (!strstr(page, calls[i].text)) fprintf(stderr, "no '%s' in\n%s", calls[i].text, page);
        CHECK(NULL, strstr(page, calls[i].text));
    }
    return true;
}

/* Ranks in different dtypes made different calls. A rank that propagates an error may not know the dtype. */
bool test_record_of_dtypes(void) {
    static EpRecord r;
    char page[EP_PAGE_BYTES];
    for (int has_failed = 0; has_failed < 2; has_failed++) {
        r = (EpRecord){.num_ranks = 3, .end_ns = 9000000, .end_code = EP_ETIMEOUT, .end_rank = 2};
        for (int w = 0; w < 3; w++) {
            r.ranks[w].has_records = true;
            r.ranks[w].records.num = 1;
            r.ranks[w].records.at[0] = (EpCallRecord){.step = 1,
                                                      .end_ns = 1,
                                                      .what = EP_OP_DISPATCH,
                                                      .dtype = w == 1 ? EP_IN_LAYER_DTYPE : EP_IN_FP8};
        }
        r.ranks[1].records.at[0].code = has_failed ? EP_EINVAL : 0;
        ep_record_page(&r, page);
        const char *text = has_failed
                               ? "culprit: rank 2, for which another rank waited"
                               : "culprit: rank 1 called dispatch as operation 1, where ranks 0, 2 called "
                                 "dispatch in FP8\n";
        if (!strstr(page, text)) fprintf(stderr, "no '%s' in\n%s", text, page);
        CHECK(NULL, strstr(page, text) == page);
    }
    return true;
}

/* An error about two calls that do not meet names them: with their heap or their layer, if they have one. */
bool test_names_of_all_gathers(void) {
    static const struct {
        uint32_t what;
        const char *text;
    } calls[] = {
        {EP_CALL_NOTHING, "nothing"},
        {EP_CALL_ALL_GATHER, "exchange"},
        {EP_CALL_HEAP_CREATE, "heap creation"},
        {EP_CALL_LAYER_AGREE, "agreement on a layer"},
        {EP_CALL_ALLOC, "allocation (heap 3)"},
        {EP_CALL_LAYER_CREATE, "layer creation (heap 3)"},
        {EP_CALL_LAYER_CLOSE, "layer close (layer 3)"},
        {EP_CALL_CLOSE, "world close"},
        {EP_NUM_CALLS, "nothing"},
    };
    char text[64];
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        ep_about_name(calls[i].what << 16 | 3, text, sizeof text);
        CHECK(NULL, strcmp(text, calls[i].text) == 0);
    }
    return true;
}
