"""The lane that supplies microbatch k of a step: a table that all ranks compute by themselves.

Microbatch k reads lane k mod L. The shards of a source are dealt once, when an epoch starts: of
L = min(K, shards) lanes, lane i has the shards at positions i, i + L, i + 2 L of the epoch's order.
A lane with several microbatches supplies their blocks in turn, in the order of the microbatches. A
lane reads ahead far enough for its microbatches of the next step. When it finds its end, surplus
microbatches move to the lanes with the fewest microbatches. So a microbatch has no sample only if
its lane was assigned to it in the previous step, or in the first step of an epoch. The table
follows from the number of blocks that each lane has left.

A mixture has several sources with their own lanes. Each step draws a source for every microbatch. A
source that ends before the epoch does is dealt again, to lanes that repeat their shards until the
epoch is over. The lanes of an endless source repeat their shards too: each has one shard, and a
microbatch takes its lanes in turn. Pure Python: no torch, no ranks.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from anyrank.tensors.hashing import derive
from anyrank.training.streams.lane import Counts, LaneState

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
        pass_id: pass over the source's shards: the epoch, with a bit for a source that was dealt
            again in it.
        first_place: place of its first shard in the source's order.
        stride: distance between its shards.
        num_shards: number of shards of the source.
        repeats: whether it restarts its shards after the last.
        state: where it continues.
    """

    lane: int
    source: int
    pass_id: int
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
        counts: for each source, its number of lanes.
        has_ended: for each source, whether it has ended in the epoch.
        states: states of all lanes, those of one source after those of another.
        blocks_left: for each lane, the number of blocks that it has left; None if unknown.
        read: counts of each source before it was dealt again.
        tables: for each source, the lane of each microbatch; for endless ones, its first lane. The
            same object as long as no further lane's end is known.
    """

    def __init__(self, constants: Constants, epoch: int, sizes: Sequence[int]) -> None:
        self.constants, self.epoch, self.sizes = constants, epoch, tuple(sizes)
        self.counts = _lane_counts(constants, sizes)
        self.starts = (0, *accumulate(self.counts))  # each source's first lane
        self.has_ended = [False] * len(sizes)
        self.states = [LaneState()] * sum(self.counts)
        self.blocks_left: list[int | None] = [None] * sum(self.counts)
        self.read = [Counts()] * len(sizes)
        self.tables = self._make_tables()

    def _make_tables(self) -> list[list[int]]:
        everything = range(self.constants.num_microbatches)
        return [self._table_of(source, everything) for source in range(len(self.sizes))]

    def _table_of(self, source: int, microbatches: Sequence[int]) -> list[int]:
        left = self.blocks_left[self._lanes(source)]
        return [self.starts[source] + n for n in _choose_lanes(microbatches, left)]

    def _lanes(self, source: int) -> slice:
        return slice(self.starts[source], self.starts[source + 1])

    def source_of(self, lane: int) -> int:
        """Return the source of a lane."""
        return bisect_right(self.starts, lane) - 1

    def lane_pass(self, lane: int) -> tuple[int, int]:
        """Return a lane with the current pass over its source's shards."""
        return lane, self._pass_id(self.source_of(lane))

    def opening(self, lane: int) -> Opening:
        """Return the opening that a reader needs to continue with a lane."""
        source = self.source_of(lane)
        return Opening(
            lane,
            source,
            self._pass_id(source),
            lane - self.starts[source],
            self.counts[source],
            self.sizes[source],
            self.constants.endless or self.has_ended[source],
            self.states[lane],
        )

    def _pass_id(self, source: int) -> int:
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
        known = [left for left in self.blocks_left[self._lanes(source)] if left is not None]
        is_all = len(known) == self.counts[source]
        return is_all and sum(known) < self.constants.num_microbatches

    def is_unsure(self, lanes: Collection[int]) -> bool:
        """Return True if every lane of a mixture's step might turn out to be empty."""
        unread = [
            lane
            for lane in lanes
            if self.blocks_left[lane] is None and not self.states[lane].blocks
        ]
        has_known = any(self.blocks_left[lane] != 0 for lane in {*lanes} - {*unread})
        return len(self.sizes) > 1 and not self.constants.endless and not has_known and bool(unread)

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

    def after(self, states: Mapping[int, tuple[LaneState, int | None]]) -> Deal:
        """Return the deal after a step.

        Args:
            states: states of the lanes that were read in it, with the number of blocks that each
                has left; None if unknown.
        """
        deal = object.__new__(Deal)
        deal.__dict__.update(self.__dict__)
        deal.states, deal.blocks_left = [*self.states], [*self.blocks_left]
        for lane, (state, left) in states.items():
            deal.states[lane], deal.blocks_left[lane] = state, left
        if deal.blocks_left != self.blocks_left:
            deal.has_ended, deal.read = [*self.has_ended], [*self.read]
            for source in range(len(self.sizes)):
                if not any(left != 0 for left in deal.blocks_left[deal._lanes(source)]):
                    deal._deal_again(source)
            deal.tables = deal._make_tables()
        return deal

    def _deal_again(self, source: int) -> None:
        self.has_ended[source] = True
        if not self.is_over:
            lanes, count = self._lanes(source), self.counts[source]
            self.read[source] = self.totals[source]
            self.states[lanes], self.blocks_left[lanes] = [LaneState()] * count, [None] * count

    @property
    def totals(self) -> list[Counts]:
        """Return the counts of each source in the epoch."""
        return [
            Counts.total([read, *(state.counts for state in self.states[self._lanes(source)])])
            for source, read in enumerate(self.read)
        ]

    # -- state ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, about 100 bytes per lane."""
        return {
            "sizes": [*self.sizes],
            "has_ended": [*self.has_ended],
            "blocks_left": [*self.blocks_left],
            "read": [[*state] for state in self.read],
            "lanes": [[*state] for state in self.states],
        }

    @staticmethod
    def from_json(value: Any, constants: Constants, epoch: int) -> Deal:
        """Read a deal from `to_json`'s form; raise ValueError, TypeError or KeyError if invalid."""
        sizes = [int(size) for size in value["sizes"]]
        states = [LaneState.from_json(row) for row in value["lanes"]]
        if min(sizes) < 1 or sum(_lane_counts(constants, sizes)) != len(states):
            raise ValueError("the lanes do not match the shards")
        deal = Deal(constants, epoch, sizes)
        left = [None if number is None else int(number) for number in value["blocks_left"]]
        read = [Counts(*map(int, row)) for row in value["read"]]
        has_ended = [bool(ended) for ended in value["has_ended"]]
        pairs = (left, states), (read, sizes), (has_ended, sizes)
        if any(len(a) != len(b) for a, b in pairs):
            raise ValueError("the counts do not match the lanes")
        if any(number is not None and number < 0 for number in left):
            raise ValueError("a lane has fewer than 0 blocks left")
        deal.states, deal.blocks_left, deal.read, deal.has_ended = states, left, read, has_ended
        deal.tables = deal._make_tables()
        return deal


def _lane_counts(constants: Constants, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of lanes of each source."""
    most = max(sizes) if constants.endless else constants.num_microbatches
    return tuple(min(most, size) for size in sizes)


def _choose_lanes(microbatches: Sequence[int], left: Sequence[int | None]) -> list[int]:
    """Choose the lane of each microbatch: lane k mod L, or another lane if that one has ended.

    Args:
        microbatches: numbers of the microbatches, in their order.
        left: number of blocks that each lane has left; None if its end is not known.
    """
    chosen, moving, loads = list[int](), list[int](), [0] * len(left)
    most = [len(microbatches) if blocks is None else blocks for blocks in left]
    for number, k in enumerate(microbatches):
        lane = k % len(left)
        chosen.append(lane)
        if loads[lane] < most[lane]:
            loads[lane] += 1
        else:
            moving.append(number)
    if not moving:
        return chosen
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
