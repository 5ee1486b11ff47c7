"""`anyrank run`: a training script under torchrun, restarted on other rank counts if it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import zip_longest
from types import FrameType
from typing import Any

import click

from anyrank.cli import torchrun
from anyrank.cli.launcher import SIGNALLED
from anyrank.cli.run_memory import outliving
from anyrank.cli.warm_start import WarmStart


@dataclass(frozen=True)
class Attempt:
    """One start of the script.

    Attributes:
        ranks: number of processes.
        exit_code: of the script, from the first rank that failed.
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
@click.option("--replay", metavar="RUN", help="Train steps of an exact run again, and compare.")
@click.option("--from", "start", type=click.IntRange(0), help="Step that a replay resumes.")
@click.option("--to", "stop", type=click.IntRange(1), help="Its last step.  [default: the newest]")
@click.option("--json", "as_json", is_flag=True, help="What was run, as a JSON object at the end.")
@torchrun.machine_options
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int | None,
    then: tuple[int, ...],
    replay: str | None,
    start: int | None,
    stop: int | None,
    as_json: bool,
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

    With --replay, the run's step --from is resumed, the steps up to --to are trained again, and the
    receipts of those that the run has saved are compared. The script opens RUN and gets the
    arguments that it was trained with; the folder is not changed. Exit code 1 if a step differs.
    """
    from anyrank.cli.console import err

    count = ranks or _count_devices()
    if replay is not None:
        if start is None:
            raise click.UsageError("--replay needs --from, the step to begin with")
        if then:
            raise click.UsageError("--replay trains on one number of ranks: remove --then")

        def launch(environ: Mapping[str, str]) -> None:
            attempt, _ = run_once(count, script, arguments, machines, environ)
            if attempt.exit_code:
                err().print(
                    f"Error: the script ended with exit code {attempt.exit_code} before its steps "
                    "were compared: its error is above",
                    markup=False,
                )
                sys.exit(attempt.exit_code)

        _show_replay(replay, start, stop, as_json, launch)
        return
    if start is not None or stop is not None:
        raise click.UsageError("--from and --to are for --replay")
    attempts: list[Attempt] = []
    may_be_warm = script.endswith(".py") and not any(machines.values())
    with outliving() as memory, ExitStack() as contexts:
        waiting: WarmStart | None = None
        for number, following in zip_longest((count, *then), then):
            if attempts:
                last = attempts[-1]
                err().print(
                    f"anyrank: exit code {last.exit_code} on {last.ranks} ranks after "
                    f"{last.seconds:.0f} s; continuing on {number}",
                    markup=False,
                )
            warm, waiting = waiting, None
            if following and memory and may_be_warm:
                variables = {**environ(following), **memory}
                waiting = WarmStart(following, script, arguments, variables)
                contexts.enter_context(waiting)
            attempt, is_stopped = run_once(
                number, script, arguments, machines, memory, warm, waiting
            )
            attempts.append(attempt)
            if attempt.exit_code == 0 or is_stopped:
                break
    if as_json:
        click.echo(
            json.dumps({"script": script, "attempts": [asdict(attempt) for attempt in attempts]})
        )
    sys.exit(attempts[-1].exit_code)


def _show_replay(
    run: str,
    start: int,
    stop: int | None,
    as_json: bool,
    launch: Callable[[Mapping[str, str]], None],
) -> None:
    """Replay steps of a run, print what was found, and exit."""
    from anyrank.cli.console import out, write
    from anyrank.cli.replay import replay

    report = replay(run, start, stop, launch)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        write(out(), *str(report).split("\n"))
    sys.exit(0 if report else 1)


def run_once(
    ranks: int,
    script: str,
    arguments: tuple[str, ...],
    machines: Mapping[str, str | None],
    variables: Mapping[str, str],
    warm: WarmStart | None = None,
    following: WarmStart | None = None,
) -> tuple[Attempt, bool]:
    """Start the script once, with these environment variables beside the command's own.

    Args:
        ranks, script, arguments, machines, variables: of the attempt.
        warm: the attempt itself, if it may have been started ahead.
        following: the next one, to be started ahead while this one runs.

    Returns:
        The attempt, and whether SIGTERM or Ctrl-C stopped it.
    """
    full = torchrun.across(torchrun.line(ranks, script, *arguments), machines)
    start = time.perf_counter()
    stopped: list[int] = []
    process = warm.begin() if warm else None
    if process is None:
        process = subprocess.Popen(full, env={**environ(ranks), **variables})  # noqa: S603 - the user's own script

    def pass_on(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        process.send_signal(signal.SIGTERM)

    before: dict[int, Any] = {
        number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        code = following.wait_for(process) if following else process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = code if code >= 0 else SIGNALLED - code  # the launcher itself was killed
    return Attempt(ranks, code, time.perf_counter() - start), bool(stopped)


def environ(ranks: int) -> dict[str, str]:
    """The script's environment, with the cores divided among the ranks' threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks)), **os.environ}


def _count_devices() -> int:
    """Accelerators of this machine, or 1."""
    import torch

    return max(1, torch.accelerator.device_count())
