"""How commands write: rich on a terminal, plain and unfolded text in a pipe."""

from __future__ import annotations

import os
import sys

from rich.console import Console, RenderableType
from rich.table import Table

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


def write(console: Console, title: str, *lines: RenderableType) -> None:
    """Print a bold title and what follows. Text may come from files: none of it is markup."""
    console.print(title, style="bold", markup=False, soft_wrap=True)
    for line in lines:
        console.print(line, markup=False, soft_wrap=isinstance(line, str))


def table(*titles: str) -> Table:
    """A table without lines, whose first column is text and whose others are numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, title in enumerate(titles):
        made.add_column(title, justify="right" if number else "left", no_wrap=True)
    return made
