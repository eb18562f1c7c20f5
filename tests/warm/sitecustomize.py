"""For programs under test that start ranks: EPMOE_TEST_WARM=1, with this folder on the path, has them forked from one process that
imports torch while the program does, where otherwise each would import it for itself."""

import multiprocessing
import os
from multiprocessing import forkserver

if os.environ.pop("EPMOE_TEST_WARM", None):  # not in what this process starts
    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
    forkserver.ensure_running()
    multiprocessing.get_context = lambda method=None: _context
