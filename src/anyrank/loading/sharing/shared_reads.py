"""Plan reads of bytes that several ranks want. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from anyrank.tensors.box import Box, BoxIndex, row_major
from anyrank.tensors.layout import Piece
from anyrank.tensors.reads import GAP_BYTES, Read, plan_reads
from anyrank.tensors.spec import Chunk, StoredTensor


@dataclass(frozen=True, slots=True)
class SharedRead:
    """A box of one chunk that is read as a whole, because ranks want all or parts of it.

    Attributes:
        read: the box; its `local` has no meaning.
        takers: the ranks, in ascending order.
    """

    read: Read
    takers: tuple[int, ...]

    def cut(self, most_bytes: int) -> Iterator[Read]:
        """Yield reads of at most `most_bytes` (or one element), each contiguous in the file."""
        most = most_bytes // self.read.stored.dtype.itemsize
        for box in self.read.box.cut(most, self.read.chunk.strides):
            yield self.read.part(box)


def shared_reads(
    stored: StoredTensor,
    groups: Mapping[tuple[Piece, ...], tuple[int, ...]],
    gap_bytes: int = GAP_BYTES,
) -> list[SharedRead]:
    """Return the reads of a tensor, each with the ranks that want all or a part of it.

    Columns of a matrix lie in many short runs, so that reading some columns reads the rest too.
    All columns of the same rows that ranks want are therefore one read. The work is one step per
    group and chunk that overlap: rows overlap few chunks, but columns of a tensor stored in rows
    overlap all of them.

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
    """Return the tensor as if it were stored in one chunk."""
    strides = stored.chunks[0].strides if len(stored.chunks) == 1 else row_major(stored.shape)
    return replace(stored, chunks=(Chunk(Box.whole(stored.shape), 0, 0, strides),))


def _with_gaps(read: Read, gap_bytes: int) -> Box:
    """Return the read's box, widened by the gaps between its runs in the file if they are small.

    The result depends only on the chunk, so all ranks that want columns of it get the same rows.
    """
    box, chunk = read.box, read.chunk
    offsets, sizes = list(box.offsets), list(box.sizes)
    dense = 1  # elements from one index of the dim to the next, if the chunk has no gaps
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
