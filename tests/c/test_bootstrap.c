/* test_bootstrap.c - the bootstrap of a world, while processes that are no ranks fill the queues of the
 * listening ranks, and with a rank that answers wrongly. */
#include <sched.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "harness.h"
#include "runtime/error.h"
#include "runtime/fork.h"
#include "runtime/socket.h"

enum { NUM_RANKS = 3, NUM_FLOODERS = 3, NUM_OPEN = 24 };
typedef struct {
    EpWorldConfig config;
    int sockets[EP_MAX_RANKS], code;
    double limit_s; /* 0: a limit that is long enough for any machine */
} Bootstrap;
typedef struct {
    const unsigned char *name;
    atomic_bool is_over;
} Flood;

static void *bootstrap_main(void *arg) {
    Bootstrap *m = (Bootstrap *)arg;
    const double limit_s = m->limit_s > 0 ? m->limit_s : long_timeout_s;
    m->code = ep_wire_connect(&m->config, m->sockets, ep_now_ns() + (uint64_t)(limit_s * 1e9));
    return NULL;
}

/* Connect a new socket to the one with this name, without waiting. Returns whether connect() succeeds. */
static bool connect_now(const unsigned char *name, int *fd) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, name + 1, name[0] - 1u);
    *fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return connect(*fd, (struct sockaddr *)&address,
                   (socklen_t)(offsetof(struct sockaddr_un, sun_path) + name[0])) == 0;
}

/* Connect again and again, and send nothing. The newest connections stay open: more than there are places. */
static void *flood_main(void *arg) {
    Flood *f = (Flood *)arg;
    int sockets[NUM_OPEN];
    for (uint32_t i = 0; i < NUM_OPEN; i++) sockets[i] = -1;
    for (uint32_t i = 0; !atomic_load(&f->is_over); i = (i + 1) % NUM_OPEN) {
        if (sockets[i] >= 0) close(sockets[i]);
        if (!connect_now(f->name, &sockets[i])) sched_yield();
    }
    for (uint32_t i = 0; i < NUM_OPEN; i++)
        if (sockets[i] >= 0) close(sockets[i]);
    return NULL;
}

/* All ranks connect, and each pair of them has one socket. */
static bool bootstrap_in_flood(Rank *me) {
    Bootstrap ranks[NUM_RANKS];
    Flood flood = {.name = ranks[0].config.names[0]};
    pthread_t threads[NUM_RANKS], flooders[NUM_FLOODERS];
    unsigned char nonce[EP_NONCE_BYTES];
    EpFrame got;
    int fd;
    memset(ranks, 0, sizeof ranks);
    for (uint32_t r = 0; r < NUM_RANKS; r++) {
        EpWorldConfig *c = &ranks[r].config;
        c->rank = r;
        c->num_ranks = NUM_RANKS;
        CHECK_CODE(me, 0, ep_world_listen(&c->listen_fd, c->names[r], nonce));
        for (uint32_t q = 0; q < NUM_RANKS; q++) memcpy(ranks[q].config.names[r], c->names[r], EP_NAME_BYTES);
    }
    for (uint32_t i = 0; i < NUM_FLOODERS; i++)
        if (pthread_create(&flooders[i], NULL, flood_main, &flood)) abort();
    for (uint32_t r = 0; r < NUM_RANKS; r++)
        if (pthread_create(&threads[r], NULL, bootstrap_main, &ranks[r])) abort();
    for (uint32_t r = 0; r < NUM_RANKS; r++) pthread_join(threads[r], NULL);
    atomic_store(&flood.is_over, true);
    for (uint32_t i = 0; i < NUM_FLOODERS; i++) pthread_join(flooders[i], NULL);
    for (uint32_t r = 0; r < NUM_RANKS; r++) CHECK_CODE(me, 0, ranks[r].code);
    for (uint32_t r = 0; r < NUM_RANKS; r++)
        for (uint32_t q = 0; q < NUM_RANKS; q++)
            if (q != r) CHECK_CODE(me, 0, ep_wire_send(ranks[r].sockets[q], &(EpFrame){.seq = r}, -1, 0));
    for (uint32_t r = 0; r < NUM_RANKS; r++)
        for (uint32_t q = 0; q < NUM_RANKS; q++)
            if (q != r) {
                CHECK_CODE(me, 1, ep_wire_receive(ranks[r].sockets[q], &got, &fd));
                CHECK(me, got.seq == q && got.kind == 0);
            }
    for (uint32_t r = 0; r < NUM_RANKS; r++) {
        for (uint32_t q = 0; q < NUM_RANKS; q++) ep_fork_close(ranks[r].sockets[q]);
        ep_world_unlisten(ranks[r].config.listen_fd);
    }
    return true;
}
bool test_bootstrap_in_flood(void) {
    for (uint32_t i = 0; i < scaled(200); i++) TRY(bootstrap_in_flood(NULL));
    return true;
}

/* ---- the answer of a rank ---- */

/* What rank 0 does with the connection of rank 1. */
typedef enum { ANSWER, CLOSE_ONCE, WRONG_NONCE, WRONG_RANK, SILENT, DIE, NUM_ANSWERS } Answer;

static int accept_soon(int listen_fd) {
    int fd = -1;
    double until = seconds_now() + long_timeout_s;
    while ((fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC)) < 0 && seconds_now() < until) usleep(1000);
    return fd;
}

/* The test plays rank 0. Rank 1 connects to it, in another thread. */
static bool bootstrap_with_rank_0(Rank *me, Answer how, int expected_code) {
    EpWorldConfig zero = {.rank = 0, .num_ranks = 2};
    Bootstrap one = {.config = {.rank = 1, .num_ranks = 2, .listen_fd = -1}};
    pthread_t thread;
    CHECK_CODE(me, 0, ep_world_listen(&zero.listen_fd, one.config.names[0], one.config.nonce));
    if (how == SILENT) one.limit_s = 0.2;
    if (pthread_create(&thread, NULL, bootstrap_main, &one)) abort();
    int fd = accept_soon(zero.listen_fd);
    CHECK(me, fd >= 0);
    if (how == CLOSE_ONCE) {
        close(fd);
        fd = accept_soon(zero.listen_fd);
    }
    if (how == DIE) {
        ep_world_unlisten(zero.listen_fd);
        zero.listen_fd = -1;
        close(fd);
        fd = -1;
    }
    EpFrame answer = {.kind = EP_FRAME_HELLO, .rank = how == WRONG_RANK, .num_bytes = EP_NONCE_BYTES};
    memcpy(answer.bytes, one.config.nonce, EP_NONCE_BYTES);
    answer.bytes[0] ^= how == WRONG_NONCE;
    if (fd >= 0 && how != SILENT) CHECK_CODE(me, 0, ep_wire_send(fd, &answer, -1, 0));
    pthread_join(thread, NULL);
    if (one.code != expected_code)
        return report_failure(me, __FILE__, __LINE__, ep_error_text(), one.code, expected_code);
    CHECK(me, (one.sockets[0] >= 0) == !expected_code);
    if (fd >= 0) close(fd);
    ep_fork_close(one.sockets[0]);
    ep_world_unlisten(zero.listen_fd);
    return true;
}
bool test_bootstrap_answers(void) {
    static const int codes[NUM_ANSWERS] = {[WRONG_NONCE] = EP_ECORRUPT,
                                           [WRONG_RANK] = EP_ECORRUPT,
                                           [SILENT] = EP_ETIMEOUT,
                                           [DIE] = EP_EPEERDIED};
    for (uint32_t i = 0; i < NUM_ANSWERS; i++) {
        Rank me = {.setup = NULL, .rank = i};
        TRY(bootstrap_with_rank_0(&me, (Answer)i, codes[i]));
    }
    return true;
}

/* Rank 0 accepts nothing, and the queue of its listening socket is full. At its deadline, rank 1 says that
 * rank 0 may be stopped. */
bool test_bootstrap_full_queue(void) {
    Bootstrap one = {.config = {.rank = 1, .num_ranks = 2, .listen_fd = -1}, .limit_s = 0.2};
    int fds[4 * EP_MAX_RANKS], listen_fd;
    uint32_t num = 0;
    bool connected = true;
    CHECK_CODE(NULL, 0, ep_world_listen(&listen_fd, one.config.names[0], one.config.nonce));
    while (connected && num < 4 * EP_MAX_RANKS) connected = connect_now(one.config.names[0], &fds[num++]);
    bootstrap_main(&one);
    for (uint32_t i = 0; i < num; i++) close(fds[i]);
    ep_world_unlisten(listen_fd);
    CHECK(NULL, !connected);
    CHECK_CODE(NULL, EP_ETIMEOUT, one.code);
    CHECK(NULL, strstr(ep_error_text(), "rank 0 is not accepting connections"));
    return true;
}
