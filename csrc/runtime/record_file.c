/* record_file.c - writes the page of the flight record to a file of its own.
 *
 * The folder may be shared with other users, and its file system may not answer. Therefore:
 *   (1) The file is always a new one (O_EXCL). So no link is followed, and no pipe, device or file of another
 *       user is opened. If the name exists, the next name with a number is tried.
 *   (2) A thread of its own opens and writes the file, because an open or a write on a stuck file system
 *       cannot be interrupted. The caller waits for it for a bounded time.
 *
 * Exports ep_record_write (flight_record.h). */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/flight_record.h"
#include "runtime/thread.h"

/* The caller waits this many times for this long. Each wait that a suspended process misses counts once, so
 * suspended time does not use up the limit. */
#define NUM_WAITS 20u
#define WAIT_NS 100000000u
/* Number of names that are tried. More files of one rank and process mean that the names were planted. */
#define NUM_NAMES 1000u

/* Two threads share a job: the caller and the writer. The last one to release it frees it. So the caller may
 * leave a writer that is stuck. */
typedef struct {
    atomic_int num_owners;
    char stem[4096]; /* the path without number and suffix */
    char page[EP_PAGE_BYTES];
    pthread_mutex_t lock; /* guards the two fields below */
    pthread_cond_t changed;
    bool is_done;
    int error; /* an errno, or 0 */
} Job;

static void release(Job *job) {
    if (atomic_fetch_sub(&job->num_owners, 1) != 1) return;
    pthread_cond_destroy(&job->changed);
    pthread_mutex_destroy(&job->lock);
    free(job);
}

/* Open a new file. O_EXCL alone refuses links and existing files; O_NOFOLLOW and O_NONBLOCK repeat it for
 * file systems on which O_EXCL does not work. Returns the descriptor, or -1 and errno. */
static int open_new(const char *stem) {
    char path[sizeof((Job *)0)->stem + 16];
    int fd = -1;
    for (uint32_t i = 1; i <= NUM_NAMES && fd < 0; i++) {
        if (i == 1) snprintf(path, sizeof path, "%s.txt", stem);
        else snprintf(path, sizeof path, "%s-%u.txt", stem, i);
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
        if (fd < 0 && errno != EEXIST) return -1;
    }
    return fd;
}

/* Write the page and a line end. Returns 0, or an errno. */
static int write_page(const char *stem, char *page) {
    int e = 0, fd = open_new(stem);
    if (fd < 0) return errno;
    size_t num_left = strlen(page) + 1;
    page[num_left - 1] = '\n';
    while (num_left && !e) {
        ssize_t n = write(fd, page, num_left);
        if (n == 0) e = EIO;
        if (n < 0 && errno != EINTR) e = errno;
        if (n > 0) {
            page += n;
            num_left -= (size_t)n;
        }
    }
    if (close(fd) && !e) e = errno; /* some file systems report a full disk only here */
    return e;
}

static void *write_main(void *argument) {
    Job *job = (Job *)argument;
    int e = write_page(job->stem, job->page);
    pthread_mutex_lock(&job->lock);
    job->error = e;
    job->is_done = true;
    pthread_cond_signal(&job->changed);
    pthread_mutex_unlock(&job->lock);
    release(job);
    return NULL;
}

/* Wait until the writer has finished. False: it has not finished within the limit. */
static bool await_writer(Job *job, int *error) {
    pthread_mutex_lock(&job->lock);
    for (uint32_t i = 0; i < NUM_WAITS && !job->is_done; i++) {
        uint64_t until = ep_now_ns() + WAIT_NS;
        struct timespec t = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
        while (!job->is_done && pthread_cond_timedwait(&job->changed, &job->lock, &t) != ETIMEDOUT) {
        }
    }
    bool is_done = job->is_done;
    *error = job->error;
    pthread_mutex_unlock(&job->lock);
    return is_done;
}

static Job *make_job(const char *folder, uint32_t rank, const char *page) {
    Job *job = (Job *)calloc(1, sizeof *job);
    if (!job) return NULL;
    atomic_init(&job->num_owners, 2);
    pthread_mutex_init(&job->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&job->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    snprintf(job->page, sizeof job->page, "%s", page);
    snprintf(job->stem, sizeof job->stem, "%s/epmoe-rank%u-pid%d", folder, rank, (int)getpid());
    return job;
}

void ep_record_write(const char *folder, uint32_t rank, char page[EP_PAGE_BYTES]) {
    const char *why = NULL;
    int e = ENOMEM;
    pthread_t thread;
    const bool fits = strlen(folder) < sizeof((Job *)0)->stem - 64;
    Job *job = fits ? make_job(folder, rank, page) : NULL;
    if (!fits) e = ENAMETOOLONG;
    if (job) {
        e = ep_thread_start(&thread, write_main, job, "epmoe record");
        if (e) release(job); /* the part of the writer, which does not exist */
        else pthread_detach(thread);
        if (!e && !await_writer(job, &e)) why = "the file system did not answer in time";
        release(job);
    }
    if (!e && !why) return;
    size_t n = strlen(page);
    snprintf(page + n, EP_PAGE_BYTES - n, "could not be written to %s/epmoe-rank%u-pid%d.txt: %s\n", folder,
             rank, (int)getpid(), why ? why : strerror(e));
}
