"""A thread for calls into C++ that may never return: whoever waits for one can leave it there."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

JOIN_SEC = 5.0  # at exit, for a thread that is stuck in a call without a deadline


class Helper:
    """Makes calls one after the other, in a daemon thread that ends before the interpreter does.

    A daemon thread that is in C++ while the interpreter ends would abort the process, and any other
    one would keep it from ending.
    """

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="anyrank-helper", daemon=True)
        atexit.register(self._join)
        self.thread.start()

    def call(self, work: Callable[[], T], look: Callable[[], object], look_sec: float) -> T:
        """What `work` returns or raises.

        Args:
            work: runs in the thread.
            look: called every `look_sec` until then. What it raises ends the wait, not the work.
        """
        done, results, errors = threading.Event(), list[T](), list[Exception]()

        def run() -> None:
            try:
                results.append(work())
            except Exception as error:
                errors.append(error)
            done.set()

        self.calls.put(run)
        while not done.wait(look_sec):
            look()
        if errors:
            raise errors[0]
        return results[0]

    def leave(self, work: Callable[[], object]) -> None:
        """Make one last call, and do not wait for it."""
        self.calls.put(work)
        self.close()

    def close(self) -> None:
        """End the thread after the call that it makes. Does not wait."""
        self.calls.put(None)

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        while (run := self.calls.get()) is not None:
            run()
            del run  # and what it holds
        atexit.unregister(self._join)

    def _join(self) -> None:
        self.close()
        self.thread.join(JOIN_SEC)
