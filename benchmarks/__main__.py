"""python -m benchmarks: see cli.py, from which the processes that it starts import their function."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
