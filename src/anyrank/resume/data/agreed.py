"""Work that every rank does by itself, and whose failure on any of them is every rank's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from anyrank.errors import AnyrankError, RankError
from anyrank.world.ranks import Ranks

T = TypeVar("T")


class Agreed(Generic[T]):
    """A value that this rank makes at once, and hands out when all ranks have made theirs.

    Between the two the rank is free for other work: what tells the ranks of each other travels
    meanwhile. All ranks make it, and `get` it, in the same order.
    """

    def __init__(self, ranks: Ranks, what: str, work: Callable[[], T]) -> None:
        self._ranks, self._what = ranks, what
        self._made: list[T] = []
        self._error: Exception | None = None
        try:
            self._made.append(work())
        except Exception as error:
            if ranks.size == 1:
                raise
            self._error = error
        self._failed = ranks.start_any(self._error is not None, what)

    def get(self) -> T:
        """The value, once all ranks have theirs. All ranks.

        Raises:
            AnyrankError: as `Ranks.together`, with what the work raised on each rank.
        """
        if self._failed():
            self._ranks.together(self._what, self._raise)
        (value,) = self._made
        return value

    def _raise(self) -> None:
        error = self._error
        if error is None or isinstance(error, AnyrankError):
            if error is not None:
                raise error
            return
        notes = getattr(error, "__notes__", ())
        raise RankError("\n".join([f"{type(error).__name__}: {error}", *notes])) from error
