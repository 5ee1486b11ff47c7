"""The receipt of a step: digests of its tensors that no layout changes, and one of all of them and
the data's position.

A tensor's digest is a sum over its elements of a hash of position and bits. So each rank adds up
those that it writes, and the sum is the same however the tensor is sharded.

Tensors in the state of a part (an EMA class of the script, a metric) are in the receipt where all
ranks have the same, as one rank always has. They are compared where both receipts have them, and
are not in the digest of all, which has to be the same on any number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from anyrank.files.manifest import POSITION
from anyrank.tensors.box import Box
from anyrank.tensors.hashing import SPREAD, derive, mix64_, signed

PART_ELEMENTS = 1 << 16  # hashed at a time, so few that a processor's cache holds them
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODULUS = 1 << 64
IN_PART = re.compile(r"@\d{5}$")  # ends the names of tensors in the state of a part
NO_POSITION = ("version", "receipts", "exact")  # what may differ between equal runs


class Digests:
    """Digests of tensors, each added up box by box.

    Attributes:
        tensors: name -> the sum of what was added.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, int] = {}

    def add(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, box: Box, values: torch.Tensor
    ) -> None:
        """Add the elements of a box of a tensor of this name, shape and dtype."""
        seed = derive(name, repr(tuple(shape)), str(dtype))
        total = self.tensors.get(name, 0) + digest_of_box(values, box, shape, seed)
        self.tensors[name] = total % MODULUS


def digest_of_box(source: torch.Tensor, box: Box, shape: Sequence[int], seed: int) -> int:
    """The sum of the hashes of a box's elements, modulo 2**64.

    Args:
        source: the elements, of the box's sizes.
        box: where they are in the tensor.
        shape: of the whole tensor.
        seed: 64 bits.
    """
    if not box.numel:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=source.device)
    for part in Box.whole(box.sizes).cut(PART_ELEMENTS):
        offsets = [start + more for start, more in zip(box.offsets, part.offsets, strict=True)]
        places = positions(offsets, part.sizes, shape, source.device)
        for number, words in enumerate(_words_of(source.detach()[part.slices()])):
            key = signed((seed + number) % MODULUS)
            total += mix64_((places * SPREAD).add_(key).bitwise_xor_(words)).sum()
    return int(total.item()) % MODULUS


def positions(
    offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    """The index in row-major order of each element of a box, flat."""
    indices = torch.zeros((), dtype=torch.int64, device=device)
    for start, size, whole in zip(offsets, sizes, shape, strict=True):
        along = torch.arange(start, start + size, dtype=torch.int64, device=device)
        indices = (indices * whole).unsqueeze(-1) + along
    return indices.reshape(-1)


def _words_of(part: torch.Tensor) -> list[torch.Tensor]:
    """The bits of each element as int64, flat; two tensors for complex128."""
    flat = part.contiguous().reshape(-1)
    if flat.itemsize == 16:
        pairs = flat.view(torch.int64).view(-1, 2)
        return [pairs[:, 0], pairs[:, 1]]
    return [flat.view(WORDS[flat.itemsize]).long()]


def receipt_of_step(parts: Iterable[Mapping[str, int]], data: Mapping[str, Any]) -> dict[str, Any]:
    """The receipt of a step.

    Args:
        parts: `Digests.tensors` of all ranks.
        data: the state of the loader, whose position and receipt are chained.
    """
    tensors: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            tensors[name] = (tensors.get(name, 0) + value) % MODULUS
    table = {name: f"{value:016x}" for name, value in sorted(tensors.items())}
    position = {name: data[name] for name in POSITION}
    chained = [f"{name} {value}" for name, value in table.items() if not IN_PART.search(name)]
    digest = f"{derive(repr(position), *chained, size=16):032x}"
    return {"digest": digest, "tensors": table}


def data_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between the states of two runs' loaders: name -> both values."""
    names = [name for name in {**a, **b} if name not in NO_POSITION]
    return {n: (a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n)}


def tensor_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names of tensors that both receipts have, with other digests."""
    left, right = a["tensors"], b["tensors"]
    return [name for name in left if right.get(name, left[name]) != left[name]]
