"""A running job, seen from outside: the ranks of a launcher, their stacks, who holds it up.

The ranks need not cooperate. py-spy reads their stacks, which stops a process for milliseconds.
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
from anyrank.world.first_ranks import name_ranks

DUMPS = 4
PAUSE_SEC = 0.5
DUMP_SEC = 20.0


@dataclass(frozen=True)
class Job:
    """The ranks that one launcher has started on this machine.

    Attributes:
        launcher: process of the launcher.
        ranks: rank -> its process.
    """

    launcher: int
    ranks: dict[int, int]


def find_job(pid: int | None) -> Job:
    """The job of a launcher, or of one of its ranks; without a process, the only job.

    Raises:
        AnyrankError: there is no job, or there are several.
    """
    if pid is not None:
        if not state_of(pid):
            raise AnyrankError(f"process {pid}: there is no such process on this machine")
        start = _top(pid) if variable_of(pid, "RANK") else pid
        ranks = _ranks_below(start)
        if not ranks:
            raise AnyrankError(
                f"process {pid}: neither a rank nor the launcher of some, as torchrun starts them "
                "with RANK in their environment (or it belongs to another user)"
            )
        return Job(start, ranks)
    tops = {_top(rank) for rank in _processes() if variable_of(rank, "RANK")}
    jobs = [Job(top, _ranks_below(top)) for top in sorted(tops)]
    jobs = [job for job in jobs if job.ranks]
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        raise AnyrankError("no ranks run on this machine: none has RANK in its environment")
    shown = "\n".join(f"  {job.launcher}: {len(job.ranks)} ranks" for job in jobs)
    raise AnyrankError(f"several jobs run here: give the process of one\n{shown}")


def _processes() -> Iterator[int]:
    return (
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    )


def _top(pid: int) -> int:
    """The launcher above a rank: the first process above it that is not a rank."""
    while variable_of(pid, "RANK") and parent_of(pid) > 1:
        pid = parent_of(pid)
    return pid


def _ranks_below(launcher: int) -> dict[int, int]:
    """Rank -> process: the uppermost Python process with that RANK."""
    ranks: dict[int, int] = {}
    for pid in descendants(launcher):
        rank = variable_of(pid, "RANK")
        if rank.isdigit() and "python" in program_of(pid):
            ranks.setdefault(int(rank), pid)
    return dict(sorted(ranks.items()))


def _py_spy() -> str | None:
    """The path of py-spy, on PATH or beside this Python."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return shutil.which("py-spy") or (beside if os.access(beside, os.X_OK) else None)


def look_at_job(job: Job) -> list[Look]:
    """Look at every rank from outside, for about two seconds. Nothing stays stopped."""
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
        if state_of(pid) in STOPPED:  # it ran before py-spy
            os.kill(pid, signal.SIGCONT)
        ran = seconds_wanted(pid, pid) - wanted[rank]
        look.is_busy = ran > BUSY * (time.monotonic() - start)
        look.stack = stacks[rank][-1] if stacks[rank] else ()
        look.at_work = works(stacks[rank], look.is_busy)
        look.text = "\n".join(map(str, look.stack))
    return list(looks.values())


def _dump(tool: str, pid: int) -> tuple[Stack, str]:
    """The main stack of a process, or why there is none."""
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
    """The screen, and the rank that holds up the job, if there is one."""
    # Without stacks, the state of a process may say enough.
    is_sure = any(look.state in ("killed", "stopped") for look in looks)
    has_stacks = all(look.stack or look.state != "answers" for look in looks)
    verdict = conclude(looks, None) if has_stacks or is_sure else None
    if verdict is not None:
        return verdict.screen.splitlines(), verdict
    unseen = [look.rank for look in looks if look.state == "answers" and not look.stack]
    lines = [f"{len(looks)} ranks of process {job.launcher}; none is seen to hold up the others"]
    if unseen:
        lines[0] = (
            f"{len(looks)} ranks of process {job.launcher}; who holds up the others cannot be seen "
            f"without the stacks of {name_ranks(unseen)}"
        )
    for look in looks:
        pid = job.ranks[look.rank]
        frames = own_frames(look.stack)
        doing = collective_of(look.stack) or ("at work" if look.at_work else "in no collective")
        shown = f"{doing}, at {frames[0]}" if frames else f"py-spy dump --pid {pid}"
        lines.append(f"  rank {look.rank}, process {pid}: {shown}")
        lines += [f"    {look.detail}"] if look.detail else []
    if unseen and not _py_spy():
        lines.append("  py-spy is not installed, which reads stacks: pip install 'anyrank[stacks]'")
    for rank, pid in job.ranks.items():
        when, _, screen = memory_file(pid, VERDICT).partition("\n")
        lines += [f"  the watch of rank {rank} has said at {when}:", screen] if screen else []
    return lines, None
