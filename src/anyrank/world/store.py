"""The ranks' store, with a deadline for every call.

A call on torch's TCP store waits for ever once the network to its host is cut, and holds the
connection meanwhile. So calls run in a thread of this class, and their callers wait as long as they
choose. After a call that was not answered in time, the store counts as lost.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from anyrank.errors import RankError
from anyrank.world import background

T = TypeVar("T")

ANSWER_SEC = 10.0  # of a store that is reached: it answers in less than a millisecond


class StoreLost(RankError):
    """The store does not answer, or the connection to it is closed."""


class _Call(Generic[T]):
    """One call, as it passes between the threads."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self.work = work
        self.done = threading.Event()
        self.results: list[T] = []
        self.error: Exception | None = None


class Store:
    """A part of the ranks' store. Its methods raise StoreLost; threads may share it.

    Args:
        store: torch's.
        prefix: what all keys begin with.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self.address, self.prefix = _address(store), prefix
        self.lost = False
        self.calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        inner = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
        background.start("anyrank-store", partial(_serve, [inner], self.calls), self.close)

    def call(self, work: Callable[[Any], T], seconds: float = ANSWER_SEC) -> T:
        """What `work` returns for torch's store, within the given seconds.

        Raises:
            StoreLost: it failed, or took longer; then `work` may still be running.
        """
        if self.lost:
            raise StoreLost(f"the ranks' store{self.address} does not answer")
        call = _Call(work)
        self.calls.put(call)
        if not call.done.wait(seconds):
            self.lost = True
            raise StoreLost(f"the ranks' store{self.address} has not answered for {seconds:.0f} s")
        if call.error is not None:
            self.lost = True
            text = str(call.error).partition("\n")[0][:200]
            raise StoreLost(f"the ranks' store{self.address} failed: {text}") from call.error
        return call.results[0]

    def set(self, key: str, value: str = "1", seconds: float = ANSWER_SEC) -> None:
        """Write a key."""
        self.call(lambda store: store.set(key, value), seconds)

    def get(self, key: str, seconds: float = ANSWER_SEC) -> str:
        """The value of a key, or "" without it."""
        return self.call(
            lambda store: store.get(key).decode() if store.check([key]) else "", seconds
        )

    def take(self, key: str) -> str:
        """The value of a key, which is removed; "" without it."""
        value = self.get(key)
        if value:
            self.delete(key)
        return value

    def has(self, keys: Sequence[str], seconds: float = ANSWER_SEC) -> bool:
        """Whether all of the keys are there."""
        return self.call(lambda store: store.check(list(keys)), seconds)

    def add(self, key: str, number: int) -> int:
        """Add to a counter; what it is then."""
        return self.call(lambda store: store.add(key, number))

    def delete(self, *keys: str) -> None:
        """Remove keys that are there."""
        self.call(lambda store: [store.delete_key(key) for key in keys])

    def absent(self, keys: Sequence[str], most: int, seconds: float = ANSWER_SEC) -> list[int]:
        """Positions of up to `most` keys that are not there; few calls where few are missing."""

        def search(low: int, high: int, found: list[int]) -> list[int]:
            if len(found) >= most or self.has(keys[low:high], seconds):
                return found
            if high - low == 1:
                return [*found, low]
            middle = (low + high) // 2
            return search(middle, high, search(low, middle, found))

        return search(0, len(keys), [])

    def close(self) -> None:
        """End the thread, which then lets go of torch's store. Does not wait."""
        self.lost = True
        self.calls.put(None)


def is_here(store: Any) -> bool:
    """Whether this machine hosts a TCP store."""
    host = getattr(_innermost(store), "host", "")
    if not host:
        return False
    try:
        # Connecting a datagram socket sends nothing, and says which address of ours faces the host.
        kind, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0] == address[0]
    except OSError:
        return False


def _serve(kept: list[Any], calls: queue.SimpleQueue[_Call[Any] | None]) -> None:
    store = kept.pop()  # the only reference, which goes with this frame
    while (call := calls.get()) is not None:
        try:
            call.results.append(call.work(store))
        except Exception as error:  # raised where the call was made
            call.error = error
        call.done.set()
        del call


def _address(store: Any) -> str:
    inner = _innermost(store)
    host = getattr(inner, "host", "")
    return f" at {host}:{inner.port}" if host else ""


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
