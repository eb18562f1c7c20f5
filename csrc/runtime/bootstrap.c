/* bootstrap.c - the bootstrap of a new world: each rank listens, and each pair of ranks connects.
 *
 * The listening sockets have abstract names, which Linux chooses. Therefore a killed process leaves no
 * file behind, and Linux closes its sockets at once. Abstract names have no file permissions. So a peer
 * is accepted only if it belongs to the same user (SO_PEERCRED) and knows the nonce of the world.
 *
 * Exports: ep_world_listen and ep_world_unlisten (epmoe.h), ep_wire_connect (socket.h).
 * Connection order: rank r connects to every rank below r, and accepts every rank above r. */
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "protocol/words.h"
#include "runtime/error.h"
#include "runtime/fork.h"
#include "runtime/socket.h"

/* The time limit of the bootstrap. A rank that waits looks at the clock at least every 100 ms
 * (ep_wire_ms_left, and SO_SNDTIMEO in connect_to). If two looks are more than EP_MAX_COUNTED_GAP_NS apart,
 * the process was probably suspended, perhaps with the whole job. Only EP_MAX_COUNTED_GAP_NS of such a gap
 * count, so that a job that continues does not find its limit passed. */
typedef struct {
    uint64_t deadline_ns, looked_ns;
} Limit;
static bool is_over(Limit *limit) {
    uint64_t now = ep_now_ns(), gap = now - limit->looked_ns;
    if (gap > EP_MAX_COUNTED_GAP_NS) limit->deadline_ns += gap - EP_MAX_COUNTED_GAP_NS;
    limit->looked_ns = now;
    return now >= limit->deadline_ns;
}

/* A new socket, which forked children close. Returns its descriptor, or -1 and errno. */
static int open_socket(int flags) {
    ep_fork_lock();
    int fd = ep_fork_guard(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
    ep_fork_unlock();
    return fd;
}

int ep_world_listen(int *listen_fd, unsigned char name[EP_NAME_BYTES], unsigned char nonce[EP_NONCE_BYTES]) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t length = sizeof address;
    int fd = open_socket(SOCK_NONBLOCK);
    if (fd < 0) return ep_error(EP_ESYS, "cannot create a socket: %s", strerror(errno));
    /* An address of only the family makes the kernel choose a free abstract name ("autobind"). */
    if (bind(fd, (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path)) ||
        listen(fd, EP_MAX_RANKS) || getsockname(fd, (struct sockaddr *)&address, &length) ||
        getrandom(nonce, EP_NONCE_BYTES, 0) != EP_NONCE_BYTES) {
        int e = errno;
        ep_fork_close(fd);
        return ep_error(EP_ESYS, "cannot listen for the other ranks: %s", strerror(e));
    }
    size_t n = length - offsetof(struct sockaddr_un, sun_path);
    memset(name, 0, EP_NAME_BYTES);
    if (n < 2 || n > EP_NAME_BYTES) {
        ep_fork_close(fd);
        return ep_error(EP_ESYS, "the kernel chose a socket name of %zu bytes: wanted 2 to %d", n,
                        EP_NAME_BYTES);
    }
    name[0] = (unsigned char)n; /* an abstract name begins with a zero byte; its length is stored there */
    memcpy(name + 1, address.sun_path + 1, n - 1);
    *listen_fd = fd;
    return 0;
}

void ep_world_unlisten(int listen_fd) { ep_fork_close(listen_fd); }

static bool is_same_user(int fd) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

/* The address of rank r's listening socket, and a new socket to connect to it. The listening socket exists
 * before its name is given to other ranks. */
static int open_socket_to(const EpWorldConfig *config, uint32_t r, int flags, struct sockaddr_un *address,
                          socklen_t *length, int *fd) {
    const unsigned char *name = config->names[r];
    if (name[0] < 2 || name[0] > EP_NAME_BYTES)
        return ep_error(EP_ECORRUPT, "rank %u gave no valid socket name", r);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path + 1, name + 1, name[0] - 1u);
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + name[0]);
    *fd = open_socket(flags);
    return *fd < 0 ? ep_error(EP_ESYS, "cannot create a socket: %s", strerror(errno)) : 0;
}

/* The error for a connect() to rank r that failed with errno e. */
static int unreachable(uint32_t r, int e) {
    if (e == EAGAIN || e == EINTR)
        return ep_error(EP_ETIMEOUT, "rank %u is not accepting connections: it may be stopped or overloaded",
                        r);
    if (e != ECONNREFUSED) return ep_error(EP_ESYS, "cannot connect to rank %u: %s", r, strerror(e));
    return ep_error(EP_EPEERDIED,
                    "rank %u died while the world was made, or is in another network namespace (another "
                    "container or host)",
                    r);
}

/* The frame with which two ranks prove to each other that they know the nonce. */
static EpFrame hello_of(const EpWorldConfig *config) {
    EpFrame hello = {.kind = EP_FRAME_HELLO, .rank = config->rank, .num_bytes = EP_NONCE_BYTES};
    memcpy(hello.bytes, config->nonce, EP_NONCE_BYTES);
    return hello;
}
static bool is_hello(const EpWorldConfig *config, const EpFrame *f) {
    return f->kind == EP_FRAME_HELLO && memcmp(f->bytes, config->nonce, EP_NONCE_BYTES) == 0;
}

/* A new connection to rank r, which may still wait in the queue of its listening socket. */
static int open_connection(const EpWorldConfig *config, uint32_t r, int *out, Limit *limit) {
    struct sockaddr_un address;
    socklen_t length;
    int fd;
    EP_TRY(open_socket_to(config, r, 0, &address, &length, &fd));
    /* connect() blocks while the queue of the peer's listening socket is full. After 100 ms it returns, so
     * that the loop checks the deadline. */
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){.tv_usec = 100000}, sizeof(struct timeval));
    while (connect(fd, (struct sockaddr *)&address, length)) {
        int e = errno;
        if ((e == EINTR || e == EAGAIN) && !is_over(limit)) continue;
        ep_fork_close(fd);
        return unreachable(r, e);
    }
    if (!is_same_user(fd)) {
        ep_fork_close(fd);
        return ep_error(EP_ESYS, "rank %u belongs to another user: run all ranks as the same user", r);
    }
    *out = fd;
    return 0;
}

/* Send this rank's hello, and wait for the hello of rank r. Returns 0, or EP_EPEERDIED if rank r has closed
 * the connection, or another error. No deadlock: rank r waits for the ranks below it before it accepts, and
 * rank 0 waits for none. So by induction over r, rank r accepts, unless a rank below it is missing. */
static int introduce(const EpWorldConfig *config, uint32_t r, int fd, Limit *limit) {
    EpFrame answer, hello = hello_of(config);
    int fd_in, got = 0;
    EP_TRY(ep_wire_send(fd, &hello, -1, limit->deadline_ns));
    for (;;) {
        got = ep_wire_receive(fd, &answer, &fd_in);
        if (fd_in >= 0) close(fd_in);
        if (got) break;
        if (is_over(limit))
            return ep_error(
                EP_ETIMEOUT,
                "rank %u did not answer while the world was made: it may be stopped or overloaded", r);
        poll(&(struct pollfd){fd, POLLIN, 0}, 1, ep_wire_ms_left(limit->deadline_ns));
    }
    if (got < 0) return got;
    if (answer.rank == r && is_hello(config, &answer)) return 0;
    return ep_error(EP_ECORRUPT, "rank %u did not answer with the nonce of this world", r);
}

/* Connect to rank r. The answer of rank r proves that the connection is in its sockets[], and no longer in a
 * place that another process can take (see Pending). If rank r has closed the connection before it answered,
 * it needed the place, or it has died. Then connect again: if it has died, the connection is refused. */
static int connect_to(const EpWorldConfig *config, uint32_t r, int *out, Limit *limit) {
    for (;;) {
        int fd = -1;
        EP_TRY(open_connection(config, r, &fd, limit));
        int code = introduce(config, r, fd, limit);
        if (code) ep_fork_close(fd);
        else *out = fd;
        if (code != EP_EPEERDIED) return code;
        if (is_over(limit)) return unreachable(r, EAGAIN);
        poll(NULL, 0, 1);
    }
}

/* Connections that this rank has accepted, and that have not yet sent their hello. Any process of the same
 * user can connect and then send nothing. Such a connection occupies a place here, but this rank never waits
 * for it. When all places are occupied, the oldest connection is closed.
 *
 * Such processes cannot keep a rank out:
 *   (1) A rank that has sent its hello needs no place. This rank tries to read a hello when it accepts a
 *       connection, and once more before it closes the connection for lack of a place. With the hello, the
 *       connection moves from this list to sockets[], which has an element for each rank.
 *   (2) A rank whose connection was closed before its hello arrived gets no answer, and connects again. */
#define MAX_PENDING 16u
/* Interval at which this rank checks that the first rank that has not connected yet is still alive. */
#define PROBE_NS 300000000ull
typedef struct {
    int fds[MAX_PENDING];
    uint32_t num;
} Pending;

static void remove_pending(Pending *c, uint32_t i) {
    memmove(&c->fds[i], &c->fds[i + 1], (--c->num - i) * sizeof c->fds[0]);
}

/* The next connection of the queue, or -1. The listening socket does not block. */
static int accept_one(const EpWorldConfig *config) {
    ep_fork_lock();
    int fd = ep_fork_guard(accept4(config->listen_fd, NULL, NULL, SOCK_CLOEXEC));
    ep_fork_unlock();
    return fd;
}

/* Read the hello of pending connection i. Returns 1 if it is an expected rank, and stores its socket in
 * sockets[]. The connection leaves the list, unless it has sent nothing yet. */
static uint32_t read_hello(const EpWorldConfig *config, Pending *c, uint32_t i, int sockets[EP_MAX_RANKS]) {
    EpFrame hello;
    int fd = c->fds[i], fd_in = -1, got = ep_wire_receive(fd, &hello, &fd_in);
    if (fd_in >= 0) close(fd_in);
    if (got == 0) return 0;
    remove_pending(c, i);
    const EpFrame answer = hello_of(config);
    if (got < 0 || !is_hello(config, &hello) || hello.rank <= config->rank ||
        hello.rank >= config->num_ranks || sockets[hello.rank] >= 0 || ep_wire_send(fd, &answer, -1, 0)) {
        ep_fork_close(fd);
        return 0;
    }
    sockets[hello.rank] = fd;
    return 1;
}

/* Accept connections of the queue. At most as many as there are places, so that the caller also reads hellos
 * and the clock while other processes connect faster than this rank accepts. Returns the number of expected
 * ranks among them. */
static uint32_t accept_pending(const EpWorldConfig *config, Pending *c, int sockets[EP_MAX_RANKS]) {
    uint32_t num = 0;
    for (uint32_t i = 0; i < MAX_PENDING; i++) {
        int fd = accept_one(config);
        if (fd < 0) break;
        if (!is_same_user(fd)) {
            ep_fork_close(fd);
            continue;
        }
        if (c->num == MAX_PENDING) num += read_hello(config, c, 0, sockets);
        if (c->num == MAX_PENDING) {
            ep_fork_close(c->fds[0]);
            remove_pending(c, 0);
        }
        c->fds[c->num++] = fd;
        num += read_hello(config, c, c->num - 1, sockets);
    }
    return num;
}

/* Wait at most until the deadline (and at most 100 ms) for connections and hellos, and process them. Returns
 * the number of expected ranks that have connected. */
static uint32_t accept_ranks(const EpWorldConfig *config, Pending *c, int sockets[EP_MAX_RANKS],
                             uint64_t deadline_ns) {
    struct pollfd p[1 + MAX_PENDING] = {{config->listen_fd, POLLIN, 0}};
    uint32_t num = 0;
    for (uint32_t i = 0; i < c->num; i++) p[1 + i] = (struct pollfd){c->fds[i], POLLIN, 0};
    poll(p, 1 + c->num, ep_wire_ms_left(deadline_ns));
    num += accept_pending(config, c, sockets);
    for (uint32_t i = c->num; i-- > 0;) num += read_hello(config, c, i, sockets);
    return num;
}

/* The first rank above this one that has not connected yet. */
static uint32_t first_absent(const EpWorldConfig *config, const int sockets[EP_MAX_RANKS]) {
    uint32_t r = config->rank + 1;
    while (r < config->num_ranks && sockets[r] >= 0) r++;
    return r;
}

/* Check whether rank r is alive. Its listening socket is open until it has connected to all others, has
 * failed, or has died. So a refused connection means that rank r will not come. Other errors mean nothing:
 * for example, the queue of a rank that is suspended may be full. */
static int probe(const EpWorldConfig *config, uint32_t r) {
    struct sockaddr_un address;
    socklen_t length;
    int fd;
    EP_TRY(open_socket_to(config, r, SOCK_NONBLOCK, &address, &length, &fd));
    int e = connect(fd, (struct sockaddr *)&address, length) ? errno : 0;
    ep_fork_close(fd);
    return e == ECONNREFUSED ? unreachable(r, e) : 0;
}

int ep_wire_connect(const EpWorldConfig *config, int sockets[EP_MAX_RANKS], uint64_t deadline_ns) {
    uint32_t num_absent = config->num_ranks - 1 - config->rank;
    uint64_t probe_at = ep_now_ns() + PROBE_NS;
    Limit limit = {deadline_ns, ep_now_ns()};
    Pending pending = {{0}, 0};
    int code = 0;
    for (uint32_t r = 0; r < EP_MAX_RANKS; r++) sockets[r] = -1;
    for (uint32_t r = 0; r < config->rank; r++)
        EP_TRY_GOTO(code, connect_to(config, r, &sockets[r], &limit), fail);
    while (num_absent) {
        if (is_over(&limit)) {
            code = ep_error(EP_ETIMEOUT,
                            "rank %u did not connect while a world of %u ranks was made: all ranks of the "
                            "group must create it",
                            first_absent(config, sockets), config->num_ranks);
            goto fail;
        }
        const uint64_t now = limit.looked_ns;
        const uint32_t absent = first_absent(config, sockets);
        code = now < probe_at ? 0 : probe(config, absent);
        if (now >= probe_at) probe_at = now + PROBE_NS;
        const uint64_t wait_until = code ? 0 : limit.deadline_ns < probe_at ? limit.deadline_ns : probe_at;
        num_absent -= accept_ranks(config, &pending, sockets, wait_until);
        /* If the absent rank has connected now, the probe failed because that rank had already connected to
         * all others and closed its listening socket. That is no error. */
        if (code && sockets[absent] < 0) {
            /* Set the error text again: a process that is no rank may have sent an invalid frame since. */
            if (code == EP_EPEERDIED) unreachable(absent, ECONNREFUSED);
            goto fail;
        }
        code = 0;
    }
    while (pending.num) ep_fork_close(pending.fds[--pending.num]);
    return 0;
fail:
    while (pending.num) ep_fork_close(pending.fds[--pending.num]);
    for (uint32_t r = 0; r < EP_MAX_RANKS; r++) {
        ep_fork_close(sockets[r]);
        sockets[r] = -1;
    }
    return code;
}
