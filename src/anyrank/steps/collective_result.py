"""Values that every rank computes by itself, and whose failure on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from anyrank.errors import AnyrankError, RankError
from anyrank.world.ranks import Ranks

S = TypeVar("S")
T = TypeVar("T")


def one_ahead(ranks: Ranks, what: str, work: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """`work` of each of at least one item, once all ranks have theirs. All ranks.

    The next result is computed before one is returned, so that no rank waits for another longer
    than one takes. The ranks so agree on the first two at once.

    Raises:
        Exception: in one process, what `work` raises; on several ranks an AnyrankError as from
            `Ranks.together`, with the exception of each rank.
    """
    *first, last = _start(ranks, what, work, items[:2])()
    yield from first
    del first  # else its memory stays until the end
    for item in items[2:]:
        ahead = _start(ranks, what, work, [item])
        yield last
        (last,) = ahead()
    yield last


def _start(
    ranks: Ranks, what: str, work: Callable[[S], T], items: Sequence[S]
) -> Callable[[], list[T]]:
    """Compute this rank's values at once. Returns what waits until all ranks have theirs.

    Between the two the rank may do other work: the ranks exchange their success meanwhile.
    """
    values: list[T] = []
    failure: Exception | None = None
    try:
        values += map(work, items)
    except Exception as error:
        failure = error
    failed = ranks.start_any(failure is not None, what)

    def finish() -> list[T]:
        is_failed = failed()
        if failure is not None and ranks.size == 1:
            raise failure
        if is_failed:
            ranks.together(what, lambda: _raise(failure))
        return values

    return finish


def _raise(error: Exception | None) -> None:
    """Raise this rank's error, if it has one, as one of anyrank's own."""
    if isinstance(error, AnyrankError):
        raise error
    if error is not None:
        notes = getattr(error, "__notes__", ())
        raise RankError("\n".join([f"{type(error).__name__}: {error}", *notes])) from error
