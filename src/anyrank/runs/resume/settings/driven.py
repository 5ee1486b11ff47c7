"""Optimizers with the schedules that drive their rates, of which some may not be restored."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from anyrank.runs.resume.settings.differences import RATES
from anyrank.runs.resume.settings.replay import (
    Options,
    count_of,
    give,
    is_replayed,
    options_of,
    replay,
    restored_settings,
)
from anyrank.runs.state.accelerate_wrappers import innermost
from anyrank.runs.state.script_settings import ScriptSettings, optimizer_of

MOMENTA = ("momentum", "betas", "base_momentum", "max_momentum")  # that a cycle moves


@dataclass
class Driven:
    """An optimizer with its schedules.

    Attributes:
        optimizer: the innermost one.
        owner: its name in the state; None where the state has its schedules alone.
        is_restored: whether it is filled.
        new_groups: numbers of the groups that the saved run lacks.
        restored, begun: its schedules by part: those that are filled, and the others.
    """

    optimizer: Optimizer
    owner: str | None = None
    is_restored: bool = False
    new_groups: Collection[int] = ()
    restored: dict[str, Any] = field(default_factory=dict[str, Any])
    begun: dict[str, Any] = field(default_factory=dict[str, Any])


def all_driven(
    script: ScriptSettings, filled: Collection[str], new_groups: Mapping[str, Sequence[int]]
) -> list[Driven]:
    """The optimizers of a state, and those of its schedules."""
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


def take_last_rates(driven: Driven) -> None:
    """Give groups that were not restored the rates that their schedules had last, and the base
    rates: most schedules compute a rate from the one before.
    """
    states = [thing.state_dict() for thing in driven.restored.values()]
    states = [state for state in states if len(state.get("_last_lr") or ()) == _size(driven)]
    if not states or driven.is_restored:
        return
    # Of several, the one that was stepped most often, and of these the last, has the run's rates.
    number = max(range(len(states)), key=lambda n: (count_of(states[n]), n))
    rates = states[number]["_last_lr"]
    give(driven.optimizer, [{"lr": rate} for rate in rates])
    bases = next(filter(None, map(_bases_of, states)), [])
    if len(bases) == len(rates):
        give(driven.optimizer, [{"initial_lr": rate} for rate in bases])


def _size(driven: Driven) -> int:
    return len(driven.optimizer.param_groups)


def _bases_of(state: Mapping[str, Any]) -> list[Any]:
    """The base rates of a schedule, or of the first one in it."""
    if "base_lrs" in state or not state.get("_schedulers"):
        return [*state.get("base_lrs", ())]
    inner = state["_schedulers"][0]
    return _bases_of(inner if isinstance(inner, Mapping) else inner.state_dict())


def begin_rates(
    script: ScriptSettings, kept: Mapping[str, Any], driven: Driven
) -> tuple[list[Options], list[Options]] | None:
    """Give the groups of a restored optimizer the rates that schedules begin with which were not.

    Args:
        script: what the script gives.
        kept: settings of the restored schedules that are used in place of the script's, as JSON.
        driven: the optimizer, with its schedules.

    Returns:
        What the groups had of the saved run, and what of it is new; None where the saved rates
        stay.
    """
    schedules = {part: thing for part, thing in driven.restored.items() if is_replayed(thing)}
    are_plateaus = all(isinstance(thing, ReduceLROnPlateau) for thing in driven.begun.values())
    if not driven.is_restored or not driven.begun or (schedules and are_plateaus):
        return None  # a plateau leaves a rate as it finds it
    assert driven.owner is not None
    filled, rows = options_of(driven.optimizer), script.initial[driven.owner]
    if schedules:
        states = {part: copy.deepcopy(thing.state_dict()) for part, thing in schedules.items()}
        starts = {
            part: restored_settings(script.initial[part], kept.get(part, {}), states[part])
            for part in schedules
        }
        counts = {part: count_of(state) for part, state in states.items()}
        rows = replay(driven.optimizer, schedules, counts, rows, starts)
        give(driven.optimizer, filled)
    begun = [_rates_in(*pair) for pair in zip(rows, filled, strict=True)]
    give(driven.optimizer, begun)
    return filled, begun


def _rates_in(options: Options, filled: Options) -> Options:
    """Of a group's options those that schedules drive."""
    is_cycle = not {"base_momentum", "max_momentum"}.isdisjoint({*options, *filled})
    keys = (*RATES, *MOMENTA) if is_cycle else RATES
    return {key: options[key] for key in keys if key in options}
