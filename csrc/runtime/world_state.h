/* world_state.h - the fields of a world, for the four files that implement it. world.c creates and closes a
 * world, all_gather.c implements the all-gathers, watchdog.c reads the sockets in a thread, and
 * world_end.c ends the world. The other three call world_end.c, which calls none of them.
 * Invariant: after creation and before release, the fields below `lock` are used only while the lock is held.
 * The host threads and the watchdog thread share them. */
#ifndef EP_WORLD_STATE_H
#define EP_WORLD_STATE_H
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "runtime/flight_record.h"
#include "runtime/socket.h"
#include "runtime/world.h"

/* A peer is at most one all-gather ahead, because an all-gather ends only after every rank has sent its
 * frame. So two places for each peer are enough. */
#define EP_NUM_INBOX 2u
#define EP_MAX_WATCHED 256u

/* A place for one all-gather frame of a peer. ep_world_read_peer fills it, an all-gather empties it. */
typedef struct {
    EpFrame frame;
    int fd; /* the descriptor that came with the frame, or -1 */
    bool full;
} EpInbox;

/* One registration of ep_world_at_release. */
typedef struct EpAction {
    void (*action)(void *);
    void *argument;
    struct EpAction *next;
} EpAction;

struct EpWorld {
    uint32_t rank, num_ranks;
    pid_t pid;
    uint32_t num_forks; /* ep_fork_count() of the process that made the world */
    bool is_threads;
    bool has_cores;      /* an all-gather may keep a core busy: see look_for_frame */
    char *record_folder; /* folder for the flight record, or NULL (EPMOE_FLIGHT_RECORD) */
    _Atomic uint64_t timeout_ns;
    atomic_int num_refs;
    int sockets[EP_MAX_RANKS]; /* to each peer; -1: this rank itself, or the peer's end is closed */
    int wake_fd;               /* an eventfd; close writes to it to end the watchdog thread */
    pthread_t watchdog;
    bool has_watchdog;
    EpRing ring;                       /* call records of this rank; written by its host threads */
    atomic_uint num_heaps, num_layers; /* created so far: the next numbers in the flight record */
    char page[EP_PAGE_BYTES];          /* written once, by the thread that sets RECORD_WRITING */

    pthread_mutex_t lock;   /* guards all fields below */
    pthread_cond_t changed; /* a frame has arrived, the world has ended, or the page is complete */
    bool closing, closed;
    bool is_settled;  /* a thread joins the watchdog thread and closes all descriptors, or has done it */
    uint64_t left_ns; /* time at which this rank left alone with operations in flight, or 0; see watchdog.c */
    bool in_haste;    /* the process is about to end, so drain waits at most HASTE_NS */
    int end_code;     /* EpCode with which the world ended; 0 while it has not ended */
    char end_text[EP_END_BYTES];
    uint64_t seq; /* number of this rank's newest all-gather */
    bool in_call; /* a thread of this rank is in a call of ep_world_enter_call */
    EpInbox inbox[EP_MAX_RANKS][EP_NUM_INBOX];
    uint64_t left_at_ns[EP_MAX_RANKS]; /* time at which a peer's goodbye arrived, or 0 */
    uint32_t lost_ranks;               /* see ep_world_lost_ranks */
    bool has_place;                    /* the ranks are those of one of several nodes; ep_world_set_place */
    uint32_t node, first_rank;
    const EpCommBuffer *watched[EP_MAX_WATCHED];
    EpAction *at_release;
    EpDeferredFrees deferred_frees; /* needs no lock */
    EpRecord record;                /* the call records of all ranks; complete after the world has ended */
    /* Detection of mismatched calls; see check_call_order. */
    EpRecord stuck;                    /* call records of the ranks that are stuck */
    uint64_t stuck_step[EP_MAX_RANKS]; /* the step in which each rank is stuck, or 0 */
    uint64_t looked_ns;                /* time of the last check */
    uint64_t disorder_ns;              /* time since which stuck ranks disagree, or 0 */
    uint64_t on_gpu_step;              /* the step in which this rank's GPU is stuck, or 0 */
    uint64_t on_gpu_ns;                /* time at which the GPU last reported that it is stuck */
    EpCallRecords on_gpu_records;      /* the call records of the steps next to on_gpu_step */
    enum { RECORD_OPEN, RECORD_WRITING, RECORD_DONE } record_state;
};

/* Process the frames of peer r that have arrived, without waiting. The caller holds the lock. This may end
 * the world, close the peer's socket, and change the calling thread's error text. */
void ep_world_read_peer(EpWorld *w, uint32_t r);

/* The main function of the watchdog thread; its argument is the EpWorld. */
void *ep_world_watch_main(void *world);
/* End the world; only the first call has an effect. The caller holds the lock. rank: the culprit, or
 * EP_NO_RANK if it is on another node. */
void ep_world_end(EpWorld *world, int code, uint32_t rank, const char *text);
/* As ep_world_end, because a wait has failed. word: the EpWord for which it waited. If that is a signal,
 * there is no culprit, because any rank may signal any word: rank is then the rank that has waited. */
void ep_world_end_wait(EpWorld *world, int code, uint32_t rank, uint32_t word, const char *text);
/* As ep_world_end_wait, but the text is not completed: another rank, or another node, has done that. */
void ep_world_end_reported(EpWorld *world, int code, uint32_t rank, uint32_t word, const char *text);
/* 0, or the error with which the world has ended, or EP_ECLOSED after close. The caller holds the lock. */
int ep_world_check_locked(EpWorld *world);
/* True if the world has ended and the page can be made: every peer has sent its call records or its socket is
 * closed, or 200 ms have passed. */
bool ep_world_record_is_due(const EpWorld *world);
/* If the world has ended and its flight record is not made yet: make the page, and write it to record_folder
 * if that is set. Other calls do nothing. The caller holds the lock, which is released during the write. */
void ep_world_finish_record(EpWorld *world);
/* If the world has ended, return after the page is complete. The wait for the peers' call records lasts at
 * most 400 ms from the end of the world, and the wait for the file at most 2 s. The caller holds the lock. */
void ep_world_await_record(EpWorld *world);

#endif /* EP_WORLD_STATE_H */
