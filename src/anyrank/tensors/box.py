"""Boxes: rectangular parts of a tensor, by offsets and sizes in the global tensor."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `offsets[d] <= i[d] < offsets[d] + sizes[d]` in every dim d; the one of a 0-d
    tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box that covers a tensor of this shape; tensors of the same shape share it."""
        return _whole(tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None if it has no elements."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + m, b + n) - o
            for a, m, b, n, o in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, offsets, strict=True
            )
        )
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the box of the same elements, counted from another origin."""
        offsets = tuple(a - b for a, b in zip(self.offsets, origin, strict=True))
        return Box(offsets, self.sizes)

    def shifted(self, amounts: Sequence[int]) -> Box:
        """Return the box moved by an amount in each dim."""
        return Box(tuple(a + b for a, b in zip(self.offsets, amounts, strict=True)), self.sizes)

    def reversed(self) -> Box:
        """Return the box of the same elements in the transposed tensor."""
        return Box(self.offsets[::-1], self.sizes[::-1])

    def split(self, dim: int, rows: int) -> Iterator[Box]:
        """Cut the box into consecutive parts of at most `rows` rows along one dim."""
        for low in range(0, self.sizes[dim], rows):
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[dim] += low
            sizes[dim] = min(rows, self.sizes[dim] - low)
            yield Box(tuple(offsets), tuple(sizes))

    def cut(self, most: int, strides: Sequence[int] | None = None) -> Iterator[Box]:
        """Cut the box into parts of at most `most` elements (at least one), whole rows if possible.

        Args:
            most: limit of a part, in elements.
            strides: strides of the elements in memory, which also determine the order of the parts.
                Default: row-major.
        """
        if self.numel <= max(1, most):
            yield self
            return
        steps = row_major(self.sizes) if strides is None else strides
        dim = max((d for d, size in enumerate(self.sizes) if size > 1), key=lambda d: steps[d])
        rows = max(1, most * self.sizes[dim] // self.numel)
        for part in self.split(dim, rows):
            yield from part.cut(most, strides)

    def slices(self) -> tuple[slice, ...]:
        """Return the index of this box's elements in a tensor that starts at the global origin."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


class BoxIndex:
    """Finds those of many boxes that share elements with a given box.

    Boxes are looked up by their offsets in one dim, the one in which most of them differ, so that
    the overlaps of the ranks' boxes with the files' chunks are found without comparing every pair.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        dims = range(len(boxes[0].sizes) if boxes else 0)
        self.dim = max(dims, key=lambda d: len({box.offsets[d] for box in boxes}), default=-1)
        if self.dim < 0:
            return
        self.order = sorted(range(len(boxes)), key=lambda n: boxes[n].offsets[self.dim])
        self.starts = [boxes[n].offsets[self.dim] for n in self.order]
        stops = (boxes[n].offsets[self.dim] + boxes[n].sizes[self.dim] for n in self.order)
        self.stops = list(accumulate(stops, max))  # no box up to a position ends later

    def common(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the position of each box that overlaps this one, and the shared elements."""
        near = range(len(self.boxes))
        if self.dim >= 0:
            start = box.offsets[self.dim]
            low = bisect_right(self.stops, start)
            high = bisect_left(self.starts, start + box.sizes[self.dim])
            near = self.order[low:high]
        for number in near:
            overlap = box.intersect(self.boxes[number])
            if overlap is not None:
                yield number, overlap


@lru_cache(maxsize=256)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    return _row_major(tuple(sizes))


@lru_cache(maxsize=256)
def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
