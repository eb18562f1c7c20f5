"""For programs under test that start ranks: EPMOE_TEST_WARM=1, with this folder on the path, has them forked
from the program itself, which has imported torch, where otherwise each would import it for itself.

The first rank that connects has the program's store look up a name, in a thread, and who is forked meanwhile
waits for the resolver's lock for good: so all wait until the last one is there, which is when the program
begins to wait for them."""

import multiprocessing
import multiprocessing.connection
import os

if os.environ.pop("EPMOE_TEST_WARM", None):  # not in what this process starts
    _context, _wait, _gate = (
        multiprocessing.get_context("fork"),
        multiprocessing.connection.wait,
        list(os.pipe()),
    )

    class _Process(_context.Process):
        def run(self):
            if _gate:
                os.close(_gate[1])
                os.read(_gate[0], 1)  # its end: nobody writes
            super().run()

    def _wait_for_ranks(*args, **kwargs):
        while _gate:
            os.close(_gate.pop())
        return _wait(*args, **kwargs)

    _context.Process = _Process
    multiprocessing.connection.wait = _wait_for_ranks
    multiprocessing.get_context = lambda method=None: _context
