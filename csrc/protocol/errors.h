/* errors.h - the error codes, each with the Python exception that it becomes. Exports EP_ERRORS and EpCode.
 *
 * Functions of the host return them. A header carries one to the peers (EpHeader), and a fault record carries
 * one from a worker to its host (EpFaultRecord).
 * Invariant: 0 is success, and every error is negative. */
#ifndef EP_ERRORS_H
#define EP_ERRORS_H

/* X(code, value, name of the exception, text) */
#define EP_ERRORS(X)                                                          \
    X(EP_EINVAL, -1, "ValueError", "wrong argument")                          \
    X(EP_ETYPE, -2, "TypeError", "argument of the wrong type")                \
    X(EP_ENOMEM, -3, "HeapExhausted", "out of memory")                        \
    X(EP_EPEERDIED, -4, "PeerDied", "a peer died")                            \
    X(EP_ETIMEOUT, -5, "EpTimeout", "a wait reached its limit")               \
    X(EP_EMISMATCH, -6, "EpMismatch", "ranks disagree")                       \
    X(EP_EOVERFLOW, -7, "EpOverflow", "more rows than there is capacity for") \
    X(EP_EINDEX, -8, "EpIndexError", "expert index out of range")             \
    X(EP_EPEER, -9, "PeerError", "a peer failed before the operation")        \
    X(EP_ECLOSED, -10, "EpClosed", "used after close")                        \
    X(EP_ESYS, -11, "EpError", "operating system error")                      \
    X(EP_ECUDA, -12, "EpError", "CUDA error")                                 \
    X(EP_ECORRUPT, -13, "EpError", "a peer's words make no sense")            \
    X(EP_ERUNTIME, -14, "RuntimeError", "another error")
typedef enum {
    EP_OK = 0,
#define X(code, value, exception, text) code = value,
    EP_ERRORS(X)
#undef X
} EpCode;

#endif /* EP_ERRORS_H */
