"""Facts about the processes of this machine, read from /proc.

psutil is not enough: it does not tell how a process ended, which signals it handles, or how long a
thread waited for a core. It finds children by reading all processes of the machine, which takes
2.5 ms of a core with 130 processes; this module takes 0.02 ms.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
from typing import Any

STOPPED = ("T", "t")  # states of a process
IN_KERNEL = "D"  # waits in the kernel, for example for a disk, and handles no signal
ENDED = ("Z", "X")  # ended, but the parent has not waited for it yet
WORKER = "pt_data_worker"  # torch's name for the worker processes of a DataLoader
STATUS_FIELD = 49  # of /proc/PID/stat, counted from the state
ORDERLY = (0, -signal.SIGTERM)  # exit codes with which a DataLoader ends its workers


def state_of(pid: int) -> str:
    """Return the letter for the state of a process; "" if the process does not exist."""
    fields = _stat_fields(pid)
    return fields[0] if fields else ""


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal that would otherwise end it."""
    lines = _text(f"/proc/{pid}/status").splitlines()
    masks = (line.split()[1] for line in lines if line.startswith("SigCgt"))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def memory_file(pid: int, name: str) -> str:
    """Return the text of an open memory file of a process by its name; "" if none exists."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            if _link(f"{folder}/{number}").startswith(f"/memfd:{name} "):
                return _text(f"{folder}/{number}")
    return ""


def end_of(pid: int) -> str:
    """Return how a process ended as text, until its parent waits for it; "" if unknown."""
    fields = _stat_fields(pid)
    if not fields or fields[0] not in ENDED or len(fields) <= STATUS_FIELD:
        return ""
    return ended(os.waitstatus_to_exitcode(int(fields[STATUS_FIELD])))


def ended(code: int) -> str:
    """Return an exit code, or a signal (if negative), as text: "signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


class Workers:
    """The DataLoader workers of this process, and those that were killed.

    The class does not wait for them, because that would hide their end from torch, which checks
    them. Their states in /proc are not enough: if torch has waited for a worker before a busy watch
    looks, the process no longer exists, and only multiprocessing knows how it ended.
    """

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}  # multiprocessing's Popen by pid
        self.dead: dict[int, str] = {}

    def tick(self) -> None:
        """Find new workers, and check the known ones."""
        # active_children() would wait for workers that have ended.
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
        """Return texts about the workers that were killed."""
        self.tick()
        return list(self.dead.values())


def _is_worker(pid: int) -> bool:
    return _text(f"/proc/{pid}/comm").strip() == WORKER


def _exit_code(popen: Any) -> int | None:
    """Return the exit code of a child, even if nothing has waited for it; None if it runs."""
    if popen.returncode is not None:
        return int(popen.returncode)
    fields = _stat_fields(popen.pid)
    if not fields or fields[0] not in ENDED or len(fields) <= STATUS_FIELD:
        return None
    return os.waitstatus_to_exitcode(int(fields[STATUS_FIELD]))


def children(pid: int) -> list[int]:
    """Return the current children of a process."""
    with contextlib.suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
        texts = (_text(f"/proc/{pid}/task/{task}/children") for task in tasks)
        return [int(child) for text in texts for child in text.split()]
    return []


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, each before its own children."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def variable_of(pid: int, name: str) -> str:
    """Return an environment variable that a process was started with; "" if not set."""
    variables = _text(f"/proc/{pid}/environ").split("\0")
    values = (text.partition("=")[2] for text in variables if text.startswith(f"{name}="))
    return next(values, "")


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process does not exist."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def program_of(pid: int) -> str:
    """Return the name of the program that a process runs."""
    return os.path.basename(_link(f"/proc/{pid}/exe"))


def core_times(thread: int, pid: int | None = None) -> tuple[float, float]:
    """Return the seconds for which a thread ran, and for which it waited for a core.

    `pid` is its process; None for this one.
    """
    counts = _text(f"/proc/{pid or 'self'}/task/{thread}/schedstat").split()[:2]
    ran, waited = map(int, counts or ("0", "0"))
    return ran / 1e9, waited / 1e9


def seconds_wanted(thread: int, pid: int | None = None) -> float:
    """Return the seconds for which a thread ran or waited for a core; see `core_times`."""
    return sum(core_times(thread, pid))


def bytes_moved() -> int:
    """Return the number of bytes that this process has read from and written to files."""
    counts = _table("/proc/self/io")
    return int(counts.get("rchar:", 0)) + int(counts.get("wchar:", 0))


def oom_kills() -> int:
    """Return how many processes the cgroup (v2) of this process has killed for memory."""
    path = _text("/proc/self/cgroup").rpartition("0::")[2].strip()
    return int(_table(f"/sys/fs/cgroup{path}/memory.events").get("oom_kill", 0))


def pid_namespace() -> str:
    """Return the pid namespace of this process; "" if the system has none."""
    return _link("/proc/self/ns/pid")


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty without such a process."""
    # The name before the last parenthesis may have parentheses too.
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _table(path: str) -> dict[str, str]:
    """Read a file with lines of a name and a number."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def _text(path: str) -> str:
    """Return the text of a file; "" if it does not exist or cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _link(path: str) -> str:
    """Return the target of a link; "" if it does not exist or cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
