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
        self.ranks, self.what = ranks, what
        self.made: list[T] = []
        self.error: Exception | None = None
        try:
            self.made.append(work())
        except Exception as error:
            self.error = error
        self.failed = ranks.start_any(self.error is not None, what)

    def get(self) -> T:
        """The value, once all ranks have theirs. All ranks.

        Raises:
            Exception: what the work raised, in one process; on several ranks an AnyrankError as
                `Ranks.together` raises, with what the work raised on each.
        """
        failed = self.failed()
        if self.error is not None and self.ranks.size == 1:
            raise self.error
        if failed:
            self.ranks.together(self.what, self._raise)
        (value,) = self.made
        return value

    def _raise(self) -> None:
        error = self.error
        if error is None or isinstance(error, AnyrankError):
            if error is not None:
                raise error
            return
        notes = getattr(error, "__notes__", ())
        raise RankError("\n".join([f"{type(error).__name__}: {error}", *notes])) from error
