"""Work for a few threads of this process: disks and hashes do not hold Python's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def spread(items: Iterable[T], workers: Sequence[Callable[[T], object]]) -> None:
    """Give each item to one of the workers, each of which has a thread of its own.

    Raises:
        BaseException: what a worker, or the items, raise; no further item is begun.
    """
    left, lock, stop = iter(items), threading.Lock(), threading.Event()

    def loop(work: Callable[[T], object]) -> None:
        try:
            while not stop.is_set():
                with lock:
                    found = [*islice(left, 1)]
                if not found:
                    return
                work(*found)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for each in [pool.submit(loop, work) for work in workers]:
                each.result()
        finally:
            stop.set()
