"""The lane that supplies microbatch k of a step: a table that all ranks compute by themselves.

The shards of a source are dealt once, when an epoch starts: of L = min(K, shards) lanes, lane i has
the shards at positions i, i + L, i + 2 L of the epoch's order. Each microbatch of a step belongs to
a lane; a lane with several supplies their blocks in turn, in the order of the microbatches. A lane
looks as far ahead as its microbatches of the next step. If it finds its end, microbatches for which
it has no block go to the lanes with the fewest. So a microbatch has no sample only if its lane was
assigned to it in the previous step, or in the first step of an epoch. The table follows from the
number of blocks that each lane has left.

A mixture has several sources with their own lanes. For each step it is drawn from which source a
microbatch takes its block. A source that ends before the epoch does is dealt again, to lanes that
repeat their shards until the epoch is over. So do the lanes of an endless source, each of which has
one shard; a microbatch takes its lanes in turn. Pure Python: no torch, no ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from anyrank.tensors.hashing import derive
from anyrank.training.streams.lane import LaneState

Until = Literal["first", "all"]


@dataclass(frozen=True)
class Constants:
    """The values on which a deal depends, besides the rows that were read.

    Attributes:
        num_microbatches: number K of microbatches in a step.
        seed: seed of the draws of sources.
        weights: weight of each source.
        until: whether an epoch ends with the first source that ends, or with the last one.
        endless: whether no source ends.
    """

    num_microbatches: int
    seed: int = 0
    weights: tuple[float, ...] = (1.0,)
    until: Until = "first"
    endless: bool = False


class Opening(NamedTuple):
    """The state and shards of a lane, for its reader.

    Attributes:
        lane, source: numbers of the lane and of its source.
        reading: number of the times that a source was dealt in a run.
        first_place: place of its first shard in the source's order.
        stride: distance between its shards.
        num_shards: number of shards of the source.
        repeats: whether it restarts its shards after the last.
        state: where it continues.
    """

    lane: int
    source: int
    reading: int
    first_place: int
    stride: int
    num_shards: int
    repeats: bool
    state: LaneState

    @property
    def places(self) -> range:
        """The places of its shards in the source's order."""
        return range(self.first_place, self.num_shards, self.stride)


class Deal:
    """The lanes of an epoch: the microbatches that each supplies, and the position of each.

    Args:
        constants: constants of the run.
        epoch: number of the epoch, from 0.
        sizes: number of shards of each source.

    Attributes:
        has_ended: for each source, whether it has ended in the epoch.
        states: states of all lanes, those of one source after those of another.
        left: for each lane, the number of blocks that it has left, or -1 if that is unknown.
        read: counts of each source before it was dealt again.
        tables: for each source, the lane of each microbatch; for endless ones, its first lane. The
            same object as long as no further lane's end is known.
    """

    def __init__(self, constants: Constants, epoch: int, sizes: Sequence[int]) -> None:
        self.constants, self.epoch, self.sizes = constants, epoch, tuple(sizes)
        most = max(sizes) if constants.endless else constants.num_microbatches
        self.counts = tuple(min(most, size) for size in sizes)  # lanes of each source
        self.starts = (0, *accumulate(self.counts))  # each source's first lane
        self.has_ended = [False] * len(sizes)
        self.states = [LaneState()] * sum(self.counts)
        self.left = [-1] * sum(self.counts)
        self.read = [LaneState()] * len(sizes)
        self.tables = self._make_tables()

    def _make_tables(self) -> list[list[int]]:
        everything = range(self.constants.num_microbatches)
        return [self._table_of(source, everything) for source in range(len(self.sizes))]

    def _table_of(self, source: int, microbatches: Sequence[int]) -> list[int]:
        left = self.left[self._lanes(source)]
        return [self.starts[source] + n for n in _choose_lanes(microbatches, left)]

    def _lanes(self, source: int) -> slice:
        return slice(self.starts[source], self.starts[source + 1])

    def source_of(self, lane: int) -> int:
        """Return the source of a lane."""
        return next(n for n, stop in enumerate(self.starts[1:]) if lane < stop)

    def opening(self, lane: int) -> Opening:
        """Return the opening that a reader needs to continue with a lane."""
        source = self.source_of(lane)
        return Opening(
            lane,
            source,
            self.reading(source),
            lane - self.starts[source],
            self.counts[source],
            self.sizes[source],
            self.constants.endless or self.has_ended[source],
            self.states[lane],
        )

    def reading(self, source: int) -> int:
        """Return the number of the current reading of a source."""
        return self.epoch + (self.has_ended[source] << 32)

    @property
    def is_over(self) -> bool:
        """Return True if the epoch has no further step."""
        constants = self.constants
        ended = [
            is_over
            for is_over, weight in zip(self.has_ended, constants.weights, strict=True)
            if weight
        ]
        return any(ended) if constants.until == "first" else all(ended)

    # -- steps ------------------------------------------------------------------------------------

    def lanes_of(self, step: int, blocks: Sequence[int]) -> list[int]:
        """Choose the lane of each microbatch of a step.

        Args:
            step: number of the step in the run.
            blocks: number of blocks that each lane has supplied before.
        """
        constants = self.constants
        if len(self.sizes) == 1 and not constants.endless:
            return [*self.tables[0]]
        sources = [0] * constants.num_microbatches
        if len(self.sizes) > 1:
            chance = random.Random(derive(constants.seed, self.epoch, step, "mix"))  # noqa: S311
            numbers = range(len(self.sizes))
            sources = chance.choices(numbers, constants.weights, k=len(sources))
        lanes = [self.tables[source][k] for k, source in enumerate(sources)]
        if constants.endless:
            # More shards than microbatches: lanes k, k + K and so on belong to microbatch k.
            stops = [self.starts[source + 1] for source in sources]
            others = [range(n, stop, len(lanes)) for n, stop in zip(lanes, stops, strict=True)]
            return [min(lanes_of_k, key=lambda lane: (blocks[lane], lane)) for lanes_of_k in others]
        for source in set(sources):
            if self._is_ending(source):  # the table has too few blocks for all microbatches
                own_places = [k for k, drawn in enumerate(sources) if drawn == source]
                for k, lane in zip(own_places, self._table_of(source, own_places), strict=True):
                    lanes[k] = lane
        return lanes

    def _is_ending(self, source: int) -> bool:
        """Return True if a source has no block for some microbatch of a full step."""
        left = self.left[self._lanes(source)]
        return min(left) >= 0 and sum(left) < self.constants.num_microbatches

    def is_unsure(self, lanes: Collection[int]) -> bool:
        """Return True if all lanes of a mixture's step may have no block, because none was read."""
        blocks = [(self.left[lane], self.states[lane].blocks) for lane in lanes]
        has_known = any(left > 0 or (left < 0 and num_given) for left, num_given in blocks)
        is_mixture = len(self.sizes) > 1 and not self.constants.endless
        return is_mixture and not has_known and any(left < 0 for left, _ in blocks)

    @property
    def blocks(self) -> list[int]:
        """Return the number of blocks that each lane has supplied."""
        return [state.blocks for state in self.states]

    def shared_with(self, microbatches: Collection[int]) -> set[int]:
        """Find the lanes that may supply a block to other microbatches than these."""
        shared = {
            lane for table in self.tables for k, lane in enumerate(table) if k not in microbatches
        }
        if len(self.sizes) > 1 and len(microbatches) < self.constants.num_microbatches:
            for source in filter(self._is_ending, range(len(self.sizes))):
                shared |= {*range(self.starts[source], self.starts[source + 1])}
        return shared

    @property
    def looks(self) -> dict[int, int]:
        """Return the number of blocks that each lane looks for: one more than its microbatches."""
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
        deal.states, deal.left = [*self.states], [*self.left]
        for lane, (state, left) in states.items():
            deal.states[lane], deal.left[lane] = state, left
        if deal.left != self.left:
            deal.has_ended, deal.read = [*self.has_ended], [*self.read]
            for source in range(len(self.sizes)):
                if not any(deal.left[deal._lanes(source)]):
                    deal._deal_again(source)
            deal.tables = deal._make_tables()
        return deal

    def _deal_again(self, source: int) -> None:
        self.has_ended[source] = True
        if not self.is_over:
            lanes, count = self._lanes(source), self.counts[source]
            self.read[source] = self._read_of(source)
            self.states[lanes], self.left[lanes] = [LaneState()] * count, [-1] * count

    def _read_of(self, source: int) -> LaneState:
        """Return the counts of a source in the epoch, in the form of a state."""
        return _sum_of([self.read[source], *self.states[self._lanes(source)]])

    @property
    def totals(self) -> list[LaneState]:
        """Return the counts of each source in the epoch, in the form of states."""
        return [self._read_of(source) for source in range(len(self.sizes))]

    # -- state ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, about 100 bytes per lane."""
        return {
            "sizes": [*self.sizes],
            "has_ended": [*self.has_ended],
            "left": [*self.left],
            "read": [[*state] for state in self.read],
            "lanes": [[*state] for state in self.states],
        }

    @staticmethod
    def from_json(value: Any, constants: Constants, epoch: int) -> Deal:
        """Read a deal from `to_json`'s form; raise ValueError, TypeError or KeyError if invalid."""
        deal = Deal(constants, epoch, [int(size) for size in value["sizes"]])
        states = [LaneState.from_json(row) for row in value["lanes"]]
        left = [int(number) for number in value["left"]]
        read = [LaneState.from_json(row) for row in value["read"]]
        has_ended = [bool(ended) for ended in value["has_ended"]]
        pairs = (states, deal.states), (left, deal.left), (read, deal.read)
        if any(len(a) != len(b) for a, b in (*pairs, (has_ended, deal.has_ended))):
            raise ValueError("the lanes do not match the shards")
        if min(left) < -1:
            raise ValueError(f"a lane has {min(left)} blocks left")
        deal.states, deal.left, deal.read, deal.has_ended = states, left, read, has_ended
        deal.tables = deal._make_tables()
        return deal


def _choose_lanes(microbatches: Sequence[int], left: Sequence[int]) -> list[int]:
    """Choose the lane of each microbatch: its own, number k of the lanes in turn, or another.

    Args:
        microbatches: numbers of the microbatches, in their order.
        left: number of blocks that each lane has left, or -1 if its end is not known.
    """
    chosen, moving, loads = list[int](), list[int](), [0] * len(left)
    for number, k in enumerate(microbatches):
        lane = k % len(left)
        chosen.append(lane)
        if left[lane] < 0 or loads[lane] < left[lane]:
            loads[lane] += 1
        else:
            moving.append(number)
    if not moving:
        return chosen
    most = [len(microbatches) if blocks < 0 else blocks for blocks in left]
    spare = [(load, lane) for lane, load in enumerate(loads) if load < most[lane]]
    heapify(spare)
    added = list[int]()
    while spare and len(added) < len(moving):
        load, lane = heappop(spare)
        added.append(lane)
        if load + 1 < most[lane]:
            heappush(spare, (load + 1, lane))
    # In the order of the lanes, so that neighboring microbatches of a rank have few lanes.
    for number, lane in zip(moving, sorted(added), strict=False):
        chosen[number] = lane
    return chosen


def _sum_of(states: Sequence[LaneState]) -> LaneState:
    """Add the counts of some states into one state."""
    return LaneState(
        passed=sum(state.passed for state in states),
        blocks=sum(state.blocks for state in states),
        rows=sum(state.rows for state in states),
        units_fed=sum(state.units_fed for state in states),
        units_given=sum(state.units_given for state in states),
        dropped=sum(state.dropped for state in states),
    )
