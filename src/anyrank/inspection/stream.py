"""Values of stored tensors, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anyrank.files.content_hash import BLOCK_BYTES
from anyrank.files.listing import Listing
from anyrank.files.reader import Reader
from anyrank.files.segments import Job, memory_of
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece
from anyrank.tensors.plan import plan_reads
from anyrank.tensors.spec import StoredTensor

PART_NUMEL = 1 << 18  # read at a time


class Values:
    """Reads tensors of a source in parts."""

    def __init__(self, listing: Listing) -> None:
        self.reader = Reader(listing, buffer_bytes=2 * BLOCK_BYTES)

    def __enter__(self) -> Values:
        return self

    def __exit__(self, *exc: object) -> None:
        self.reader.__exit__()

    def boxes(self, stored: StoredTensor) -> Iterator[Box]:
        """Parts of a tensor, in row-major order; the same for tensors of one shape and dtype."""
        if stored.numel:
            yield from Box.whole(stored.shape).cut(PART_NUMEL)

    def read(self, stored: StoredTensor, box: Box) -> torch.Tensor:
        """One part.

        Raises:
            LoadError: the source cannot be read.
        """
        self.reader.open({chunk.file for chunk in stored.chunks})
        memory = torch.empty(box.sizes, dtype=stored.dtype, device="cpu")
        reads = plan_reads(stored, [Piece(box, (0,) * len(box.sizes))])
        self.reader.run([Job(read, read.of(memory)) for read in reads])
        return memory

    def content(self, stored: StoredTensor) -> str:
        """xxh3-128 of a tensor's elements in row-major order, in hex."""
        import xxhash  # only verification needs it

        digest = xxhash.xxh3_128()
        for box in self.boxes(stored):
            part = self.read(stored, box)
            digest.update(memory_of(part))
        return digest.hexdigest()


def as_numbers(values: torch.Tensor) -> torch.Tensor:
    """Values as torch can compare and subtract them: 8-bit floats as float32, packed ones as bytes.

    Integers stay as they are.
    """
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        packed = str(values.dtype).endswith("_x2")
        return values.view(torch.uint8) if packed else values.to(torch.float32)
    return values


def count_nonfinite(values: torch.Tensor) -> int:
    """NaN and infinite values."""
    numbers = as_numbers(values)
    if not (numbers.dtype.is_floating_point or numbers.dtype.is_complex):
        return 0
    return int((~numbers.isfinite()).sum())
