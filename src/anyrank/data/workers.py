"""The processes that fetch for a loader: they outlive a scheduler's SIGTERM, but not their rank.

torchrun and schedulers signal all processes of a rank, and the rank still has a step to complete
and to save: its workers ignore SIGTERM. So none of the usual ways ends them, neither that of
multiprocessing at exit (one SIGTERM, then a wait without limit) nor a parent that is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TypeVar

T = TypeVar("T")

CHECK_SEC = 1.0  # how often a worker looks whether its rank is still there
JOIN_SEC = 2.0  # for a process that was killed; it takes milliseconds


class WorkerExit:
    """Ends a loader's workers when this process ends, also where the loader is gone before them:
    a traceback may hold the DataLoader's iterator.
    """

    def __init__(self) -> None:
        self.workers: list[BaseProcess] = []
        self.at_exit: Finalize | None = None

    def watch(self, start: Callable[[], T]) -> T:
        """Run what may start workers, and answer for those that it has started."""
        before = multiprocessing.active_children()
        try:
            return start()
        finally:
            alive = multiprocessing.active_children()
            new = [one for one in alive if one.daemon and one not in before]
            if new:
                if self.at_exit is not None:
                    self.at_exit.cancel()
                self.workers = [one for one in self.workers if one in alive] + new
                # multiprocessing runs it at the end of the interpreter, or of a process of its
                # own, before it signals and joins its children.
                self.at_exit = Finalize(None, kill, (self.workers,), exitpriority=0)


def kill(workers: list[BaseProcess]) -> None:
    """End workers at once, when this process ends. Waits for them JOIN_SEC at most."""
    with contextlib.suppress(ValueError):  # not in the main thread
        # torch's handler would raise that a worker was killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(JOIN_SEC)


def leave_to_rank(worker: int) -> None:
    """Let a worker outlive SIGTERM and SIGUSR1, and end with its rank. For `worker_init_fn`."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        # A function, not SIG_IGN, which programs that the dataset starts would inherit.
        signal.signal(number, lambda *_: None)
    threading.Thread(target=end_with_parent, name="anyrank-parent", daemon=True).start()


def end_with_parent() -> None:
    """Wait until the process that started this one is gone, and end this one too."""
    parent, started_by = multiprocessing.parent_process(), os.getppid()
    assert parent is not None
    # A process that was forked later may hold the sentinel open: the parent's id tells too.
    while os.getppid() == started_by and not wait([parent.sentinel], CHECK_SEC):
        pass
    os._exit(1)
