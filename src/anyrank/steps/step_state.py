"""What the steps of a loader share, and how far the current one is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import nn

from anyrank.data.fetch import FetchedBatch, MicrobatchDataset
from anyrank.data.schedule import StepPlan
from anyrank.world.ranks import Ranks

if TYPE_CHECKING:
    from anyrank.exact.run import ExactRun


@dataclass
class LoaderPass:
    """What the steps of one iteration of the loader share.

    Attributes:
        ranks: the data-parallel ranks; None after the iteration.
        group: the user's process group of these ranks.
        index: this rank's index among them.
        size: their number.
        batches: the batches still to be fetched; the first one starts the fetching.
        dataset: fetches a batch again.
        checked: models whose gradient exchange was verified, by id.
        exact: sum gradients in an order that does not depend on the number of ranks.
        notes: of the loader.
        exponent: of the power of two near an ordinary `weight`, once a weight is known.
    """

    ranks: Ranks | None
    group: Any
    index: int
    size: int
    batches: Iterator[FetchedBatch]
    dataset: MicrobatchDataset
    checked: WeakValueDictionary[int, nn.Module]
    exact: ExactRun | None = None
    notes: list[str] = field(default_factory=list[str])
    exponent: int | None = None

    @property
    def is_interleaved(self) -> bool:
        """Whether the ranks take turns in a step's microbatches."""
        return self.exact is not None and bool(self.exact.is_interleaved)

    def close(self) -> None:
        """Release workers and ranks: a user may keep a step after its loop."""
        self.ranks, self.batches = None, iter(())


@dataclass
class StepProgress:
    """How much of a step was run, shared by the step and its loader.

    Attributes:
        plan: the step.
        is_repeated: whether it was begun before, and left: gradients of that may be there.
        is_started: whether `microbatches` was called.
        is_complete: whether the last call of `microbatches` ran to its end.
        seen: ids of the samples that this rank fetched, without copies and repeats.
    """

    plan: StepPlan
    is_repeated: bool = False
    is_started: bool = False
    is_complete: bool = False
    seen: list[int] = field(default_factory=list[int])
