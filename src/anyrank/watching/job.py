"""A running job, observed from outside: its ranks, their stacks, and the rank that blocks it.

The ranks need not cooperate. py-spy reads their stacks, and stops a process for milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from anyrank.errors import AnyrankError
from anyrank.watching.looks import BUSY, Look, look_at_process, works
from anyrank.watching.options import VERDICT
from anyrank.watching.stacks import Stack, collective_of, own_frames, read_py_spy
from anyrank.watching.system import (
    STOPPED,
    descendants,
    memory_file,
    parent_of,
    program_of,
    seconds_wanted,
    state_of,
    variable_of,
)
from anyrank.watching.verdict import Verdict, conclude
from anyrank.wording import count
from anyrank.world.first_ranks import name_ranks

DUMPS = 4
PAUSE_SEC = 0.5
DUMP_SEC = 20.0


@dataclass(frozen=True)
class Job:
    """The ranks that one launcher has started on this machine.

    Attributes:
        launcher: process id of the launcher.
        ranks: rank -> process id.
    """

    launcher: int
    ranks: dict[int, int]


def find_job(pid: int | None) -> Job:
    """Find the job of a launcher or a rank; if `pid` is None, the only job on this machine.

    Raises:
        AnyrankError: no job runs, or several do.
    """
    if pid is not None:
        if not state_of(pid):
            raise AnyrankError(f"process {pid}: does not exist on this machine")
        start = _top(pid) if variable_of(pid, "RANK") else pid
        ranks = _ranks_below(start)
        if not ranks:
            raise AnyrankError(
                f"process {pid}: is neither a rank nor a launcher of ranks: neither it nor a child "
                "of it has RANK in its environment, which torchrun sets. (Or it belongs to another "
                "user.)"
            )
        return Job(start, ranks)
    tops = {_top(rank) for rank in _processes() if variable_of(rank, "RANK")}
    jobs = [Job(top, _ranks_below(top)) for top in sorted(tops)]
    jobs = [job for job in jobs if job.ranks]
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        raise AnyrankError("no ranks run on this machine: no process has RANK in its environment")
    shown = "\n".join(f"  {job.launcher}: {count(len(job.ranks), 'rank')}" for job in jobs)
    raise AnyrankError(f"several jobs run on this machine. Pass the PID of one\n{shown}")


def _processes() -> Iterator[int]:
    return (
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    )


def _top(pid: int) -> int:
    """Return the launcher of a rank: the nearest process above it that is not a rank."""
    while variable_of(pid, "RANK") and parent_of(pid) > 1:
        pid = parent_of(pid)
    return pid


def _ranks_below(launcher: int) -> dict[int, int]:
    """Map each rank to its process: the uppermost Python process with that RANK."""
    ranks: dict[int, int] = {}
    for pid in descendants(launcher):
        rank = variable_of(pid, "RANK")
        if rank.isdigit() and "python" in program_of(pid):
            ranks.setdefault(int(rank), pid)
    return dict(sorted(ranks.items()))


def _py_spy() -> str | None:
    """Return the path of py-spy, on PATH or in the folder of this Python; None without it."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return shutil.which("py-spy") or (beside if os.access(beside, os.X_OK) else None)


def look_at_job(job: Job) -> list[Look]:
    """Look at every rank from outside, for about two seconds. No process stays stopped."""
    tool = _py_spy()
    looks = {rank: look_at_process(rank, pid) for rank, pid in job.ranks.items()}
    running = [rank for rank, look in looks.items() if look.state == "answers"]
    stacks: dict[int, list[Stack]] = {rank: [] for rank in running}
    wanted = {rank: seconds_wanted(job.ranks[rank], job.ranks[rank]) for rank in running}
    start = time.monotonic()
    for _ in range(DUMPS if tool else 0):
        for rank in running:
            stack, problem = _dump(str(tool), job.ranks[rank])
            stacks[rank].append(stack)
            looks[rank].detail = problem
        time.sleep(PAUSE_SEC)
    for rank in running:
        pid, look = job.ranks[rank], looks[rank]
        if state_of(pid) in STOPPED:  # it ran before py-spy stopped it
            os.kill(pid, signal.SIGCONT)
        ran = seconds_wanted(pid, pid) - wanted[rank]
        look.is_busy = ran > BUSY * (time.monotonic() - start)
        look.stack = stacks[rank][-1] if stacks[rank] else ()
        look.at_work = works(stacks[rank], look.is_busy)
        look.text = "\n".join(map(str, look.stack))
    return list(looks.values())


def _dump(tool: str, pid: int) -> tuple[Stack, str]:
    """Return the stack of the main thread of a process, or why it is not available."""
    command = [tool, "dump", "--json", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(  # noqa: S603 - py-spy, and a number
            command, capture_output=True, text=True, timeout=DUMP_SEC, check=False
        )
        if done.returncode:
            return (), f"py-spy: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
        return read_py_spy(done.stdout), ""
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        return (), f"py-spy: {type(error).__name__}: {error}"


def describe(job: Job, looks: list[Look]) -> tuple[list[str], Verdict | None]:
    """Return the lines for a person, and the verdict if there is one."""
    # Without stacks, the states of processes may be enough.
    is_sure = any(look.state in ("killed", "stopped") for look in looks)
    has_stacks = all(look.stack or look.state != "answers" for look in looks)
    verdict = conclude(looks, None) if has_stacks or is_sure else None
    if verdict is not None:
        return verdict.screen.splitlines(), verdict
    unseen = [look.rank for look in looks if look.state == "answers" and not look.stack]
    result = "no rank appears to block the others"
    if unseen:
        needed = f"the stacks of {name_ranks(unseen)}"
        result = f"{needed} are needed to tell which rank blocks the others"
    lines = [f"{count(len(looks), 'rank')} of process {job.launcher}; {result}"]
    for look in looks:
        pid = job.ranks[look.rank]
        frames = own_frames(look.stack)
        doing = collective_of(look.stack) or ("at work" if look.at_work else "in no collective")
        shown = f"{doing}, at {frames[0]}" if frames else f"py-spy dump --pid {pid}"
        lines.append(f"  rank {look.rank}, process {pid}: {shown}")
        lines += [f"    {look.detail}"] if look.detail else []
    if unseen and not _py_spy():
        lines.append("  to read stacks, install py-spy: pip install 'anyrank[stacks]'")
    for rank, pid in job.ranks.items():
        when, _, screen = memory_file(pid, VERDICT).partition("\n")
        lines += [f"  the watch of rank {rank} reported at {when}:", screen] if screen else []
    return lines, None
