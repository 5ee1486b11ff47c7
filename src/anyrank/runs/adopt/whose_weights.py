"""Find which of a checkpoint's weights an optimizer has trained, and which are an average of
them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from anyrank.sources.foreign.checkpoint import ForeignCheckpoint
from anyrank.sources.part_names import is_average
from anyrank.tensors.names import AVERAGED

# What torch's schedules, and its GradScaler, save.
SCHEDULE = ("last_epoch", "_last_lr", "_schedulers", "num_bad_epochs")
SCALER = ("growth_factor", "growth_interval")


def find_average(
    parts: Mapping[str, Any], source: ForeignCheckpoint, skip: Collection[str]
) -> dict[str, str]:
    """Find the one module that the checkpoint does not name, and whose names and shapes are those
    of the checkpoint's average of the weights, if no part has the average's name.
    """
    modules = {k: part for k, part in parts.items() if isinstance(part, nn.Module)}
    lacking = [name for name in modules if name not in source.weights and name not in skip]
    if len(lacking) != 1 or "ema" not in source.weights or "ema" in parts:
        return {}
    saved = _shapes(source.weights["ema"].tensors)
    return {lacking[0]: "ema"} if saved == _shapes(modules[lacking[0]].state_dict()) else {}


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name, without the names that AveragedModel adds."""
    plain = {key.removeprefix("module."): value for key, value in tensors.items()}
    plain.pop(AVERAGED, None)
    return {key: tuple(value.shape) for key, value in plain.items() if hasattr(value, "shape")}


def candidates_for(thing: Any, source: ForeignCheckpoint) -> list[str]:
    """Return the checkpoint's names of a part's kind; for a scheduler, what looks like its
    state."""
    if isinstance(thing, nn.Module):
        return [*source.weights]
    if isinstance(thing, Optimizer):
        return [*source.optimizers]
    names = [name for name in source.states if name not in source.optimizers]
    if isinstance(thing, LRScheduler):
        return [name for name in names if "sched" in name or _has(SCHEDULE, source.states[name])]
    if isinstance(thing, torch.amp.GradScaler):
        return [name for name in names if _has(SCALER, source.states[name])]
    return names


def _has(names: Collection[str], state: Any) -> bool:
    return isinstance(state, dict) and any(name in state for name in names)


def is_copy_of_model(part: str, parts: Mapping[str, Any]) -> bool:
    """Return True if a module has the names and shapes of the model, as its average has, and does
    not start with the model's values by itself, as torch's AveragedModel does.
    """
    model, module = parts.get("model"), parts[part]
    if not isinstance(model, nn.Module) or module is model or isinstance(module, AveragedModel):
        return False
    return _shapes(module.state_dict()) == _shapes(model.state_dict())


def weights_warning(
    part: str, source: ForeignCheckpoint, path: str, used: Collection[str], is_chosen: bool
) -> str | None:
    """Return a warning for the report if a model's weights may not be those that its optimizer has
    trained: an average of them, or one of several tables that could be the model's.

    Args:
        part: part of the model, which is read together with the optimizer's state.
        source: the checkpoint.
        path: path of the checkpoint.
        used: names of what is read.
        is_chosen: whether the user chose the table.
    """
    key, tensors = source.keys.get(part, part), source.weights[part].tensors
    file = "" if "ema" in source.weights else path.rstrip("/").rpartition("/")[2]
    names = [name for name in (key, file) if is_average(name)]
    if AVERAGED in tensors or names:
        sign = f"is in {names[0]}" if names else f"has {AVERAGED}"
        return (
            f"{part}: {key} appears to hold averaged weights (it {sign}), but the optimizer's "
            "state belongs to the weights before averaging. If the tool has saved those too, "
            f"select them with parts={{{part!r}: ...}}, or pass another file."
        )
    alike = [
        source.keys.get(name, name)
        for name, listing in source.weights.items()
        if not (name in used or is_average(name)) and _shapes(listing.tensors) == _shapes(tensors)
    ]
    others = sorted(name for name in alike if not is_average(name))
    if not others or is_chosen:
        return None
    return (
        f"{part}: was read from {key}, but {', '.join(others)} has the same names and shapes, and "
        "the checkpoint does not say which of them the optimizer has trained. To read the other, "
        f"pass parts={{{part!r}: {others[0]!r}}}."
    )
