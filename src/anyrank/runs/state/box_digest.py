"""A digest of a tensor that does not depend on its layout: the sum over its elements of a hash of
position and bits. Each rank adds up its boxes; the sum is the same however the tensor is split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyrank.tensors.box import Box
from anyrank.tensors.hashing import SPREAD, mix64_, signed

PART_ELEMENTS = 1 << 16  # elements hashed at a time, few enough for a processor's cache
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODULUS = 1 << 64


def digest_of_box(source: torch.Tensor, box: Box, shape: Sequence[int], seed: int) -> int:
    """Sum the hashes of a box's elements, modulo 2**64.

    Args:
        source: the elements, in the sizes of the box.
        box: position of the elements in the tensor.
        shape: shape of the whole tensor.
        seed: 64 bits.
    """
    if not box.numel:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=source.device)
    for part in Box.whole(box.sizes).cut(PART_ELEMENTS):
        offsets = [start + more for start, more in zip(box.offsets, part.offsets, strict=True)]
        places = _positions(offsets, part.sizes, shape, source.device)
        for number, words in enumerate(_words_of(source.detach()[part.slices()])):
            key = signed((seed + number) % MODULUS)
            total += mix64_((places * SPREAD).add_(key).bitwise_xor_(words)).sum()
    return int(total.item()) % MODULUS


def _positions(
    offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return the index in row-major order of each element of a box, flat."""
    indices = torch.zeros((), dtype=torch.int64, device=device)
    for start, size, whole in zip(offsets, sizes, shape, strict=True):
        along = torch.arange(start, start + size, dtype=torch.int64, device=device)
        indices = (indices * whole).unsqueeze(-1) + along
    return indices.reshape(-1)


def _words_of(part: torch.Tensor) -> list[torch.Tensor]:
    """Return the bits of each element as int64, flat; two tensors for complex128."""
    flat = part.contiguous().reshape(-1)
    if flat.itemsize == 16:
        pairs = flat.view(torch.int64).view(-1, 2)
        return [pairs[:, 0], pairs[:, 1]]
    return [flat.view(WORDS[flat.itemsize]).long()]
