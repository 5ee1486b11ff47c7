"""Computes, from placements on a mesh, the pieces of a tensor that each rank holds.

Only public attributes are read (shape, `device_mesh`, `placements`). The arithmetic is our own,
because torch's helpers differ between versions, and return one rectangle where there are several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from anyrank.tensors.box import Box

Interval = tuple[int, int]  # start and length in the global dim


@dataclass(frozen=True, slots=True)
class Placement:
    """How one mesh axis treats the tensor.

    Attributes:
        kind: "replicate" or "shard".
        split_factor: the number of parts of later cuts of the same dim that this cut reaches across
            (`_StridedShard`); 1 for an ordinary cut.
    """

    kind: Literal["replicate", "shard"]
    dim: int = 0
    split_factor: int = 1

    def __str__(self) -> str:
        if self.kind == "replicate":
            return "R"
        return f"S{self.dim}" + (f"/{self.split_factor}" if self.split_factor > 1 else "")


@dataclass(frozen=True, slots=True)
class IntervalShard(Placement):
    """A cut into explicit parts instead of even chunks; no other placement cuts this dim.

    Attributes:
        intervals: for each position on the mesh axis, the intervals of the dim that it holds, in
            local order.
    """

    intervals: tuple[tuple[Interval, ...], ...] = ()

    def __str__(self) -> str:
        return f"S{self.dim} in parts {list(map(list, self.intervals))}"


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of the global tensor, and where it starts in the rank's local tensor."""

    box: Box
    local: tuple[int, ...]

    def part(self, box: Box) -> Piece:
        """Return the piece, limited to a box within it."""
        if box == self.box:
            return self
        inside = box.relative_to(self.box.offsets).shifted(self.local)
        return Piece(box, inside.offsets)

    def local_slices(self) -> tuple[slice, ...]:
        """Return the index of the box in the rank's local tensor."""
        return Box(self.local, self.box.sizes).slices()


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is laid out on a mesh, independent of the ranks in the mesh.

    Attributes:
        mesh_shape: sizes of the mesh axes.
        placements: one for each mesh axis.
        is_given: whether it comes from `layout=`, so that torch does not know it.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    is_given: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        """Return a short text, "S0 on 4"; different layouts have different texts."""
        if self == GIVEN_BOXES:
            return "given boxes"
        sizes = "x".join(map(str, self.mesh_shape))
        return f"{','.join(map(str, self.placements))} on {sizes}"

    def in_words(self) -> str:
        """Return the layout as in reports: "sharded on dim 0 over 4", "replicated over 2, ..."."""
        if self == GIVEN_BOXES:
            return "in explicit boxes"
        axes = [
            (f"sharded on dim {axis.dim}" if axis.kind == "shard" else "replicated", size)
            for axis, size in zip(self.placements, self.mesh_shape, strict=True)
        ]
        return ", ".join(f"{how} over {size}" for how, size in axes)


GIVEN_BOXES = Layout((), ())
"""The layout of tensors that list the boxes that they hold.

A rank's coordinate is then one tuple: the shape of its local tensor, and for each box its start in
the global tensor, its start in the local one, and its sizes.
"""


def local_pieces(
    shape: Sequence[int], layout: Layout | None, coordinate: Sequence[int] | None
) -> tuple[Piece, ...]:
    """Return the pieces at a mesh coordinate, in the order in which they lie in the local tensor.

    Without a layout, the tensor is held whole. Without a coordinate, the rank is outside the mesh
    and holds nothing.
    """
    if layout is None:
        return _whole(tuple(shape))
    if coordinate is None:
        return ()
    if not layout.mesh_shape:
        return _given_pieces(len(shape), tuple(coordinate))
    per_dim = [dim_intervals(d, size, layout, coordinate) for d, size in enumerate(shape)]
    pieces: list[Piece] = []
    for chosen in itertools.product(*(_with_local_start(intervals) for intervals in per_dim)):
        box = Box(tuple(c[0] for c in chosen), tuple(c[1] for c in chosen))
        if box.numel:
            pieces.append(Piece(box, tuple(c[2] for c in chosen)))
    return tuple(pieces)


def _given_pieces(ndim: int, coordinate: tuple[int, ...]) -> tuple[Piece, ...]:
    _, *parts = (coordinate[n : n + ndim] for n in range(0, len(coordinate), ndim))
    boxes = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    pieces = (Piece(Box(start, sizes), local) for start, local, sizes in boxes)
    return tuple(piece for piece in pieces if piece.box.numel)


@lru_cache(maxsize=256)
def _whole(shape: tuple[int, ...]) -> tuple[Piece, ...]:
    whole = Box.whole(shape)
    return (Piece(whole, whole.offsets),) if whole.numel else ()


def local_shape(
    shape: Sequence[int], layout: Layout | None, coordinate: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the shape of the local tensor that the pieces fill."""
    if layout is None:
        return tuple(shape)
    if coordinate is None:
        return (0,)
    if not layout.mesh_shape:
        return tuple(coordinate[: len(shape)])
    return tuple(
        _length(dim_intervals(d, size, layout, coordinate)) for d, size in enumerate(shape)
    )


def _with_local_start(intervals: list[Interval]) -> list[tuple[int, int, int]]:
    starts = itertools.accumulate((length for _, length in intervals), initial=0)
    return [
        (start, length, local) for (start, length), local in zip(intervals, starts, strict=False)
    ]


def dim_intervals(dim: int, size: int, layout: Layout, coordinate: Sequence[int]) -> list[Interval]:
    """Cut one dim once per mesh axis that shards it, in the order of the sharding."""
    intervals: list[Interval] = [(0, size)]
    for axis, split_factor in _cut_order(dim, layout):
        number, index = layout.mesh_shape[axis], coordinate[axis]
        placement = layout.placements[axis]
        if isinstance(placement, IntervalShard):
            intervals = [interval for interval in placement.intervals[index] if interval[1]]
        elif split_factor == 1:
            intervals = _take(intervals, *_nth_chunk(_length(intervals), number, index))
        else:
            intervals = _strided(intervals, split_factor, number, index)
    return intervals


def _cut_order(dim: int, layout: Layout) -> list[tuple[int, int]]:
    """Mesh axes that cut `dim`, with their split factor, in order of application.

    If the factor of a strided cut equals the product of the later cuts of this dim, those were
    applied first (FSDP over TP). Then both are ordinary cuts. This is exact for uneven sizes too,
    for which the strided formula sends rows to the wrong TP rank.
    """
    axes = [
        (axis, p) for axis, p in enumerate(layout.placements) if p.kind == "shard" and p.dim == dim
    ]
    order: list[tuple[int, int]] = []
    late: list[int] = []
    for i, (axis, placement) in enumerate(axes):
        later = math.prod(layout.mesh_shape[a] for a, _ in axes[i + 1 :])
        if placement.split_factor > 1 and placement.split_factor == later:
            late.append(axis)
        else:
            order.append((axis, placement.split_factor))
    return order + [(axis, 1) for axis in reversed(late)]


def _nth_chunk(length: int, number: int, index: int) -> Interval:
    """Return torch.chunk's interval: ceil(length / number) each, the last ones short or empty."""
    size = -(-length // number) if length else 0
    start = min(index * size, length)
    return start, min(size, length - start)


def _strided(intervals: list[Interval], factor: int, number: int, index: int) -> list[Interval]:
    """Return chunk `index` of each of `factor` equal parts, one after the other."""
    length = _length(intervals)
    parts: list[Interval] = []
    for part in range(factor):
        start, size = _nth_chunk(length, factor, part)
        inner, inner_size = _nth_chunk(size, number, index)
        parts += _take(intervals, start + inner, inner_size)
    return _merged(parts)


def _length(intervals: list[Interval]) -> int:
    return sum(length for _, length in intervals)


def _take(intervals: list[Interval], start: int, length: int) -> list[Interval]:
    """Return elements [start, start + length) of the sequence that the intervals form."""
    parts: list[Interval] = []
    position = 0
    for first, size in intervals:
        low, high = max(start, position), min(start + length, position + size)
        if low < high:
            parts.append((first + low - position, high - low))
        position += size
    return parts


def _merged(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, length in intervals:
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged
