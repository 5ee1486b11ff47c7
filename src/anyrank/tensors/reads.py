"""Plans what to read: requested boxes x stored chunks -> reads -> blocks of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from anyrank.errors import LoadError
from anyrank.tensors.box import Box, BoxIndex
from anyrank.tensors.layout import Piece
from anyrank.tensors.spec import Chunk, StoredTensor

GAP_BYTES = 64 << 10  # reading a gap this small is cheaper than a second call to slow storage


@dataclass(slots=True)  # not frozen, which would take four times as long
class Read:
    """A box that one chunk holds and one rank needs.

    Attributes:
        stored: the stored tensor.
        chunk: the chunk that holds the box.
        box: in global coordinates, inside the chunk and inside the piece.
        local: where the box starts in the rank's local tensor.
    """

    stored: StoredTensor
    chunk: Chunk
    box: Box
    local: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.stored.dtype.itemsize

    def view_of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the view of the rank's local tensor that the box covers."""
        if local.shape == self.box.sizes:
            return local
        return local[Box(self.local, self.box.sizes).slices()]

    def part(self, box: Box) -> Read:
        """Return the read, limited to a smaller box."""
        shift = tuple(a - b for a, b in zip(box.offsets, self.box.offsets, strict=True))
        local = tuple(a + b for a, b in zip(self.local, shift, strict=True))
        return Read(self.stored, self.chunk, box, local)


@dataclass(slots=True)
class Block:
    """A read that is small enough to stage: its bytes lie in [start, stop) of the chunk's file.

    Attributes:
        read: the read that it belongs to.
        start: byte offset of the first element to read.
        stop: byte offset after the last element to read.
        strides: strides of these elements inside the byte range, in elements.
        dense: whether the range holds these elements in row-major order and nothing else.
    """

    read: Read
    start: int
    stop: int
    strides: tuple[int, ...]
    dense: bool


def plan_reads(
    stored: StoredTensor, pieces: Sequence[Piece], chunks: BoxIndex | None = None
) -> list[Read]:
    """Return the reads that fill the pieces, each element exactly once.

    Args:
        stored: the tensor.
        pieces: its pieces to read.
        chunks: index of the boxes of its chunks, for callers that plan several times.

    Raises:
        LoadError: the chunks do not cover a part of a piece, or cover it twice.
    """
    if len(pieces) == len(stored.chunks) == 1 and pieces[0].box == stored.chunks[0].box:
        chunk = stored.chunks[0]  # held whole and stored whole, as most small tensors are
        return [Read(stored, chunk, chunk.box, pieces[0].local)]
    reads: list[Read] = []
    chunks = chunks or BoxIndex([chunk.box for chunk in stored.chunks])
    for piece in pieces:
        for number, common in chunks.common(piece.box):
            inside = common.relative_to(piece.box.offsets).offsets
            local = tuple(a + b for a, b in zip(piece.local, inside, strict=True))
            reads.append(Read(stored, stored.chunks[number], common, local))
    wanted = sum(piece.box.numel for piece in pieces)
    total = sum(read.box.numel for read in reads)
    if wanted != total:
        raise LoadError(
            f"{stored.name}: the chunks in the source hold {total} of the {wanted} elements that "
            f"this rank needs (shape {list(stored.shape)}). The checkpoint is incomplete, or its "
            "index is wrong."
        )
    return reads


def blocks(read: Read, most_bytes: int, gap_bytes: int = GAP_BYTES) -> Iterator[Block]:
    """Cut a read into blocks whose byte range is at most `most_bytes` long, in file order.

    Rows with a gap of more than `gap_bytes` between them are separate blocks. A dense read of any
    length is one block, because it can go straight to its destination; the reader cuts it if it
    must be staged.
    """
    itemsize = read.stored.dtype.itemsize
    first = read.chunk.element_offset(read.box)
    start = read.chunk.offset + first * itemsize
    strides = read.chunk.strides
    if _is_dense(read.box.sizes, strides):
        yield Block(read, start, start + read.nbytes, strides, True)
        return
    extent = _extent(read.box.sizes, strides) * itemsize
    if extent <= most_bytes and _gap(read) <= gap_bytes:
        yield Block(read, start, start + extent, strides, False)
        return
    for part in _cut(read, most_bytes, gap_bytes):
        yield from blocks(part, most_bytes, gap_bytes)


def cut_dense(block: Block, most_bytes: int) -> Iterator[Block]:
    """Cut a dense block into dense blocks of at most `most_bytes` (or one element)."""
    if block.stop - block.start <= most_bytes:
        yield block
        return
    for part in _cut(block.read, most_bytes, GAP_BYTES):
        for inner in blocks(part, most_bytes):
            yield from cut_dense(inner, most_bytes)


def _cut(read: Read, most_bytes: int, gap_bytes: int) -> Iterator[Read]:
    """Cut a read along the dim with the longest stride, into parts of as many rows as fit."""
    sizes, strides = read.box.sizes, read.chunk.strides
    dim = _outer_dim(read)
    row = _extent((*sizes[:dim], 1, *sizes[dim + 1 :]), strides) * read.stored.dtype.itemsize
    step = max(1, strides[dim] * read.stored.dtype.itemsize)
    rows = 1 if step - row > gap_bytes else max(1, (most_bytes - row) // step + 1)
    rows = min(rows, -(-sizes[dim] // 2))  # always make progress
    for part in read.box.split(dim, rows):
        yield read.part(part)


def _outer_dim(read: Read) -> int:
    """Return the dim that has the longest stride."""
    dims = (dim for dim, size in enumerate(read.box.sizes) if size > 1)
    return max(dims, key=lambda dim: read.chunk.strides[dim])


def _gap(read: Read) -> int:
    """Return the number of bytes between two rows along the dim with the longest stride."""
    sizes, strides = read.box.sizes, read.chunk.strides
    dim = _outer_dim(read)
    row = _extent((*sizes[:dim], 1, *sizes[dim + 1 :]), strides)
    return (strides[dim] - row) * read.stored.dtype.itemsize


def _extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


@lru_cache(maxsize=256)
def _is_dense(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements are row-major and adjacent; strides of size-1 dims do not matter."""
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
