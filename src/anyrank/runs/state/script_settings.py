"""The settings that the script gives optimizers and schedulers, recorded for later resumes.

A state_dict() restores the saved run's settings (T_max, betas), even if the script has been changed
since. So a save records the script's settings before anything was filled, and a resume compares
them (`anyrank.runs.resume.settings`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anyrank.files.manifest import IMPLEMENTATION
from anyrank.runs.state.accelerate_wrappers import innermost
from anyrank.runs.state.plain_values import ABSENT, as_json, plain

Settings = Literal["saved", "script"]

NOT_SETTINGS = ("params", "param_names", *IMPLEMENTATION)


Options = dict[str, Any]  # of an optimizer's group, without its parameters


class ScriptSettings:
    """The settings of a state's parts as the script made them.

    Attributes:
        initial: part -> its settings when the state was made.
        initial_options: id of an optimizer -> the options of its groups then, also for schedulers
            whose optimizer is not a part.
        in_use: part -> the settings that are used, as JSON, for the next saves: for a setting that
            the script has changed but a resume has restored, that of the saved run's script.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts
        self.initial = {
            name: initial
            for name, part in parts.items()
            # A loader compares its own settings when its state is loaded.
            if name != "data" and (initial := _initial(part)) is not None
        }
        optimizers = [
            innermost(part) if isinstance(part, Optimizer) else optimizer_of(part)
            for part in parts.values()
        ]
        self.initial_options = {
            id(optimizer): _options_of(optimizer) for optimizer in optimizers if optimizer
        }
        self.in_use = {name: as_json(initial) for name, initial in self.initial.items()}

    def add_new_groups(self) -> None:
        """Record the options of groups that were added to optimizers since their state was made."""
        for part in self.parts.values():
            optimizer = innermost(part) if isinstance(part, Optimizer) else optimizer_of(part)
            if optimizer is not None:
                _add_options(self.initial_options[id(optimizer)], optimizer)
        for name, initial in self.initial.items():
            if isinstance(self.parts[name], Optimizer):
                _add_options(initial, self.parts[name])

    def record(self, records: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a save keeps: those that the parts' `records` restore."""
        settings: dict[str, Any] = {}
        for name, used in self.in_use.items():
            tree = records.get(name, {}).get("tree")
            is_whole = is_schedule(self.parts[name]) or isinstance(self.parts[name], Optimizer)
            restored = cast("dict[str, Any]", tree) if isinstance(tree, dict) else {}
            # An empty dict means that the part restores no setting, so none must be changed.
            settings[name] = used if is_whole else {k: used[k] for k in used if k in restored}
        return settings


def _initial(part: Any) -> Any:
    """Return the settings of one part: a list by group for an optimizer, a dict for others; None
    if it has none. Calls no method of a class that is not known to be cheap.
    """
    if isinstance(part, Optimizer):
        return _options_of(part)
    if isinstance(part, torch.nn.Module):
        return None
    if is_schedule(part):
        try:
            return copy.deepcopy(part.state_dict())
        except Exception:  # of the user's code, which the save will raise
            return None
    names = inspect.signature(type(part)).parameters if _has_signature(type(part)) else ()
    values = vars(part) if hasattr(part, "__dict__") else {}
    plain_values = {name: values[name] for name in names if name in values}
    return {k: v for k, v in plain_values.items() if plain(v) is not ABSENT} or None


def is_schedule(part: Any) -> bool:
    """Return True if a new part's whole state comes from the script."""
    if isinstance(part, LRScheduler | torch.amp.GradScaler):
        return True
    return not isinstance(part, Optimizer) and optimizer_of(part) is not None


def optimizer_of(part: Any) -> Any:
    """Return the optimizer inside a scheduler's wrappers."""
    optimizer: Any = getattr(part, "optimizer", None)
    return innermost(optimizer) if isinstance(optimizer, Optimizer) else None


def _options_of(optimizer: Optimizer) -> list[Options]:
    """Return a copy of the options of an optimizer's groups, without their parameters."""
    return [
        {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in group.items()
            if key not in NOT_SETTINGS
        }
        for group in optimizer.param_groups
    ]


def _add_options(known: list[Options], optimizer: Optimizer) -> None:
    """Add the options of an optimizer's further groups."""
    known += _options_of(optimizer)[len(known) :]


def _has_signature(kind: type) -> bool:
    try:
        inspect.signature(kind)
    except (TypeError, ValueError):
        return False
    return True
