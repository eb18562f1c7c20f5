/* fork.h - descriptors that a forked child must not keep.
 *
 * A forked child inherits the sockets of its parent. As long as the child keeps them open, the peers do not
 * see the death of the parent. So every socket of a world is guarded: the listening socket, a socket that is
 * being connected, one that has been accepted but not yet identified, and one to a peer. A child closes all
 * guarded descriptors before fork() returns in it.
 *
 * Exports: ep_fork_lock, _unlock, _count, _guard and _close.
 * Invariants:
 *   (1) A descriptor is guarded from its creation to its close, without a gap. To achieve this, the thread
 *       creates and guards it while it holds the fork lock, and ep_fork_close forgets and closes it while it
 *       holds the lock. fork() takes the lock too. So no fork sees an open socket that is not guarded, or a
 *       guarded number that is closed already and may belong to another file.
 *   (2) The fork lock is the innermost lock. A thread that holds it takes no other lock of the library, and
 *       makes no call that blocks. So fork() waits for it only briefly, and no deadlock is possible. */
#ifndef EP_FORK_H
#define EP_FORK_H
#include <stdint.h>

void ep_fork_lock(void);
void ep_fork_unlock(void);
/* How many forks lie between the process that loaded the library and this one. What was made at another count
 * belongs to a parent process. Unlike getpid(), this makes no system call. */
uint32_t ep_fork_count(void);
/* Guard a descriptor that was just created. The caller holds the lock. fd < 0: nothing happens. Returns fd,
 * or -1 and errno if there is no memory; then fd has been closed. */
int ep_fork_guard(int fd);
/* Close a descriptor if it is guarded, else do nothing. The caller does not hold the lock. */
void ep_fork_close(int fd);

#endif /* EP_FORK_H */
