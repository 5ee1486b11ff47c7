"""A tensor without its values: name, shape, dtype, and where its bytes are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from anyrank.tensors.box import Box, row_major


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module, as in files and reports."""
    return str(dtype).removeprefix("torch.")


# Never changed, but not frozen: frozen objects, one per tensor, would take four times as long.
@dataclass(slots=True, unsafe_hash=True)
class Chunk:
    """A strided view of stored bytes that holds one box of a tensor.

    Attributes:
        box: the part of the global tensor that the chunk holds.
        file: index of the file in its listing.
        offset: byte offset in the file of the box's first element.
        strides: in elements, one per dim; row-major in most files, any strides for a saved view.
    """

    box: Box
    file: int
    offset: int
    strides: tuple[int, ...]

    def element_offset(self, box: Box) -> int:
        """Return the elements from the chunk's first one to the first one of a box inside it."""
        if box is self.box:
            return 0
        return sum(
            (a - b) * s for a, b, s in zip(box.offsets, self.box.offsets, self.strides, strict=True)
        )


@dataclass(slots=True, unsafe_hash=True)  # not frozen either, like `Chunk`
class StoredTensor:
    """A stored tensor: disjoint chunks that together cover its shape.

    Attributes:
        name: the key in the file, before any renaming.
        shape: global shape.
        dtype: dtype of the stored bytes.
        chunks: where the bytes are. Most formats have one chunk, DCP has one per writer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @staticmethod
    def contiguous(
        name: str, shape: tuple[int, ...], dtype: torch.dtype, file: int, offset: int
    ) -> StoredTensor:
        """Return a tensor whose bytes lie row-major in one file."""
        chunk = Chunk(Box.whole(shape), file, offset, row_major(shape))
        return StoredTensor(name, shape, dtype, (chunk,))

    def renamed(self, name: str) -> StoredTensor:
        """Return the tensor under another name."""
        return replace(self, name=name)

    def transposed(self) -> StoredTensor:
        """Return a tensor of the same bytes with the dims in reverse order."""
        chunks = tuple(
            replace(chunk, box=chunk.box.reversed(), strides=chunk.strides[::-1])
            for chunk in self.chunks
        )
        return replace(self, shape=self.shape[::-1], chunks=chunks)

    def with_file_offset(self, base: int) -> StoredTensor:
        """Return the tensor for a listing whose files start `base` later."""
        chunks = tuple(replace(chunk, file=chunk.file + base) for chunk in self.chunks)
        return replace(self, chunks=chunks)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize
