"""A result that every rank computes by itself, and whose failure on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

from anyrank.errors import AnyrankError, RankError
from anyrank.world.ranks import Ranks

S = TypeVar("S")
T = TypeVar("T")


class _CollectiveResult(Generic[T]):
    """Computes this rank's value at once, and returns it when all ranks have computed theirs.

    Between the constructor and `get` the rank may do other work: the ranks exchange their success
    meanwhile. All ranks construct it, and call `get`, in the same order.
    """

    def __init__(self, ranks: Ranks, what: str, work: Callable[[], T]) -> None:
        self.ranks, self.what = ranks, what
        self.values: list[T] = []
        self.error: Exception | None = None
        try:
            self.values.append(work())
        except Exception as error:
            self.error = error
        self.failed = ranks.start_any(self.error is not None, what)

    def get(self) -> T:
        """This rank's value, once all ranks have theirs. All ranks call.

        Raises:
            Exception: in one process, the work's own exception; on several ranks an AnyrankError as
                from `Ranks.together`, with the exception of each rank.
        """
        failed = self.failed()
        if self.error is not None and self.ranks.size == 1:
            raise self.error
        if failed:
            self.ranks.together(self.what, self._raise)
        (value,) = self.values
        return value

    def _raise(self) -> None:
        error = self.error
        if error is None:
            return
        if isinstance(error, AnyrankError):
            raise error
        notes = getattr(error, "__notes__", ())
        raise RankError("\n".join([f"{type(error).__name__}: {error}", *notes])) from error


def one_ahead(ranks: Ranks, what: str, work: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """`work` of each of at least one item, once all ranks have theirs. All ranks.

    The next result is computed before one is returned, so that no rank waits for another longer
    than one takes. The ranks so agree on the first two at once.

    Raises:
        Exception: as `work` raises, and on several ranks as from `Ranks.together`.
    """

    def start(some: Sequence[S]) -> _CollectiveResult[list[T]]:
        return _CollectiveResult(ranks, what, partial(list, map(work, some)))

    *first, last = start(items[:2]).get()
    yield from first
    del first  # else its memory stays until the end
    for item in items[2:]:
        ahead = start([item])
        yield last
        (last,) = ahead.get()
    yield last
