"""Terminal output of the commands."""

from __future__ import annotations

from typing import Protocol

import click
from rich.console import Console, RenderableType

# Wider than any line: a narrow terminal wraps lines instead of truncating them, and the output
# does not depend on the terminal. rich itself honors NO_COLOR and FORCE_COLOR.
LINE_COLUMNS = 10_000


class Report(Protocol):
    """The result of a command; the first line of its `str` is a title."""

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        ...


def out() -> Console:
    """Return a console on standard output, for results."""
    return Console(width=LINE_COLUMNS, highlight=False)


def err() -> Console:
    """Return a console on standard error, for progress."""
    return Console(stderr=True, highlight=False)


def write(console: Console, title: str, *lines: RenderableType) -> None:
    """Print a bold title and lines; markup is not interpreted, because text may come from files."""
    console.print(title, style="bold", markup=False)
    for line in lines:
        console.print(line, markup=False)


def show(report: Report, as_json: bool) -> None:
    """Print a report as a JSON object or as text."""
    if as_json:
        click.echo(report.to_json())
    else:
        write(out(), *str(report).split("\n"))
