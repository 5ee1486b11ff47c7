"""SIGTERM and SIGUSR1 as wishes: noted when they come, acted on at the next step boundary."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGUSR1)


class Wishes:
    """What schedulers ask for by signal. A second SIGTERM is not held back."""

    def __init__(self) -> None:
        self.noted = deque[int]()  # one bytecode adds or takes: a signal may come between any two
        self.asked_to_end = False
        self.before: dict[int, Any] = {}

    def watch(self) -> None:
        """Note the signals from now on. Only the main thread can, and only it gets them.

        A handler from outside Python could not be given back: that signal is left alone.
        """
        if self.before or threading.current_thread() is not threading.main_thread():
            return
        self.asked_to_end = False
        for number in WATCHED:
            if signal.getsignal(number) is not None:
                self.before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGTERM and self.asked_to_end:
            self.restore()
            signal.raise_signal(signal.SIGTERM)
            return
        self.asked_to_end |= number == signal.SIGTERM
        self.noted.append(number)

    def take(self) -> int | None:
        """What was asked for since the last call, if anything; SIGTERM before SIGUSR1.

        After it a second SIGTERM ends the process still: the last save may be what hangs.
        """
        came: list[int] = []
        with contextlib.suppress(IndexError):
            while True:
                came.append(self.noted.popleft())
        return signal.SIGTERM if signal.SIGTERM in came else next(iter(came), None)

    def give_back(self, number: int) -> None:
        """Note again what was taken and could not be done; the next `take` has it."""
        self.noted.append(number)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number in WATCHED:
            handler = self.before.pop(number, None)
            if handler is not None:
                signal.signal(number, handler)


def leave_to_rank(worker: int) -> None:
    """Let a loader's worker outlive the first SIGTERM and any SIGUSR1. For `worker_init_fn`.

    torchrun and schedulers signal all processes of a rank, and the rank still has a step to
    complete. A second SIGTERM ends the worker: torch sends one to those that it cannot join.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
