"""`python -m k3comm`: the command line."""

from __future__ import annotations

import sys

from k3comm.cli import main

# Guarded, since processes that multiprocessing starts import the main module again.
if __name__ == "__main__":
    sys.exit(main())
