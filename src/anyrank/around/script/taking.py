"""Gives a filled state the settings of its script: settings="script"."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anyrank.around.script.differences import RATES, changed_keys, raw_changes
from anyrank.around.script.unsaved import functions_of
from anyrank.errors import CheckpointError
from anyrank.state.accelerate_wrappers import innermost
from anyrank.state.plain_values import as_json, plain
from anyrank.state.script_settings import (
    FUNCTIONS,
    ScriptSettings,
    is_schedule,
    optimizer_of,
)

DRIVEN = {*RATES, "momentum", "betas", "max_momentum", "base_momentum"}  # what schedules move


def take(
    script: ScriptSettings,
    saved: Mapping[str, Any],
    kept: Mapping[str, Any],
    filled: Collection[str],
    new_groups: Mapping[str, Sequence[int]],
) -> list[str]:
    """Use what the script gives otherwise than the saved run's script, in filled parts.

    Args:
        script: what the script gives.
        saved: `record` of the saved run; a part that it lacks gets all that the script gives.
        kept: the settings of the saved script, in the order of now.
        filled: names of the parts that are filled.
        new_groups: of optimizers, the groups that the saved run lacks.

    Returns:
        Names of the parts that have other settings now.

    Raises:
        CheckpointError: a schedule cannot go as far as the run is.
    """
    changed_parts: list[str] = []
    moved = set[int]()  # ids of the optimizers whose rates are those of the script
    schedules: dict[Optimizer, dict[str, Any]] = {}
    for part in [part for part in script.initial if part in filled]:
        thing, initial = script.parts[part], script.initial[part]
        before = kept.get(part) if part in saved else None
        if isinstance(thing, Optimizer):
            changed, has_rates = _take_groups(thing, initial, before)
            is_moved = has_rates or bool(new_groups.get(part))
            moved |= {id(innermost(thing))} if is_moved else set()
        else:
            changed = raw_changes(as_json(initial), before)
            if is_replayed(thing):
                schedules.setdefault(optimizer_of(thing), {})[part] = thing
                moved |= {id(optimizer_of(thing))} if changed else set()
            elif changed := changed - {FUNCTIONS}:
                _take_values(part, thing, {key: initial[key] for key in changed})
        changed_parts += [part] if changed else []
    for optimizer, of_optimizer in schedules.items():
        # No checkpoint holds functions, so the rates alone show whether they have changed.
        has_functions = any(_has_functions(thing) for thing in of_optimizer.values())
        if has_functions or id(optimizer) in moved:
            before = copy.deepcopy([group["lr"] for group in optimizer.param_groups])
            _replay(script, optimizer, of_optimizer)
            if before != [group["lr"] for group in optimizer.param_groups]:
                changed_parts += [part for part in of_optimizer if part not in changed_parts]
    script.kept = {part: as_json(initial) for part, initial in script.initial.items()}
    return changed_parts


def _replay(script: ScriptSettings, optimizer: Optimizer, schedules: Mapping[str, Any]) -> None:
    """Bring schedules, as the script makes them, to the count that they have, from their start:
    most compute a rate from the one before.
    """
    counts = {part: count_of(thing.state_dict()) for part, thing in schedules.items()}
    owners = [p for p in script.initial if isinstance(script.parts[p], Optimizer)]
    part = next((p for p in owners if innermost(script.parts[p]) is optimizer), None)
    groups = optimizer.param_groups
    now = [{**group} for group in groups]
    initial = [dict(group) for group in script.initial[part]] if part is not None else now
    for group, options in zip(groups, initial, strict=False):
        group.update(copy.deepcopy({k: v for k, v in options.items() if k in group}))
    driven = {"lr"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a schedule that steps before its optimizer
        for part, thing in schedules.items():
            thing.load_state_dict(copy.deepcopy(_state_of(script.initial[part])))
        for number in range(max(counts.values(), default=0)):
            for part, thing in schedules.items():
                if number < counts[part]:
                    _step(part, thing, counts[part])
            if number == 0:
                driven |= _changed_options(groups, initial)
    driven |= _changed_options(groups, initial)
    for group, options in zip(groups, now, strict=True):
        for key in options.keys() - driven - {"params"}:
            group[key] = options[key]


def is_replayed(part: Any) -> bool:
    """Whether a schedule goes by its count alone."""
    return isinstance(part, LRScheduler) and not isinstance(part, ReduceLROnPlateau)


def _state_of(initial: Mapping[str, Any]) -> dict[str, Any]:
    """The state_dict() among a schedule's settings."""
    return {key: value for key, value in initial.items() if key != FUNCTIONS}


def _has_functions(schedule: Any) -> bool:
    """Whether rates are a function's, also in a schedule of schedules."""
    inner = cast("Sequence[Any]", getattr(schedule, "_schedulers", ()))
    return any(functions_of(schedule)) or any(_has_functions(part) for part in inner)


def _take_groups(
    optimizer: Optimizer, initial: Sequence[Mapping[str, Any]], before: Any
) -> tuple[set[str], bool]:
    """Give an optimizer's groups what the script gives otherwise: which, and whether a rate is."""
    changed = set[str]()
    for number, (group, options) in enumerate(zip(optimizer.param_groups, initial, strict=False)):
        now = as_json(options)
        keys = {*options} if before is None else changed_keys(now, before[number])
        for key in keys & group.keys():
            if isinstance(group[key], torch.Tensor):
                group[key].copy_(torch.as_tensor(options[key]))
            else:
                group[key] = copy.deepcopy(options[key])
        if "initial_lr" in keys and "lr" in options:
            group["lr"] = copy.deepcopy(options["lr"])
        changed |= keys
    return changed, not changed.isdisjoint(DRIVEN)


def _take_values(part: str, thing: Any, values: Mapping[str, Any]) -> None:
    """Give a filled part some settings."""
    if not values:
        return
    if not is_schedule(thing):
        for key, value in values.items():
            setattr(thing, key, value)
        return
    try:
        thing.load_state_dict({**thing.state_dict(), **copy.deepcopy(dict(values))})
    except Exception as error:  # of the user's code
        raise CheckpointError(
            f"{part}: load_state_dict() of {type(thing).__name__} does not take the script's "
            f"settings: {type(error).__name__}: {error}"
        ) from error


def _step(part: str, thing: Any, count: int) -> None:
    try:
        thing.step()
    except Exception as error:  # of a schedule that is shorter, or of the user's function
        raise CheckpointError(
            f"{part}: as the script makes it, it cannot be stepped {count} times, as often as the "
            f"run has stepped it ({type(error).__name__}: {error}): make it longer, or leave out "
            'settings="script"'
        ) from error


def count_of(state: Mapping[str, Any]) -> int:
    """How often a schedule was stepped."""
    while "last_epoch" not in state and state.get("_schedulers"):
        state = state["_schedulers"][0]
    return max(0, int(state.get("last_epoch", 0)))


def _changed_options(
    groups: Sequence[Mapping[str, Any]], initial: Sequence[Mapping[str, Any]]
) -> set[str]:
    """Options that a schedule has moved."""
    return {
        key
        for group, options in zip(groups, initial, strict=False)
        for key in options.keys() & group.keys()
        if plain(group[key]) != plain(options[key])
    }
