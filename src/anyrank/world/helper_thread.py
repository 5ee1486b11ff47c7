"""A thread for C++ calls that may never return, so that the caller can stop waiting."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

JOIN_SEC = 5.0  # at exit, for a thread that is stuck in a call without a deadline

Waiter = Callable[[Callable[[], object], float], T]
"""Waits for a call in a helper thread: `wait(poll, poll_sec)` returns or raises what it does."""


class HelperThread:
    """Makes calls one after the other in a daemon thread, which is joined at exit.

    A daemon thread that runs C++ code while the interpreter ends aborts the process; a thread that
    is not a daemon keeps the process from ending.

    Args:
        at_exit: called before the thread is joined at exit, so that its call ends.
    """

    def __init__(self, at_exit: Callable[[], object] = lambda: None) -> None:
        self.at_exit = at_exit
        self.calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="anyrank-helper", daemon=True)
        atexit.register(self._join)
        self.thread.start()

    def start(self, work: Callable[[], T]) -> Waiter[T]:
        """Run `work` in the thread, after all earlier work.

        Returns:
            A function that waits for the result. It calls `poll` every `poll_sec`; an error of
            `poll` ends the wait, but not the work.
        """
        done, results, errors = threading.Event(), list[T](), list[Exception]()

        def run() -> None:
            try:
                results.append(work())
            except Exception as error:
                errors.append(error)
            done.set()

        def wait(poll: Callable[[], object], poll_sec: float) -> T:
            while not done.wait(poll_sec):
                poll()
            if errors:
                raise errors[0]
            return results[0]

        self.calls.put(run)
        return wait

    def call(self, work: Callable[[], T], poll: Callable[[], object], poll_sec: float) -> T:
        """Run `work` in the thread, and return or raise what it does.

        Args:
            work: function to run in the thread.
            poll: called every `poll_sec` during the wait. An error of `poll` ends the wait, but not
                the work.
        """
        return self.start(work)(poll, poll_sec)

    def leave(self, work: Callable[[], object]) -> None:
        """Make one last call without waiting for it."""
        self.calls.put(work)
        self.close()

    def close(self) -> None:
        """End the thread after its current call. Does not wait."""
        self.calls.put(None)

    def __enter__(self) -> HelperThread:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        while (run := self.calls.get()) is not None:
            run()
            del run  # frees the objects that it refers to
        atexit.unregister(self._join)

    def _join(self) -> None:
        self.at_exit()
        self.close()
        if self.thread.ident is not None:  # started; another thread may be about to start it
            self.thread.join(JOIN_SEC)
