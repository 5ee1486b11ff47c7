"""`anyrank run`: run a script under torchrun; if it fails, restart it on another rank count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import click

from anyrank.cli import torchrun
from anyrank.cli.launcher import SIGNALLED
from anyrank.cli.run_memory import surviving_memory
from anyrank.watching.options import read_options
from anyrank.watching.system import descendants
from anyrank.wording import count

WAIT_SEC = 10


@dataclass(frozen=True)
class Attempt:
    """One start of the script.

    Attributes:
        ranks: number of ranks on this machine.
        exit_code: exit code of the first rank that failed, or 0.
        seconds: duration.
    """

    ranks: int
    exit_code: int
    seconds: float


# Arguments after the script belong to the script, even if they look like options of this command.
@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="Number of ranks.  [default: one per accelerator, or 1]",
)
@click.option(
    "--then",
    multiple=True,
    type=click.IntRange(1),
    help="Rank count for the restart after a failure. May be repeated.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print all attempts as a JSON object at the end."
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module name, as for python -m.")
@click.option(
    "--watch",
    metavar="TIME",
    help="If no rank completes a step for TIME, name the rank that blocks the others.",
)
@click.option(
    "--exit", "is_exit", is_flag=True, help="With --watch: also end the job with exit code 124."
)
@click.option("--report", metavar="PATH", help="With --watch: write the verdict to PATH as JSON.")
@torchrun.machine_options
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int | None,
    then: tuple[int, ...],
    as_json: bool,
    is_module: bool,
    watch: str | None,
    is_exit: bool,
    report: str | None,
    script: str,
    arguments: tuple[str, ...],
    **machines: str | None,
) -> None:
    """Run SCRIPT with its ARGUMENTS on this machine, one process per rank, as torchrun does.

    To use several machines, run the same command on each of them with torchrun's own flags. --ranks
    and --then are numbers of ranks per machine.

    If the script fails, it is restarted on the next rank count given with --then; a script that
    resumes continues from its last checkpoint. SIGTERM is forwarded to the script, and ends the
    restarts. The exit code is that of the script, or 128 + N if signal N ended it.

    With --watch 60s, if no rank completes a step for 60 s, the command prints which rank blocks the
    others, and on which line. anyrank.watch does the same from inside a script.
    """
    from anyrank.cli.console import err

    program = torchrun.program_of("run", is_module, script, arguments)
    if watch is not None:
        options = json.dumps(_options(watch, is_exit, report))
        program = ("-m", "anyrank.watching.launched", options, *program)
    elif is_exit or report is not None:
        raise click.UsageError("--exit and --report require --watch TIME")
    torchrun.describe_rendezvous(machines)  # raises for wrong flags before anything is started
    first = ranks or _count_devices()
    attempts: list[Attempt] = []
    with surviving_memory() as memory:
        for number in (first, *then):
            if attempts:
                last = attempts[-1]
                err().print(
                    f"anyrank: exit code {last.exit_code} on {count(last.ranks, 'rank')} after "
                    f"{last.seconds:.0f} s; continuing on {number}",
                    markup=False,
                )
            attempt, is_stopped = _run_once(number, program, machines, memory)
            attempts.append(attempt)
            if attempt.exit_code == 0 or is_stopped:
                break
    if as_json:
        click.echo(
            json.dumps({"script": script, "attempts": [asdict(attempt) for attempt in attempts]})
        )
    sys.exit(attempts[-1].exit_code)


def _run_once(
    ranks: int,
    program: tuple[str, ...],
    machines: Mapping[str, str | None],
    variables: Mapping[str, str],
) -> tuple[Attempt, bool]:
    """Start the script once, and wait for its end.

    Args:
        ranks: number of ranks on this machine.
        program: a script, or -m and a module, with its arguments.
        machines: values of torchrun's flags for several machines.
        variables: environment variables that are added to those of this process.

    Returns:
        The attempt, and whether SIGTERM or Ctrl-C stopped it.
    """
    full = torchrun.add_machine_flags(torchrun.launch_command(ranks, *program), machines)
    start = time.perf_counter()
    stopped: list[int] = []
    process = subprocess.Popen(full, env={**script_environment(ranks), **variables})  # noqa: S603 - the user's script

    def pass_on(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        process.send_signal(signal.SIGTERM)

    before: dict[int, Any] = {
        number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        _report_waiting(process, torchrun.describe_rendezvous(machines))
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = code if code >= 0 else SIGNALLED - code  # the launcher itself was killed
    return Attempt(ranks, code, time.perf_counter() - start), bool(stopped)


def _report_waiting(process: subprocess.Popen[bytes], meeting: str | None) -> None:
    """If no rank has started after a while, print which machines this one waits for.

    torchrun itself waits silently.
    """
    from anyrank.cli.console import err

    try:
        if meeting is not None:
            process.wait(WAIT_SEC)
    except subprocess.TimeoutExpired:
        if not descendants(process.pid):
            err().print(
                f"anyrank: no rank has started after {WAIT_SEC} s. This is {meeting}. Start the "
                "same command on every machine, and check that each can reach that address.",
                markup=False,
            )


def _options(watch: str, is_exit: bool, report: str | None) -> dict[str, Any]:
    """Return the arguments of `anyrank.watch`; wrong ones raise a usage error."""
    try:
        after_sec, path = read_options(watch, is_exit, report)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return {"after": after_sec, "exit": is_exit, "report": path}


def script_environment(ranks: int) -> dict[str, str]:
    """Return the environment of the script, with the cores divided among the threads of ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks)), **os.environ}


def _count_devices() -> int:
    """Return the number of accelerators of this machine; 1 if it has none."""
    import torch

    return max(1, torch.accelerator.device_count())
