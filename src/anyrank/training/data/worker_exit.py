"""The worker processes of a loader: they outlive a job scheduler's SIGTERM, but not their rank.

torchrun and job schedulers signal all processes of a rank, which still must complete a step and
save, so its workers ignore SIGTERM. They must then be ended explicitly: multiprocessing would send
one SIGTERM at exit and wait without limit, and nothing would end them if their rank is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

from anyrank.training.data.batches import FetchedBatch, as_sent

CHECK_SEC = 1.0  # how often a worker checks that its rank is alive
JOIN_SEC = 2.0  # for a killed process; it takes milliseconds
END = signal.SIGRTMAX - 1  # from a rank to its worker; a signal that nothing else sends


class WorkerExit:
    """Ends a loader's workers when this process ends, even if the loader was collected earlier.

    A traceback may keep the DataLoader's iterator alive.
    """

    def __init__(self) -> None:
        self.workers: list[BaseProcess] = []
        self.at_exit: Finalize | None = None

    def watch(self, start: Callable[[], Iterator[FetchedBatch]]) -> Iterator[FetchedBatch]:
        """Return the batches that a function starts, and register the workers that it starts.

        Raises:
            TypeError: raised by the batches: a worker could not send one.
        """
        before = multiprocessing.active_children()
        batches = None
        try:
            batches = start()
            return map(as_sent, batches)
        finally:
            alive = multiprocessing.active_children()
            new = [child for child in alive if child.daemon and child not in before]
            if new:
                if self.at_exit is not None:
                    self.at_exit.cancel()
                self.workers = [worker for worker in self.workers if worker in alive] + new
                # multiprocessing runs it when the interpreter, or one of its own processes, exits,
                # before it signals and joins its children.
                self.at_exit = Finalize(None, kill, (self.workers,), exitpriority=0)
            if batches is not None and new:
                # An error makes a cycle with its frames. When these are collected, torch closes its
                # queues before it tells the workers to end, and waits for them, so they would stay.
                weakref.finalize(batches, end, new, os.getpid()).atexit = False


def kill(workers: list[BaseProcess]) -> None:
    """End workers at once, when this process ends. Wait for them for at most JOIN_SEC."""
    with contextlib.suppress(ValueError):  # not in the main thread
        # torch's handler would raise an error because a worker was killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(JOIN_SEC)


def end(workers: list[BaseProcess], rank: int) -> None:
    """End workers whose batches can no longer be requested.

    Args:
        rank: the process that started them; processes that it forks have the batches object too.
    """
    if os.getpid() == rank:
        for worker in workers:
            if worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, END)


def leave_to_rank(worker: int) -> None:
    """Make a worker ignore SIGTERM and SIGUSR1, and end with its rank. For `worker_init_fn`."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        # A function, because programs that the dataset starts would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    signal.signal(END, lambda *_: os._exit(0))  # with another status torch raises in the rank
    threading.Thread(target=_end_with_parent, name="anyrank-parent", daemon=True).start()


def _end_with_parent() -> None:
    """Wait until the process that started this one has ended, then end this one too."""
    parent, started_by = multiprocessing.parent_process(), os.getppid()
    assert parent is not None
    # A process that was forked later may keep the sentinel open, so the parent's id counts too.
    while os.getppid() == started_by and not wait([parent.sentinel], CHECK_SEC):
        pass
    os._exit(1)
