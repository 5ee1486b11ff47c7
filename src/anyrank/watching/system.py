"""What the system says about processes of this machine, from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import time

STOPPED = ("T", "t")  # states of a process
ENDED = ("Z", "X")  # of one that ended, before its parent has waited for it
WORKER = "pt_data_worker"  # the name that torch gives to a DataLoader's processes
SCAN_SHARE = 1000  # times what a scan of all threads' children takes of a core, between two
STATUS_FIELD = 49  # of the fields of /proc/PID/stat, counted from the state on
ORDERLY = (0, signal.SIGTERM)  # how a DataLoader ends its workers


def state_of(pid: int) -> str:
    """The letter of a process's state; "" where there is no such process."""
    fields = _stat_fields(pid)
    return fields[0] if fields else ""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it else."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            masks = [line.split()[1] for line in file if line.startswith("SigCgt")]
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def memory_file(pid: int, name: str) -> str:
    """The text of a file in memory that a process has open under a name; "" without one."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{name} "):
                with open(f"{folder}/{number}", encoding="utf-8", errors="replace") as file:
                    return file.read()
    return ""


def end_of(pid: int) -> str:
    """How a process ended, in words, while its parent has not asked yet; "" where none can say."""
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
        """Look for new workers, and at those that are known.

        Not by waiting for them: that would take their end from torch, which looks for it.
        """
        if time.monotonic() >= self.next_scan:
            start = time.thread_time()
            self.known |= {pid for pid in children(os.getpid()) if _name(pid) == WORKER}
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
        """Those that were killed, in words."""
        self.tick()
        return list(self.dead.values())


def children(pid: int) -> list[int]:
    """The processes that a process has started, and that are its own still."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                pids += map(int, file.read().split())
    return pids


def descendants(pid: int) -> list[int]:
    """The children of a process, each before its own."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def variable_of(pid: int, name: str) -> str:
    """An environment variable that a process was started with; "" without it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return ""
    start = f"{name}=".encode()
    return next((text[len(start) :].decode() for text in variables if text.startswith(start)), "")


def parent_of(pid: int) -> int:
    """The parent of a process; 0 where there is none."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def program_of(pid: int) -> str:
    """The name of the program that a process runs."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""


def seconds_wanted(thread: int, pid: int | None = None) -> float:
    """Seconds that a thread ran, or waited for a core; of this process, or of another."""
    try:
        with open(f"/proc/{pid or 'self'}/task/{thread}/schedstat", encoding="ascii") as file:
            ran, waited, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0.0
    return (ran + waited) / 1e9


def bytes_moved() -> int:
    """Bytes that this process has read from and written to files."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            lines = dict(line.split(": ") for line in file.read().splitlines())
        return int(lines["rchar"]) + int(lines["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


def oom_kills() -> int:
    """Processes that were killed for memory in this process's cgroup, by cgroup v2's count."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            path = file.read().rpartition("0::")[2].strip()
        with open(f"/sys/fs/cgroup{path}/memory.events", encoding="ascii") as file:
            return int(dict(line.split() for line in file)["oom_kill"])
    return 0


def pid_namespace() -> str:
    """The namespace of this process's ids; "" where the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name may have brackets of its own
    except OSError:
        return []
