"""SIGTERM and SIGUSR1 as wishes: noted when they come, acted on at the next step boundary."""

from __future__ import annotations

import signal
import threading
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGUSR1)


class Wishes:
    """What schedulers ask for by signal. A second SIGTERM is not held back."""

    def __init__(self) -> None:
        self.noted: int | None = None
        self.before: dict[int, Any] = {}

    def watch(self) -> None:
        """Note the signals from now on. Only the main thread can, and only it gets them."""
        if self.before or threading.current_thread() is not threading.main_thread():
            return
        for number in WATCHED:
            self.before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGTERM and self.noted == signal.SIGTERM:
            self.restore()
            signal.raise_signal(signal.SIGTERM)
        self.noted = number

    def take(self) -> int | None:
        """The signal that came since the last call, if any."""
        noted, self.noted = self.noted, None
        return noted

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()


def leave_to_rank(worker: int) -> None:
    """Let a loader's worker outlive the first SIGTERM and any SIGUSR1. For `worker_init_fn`.

    torchrun and schedulers signal all processes of a rank, and the rank still has a step to
    complete. A second SIGTERM ends the worker: torch sends one to those that it cannot join.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
