/* test_hostile.c - memory safety: tensors that are too small, peers that write nonsense, and peers that
 * are killed while they run. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <sys/mman.h>
#include <sys/socket.h>

#include "backend.h"
#include "harness.h"
#include "record.h"
#include "wire.h"

extern char **environ;

/* Fewer rows than the plan has, or a plan of another number of tokens that happens to have the same length:
 * the rank refuses, all raise, nothing outside the tensors is touched, and the next step works.  What a dispatch that
 * failed has left is no rank's to bring home. */
static bool refused(Step *st, uint32_t bad) {
    const int want = st->me->rank == bad ? EP_EINVAL : EP_EPEER;
    WANT(st->me, want, call_combine(st));
    WANT(st->me, want, call_dispatch(st));
    WANT(st->me, st->me->rank == 0 ? EP_EINVAL : EP_EPEER, call_combine(st));
    return true;
}
static bool short_rows_body(Rank *me, void *arg) {
    const Case *c = (const Case *)arg;
    Step st = step_open(me, c, 0);
    uint64_t words, fewer_words;
    WANT(me, 0, call_plan(&st));
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t bad = i < 2 ? 1 : 0; /* the rank that is wrong */
        WANT(me, 0, call_dispatch(&st));
        if (me->rank == bad) st.num_rows = i % 2 ? 0 : c->num_rows[bad] - 1;
        TRY(refused(&st, bad));
        st.num_rows = c->num_rows[me->rank] + c->slack;
        WANT(me, me->rank == 0 ? EP_EINVAL : EP_EPEER, call_combine(&st));
    }
    WANT(me, 0, ep_layer_plan_words(me->layer, st.num_tokens, &words));
    WANT(me, 0, ep_layer_plan_words(me->layer, st.num_tokens - 1, &fewer_words));
    CHECK(me, words == fewer_words);
    WANT(me, 0, call_dispatch(&st));
    st.num_tokens -= me->rank == 1;
    TRY(refused(&st, 1));
    CHECK(me, me->rank != 0 || strstr(ep_error_text(), "has failed, or is not for these tensors: another T"));
    step_close(&st);
    return run_step(me, c, 0);
}
bool test_short_rows(void) {
    for (uint32_t mode = 0; mode < 3; mode++) {
        EpLayerConfig config = small_config(2);
        config.shape.combine_mode = mode;
        TRY(with_cases(short_rows_body, config, false, 1));
    }
    return true;
}

/* A hostile peer, played by a thread that scribbles over the words that peers write: with nonsense, and
 * with numbers that could be right.  Results are then wrong or the calls fail; but no byte outside the
 * tensors and the communication buffer is touched, and no call takes much longer than its timeout. */
typedef enum {
    ATTACK_STAGE,
    ATTACK_COUNTS,
    ATTACK_FLAGS,
    ATTACK_ENTER,
    ATTACK_HEADER,
    ATTACK_FLICKER,
    ATTACK_TOKENS,
    ATTACK_ALL,
    NUM_ATTACKS
} Attack;
typedef struct {
    Attack attack;
    uint64_t seed;
    const Case *cases;
    _Atomic bool over;
    unsigned char *victims[EP_MAX_RANKS];
    uint32_t num_ranks;
    EpCommLayout layout;
    EpShape shape;
} Hostile;

static void scribble(const Hostile *h, unsigned char *victim, Attack attack, Rng *rng) {
    const EpCommLayout *l = &h->layout;
    const uint64_t begin[] = {l->stage_off, l->counts_off, l->flag_off, l->enter_off, l->header_off};
    const uint64_t end[] = {l->num_bytes, l->flag_off, l->local_off, l->header_off, l->counts_off};
    uint64_t value = rng_next(rng), epoch = ep_ld_relaxed_gpu_u64((const uint64_t *)(victim + l->local_off)) + rng_below(rng, 3);
    EpHeader *headers = (EpHeader *)(victim + l->header_off) + rng_below(rng, 2) * h->num_ranks;
    uint32_t a = rng_below(rng, h->num_ranks), b = rng_below(rng, h->num_ranks), small = rng_below(rng, 64), field = rng_below(rng, 13);
    if (attack == ATTACK_FLICKER) { /* a word of a header that changes while it is judged */
        uint32_t *word = &headers[a].abi + field, right = __atomic_load_n(word, __ATOMIC_RELAXED);
        for (uint32_t i = 0; i < 64; i++) __atomic_store_n(word, i % 2 ? right : right - 1, __ATOMIC_RELAXED);
        return;
    }
    if (attack == ATTACK_TOKENS) { /* what peers say of their tokens: wrong for each, right in the sum */
        if (rng_below(rng, 2)) small = (uint32_t)value;
        __atomic_store_n(&headers[a].num_tokens, h->shape.max_tokens + small, __ATOMIC_RELAXED);
        __atomic_store_n(&headers[b].num_tokens, h->shape.max_tokens - small, __ATOMIC_RELAXED);
        return;
    }
    if (attack == ATTACK_COUNTS && value % 4) value = epoch << 32 | (value % 8 < 4 ? small : (uint32_t)value);
    if ((attack == ATTACK_ENTER || attack == ATTACK_FLAGS) && value % 2) value = epoch;
    if (attack == ATTACK_STAGE && value % 2) value = (uint64_t)small * 4 << 32 | rng_below(rng, 200); /* tokens and rows in a trailer */
    uint64_t at = begin[attack] + rng_next(rng) % (end[attack] - begin[attack]);
    __atomic_store_n((uint64_t *)(victim + at / 8 * 8), value, __ATOMIC_RELAXED);
}

static void *hostile_main(void *arg) {
    Hostile *h = (Hostile *)arg;
    Rng rng = {h->seed};
    while (!atomic_load(&h->over)) {
        Attack attack = h->attack == ATTACK_ALL ? (Attack)rng_below(&rng, ATTACK_ALL) : h->attack;
        scribble(h, h->victims[rng_below(&rng, h->num_ranks)], attack, &rng);
        if (rng_below(&rng, 64) == 0) usleep(rng_below(&rng, 60)); /* let some calls through, so that all stages are met */
    }
    return NULL;
}

static bool hostile_steps(Rank *me, const Hostile *h) {
    double until = seconds_now() + 0.1 + 0.005 * (test_scale < 100 ? test_scale : 100); /* where one step after another just works */
    WANT(me, 0, ep_world_set_timeout(me->world, 0.15));
    for (uint32_t i = 0; i < scaled(400) && seconds_now() < until && ep_world_check(me->world) == 0; i++) {
        Step st = step_open(me, &h->cases[i % NUM_ROUTES], 0);
        for (uint32_t op = EP_OP_PLAN; op <= EP_OP_COMBINE; op++) {
            double start = seconds_now();
            int code = call_op(&st, op);
            CHECK(me, code <= 0 && code >= EP_ECORRUPT);
            CHECK(me, seconds_now() - start < 6);
            if (code) break;
        }
        step_close(&st);
    }
    return true;
}

static bool hostile_body(Rank *me, void *arg) {
    Hostile *h = (Hostile *)arg;
    const EpLayerConfig *config = &me->setup->config;
    uint64_t probe, rest;
    void *at, *wall;
    pthread_t thread;
    EpHeapStats s;
    /* The layer's own place in the heap is not told; a block of its size gets the same one. */
    WANT(me, 0, take_heap(me, h->layout.num_bytes, &probe));
    WANT(me, 0, ep_heap_free(me->heap, probe));
    WANT(me, 0, ep_layer_create(me->heap, config, &me->layer));
    ep_heap_stats(me->heap, &s);
    WANT(me, 0, take_heap(me, s.largest_free_bytes, &rest)); /* a wall behind it */
    WANT(me, 0, ep_heap_translate(me->heap, rest, me->rank, &wall));
    memset(wall, 0xee, s.largest_free_bytes);
    ASAN_POISON_MEMORY_REGION(wall, s.largest_free_bytes);
    if (me->rank == 0) {
        for (uint32_t r = 0; r < h->num_ranks; r++) {
            WANT(me, 0, ep_heap_translate(me->heap, probe, r, &at));
            h->victims[r] = (unsigned char *)at;
        }
        if (pthread_create(&thread, NULL, hostile_main, h)) abort();
    }
    bool ok = hostile_steps(me, h);
    if (me->rank == 0) {
        atomic_store(&h->over, true);
        pthread_join(thread, NULL);
    }
    ASAN_UNPOISON_MEMORY_REGION(wall, s.largest_free_bytes);
    CHECK(me, all_bytes_are(wall, s.largest_free_bytes, 0xee));
    return ok;
}

bool test_hostile(void) {
    for (uint32_t i = 0; i < 3 * NUM_ATTACKS; i++) {
        uint32_t num_ranks = 1 + i % 3;
        Hostile h = {.attack = (Attack)(i / 3), .seed = test_seed + i, .num_ranks = num_ranks};
        Case cases[NUM_ROUTES];
        Rng rng = {test_seed + i};
        EpLayerConfig config = small_config(num_ranks);
        config.shape.combine_mode = (i + i / 3) % 3, config.shape.max_tokens = 6;
        for (uint32_t j = 0; j < NUM_ROUTES; j++)
            case_make(&cases[j], &config.shape, &rng, h.attack == ATTACK_TOKENS ? ROUTE_FULL : (Route)j,
                      h.attack == ATTACK_TOKENS ? WITH_SCATTER : 0);
        config.shape.capacity = most_rows(cases, NUM_ROUTES) + i % 2;
        h.cases = cases, h.shape = config.shape, h.layout = ep_comm_layout(&config.shape);
        Setup setup = {.num_ranks = num_ranks, .config = config, .heap_bytes = 64 << 10, .dies = true, .own_layer = true};
        bool ok = run_team(&setup, hostile_body, &h);
        for (uint32_t j = 0; j < NUM_ROUTES; j++) case_free(&cases[j]);
        TRY(ok);
    }
    return true;
}

/* A frame that says it is longer than it can be is nobody's of this world. */
bool test_hostile_frame(void) {
    Rank *me = NULL;
    EpFrame f = {.kind = EP_FRAME_EXCHANGE}, got;
    int pair[2], fd;
    CHECK(me, socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    for (uint32_t more = 0; more < 2; more++) {
        f.num_bytes = EP_EXCHANGE_BYTES + more;
        WANT(me, 0, ep_wire_send(pair[0], &f, -1, 0));
        CHECK(me, ep_wire_receive(pair[1], &got, &fd) == (more ? EP_ECORRUPT : 1) && fd == -1);
    }
    close(pair[0]), close(pair[1]);
    return true;
}

/* Memory that a peer could cut from under this rank, or that is shorter than it says, is not mapped. */
bool test_hostile_heap(void) {
    Rank *me = NULL;
    const EpHeapCard card = {.num_bytes = 1 << 16};
    const int seals[] = {0, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL};
    for (uint32_t i = 0; i < 4; i++) {
        const bool is_sealed = i & 1, is_whole = i & 2;
        void *memory = NULL;
        int fd = memfd_create("epmoe-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        CHECK(me, fd >= 0 && ftruncate(fd, is_whole ? 1 << 16 : 1 << 15) == 0 && fcntl(fd, F_ADD_SEALS, seals[is_sealed]) == 0);
        WANT(me, is_sealed && is_whole ? 0 : EP_ECORRUPT, ep_cpu_backend.heap_import(-1, &card, &card, fd, &memory));
        CHECK(me, fcntl(fd, F_GETFD) < 0); /* closed in any case */
        if (memory) ep_cpu_backend.heap_unimport(-1, memory, card.num_bytes);
    }
    return true;
}

/* A peer that speaks the wire itself, and whose notes for the flight record are garbage: a page comes of it. */
typedef struct {
    EpWorldConfig config;
    EpWorld *world;
    int code;
} Honest;
static void *honest_main(void *arg) {
    Honest *h = (Honest *)arg;
    h->code = ep_world_create(&h->config, &h->world);
    return NULL;
}

static void garbage_notes(EpNotes *notes, Rng *rng) {
    const uint64_t odd[] = {0, 1, 2, UINT64_MAX, UINT64_MAX - 1, 1ull << 63};
    for (uint32_t i = 0; i < sizeof *notes / 4; i++) ((uint32_t *)notes)[i] = (uint32_t)rng_next(rng);
    if (rng_below(rng, 2)) notes->num = rng_below(rng, EP_SENT_NOTES + 3);
    for (uint32_t i = 0; i < EP_SENT_NOTES; i++) { /* some of it plausible */
        EpNote *n = &notes->notes[i];
        if (rng_below(rng, 2)) n->what = (uint8_t)rng_below(rng, EP_NUM_DIDS);
        if (rng_below(rng, 2)) n->step = odd[rng_below(rng, 6)] - rng_below(rng, 12);
        if (rng_below(rng, 4) == 0) n->end_ns = 0;
    }
}

static bool notes_case(uint64_t seed) {
    Honest honest = {.config = {.rank = 0, .num_ranks = 2, .timeout_s = long_timeout_s}};
    EpWorldConfig hostile = {.rank = 1, .num_ranks = 2, .timeout_s = long_timeout_s, .listen_fd = -1};
    Rank me = {.setup = NULL, .rank = 0};
    Rng rng = {seed};
    char page[EP_PAGE_BYTES];
    unsigned char mine = 1, all[2];
    int sockets[EP_MAX_RANKS];
    pthread_t thread;
    WANT(&me, 0, ep_world_listen(&honest.config.listen_fd, honest.config.names[0], honest.config.nonce));
    memcpy(hostile.names, honest.config.names, sizeof hostile.names);
    memcpy(hostile.nonce, honest.config.nonce, sizeof hostile.nonce);
    if (pthread_create(&thread, NULL, honest_main, &honest)) abort();
    int code = ep_wire_connect(&hostile, sockets, ep_now_ns() + 5000000000ull);
    pthread_join(thread, NULL);
    WANT(&me, 0, code);
    WANT(&me, 0, honest.code);
    EpFrame f = {.kind = EP_FRAME_EXCHANGE, .seq = 1, .rank = 1, .num_bytes = 1};
    WANT(&me, 0, ep_wire_send(sockets[0], &f, -1, 0));
    WANT(&me, 0, ep_world_exchange(honest.world, &mine, 1, all)); /* a note of its own, to be compared with */
    f.kind = EP_FRAME_NOTES, f.num_bytes = sizeof(EpNotes);
    for (uint32_t i = 0; i < 3; i++) {
        garbage_notes((EpNotes *)(void *)f.bytes, &rng);
        f.num_bytes = i == 1 ? rng_below(&rng, EP_EXCHANGE_BYTES) : sizeof(EpNotes);
        f.rank = (uint32_t)rng_next(&rng);
        WANT(&me, 0, ep_wire_send(sockets[0], &f, -1, 0));
    }
    const int codes[] = {EP_ETIMEOUT, EP_EPEERDIED, EP_ECORRUPT, EP_EMISMATCH};
    f.kind = EP_FRAME_ABORT, f.code = rng_below(&rng, 4) ? codes[rng_below(&rng, 4)] : (int32_t)rng_next(&rng);
    WANT(&me, 0, ep_wire_send(sockets[0], &f, -1, 0));
    for (double until = seconds_now() + 5; ep_world_check(honest.world) == 0;) CHECK(&me, seconds_now() < until);
    memset(page, 'x', sizeof page);
    WANT(&me, 0, ep_world_flight_record(honest.world, page));
    CHECK(&me, memchr(page, 0, sizeof page) && strncmp(page, "culprit: ", 9) == 0 && strstr(page, "exchange"));
    close(sockets[0]);
    ep_world_release(honest.world);
    return true;
}
bool test_hostile_notes(void) {
    for (uint32_t i = 0; i < scaled(200); i++) TRY(notes_case(test_seed * 1000 + i));
    return true;
}

/* ---- ranks that are processes ---- */

/* What the parent tells a child on its standard input, and a child its parent first. */
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

/* One rank: a few steps; or steps without end, in one of which rank 1 is killed, and the others must see it. */
static bool child_steps(Rank *me, Fate fate) {
    bool doomed = fate == FATE_KILLED;
    Rng rng = {test_seed};
    pthread_t thread;
    if (doomed && me->rank == 1 && pthread_create(&thread, NULL, killer, NULL)) return false;
    for (uint32_t i = 0; doomed || i < 6; i++) {
        Case c;
        case_make(&c, &me->setup->config.shape, &rng, (Route)(i % NUM_ROUTES), 0); /* the same in every process */
        Step st = step_open(me, &c, 0);
        for (uint32_t op = EP_OP_PLAN; op <= EP_OP_COMBINE; op++) {
            double start = seconds_now();
            int code = call_op(&st, op);
            if (!doomed || code == 0) {
                WANT(me, 0, code);
                TRY(op == EP_OP_PLAN ? check_plan(&st) : op == EP_OP_DISPATCH ? check_dispatch(&st) : check_combine(&st));
                continue;
            }
            WANT(me, EP_EPEERDIED, code);
            CHECK(me, strstr(ep_error_text(), "rank 1 died") && seconds_now() - start < 5);
            step_close(&st), case_free(&c);
            return true;
        }
        step_close(&st), case_free(&c);
    }
    return close_together(me);
}

int child_main(uint32_t rank, Fate fate) {
    EpWorldConfig config = {.rank = rank, .num_ranks = NUM_CHILDREN, .timeout_s = fate == FATE_ABSENT ? short_timeout_s : long_timeout_s};
    Setup setup = {.num_ranks = NUM_CHILDREN, .config = small_config(NUM_CHILDREN)};
    Rank me = {.setup = &setup, .rank = rank};
    Hello hello;
    Meeting meeting;
    WANT(&me, 0, ep_world_listen(&config.listen_fd, hello.name, hello.nonce));
    if (write(STDOUT_FILENO, &hello, sizeof hello) != sizeof hello || read(STDIN_FILENO, &meeting, sizeof meeting) != sizeof meeting)
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
        char *argv[] = {(char *)"main", (char *)"-s",
                        seed,           (char *)(fate == FATE_KILLED ? "--killed" : fate == FATE_ABSENT ? "--absent" : "--child"),
                        rank,           NULL};
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
