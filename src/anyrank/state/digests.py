"""Digests of tensors, computed where they are: only the digests of a device's tensors leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from anyrank.errors import CheckpointError
from anyrank.files.reader import memory_of
from anyrank.tensors.box import Box
from anyrank.tensors.hashing import SPREAD, mix64

PART_BYTES = 8 << 20  # of a tensor at a time: on a device, a few times as much is taken


def start_digests(tensors: Sequence[tuple[str, torch.Tensor]]) -> Callable[[], list[int]]:
    """64 bits of the values that each tensor has now, in row-major order, whatever its strides.

    Digests compare with others of the same kind of device only: xxh3 on the CPU, elsewhere a sum
    of mixed words.

    Args:
        tensors: with their names, on any device.

    Returns:
        What waits for the devices, and returns the digests.

    Raises:
        CheckpointError: a tensor's memory was released.
    """
    digests = [0] * len(tensors)
    waiting: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, (name, tensor) in enumerate(tensors):
        check_memory(name, tensor)
        if tensor.is_cpu:
            digests[number] = on_cpu(tensor.detach())
        else:
            waiting.setdefault(tensor.device, []).append((number, on_device(tensor.detach())))

    def finish() -> list[int]:
        for rows in waiting.values():
            values: list[int] = torch.stack([value for _, value in rows]).tolist()
            for (number, _), value in zip(rows, values, strict=True):
                digests[number] = value
        return digests

    return finish


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


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in row-major order, contiguous, PART_BYTES at a time."""
    if tensor.numel():
        for box in Box.whole(tensor.shape).cut(PART_BYTES // tensor.itemsize):
            yield tensor[box.slices()].contiguous()


def on_cpu(tensor: torch.Tensor) -> int:
    """xxh3-64 of a CPU tensor."""
    import xxhash  # only runs need it

    digest = xxhash.xxh3_64()
    for part in (tensor,) if tensor.is_contiguous() else _parts(tensor):
        digest.update(memory_of(part))
    return digest.intdigest()


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of mixed words, in any order, as a scalar of the tensor's device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for part in _parts(tensor):
        words = _words(part)
        stop = start + words.numel()
        places = torch.arange(start, stop, dtype=torch.int64, device=tensor.device)
        total += mix64(words ^ mix64(places * SPREAD)).sum()
        start = stop
    return total


def _words(part: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as int64, zeros added."""
    data = part.reshape(-1).view(torch.uint8)
    if data.numel() % 8 or data.data_ptr() % 8 or data.storage_offset() % 8:
        padded = torch.zeros(-(-data.numel() // 8) * 8, dtype=torch.uint8, device=part.device)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int64)
