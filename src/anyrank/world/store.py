"""The job's store (torch's TCPStore), with a deadline for every call.

A call on a TCPStore waits forever once the network to its machine is cut. So a thread makes the
call, and the caller waits for a limited time. After one call without an answer, the store counts as
lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from anyrank.errors import RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.helper_thread import HelperThread

T = TypeVar("T")

FIRST_PAUSE_SEC, LAST_PAUSE_SEC = 0.001, 0.1  # between two polls of a key
ANSWER_SEC = 10.0  # a reachable store answers in less than a millisecond


def answer_sec() -> float:
    """Return how long a call waits for the store's answer.

    Whoever lets ranks wait longer than by default expects a busy machine, such as one with many
    ranks per core, where the process that hosts the store waits for its turn too.
    """
    return ANSWER_SEC * max(1.0, TIMEOUT_SEC.get() / TIMEOUT_SEC.default)


class StoreLost(RankError):
    """Raised if the store does not answer, or the connection to it is closed."""


class Store:
    """A part of the job's store. Its methods raise StoreLost.

    Args:
        store: torch's store.
        prefix: prefix of all keys.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self.inner = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
        self.name = f"the ranks' store{_address(store)}"
        self.lost = False

    def call(self, work: Callable[[Any], T], seconds: float | None = None) -> T:
        """Call `work` with torch's store, and return its result.

        Args:
            work: function of torch's store.
            seconds: time limit, by default `answer_sec()`.

        Raises:
            StoreLost: `work` failed, or took longer than `seconds`; then it may still be running.
        """
        if self.lost:
            raise StoreLost(f"{self.name} does not answer")
        seconds = answer_sec() if seconds is None else seconds
        end = time.monotonic() + seconds

        def check_deadline() -> None:
            if time.monotonic() > end:
                raise TimeoutError(f"no answer for {seconds:.0f} s")

        try:
            with HelperThread() as helper:
                return helper.call(lambda: work(self.inner), check_deadline, min(seconds, 1.0))
        except Exception as error:
            self.lost = True
            text = str(error).partition("\n")[0][:200]
            raise StoreLost(f"{self.name} failed: {text}") from error

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self.call(lambda store: store.set(key, value))

    def get(self, key: str) -> str:
        """Return the value of a key, or "" if it does not exist."""
        return self.call(lambda store: store.get(key).decode() if store.check([key]) else "")

    def set_first(self, key: str, value: str) -> str:
        """Write a key unless it exists; return its value, which another rank may have written."""
        return self.call(lambda store: store.compare_set(key, "", value).decode())

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all of the keys exist."""
        return self.call(lambda store: store.check(list(keys)))

    def count(self, key: str) -> int:
        """Add 1 to a counter; return its new value."""
        return self.call(lambda store: store.add(key, 1))

    def delete(self, key: str) -> None:
        """Remove a key."""
        self.call(lambda store: store.delete_key(key))

    def wait(self, keys: Sequence[str], seconds: float, pause_sec: float = FIRST_PAUSE_SEC) -> bool:
        """Wait until all of the keys exist; return whether they did within `seconds`.

        It polls, because the store's own wait() prints two warnings from C++ each time that it ends
        without the keys.

        Args:
            keys: names of keys.
            seconds: time limit.
            pause_sec: time between the first two polls; later pauses are longer.
        """
        end, last_sec = time.monotonic() + seconds, max(pause_sec, LAST_PAUSE_SEC)
        while True:
            asked = time.monotonic()
            if self.has(keys):
                return True
            now = time.monotonic()
            if now >= end:
                return False
            # A store that answers slowly is busy, perhaps with the polls of a thousand ranks.
            time.sleep(min(max(pause_sec, 4 * (now - asked)), end - now))
            pause_sec = min(2 * pause_sec, last_sec)

    def find_absent(self, keys: Sequence[str], limit: int) -> list[int]:
        """Find the positions of up to `limit` missing keys; takes few calls if few are missing."""

        def search(low: int, high: int, missing: list[int]) -> list[int]:
            if len(missing) >= limit or self.has(keys[low:high]):
                return missing
            if high - low == 1:
                return [*missing, low]
            middle = (low + high) // 2
            return search(middle, high, search(low, middle, missing))

        return search(0, len(keys), [])


def _address(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", "")
    return f" at {host}:{store.port}" if host else ""
