"""Failures as data: which rank fails, at which named point of `anyrank.faults`, and how."""

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

How = Literal["raise", "enospc", "slow", "kill", "stop"]


class InjectedFault(RuntimeError):
    """Raised by a fault with `how="raise"`."""


@dataclass(frozen=True)
class Fault:
    """One failure of one rank, when it passes a point for the `nth` time.

    Attributes:
        rank: the rank that fails.
        point: the name given to `anyrank.faults.point`.
        how: "raise" InjectedFault; "enospc" OSError as from a full disk; "slow" sleep for
            `seconds`; "kill" SIGKILL; "stop" SIGSTOP, the rank stays there forever.
        nth: number of the passage, from 1.
        seconds: how long "slow" sleeps.
    """

    rank: int
    point: str
    how: How
    nth: int = 1
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.how not in get_args(How):
            raise ValueError(f"Fault.how is {self.how!r}: expected one of {get_args(How)}")
        if self.nth < 1 or self.rank < 0:
            raise ValueError(f"{self}: nth counts from 1, rank from 0")

    def strike(self) -> None:
        """Fail in the calling process, now."""
        if self.how == "raise":
            raise InjectedFault(f"injected at {self.point!r}, passage {self.nth}")
        if self.how == "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"injected at {self.point}")
        if self.how == "slow":
            time.sleep(self.seconds)
            return
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
        # Another thread may receive the signal first: this thread must not continue meanwhile.
        while True:
            time.sleep(60)


def check(wanted: Sequence[Fault], world_size: int) -> None:
    """Raise ValueError for faults that cannot all be injected on `world_size` ranks."""
    for fault in wanted:
        if fault.rank >= world_size:
            raise ValueError(f"{fault}: there are only {world_size} ranks")
    if len({(fault.rank, fault.point, fault.nth) for fault in wanted}) < len(wanted):
        raise ValueError(f"two faults at the same passage: {list(wanted)}")


def arm(wanted: Sequence[Fault], report: Callable[[Fault], None]) -> None:
    """Arm these faults in this process, and no others.

    Args:
        wanted: the faults of this rank; several may share a point.
        report: called just before a fault is injected, in the thread that passes the point.
    """
    disarm()
    for name in {fault.point for fault in wanted}:
        by_passage = {fault.nth: fault for fault in wanted if fault.point == name}
        faults.armed[name] = passage(by_passage, report)


def passage(by_passage: dict[int, Fault], report: Callable[[Fault], None]) -> Callable[[], None]:
    """The action of one point: count the passages, and inject the faults by their number."""
    count = itertools.count(1)  # next() is atomic: points may be passed by several threads

    def passed() -> None:
        fault = by_passage.get(next(count))
        if fault is not None:
            report(fault)
            fault.strike()

    return passed


def disarm() -> None:
    """Make every point a no-op again."""
    faults.armed.clear()
