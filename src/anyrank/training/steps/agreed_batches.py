"""The batches of a step: each rank fetches its own, and one rank's failure is every rank's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from anyrank.training.data.batches import FetchedBatch
from anyrank.training.data.schedule import MicrobatchSlot
from anyrank.world.failures import Failure, as_failure, join_failures
from anyrank.world.first_ranks import FirstRanks, join_ranks
from anyrank.world.ranks import Ranks

FIRST = 2  # batches of a step that the ranks agree on together
WHAT = "fetching a batch"


@dataclass(frozen=True)
class Fetcher:
    """The functions that fetch a step's batches on this rank.

    Attributes:
        fetch: returns the batch of a slot.
        report: returns what the other ranks must know about fetched batches.
        learn: takes the reports of all ranks.
    """

    fetch: Callable[[MicrobatchSlot], FetchedBatch]
    report: Callable[[Sequence[FetchedBatch]], list[Any]] = lambda _: []
    learn: Callable[[list[Any]], object] = lambda _: None


class Ahead(NamedTuple):
    """The report of ranks on batches that they have fetched for the next step.

    Attributes:
        failures: the reasons of ranks that could not, the first few, with the ranks.
        failed: how many could not.
        report: what the others must know about the batches.
    """

    failures: dict[Failure, FirstRanks]
    failed: int
    report: list[Any]

    def join(self, others: Ahead) -> Ahead:
        """Merge the reports of ranks."""
        failures = join_ranks(self.failures, others.failures)
        return Ahead(failures, self.failed + others.failed, self.report + others.report)


class OwnBatches:
    """Some batches of this rank, fetched together; handed out once all ranks have theirs.

    Args:
        fetcher: fetcher of their step.
        slots: slots of the batches.

    Attributes:
        slots: slots of the batches.
        report: this rank's report on them.
    """

    def __init__(self, fetcher: Fetcher, slots: Sequence[MicrobatchSlot]) -> None:
        self.slots = slots
        self._batches: list[FetchedBatch] = []
        self._is_learned = False
        self._cause: Exception | None = None
        # Raises if any rank has failed, or returns the reports of all.
        self._wait: Callable[[], list[Any]] | None = None
        self._learn, self.report = fetcher.learn, list[Any]()
        try:
            self._batches += map(fetcher.fetch, slots)
            self.report = fetcher.report(self._batches)
        except Exception as error:
            self._cause = error

    def ahead(self, rank: int) -> Ahead:
        """Return this rank's report on them."""
        if self._cause is None:
            return Ahead({}, 0, self.report)
        return Ahead({as_failure(self._cause): FirstRanks((rank,), 1)}, 1, [])

    def tell(self, ranks: Ranks) -> None:
        """Send to the others, without waiting, whether this rank could fetch them. Collective."""
        self._wait = ranks.start_reduce(WHAT, self._cause, self.report, operator.add)

    def learn(self, ranks: Ranks, ahead: Ahead) -> None:
        """Record what the ranks reported; other ranks may use other loaders."""

        def wait() -> list[Any]:
            if self._cause is not None and ranks.size == 1:
                raise self._cause
            if ahead.failures:
                error = join_failures(WHAT, ahead.failures, ahead.failed, ranks.size)
                raise error from self._cause
            return ahead.report

        self._wait = wait

    def settle(self, ranks: Ranks) -> None:
        """Wait until every rank has its batches, and record the reports. Collective.

        Raises:
            Exception: in one process, the exception of the fetch; on several ranks an AnyrankError
                like that of `Ranks.run`, with the exception of each rank.
        """
        if self._is_learned:
            return
        if self._wait is None:
            self.tell(ranks)
        assert self._wait is not None
        self._learn(self._wait())
        self._is_learned = True

    def take(self, ranks: Ranks) -> list[FetchedBatch]:
        """Return the batches, once; raises like `settle`. Collective."""
        self.settle(ranks)
        batches, self._batches = self._batches, []  # else this object would keep their memory
        return batches


def fetch_first(fetcher: Fetcher, slots: Sequence[MicrobatchSlot]) -> OwnBatches:
    """Fetch the first batches of a step with these slots."""
    return OwnBatches(fetcher, slots[:FIRST])


def one_ahead(
    ranks: Ranks,
    fetcher: Fetcher,
    slots: Sequence[MicrobatchSlot],
    first: OwnBatches | None = None,
) -> Iterator[tuple[MicrobatchSlot, FetchedBatch, bool]]:
    """Yield the slots and batches of a step, and whether each is the last. Collective.

    A batch is yielded once every rank has its own. After the first ones, the next is fetched before
    one is yielded, and the ranks agree on it while the caller works. A single rank skips
    microbatches without a sample, which several ranks run as copies, because all run as many.

    Args:
        ranks: the ranks that have the step.
        fetcher: the step's fetcher.
        slots: the step's slots on this rank, at least one.
        first: the first batches, if they were already fetched.

    Raises:
        Exception: as for `OwnBatches.take`.
    """
    first = first or fetch_first(fetcher, slots)
    if ranks.size == 1:
        yield from _with_samples(_one_by_one(ranks, fetcher, slots, first))
        return
    *batches, last = first.take(ranks)
    for slot, batch in zip(slots, batches, strict=False):
        yield slot, batch, False
    del batches  # otherwise their memory would stay until the end
    begun = first.slots[-1]
    for slot in slots[len(first.slots) :]:
        ahead = OwnBatches(fetcher, [slot])
        ahead.tell(ranks)
        yield begun, last, False
        (last,), begun = ahead.take(ranks), slot
    yield begun, last, True


Entry = tuple[MicrobatchSlot, FetchedBatch]


def _one_by_one(
    ranks: Ranks, fetcher: Fetcher, slots: Sequence[MicrobatchSlot], first: OwnBatches
) -> Iterator[Entry]:
    """Yield the slots and batches of a step on one rank."""
    yield from zip(first.slots, first.take(ranks), strict=True)
    reports = list[Any]()
    for slot in slots[len(first.slots) :]:
        batch = fetcher.fetch(slot)
        reports += fetcher.report([batch])
        if slot is slots[-1]:  # no one asks before
            fetcher.learn(reports)
        yield slot, batch


def _with_samples(entries: Iterator[Entry]) -> Iterator[tuple[MicrobatchSlot, FetchedBatch, bool]]:
    """Yield entries with a sample, or one if none has any, and whether each is the last."""
    slot, batch = next(entries)
    for following, ahead in entries:
        if ahead.request.is_empty:
            continue
        if not batch.request.is_empty:
            yield slot, batch, False
        slot, batch = following, ahead
    yield slot, batch, True
