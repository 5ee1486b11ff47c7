"""One thread at a time in an object's calls: two would mix what they agree with other ranks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from anyrank.errors import CheckpointError


class _Locked(Protocol):
    _calling: threading.RLock


S = TypeVar("S", bound=_Locked)
P = ParamSpec("P")
R = TypeVar("R")


def one_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Refuse a call while another thread is in one; a thread may call within its own."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._calling.acquire(blocking=False):  # pyright: ignore[reportPrivateUsage]
            raise CheckpointError(
                f"{method.__name__}() while another thread is in a call of the same object: call "
                "it from one thread; background=True saves in a thread of its own"
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._calling.release()  # pyright: ignore[reportPrivateUsage]

    return call
