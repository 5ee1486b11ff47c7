"""Work for a few threads of this process: I/O and hashes release the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
END: Any = object()


def spread(items: Iterable[T], workers: Sequence[Callable[[T], object]]) -> None:
    """Process each item with one of the workers; each worker runs in its own thread.

    Raises:
        BaseException: raised by a worker or by the items; no further item is started.
    """
    left, lock, stop = iter(items), threading.Lock(), threading.Event()

    def loop(work: Callable[[T], object]) -> None:
        try:
            while not stop.is_set():
                with lock:
                    item = next(left, END)
                if item is END:
                    return
                work(item)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for future in [pool.submit(loop, work) for work in workers]:
                future.result()
        finally:
            stop.set()
