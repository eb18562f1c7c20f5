/* memory.c - the list of heap memory in this process, and memory that its world frees later; see memory.h.
 * Invariant: `lock` guards the list and the reference counts. A pointer from a peer is only compared with the
 * entries of the list, and never dereferenced. */
#include "runtime/memory.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "runtime/world.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* All registered memory of this process. A rank may free its memory before a peer looks for it; the peer then
 * finds no entry, instead of using a pointer to freed memory. */
static EpMemory *memories;

/* A child of fork() gets the lock as it was: let nobody hold it meanwhile. */
static void lock_for_fork(void) { pthread_mutex_lock(&lock); }
static void unlock_after_fork(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void register_handlers(void) {
    pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork);
}

EpMemory *ep_memory_add(void *address) {
    EpMemory *m = (EpMemory *)calloc(1, sizeof *m);
    if (!m) return NULL;
    m->num_refs = 1;
    m->address = address;
    pthread_mutex_lock(&lock);
    m->next = memories;
    memories = m;
    pthread_mutex_unlock(&lock);
    return m;
}

EpMemory *ep_memory_find(uint64_t handle_address) {
    pthread_mutex_lock(&lock);
    EpMemory *m = memories;
    while (m && (uint64_t)(uintptr_t)m != handle_address) m = m->next;
    if (m) m->num_refs++;
    pthread_mutex_unlock(&lock);
    return m;
}

bool ep_memory_drop(EpMemory *m) {
    pthread_mutex_lock(&lock);
    bool last = --m->num_refs == 0;
    for (EpMemory **at = &memories; last && *at; at = &(*at)->next)
        if (*at == m) {
            *at = m->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    return last;
}

/* ---- memory that is left to a world ---- */

typedef struct {
    const EpBackend *backend;
    int device;
    void *address;
    uint64_t num_bytes;
} RetainedBlock;
static _Atomic uint64_t retained_bytes;

static void free_retained(void *block) {
    RetainedBlock *k = (RetainedBlock *)block;
    k->backend->heap_close(k->device, k->address, k->num_bytes);
    atomic_fetch_sub(&retained_bytes, k->num_bytes);
    free(k);
}

void ep_memory_retain(EpWorld *world, const EpBackend *backend, int device, void *address,
                      uint64_t num_bytes) {
    RetainedBlock *k = (RetainedBlock *)malloc(sizeof *k);
    atomic_fetch_add(&retained_bytes, num_bytes);
    if (!k) return; /* the memory is never freed: without this record, the world does not know of it */
    *k = (RetainedBlock){backend, device, address, num_bytes};
    if (!ep_world_at_release(world, free_retained, k)) free(k);
}

uint64_t ep_memory_retained_bytes(void) { return atomic_load(&retained_bytes); }
