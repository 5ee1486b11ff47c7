"""`anyrank check`: run a training script up to its first optimizer step, and check its setup."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import click

from anyrank.cli import torchrun
from anyrank.cli.run import script_environment
from anyrank.errors import AnyrankError


@click.command("check", context_settings={"allow_interspersed_args": False})
@click.option(
    "--ranks", type=click.IntRange(1), default=2, show_default=True, help="Number of ranks."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON object.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module name, as for python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int, as_json: bool, is_module: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Check the setup of SCRIPT on several ranks for common mistakes.

    The script runs with its ARGUMENTS until its first optimizer step. Instead of that step, anyrank
    checks the model and its optimizers, and ends all ranks. Nothing is trained or saved. Exits with
    1 if it finds a mistake.
    """
    from anyrank.cli.console import err, show
    from anyrank.watching.findings import Finding, Findings

    program = torchrun.program_of("check", is_module, script, arguments)
    result = _run(ranks, script, program)
    if result["ranks"] != ranks:
        err().print(
            f"anyrank: {script} did not initialize a process group of {ranks} ranks. Only rank 0 "
            "was checked",
            markup=False,
        )
    findings = Findings([Finding(**row) for row in result["findings"]], result["ranks"])
    show(findings, as_json)
    sys.exit(1 if findings else 0)


def _run(ranks: int, script: str, program: tuple[str, ...]) -> dict[str, Any]:
    """Run a program on ranks, and return what they found.

    Raises:
        AnyrankError: the program took no optimizer step.
    """
    with tempfile.TemporaryDirectory(prefix="anyrank-check-") as folder:
        path, log = os.path.join(folder, "result.json"), os.path.join(folder, "log")
        first_step = ("-m", "anyrank.watching.first_step", path, *program)
        launch = torchrun.launch_command(ranks, *first_step)
        late = f"{script} took no optimizer step"
        code = torchrun.run_to_end(launch, log, script_environment(ranks), late)
        if not os.path.exists(path):
            ended = f"failed with exit code {code}" if code else "ended"
            raise AnyrankError(
                f"{script} {ended} before its first optimizer step, so nothing was checked. Pass "
                f"the training script with its usual arguments. {torchrun.tail(log)}"
            )
        with open(path, encoding="utf-8") as file:
            result: dict[str, Any] = json.load(file)
    if "error" in result:
        raise AnyrankError(f"{script}: {result['error']}")
    return result
