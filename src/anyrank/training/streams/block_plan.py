"""The plan of a step of streams, and what is known of the step while it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anyrank.training.data.schedule import StepPlan
from anyrank.training.streams.deal import Deal
from anyrank.training.streams.workers import BlockAnswer, Key


@dataclass
class StepRead:
    """What is known of a step while it is read.

    Attributes:
        answers: the blocks that this rank has read, or any rank has reported.
        changes: pieces that had changed when they were read again: lane, shard, start, stop.
        after: the deal after the step, once all its blocks were reported.
        next_plan: the plan of the next step, from then on; None if none follows in the epoch.
        batch_for_copies: a copy of a batch of this rank.
        newest: the batch that was fetched last, if it has samples and was not handed out.
    """

    answers: dict[Key, BlockAnswer] = field(default_factory=dict[Key, BlockAnswer])
    changes: list[tuple[int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int]]
    )
    after: Deal | None = None
    next_plan: BlockPlan | None = None
    batch_for_copies: Any = None
    newest: Any = None

    @property
    def num_samples(self) -> int:
        """Number of samples of the blocks so far."""
        return sum(answer.num_samples for answer in self.answers.values())


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
    def last_keys(self) -> dict[int, Key]:
        """The last block of each lane in the step."""
        return {key[0]: key for key in self.keys}

    @property
    def samples(self) -> int:
        if self.read.after is None:
            raise self.too_early_error("its number of samples")
        return self.read.num_samples

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
        return self.read.answers[self.keys[k]].num_samples
