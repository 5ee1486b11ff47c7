"""SIGTERM and SIGUSR1: noted when they come, acted on at the next step boundary."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGUSR1)
GRACE_SEC = 10.0  # launcher and scheduler each send a SIGTERM, moments apart: they mean one end


class PendingSignals:
    """What schedulers ask for by signal. A SIGTERM later than GRACE_SEC after the first ends the
    process at once: the last save may be what hangs.
    """

    def __init__(self) -> None:
        self.noted = deque[int]()  # one bytecode adds or takes: a signal may come between any two
        self.first_term: float | None = None  # when, on the monotonic clock
        self.before: dict[int, Any] = {}

    def watch(self) -> None:
        """Note the signals from now on, until `restore`. Only the main thread can, and gets them.

        A second call changes nothing, so call it wherever a signal is to be survived. A handler
        from outside Python could not be given back: that signal is left alone.
        """
        if self.before or threading.current_thread() is not threading.main_thread():
            return
        self.first_term = None
        for number in WATCHED:
            if signal.getsignal(number) is not None:
                self.before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self.first_term is None:
                self.first_term = now
            elif now - self.first_term > GRACE_SEC:
                self.restore()
                signal.raise_signal(signal.SIGTERM)
                return
        self.noted.append(number)

    def take(self) -> int | None:
        """What was asked for since the last call, if anything; SIGTERM before SIGUSR1."""
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
