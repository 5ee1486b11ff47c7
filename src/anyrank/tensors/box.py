"""Boxes: axis-aligned pieces of a tensor, by offsets and sizes in the global tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `offsets[d] <= i[d] < offsets[d] + sizes[d]` in every dim d; one if 0-d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box that covers a tensor of this shape; one object for the many of one shape."""
        return _whole(tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it has no elements."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + m, b + n) - o
            for a, m, b, n, o in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, offsets, strict=True
            )
        )
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same elements, counted from another origin."""
        offsets = tuple(a - b for a, b in zip(self.offsets, origin, strict=True))
        return Box(offsets, self.sizes)

    def shifted(self, by: Sequence[int]) -> Box:
        """The same sizes, moved by an amount in each dim."""
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    def split(self, dim: int, rows: int) -> Iterator[Box]:
        """Consecutive parts of at most `rows` rows along one dim."""
        for low in range(0, self.sizes[dim], rows):
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[dim] += low
            sizes[dim] = min(rows, self.sizes[dim] - low)
            yield Box(tuple(offsets), tuple(sizes))

    def cut(self, most: int, strides: Sequence[int] | None = None) -> Iterator[Box]:
        """Parts of at most `most` elements (or one), of whole rows first.

        Args:
            most: elements.
            strides: by which the elements lie in memory, and in whose order the parts are.
                Default: row-major.
        """
        if self.numel <= max(1, most):
            yield self
            return
        by = row_major(self.sizes) if strides is None else strides
        dim = max((d for d, size in enumerate(self.sizes) if size > 1), key=lambda d: by[d])
        rows = max(1, most * self.sizes[dim] // self.numel)
        for part in self.split(dim, rows):
            yield from part.cut(most, strides)

    def slices(self) -> tuple[slice, ...]:
        """Index for the elements of this box in a tensor that starts at the global origin."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


@lru_cache(maxsize=256)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return _row_major(tuple(sizes))


@lru_cache(maxsize=256)
def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
