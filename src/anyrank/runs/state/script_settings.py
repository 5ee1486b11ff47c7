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
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.plain_values import ABSENT, as_json, plain

Settings = Literal["saved", "script"]

NOT_SETTINGS = ("params", "param_names", *IMPLEMENTATION)


class ScriptSettings:
    """The settings of a state's parts as the script made them.

    Attributes:
        initial: part -> its settings when the state was made.
        kept: the same as JSON, for the next saves: for a setting that the script has changed and
            that is not used, the value of the saved run's script.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts
        self.initial = {
            name: initial
            for name, part in parts.items()
            # A loader compares its own settings when its state is loaded.
            if name != "data" and (initial := _initial(part)) is not None
        }
        self.kept = {name: as_json(initial) for name, initial in self.initial.items()}

    def are_those_of(self, saved: Mapping[str, Any], matched: Mapping[str, PartMatch]) -> bool:
        """Return True if the saved run's script had the same settings, as far as they are known,
        with groups in their order. `saved` is its `record`, `matched` the parts that it fills: all
        current ones, because an optimizer and its schedulers depend on each other.
        """
        if self.initial.keys() - matched.keys():
            return False
        for name in matched.keys() & saved.keys() & self.initial.keys():
            settings = as_json(self.initial[name])
            # `kept` is of an earlier script if this process has already resumed another step.
            if not saved[name] == self.kept[name] == settings:
                return False
            groups = matched[name].groups
            if groups is not None and [*groups] != [*range(len(settings))]:
                return False
        return True

    def record(self, records: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a save keeps: those that the parts' `records` restore."""
        kept: dict[str, Any] = {}
        for name, initial in self.kept.items():
            tree = records.get(name, {}).get("tree")
            is_whole = is_schedule(self.parts[name]) or isinstance(self.parts[name], Optimizer)
            restored = cast("dict[str, Any]", tree) if isinstance(tree, dict) else {}
            # An empty dict means that the part restores no setting, so none must be changed.
            kept[name] = initial if is_whole else {k: initial[k] for k in initial if k in restored}
        return kept


def _initial(part: Any) -> Any:
    """Return the settings of one part: a list by group for an optimizer, a dict for others; None
    if it has none. Calls no method of a class that is not known to be cheap.
    """
    if isinstance(part, Optimizer):
        return [
            {k: _detached(v) for k, v in group.items() if k not in NOT_SETTINGS}
            for group in part.param_groups
        ]
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


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _has_signature(kind: type) -> bool:
    try:
        inspect.signature(kind)
    except (TypeError, ValueError):
        return False
    return True
