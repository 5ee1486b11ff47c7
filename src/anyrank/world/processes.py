"""Identifies this process, and says whether another process of this machine runs."""

from __future__ import annotations

import os
from typing import Any

from anyrank.world.device import boot_id

ENDED = ("Z", "X")  # states of a process that ended, before its parent has waited for it


def describe_own_process() -> dict[str, Any]:
    """Identifies this process for good: process ids are used again, also after a boot."""
    pid = os.getpid()
    namespace = {"boot": boot_id(), "pid_namespace": pid_namespace()}
    return {"pid": pid, "started": start_time(pid), **namespace}


def has_ended(process: dict[str, Any]) -> bool:
    """Whether a process that `describe_own_process` described has ended; False if unknown."""
    return _is_seen(process) and not is_running(int(process["pid"]), str(process["started"]))


def is_alive(process: dict[str, Any]) -> bool:
    """Whether a process that `describe_own_process` described runs; False if unknown."""
    return _is_seen(process) and is_running(int(process["pid"]), str(process["started"]))


def _is_seen(process: dict[str, Any]) -> bool:
    """Whether it is of this boot and process namespace; else its id says nothing."""
    boot, namespace = boot_id(), pid_namespace()
    return bool(boot) and (process.get("boot"), process.get("pid_namespace")) == (boot, namespace)


def is_running(pid: int, start: str) -> bool:
    """Whether a process runs with this id and start time.

    Args:
        pid: within this process's namespace.
        start: as `start_time` returned it, or "" for any.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs as another user
    stat = stat_fields(pid)
    if not stat:
        return True  # no /proc: only the id is known
    return stat[0] not in ENDED and (not start or stat[19] == start)


def start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" where the system does not say."""
    stat = stat_fields(pid)
    return stat[19] if stat else ""


def pid_namespace() -> str:
    """The namespace of this process's ids; "" where the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name may have brackets of its own
    except OSError:
        return []
