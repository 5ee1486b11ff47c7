"""The plan of a step of streams, and what is known of the step while it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anyrank.training.data.schedule import StepPlan
from anyrank.training.streams.deal import Deal
from anyrank.training.streams.lane import LaneState
from anyrank.training.streams.workers import Key


class Report(NamedTuple):
    """What a rank reports of a block.

    Attributes:
        k: its microbatch.
        num_samples: number of its samples.
        changes: pieces that had changed when they were read again: shard, start, stop.
        lane_end: for a lane's last block of the step, the lane's state after it and the number of
            blocks that it has left.
    """

    k: int
    num_samples: int
    changes: tuple[tuple[int, int, int], ...]
    lane_end: tuple[LaneState, int | None] | None


@dataclass
class StepRead:
    """What is known of a step while it is read.

    Attributes:
        sizes: microbatch -> number of its samples, if it was reported.
        states: lane -> its state after the step, and the number of blocks that it has left.
        changes: pieces that had changed when they were read again: lane, shard, start, stop.
        after: the deal after the step, once all its blocks were reported.
        next_plan: the plan of the next step, from then on; None if none follows in the epoch.
        batch_for_copies: a batch of this rank.
    """

    sizes: dict[int, int] = field(default_factory=dict[int, int])
    states: dict[int, tuple[LaneState, int | None]] = field(
        default_factory=dict[int, tuple[LaneState, "int | None"]]
    )
    changes: list[tuple[int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int]]
    )
    after: Deal | None = None
    next_plan: BlockPlan | None = None
    batch_for_copies: Any = None


@dataclass(frozen=True, kw_only=True)
class BlockPlan(StepPlan):
    """A step: the lanes whose blocks are its microbatches. Its samples are known once it is read.

    Attributes:
        deal: deal before the step.
        keys: the blocks of the microbatches.
        read: what is known of the step so far; changes while it is read.
    """

    deal: Deal
    keys: tuple[Key, ...]
    read: StepRead

    @property
    def lanes(self) -> list[int]:
        """The lanes of the microbatches."""
        return [lane for lane, _, _ in self.keys]

    @property
    def samples(self) -> int:
        if self.read.after is None:
            raise self.too_early_error("its number of samples")
        return sum(self.read.sizes.values())

    def too_early_error(self, what: str) -> ValueError:
        """Make the error for a caller that needs a value too early."""
        return ValueError(
            f"step {self.number}: {what} is not known before the last microbatch of a rank, "
            "because rows are counted as they are read. Read it after the loop over "
            "microbatches(); to weight losses, use step.backward(loss)."
        )

    @property
    def assumed_samples(self) -> int:
        return len(self.keys) * self.microbatch

    @property
    def num_microbatches(self) -> int:
        return len(self.keys)

    def size(self, k: int) -> int:
        return self.read.sizes[k]
