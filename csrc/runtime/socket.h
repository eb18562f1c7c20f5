/* socket.h - sockets between the ranks of a world. They carry frames of one fixed size, each with at most one
 * file descriptor. Exports: send and receive a frame (socket.c); connect to all peers (bootstrap.c).
 * No function here blocks without a deadline. */
#ifndef EP_WIRE_H
#define EP_WIRE_H
#include "epmoe.h"

typedef enum {
    EP_FRAME_HELLO = 1,      /* first frame in each direction: rank and nonce */
    EP_FRAME_ALL_GATHER = 2, /* one rank's part of an all-gather */
    EP_FRAME_ABORT = 3,      /* the sender's world has ended: code, rank and text of the reason */
    EP_FRAME_GOODBYE = 4,    /* the sender closes the world in order */
    EP_FRAME_RECORDS = 5,    /* the sender's newest call records, after the end of its world */
    EP_FRAME_STUCK = 6       /* the sender is stuck in step seq (0: no longer), with its call records */
} EpFrameKind;
typedef struct {
    uint32_t abi, kind;
    uint64_t seq;
    int32_t code;
    uint32_t rank, num_bytes, has_fd;
    /* For an all-gather: the collective call that it is part of, or 0; see ep_ring_all_gather. For an abort:
     * the EpWord of the wait that failed, or 0. */
    uint32_t about;
    _Alignas(8) unsigned char bytes[EP_ALL_GATHER_BYTES];
} EpFrame;

/* Send a whole frame. fd: a descriptor to pass, or -1. deadline_ns: a time of the clock of ep_now_ns.
 * EP_EPEERDIED: the peer's end is closed. EP_ESYS: it is open, but the frame cannot be sent. EP_ETIMEOUT: the
 * peer did not receive before the deadline. */
int ep_wire_send(int socket, const EpFrame *frame, int fd, uint64_t deadline_ns);
/* Receive a frame without waiting. 1: a frame was received; *fd is its descriptor, or -1. 0: there is none.
 * EP_EPEERDIED: the peer's end is closed. EP_ECORRUPT: the message is not a valid frame of this version. */
int ep_wire_receive(int socket, EpFrame *frame, int *fd);
/* The time until the deadline for poll(): 0 if it has passed, otherwise 1 to 100 ms. The limit of 100 ms
 * makes every wait check its deadline again, also if the process was suspended. */
int ep_wire_ms_left(uint64_t deadline_ns);
/* Connect this rank to all others. sockets[r] is the socket to rank r; -1 at this rank's own index. After an
 * error all entries are -1. Forked children close these sockets; close them with ep_fork_close. */
int ep_wire_connect(const EpWorldConfig *config, int sockets[EP_MAX_RANKS], uint64_t deadline_ns);

#endif /* EP_WIRE_H */
