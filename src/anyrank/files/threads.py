"""Work for a few threads of this process: disks and hashes do not hold Python's lock."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Iterable[T], workers: Sequence[Callable[[T], object]]) -> None:
    """Give each item to one of the workers, each of which has a thread of its own.

    Raises:
        BaseException: the first that a worker, or the items, raise; no further item is begun.
    """
    waiting: queue.Queue[tuple[T] | None] = queue.Queue(2 * len(workers))
    errors: list[BaseException] = []

    def loop(work: Callable[[T], object]) -> None:
        while (item := waiting.get()) is not None:
            try:
                if not errors:
                    work(*item)
            except BaseException as error:  # handed to the caller's thread below
                errors.append(error)

    threads = [threading.Thread(target=loop, args=(work,), daemon=True) for work in workers]
    for thread in threads:
        thread.start()
    try:
        for item in items:
            if errors:
                break
            waiting.put((item,))
    finally:
        for _ in threads:
            waiting.put(None)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
