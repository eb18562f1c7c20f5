"""python -m epmoe.bench: see cli.py, where processes that it starts find their function."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
