"""`anyrank diff`: the differences between two sources."""

from __future__ import annotations

import sys

import click


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Part of the state, or pattern of names, to ignore. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as a JSON object.")
def command(a: str, b: str, ignore: tuple[str, ...], as_json: bool) -> None:
    """Compare the weights of A and B, of any formats, by names, shapes, dtypes and values.

    Two runs are compared step by step, including optimizers and other state. Exits with 1 if
    anything differs.
    """
    from anyrank.cli.console import show
    from anyrank.tools.inspect.diff import diff

    report = diff(a, b, ignore=ignore)
    show(report, as_json)
    sys.exit(0 if report else 1)
