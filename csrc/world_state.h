/* world_state.h - a world from within: world.c makes and ends it, exchange.c lets its ranks speak, watchdog.c looks after it. */
#ifndef EP_WORLD_STATE_H
#define EP_WORLD_STATE_H
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "record.h"
#include "wire.h"
#include "world.h"

#define EP_NUM_INBOX 2u /* a peer is at most one exchange ahead */
#define EP_MAX_WATCHED 256u

typedef struct {
    EpFrame frame;
    int fd;
    bool full;
} EpInbox;

typedef struct EpAction {
    void (*action)(void *);
    void *argument;
    struct EpAction *next;
} EpAction;

struct EpWorld {
    uint32_t rank, num_ranks;
    pid_t pid;
    bool is_threads;
    char *record_folder; /* where the flight record goes, or NULL */
    _Atomic uint64_t timeout_ns;
    atomic_int num_refs;
    int sockets[EP_MAX_RANKS], wake_fd;
    pthread_t watchdog;
    bool has_watchdog;
    EpRing ring;                       /* this rank's notes; written by its thread */
    atomic_uint num_heaps, num_layers; /* made so far: their numbers in the flight record */
    char page[EP_PAGE_BYTES];          /* written once, by whoever sets RECORD_WRITING */

    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    bool closing, closed;
    uint64_t left_ns; /* when this rank left alone with operations on their way, or 0: see watch_out */
    bool in_haste;    /* the process is about to end */
    int end_code;     /* why the world ended, 0 while it lives */
    char end_text[256];
    uint64_t seq;
    EpInbox inbox[EP_MAX_RANKS][EP_NUM_INBOX];
    uint64_t left_at_ns[EP_MAX_RANKS]; /* when a peer said goodbye, or 0 */
    uint32_t lost_ranks;               /* see ep_world_lost_ranks */
    const EpCommBuffer *watched[EP_MAX_WATCHED];
    EpAction *at_release;
    EpRecord record; /* what is known of all ranks; complete at the end */
    EpRecord stuck;  /* notes of the ranks that are stuck, each in which step, or 0; see look_for_disorder */
    uint64_t stuck_step[EP_MAX_RANKS], looked_ns, disorder_ns;
    uint64_t on_gpu_step,
        on_gpu_ns; /* what the GPU is stuck in, and when it said so last; with the notes about it */
    EpNotes on_gpu_notes;
    enum { RECORD_OPEN, RECORD_WRITING, RECORD_DONE } record_state;
};

/* The thread of a world, and its argument. */
void *ep_world_watch_main(void *world);
/* End the world once; the lock is held. */
void ep_world_end(EpWorld *world, int code, uint32_t rank, const char *text);
/* Once, after the end: make the page, and write it where that is wanted.  The lock is held, and let go of
 * while the file is written. */
void ep_world_finish_record(EpWorld *world);
/* Until the page is there, if the world has ended; at most some 400 ms.  The lock is held. */
void ep_world_await_record(EpWorld *world);

#endif /* EP_WORLD_STATE_H */
