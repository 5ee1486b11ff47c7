"""Facts that the system gives about processes of this machine, from /proc.

By hand, because psutil does not tell how a process ended, which signals it handles, or how long a
thread waited for a core; and it finds children by reading all processes of the machine: 2.5 ms of a
core where there are 130, for 0.02 ms here.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
from typing import Any

STOPPED = ("T", "t")  # states of a process
IN_KERNEL = "D"  # waiting in the kernel, for example for a disk, and taking no signal
ENDED = ("Z", "X")  # ended, but the parent has not waited for it yet
WORKER = "pt_data_worker"  # torch's name for a DataLoader's processes
STATUS_FIELD = 49  # of /proc/PID/stat, counted from the state on
ORDERLY = (0, -signal.SIGTERM)  # exit codes with which a DataLoader ends its workers


def state_of(pid: int) -> str:
    """The letter of a process's state; "" if there is no such process."""
    fields = _stat_fields(pid)
    return fields[0] if fields else ""


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal that would otherwise end it."""
    lines = _text(f"/proc/{pid}/status").splitlines()
    masks = (line.split()[1] for line in lines if line.startswith("SigCgt"))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def memory_file(pid: int, name: str) -> str:
    """The text of a memory file that a process has open under a name; "" if there is none."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            if _link(f"{folder}/{number}").startswith(f"/memfd:{name} "):
                return _text(f"{folder}/{number}")
    return ""


def end_of(pid: int) -> str:
    """How a process ended, in words, before its parent has asked; "" if that is not known."""
    fields = _stat_fields(pid)
    if not fields or fields[0] not in ENDED or len(fields) <= STATUS_FIELD:
        return ""
    return ended(os.waitstatus_to_exitcode(int(fields[STATUS_FIELD])))


def ended(code: int) -> str:
    """An exit code in words, negative for a signal: "signal 9 (SIGKILL)", "exit code 1"."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


class Workers:
    """The worker processes of this process's DataLoaders, and those that were killed.

    Not by waiting for them: that would hide their end from torch, which looks for it. And not by
    their states alone: where torch has waited for one before a busy watch looks, the process is
    gone, and only what multiprocessing keeps of it says how it ended.
    """

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}  # multiprocessing's Popen by pid
        self.dead: dict[int, str] = {}

    def tick(self) -> None:
        """Look for new workers, and at the known ones."""
        # active_children() would wait for those that have ended.
        for process in list(multiprocessing.process._children):  # type: ignore[attr-defined]
            popen = process._popen
            if popen and popen.pid not in self.known and _is_worker(popen.pid):
                self.known[popen.pid] = popen
        for pid, popen in list(self.known.items()):
            if (code := _exit_code(popen)) is not None:
                del self.known[pid]
                if code not in ORDERLY:
                    self.dead[pid] = f"worker process {pid} of its DataLoader: {ended(code)}"

    def find_dead(self) -> list[str]:
        """The workers that were killed, in words."""
        self.tick()
        return list(self.dead.values())


def _is_worker(pid: int) -> bool:
    return _text(f"/proc/{pid}/comm").strip() == WORKER


def _exit_code(popen: Any) -> int | None:
    """The exit code of a child, whether its parent has waited for it or not; None: it is alive."""
    if popen.returncode is not None:
        return int(popen.returncode)
    fields = _stat_fields(popen.pid)
    if not fields or fields[0] not in ENDED or len(fields) <= STATUS_FIELD:
        return None
    return os.waitstatus_to_exitcode(int(fields[STATUS_FIELD]))


def children(pid: int) -> list[int]:
    """The processes that a process has started, and that are still its children."""
    with contextlib.suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
        texts = (_text(f"/proc/{pid}/task/{task}/children") for task in tasks)
        return [int(child) for text in texts for child in text.split()]
    return []


def descendants(pid: int) -> list[int]:
    """The children of a process, each before its own children."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def variable_of(pid: int, name: str) -> str:
    """An environment variable with which a process was started; "" if it is not set."""
    variables = _text(f"/proc/{pid}/environ").split("\0")
    values = (text.partition("=")[2] for text in variables if text.startswith(f"{name}="))
    return next(values, "")


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if there is none."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def program_of(pid: int) -> str:
    """The name of the program that a process runs."""
    return os.path.basename(_link(f"/proc/{pid}/exe"))


def core_times(thread: int, pid: int | None = None) -> tuple[float, float]:
    """Seconds that a thread ran, and that it waited for a core; of this process, or of another."""
    counts = _text(f"/proc/{pid or 'self'}/task/{thread}/schedstat").split()[:2]
    ran, waited = map(int, counts or ("0", "0"))
    return ran / 1e9, waited / 1e9


def seconds_wanted(thread: int, pid: int | None = None) -> float:
    """Seconds that a thread ran or waited for a core; of this process, or of another."""
    return sum(core_times(thread, pid))


def bytes_moved() -> int:
    """Bytes that this process has read from and written to files."""
    counts = _table("/proc/self/io")
    return int(counts.get("rchar:", 0)) + int(counts.get("wchar:", 0))


def oom_kills() -> int:
    """Processes that were killed for memory in this process's cgroup, as counted by cgroup v2."""
    path = _text("/proc/self/cgroup").rpartition("0::")[2].strip()
    return int(_table(f"/sys/fs/cgroup{path}/memory.events").get("oom_kill", 0))


def pid_namespace() -> str:
    """The namespace of this process's ids; "" if the system has none."""
    return _link("/proc/self/ns/pid")


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()  # the name may have brackets


def _table(path: str) -> dict[str, str]:
    """A file of names and numbers."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def _text(path: str) -> str:
    """The text of a file; "" if it does not exist or may not be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _link(path: str) -> str:
    """The target of a link; "" if it does not exist or may not be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
