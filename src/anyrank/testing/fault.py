"""Faults to inject: which rank fails, at which named point of `anyrank.faults`, and how."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from anyrank import faults
from anyrank.wording import alternatives, count

How = Literal["raise", "enospc", "slow", "kill", "stop"]


class InjectedFault(RuntimeError):
    """Raised by a fault with `how="raise"`."""


@dataclass(frozen=True)
class Fault:
    """One failure of one rank, when it passes a point for the `nth` time.

    Attributes:
        rank: the rank that fails.
        point: the name passed to `anyrank.faults.point`.
        how: "raise": raise InjectedFault; "enospc": raise the OSError of a full disk; "slow": sleep
            for `seconds`; "kill": die by SIGKILL; "stop": stop by SIGSTOP until the call ends.
        nth: number of the passage, counted from 1.
        seconds: duration of "slow".
    """

    rank: int
    point: str
    how: How
    nth: int = 1
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.how not in get_args(How):
            raise ValueError(f"how={self.how!r}: must be {alternatives(get_args(How))}")
        if self.nth < 1 or self.rank < 0:
            raise ValueError(f"{self}: nth must be at least 1, and rank at least 0")

    def strike(self) -> None:
        """Make the calling process fail now."""
        if self.how == "raise":
            raise InjectedFault(f"injected at {self.point!r}, passage {self.nth}")
        if self.how == "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"injected at {self.point}")
        if self.how == "slow":
            time.sleep(self.seconds)
            return
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
        # Another thread may receive the signal first; this thread must not continue until then.
        while True:
            time.sleep(60)


def check(wanted: Sequence[Fault], world_size: int) -> None:
    """Raise ValueError if the faults cannot all be injected on `world_size` ranks."""
    for fault in wanted:
        if fault.rank >= world_size:
            raise ValueError(f"{fault}: the call has only {count(world_size, 'rank')}")
    if len({(fault.rank, fault.point, fault.nth) for fault in wanted}) < len(wanted):
        raise ValueError(f"two faults have the same rank, point and nth: {list(wanted)}")


def arm(wanted: Sequence[Fault], report: Callable[[Fault], None]) -> None:
    """Arm the faults in this process, and disarm all others.

    Args:
        wanted: the faults of this rank; several may share a point.
        report: called just before a fault is injected, in the thread that passes the point.
    """
    disarm()
    for name in {fault.point for fault in wanted}:
        by_passage = {fault.nth: fault for fault in wanted if fault.point == name}
        faults.armed[name] = passage(by_passage, report)


def passage(by_passage: dict[int, Fault], report: Callable[[Fault], None]) -> Callable[[], None]:
    """Return the action of a point: count the passages, and inject faults by their number."""
    numbers = itertools.count(1)  # next() is atomic, because several threads may pass a point

    def passed() -> None:
        fault = by_passage.get(next(numbers))
        if fault is not None:
            report(fault)
            fault.strike()

    return passed


def disarm() -> None:
    """Make every point a no-op again."""
    faults.armed.clear()
