"""The learning rates of an optimizer's groups, and the schedulers that set them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anyrank.errors import CheckpointError
from anyrank.runs.resume.settings.differences import RATES
from anyrank.runs.state.accelerate_wrappers import innermost
from anyrank.runs.state.script_settings import NOT_SETTINGS, ScriptSettings, optimizer_of

Options = dict[str, Any]  # of one group, without its parameters
MOMENTA = ("momentum", "betas", "base_momentum", "max_momentum")  # changed by cyclic schedulers


@dataclass
class Driven:
    """An optimizer with its schedulers.

    Attributes:
        optimizer: the innermost one.
        owner: its name in the state; None if the state has only its schedulers.
        is_restored: whether it is filled.
        new_groups: numbers of the groups that the saved run lacks.
        restored, begun: its schedulers by part: those that are filled, and the others.
    """

    optimizer: Optimizer
    owner: str | None = None
    is_restored: bool = False
    new_groups: Collection[int] = ()
    restored: dict[str, Any] = field(default_factory=dict[str, Any])
    begun: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def counting(self) -> dict[str, Any]:
        """Its restored schedulers that depend only on their count."""
        return {part: thing for part, thing in self.restored.items() if goes_by_count(thing)}

    @property
    def begins_anew(self) -> bool:
        """True if it is restored, and its rates are the initial ones of its schedulers."""
        are_plateaus = all(isinstance(thing, ReduceLROnPlateau) for thing in self.begun.values())
        return self.is_restored and bool(self.begun) and not (self.counting and are_plateaus)


def all_driven(
    script: ScriptSettings, filled: Collection[str], new_groups: Mapping[str, Sequence[int]]
) -> list[Driven]:
    """Return the optimizers of a state, and those of its schedulers."""
    by_optimizer: dict[int, Driven] = {}
    for part in script.initial:
        thing = script.parts[part]
        is_optimizer = isinstance(thing, Optimizer)
        optimizer = innermost(thing) if is_optimizer else optimizer_of(thing)
        if optimizer is None:
            continue
        driven = by_optimizer.setdefault(id(optimizer), Driven(optimizer))
        if is_optimizer:
            driven.owner, driven.is_restored = part, part in filled
            driven.new_groups = new_groups.get(part, ())
        else:
            (driven.restored if part in filled else driven.begun)[part] = thing
    return [*by_optimizer.values()]


def goes_by_count(part: Any) -> bool:
    """Return True if a scheduler depends only on its count."""
    return isinstance(part, LRScheduler) and not isinstance(part, ReduceLROnPlateau)


def count_of(state: Mapping[str, Any]) -> int:
    """Return how often a scheduler was stepped."""
    while "last_epoch" not in state and state.get("_schedulers"):
        state = state["_schedulers"][0]
    return max(0, int(state.get("last_epoch", 0)))


def options_of(optimizer: Optimizer) -> list[Options]:
    """Return a copy of the options of an optimizer's groups, without their parameters."""
    return [
        {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in group.items()
            if key not in NOT_SETTINGS
        }
        for group in optimizer.param_groups
    ]


def give(optimizer: Optimizer, rows: Sequence[Mapping[str, Any]]) -> None:
    """Set options of an optimizer's groups; tensors are filled in place."""
    for group, row in zip(optimizer.param_groups, rows, strict=False):
        for key, value in row.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = copy.deepcopy(value)


def rates_in(options: Options) -> Options:
    """Return those of a group's options that schedulers set."""
    is_cycle = not {"base_momentum", "max_momentum"}.isdisjoint(options)
    keys = (*RATES, *MOMENTA) if is_cycle else RATES
    return {key: options[key] for key in keys if key in options}


def step_to_counts(script: ScriptSettings, driven: Driven) -> list[Options]:
    """Step an optimizer's schedulers from their start in the script to their current counts.

    Most compute a rate from the previous one, so nothing else gives the rate at a count.

    Returns:
        The options of the optimizer's groups at these counts, which are set.

    Raises:
        CheckpointError: a scheduler cannot be stepped that often.
    """
    assert driven.owner is not None
    schedules = driven.counting
    counts = {part: count_of(thing.state_dict()) for part, thing in schedules.items()}
    give(driven.optimizer, script.initial[driven.owner])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a scheduler that steps before its optimizer
        for part, schedule in schedules.items():
            schedule.load_state_dict(copy.deepcopy(script.initial[part]))
        for number in range(max(counts.values(), default=0)):
            for part, schedule in schedules.items():
                if number < counts[part]:
                    _step(part, schedule, counts[part])
    return options_of(driven.optimizer)


def _step(part: str, schedule: Any, count: int) -> None:
    try:
        schedule.step()
    except Exception as error:  # of a shorter scheduler, or of the user's function
        raise CheckpointError(
            f"{part}: as this script makes it, it cannot be stepped {count} times, which the run "
            f"has done ({type(error).__name__}: {error}). Make it longer, or remove "
            'settings="script".'
        ) from error


def take_last_rates(driven: Driven) -> None:
    """Set the rates of groups that were not restored to the last rates of their schedulers, and
    the base rates too: most schedulers compute a rate from the previous one.
    """
    states = [thing.state_dict() for thing in driven.restored.values()]
    size = len(driven.optimizer.param_groups)
    states = [state for state in states if len(state.get("_last_lr") or ()) == size]
    if not states:
        return
    # Of several, the most often stepped one, and of these the last, has the run's rates.
    number = max(range(len(states)), key=lambda n: (count_of(states[n]), n))
    rates = states[number]["_last_lr"]
    give(driven.optimizer, [{"lr": rate} for rate in rates])
    bases = next(filter(None, map(_bases_of, states)), [])
    if len(bases) == len(rates):
        give(driven.optimizer, [{"initial_lr": rate} for rate in bases])


def _bases_of(state: Mapping[str, Any]) -> list[Any]:
    """Return the base rates of a scheduler, or of its first inner one."""
    if "base_lrs" in state or not state.get("_schedulers"):
        return [*state.get("base_lrs", ())]
    inner = state["_schedulers"][0]
    return _bases_of(inner if isinstance(inner, Mapping) else inner.state_dict())
