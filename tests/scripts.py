"""Scripts on ranks of the pool, with what torchrun or a shell would give them: starting Python,
torch and a framework takes longer than most tests. The real ones start in tests/cli. And what a
process leaves behind: tracebacks, and other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import anyrank
from anyrank.testing import run_ranks

TORCHRUN = {"TORCHELASTIC_RUN_ID": "test"}  # by which scripts and frameworks recognize it


def run_script(num_ranks: int, path: str, *arguments: str, **options: Any) -> list[str]:
    """What each rank of a script prints; all have to end with exit code 0.

    Args:
        num_ranks: number of ranks.
        path: the script.
        *arguments: of its command line.
        **options: of `run_ranks`.
    """
    env = {**TORCHRUN, **options.pop("env", {})}
    ended = run_ranks(num_ranks, job_script, path, arguments, init=False, env=env, **options)
    assert [code for code, _ in ended] == [0] * num_ranks, ended
    return [printed for _, printed in ended]


def run_python(path: str, *arguments: str) -> str:
    """What a script prints that is started by hand; it has to end with exit code 0."""
    (code, printed), *_ = run_ranks(1, job_alone, path, arguments, init=False)
    assert code == 0, printed
    return printed


def job_alone(path: str, arguments: tuple[str, ...]) -> tuple[int, str]:
    """As `job_script`, without the variables of torchrun."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    del os.environ["MASTER_PORT"]
    return job_script(path, arguments)


def job_script(path: str, arguments: tuple[str, ...]) -> tuple[int, str]:
    """Run a script in this rank as Python would; its exit code, and what it prints."""
    out, before = io.StringIO(), sys.argv
    limits = resource.getrlimit(resource.RLIMIT_DATA)  # which a script may lower
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        return code if isinstance(code, int) else 1, out.getvalue()
    finally:
        sys.argv = before
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    return 0, out.getvalue()


def fork_ranks(
    num_ranks: int, log: str, main: Callable[..., None], *arguments: str, **options: Any
) -> list[int]:
    """The exit codes of ranks that run a main function, and may end however they like.

    Each is a fork of a rank of the pool, in no group yet, and as torchrun would start it.

    Args:
        num_ranks: number of ranks.
        log: the file that all of them write to.
        main: at the top level of a module.
        *arguments: of `main`.
        **options: of `run_ranks`.
    """
    env = {**TORCHRUN, **options.pop("env", {})}
    jobs = (job_fork, log, main, arguments)
    return run_ranks(num_ranks, *jobs, init=False, env=env, **options)


def job_fork(log: str, main: Callable[..., None], arguments: tuple[str, ...]) -> int:
    """The exit code of a fork of this rank."""
    return exit_code(fork(log, main, arguments))


def exit_code(pid: int) -> int:
    """That of a fork, once it has ended; minus the signal, if one has ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork(log: str, main: Callable[..., None], arguments: Iterable[str], **env: str) -> int:
    """Start a fork of this process, which dies with it; returns its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it dies with the rank
        # Torch gives up its pool of threads at the first use after a fork. Later a second thread,
        # that of a backward, may use it meanwhile, and finds none.
        torch.set_num_threads(torch.get_num_threads())
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.environ.update(env)
        sys.path.insert(0, os.getcwd())
        main(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def our_frames(text: str) -> list[str]:
    """The lines of tracebacks that lie in anyrank, wherever that is installed."""
    inside = f'File "{os.path.dirname(anyrank.__file__)}{os.sep}'
    return [line for line in text.splitlines() if inside in line]


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended; nobody may collect an orphan's end."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_the_end_of(pids: Iterable[int]) -> None:
    """Wait until these processes have ended: a moment after a kill the system has buried them."""
    deadline = time.monotonic() + 120
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"these have not ended: {left}"
        time.sleep(0.01)
