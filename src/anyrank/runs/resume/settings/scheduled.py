"""An optimizer with its schedulers, which set the learning rates of its groups."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anyrank.errors import CheckpointError
from anyrank.runs.state.accelerate_wrappers import innermost
from anyrank.runs.state.optimizer_groups import in_groups
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.script_settings import Options, ScriptSettings, optimizer_of


@dataclass(eq=False)
class ScheduledOptimizer:
    """An optimizer with its schedulers.

    Attributes:
        optimizer: the innermost one.
        initial: options of its groups as the script made them.
        part: its name in the state; None if the state has only its schedulers.
        is_restored: whether the resume restores it.
        sources: for each group the saved group that it continues, None for a new one; None if the
            groups are those of the saved run.
        restored, new: its schedulers by part: those that the resume restores, and the others.
    """

    optimizer: Optimizer
    initial: list[Options]
    part: str | None = None
    is_restored: bool = False
    sources: Sequence[int | None] | None = None
    restored: dict[str, Any] = field(default_factory=dict[str, Any])
    new: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def counting(self) -> dict[str, Any]:
        """Its restored schedulers whose rate depends only on their step count."""
        return {part: thing for part, thing in self.restored.items() if _depends_on_count(thing)}

    @property
    def new_groups(self) -> list[int]:
        """Numbers of the groups that the saved run lacks."""
        return [number for number, source in enumerate(self.sources or ()) if source is None]

    @property
    def restarts_rates(self) -> bool:
        """True if it is restored, but its rates are the initial ones of its new schedulers."""
        return self.is_restored and bool(self.new) and not self.counting

    @property
    def rates(self) -> list[float]:
        """The learning rates of its groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def last_rates(self) -> list[float]:
        """The last learning rates of the saved run, after the restore; empty if unknown."""
        if self.is_restored:
            return self.rates
        # If there are several schedulers, use the one with the most steps, and of these the last.
        states = [thing.state_dict() for thing in self.restored.values()]
        newest = max(reversed(states), key=count_of, default={})
        return [float(rate) for rate in newest.get("_last_lr") or ()]


def scheduled_optimizers(
    script: ScriptSettings, filled: Mapping[str, PartMatch]
) -> list[ScheduledOptimizer]:
    """Return the optimizers of a state, and those of its schedulers.

    Args:
        script: the settings of the script.
        filled: the parts that the resume restores.
    """
    by_optimizer: dict[int, ScheduledOptimizer] = {}
    for part in script.initial:
        thing = script.parts[part]
        is_optimizer = isinstance(thing, Optimizer)
        optimizer = innermost(thing) if is_optimizer else optimizer_of(thing)
        if optimizer is None:
            continue
        initial = script.initial_options[id(optimizer)]
        scheduled = by_optimizer.setdefault(id(optimizer), ScheduledOptimizer(optimizer, initial))
        if is_optimizer:
            scheduled.part, scheduled.is_restored = part, part in filled
            scheduled.sources = filled[part].groups if part in filled else None
        else:
            (scheduled.restored if part in filled else scheduled.new)[part] = thing
    return [*by_optimizer.values()]


def _depends_on_count(part: Any) -> bool:
    """Return True if the rate of a scheduler depends only on its step count."""
    return isinstance(part, LRScheduler) and not isinstance(part, ReduceLROnPlateau)


def count_of(state: Mapping[str, Any]) -> int:
    """Return how often a scheduler was stepped."""
    while "last_epoch" not in state and state.get("_schedulers"):
        state = state["_schedulers"][0]
    return max(0, int(state.get("last_epoch", 0)))


def set_group_options(optimizer: Optimizer, rows: Sequence[Mapping[str, Any]]) -> None:
    """Set options of an optimizer's groups; tensors are filled in place."""
    for group, row in zip(optimizer.param_groups, rows, strict=False):
        for key, value in row.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = copy.deepcopy(value)


def step_to_counts(script: ScriptSettings, scheduled: ScheduledOptimizer) -> None:
    """Set an optimizer's groups to the script's options, and its schedulers to the script's
    settings, stepped from their start to their current counts.

    Most compute a rate from the previous one, so nothing else gives the rate at a count.

    Raises:
        CheckpointError: a scheduler cannot be stepped that often.
    """
    schedules = scheduled.counting
    counts = {part: count_of(thing.state_dict()) for part, thing in schedules.items()}
    set_group_options(scheduled.optimizer, scheduled.initial)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a scheduler that steps before its optimizer
        for part, schedule in schedules.items():
            schedule.load_state_dict(copy.deepcopy(script.initial[part]))
        for number in range(max(counts.values(), default=0)):
            for part, schedule in schedules.items():
                if number < counts[part]:
                    _step(part, schedule, counts[part])


def _step(part: str, schedule: Any, count: int) -> None:
    try:
        schedule.step()
    except Exception as error:  # of a shorter scheduler, or of the user's function
        raise CheckpointError(
            f"{part}: as this script makes it, it cannot be stepped {count} times, which the run "
            f"has done ({type(error).__name__}: {error}). Make it longer, or restore the saved "
            'one: without settings="script", and without skip= for its optimizer.'
        ) from error


def fit_plateaus(script: ScriptSettings, scheduled: ScheduledOptimizer) -> None:
    """Let schedulers that do not depend only on their count keep it, but use the script's values
    for each group, because the saved values belong to groups of another optimizer.
    """
    new_groups = [None] * len(scheduled.initial)
    for part, schedule in scheduled.restored.items():
        if isinstance(schedule, ReduceLROnPlateau):
            state = in_groups(schedule.state_dict(), script.initial[part], new_groups)
            schedule.load_state_dict(copy.deepcopy(state))
