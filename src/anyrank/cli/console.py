"""How commands write: rich on a terminal, plain and unfolded text in a pipe."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PIPE_COLUMNS = 200


def out() -> Console:
    """Standard output, as wide as the terminal; in a pipe wide enough to cut nothing off.

    rich itself honours COLUMNS, NO_COLOR and FORCE_COLOR.
    """
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPE_COLUMNS if wide else None, highlight=False)


def err() -> Console:
    """Standard error: progress, which must not mix with results."""
    return Console(stderr=True, highlight=False)
