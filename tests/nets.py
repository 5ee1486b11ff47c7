"""What tests of many rooms ask of a model: its whole values."""

from __future__ import annotations

from typing import Any

from torch import nn


def whole(tensor: Any) -> Any:
    """All of a tensor that may be sharded; what it is given, None as well, where it is not."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values(net: nn.Module) -> list[list[float]]:
    """Every parameter, whole."""
    return [whole(p.detach()).flatten().tolist() for p in net.parameters()]
