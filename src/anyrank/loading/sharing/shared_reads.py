"""Reads of bytes that several ranks want. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from anyrank.tensors.box import Box, BoxIndex, row_major
from anyrank.tensors.layout import Piece
from anyrank.tensors.reads import GAP_BYTES, Read, plan_reads
from anyrank.tensors.spec import Chunk, StoredTensor


@dataclass(frozen=True, slots=True)
class SharedRead:
    """A box of one chunk that is read as a whole, because ranks want it or parts of it.

    Attributes:
        read: the box; its `local` means nothing.
        takers: the ranks, in ascending order.
    """

    read: Read
    takers: tuple[int, ...]

    def cut(self, most_bytes: int) -> Iterator[Read]:
        """Reads of at most `most_bytes` (or one element), which lie together in the file."""
        most = most_bytes // self.read.stored.dtype.itemsize
        for box in self.read.box.cut(most, self.read.chunk.strides):
            yield self.read.part(box)


def shared_reads(
    stored: StoredTensor,
    groups: Mapping[tuple[Piece, ...], tuple[int, ...]],
    gap_bytes: int = GAP_BYTES,
) -> list[SharedRead]:
    """The reads of a tensor, with the ranks that want each or a part of it.

    Columns of a matrix lie in so many short runs that whoever reads some of them reads the others
    too. So all that several ranks want of the same rows is one read. The work is a step for each
    group and chunk that meet: rows meet few chunks, but columns of a tensor stored in rows meet all
    of them.

    Args:
        stored: the tensor.
        groups: wanted pieces -> the ranks that want them.
        gap_bytes: rows of at most this size are read whole.

    Raises:
        LoadError: the chunks leave a part of a piece uncovered, or cover it twice.
    """
    shared: dict[tuple[int, int, Box], tuple[Read, set[int]]] = {}
    chunks = BoxIndex([chunk.box for chunk in stored.chunks])
    for pieces, ranks in groups.items():
        for read in plan_reads(stored, pieces, chunks):
            box = _with_gaps(read, gap_bytes)
            whole = Read(stored, read.chunk, box, (0,) * len(box.sizes))
            key = (read.chunk.file, read.chunk.offset, box)
            shared.setdefault(key, (whole, set()))[1].update(ranks)
    return [SharedRead(whole, tuple(sorted(ranks))) for whole, ranks in shared.values()]


def in_one_chunk(stored: StoredTensor) -> StoredTensor:
    """The tensor as if it were stored in one chunk, however many there are."""
    strides = stored.chunks[0].strides if len(stored.chunks) == 1 else row_major(stored.shape)
    return replace(stored, chunks=(Chunk(Box.whole(stored.shape), 0, 0, strides),))


def _with_gaps(read: Read, gap_bytes: int) -> Box:
    """The read's box, widened by the gaps between its runs in the file if these are small.

    The result depends on the chunk alone, so all ranks that want columns of it get the same rows.
    """
    box, chunk = read.box, read.chunk
    offsets, sizes = list(box.offsets), list(box.sizes)
    dense = 1  # elements from one index of the dim to the next, if the chunk has no holes
    runs = box.numel
    for dim in sorted(range(len(sizes)), key=lambda dim: chunk.strides[dim]):
        if box.sizes[dim] == chunk.box.sizes[dim] == 1:
            continue
        runs //= box.sizes[dim]
        row = chunk.box.sizes[dim] * dense * read.stored.dtype.itemsize
        if chunk.strides[dim] != dense or runs == 1 or row > gap_bytes:
            break
        offsets[dim], sizes[dim] = chunk.box.offsets[dim], chunk.box.sizes[dim]
        dense *= sizes[dim]
    return Box(tuple(offsets), tuple(sizes))
