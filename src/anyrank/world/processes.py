"""Identifies this process on its machine, and reads what the system says of another."""

from __future__ import annotations

import os
from typing import Any

from anyrank.world.device import boot_id

ENDED = ("Z", "X")  # states of a process that ended, before its parent has waited for it


def describe_own_process() -> dict[str, Any]:
    """This process's id, and the boot and the namespace within which the id means something."""
    return {"pid": os.getpid(), "boot": boot_id(), "pid_namespace": _pid_namespace()}


def _pid_namespace() -> str:
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
