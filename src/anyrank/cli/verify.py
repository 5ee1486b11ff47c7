"""`anyrank verify`: check that a file or a folder is whole."""

from __future__ import annotations

import sys

import click


@click.command("verify")
@click.argument("path")
@click.option("--finite", is_flag=True, help="Also look for NaN and infinite values.")
@click.option("--json", "as_json", is_flag=True, help="The whole report as a JSON object.")
def command(path: str, finite: bool, as_json: bool) -> None:
    """Read PATH from end to end, and say what is wrong with it.

    Structure, sizes, offsets, the index against the files, and every checksum that came with them;
    of a run, every step. Exit status 1 if anything is wrong.
    """
    from anyrank.cli.console import show
    from anyrank.tools.inspect.verify import verify

    report = verify(path, finite=finite)
    show(report, as_json)
    sys.exit(0 if report else 1)
