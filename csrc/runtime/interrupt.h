/* interrupt.h - a wait that the user interrupts, for example by Ctrl-C; interrupt.c implements it. */
#ifndef EP_INTERRUPT_H
#define EP_INTERRUPT_H
#include <stdbool.h>
#include <stdint.h>

#define EP_INTERRUPT_NS 100000000ull /* interval at which a wait asks whether it is interrupted */

/* Ask the program now. The caller holds no lock that the program may need (Python's, for example). */
bool ep_ask_interrupt(void);
/* True if the program has interrupted this thread's wait. A thread that waits without a lock calls it about
 * once a millisecond; it asks at the interval above. */
bool ep_interrupted(void);
/* True once after a wait of this thread was interrupted. */
bool ep_take_interrupt(void);
/* This thread is a worker of an operation: no wait of it is interrupted. The thread that called the operation
 * is asked instead. */
void ep_never_interrupt(void);
#endif /* EP_INTERRUPT_H */
