"""Reading lanes in workers, or in this process: requests go to the reader that has the lane.

A request asks for a lane's next microbatch. One that is not due may be answered with "more shards
are needed", as all behind it are; it is asked again when the deal before its step is known. So how
far is read ahead changes nothing of what is read.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate

from anyrank.checks import check_function
from anyrank.tensors.hashing import derive
from anyrank.training.data.batches import FetchedBatch
from anyrank.training.random_state.streams import reseed
from anyrank.training.streams.deal import Deal
from anyrank.training.streams.lanes import Lane, LaneState, Report, Rows, Shard
from anyrank.training.streams.sources import Stream


class LaneRequest(NamedTuple):
    """One microbatch of a lane; -1 for none, which keeps the workers in turn.

    Attributes:
        epoch, number: of the step.
        lane: its number.
        size: samples in it, at most; 0 only looks for one.
        is_due, is_last_deal: as in `Lane.take`.
        shards: that the lane has got since the request before.
        opening: where to open the lane, and its shards before; None if it is open.
        token: of that opening.
        tokens: of the lanes that the worker is to keep open.
        attempt: as in `OpenLane`.
    """

    epoch: int
    number: int
    lane: int
    size: int
    is_due: bool
    is_last_deal: bool
    shards: tuple[Shard, ...]
    opening: tuple[int, LaneState] | None
    token: int
    tokens: frozenset[int]
    attempt: int = 0


@dataclass(slots=True)
class LaneAnswer:
    """What a request has led to; no tuple, which a DataLoader with pin_memory would take apart.

    Attributes:
        report: of the lane; None where more shards are needed, and for no lane.
        is_empty: no sample came, and the batch is a copy of another's.
    """

    report: Report | None
    is_empty: bool = False

    @property
    def ids(self) -> list[Rows]:
        """The rows that were read for the first time."""
        return [] if self.report is None else self.report.rows

    def __reduce__(self) -> Any:
        # As plain values: classes take four times as long, in each answer of a worker.
        report = self.report and (*self.report[:-1], tuple(self.report.state))
        return _read_answer, (report, self.is_empty)


def _read_answer(values: tuple[Any, ...] | None, is_empty: bool) -> LaneAnswer:
    if values is None:
        return LaneAnswer(None, is_empty)
    return LaneAnswer(Report._make([*values[:-1], LaneState._make(values[-1])]), is_empty)


class StreamReader(Dataset[FetchedBatch]):
    """The lanes that a process has open, indexed by requests.

    Args:
        dataset: the shards.
        seed: of the run.
        collate_fn: of the loader.
    """

    def __init__(
        self, dataset: Stream, seed: int, collate_fn: Callable[[list[Any]], Any] | None
    ) -> None:
        if collate_fn is not None:
            check_function("collate_fn", collate_fn)
        self.dataset, self.seed = dataset, seed
        self.collate_fn = collate_fn or default_collate
        self._lanes: dict[int, tuple[Lane, int]] = {}  # with the step of its next microbatch
        self._tokens = frozenset[int]()

    def __getitem__(self, request: LaneRequest) -> FetchedBatch:
        if self._tokens != request.tokens:
            self._tokens = request.tokens
            self._lanes = {t: known for t, known in self._lanes.items() if t in self._tokens}
        if request.lane < 0:
            return FetchedBatch(LaneAnswer(None), None)
        if request.opening is not None:
            self._lanes[request.token] = self._open(request), request.number
        lane, number = self._lanes.get(request.token, (None, -1))
        if lane is not None and request.opening is None:
            lane.shards += request.shards
        if lane is None or number != request.number:
            return FetchedBatch(LaneAnswer(None), None)
        # Where it raises, the lane has read what it cannot give any more, and is closed.
        del self._lanes[request.token]
        fetched = self._take(lane, request)
        has_given = request.size > 0 and fetched.request.report is not None
        self._lanes[request.token] = lane, number + has_given
        return fetched

    def read_once(self, request: LaneRequest) -> FetchedBatch:
        """One microbatch of a lane that others have open too."""
        assert request.opening is not None
        return self._take(self._open(request), request)

    def _open(self, request: LaneRequest) -> Lane:
        first, state = request.opening or (0, LaneState())
        transform = copy.deepcopy(self.dataset.transform)
        return Lane(
            self.dataset, request.lane, transform, first, request.shards, state, request.epoch
        )

    def _take(self, lane: Lane, request: LaneRequest) -> FetchedBatch:
        try:
            read = lane.take(request.size, request.is_due, request.is_last_deal)
        except StopIteration as error:  # a DataLoader takes it for the end of the data
            raise RuntimeError(f"StopIteration, {error.__notes__}") from error
        if read is None:
            return FetchedBatch(LaneAnswer(None), None)
        samples, report = read
        batch = self._collate(samples, request, lane) if samples else None
        is_default = self.collate_fn is default_collate
        return FetchedBatch(LaneAnswer(report, not samples), batch, is_default)

    def _collate(self, samples: list[Any], request: LaneRequest, lane: Lane) -> Any:
        if self.collate_fn is not default_collate:  # which draws nothing
            reseed(derive(self.seed, request.epoch, request.number, request.lane, "samples"))
        try:
            return self.collate_fn(samples)
        except Exception as error:
            error.add_note(
                f"raised by collate_fn, {lane.progress}, epoch {request.epoch}, step "
                f"{request.number}, lane {request.lane}"
            )
            if isinstance(error, StopIteration):
                raise RuntimeError(f"StopIteration, {error.__notes__}") from error
            raise


@dataclass
class OpenLane:
    """A lane that this rank runs, as this process knows it.

    Attributes:
        lane: its number.
        token: of its opening.
        worker: that has it.
        opening: its shards before, and its state, for the first request.
        number: of the step of the next request.
        num_sent: its shards that the worker knows of, of the epoch.
        attempt: how often more shards were needed; those that were asked for before, behind the one
            that needed them, have no answer either.
        shortage: (shards dealt to it, is_last_deal) for which more shards were needed.
        looks: 1 where a look is to be asked for, 2 where it is under way, else 0.
        answers: that came, and were not taken.
    """

    lane: int
    token: int
    worker: int
    opening: tuple[int, LaneState] | None
    number: int
    num_sent: int
    attempt: int = 0
    shortage: tuple[int, bool] | None = None
    looks: int = 0
    answers: deque[FetchedBatch] = field(default_factory=deque[FetchedBatch])


class LaneRequests:
    """Which requests go to the workers, and whose answers came.

    Args:
        epoch: from 0.
        size: samples of a microbatch.
        num_workers: of this rank; 0: this process reads, and nothing ahead.
        ids: places in the queue -> shards.

    Attributes:
        lanes: that this rank runs, by number.
        number: of the step that is next, or under way.
        next_lane: whose microbatch comes next, where this process reads.
    """

    def __init__(
        self, epoch: int, size: int, num_workers: int, ids: Callable[[list[int]], list[Shard]]
    ) -> None:
        self.epoch, self.size, self.num_workers, self.ids = epoch, size, num_workers, ids
        self.lanes: dict[int, OpenLane] = {}
        self.number = self.next_lane = 0
        self._tokens: list[frozenset[int]] = []
        self._num_tokens = 0
        self._sent: deque[LaneRequest] = deque()  # whose answers come next, in this order
        self._deal, self._due = Deal(1, 1), -1

    def begin_step(
        self, number: int, own_lanes: list[int], deal: Deal, is_looking: bool = False
    ) -> None:
        """The deal before a step is known, and which lanes this rank runs in it.

        Args:
            number: of the step.
            own_lanes: of this rank.
            deal: as far as it is known.
            is_looking: it is not final, as no lane has a row for the step.
        """
        self.number, self._deal, self._due = number, deal, number - is_looking
        if list(self.lanes) != own_lanes:
            lanes = self.lanes
            self.lanes = {}
            for index, lane in enumerate(own_lanes):
                worker = index % max(1, self.num_workers)
                known = lanes.get(lane)
                if known is None or known.worker != worker:
                    self._num_tokens += 1
                    opening, first = (deal.first[lane], deal.states[lane]), deal.first[lane]
                    known = OpenLane(lane, self._num_tokens, worker, opening, number, first)
                self.lanes[lane] = known
            workers = range(max(1, self.num_workers))
            self._tokens = [
                frozenset(known.token for known in self.lanes.values() if known.worker == worker)
                for worker in workers
            ]

    def requests(self) -> Iterator[LaneRequest]:
        """The requests, each to the worker whose turn it is. Without end."""
        turn = 0
        while True:
            request = self._next(turn % max(1, self.num_workers))
            self._sent.append(request)
            yield request
            turn += 1

    def _next(self, worker: int) -> LaneRequest:
        if not self.num_workers:
            lanes = [self.lanes[self.next_lane]]
        else:
            lanes = [known for known in self.lanes.values() if known.worker == worker]
        lanes = [known for known in lanes if self._may_ask(known)]
        if not lanes:
            tokens = self._tokens[worker] if self._tokens else frozenset[int]()
            return LaneRequest(self.epoch, 0, -1, 0, False, False, (), None, 0, tokens)
        known = min(lanes, key=lambda known: known.number)
        if known.looks:
            known.looks = 2
            return self._make(known, self.number, 0)
        known.number += 1
        return self._make(known, known.number - 1, self.size)

    def _may_ask(self, known: OpenLane) -> bool:
        """Whether the next microbatch of a lane may be asked for."""
        if known.looks or known.number <= self._due:
            return known.looks < 2
        if not self.num_workers or known.number > self.number + AHEAD:
            return False
        return known.shortage != (self._num_dealt(known.lane), self._deal.is_last)

    def _num_dealt(self, lane: int) -> int:
        return self._deal.first[lane] + len(self._deal.shards[lane])

    def _make(self, known: OpenLane, number: int, size: int) -> LaneRequest:
        lane, deal = known.lane, self._deal
        new = deal.shards[lane][max(0, known.num_sent - deal.first[lane]) :]
        known.num_sent = max(known.num_sent, self._num_dealt(lane))
        opening, known.opening = known.opening, None
        return LaneRequest(
            self.epoch,
            number,
            lane,
            size,
            number <= self._due or not size,
            deal.is_last,
            tuple(self.ids(new)) if new else (),
            opening,
            known.token,
            self._tokens[known.worker],
            known.attempt,
        )

    def sort(self, answered: FetchedBatch) -> None:
        """Put an answer to its lane; one that needs more shards is asked for again."""
        answer: LaneAnswer = answered.request
        request = self._sent.popleft()
        assert answer.report is None or answer.report.lane == request.lane
        known = self.lanes.get(request.lane)
        if known is None or known.token != request.token:
            return
        if answer.report is not None:
            known.answers.append(answered)
        elif request.size and request.attempt == known.attempt:
            known.number, known.attempt = request.number, known.attempt + 1
            known.shortage = known.num_sent, request.is_last_deal
        if not request.size:
            known.looks = int(answer.report is None)


AHEAD = 16  # steps that are asked for ahead, at most; workers have their own limit
