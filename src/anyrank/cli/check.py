"""`anyrank check`: run a training script up to its first step and check its set-up."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import click

from anyrank.cli import torchrun
from anyrank.cli.run import environ
from anyrank.errors import AnyrankError


@click.command("check", context_settings={"allow_interspersed_args": False})
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="The findings as a JSON object.")
@click.option(
    "-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as of python -m."
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int, as_json: bool, is_module: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Look for mistakes in the set-up of SCRIPT on several ranks.

    The script runs with its ARGUMENTS up to its first optimizer step. In place of the step the
    model and its optimizers are checked, and all ranks end: nothing is trained or saved. Exit
    status 1 if there are findings.
    """
    from anyrank.cli.console import err, show
    from anyrank.watching.findings import Finding, Findings

    program = torchrun.program_of("check", is_module, script, arguments)
    result = _run(ranks, script, program)
    if result["ranks"] != ranks:
        err().print(
            f"anyrank: {script} made no group of {ranks} ranks: the first was checked alone",
            markup=False,
        )
    findings = Findings([Finding(**row) for row in result["findings"]], result["ranks"])
    show(findings, as_json)
    sys.exit(1 if findings else 0)


def _run(ranks: int, script: str, program: tuple[str, ...]) -> dict[str, Any]:
    """Return the findings of the ranks that run a program.

    Raises:
        AnyrankError: the program came to no step.
    """
    with tempfile.TemporaryDirectory(prefix="anyrank-check-") as folder:
        path, log = os.path.join(folder, "result.json"), os.path.join(folder, "log")
        line = torchrun.line(ranks, "-m", "anyrank.watching.first_step", path, *program)
        code = torchrun.run_to_end(line, log, environ(ranks), f"{script}: no optimizer step")
        if not os.path.exists(path):
            ended = f"failed with exit code {code}" if code else "ended"
            raise AnyrankError(
                f"{script}: {ended} before an optimizer step: nothing was checked: give the script "
                f"that trains, and the arguments that it trains with; {torchrun.tail(log)}"
            )
        with open(path, encoding="utf-8") as file:
            result: dict[str, Any] = json.load(file)
    if "error" in result:
        raise AnyrankError(f"{script}: {result['error']}")
    return result
