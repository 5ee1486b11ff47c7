"""SIGTERM and SIGUSR1: noted when they come, acted on at the next step boundary."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Set
from typing import Any, ClassVar
from weakref import WeakSet

WATCHED = (signal.SIGTERM, signal.SIGUSR1)  # the first goes before the second
GRACE_SEC = 10.0  # launcher and scheduler each send a SIGTERM, moments apart: they mean one end


class PendingSignals:
    """What schedulers ask a run for by signal, until it is done. A SIGTERM later than GRACE_SEC
    after the first ends the process at once: the last save may be what hangs.

    Each open run of a process notes them; the first one at a step boundary acts.
    """

    # Signals belong to the process. A run that is dropped without being closed notes none.
    watching: ClassVar[WeakSet[PendingSignals]] = WeakSet()
    before: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        self.noted = set[int]()
        self.first_term: float | None = None  # when, on the monotonic clock
        self.has_ended = False  # whether the last save has followed on a SIGTERM

    def watch(self) -> None:
        """Note the signals from now on, until `restore`. Only the main thread can, and gets them.

        A second call changes nothing, so call it wherever a signal is to be survived. A handler
        from outside Python could not be given back: that signal is left alone.
        """
        if self in self.watching or threading.current_thread() is not threading.main_thread():
            return
        self.first_term, self.has_ended = None, False
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
                for run in [*self.watching]:
                    run.restore()
                signal.raise_signal(signal.SIGTERM)
                return
        self.noted.add(number)

    def pending(self) -> int | None:
        """What was asked for and is not done, if anything; SIGTERM before SIGUSR1."""
        return next((number for number in WATCHED if number in self.noted), None)

    def done(self, numbers: Set[int | None]) -> None:
        """A save has followed on these signals of any rank, and so on every SIGUSR1."""
        self.noted.difference_update(numbers, {signal.SIGUSR1})
        self.has_ended = self.has_ended or signal.SIGTERM in numbers

    def restore(self) -> None:
        """Give the signals back to whoever had them, once no run of the process notes them."""
        self.watching.discard(self)
        while self.before and not self.watching:
            signal.signal(*self.before.popitem())

    def pass_on(self) -> None:
        """Send the process a SIGTERM again that came after the last step boundary."""
        if signal.SIGTERM in self.noted and not self.has_ended and not self.watching:
            self.noted.clear()
            signal.raise_signal(signal.SIGTERM)


def _note_in_all(number: int, frame: Any) -> None:
    watching = [*PendingSignals.watching]
    for run in watching:
        run.note(number)
    if not watching:
        PendingSignals().restore()
        signal.raise_signal(number)
