"""The plan of a step of lanes, and what is learned of it while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from anyrank.training.data.schedule import StepPlan
from anyrank.training.streams.deal import Deal
from anyrank.training.streams.lanes import Report, Rows


@dataclass(frozen=True)
class LanePlan(StepPlan):
    """A step: the lanes that share it. Its samples are known when all have reported.

    Attributes:
        deal: before the step.
        lanes: that have a microbatch, in order.
        has_copies: whether a rank may have fewer of them than others, in this step or a later one.
        reports: of the step, by lane.
        looks: reports of lanes that looked for a row of the next step.
        own_looks: rows that this rank read in these.
        after: the deal after the step, once it is known.
        sizes: samples of this rank's microbatches.
    """

    deal: Deal
    lanes: tuple[int, ...]
    has_copies: bool
    reports: dict[int, Report] = field(default_factory=dict[int, Report])
    looks: list[Report] = field(default_factory=list[Report])
    own_looks: list[Rows] = field(default_factory=list[Rows])
    after: list[Deal] = field(default_factory=list[Deal])
    sizes: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def samples(self) -> int:
        if len(self.reports) < len(self.lanes):
            raise self.is_unknown("its number of samples")
        return sum(report.num_outputs for report in self.reports.values())

    def is_unknown(self, what: str) -> ValueError:
        """The error of who asks for something too early."""
        return ValueError(
            f"step {self.number}: {what} is not known yet, as rows are counted while they are "
            "read, but in the last microbatch of a rank: ask after the loop over microbatches, and "
            "weight losses by step.backward(loss)"
        )

    @property
    def assumed_samples(self) -> int:
        return len(self.lanes) * self.microbatch

    @property
    def num_microbatches(self) -> int:
        return len(self.lanes)

    def size(self, k: int) -> int:
        return self.sizes[k]
