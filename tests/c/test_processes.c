/* test_processes.c - ranks as processes. One rank may be killed, or may never join the world. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include "harness.h"

extern char **environ;

/* Each child writes a Hello to its standard output. Then the parent writes the Bootstrap to the standard
 * input of each child. */
typedef struct {
    unsigned char nonce[EP_NONCE_BYTES], name[EP_NAME_BYTES];
} Hello;
typedef struct {
    unsigned char nonce[EP_NONCE_BYTES], names[EP_MAX_RANKS][EP_NAME_BYTES];
} Bootstrap;
enum { NUM_CHILDREN = 3 };

static void *kill_main(void *arg) {
    usleep(3000 + (useconds_t)(seconds_now() * 1e6) % 20000);
    kill(getpid(), SIGKILL);
    return arg;
}

/* The steps of one rank. In SCENARIO_KILLED, a thread of rank 1 kills its process, and the other ranks run
 * steps until they detect the death. */
static bool child_steps(Rank *me, Scenario scenario) {
    bool is_killed = scenario == SCENARIO_KILLED;
    Rng rng = {test_seed};
    pthread_t thread;
    if (is_killed && me->rank == 1 && pthread_create(&thread, NULL, kill_main, NULL)) return false;
    for (uint32_t i = 0; is_killed || i < 6; i++) {
        Case c;
        /* The case is equal in every process. */
        case_make(&c, &me->setup->config.shape, &rng, (Route)(i % NUM_ROUTES), 0);
        Step st = step_open(me, &c, 0);
        for (uint32_t op = EP_OP_PLAN; op <= EP_OP_COMBINE; op++) {
            double start = seconds_now();
            int code = call_op(&st, op);
            if (!is_killed || code == 0) {
                CHECK_CODE(me, 0, code);
                TRY(op == EP_OP_PLAN       ? check_plan(&st)
                    : op == EP_OP_DISPATCH ? check_dispatch(&st)
                                           : check_combine(&st));
                continue;
            }
            CHECK_CODE(me, EP_EPEERDIED, code);
            CHECK(me, strstr(ep_error_text(), "rank 1 died") && is_within(start, 5));
            step_close(&st);
            case_free(&c);
            return true;
        }
        step_close(&st);
        case_free(&c);
    }
    return close_together(me);
}

int child_main(uint32_t rank, Scenario scenario) {
    EpWorldConfig config = {.rank = rank, .num_ranks = NUM_CHILDREN, .timeout_s = long_timeout_s};
    Setup setup = {.num_ranks = NUM_CHILDREN, .config = small_config(NUM_CHILDREN)};
    Rank me = {.setup = &setup, .rank = rank};
    Hello hello;
    Bootstrap bootstrap;
    int code = ep_world_listen(&config.listen_fd, hello.name, hello.nonce);
    if (code) {
        report_failure(&me, __FILE__, __LINE__, "ep_world_listen", code, 0);
        return 1;
    }
    if (write(STDOUT_FILENO, &hello, sizeof hello) != sizeof hello ||
        read(STDIN_FILENO, &bootstrap, sizeof bootstrap) != sizeof bootstrap)
        return 1;
    memcpy(config.nonce, bootstrap.nonce, sizeof config.nonce);
    memcpy(config.names, bootstrap.names, sizeof config.names);
    if (scenario == SCENARIO_ABSENT && rank == 2) return 0;
    code = ep_world_create(&config, &me.world);
    int want = scenario == SCENARIO_ABSENT ? EP_EPEERDIED : 0;
    bool ok = code == want || report_failure(&me, __FILE__, __LINE__, "ep_world_create", code, want);
    if (scenario == SCENARIO_ABSENT)
        ok = ok && (strstr(ep_error_text(), "rank 2 died while the world was made") ||
                    report_failure(&me, __FILE__, __LINE__, ep_error_text(), 0, 0));
    else ok = ok && open_heap_and_layer(&me) && child_steps(&me, scenario);
    ep_layer_release(me.layer);
    ep_heap_release(me.heap);
    ep_world_release(me.world);
    return ok ? 0 : 1;
}

static bool run_processes(Scenario scenario) {
    int in[NUM_CHILDREN][2], out[NUM_CHILDREN][2], status;
    pid_t children[NUM_CHILDREN];
    Hello hello;
    Bootstrap bootstrap;
    char main_name[] = "main", seed_option[] = "-s", seed[32], rank[2] = "0", option[16];
    bool ok = true;
    memset(&bootstrap, 0, sizeof bootstrap);
    snprintf(option, sizeof option, "%s",
             scenario == SCENARIO_KILLED   ? "--killed"
             : scenario == SCENARIO_ABSENT ? "--absent"
                                           : "--child");
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)test_seed);
    for (uint32_t r = 0; r < NUM_CHILDREN; r++) {
        char *argv[] = {main_name, seed_option, seed, option, rank, NULL};
        posix_spawn_file_actions_t files;
        rank[0] = (char)('0' + r);
        if (pipe2(in[r], O_CLOEXEC) || pipe2(out[r], O_CLOEXEC)) abort();
        posix_spawn_file_actions_init(&files);
        posix_spawn_file_actions_adddup2(&files, in[r][0], STDIN_FILENO);
        posix_spawn_file_actions_adddup2(&files, out[r][1], STDOUT_FILENO);
        if (posix_spawn(&children[r], "/proc/self/exe", &files, NULL, argv, environ)) abort();
        posix_spawn_file_actions_destroy(&files);
        close(in[r][0]);
        close(out[r][1]);
    }
    for (uint32_t r = 0; r < NUM_CHILDREN; r++) {
        ok = ok && read(out[r][0], &hello, sizeof hello) == sizeof hello;
        memcpy(bootstrap.names[r], hello.name, sizeof hello.name);
        if (r == 0) memcpy(bootstrap.nonce, hello.nonce, sizeof hello.nonce);
    }
    for (uint32_t r = 0; r < NUM_CHILDREN; r++) {
        ok = write(in[r][1], &bootstrap, sizeof bootstrap) == sizeof bootstrap && ok;
        close(in[r][1]);
        close(out[r][0]);
    }
    for (uint32_t r = 0; r < NUM_CHILDREN; r++) {
        while (waitpid(children[r], &status, 0) < 0 && errno == EINTR) continue;
        ok = ok && (scenario == SCENARIO_KILLED && r == 1 ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                                          : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    return ok;
}
bool test_processes(void) { return run_processes(SCENARIO_NORMAL); }
bool test_killed_process(void) { return run_processes(SCENARIO_KILLED); }
bool test_absent_process(void) { return run_processes(SCENARIO_ABSENT); }
