"""`anyrank run`: run a script under torchrun, and restart it on other rank counts if it fails."""

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
from anyrank.cli.run_memory import outliving
from anyrank.watching.options import read_options
from anyrank.watching.system import descendants
from anyrank.wording import count

WAIT_SEC = 10


@dataclass(frozen=True)
class Attempt:
    """One start of the script.

    Attributes:
        ranks: number of processes.
        exit_code: exit code of the script, from the first rank that failed.
        seconds: duration.
    """

    ranks: int
    exit_code: int
    seconds: float


# Arguments after the script belong to the script, even if they look like options of this command.
@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--ranks", type=click.IntRange(1), help="Processes.  [default: one an accelerator, else 1]"
)
@click.option(
    "--then",
    multiple=True,
    type=click.IntRange(1),
    help="Ranks to go on with when the script has failed; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="What was run, as a JSON object at the end.")
@click.option(
    "-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as of python -m."
)
@click.option("--watch", metavar="TIME", help="Name the rank that holds up the job after TIME.")
@click.option("--exit", "is_exit", is_flag=True, help="With --watch: end the job then, with 124.")
@click.option("--report", metavar="PATH", help="With --watch: write the findings as JSON.")
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
    """Run SCRIPT with its ARGUMENTS on this machine, one process a rank, as torchrun does.

    On several machines, start it on each of them, with torchrun's own flags; --ranks and --then
    count the processes of one machine.

    When it fails it is started again on the next number of ranks given with --then: a script that
    resumes goes on where its last checkpoint is. SIGTERM is passed on, and ends the attempts. The
    exit code is the script's, and 128 and the number of the signal where a signal ended it.

    --watch 60s names the rank and the line that hold up the job when no rank has made a step for
    that time, as anyrank.watch in the script does.
    """
    from anyrank.cli.console import err

    program = torchrun.program_of("run", is_module, script, arguments)
    if watch is not None:
        options = json.dumps(_options(watch, is_exit, report))
        program = ("-m", "anyrank.watching.launched", options, *program)
    elif is_exit or report is not None:
        raise click.UsageError("--exit and --report go with --watch TIME")
    torchrun.meeting_place(machines)  # a wrong one before anything is started
    first = ranks or _count_devices()
    attempts: list[Attempt] = []
    with outliving() as memory:
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
    """Start the script once, with these environment variables added to the command's own.

    Args:
        ranks, program, machines, variables: the attempt's own; the program is a script, or -m and a
            module, with its arguments.

    Returns:
        The attempt, and whether SIGTERM or Ctrl-C stopped it.
    """
    full = torchrun.across(torchrun.line(ranks, *program), machines)
    start = time.perf_counter()
    stopped: list[int] = []
    process = subprocess.Popen(full, env={**environ(ranks), **variables})  # noqa: S603 - the user's own script

    def pass_on(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        process.send_signal(signal.SIGTERM)

    before: dict[int, Any] = {
        number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        _tell_of_waiting(process, torchrun.meeting_place(machines))
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = code if code >= 0 else SIGNALLED - code  # the launcher itself was killed
    return Attempt(ranks, code, time.perf_counter() - start), bool(stopped)


def _tell_of_waiting(process: subprocess.Popen[bytes], meeting: str | None) -> None:
    """Report the address that a machine waits for when it has started no rank.

    torchrun waits silently.
    """
    from anyrank.cli.console import err

    try:
        if meeting is not None:
            process.wait(WAIT_SEC)
    except subprocess.TimeoutExpired:
        if not descendants(process.pid):
            err().print(
                f"anyrank: no rank has started after {WAIT_SEC} s: this is {meeting}: start the "
                "command on each of them, which must reach that address",
                markup=False,
            )


def _options(watch: str, is_exit: bool, report: str | None) -> dict[str, Any]:
    """The arguments of `anyrank.watch`; wrong ones raise a usage error."""
    try:
        after_sec, path = read_options(watch, is_exit, report)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return {"after": after_sec, "exit": is_exit, "report": path}


def environ(ranks: int) -> dict[str, str]:
    """The script's environment, with the cores divided among the ranks' threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks)), **os.environ}


def _count_devices() -> int:
    """Count the accelerators of this machine; 1 if it has none."""
    import torch

    return max(1, torch.accelerator.device_count())
