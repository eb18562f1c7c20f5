/* deferred_free.h - deferred free: of objects that have lost their last reference and still have memory or
 * mappings of a GPU.
 *
 * A destructor runs at any time in any thread: when the garbage collector runs, or when a framework drops a
 * tensor. It must not wait for the GPU, because kernels there wait for peers, and a peer may wait for this
 * thread. It must not free GPU memory either, because that waits too, and because it invalidates a CUDA graph
 * that any thread is capturing. So a destructor only adds the object to the list of its owner. The next call
 * that may wait destroys the objects of the list: creation and close of a heap or layer, and the end of the
 * world.
 * Invariant: an object is in at most one list, once. Any number of threads may add and destroy. */
#ifndef EP_DEFERRED_FREE_H
#define EP_DEFERRED_FREE_H
#include <stdatomic.h>
#include <stddef.h>

typedef struct EpDeferredFree {
    struct EpDeferredFree *next;
    void (*destroy)(void *object); /* also frees the memory of this struct, which is a part of the object */
    void *object;
} EpDeferredFree;
typedef _Atomic(EpDeferredFree *) EpDeferredFrees;

static inline void ep_defer_free(EpDeferredFrees *list, EpDeferredFree *o, void (*destroy)(void *),
                                 void *object) {
    *o = (EpDeferredFree){atomic_load(list), destroy, object};
    while (!atomic_compare_exchange_weak(list, &o->next, o)) {
    }
}
static inline void ep_run_deferred_frees(EpDeferredFrees *list) {
    for (EpDeferredFree *o = atomic_exchange(list, NULL), *next; o; o = next) {
        next = o->next;
        o->destroy(o->object);
    }
}

#endif /* EP_DEFERRED_FREE_H */
