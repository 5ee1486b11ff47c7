"""The batches of a step: each rank fetches its own, and the failure of one is every rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from anyrank.data.fetch import FetchedBatch
from anyrank.data.schedule import MicrobatchSlot
from anyrank.world.failures import Failure, as_failure
from anyrank.world.ranks import Ranks

FIRST = 2  # batches of a step that the ranks agree on at once
WHAT = "fetching a batch"

Fetcher = Callable[[MicrobatchSlot], FetchedBatch]


class OwnBatches:
    """Some batches of this rank, fetched at once. It has them when all ranks are known to.

    Args:
        fetch: returns the batch of a slot.
        slots: whose batches.
    """

    def __init__(self, fetch: Fetcher, slots: Sequence[MicrobatchSlot]) -> None:
        self._batches: list[FetchedBatch] = []
        self._cause: Exception | None = None
        self._wait: Callable[[], None] | None = None  # raises if any rank has failed
        try:
            self._batches += map(fetch, slots)
        except Exception as error:
            self._cause = error

    @property
    def failure(self) -> Failure | None:
        """Why this rank could not fetch them, for the others; None if it could."""
        return None if self._cause is None else as_failure(self._cause)

    def tell(self, ranks: Ranks) -> None:
        """Tell the others, without a wait, whether this rank could fetch them. All ranks."""
        self._wait = ranks.start_together(WHAT, self._cause)

    def learn(self, ranks: Ranks, failures: Sequence[Failure | None]) -> None:
        """The ranks, of which others may have other loaders, have told each other."""
        self._wait = partial(ranks.raise_failures, WHAT, failures, self._cause)

    def take(self, ranks: Ranks) -> list[FetchedBatch]:
        """The batches, once. All ranks.

        Raises:
            Exception: in one process, what the fetch raised; on several ranks an AnyrankError as
                from `Ranks.together`, with the exception of each rank.
        """
        if self._wait is None:
            self.tell(ranks)
        assert self._wait is not None
        self._wait()
        batches, self._batches = self._batches, []  # else their memory stays with this object
        return batches


def fetch_first(fetch: Fetcher, slots: Sequence[MicrobatchSlot]) -> OwnBatches:
    """The first batches of a step with these slots."""
    return OwnBatches(fetch, slots[:FIRST])


def one_ahead(
    ranks: Ranks, fetch: Fetcher, slots: Sequence[MicrobatchSlot], first: OwnBatches | None = None
) -> Iterator[FetchedBatch]:
    """The batches of a step, each once all ranks have theirs. All ranks.

    After the first ones, the next is fetched before one is returned, and the ranks agree on it
    while the caller works.

    Args:
        ranks: that have the step.
        fetch: returns the batch of a slot.
        slots: of the step on this rank, at least one.
        first: the first batches, if they were fetched before.

    Raises:
        Exception: as `OwnBatches.take`.
    """
    *batches, last = (first or fetch_first(fetch, slots)).take(ranks)
    yield from batches
    del batches  # else their memory stays until the end
    for slot in slots[FIRST:]:
        ahead = OwnBatches(fetch, [slot])
        ahead.tell(ranks)
        yield last
        (last,) = ahead.take(ranks)
    yield last
