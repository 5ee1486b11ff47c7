"""Progress on the first rank: a bar for people, a callback for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

LONG_BYTES = 1 << 30


class Progress:
    """Counts bytes and reports them.

    Args:
        total: the number of bytes to read.
        report: called with (bytes done, total bytes).
    """

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self.total = total
        self.done = 0
        self.report = report

    def add(self, nbytes: int) -> None:
        """Count bytes."""
        self.done += nbytes
        if self.report is not None:
            self.report(min(self.done, self.total), self.total)


@contextmanager
def progress_for(
    wanted: bool | Callable[[int, int], None] | None, first_rank: bool, total: int
) -> Generator[Progress, None, None]:
    """Show the progress that the caller of a load requested; silent on other ranks."""
    if not first_rank or wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield Progress(total, None)
    elif callable(wanted):
        yield Progress(total, wanted)
    else:
        with _bar("loading", total) as report:
            yield Progress(total, report)


@contextmanager
def progress_of_tool(doing: str, total: int) -> Generator[Progress, None, None]:
    """Show the progress of a tool that works on files in one process, such as "verifying".

    Shown only on a terminal, and only if the work takes long enough to make one wonder.
    """
    if total < LONG_BYTES or not sys.stderr.isatty():
        yield Progress(total, None)
        return
    with _bar(doing, total) as report:
        yield Progress(total, report)


@contextmanager
def _bar(doing: str, total: int) -> Generator[Callable[[int, int], None], None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns: tuple[Any, ...] = (f"anyrank: {doing}", BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, _: bar.update(task, completed=done)
