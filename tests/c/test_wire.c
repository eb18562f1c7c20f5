/* test_wire.c - messages on a socket from processes that are no rank of the world, or from a hostile rank. */
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "harness.h"
#include "runtime/error.h"
#include "runtime/flight_record.h"
#include "runtime/fork.h"
#include "runtime/socket.h"

/* ---- frames ---- */

/* Send bytes with num_fds file descriptors. */
static int send_raw(int socket, const void *bytes, size_t num_bytes, const int *fds, uint32_t num_fds) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec part = {(void *)(uintptr_t)bytes, num_bytes};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (num_fds) {
        memset(&control, 0, sizeof control);
        m.msg_control = &control;
        m.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(num_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, num_fds * sizeof(int));
    }
    return sendmsg(socket, &m, MSG_NOSIGNAL) == (ssize_t)num_bytes ? 0 : -1;
}

/* The number of open file descriptors of this process. */
static uint32_t num_open_fds(void) {
    uint32_t num = 0;
    for (int fd = 0; fd < 1024; fd++) num += fcntl(fd, F_GETFD) >= 0;
    return num;
}

/* The receiver accepts valid frames and rejects all others. It closes the descriptors of frames that it
 * rejects. */
bool test_wire_frames(void) {
    static const struct {
        const char *name;
        uint32_t abi, num_bytes, has_fd, num_fds;
        int32_t num_extra_bytes;
        int code;
    } frames[] = {
        {"a valid frame", EP_ABI_VERSION, EP_ALL_GATHER_BYTES, 0, 0, 0, 1},
        {"a valid frame with a descriptor", EP_ABI_VERSION, 0, 1, 1, 0, 1},
        {"another version", EP_ABI_VERSION + 1, 0, 0, 0, 0, EP_ECORRUPT},
        {"num_bytes is larger than a frame", EP_ABI_VERSION, EP_ALL_GATHER_BYTES + 1, 0, 0, 0, EP_ECORRUPT},
        {"one byte too few", EP_ABI_VERSION, 0, 0, 0, -1, EP_ECORRUPT},
        {"one byte too many", EP_ABI_VERSION, 0, 0, 0, 1, EP_ECORRUPT},
        {"two descriptors", EP_ABI_VERSION, 0, 1, 2, 0, EP_ECORRUPT},
        {"a descriptor, but has_fd is 0", EP_ABI_VERSION, 0, 0, 1, 0, EP_ECORRUPT},
        {"no descriptor, but has_fd is 1", EP_ABI_VERSION, 0, 1, 0, 0, EP_ECORRUPT},
    };
    Rank *me = NULL;
    const int stderrs[] = {STDERR_FILENO, STDERR_FILENO};
    int pair[2], fd;
    CHECK(me, socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    const uint32_t before = num_open_fds();
    for (size_t i = 0; i < sizeof frames / sizeof *frames; i++) {
        struct {
            EpFrame frame;
            unsigned char more;
        } sent = {{.abi = frames[i].abi,
                   .kind = EP_FRAME_ALL_GATHER,
                   .num_bytes = frames[i].num_bytes,
                   .has_fd = frames[i].has_fd},
                  0};
        EpFrame got;
        CHECK(me, send_raw(pair[0], &sent, (size_t)((int64_t)sizeof sent.frame + frames[i].num_extra_bytes),
                           stderrs, frames[i].num_fds) == 0);
        int code = ep_wire_receive(pair[1], &got, &fd);
        if (code != frames[i].code)
            return report_failure(me, __FILE__, __LINE__, frames[i].name, code, frames[i].code);
        CHECK(me, (fd >= 0) == (code == 1 && frames[i].num_fds == 1));
        if (fd >= 0) close(fd);
        CHECK(me, num_open_fds() == before);
    }
    close(pair[0]);
    close(pair[1]);
    return true;
}

/* ---- connections while a world is created ---- */

typedef struct {
    EpWorldConfig config;
    int sockets[EP_MAX_RANKS], code;
    bool is_another_user; /* with a short limit */
} ConnectCall;
static void *connect_main(void *arg) {
    ConnectCall *call = (ConnectCall *)arg;
    const double limit_s = call->is_another_user ? short_timeout_s * slowness() : long_timeout_s;
    if (call->is_another_user) test_be_another_user();
    call->code = ep_wire_connect(&call->config, call->sockets, ep_now_ns() + (uint64_t)(limit_s * 1e9));
    return NULL;
}

/* Connect to the socket of a rank, and send nothing. Returns the file descriptor, or -1. */
static int open_connection(const EpWorldConfig *config) {
    const unsigned char *name = config->names[config->rank];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, name + 1, name[0] - 1u);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    const socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + name[0]);
    return connect(fd, (struct sockaddr *)&address, length) ? -1 : fd;
}

/* Connect, and send a hello frame as a rank. With another kind or nonce, the frame is not valid. */
static int connect_as(const EpWorldConfig *config, uint32_t rank, uint32_t kind, bool knows_nonce) {
    EpFrame hello = {.kind = kind, .rank = rank, .num_bytes = EP_NONCE_BYTES};
    memcpy(hello.bytes, config->nonce, EP_NONCE_BYTES);
    hello.bytes[EP_NONCE_BYTES - 1] ^= !knows_nonce;
    int fd = open_connection(config);
    return fd >= 0 && ep_wire_send(fd, &hello, -1, 0) == 0 ? fd : -1;
}

enum { LONG_MS = 120000 };
/* Whether the other end closes the connection within the time. */
static bool is_closed_by_peer(int fd, int within_ms) {
    struct pollfd p = {fd, POLLIN, 0};
    return poll(&p, 1, within_ms) == 1 && p.revents & POLLHUP;
}

/* Accept one connection, read its hello, and answer as the rank of config. Returns the descriptor, or -1. */
static int accept_and_answer(const EpWorldConfig *config) {
    EpFrame f;
    int fd_in, fd = -1, got = 0;
    double until = seconds_now() + long_timeout_s;
    while (fd < 0 && seconds_now() < until) fd = accept(config->listen_fd, NULL, NULL);
    while (got == 0 && seconds_now() < until) got = ep_wire_receive(fd, &f, &fd_in);
    f.rank = config->rank;
    return got == 1 && f.kind == EP_FRAME_HELLO && ep_wire_send(fd, &f, -1, 0) == 0 ? fd : -1;
}

/* Whether the rank of config has answered a hello with its own. */
static bool is_answered(int fd, const EpWorldConfig *config) {
    EpFrame f;
    int fd_in;
    return ep_wire_receive(fd, &f, &fd_in) == 1 && f.kind == EP_FRAME_HELLO && f.rank == config->rank &&
           memcmp(f.bytes, config->nonce, EP_NONCE_BYTES) == 0;
}

/* Rank 1 of 4 waits for ranks 2 and 3. It closes the connections of other processes, and a second
 * connection of the same rank. It closes a silent connection when another connection needs the place. */
bool test_wire_connections(void) {
    enum { NUM_SILENT = 17 }; /* one more than the number of places */
    ConnectCall host = {.config = {.rank = 1, .num_ranks = 4}};
    EpWorldConfig zero = {.rank = 0, .num_ranks = 4};
    Rank *me = NULL;
    EpFrame hello;
    pthread_t thread;
    int silent[NUM_SILENT], fd;
    CHECK_CODE(me, 0, ep_world_listen(&zero.listen_fd, host.config.names[0], zero.nonce));
    CHECK_CODE(me, 0, ep_world_listen(&host.config.listen_fd, host.config.names[1], host.config.nonce));
    /* Ranks 2 and 3 must listen, because rank 1 checks whether the missing ranks are alive. */
    CHECK_CODE(me, 0, ep_world_listen(&fd, host.config.names[2], zero.nonce));
    const int two = fd;
    CHECK_CODE(me, 0, ep_world_listen(&fd, host.config.names[3], zero.nonce));
    const int three = fd;
    if (pthread_create(&thread, NULL, connect_main, &host)) abort();
    const int first = accept_and_answer(&zero);
    CHECK(me, first >= 0);
    const struct {
        uint32_t rank, kind;
        bool knows_nonce;
    } invalid[] = {{0, EP_FRAME_HELLO, true},  {1, EP_FRAME_HELLO, true},
                   {4, EP_FRAME_HELLO, true},  {2, EP_FRAME_RECORDS, true},
                   {2, EP_FRAME_HELLO, false}, {UINT32_MAX, EP_FRAME_HELLO, true}};
    for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++) {
        fd = connect_as(&host.config, invalid[i].rank, invalid[i].kind, invalid[i].knows_nonce);
        CHECK(me, fd >= 0 && is_closed_by_peer(fd, LONG_MS));
        close(fd);
    }
    int second = connect_as(&host.config, 2, EP_FRAME_HELLO, true);
    CHECK(me, second >= 0 && !is_closed_by_peer(second, 300) && is_answered(second, &host.config));
    fd = connect_as(&host.config, 2, EP_FRAME_HELLO, true);
    CHECK(me, fd >= 0 && is_closed_by_peer(fd, LONG_MS));
    close(fd);
    for (uint32_t i = 0; i < NUM_SILENT; i++) CHECK(me, (silent[i] = open_connection(&host.config)) >= 0);
    CHECK(me, is_closed_by_peer(silent[0], LONG_MS));
    CHECK(me, !is_closed_by_peer(silent[1], 0) && !is_closed_by_peer(silent[NUM_SILENT - 1], 0));
    int third = connect_as(&host.config, 3, EP_FRAME_HELLO, true);
    pthread_join(thread, NULL);
    CHECK_CODE(me, 0, host.code);
    for (uint32_t i = 0; i < NUM_SILENT; i++) {
        CHECK(me, is_closed_by_peer(silent[i], 0));
        close(silent[i]);
    }
    CHECK(me, is_answered(third, &host.config));
    CHECK(me, host.sockets[0] >= 0 && host.sockets[1] == -1);
    /* Each rank has its own socket. */
    CHECK_CODE(me, 0, ep_wire_send(host.sockets[2], &(EpFrame){.seq = 2}, -1, 0));
    CHECK_CODE(me, 0, ep_wire_send(host.sockets[3], &(EpFrame){.seq = 3}, -1, 0));
    CHECK(me, ep_wire_receive(second, &hello, &fd) == 1 && hello.seq == 2);
    CHECK(me, ep_wire_receive(third, &hello, &fd) == 1 && hello.seq == 3);
    const int open_fds[] = {host.sockets[0], host.sockets[2], host.sockets[3],      first, second, third, two,
                            three,           zero.listen_fd,  host.config.listen_fd};
    for (size_t i = 0; i < sizeof open_fds / sizeof *open_fds; i++) ep_fork_close(open_fds[i]);
    return true;
}

/* Rank 0 closes a connection from a process of another user, although its hello is valid. */
bool test_wire_another_user(void) {
    ConnectCall host = {.config = {.rank = 0, .num_ranks = 2}, .is_another_user = true};
    EpWorldConfig one = {.rank = 1, .num_ranks = 2};
    Rank *me = NULL;
    pthread_t thread;
    CHECK_CODE(me, 0, ep_world_listen(&host.config.listen_fd, host.config.names[0], host.config.nonce));
    CHECK_CODE(me, 0, ep_world_listen(&one.listen_fd, host.config.names[1], one.nonce));
    if (pthread_create(&thread, NULL, connect_main, &host)) abort();
    int fd = connect_as(&host.config, 1, EP_FRAME_HELLO, true);
    CHECK(me, fd >= 0 && is_closed_by_peer(fd, LONG_MS));
    pthread_join(thread, NULL);
    CHECK(me, host.code != 0 && host.sockets[1] == -1);
    close(fd);
    ep_fork_close(one.listen_fd);
    ep_fork_close(host.config.listen_fd);
    return true;
}

/* ---- a hostile rank ---- */

/* The test plays rank 1 of a world of two, and sends invalid frames. Rank 0 is a normal rank. */
typedef struct {
    EpWorldConfig config;
    EpWorld *world;
    int code;
} HonestRank;
static void *honest_main(void *arg) {
    HonestRank *h = (HonestRank *)arg;
    h->code = ep_world_create(&h->config, &h->world);
    return NULL;
}

static void fill_random_records(EpCallRecords *records, Rng *rng) {
    const uint64_t edges[] = {0, 1, 2, UINT64_MAX, UINT64_MAX - 1, 1ull << 63};
    for (uint32_t i = 0; i < sizeof *records / 4; i++) ((uint32_t *)records)[i] = (uint32_t)rng_next(rng);
    if (rng_below(rng, 2)) records->num = rng_below(rng, EP_SENT_RECORDS + 3);
    for (uint32_t i = 0; i < EP_SENT_RECORDS; i++) { /* Some values are plausible. */
        EpCallRecord *n = &records->at[i];
        if (rng_below(rng, 2)) n->what = (uint8_t)rng_below(rng, EP_NUM_CALLS);
        if (rng_below(rng, 2)) n->step = edges[rng_below(rng, 6)] - rng_below(rng, 12);
        if (rng_below(rng, 4) == 0) n->end_ns = 0;
    }
}

/* Create the world of rank 0. to_honest is the socket on which the test plays rank 1. */
static bool create_honest_rank(HonestRank *honest, int *to_honest) {
    EpWorldConfig hostile = {.rank = 1, .num_ranks = 2, .timeout_s = long_timeout_s, .listen_fd = -1};
    Rank *me = NULL;
    int sockets[EP_MAX_RANKS];
    pthread_t thread;
    *honest = (HonestRank){.config = {.rank = 0, .num_ranks = 2, .timeout_s = long_timeout_s}};
    CHECK_CODE(me, 0,
               ep_world_listen(&honest->config.listen_fd, honest->config.names[0], honest->config.nonce));
    memcpy(hostile.names, honest->config.names, sizeof hostile.names);
    memcpy(hostile.nonce, honest->config.nonce, sizeof hostile.nonce);
    if (pthread_create(&thread, NULL, honest_main, honest)) abort();
    int code = ep_wire_connect(&hostile, sockets, ep_now_ns() + (uint64_t)(long_timeout_s * 1e9));
    pthread_join(thread, NULL);
    CHECK_CODE(me, 0, code);
    CHECK_CODE(me, 0, honest->code);
    *to_honest = sockets[0];
    return true;
}

/* Wait for the end of the world. Returns its code, and stores the flight record in page. */
static int wait_for_end(EpWorld *world, char page[EP_PAGE_BYTES]) {
    double until = seconds_now() + long_timeout_s;
    while (ep_world_check(world) == 0 && seconds_now() < until) usleep(100);
    memset(page, 'x', EP_PAGE_BYTES);
    int code = ep_world_check(world);
    char text[256];
    snprintf(text, sizeof text, "%s", ep_error_text());
    ep_world_flight_record(world, page);
    return code ? ep_error(code, "%s", text) : 0;
}

/* Rank 1 sends a frame and leaves. Rank 0 must get the right error, and name the right cause in its flight
 * record. */
bool test_wire_last_messages(void) {
    static const struct {
        uint32_t kind, num_bytes, rank, times;
        int code, expected_code;
        const char *text, *page;
    } messages[] = {
        {EP_FRAME_ABORT, 7, 0, 1, EP_ETIMEOUT, EP_ETIMEOUT, "because",
         "culprit: rank 1 left before the others"},
        {EP_FRAME_ABORT, EP_ALL_GATHER_BYTES, 1, 1, EP_ECUDA, EP_ECUDA, "becausebecause",
         "culprit: rank 1 left before the others"},
        {EP_FRAME_ABORT, 7, 77, 1, 5, EP_ECORRUPT, "because", "culprit: rank 1 sent invalid data"},
        {EP_FRAME_ABORT, 7, 77, 1, 0, EP_ECORRUPT, "because", "culprit: rank 1 sent invalid data"},
        /* A peer may be one all-gather ahead, but not two. */
        {EP_FRAME_ALL_GATHER, 1, 1, 2, 0, EP_EPEERDIED, "rank 1 died", "culprit: rank 1 is gone"},
        {EP_FRAME_ALL_GATHER, 1, 1, 3, 0, EP_ECORRUPT, "a peer is too far ahead",
         "culprit: rank 1 sent invalid data"},
        {EP_FRAME_RECORDS, sizeof(EpCallRecords), 1, 1, 0, EP_EPEERDIED, "rank 1 died",
         "\n   1           1       0  plan"},
        {EP_FRAME_RECORDS, sizeof(EpCallRecords) - 1, 1, 1, 0, EP_EPEERDIED, "rank 1 died",
         "\n   1           ?       ?  gone"},
        {EP_FRAME_STUCK, sizeof(EpCallRecords), 1, 1, 0, EP_EPEERDIED, "rank 1 died",
         "\n   1           ?       ?  gone"},
        {EP_FRAME_STUCK, 1, 1, 1, 0, EP_EPEERDIED, "rank 1 died", "\n   1           ?       ?  gone"},
        {99, 1, 1, 1, 0, EP_EPEERDIED, "rank 1 died", "\n   1           ?       ?  gone"},
    };
    const EpCallRecords records = {
        .num = 1, .at = {{.step = 1, .seq = 1, .what = EP_OP_PLAN, .begin_ns = 1, .end_ns = 2}}};
    for (size_t i = 0; i < sizeof messages / sizeof *messages; i++) {
        Rank me = {.setup = NULL, .rank = (uint32_t)i};
        char page[EP_PAGE_BYTES];
        HonestRank honest;
        int socket;
        TRY(create_honest_rank(&honest, &socket));
        EpFrame f = {.kind = messages[i].kind,
                     .rank = messages[i].rank,
                     .code = messages[i].code,
                     .num_bytes = messages[i].num_bytes};
        if (f.kind == EP_FRAME_ABORT) /* The text has no terminator. */
            for (uint32_t at = 0; at < sizeof f.bytes; at++) f.bytes[at] = (unsigned char)"because"[at % 7];
        else memcpy(f.bytes, &records, sizeof records);
        for (f.seq = 1; f.seq <= messages[i].times; f.seq++)
            CHECK_CODE(&me, 0, ep_wire_send(socket, &f, -1, 0));
        ep_fork_close(socket);
        CHECK_CODE(&me, messages[i].expected_code, wait_for_end(honest.world, page));
        CHECK(&me, strncmp(ep_error_text(), messages[i].text, strlen(messages[i].text)) == 0);
        CHECK(&me,
              f.kind != EP_FRAME_ABORT || strlen(ep_error_text()) == (f.num_bytes < 255 ? f.num_bytes : 255));
        CHECK(&me, memchr(page, 0, sizeof page) && strstr(page, messages[i].page));
        ep_world_release(honest.world);
    }
    return true;
}

/* A descriptor comes only with a frame of an all-gather. Rank 0 closes one that comes with another frame. */
bool test_wire_descriptors(void) {
    static const uint32_t kinds[] = {EP_FRAME_RECORDS, EP_FRAME_STUCK, 99};
    HonestRank honest;
    Rank me = {.setup = NULL, .rank = 0};
    unsigned char mine = 1, all[2];
    int socket;
    TRY(create_honest_rank(&honest, &socket));
    const uint32_t before = num_open_fds();
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        EpFrame f = {.kind = kinds[i], .rank = 1, .num_bytes = sizeof(EpCallRecords)};
        CHECK_CODE(&me, 0, ep_wire_send(socket, &f, STDERR_FILENO, 0));
    }
    /* The all-gather does not want a descriptor either. After it, rank 0 has taken all frames before it. */
    EpFrame last = {.kind = EP_FRAME_ALL_GATHER,
                    .seq = 1,
                    .rank = 1,
                    .about = (uint32_t)EP_CALL_ALL_GATHER << 16,
                    .num_bytes = 1};
    CHECK_CODE(&me, 0, ep_wire_send(socket, &last, STDERR_FILENO, 0));
    CHECK_CODE(&me, 0, ep_world_all_gather(honest.world, &mine, 1, all));
    CHECK(&me, num_open_fds() == before);
    close(socket);
    ep_world_release(honest.world);
    return true;
}

/* Rank 1 sends random call records. The flight record of rank 0 must still be a valid text. */
static bool random_records_case(uint64_t seed) {
    HonestRank honest;
    Rank me = {.setup = NULL, .rank = 0};
    Rng rng = {seed};
    char page[EP_PAGE_BYTES];
    unsigned char mine = 1, all[2];
    int socket;
    TRY(create_honest_rank(&honest, &socket));
    EpFrame f = {.kind = EP_FRAME_ALL_GATHER,
                 .seq = 1,
                 .rank = 1,
                 .about = (uint32_t)EP_CALL_ALL_GATHER << 16,
                 .num_bytes = 1};
    CHECK_CODE(&me, 0, ep_wire_send(socket, &f, -1, 0));
    /* After this all-gather, rank 0 has a call record that it compares with the records of rank 1. */
    CHECK_CODE(&me, 0, ep_world_all_gather(honest.world, &mine, 1, all));
    f.kind = EP_FRAME_RECORDS;
    for (uint32_t i = 0; i < 3; i++) {
        fill_random_records((EpCallRecords *)(void *)f.bytes, &rng);
        f.num_bytes = i == 1 ? rng_below(&rng, EP_ALL_GATHER_BYTES) : sizeof(EpCallRecords);
        f.rank = (uint32_t)rng_next(&rng);
        CHECK_CODE(&me, 0, ep_wire_send(socket, &f, -1, 0));
    }
    const int codes[] = {EP_ETIMEOUT, EP_EPEERDIED, EP_ECORRUPT, EP_EMISMATCH};
    f.kind = EP_FRAME_ABORT;
    f.code = rng_below(&rng, 4) ? codes[rng_below(&rng, 4)] : (int32_t)rng_next(&rng);
    CHECK_CODE(&me, 0, ep_wire_send(socket, &f, -1, 0));
    CHECK(&me, wait_for_end(honest.world, page) != 0);
    CHECK(&me,
          memchr(page, 0, sizeof page) && strncmp(page, "culprit: ", 9) == 0 && strstr(page, "exchange"));
    ep_fork_close(socket);
    ep_world_release(honest.world);
    return true;
}
bool test_wire_call_records(void) {
    for (uint32_t i = 0; i < scaled(200); i++) TRY(random_records_case(test_seed * 1000 + i));
    return printf("    sent %u random frames\n", 4 * scaled(200)) > 0;
}
