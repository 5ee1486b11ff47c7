"""The batches of a step, which each rank fetches by itself, and whose errors all ranks raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from anyrank.data.fetch import FetchedBatch
from anyrank.data.schedule import MicrobatchSlot
from anyrank.world.ranks import Ranks

AHEAD = 2  # of a step's batches are fetched at once, and before it begins if it is known
WHAT = "fetching a batch"


class Fetch:
    """A few batches of this rank, fetched at once. They are taken when all ranks have theirs.

    Args:
        fetch: returns the batch of a slot.
        slots: whose batches.

    Attributes:
        failure: what `fetch` raised on this rank; None if nothing.
    """

    def __init__(
        self, fetch: Callable[[MicrobatchSlot], FetchedBatch], slots: Sequence[MicrobatchSlot]
    ) -> None:
        self.failure: Exception | None = None
        self._batches: list[FetchedBatch] = []
        self._has_failed: Callable[[], bool] | None = None  # on any rank; waits for their answers
        try:
            self._batches += map(fetch, slots)
        except Exception as error:
            self.failure = error

    def tell(self, ranks: Ranks) -> None:
        """Tell the others, without a wait, whether it failed. All ranks."""
        self._has_failed = ranks.start_any(self.failure is not None, WHAT)

    def learn(self, has_failed: bool) -> None:
        """The ranks have agreed, with other things, whether it failed on any of them."""
        self._has_failed = lambda: has_failed

    def take(self, ranks: Ranks) -> list[FetchedBatch]:
        """The batches, once. All ranks.

        Raises:
            Exception: in one process, what `fetch` raised; on several ranks an AnyrankError as from
                `Ranks.together`, with the exception of each rank.
        """
        if self._has_failed is None:
            self.tell(ranks)
        assert self._has_failed is not None
        if self._has_failed():
            ranks.together(WHAT, self._fail)
        batches, self._batches = self._batches, []  # else their memory stays with this object
        return batches

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


def one_ahead(
    ranks: Ranks,
    fetch: Callable[[MicrobatchSlot], FetchedBatch],
    slots: Sequence[MicrobatchSlot],
    first: Fetch | None = None,
) -> Iterator[FetchedBatch]:
    """The batches of a step, each once all ranks have theirs. All ranks.

    The next one is fetched before one is returned, so that no rank waits for another longer than
    one takes, and the ranks agree on it while the caller works.

    Args:
        ranks: that have the step.
        fetch: returns the batch of a slot.
        slots: of the step on this rank, at least one.
        first: the fetch of the first ones, if it was made before.

    Raises:
        Exception: as `Fetch.take`.
    """
    *batches, last = (first or Fetch(fetch, slots[:AHEAD])).take(ranks)
    yield from batches
    del batches  # else their memory stays until the end
    for slot in slots[AHEAD:]:
        ahead = Fetch(fetch, [slot])
        ahead.tell(ranks)
        yield last
        (last,) = ahead.take(ranks)
    yield last
