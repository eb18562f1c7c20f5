/* test_processes.c - ranks that are processes, one of which is killed or never joins. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include "harness.h"

extern char **environ;

/* What the parent writes to a child's standard input, and what a child writes to its parent before. */
typedef struct {
    unsigned char nonce[EP_NONCE_BYTES], names[EP_MAX_RANKS][EP_NAME_BYTES];
} Meeting;
typedef struct {
    unsigned char nonce[EP_NONCE_BYTES], name[EP_NAME_BYTES];
} Hello;
enum { NUM_CHILDREN = 3 };

static void *killer(void *arg) {
    usleep(3000 + (useconds_t)(seconds_now() * 1e6) % 20000);
    kill(getpid(), SIGKILL);
    return arg;
}

/* One rank: a few steps; or steps without end, during which rank 1 is killed and the others must notice. */
static bool child_steps(Rank *me, Fate fate) {
    bool doomed = fate == FATE_KILLED;
    Rng rng = {test_seed};
    pthread_t thread;
    if (doomed && me->rank == 1 && pthread_create(&thread, NULL, killer, NULL)) return false;
    for (uint32_t i = 0; doomed || i < 6; i++) {
        Case c;
        case_make(&c, &me->setup->config.shape, &rng, (Route)(i % NUM_ROUTES),
                  0); /* equal in every process */
        Step st = step_open(me, &c, 0);
        for (uint32_t op = EP_OP_PLAN; op <= EP_OP_COMBINE; op++) {
            double start = seconds_now();
            int code = call_op(&st, op);
            if (!doomed || code == 0) {
                WANT(me, 0, code);
                TRY(op == EP_OP_PLAN       ? check_plan(&st)
                    : op == EP_OP_DISPATCH ? check_dispatch(&st)
                                           : check_combine(&st));
                continue;
            }
            WANT(me, EP_EPEERDIED, code);
            CHECK(me, strstr(ep_error_text(), "rank 1 died") && is_soon(start, 5));
            step_close(&st), case_free(&c);
            return true;
        }
        step_close(&st), case_free(&c);
    }
    return close_together(me);
}

int child_main(uint32_t rank, Fate fate) {
    EpWorldConfig config = {.rank = rank, .num_ranks = NUM_CHILDREN, .timeout_s = long_timeout_s};
    Setup setup = {.num_ranks = NUM_CHILDREN, .config = small_config(NUM_CHILDREN)};
    Rank me = {.setup = &setup, .rank = rank};
    Hello hello;
    Meeting meeting;
    WANT(&me, 0, ep_world_listen(&config.listen_fd, hello.name, hello.nonce));
    if (write(STDOUT_FILENO, &hello, sizeof hello) != sizeof hello ||
        read(STDIN_FILENO, &meeting, sizeof meeting) != sizeof meeting)
        return 1;
    memcpy(config.nonce, meeting.nonce, sizeof config.nonce);
    memcpy(config.names, meeting.names, sizeof config.names);
    if (fate == FATE_ABSENT && rank == 2) return 0;
    int code = ep_world_create(&config, &me.world), want = fate == FATE_ABSENT ? EP_EPEERDIED : 0;
    bool ok = code == want || complain(&me, __FILE__, __LINE__, "ep_world_create", code, want);
    if (fate == FATE_ABSENT)
        return ok && (strstr(ep_error_text(), "rank 2 died while the world was made") ||
                      complain(&me, __FILE__, __LINE__, ep_error_text(), 0, 0))
                   ? 0
                   : 1;
    ok = ok && open_heap_and_layer(&me) && child_steps(&me, fate);
    ep_layer_release(me.layer), ep_heap_release(me.heap), ep_world_release(me.world);
    return ok ? 0 : 1;
}

static bool run_processes(Fate fate) {
    int in[NUM_CHILDREN][2], out[NUM_CHILDREN][2], status;
    pid_t children[NUM_CHILDREN];
    Hello hello;
    Meeting meeting;
    char seed[32], rank[2] = "0";
    bool ok = true;
    memset(&meeting, 0, sizeof meeting);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)test_seed);
    for (uint32_t r = 0; r < NUM_CHILDREN; r++) {
        char *argv[] = {
            (char *)"main",
            (char *)"-s",
            seed,
            (char *)(fate == FATE_KILLED ? "--killed" : fate == FATE_ABSENT ? "--absent" : "--child"),
            rank,
            NULL};
        posix_spawn_file_actions_t files;
        rank[0] = (char)('0' + r);
        if (pipe2(in[r], O_CLOEXEC) || pipe2(out[r], O_CLOEXEC)) abort();
        posix_spawn_file_actions_init(&files);
        posix_spawn_file_actions_adddup2(&files, in[r][0], STDIN_FILENO);
        posix_spawn_file_actions_adddup2(&files, out[r][1], STDOUT_FILENO);
        if (posix_spawn(&children[r], "/proc/self/exe", &files, NULL, argv, environ)) abort();
        posix_spawn_file_actions_destroy(&files);
        close(in[r][0]), close(out[r][1]);
    }
    for (uint32_t r = 0; r < NUM_CHILDREN; r++) {
        ok = ok && read(out[r][0], &hello, sizeof hello) == sizeof hello;
        memcpy(meeting.names[r], hello.name, sizeof hello.name);
        if (r == 0) memcpy(meeting.nonce, hello.nonce, sizeof hello.nonce);
    }
    for (uint32_t r = 0; r < NUM_CHILDREN; r++) {
        ok = write(in[r][1], &meeting, sizeof meeting) == sizeof meeting && ok;
        close(in[r][1]), close(out[r][0]);
    }
    for (uint32_t r = 0; r < NUM_CHILDREN; r++) {
        while (waitpid(children[r], &status, 0) < 0 && errno == EINTR) continue;
        ok = ok && (fate == FATE_KILLED && r == 1 ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                                  : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    return ok;
}
bool test_processes(void) { return run_processes(FATE_LIVES); }
bool test_killed_process(void) { return run_processes(FATE_KILLED); }
bool test_absent_process(void) { return run_processes(FATE_ABSENT); }
