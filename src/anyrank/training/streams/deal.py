"""Which lane has which shards: dealt alike on all ranks, from what the lanes report of a step.

Shards are dealt in the epoch's order, to the lanes in the order of their numbers. A lane keeps one
shard in reserve. Where it has begun several in the last two steps, it keeps as many as four such
steps would need, but at most its part of half of what is left: enough to read ahead, and to fill
microbatches from shards of few rows.

Where epochs flow into each other, the shards of the next epoch follow those of one, without end. A
lane is at most two epochs ahead of the lane that is furthest behind: else lanes of small shards
would read them many times, while one lane reads a large shard once. A lane that has nothing to read
until another has caught up takes no part in a step. Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from anyrank.training.streams.lanes import DONE, OUT, READY, LaneState, Report

STEPS = 4  # that a reserve lasts
# Epochs of which shards are dealt, where they flow into each other. Three epochs of 1,000 lognormal
# shards in 96 lanes take 1.85 of the least steps with two, 1.57 with three, as with any number.
OPEN = 3


class Deal:
    """The shards of a queue, and of each lane what is left of its own, and its state.

    Args:
        num_shards: of an epoch.
        num_lanes: K.
        flows: whether the next epoch's follow.

    Attributes:
        dealt: shards that have a lane, as places in the queue of all epochs that follow.
        first: of each lane, its shards that nobody needs to read again.
        shards: of each lane, those after these.
        begun, recent: of each lane, the shards begun in the queue, and in the last step.
        status: of each lane.
        states: of each lane.
    """

    def __init__(self, num_shards: int, num_lanes: int, flows: bool = False) -> None:
        self.num_shards, self.flows, self.dealt = num_shards, flows, 0
        self.first = [0] * num_lanes
        self.shards: list[list[int]] = [[] for _ in range(num_lanes)]
        self.begun, self.recent = [0] * num_lanes, [0] * num_lanes
        self.status = [OUT] * num_lanes
        self.states = [LaneState()] * num_lanes
        self._deal([1] * num_lanes)

    @property
    def is_last(self) -> bool:
        """Whether all shards are dealt."""
        return not self.flows and self.dealt == self.num_shards

    @property
    def is_over(self) -> bool:
        """Whether no lane has anything left."""
        return all(status == DONE for status in self.status)

    @property
    def is_ready(self) -> bool:
        """Whether the next step has a row, or there is none."""
        return READY in self.status or self.is_over

    @property
    def oldest(self) -> int:
        """The first place in the order whose shard has a row that is not given, or not dealt."""
        return min([shards[0] for shards in self.shards if shards], default=self.dealt)

    @property
    def live(self) -> list[int]:
        """The lanes that share the next step, in order: those that can give or read something."""
        return [
            lane
            for lane, status in enumerate(self.status)
            if status == READY
            or (status == OUT and (self.is_last or self._num_read(lane) < len(self.shards[lane])))
        ]

    def copy(self) -> Deal:
        """One that can be dealt on from here."""
        other = object.__new__(Deal)
        other.num_shards, other.flows, other.dealt = self.num_shards, self.flows, self.dealt
        other.first, other.shards = [*self.first], [[*shards] for shards in self.shards]
        other.begun, other.recent = [*self.begun], [*self.recent]
        other.status, other.states = [*self.status], [*self.states]
        return other

    def take(self, reports: Iterable[Report]) -> None:
        """Note what the lanes of a step report of it, and deal."""
        reserves = [1] * len(self.status)
        for report in reports:
            lane, begun = report.lane, report.begun
            self.status[lane], self.states[lane] = report.status, report.state
            before, self.recent[lane] = self.recent[lane], begun - self.begun[lane]
            self.begun[lane] = begun
            recent = 2 * self.recent[lane] if report.status == OUT else before + self.recent[lane]
            if recent > 1:
                reserves[lane] = STEPS * recent // 2
        for lane, state in enumerate(self.states):
            needless = state.first_passed - self.first[lane]
            del self.shards[lane][:needless]
            self.first[lane] += needless
        self._deal(reserves)

    def _deal(self, reserves: Sequence[int]) -> None:
        """Let each lane that is not over have so many shards that it has not begun."""
        limit = self._find_limit()
        most = max(1, (limit - self.dealt) // (2 * len(self.status)))
        lanes = range(len(self.status))
        if self.flows:  # else a transform that waits for another row might keep its epoch open
            lanes = sorted(lanes, key=lambda lane: (self.shards[lane] or [self.dealt])[0])
        for lane in lanes:
            has = self.first[lane] + len(self.shards[lane]) - self.begun[lane]
            missing = 0 if self.status[lane] == DONE else max(0, min(reserves[lane], most) - has)
            stop = max(self.dealt, min(self.dealt + missing, limit))
            self.shards[lane] += range(self.dealt, stop)
            self.dealt = stop

    def _find_limit(self) -> int:
        """How many shards of the queue may be dealt."""
        if not self.flows:
            return self.num_shards
        # What a transform holds of an older shard does not count: its lane has read that.
        unread = [self.shards[lane][self._num_read(lane) :][:1] for lane in range(len(self.status))]
        furthest_behind = min(chain.from_iterable(unread), default=self.dealt)
        return (furthest_behind // self.num_shards + OPEN) * self.num_shards

    def _num_read(self, lane: int) -> int:
        """A lane's shards before the row that it gives next."""
        return self.states[lane].passed - self.first[lane]

    # -- state ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Values of JSON; a lane's shards as (start, count) of neighbours."""
        lanes = [
            [*state, first, _as_runs(shards), begun, recent, status]
            for state, first, shards, begun, recent, status in zip(
                self.states,
                self.first,
                self.shards,
                self.begun,
                self.recent,
                self.status,
                strict=True,
            )
        ]
        return {"shards": self.num_shards, "flows": self.flows, "dealt": self.dealt, "lanes": lanes}

    @staticmethod
    def from_json(value: Any, num_lanes: int) -> Deal:
        """The inverse; raises ValueError, TypeError or KeyError for anything else."""
        deal = Deal(1, num_lanes, bool(value["flows"]))
        deal.num_shards, deal.dealt = int(value["shards"]), int(value["dealt"])
        for lane, row in enumerate(value["lanes"]):
            *state, first, runs, begun, recent, status = row
            *numbers, needed, inner, digest = state
            texts = str(needed), str(inner), str(digest)
            deal.states[lane] = LaneState._make([*map(int, numbers), *texts])
            int(deal.states[lane].needed or "0", 16)
            deal.first[lane], deal.begun[lane] = int(first), int(begun)
            deal.recent[lane], deal.status[lane] = int(recent), int(status)
            shards = [n for start, count in runs for n in range(start, start + count)]
            deal.shards[lane] = shards
            is_whole = deal.first[lane] <= deal.states[lane].first_passed
            if not is_whole or any(not 0 <= n < deal.dealt for n in shards):
                raise ValueError(f"lane {lane}: its shards do not fit")
        is_possible = deal.flows or deal.dealt <= deal.num_shards
        if len(value["lanes"]) != num_lanes or not is_possible:
            raise ValueError(f"{len(value['lanes'])} lanes, of {num_lanes}")
        return deal


def _as_runs(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers as (start, count) of neighbours."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
