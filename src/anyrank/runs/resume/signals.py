"""SIGTERM and SIGUSR1: recorded when they arrive, handled at the next step boundary."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Set
from typing import Any, ClassVar
from weakref import WeakSet

log = logging.getLogger("anyrank.resume")

WATCHED = (signal.SIGTERM, signal.SIGUSR1)  # by priority
GRACE_SEC = 10.0  # launcher and job scheduler may each send a SIGTERM for one end, moments apart


class PendingSignals:
    """The signals that a run has received and not handled. A SIGTERM later than GRACE_SEC after the
    first ends the process at once, because the last save may hang.

    Each open run of a process records them; the first one at a step boundary handles them. A signal
    is logged on arrival, because a long step or evaluation may outlast a launcher's grace period.

    Args:
        describe: returns a text on what the run waits for: its folder and the current step.
            way.
    """

    # Signals belong to the process. A run that is dropped without being closed records none.
    open_runs: ClassVar[WeakSet[PendingSignals]] = WeakSet()
    previous_handlers: ClassVar[dict[int, Any]] = {}

    def __init__(self, describe: Callable[[], str] = str) -> None:
        self.describe = describe
        self.received = set[int]()
        self.first_term_sec: float | None = None  # its time on the monotonic clock
        self.saved_for_term = False  # whether the last save after a SIGTERM is done

    def watch(self) -> None:
        """Record the signals until `restore`. Only the main thread can, because it receives them.

        Further calls change nothing. A signal whose handler is not Python's is not recorded,
        because that handler could not be restored.
        """
        if self in self.open_runs or threading.current_thread() is not threading.main_thread():
            return
        self.first_term_sec, self.saved_for_term = None, False
        self.open_runs.add(self)
        for number in WATCHED if not self.previous_handlers else ():
            if signal.getsignal(number) is not None:
                self.previous_handlers[number] = signal.signal(number, _record_in_all)

    def record(self, number: int) -> None:
        """Record a signal that arrived, and log it."""
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self.first_term_sec is None:
                self.first_term_sec = now
            elif now - self.first_term_sec > GRACE_SEC:
                for run in [*self.open_runs]:
                    run.restore()
                signal.raise_signal(signal.SIGTERM)
                return
        if number not in self.received:
            self.received.add(number)
            ends = " and stopped" if number == signal.SIGTERM else ""
            # A handler may interrupt a write to the very stream that the log goes to.
            with contextlib.suppress(RuntimeError):
                log.warning(
                    "received %s: the run will be saved%s after the current step (%s). In a long "
                    "evaluation, call end_if_asked() between batches.",
                    signal.Signals(number).name,
                    ends,
                    self.describe(),
                )

    def find_pending(self) -> int | None:
        """Return a signal that is not handled yet, or None; SIGTERM before SIGUSR1."""
        return next((number for number in WATCHED if number in self.received), None)

    def pending(self) -> tuple[int, ...]:
        """Return the pending signal as a tuple, for the other ranks."""
        number = self.find_pending()
        return () if number is None else (number,)

    def mark_done(self, numbers: Set[int | None]) -> None:
        """Mark signals that any rank received as handled by a save, which handles every SIGUSR1."""
        self.received.difference_update(numbers, {signal.SIGUSR1})
        self.saved_for_term = self.saved_for_term or signal.SIGTERM in numbers

    def restore(self) -> None:
        """Stop recording; restore the former handlers if no other run of the process records."""
        self.open_runs.discard(self)
        while self.previous_handlers and not self.open_runs:
            signal.signal(*self.previous_handlers.popitem())

    def resend(self) -> None:
        """Raise a SIGTERM again that arrived after the last step boundary."""
        if signal.SIGTERM in self.received and not self.saved_for_term and not self.open_runs:
            self.received.clear()
            signal.raise_signal(signal.SIGTERM)


def _record_in_all(number: int, frame: Any) -> None:
    open_runs = [*PendingSignals.open_runs]
    for run in open_runs:
        run.record(number)
    if not open_runs:
        PendingSignals().restore()
        signal.raise_signal(number)
