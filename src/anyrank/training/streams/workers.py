"""Read lanes in workers, or in this process: each request goes to the reader that has the lane.

A lane supplies its blocks one after the other, and the microbatch of a block does not change it. So
a rank requests the blocks that it will need: from a lane that only it uses, far ahead; from one
that other ranks read too, those of the step whose table is known. The number of workers, and how
far they read ahead, do not change what is read. Until a lane ends, it only gains microbatches. So a
block requested ahead is used by this rank or by another.
"""

from __future__ import annotations

import errno
import functools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate

from anyrank.checks import check_function
from anyrank.errors import CheckpointError
from anyrank.tensors.hashing import derive
from anyrank.training.data.batches import FetchedBatch
from anyrank.training.data.fetch import raise_noted
from anyrank.training.random_state.generators import reseed
from anyrank.training.streams.deal import Deal, Opening
from anyrank.training.streams.lane import Lane, LaneState, epoch_of
from anyrank.training.streams.sources import Streams, hide_worker_info
from anyrank.training.streams.transforms import fresh
from anyrank.wording import count

MOST_OPEN = 256  # shards of a process that stay open, if they can be opened again at a row
AHEAD = 16  # maximum number of steps that are requested ahead; workers have their own limit
Pass = tuple[int, int]  # a lane, and the pass over its source's shards
Key = tuple[int, int, int]  # the same, and a block of the lane
NO_KEY = -1, 0, 0


class BlockRequest(NamedTuple):
    """One block of a lane.

    Attributes:
        run: iteration of the loader: lanes of an earlier one are closed.
        opening: opening of the lane that all ranks know; None for no block, which keeps the workers
            in turn.
        block: number of the block.
        look: number of blocks that the lane looks for after it.
    """

    run: int
    opening: Opening | None
    block: int = 0
    look: int = 0


@dataclass(slots=True)
class BlockAnswer:
    """A block that was read; not a tuple, which a DataLoader with pin_memory would take apart.

    Attributes:
        key: the block.
        num_samples: number of its samples; 0 if the lane had already ended.
        state: state of the lane after it; None for a copy, or if another block's is reported.
        blocks_left: number of blocks that the lane has after it; None if unknown.
        changes: pieces that had changed when they were read again: shard, start, stop.
    """

    key: Key = NO_KEY
    num_samples: int = 0
    state: LaneState | None = None
    blocks_left: int | None = None
    changes: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if it has no sample, so that its batch is a copy of another's."""
        return not self.num_samples

    @property
    def ids(self) -> list[int]:
        """A number of the block, for receipts."""
        return [block_id(self.key)] if self.num_samples else []

    def __reduce__(self) -> Any:
        # Plain values, because classes take four times as long in each answer of a worker.
        state = None if self.state is None else tuple(self.state)
        return _read_answer, (self.key, self.num_samples, state, self.blocks_left, self.changes)


def _read_answer(key: Key, num_samples: int, state: Any, left: int, changes: Any) -> BlockAnswer:
    state = state and LaneState._make(state)
    return BlockAnswer(key, num_samples, state, left, changes)


def block_id(key: Key) -> int:
    """Return the number of a block in the receipt of its epoch."""
    lane, _, block = key
    return lane << 32 | block


class BlockReader(Dataset[FetchedBatch]):
    """The lanes that a process has open, indexed by requests.

    Args:
        dataset: the sources.
        seed: seed of the run.
        collate_fn: function of the loader.
    """

    def __init__(
        self,
        dataset: Streams,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        if collate_fn is not None:
            check_function("collate_fn", collate_fn)
        self.dataset, self.seed, self.size = dataset, seed, dataset.microbatch
        self.collate_fn = collate_fn or default_collate
        self._lanes: dict[int, Lane] = {}
        self._run = -1

    def __getitem__(self, request: BlockRequest) -> FetchedBatch:
        if self._run != request.run:
            self._run = request.run
            self._lanes.clear()
            hide_worker_info()
        if request.opening is None:
            return FetchedBatch(BlockAnswer(), None)
        number = request.opening.lane
        # Take the lane out first: if reading fails, it has consumed rows that it cannot return, so
        # it must not be used again.
        lane = self._lanes.pop(number, None)
        try:
            lane = self._lane_at(request.opening, lane, request.block)
            fetched = self._take(lane, request.block, request.look)
        except OSError as error:
            if error.errno == errno.EMFILE:
                error.add_note(
                    f"{count(len(self._lanes), 'shard')} are open in this process. Accept start= "
                    "in read(), so that those read least recently can be closed; or pass fewer, "
                    "larger shards; or raise the limit, ulimit -n."
                )
            raise
        self._lanes[number] = lane  # the last one: they are in the order of their use
        if len(self._lanes) > MOST_OPEN:
            unused = next(islice(reversed(self._lanes.values()), MOST_OPEN, None))
            if unused.source.has_start:
                unused.close()
        return fetched

    def read_once(self, opening: Opening, block: int) -> FetchedBatch:
        """Read one block of a lane that others have open too."""
        return self._take(self._open(opening), block, 0)

    def _open(self, opening: Opening) -> Lane:
        source, places = self.dataset.sources[opening.source], opening.places

        @functools.lru_cache(maxsize=2)  # each piece needs it
        def shard_at(index: int) -> tuple[int, int] | None:
            times, number = divmod(index, len(places))
            if times and not opening.repeats:
                return None
            shard = source.shard_at(opening.pass_id, places[number], opening.num_shards)
            return opening.pass_id + (times << 32), shard

        return Lane(
            source,
            opening.lane,
            opening.pass_id,
            fresh(source.transform),
            shard_at,
            opening.state,
            self.size,
            num_shards=len(places) if opening.repeats else None,
        )

    def _lane_at(self, opening: Opening, lane: Lane | None, block: int) -> Lane:
        """Return a lane at a position that all ranks know, or later; reopen it if it is elsewhere.

        Args:
            opening: the lane's opening.
            lane: the open lane of this number, if any.
            block: block that is read next.
        """
        if lane is None or lane.pass_id != opening.pass_id or lane.state.blocks > block:
            return self._open(opening)
        state = opening.state
        self._skip(lane, state.blocks)
        # The state of an ended lane also counts what was read after its last block.
        if lane.state.blocks != state.blocks or lane.state == state or lane.has_ended:
            return lane
        other = self._open(opening)
        # At the end of a lane nothing has changed: the open one has only not seen it yet.
        shard = other.shard_at(state.passed) if state.length else None
        if shard is not None:
            other.changes.append((shard[1], state.row, state.row + state.length))
        return other

    def _skip(self, lane: Lane, block: int) -> None:
        """Read up to a block."""
        while lane.state.blocks < block and not lane.has_ended:
            lane.take()

    def _take(self, lane: Lane, block: int, look: int) -> FetchedBatch:
        try:
            self._skip(lane, block)
            samples = lane.take(look) if lane.state.blocks == block else []
        except StopIteration as error:  # a DataLoader takes it for the end of the data
            raise RuntimeError(f"StopIteration, {error.__notes__}") from error
        batch = self._collate(samples, lane, block) if samples else None
        changes, lane.changes = tuple(lane.changes), []
        key = lane.number, lane.pass_id, block
        answer = BlockAnswer(key, len(samples), lane.state, lane.blocks_left, changes)
        return FetchedBatch(answer, batch, self.collate_fn is default_collate)

    def _collate(self, samples: list[Any], lane: Lane, block: int) -> Any:
        if self.collate_fn is not default_collate:  # which draws nothing
            reseed(derive(self.seed, lane.pass_id, lane.number, block, "samples"))
        try:
            return self.collate_fn(samples)
        except Exception as error:
            context = f"epoch {epoch_of(lane.pass_id)}, lane {lane.number}, block {block}"
            raise_noted(error, f"raised by collate_fn, {lane.progress}, {context}")


class BlockRequests:
    """The requested blocks, and those that have arrived.

    Args:
        run: iteration of the loader.
        num_workers: number of workers of this rank; 0: this process reads, and nothing ahead.
    """

    def __init__(self, run: int, num_workers: int) -> None:
        self.run, self.num_workers = run, num_workers
        self._answers: dict[Key, FetchedBatch] = {}
        self._asked: set[Key] = set()  # their answers are still to come
        self._stale = Counter[Key]()  # pending answers to requests with an outdated look-ahead
        self._ended: dict[Pass, LaneState] = {}
        self._workers: dict[int, int] = {}  # workers of the requested lanes
        self._queues: list[deque[Key]] = []
        self._needs: Iterator[Key] = iter(())
        self._wanted: Key | None = None
        self._own_microbatches: frozenset[int] = frozenset()
        self._shared: set[int] = set()
        self._looks: Mapping[int, int] = {}
        self._tables: Any = None
        self._deal: Deal | None = None
        self._number = 0

    def begin_step(self, deal: Deal, number: int, microbatches: Collection[int]) -> None:
        """Start a step whose table is known; `microbatches` are those of this rank."""
        own_microbatches = frozenset(microbatches)
        if (self._deal, self._number, self._own_microbatches) == (deal, number, own_microbatches):
            return
        self._deal, self._number = deal, number
        if self._tables is not deal.tables or self._own_microbatches != own_microbatches:
            self._tables, self._own_microbatches = deal.tables, own_microbatches
            self._shared = deal.shared_with(self._own_microbatches)
            before, self._looks = self._looks, deal.looks
            self._forget({lane for lane, look in self._looks.items() if look != before.get(lane)})
        self._queues = [deque[Key]() for _ in range(self.num_workers)]
        self._needs = self._find_needs(deal)
        for key in [*self._answers] if self._shared else ():
            if key[2] < deal.states[key[0]].blocks:  # another rank's
                del self._answers[key]

    def _forget(self, lanes: Collection[int]) -> None:
        """Request the blocks of lanes again that now look for a different number of blocks.

        The count of blocks left in an answer would otherwise depend on how far ahead it was read.
        """
        for key in [key for key in self._answers if key[0] in lanes]:
            del self._answers[key]
        for key in [key for key in self._asked if key[0] in lanes]:
            self._asked.discard(key)
            self._stale[key] += 1
        for ended in [ended for ended in self._ended if ended[0] in lanes]:
            del self._ended[ended]

    def _find_needs(self, deal: Deal) -> Iterator[Key]:
        """Yield the blocks that this rank needs, in that order."""
        blocks = deal.blocks
        for number in range(self._number, self._number + AHEAD):
            for k, lane in enumerate(deal.lanes_of(number, blocks)):
                block, blocks[lane] = blocks[lane], blocks[lane] + 1
                if k in self._own_microbatches and (
                    number == self._number or lane not in self._shared
                ):
                    yield *deal.lane_pass(lane), block

    def requests(self) -> Iterator[BlockRequest]:
        """Yield the requests, each to the worker whose turn it is. Without end."""
        turn = 0
        while True:
            key = self._next(turn % self.num_workers) if self.num_workers else self._wanted
            if key is None or self._deal is None:
                yield BlockRequest(self.run, None)
            else:
                lane, _, block = key
                opening, look = self._deal.opening(lane), self._looks.get(lane, 0)
                yield BlockRequest(self.run, opening, block, look)
            turn += 1

    def _next(self, worker: int) -> Key | None:
        """Return the next block to request from a worker; None if no further one is needed."""
        while not self._queues[worker]:
            key = next(self._needs, None)
            if key is None:
                return None
            if key in self._asked or key in self._answers or key[:2] in self._ended:
                continue
            chosen = self._workers.setdefault(key[0], len(self._workers) % self.num_workers)
            self._queues[chosen].append(key)
        key = self._queues[worker].popleft()
        self._asked.add(key)
        return key

    def fetch(self, batches: Iterator[FetchedBatch], key: Key) -> FetchedBatch:
        """Return a block of the step; raise the errors of reading it."""
        self._wanted = key
        while key not in self._answers:
            if self.num_workers and key[:2] in self._ended and key not in self._asked:
                return FetchedBatch(BlockAnswer(key, 0, self._ended[key[:2]], 0), None)
            fetched = next(batches, None)
            if fetched is None:
                raise CheckpointError(
                    f"lane {key[0]}: the workers returned no batch. Start a new iteration of the "
                    "loader."
                )
            answer: BlockAnswer = fetched.request
            if self._stale[answer.key]:
                self._stale[answer.key] -= 1
            elif answer.key != NO_KEY:
                self._asked.discard(answer.key)
                self._answers[answer.key] = fetched
                if answer.blocks_left == 0 and answer.state is not None:
                    self._ended[answer.key[:2]] = answer.state
        return self._answers.pop(key)
