"""A learning rate that is set by hand after a resume, and that a schedule takes back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
)

from anyrank.runs.state.accelerate_wrappers import innermost

log = logging.getLogger("anyrank.resume")

# Those whose rates follow from base_lrs or bounds; others go on from the rate that is there.
ABSOLUTE = (LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts)


def watch_rates(parts: Mapping[str, Any]) -> None:
    """Warn once of a rate that is set by hand before the next step and gone after a later one."""
    for name, schedule in parts.items():
        if isinstance(schedule, ABSOLUTE):
            _HandSet(name, schedule)


class _HandSet:
    """Looks at the rates of one schedule's optimizer before its steps, until it knows."""

    def __init__(self, name: str, schedule: LRScheduler) -> None:
        self.name, self.schedule = name, schedule
        self.rates: list[float] | None = None  # that were set by hand
        self.is_over = False  # a hook cannot remove itself while torch goes over the hooks
        innermost(schedule.optimizer).register_step_pre_hook(lambda *_: self.compare_rates())

    def compare_rates(self) -> None:
        """Before a step of the optimizer."""
        if self.is_over:
            return
        last = [float(rate) for rate in self.schedule.get_last_lr()]
        rates = [float(group["lr"]) for group in self.schedule.optimizer.param_groups]
        if self.rates is None and rates != last:
            self.rates = rates
        elif self.rates != rates:
            self.is_over = True
            if self.rates is not None and rates == last:
                log.warning(
                    "%s: the learning rate %g that was set after the resume is gone: a %s goes by "
                    "its base_lrs; give the optimizer the new lr=, and resume with "
                    'settings="script"',
                    self.name,
                    self.rates[0],
                    type(self.schedule).__name__,
                )
