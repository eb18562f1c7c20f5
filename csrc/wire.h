/* wire.h - sockets between the ranks of a world: framed messages that may carry one descriptor. */
#ifndef EP_WIRE_H
#define EP_WIRE_H
#include "epmoe.h"

typedef enum {
    EP_FRAME_HELLO = 1,
    EP_FRAME_EXCHANGE = 2,
    EP_FRAME_ABORT = 3,
    EP_FRAME_GOODBYE = 4,
    EP_FRAME_NOTES = 5,
    EP_FRAME_STUCK = 6
} EpFrameKind;
typedef struct {
    uint32_t abi, kind;
    uint64_t seq;
    int32_t code;
    uint32_t rank, num_bytes, has_fd,
        about; /* about: of an exchange, the call that it is a part of, or 0: see ep_ring_exchange */
    _Alignas(8) unsigned char bytes[EP_EXCHANGE_BYTES];
} EpFrame;

/* Send a whole frame; fd is -1 or a descriptor to pass.  deadline_ns is on the clock of ep_now_ns.  EP_EPEERDIED: the other end is gone;
 * EP_ESYS: it is not, but this cannot be sent; EP_ETIMEOUT. */
int ep_wire_send(int socket, const EpFrame *frame, int fd, uint64_t deadline_ns);
/* 1: a frame (and *fd, or -1); 0: nothing there; EP_EPEERDIED: the other end is gone; EP_ECORRUPT. */
int ep_wire_receive(int socket, EpFrame *frame, int *fd);
/* Wait for one frame. */
int ep_wire_await(int socket, EpFrame *frame, int *fd, uint64_t deadline_ns);
/* Connect this rank to all others: sockets[r], -1 at its own place. */
int ep_wire_connect(const EpWorldConfig *config, int sockets[EP_MAX_RANKS], uint64_t deadline_ns);

#endif /* EP_WIRE_H */
