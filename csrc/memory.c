/* memory.c - see memory.h. */
#include "memory.h"

#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static EpMemory *memories; /* all of this process: a rank may be gone before a peer has found its memory */

EpMemory *ep_memory_add(void *address) {
    EpMemory *m = (EpMemory *)calloc(1, sizeof *m);
    if (!m) return NULL;
    m->num_refs = 1, m->address = address;
    pthread_mutex_lock(&lock);
    m->next = memories, memories = m;
    pthread_mutex_unlock(&lock);
    return m;
}

EpMemory *ep_memory_find(uint64_t card_address) {
    pthread_mutex_lock(&lock);
    EpMemory *m = memories;
    while (m && (uint64_t)(uintptr_t)m != card_address) m = m->next;
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
