"""This process, and whether one of this machine runs, for the lock of a run folder."""

from __future__ import annotations

import os
from typing import Any

from anyrank.world.device import boot_id

ENDED = ("Z", "X")  # a process that ended, and that its parent has not asked for yet


def own_process() -> dict[str, Any]:
    """What distinguishes this process from all others, for a process that looks for it later."""
    pid = os.getpid()
    place = {"boot": boot_id(), "pid_namespace": pid_namespace()}
    return {"pid": pid, "started": started(pid), **place}


def has_ended(process: dict[str, Any]) -> bool:
    """Whether a process that `own_process` described has ended; False where nothing shows it."""
    return _is_seen(process) and not is_running(int(process["pid"]), str(process["started"]))


def is_alive(process: dict[str, Any]) -> bool:
    """Whether a process that `own_process` described runs; False where nothing shows it."""
    return _is_seen(process) and is_running(int(process["pid"]), str(process["started"]))


def _is_seen(process: dict[str, Any]) -> bool:
    """Whether it is, or was, one of those that this process sees."""
    here = own_process()
    return bool(here["boot"]) and all(process.get(k) == here[k] for k in ("boot", "pid_namespace"))


def is_running(pid: int, start: str) -> bool:
    """Whether the process of this number runs, and is the one that started then.

    Args:
        pid: within this process's namespace.
        start: as `started` gave it, or "" for any.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    stat = stat_fields(pid)
    if not stat:
        return True  # no /proc: the number is all there is
    return stat[0] not in ENDED and (not start or stat[19] == start)


def started(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" where the system does not say.

    Numbers are used again, also by other users' processes.
    """
    stat = stat_fields(pid)
    return stat[19] if stat else ""


def pid_namespace() -> str:
    """Within which process ids mean something; "" where the system has no such thing."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name before may hold anything
    except OSError:
        return []
