"""SIGTERM and SIGUSR1: noted when they come, acted on at the next step boundary."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from typing import Any, ClassVar
from weakref import WeakSet

WATCHED = (signal.SIGTERM, signal.SIGUSR1)
GRACE_SEC = 10.0  # launcher and scheduler each send a SIGTERM, moments apart: they mean one end


class PendingSignals:
    """What schedulers ask for by signal. A SIGTERM later than GRACE_SEC after the first ends the
    process at once: the last save may be what hangs.

    Each open run of a process notes them; the first one at a step boundary acts.
    """

    # Signals belong to the process. A run that is dropped without being closed notes none.
    watching: ClassVar[WeakSet[PendingSignals]] = WeakSet()
    before: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        self.noted = deque[int]()  # one bytecode adds or takes: a signal may come between any two
        self.first_term: float | None = None  # when, on the monotonic clock
        self.is_done = False  # whether a SIGTERM was taken

    def watch(self) -> None:
        """Note the signals from now on, until `restore`. Only the main thread can, and gets them.

        A second call changes nothing, so call it wherever a signal is to be survived. A handler
        from outside Python could not be given back: that signal is left alone.
        """
        if self in self.watching or threading.current_thread() is not threading.main_thread():
            return
        self.first_term, self.is_done = None, False
        self.watching.add(self)
        for number in WATCHED if not self.before else ():
            if signal.getsignal(number) is not None:
                self.before[number] = signal.signal(number, _note_in_all)

    def note(self, number: int) -> None:
        """A signal came."""
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self.first_term is None:
                self.first_term = now
            elif now - self.first_term > GRACE_SEC:
                for one in [*self.watching]:
                    one.restore()
                signal.raise_signal(signal.SIGTERM)
                return
        self.noted.append(number)

    def take(self) -> int | None:
        """What was asked for since the last call, if anything; SIGTERM before SIGUSR1."""
        came: list[int] = []
        with contextlib.suppress(IndexError):
            while True:
                came.append(self.noted.popleft())
        self.is_done = self.is_done or signal.SIGTERM in came
        return signal.SIGTERM if signal.SIGTERM in came else next(iter(came), None)

    def give_back(self, number: int) -> None:
        """Note again what was taken and could not be done; the next `take` has it."""
        self.noted.append(number)
        self.is_done = self.is_done and number != signal.SIGTERM

    def restore(self) -> None:
        """Give the signals back to whoever had them, once no run of the process notes them."""
        self.watching.discard(self)
        while self.before and not self.watching:
            signal.signal(*self.before.popitem())

    def pass_on(self) -> None:
        """Send the process a SIGTERM again that came after the last step boundary."""
        if not self.is_done and self.take() == signal.SIGTERM and not self.watching:
            signal.raise_signal(signal.SIGTERM)


def _note_in_all(number: int, frame: Any) -> None:
    watching = [*PendingSignals.watching]
    for one in watching:
        one.note(number)
    if not watching:
        PendingSignals().restore()
        signal.raise_signal(number)
