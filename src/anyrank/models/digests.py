"""Digests of tensors in memory, and a check of the memory before it is read."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.tensors.sharded_tensor import is_released


def digests_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Hash the present values of each tensor, in row-major order, whatever its strides.

    Args:
        tensors: the tensors with their names, on any device.

    Raises:
        CheckpointError: a tensor's memory was released.
    """
    digests: list[str] = []
    for name, tensor in tensors:
        check_has_memory(name, tensor)
        digests.append(content_hash(tensor))
    return digests


def check_has_memory(name: str, tensor: torch.Tensor) -> None:
    """Check a tensor's memory before reading, because reading released memory ends the process.

    Raises:
        CheckpointError: the tensor's storage does not hold its elements.
    """
    if is_released(tensor):
        raise CheckpointError(
            f"{name}: its memory was released (untyped_storage().resize_), and there is nothing "
            "to save: release it after the save; with background=True, after wait()"
        )
