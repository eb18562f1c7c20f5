/* socket.c - sending and receiving frames over AF_UNIX SOCK_SEQPACKET sockets. See socket.h. bootstrap.c
 * connects the sockets.
 *
 * Exports: ep_wire_send, ep_wire_receive and ep_wire_ms_left. */
#include "runtime/socket.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "protocol/words.h"
#include "runtime/error.h"

int ep_wire_ms_left(uint64_t deadline_ns) {
    uint64_t now = ep_now_ns();
    if (now >= deadline_ns) return 0;
    return (int)((deadline_ns - now) / 1000000u > 100u ? 100u : (deadline_ns - now) / 1000000u + 1u);
}

int ep_wire_send(int socket_fd, const EpFrame *frame, int fd, uint64_t deadline_ns) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    EpFrame f = *frame;
    f.abi = EP_ABI_VERSION;
    f.has_fd = fd >= 0;
    struct iovec iov = {&f, sizeof f};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        m.msg_control = &control;
        m.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    for (;;) {
        if (sendmsg(socket_fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof f) return 0;
        if (errno == EINTR) continue;
        if (errno == EPIPE || errno == ECONNRESET)
            return ep_error(EP_EPEERDIED, "a peer has closed its socket: %s", strerror(errno));
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return ep_error(EP_ESYS, "cannot send to a peer: %s", strerror(errno));
        struct pollfd p = {socket_fd, POLLOUT, 0};
        int left = ep_wire_ms_left(deadline_ns);
        if (left == 0)
            return ep_error(EP_ETIMEOUT, "timed out while sending to a peer, which does not receive");
        poll(&p, 1, left);
    }
}

int ep_wire_receive(int socket_fd, EpFrame *frame, int *fd) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {frame, sizeof *frame};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    uint32_t num_fds = 0;
    *fd = -1;
    ssize_t n = recvmsg(socket_fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    /* If the peer closed its end while data was unread there, the first recvmsg() reports a reset. Frames
     * that the peer had sent before are still queued, and the second recvmsg() returns them. */
    if (n < 0 && errno == ECONNRESET) n = recvmsg(socket_fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    if (n <= 0) return ep_error(EP_EPEERDIED, "a peer has closed its socket");
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        /* CMSG_SPACE rounds up, so a control buffer for one descriptor holds two. Close the second. */
        for (size_t at = CMSG_LEN(0); at + sizeof(int) <= c->cmsg_len; at += sizeof(int)) {
            int got;
            memcpy(&got, (unsigned char *)c + at, sizeof got);
            if (num_fds++ == 0) *fd = got;
            else close(got);
        }
    }
    if (num_fds > 1) m.msg_flags |= MSG_CTRUNC; /* no rank sends two: the message is invalid */
    /* False if the kernel dropped the descriptor because this process may open no more. The frame is still
     * valid then. Its *fd is -1, and the function that needs the descriptor reports the error. */
    const bool could_open = num_fds || !(m.msg_flags & MSG_CTRUNC);
    if (n == (ssize_t)sizeof *frame && !(m.msg_flags & MSG_TRUNC) && frame->abi == EP_ABI_VERSION &&
        !(could_open && m.msg_flags & MSG_CTRUNC) && frame->num_bytes <= EP_ALL_GATHER_BYTES &&
        (!could_open || (frame->has_fd != 0) == (*fd >= 0)))
        return 1;
    if (*fd >= 0) close(*fd);
    *fd = -1;
    return ep_error(EP_ECORRUPT,
                    "a peer sent a message of another version of epmoe: install the same one for all ranks");
}
