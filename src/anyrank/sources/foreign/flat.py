"""Tensors whose elements are stored flat, in row-major order, in several other tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from anyrank.tensors.box import Box, row_major
from anyrank.tensors.spec import Chunk, StoredTensor


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Cut a row-major range of a tensor's elements into boxes, with their starts in the range.

    There are at most two boxes for each dim except the last, and each is contiguous in the range.
    """
    shape, ndim = tuple(shape), len(shape)

    def walk(
        index: tuple[int, ...], first: int, last: int, position: int
    ) -> Iterator[tuple[Box, int]]:
        if first >= last:
            return
        dim = len(index)
        row = math.prod(shape[dim + 1 :])
        if dim >= ndim - 1 or (first % row == 0 and last % row == 0):
            low, high = (first, last) if dim >= ndim else (first // row, last // row)
            rows = () if dim >= ndim else (high - low,)
            offsets = index if dim >= ndim else (*index, low)
            rest = shape[dim + 1 :]
            sizes = (1,) * dim + rows + rest
            yield Box(offsets + (0,) * len(rest), sizes), position
            return
        begin, end = first // row, last // row
        if begin == end:
            yield from walk((*index, begin), first % row, last % row, position)
            return
        if first % row:
            yield from walk((*index, begin), first % row, row, position)
            position, first = position + row - first % row, (begin + 1) * row
        yield from walk(index, first, end * row, position)
        yield from walk((*index, end), 0, last % row, position + end * row - first)

    return walk((), start, stop, 0)


def assembled(
    name: str, shape: tuple[int, ...], parts: Sequence[tuple[StoredTensor, int, int]]
) -> StoredTensor:
    """Return a tensor whose elements lie one after the other in parts of flat stored tensors.

    Args:
        name: the tensor's name.
        shape: the tensor's shape.
        parts: flat tensor, first element in it, and number of elements; in order.

    Raises:
        ValueError: the parts do not have as many elements as the tensor, or have several dtypes.
    """
    chunks: list[Chunk] = []
    position = 0
    for source, first, count in parts:
        inner = source.chunks[0]
        if len(source.chunks) != 1 or (inner.strides not in ((1,), ()) and source.numel > 1):
            raise ValueError(f"{source.name} is not flat")
        if first < 0 or first + count > source.numel:
            raise ValueError(f"{source.name} has {source.numel} elements, not {first + count}")
        for box, begin in boxes_of_range(shape, position, position + count):
            offset = inner.offset + (first + begin) * source.dtype.itemsize
            chunks.append(Chunk(box, inner.file, offset, row_major(box.sizes)))
        position += count
    dtypes = {source.dtype for source, _, _ in parts}
    if position != math.prod(shape) or len(dtypes) != 1:
        raise ValueError(
            f"its parts have {position:,} elements, which does not match its shape {list(shape)}"
        )
    return StoredTensor(name, shape, dtypes.pop(), tuple(chunks))
