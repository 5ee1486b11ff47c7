"""`anyrank verify`: check that a file or a folder is complete and not corrupt."""

from __future__ import annotations

import sys

import click


@click.command("verify")
@click.argument("path")
@click.option("--finite", is_flag=True, help="Also look for NaN and infinite values.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as a JSON object.")
def command(path: str, finite: bool, as_json: bool) -> None:
    """Read all of PATH, and report what is wrong with it.

    Checks structure, sizes and offsets, that the index matches the files, and every stored
    checksum. For a run, checks every step. Exits with 1 if anything is wrong.
    """
    from anyrank.cli.console import show
    from anyrank.tools.inspect.verify import verify

    report = verify(path, finite=finite)
    show(report, as_json)
    sys.exit(0 if report else 1)
