"""Averages of a model's weights that another tool saved without torch's counter of updates."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from anyrank.models.tensors import find_tensors
from anyrank.tensors.names import AVERAGED


def is_counter(name: str) -> bool:
    """Return True if a tensor, by its name, counts the updates of torch's AveragedModel."""
    return name.rpartition(".")[2] == AVERAGED


def updates_of(module: nn.Module, counters: Collection[str], step: int) -> int:
    """Return the number of updates for an average whose file does not count them: the script's own
    if it set one, else the checkpoint's step, and at least 1.

    At 0 the next update would copy the model over the average. An average of equal weights gives
    the next ones a weight of 1 / (updates + 1), so 1 would give them half of it.

    Args:
        module: the AveragedModel, or a module that has one.
        counters: names of its counters that the file lacks.
        step: the checkpoint's step; 0 if it is unknown.
    """
    tensors = _named(module, counters)
    return max([0, *(int(tensor) for tensor in tensors if not tensor.is_meta)]) or max(1, step)


def set_updates(module: nn.Module, counters: Collection[str], updates: int) -> None:
    """Set these counters of a module, whose averages are loaded."""
    with torch.no_grad():
        for tensor in _named(module, counters):
            tensor.fill_(updates)


def _named(module: nn.Module, names: Collection[str]) -> list[torch.Tensor]:
    return [target.tensor for target in find_tensors(module) if target.name in names]
