"""A faster start of ranks for programs under test.

With EPMOE_TEST_WARM=1 and this folder on PYTHONPATH, a program forks its ranks. The ranks inherit the
imported torch, instead of importing it again.

All ranks wait at a gate until the program has forked the last one. When the first rank connects, a thread
of the program's store resolves a host name and holds the resolver's lock. A rank that is forked meanwhile
would wait for this lock forever. The gate opens when the program begins to wait for its ranks.
"""

import multiprocessing
import multiprocessing.connection
import os

if os.environ.pop("EPMOE_TEST_WARM", None):  # removed, so that child processes do not do this
    _context = multiprocessing.get_context("fork")
    _wait = multiprocessing.connection.wait
    _gate = list(os.pipe())

    class _Process(_context.Process):
        def run(self):
            if _gate:
                os.close(_gate.pop())
                os.read(_gate[0], 1)  # returns when the program closes the write end
                # A rank waits for its parent by the same function as the program for its ranks: nothing may
                # be left there to close, because the numbers belong to other files of the rank by then.
                os.close(_gate.pop())
            super().run()

    def _wait_for_ranks(*args, **kwargs):
        while _gate:
            os.close(_gate.pop())
        return _wait(*args, **kwargs)

    _context.Process = _Process
    multiprocessing.connection.wait = _wait_for_ranks
    multiprocessing.get_context = lambda method=None: _context
