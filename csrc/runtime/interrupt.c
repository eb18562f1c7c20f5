/* interrupt.c - asks the program whether a wait is interrupted. The Python module registers the question
 * (ep_world_set_interrupt): it runs the handlers of signals, and the answer is yes if one of them has raised.
 *
 * Exports ep_world_set_interrupt, _set_waiting and _check_handler (epmoe.h), and the functions of
 * interrupt.h.
 * State of each thread: when it was last asked, and whether its operation was interrupted. */
#include "runtime/interrupt.h"

#include <stdatomic.h>

#include "epmoe.h"
#include "protocol/port.h"
#include "runtime/error.h"

static bool (*_Atomic question)(void);
static _Thread_local struct {
    uint64_t asked_ns;
    bool is_interrupted, is_asking, is_worker;
} me;

void ep_world_set_interrupt(bool (*wanted)(void)) { atomic_store(&question, wanted); }

bool ep_ask_interrupt(void) {
    bool (*ask)(void) = atomic_load(&question);
    if (!ask) return false;
    const bool was_asking = me.is_asking; /* by an all-gather that a signal handler makes */
    me.is_asking = true;
    const bool yes = ask();
    me.is_asking = was_asking;
    return yes;
}

bool ep_interrupted(void) {
    if (me.is_worker || me.is_interrupted) return me.is_interrupted;
    if (ep_now_ns() - me.asked_ns < EP_INTERRUPT_NS) return false;
    me.is_interrupted = ep_ask_interrupt();
    me.asked_ns = ep_now_ns(); /* a handler may have taken long */
    return me.is_interrupted;
}

bool ep_take_interrupt(void) {
    const bool yes = me.is_interrupted;
    me.is_interrupted = false;
    return yes;
}

void ep_never_interrupt(void) { me.is_worker = true; }
bool ep_world_set_waiting(bool is_waiting) {
    const bool before = me.is_asking;
    me.is_asking = is_waiting;
    return before;
}
int ep_world_check_handler(void) {
    return me.is_asking ? ep_error(EP_EINVAL,
                                   "a signal handler called epmoe while an operation waits: let the handler "
                                   "set a flag, or raise an exception")
                        : 0;
}
