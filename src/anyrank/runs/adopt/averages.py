"""Averages of a model's weights that another tool saved without torch's counter of updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyrank.models.tensors import ModelTensor
from anyrank.tensors.names import AVERAGED


def is_counter(name: str) -> bool:
    """Return True if a tensor, by its name, counts the updates of torch's AveragedModel."""
    return name.rpartition(".")[2] == AVERAGED


def updates_of(counters: Sequence[ModelTensor], step: int) -> int:
    """Return the number of updates for an average whose file does not count them: the script's own
    if it set one, else the checkpoint's step, and at least 1.

    At 0 the next update would copy the model over the average. An average of equal weights gives
    the next ones a weight of 1 / (updates + 1), so 1 would give them half of it.

    Args:
        counters: its counters that the file lacks.
        step: the checkpoint's step; 0 if it is unknown.
    """
    counts = [int(counter.tensor) for counter in counters if not counter.is_meta]
    return max([0, *counts]) or max(1, step)


def set_updates(counters: Sequence[ModelTensor], updates: int) -> None:
    """Set the counters of averages that are loaded."""
    with torch.no_grad():
        for counter in counters:
            counter.tensor.fill_(updates)
