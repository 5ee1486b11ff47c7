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
    """What a fault with `how="raise"` raises."""


@dataclass(frozen=True)
class Fault:
    """One failure, at the `nth` passage of one rank through one point, and only at that one.

    Attributes:
        rank: the rank that fails.
        point: the name given to `anyrank.faults.point`.
        how: "raise" InjectedFault; "enospc" OSError as from a full disk; "slow" sleep for
            `seconds`; "kill" SIGKILL; "stop" SIGSTOP, the rank stays there for ever.
        nth: which passage, from 1.
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
        # Another thread may take the signal first: this one must not get any further meanwhile.
        while True:
            time.sleep(60)


def check(wanted: Sequence[Fault], world_size: int) -> None:
    """Raise ValueError for faults that could not all strike on this many ranks."""
    for fault in wanted:
        if fault.rank >= world_size:
            raise ValueError(f"{fault}: there are only {world_size} ranks")
    if len({(fault.rank, fault.point, fault.nth) for fault in wanted}) < len(wanted):
        raise ValueError(f"two faults at the same passage: {list(wanted)}")


def arm(wanted: Sequence[Fault], tell: Callable[[Fault], None]) -> None:
    """Arm these faults in this process, and no others.

    Args:
        wanted: the faults of this rank; several may share a point.
        tell: called just before a fault strikes, in the thread that passes the point.
    """
    disarm()
    for name in {fault.point for fault in wanted}:
        at = {fault.nth: fault for fault in wanted if fault.point == name}
        faults.armed[name] = passage(at, tell)


def passage(at: dict[int, Fault], tell: Callable[[Fault], None]) -> Callable[[], None]:
    """The action of one point: count the passages, strike at those in `at`."""
    count = itertools.count(1)  # next() is atomic: points may be passed by several threads

    def passed() -> None:
        fault = at.get(next(count))
        if fault is not None:
            tell(fault)
            fault.strike()

    return passed


def disarm() -> None:
    """Make every point a no-op again."""
    faults.armed.clear()
