"""Read the values of stored tensors, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anyrank.files.content_hash import BLOCK_BYTES
from anyrank.files.listing import Listing
from anyrank.files.reader import Reader
from anyrank.tensors.box import Box
from anyrank.tensors.spec import StoredTensor

PART_NUMEL = 1 << 18  # elements read at a time


def open_values(listing: Listing) -> Reader:
    """Make a reader for the tensors of a source, in parts; the caller closes it."""
    return Reader(listing, buffer_bytes=2 * BLOCK_BYTES)


def boxes_of(stored: StoredTensor) -> Iterator[Box]:
    """Yield the parts of a tensor in row-major order; they depend only on its shape."""
    if stored.numel:
        yield from Box.whole(stored.shape).cut(PART_NUMEL)


def as_numbers(values: torch.Tensor) -> torch.Tensor:
    """Return values that torch can compare and subtract.

    8-bit floats become float32, and packed floats become bytes. Other values do not change.
    """
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        packed = str(values.dtype).endswith("_x2")
        return values.view(torch.uint8) if packed else values.to(torch.float32)
    return values


def count_nonfinite(values: torch.Tensor) -> int:
    """Count NaN and infinite values."""
    numbers = as_numbers(values)
    if not (numbers.dtype.is_floating_point or numbers.dtype.is_complex):
        return 0
    return int((~numbers.isfinite()).sum())
