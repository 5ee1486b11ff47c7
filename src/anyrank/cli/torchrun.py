"""Ranks on this machine: torchrun's command line, and the start and end of processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from anyrank.errors import AnyrankError
from anyrank.watching.system import descendants

# torchrun's own flags; its help explains them in detail.
MACHINE_FLAGS = {
    "nnodes": "Machines, or MIN:MAX; for the flags of several machines see torchrun.",
    "node-rank": "This machine's number, from 0.",
    "master-addr": "Address of machine 0.",
    "master-port": "A free port of machine 0.",
    "rdzv-backend": "How machines find each other: static, c10d.",
    "rdzv-endpoint": "HOST:PORT where they meet.",
    "rdzv-id": "The job's name there.",
    "rdzv-conf": "KEY=VALUE,...",
}
LIMIT_SEC = 900
TAIL_LINES = 50  # about twenty of them are torchrun's own


def line(ranks: int, *program: str) -> list[str]:
    """The command that runs a program, a script or `-m` and a module, on ranks of this machine.

    Its exit code is the program's, and it ends when this process does.
    """
    launcher = [sys.executable, "-m", "anyrank.cli.launcher", str(os.getpid()), "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", *program]


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add torchrun's flags for several machines to a command."""
    for name, text in reversed(MACHINE_FLAGS.items()):
        command = click.option(f"--{name}", default=None, help=text)(command)
    return command


def across(command: Sequence[str], machines: Mapping[str, str | None]) -> list[str]:
    """The command of `line` for one of several machines, if any flag is given.

    Args:
        command: as returned by `line`.
        machines: values of MACHINE_FLAGS by parameter name; None for a flag that was not given.
    """
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in machines.items() if value]
    if not flags:
        return list(command)
    position = command.index("--standalone")
    return [*command[:position], *flags, *command[position + 1 :]]


def meeting_place(machines: Mapping[str, str | None]) -> str | None:
    """Describe where the machines of a job meet; None for one machine, or if torchrun refuses it.

    Args:
        machines: as for `across`. torchrun has PET_MASTER_ADDR and the like for a flag not given.

    Raises:
        UsageError: machines that could only wait for each other: none has the others' address, or
            this one's number is not among theirs.
    """

    def flag_of(name: str) -> str:
        return machines.get(name) or os.environ.get(f"PET_{name.upper()}", "")

    nnodes = machines.get("nnodes") or "1"
    texts = nnodes.rpartition(":")[2], flag_of("node_rank") or "0"
    if not all(text.isdecimal() for text in texts):
        return None
    most, number = map(int, texts)
    if machines.get("node_rank") and number >= max(most, 1):
        raise click.UsageError(
            f"--node-rank {number} is no number of --nnodes {nnodes}: machines are numbered from 0"
        )
    if most < 2:
        return None
    backend, address = flag_of("rdzv_backend") or "static", flag_of("rdzv_endpoint")
    if backend == "static":
        address = address or flag_of("master_addr")
    if not address:
        missing = "--master-addr" if backend == "static" else "--rdzv-endpoint"
        raise click.UsageError(
            f"--nnodes {nnodes} without {missing}: each machine would wait for the others at "
            f"itself: start on each `anyrank run --nnodes {nnodes} --node-rank N --master-addr "
            "HOST ...`, where N counts from 0 and HOST is machine 0, or `--rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT ...`"
        )
    return f"machine {number} of --nnodes {nnodes}, waits for the others at {address}"


def program_of(
    command: str, is_module: bool, script: str, arguments: Sequence[str]
) -> tuple[str, ...]:
    """Return the program that a launcher takes: a script, or `-m` and a module, with its arguments.

    A leading `--` among the arguments is the command's own.

    Raises:
        BadParameter: there is no such script.
    """
    if not is_module and not os.path.isfile(script):
        raise click.BadParameter(
            f"File '{script}' does not exist; a module takes -m: anyrank {command} -m {script}",
            param_hint="'SCRIPT'",
        )
    program = (script, *(arguments[1:] if arguments[:1] == ("--",) else arguments))
    return ("-m", *program) if is_module else program


def run_to_end(command: Sequence[str], log: str, environ: Mapping[str, str], late: str) -> int:
    """Run ranks to their end, with their output in a file; returns the exit code.

    Ctrl-C does not reach them. No process is left when this returns or raises.

    Args:
        command: as returned by `line`, or of a process that forks ranks.
        log: the file.
        environ: all environment variables.
        late: beginning of the error if they take too long, such as "no optimizer step".

    Raises:
        AnyrankError: they took longer than LIMIT_SEC; with the last lines of the output.
    """
    with open(log, "wb") as file:
        process = subprocess.Popen(  # noqa: S603 - this Python, and no text from outside
            command, stdout=file, stderr=subprocess.STDOUT, env=environ, start_new_session=True
        )
        try:
            return process.wait(LIMIT_SEC)
        except subprocess.TimeoutExpired as error:
            raise AnyrankError(f"{late} within {LIMIT_SEC} s; {tail(log)}") from error
        finally:
            _kill_all(process)


def tail(log: str) -> str:
    """The last lines that a program has printed into a file, as part of a sentence."""
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = "".join(file.readlines()[-TAIL_LINES:])
    return f"its last lines:\n{lines}" if lines.strip() else "it printed nothing"


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants with SIGKILL, so that none can clean up."""
    if process.poll() is not None:
        return
    doomed = [process.pid, *descendants(process.pid)]
    send(signal.SIGSTOP, doomed)  # first, so that none notices the death of another
    send(signal.SIGKILL, dict.fromkeys([*doomed, *descendants(process.pid)]))
    process.wait()


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to processes, some of which may have ended already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
