"""Digests of tensors, computed where they are: only the digests of a device's tensors leave it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.files.receipt import digest_of_box
from anyrank.tensors.box import Box


def digests_of(tensors: Sequence[tuple[str, torch.Tensor]], check: Callable[[], None]) -> list[str]:
    """A digest of each tensor's values in row-major order, whatever its strides.

    Digests compare with others of the same kind of device only.

    Args:
        tensors: with their names, on any device.
        check: called between tensors; raises to stop early.

    Raises:
        CheckpointError: a tensor's memory was released.
    """
    found: list[str] = []
    for name, tensor in tensors:
        check()
        check_memory(name, tensor)
        if tensor.is_cpu:
            found.append(content_hash(tensor))
        else:
            found.append(f"{digest_of_box(tensor, Box.whole(tensor.shape), tensor.shape, 0):x}")
    return found


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Look before reading, as to read memory that was released ends the process.

    Raises:
        CheckpointError: the tensor's storage does not hold its elements.
    """
    if not tensor.numel() or tensor.is_meta:
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    if tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
        raise CheckpointError(
            f"{name}: its memory was released (untyped_storage().resize_), and there is nothing "
            "to save: release it after the save; with background=True, after wait()"
        )
