"""For programs under test that start ranks: EPMOE_TEST_WARM=1, with this folder on the path, has them forked from the program itself,
which has imported torch, where otherwise each would import it for itself."""

import multiprocessing
import os

if os.environ.pop("EPMOE_TEST_WARM", None):  # not in what this process starts
    _context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: _context
