"""Digests of tensors in memory, and a check that the memory can be read."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.tensors.sharded_tensor import is_released


def digests_of_values(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Hash the current values of each tensor in row-major order, whatever its strides are.

    Args:
        tensors: the tensors with their names, on any device.

    Raises:
        CheckpointError: the storage of a tensor was freed.
    """
    digests: list[str] = []
    for name, tensor in tensors:
        check_has_memory(name, tensor)
        digests.append(content_hash(tensor))
    return digests


def check_has_memory(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's memory can be read; to read freed memory ends the process.

    Raises:
        CheckpointError: the tensor's storage was freed.
    """
    if is_released(tensor):
        raise CheckpointError(
            f"{name}: its storage was freed with untyped_storage().resize_(0), so it has no values "
            "to save. Free it after the save or, with background=True, after wait()."
        )
