"""Daemon threads that end before the interpreter does."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

JOIN_SEC = 5.0  # for a thread that is stuck in a call without a deadline


def start(name: str, work: Callable[[], object], stop: Callable[[], object]) -> None:
    """Run `work` in a thread, and call `stop` at exit if it is still running then.

    A daemon thread that is in C++ while the interpreter ends would abort the process, and any other
    one would keep it from ending.
    """

    def run() -> None:
        try:
            work()
        finally:
            atexit.unregister(end)

    def end() -> None:
        stop()
        thread.join(JOIN_SEC)

    thread = threading.Thread(target=run, name=name, daemon=True)
    atexit.register(end)
    thread.start()
