"""Which synced weights a model holds: noted by a sync, forgotten when anyrank writes others."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

HELD = "anyrank_synced"  # attribute of a model: the report of what it holds


def report_of(model: object) -> Any:
    """The report of the sync whose weights a model has; None if there is none."""
    inner = _unwrapped(model)
    return inner.__dict__.get(HELD) if isinstance(inner, nn.Module) else None


def note_synced(model: object, report: object) -> None:
    """Let a model know what it holds now."""
    inner = _unwrapped(model)
    if isinstance(inner, nn.Module):
        inner.__dict__[HELD] = report


def forget_synced(model: object) -> None:
    """What a model and its parts hold is no longer known."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        module.__dict__.pop(HELD, None)


def _unwrapped(model: object) -> object:
    """The model inside of DDP's and the compiler's wrappers, which hold the same weights."""
    while isinstance(model, nn.Module):
        modules = model.__dict__["_modules"]
        is_wrapper = "_orig_mod" in modules or isinstance(model, DistributedDataParallel)
        inner = modules.get("_orig_mod") or modules.get("module") if is_wrapper else None
        if inner is None:
            return model
        model = inner
    return model
