"""Waiting for gloo, which never ends a wait for a message of which half has arrived when its sender
dies: a thread waits, and the rank leaves it there once it knows that the sender is gone.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any

from anyrank.world import background

LOOK_SEC = 0.2  # how often a rank that waits looks whether it waits in vain
GRACE_SEC = 1.0  # for what a rank that is gone has sent before


class Pending:
    """One of gloo's works, under way.

    Args:
        work: gloo's.
        held: the memory that it reads or writes, which lives as long as it does.
        in_vain: says why this wait cannot end, or nothing.
    """

    def __init__(self, work: Any, held: Any, in_vain: Callable[[], str]) -> None:
        self.work = work
        self.held = held
        self.in_vain = in_vain
        self.done = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        """Wait for the end of the work.

        Raises:
            RuntimeError: it failed, or can never end.
        """
        while not self.done.wait(LOOK_SEC):
            reason = self.in_vain()
            if reason and not self.done.wait(GRACE_SEC):
                raise RuntimeError(reason)
        if self.error is not None:
            raise self.error


class Waits:
    """The works of one group, waited for in the order in which they began.

    Args:
        in_vain: as for `Pending`.
    """

    def __init__(self, in_vain: Callable[[], str]) -> None:
        self.in_vain = in_vain
        self.queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        background.start("anyrank-waits", lambda: _serve(self.queue), self.close)

    def add(self, work: Any, held: Any) -> Pending:
        """What waits for a work."""
        pending = Pending(work, held, self.in_vain)
        self.queue.put(pending)
        return pending

    def close(self) -> None:
        """End the thread. Does not wait."""
        self.queue.put(None)


def abandon(group: Any) -> None:
    """Never close gloo's connections, as that would wait for works that do not end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _serve(works: queue.SimpleQueue[Pending | None]) -> None:
    while (pending := works.get()) is not None:
        try:
            pending.work.wait()
        except Exception as error:  # raised where the work is waited for
            pending.error = error
        pending.done.set()
        del pending
