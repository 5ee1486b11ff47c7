"""torchrun's command line, and the start and end of the processes on this machine."""

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

# torchrun's flags for several machines; its help explains them in detail.
MACHINE_FLAGS = {
    "nnodes": "Number of machines, or MIN:MAX. torchrun explains these flags.",
    "node-rank": "Rank of this machine, counted from 0.",
    "master-addr": "Address of machine 0.",
    "master-port": "Free port of machine 0.",
    "rdzv-backend": "Rendezvous backend: static or c10d.",
    "rdzv-endpoint": "Rendezvous endpoint, HOST:PORT.",
    "rdzv-id": "Rendezvous id: the name of the job.",
    "rdzv-conf": "Rendezvous options, KEY=VALUE,...",
}
LIMIT_SEC = 900
TAIL_LINES = 50  # about twenty of them are from torchrun itself


def launch_command(ranks: int, *program: str) -> list[str]:
    """Return the command that runs a program (a script, or `-m` and a module) on ranks.

    The command exits with the code of the program, and ends when this process does.
    """
    launcher = [sys.executable, "-m", "anyrank.cli.launcher", str(os.getpid()), "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", *program]


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add torchrun's flags for several machines to a command."""
    for name, text in reversed(MACHINE_FLAGS.items()):
        command = click.option(f"--{name}", default=None, help=text)(command)
    return command


def add_machine_flags(command: Sequence[str], machines: Mapping[str, str | None]) -> list[str]:
    """Return the command with the flags for several machines; unchanged if none is set.

    Args:
        command: as returned by `launch_command`.
        machines: values of MACHINE_FLAGS by parameter name; None for a flag that is not set.
    """
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in machines.items() if value]
    if not flags:
        return list(command)
    position = command.index("--standalone")
    return [*command[:position], *flags, *command[position + 1 :]]


def describe_rendezvous(machines: Mapping[str, str | None]) -> str | None:
    """Return a text for "This is ...", which says which machines wait for each other, and where.

    Returns None for one machine, and for flags that torchrun itself rejects.

    Args:
        machines: as for `add_machine_flags`. For a flag that is not set, torchrun reads an
            environment variable, such as PET_MASTER_ADDR.

    Raises:
        UsageError: the machines would wait forever, because no address is set, or because the rank
            of this machine is out of range.
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
            f"--node-rank {number}: must be less than the number of machines, --nnodes {nnodes}"
        )
    if most < 2:
        return None
    backend, address = flag_of("rdzv_backend") or "static", flag_of("rdzv_endpoint")
    if backend == "static":
        address = address or flag_of("master_addr")
    if not address:
        missing = "--master-addr" if backend == "static" else "--rdzv-endpoint"
        raise click.UsageError(
            f"--nnodes {nnodes} needs {missing}; without it, each machine waits for the others at "
            f"its own address. On every machine, run `anyrank run --nnodes {nnodes} --node-rank N "
            "--master-addr HOST ...`, where N is 0 on the first machine, and HOST is its address. "
            "Or use `--rdzv-backend c10d --rdzv-endpoint HOST:PORT ...`"
        )
    return f"machine {number} (--nnodes {nnodes}), waiting for the others at {address}"


def program_of(
    command: str, is_module: bool, script: str, arguments: Sequence[str]
) -> tuple[str, ...]:
    """Return the program that a launcher runs: a script, or `-m` and a module, with its arguments.

    Drops a leading `--` of the arguments, which belongs to the command.

    Raises:
        BadParameter: the script does not exist.
    """
    if not is_module and not os.path.isfile(script):
        raise click.BadParameter(
            f"File '{script}' does not exist. To run a module, use: anyrank {command} -m {script}",
            param_hint="'SCRIPT'",
        )
    program = (script, *(arguments[1:] if arguments[:1] == ("--",) else arguments))
    return ("-m", *program) if is_module else program


def run_to_end(command: Sequence[str], log: str, environ: Mapping[str, str], late: str) -> int:
    """Run ranks to their end, write their output to a file, and return the exit code.

    Ctrl-C does not reach the ranks. No process is left when this returns or raises.

    Args:
        command: as returned by `launch_command`, or that of a process that forks ranks.
        log: path of the file for the output.
        environ: all environment variables.
        late: start of the error text if the ranks take too long, such as "x.py took no step".

    Raises:
        AnyrankError: the ranks ran longer than LIMIT_SEC; the error shows their last lines.
    """
    with open(log, "wb") as file:
        process = subprocess.Popen(  # noqa: S603 - this Python, and no text from outside
            command, stdout=file, stderr=subprocess.STDOUT, env=environ, start_new_session=True
        )
        try:
            return process.wait(LIMIT_SEC)
        except subprocess.TimeoutExpired as error:
            raise AnyrankError(f"{late} within {LIMIT_SEC} s. {tail(log)}") from error
        finally:
            _kill_all(process)


def tail(log: str) -> str:
    """Return a sentence with the last lines that a program printed to a file."""
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = "".join(file.readlines()[-TAIL_LINES:])
    return f"Its last lines:\n{lines}" if lines.strip() else "It printed nothing"


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants with SIGKILL."""
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
