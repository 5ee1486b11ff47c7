"""Facts that the system gives about processes of this machine, from /proc.

By hand, because psutil does not tell how a process ended, which signals it handles, or how long a
thread waited for a core; and it finds children by reading all processes of the machine: 2.5 ms of a
core where there are 130, for 0.02 ms here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

STOPPED = ("T", "t")  # states of a process
IN_KERNEL = "D"  # waiting in the kernel, for example for a disk, and taking no signal
ENDED = ("Z", "X")  # ended, but the parent has not waited for it yet
WORKER = "pt_data_worker"  # torch's name for a DataLoader's processes
SCAN_SHARE = 1000  # pause between scans of all threads' children, in CPU times of a scan
STATUS_FIELD = 49  # of /proc/PID/stat, counted from the state on
ORDERLY = (0, signal.SIGTERM)  # statuses with which a DataLoader ends its workers


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
    return ended(int(fields[STATUS_FIELD]))


def ended(status: int) -> str:
    """A wait status in words: "signal 9 (SIGKILL)", "exit code 1"."""
    number = status & 0x7F
    if not number:
        return f"exit code {status >> 8}"
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


class Workers:
    """The worker processes of this process's DataLoaders, and those that were killed."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.dead: dict[int, str] = {}
        self.next_scan = 0.0

    def tick(self) -> None:
        """Look for new workers, and at the known ones.

        Not by waiting for them: that would hide their end from torch, which looks for it.
        """
        if time.monotonic() >= self.next_scan:
            start = time.thread_time()
            self.known |= {
                pid for pid in children(os.getpid()) if _text(f"/proc/{pid}/comm").strip() == WORKER
            }
            self.next_scan = time.monotonic() + SCAN_SHARE * (time.thread_time() - start)
        for pid in list(self.known - self.dead.keys()):
            fields = _stat_fields(pid)
            if not fields:
                self.known.discard(pid)
            elif fields[0] in ENDED:
                status = int(fields[STATUS_FIELD]) if len(fields) > STATUS_FIELD else 0
                if status not in ORDERLY:
                    self.dead[pid] = f"worker process {pid} of its DataLoader: {ended(status)}"

    def find_dead(self) -> list[str]:
        """The workers that were killed, in words."""
        self.tick()
        return list(self.dead.values())


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
