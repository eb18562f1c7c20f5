/* test_record.c - the file of the flight record, on a file system that does not answer. */
#include <fcntl.h>
#include <stdarg.h>

#include "harness.h"

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
 * was before that remark. */
bool test_record_of_stuck_file_system(void) {
    char folder[] = "/tmp/epmoe-test-XXXXXX", path[64], page[EP_PAGE_BYTES], again[EP_PAGE_BYTES],
         remark[192];
    EpWorld *worlds[1];
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
    CHECK(me, strcmp(page, again) == 0);
    char *at = strstr(page, remark);
    CHECK(me, at && strlen(at) == strlen(remark));
    snprintf(at, strlen(remark), "\n");
    atomic_store(&is_stuck, false);
    CHECK(me, is_written(path, page));
    unlink(path);
    rmdir(folder);
    return true;
}
