"""What tests of many rooms do with a model: its whole values, and steps that train it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def whole(tensor: Any) -> Any:
    """All of a tensor that may be sharded; what it is given, None as well, where it is not."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values(net: nn.Module) -> list[list[float]]:
    """Every parameter, whole."""
    return [whole(p.detach()).flatten().tolist() for p in net.parameters()]


def train(steps: Iterable[Any], net: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make the steps of a loader or of Checkpoints, whose loss is a mean square."""
    for step in steps:
        for batch in step.microbatches(net):
            step.backward(net(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
