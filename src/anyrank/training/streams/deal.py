"""The lane that gives microbatch k of a step: a table that all ranks have without an exchange.

The shards of a source are dealt once, when an epoch begins: of L = min(K, shards) lanes, lane i has
the shards at places i, i + L, i + 2 L of the epoch's order. Each microbatch of a step belongs to a
lane; a lane with several gives them its blocks in turn, in the order of the microbatches. A lane
looks as far ahead as its microbatches of the next step. If it finds its end, microbatches for which
it has no block go to the lanes with the fewest, the lowest first. So a microbatch has no sample
only if its lane was given to it in the step before, or in the first step of an epoch.

A mixture has several sources with lanes of their own. For each step it is drawn from which source a
microbatch takes its block. A source that ends before the epoch does is dealt again. Each shard of
an endless source is a lane, which begins its shard again at its end; a microbatch takes the lanes
that it has in turn. Pure Python: no torch, no ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from anyrank.tensors.hashing import derive
from anyrank.training.streams.lane import LaneState

Until = Literal["first", "all"]


@dataclass(frozen=True)
class Constants:
    """The values that a deal depends on besides the rows that were read.

    Attributes:
        num_microbatches: number K of microbatches in a step.
        seed: seed of the draws of sources.
        weights: weight of each source.
        until: whether the first source that ends, or the last one, ends an epoch.
        endless: whether no source ends.
    """

    num_microbatches: int
    seed: int = 0
    weights: tuple[float, ...] = (1.0,)
    until: Until = "first"
    endless: bool = False


class Opening(NamedTuple):
    """A lane, as its reader has to know it.

    Attributes:
        lane, source: numbers of the lane and of its source.
        reading: tells apart the times that a shard is read in a run.
        first_place: place of its first shard in the source's order.
        stride: distance between its shards; 0 if it has one, read again and again.
        num_shards: number of shards of the source.
        state: where it continues.
    """

    lane: int
    source: int
    reading: int
    first_place: int
    stride: int
    num_shards: int
    state: LaneState

    def place_of(self, index: int) -> tuple[int, int] | None:
        """Return the reading and the place of one of its shards; None after the last."""
        if not self.stride:
            return index, self.first_place
        shard_place = self.first_place + index * self.stride
        return None if shard_place >= self.num_shards else (self.reading, shard_place)


class Deal:
    """The lanes of an epoch: the microbatches that each serves, and where each is.

    Args:
        constants: constants of the run.
        epoch: number of the epoch, from 0.
        sizes: number of shards of each source.

    Attributes:
        tables: for each source, the lane of each microbatch; for endless ones, its first lane. The
            same object as long as no lane's end is in sight.
        rounds: for each source, how often it has ended in the epoch.
        states: states of all lanes, those of one source after those of another.
        read: what finished rounds have read, by source.
    """

    def __init__(self, constants: Constants, epoch: int, sizes: Sequence[int]) -> None:
        self.constants, self.epoch, self.sizes = constants, epoch, tuple(sizes)
        most = max(sizes) if constants.endless else constants.num_microbatches
        self.counts = tuple(min(most, size) for size in sizes)  # lanes of each source
        self.starts = (0, *accumulate(self.counts))  # each source's first lane
        self.tables = [self._whole_table(source) for source in range(len(sizes))]
        self.rounds = [0] * len(sizes)
        self.states = [LaneState()] * sum(self.counts)
        self.read = [LaneState()] * len(sizes)

    def _whole_table(self, source: int) -> list[int]:
        start, count = self.starts[source], self.counts[source]
        return [start + k % count for k in range(self.constants.num_microbatches)]

    def source_of(self, lane: int) -> int:
        """Return the source of a lane."""
        return next(n for n, stop in enumerate(self.starts[1:]) if lane < stop)

    def opening(self, lane: int) -> Opening:
        """Return the opening that a reader needs to continue with a lane."""
        source = self.source_of(lane)
        first_place, stride = lane - self.starts[source], self.counts[source]
        if self.constants.endless:
            stride = 0
        state, reading = self.states[lane], self.reading(source)
        return Opening(lane, source, reading, first_place, stride, self.sizes[source], state)

    def reading(self, source: int) -> int:
        """Return the number of the reading in which a source is dealt now."""
        return self.epoch + (self.rounds[source] << 32)

    @property
    def is_over(self) -> bool:
        """Return whether the epoch has no further step."""
        constants = self.constants
        ended = [
            bool(n) for n, weight in zip(self.rounds, constants.weights, strict=True) if weight
        ]
        return any(ended) if constants.until == "first" else all(ended)

    # -- steps ------------------------------------------------------------------------------------

    def lanes_of(self, step: int, blocks: Sequence[int]) -> list[int]:
        """Choose the lane of each microbatch of a step.

        Args:
            step: number of the step in the run.
            blocks: number of blocks that each lane has given before.
        """
        constants = self.constants
        sources = [0] * constants.num_microbatches
        if len(self.sizes) > 1:
            chance = random.Random(derive(constants.seed, self.epoch, step, "mix"))  # noqa: S311
            numbers = range(len(self.sizes))
            sources = chance.choices(numbers, constants.weights, k=len(sources))
        lanes = [self.tables[source][k] for k, source in enumerate(sources)]
        if not constants.endless:
            return lanes
        # More shards than microbatches: lanes k, k + K and so on are microbatch k's.
        stops = [self.starts[source + 1] for source in sources]
        others = [range(first, stop, len(lanes)) for first, stop in zip(lanes, stops, strict=True)]
        return [min(lanes_of_k, key=lambda lane: (blocks[lane], lane)) for lanes_of_k in others]

    @property
    def blocks(self) -> list[int]:
        """Numbers of blocks that the lanes have given."""
        return [state.blocks for state in self.states]

    def shared_with(self, microbatches: Collection[int]) -> set[int]:
        """Find the lanes that may give a block to others than these microbatches."""
        return {
            lane for table in self.tables for k, lane in enumerate(table) if k not in microbatches
        }

    @property
    def looks(self) -> dict[int, int]:
        """Numbers of blocks that each lane looks for: one more than it has microbatches."""
        if self.constants.endless:
            return {}
        return {n: num + 1 for table in self.tables for n, num in Counter(table).items()}

    def after(self, states: Mapping[int, tuple[LaneState, int]]) -> Deal:
        """Return the deal after a step.

        Args:
            states: states of the lanes that were read in it, with the number of blocks that each
                has left, or -1 if that is unknown.
        """
        deal = object.__new__(Deal)
        deal.__dict__.update(self.__dict__)
        deal.states = [*self.states]
        for lane, (state, _) in states.items():
            deal.states[lane] = state
        left = {lane: num for lane, (_, num) in states.items() if num >= 0}
        if left:
            deal.tables, deal.rounds = [[*table] for table in self.tables], [*self.rounds]
            deal.read = [*self.read]
            for source, table in enumerate(deal.tables):
                _move(table, left)
                if not any(left.get(lane, 1) for lane in table):
                    deal._end_round(source)
        return deal

    def _end_round(self, source: int) -> None:
        self.rounds[source] += 1
        if not self.is_over:
            own_lanes = slice(self.starts[source], self.starts[source + 1])
            self.read[source] = self._read_of(source)
            self.states[own_lanes] = [LaneState()] * self.counts[source]
            self.tables[source] = self._whole_table(source)

    def _read_of(self, source: int) -> LaneState:
        """Return what was read of a source in the epoch, as counts in a state."""
        own_states = self.states[self.starts[source] : self.starts[source + 1]]
        return _sum_of([self.read[source], *own_states])

    @property
    def totals(self) -> list[LaneState]:
        """Counts, as states, of what was read of each source in the epoch."""
        return [self._read_of(source) for source in range(len(self.sizes))]

    # -- state ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return values of JSON, some 100 bytes for each lane."""
        return {
            "sizes": [*self.sizes],
            "tables": [[*table] for table in self.tables],
            "rounds": [*self.rounds],
            "read": [[*state] for state in self.read],
            "lanes": [[*state] for state in self.states],
        }

    @staticmethod
    def from_json(value: Any, constants: Constants, epoch: int) -> Deal:
        """Invert `to_json`; raise ValueError, TypeError or KeyError for anything else."""
        deal = Deal(constants, epoch, [int(size) for size in value["sizes"]])
        states = [LaneState.from_json(row) for row in value["lanes"]]
        tables = [[int(lane) for lane in table] for table in value["tables"]]
        read = [LaneState.from_json(row) for row in value["read"]]
        rounds = [int(number) for number in value["rounds"]]
        pairs = (states, deal.states), (tables, deal.tables), (read, deal.read)
        if any(len(a) != len(b) for a, b in (*pairs, (rounds, deal.rounds))):
            raise ValueError("the lanes do not fit the shards")
        for source, table in enumerate(tables):
            lanes = range(deal.starts[source], deal.starts[source + 1])
            if len(table) != constants.num_microbatches or any(n not in lanes for n in table):
                raise ValueError("a microbatch has no lane")
        deal.states, deal.tables, deal.read, deal.rounds = states, tables, read, rounds
        return deal


def _move(table: list[int], left: Mapping[int, int]) -> None:
    """Give microbatches whose lane has no block left to other lanes.

    Args:
        table: lane of each microbatch.
        left: number of blocks that lanes which are about to end still have.
    """
    loads, moving = Counter[int](), list[int]()
    for k, lane in enumerate(table):
        if loads[lane] < left.get(lane, len(table)):
            loads[lane] += 1
        else:
            moving.append(k)
    for k in moving:
        # Those whose end is not in sight, otherwise those with one more block than microbatches.
        lanes = [lane for lane in loads if lane not in left]
        lanes = lanes or [lane for lane in loads if loads[lane] < left[lane]]
        if not lanes:
            return
        table[k] = min(lanes, key=lambda lane: (loads[lane], lane))
        loads[table[k]] += 1


def _sum_of(states: Sequence[LaneState]) -> LaneState:
    """Add up the counts of some states into one state."""
    return LaneState(
        passed=sum(state.passed for state in states),
        blocks=sum(state.blocks for state in states),
        rows=sum(state.rows for state in states),
        units_fed=sum(state.units_fed for state in states),
        units_given=sum(state.units_given for state in states),
        dropped=sum(state.dropped for state in states),
    )
