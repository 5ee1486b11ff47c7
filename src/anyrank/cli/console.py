"""Terminal output of the commands."""

from __future__ import annotations

from typing import Protocol

import click
from rich.console import Console, RenderableType

# Wider than any line: a narrow terminal wraps lines instead of truncating them, and the output
# does not depend on the terminal. rich itself honors NO_COLOR and FORCE_COLOR.
LINE_COLUMNS = 10_000


class Report(Protocol):
    """The result of a command: its `str` begins with a title."""

    def to_json(self) -> str:
        """All of it, as JSON."""
        ...


def out() -> Console:
    """Standard output, for results."""
    return Console(width=LINE_COLUMNS, highlight=False)


def err() -> Console:
    """Standard error, for progress."""
    return Console(stderr=True, highlight=False)


def write(console: Console, title: str, *lines: RenderableType) -> None:
    """Print a bold title and lines. Text may come from files, so markup is not interpreted."""
    console.print(title, style="bold", markup=False)
    for line in lines:
        console.print(line, markup=False)


def show(report: Report, as_json: bool) -> None:
    """Print a report as a JSON object, or as its lines."""
    if as_json:
        click.echo(report.to_json())
    else:
        write(out(), *str(report).split("\n"))
