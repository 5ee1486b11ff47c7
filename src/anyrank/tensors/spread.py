"""How tensors are spread over all ranks: which rank holds which part, by mesh coordinates only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache

from anyrank.tensors.box import Box
from anyrank.tensors.layout import (
    GIVEN_BOXES,
    Interval,
    Layout,
    Piece,
    dim_intervals,
    local_pieces,
)

Coordinate = tuple[int, ...]


class Spread:
    """A layout and the coordinate of every rank in its mesh; tensors with the same layout share it.

    Ranks that have the same coordinates along the axes that cut a tensor hold the same part of it;
    these coordinates are the part's *spot*.

    Attributes:
        layout: None for tensors that every rank holds whole.
        coordinates: coordinate of each rank, by its index; None outside the mesh.
    """

    def __init__(self, layout: Layout | None, coordinates: Sequence[Coordinate | None]) -> None:
        self.layout = layout
        self.coordinates = tuple(coordinates)
        self.axes: tuple[int, ...] = ()
        if layout is not None and layout != GIVEN_BOXES:
            self.axes = tuple(n for n, p in enumerate(layout.placements) if p.kind == "shard")

    def spot(self, rank: int) -> Coordinate | None:
        """Return the spot of a rank's part; None outside the mesh."""
        coordinate = self.coordinates[rank]
        if coordinate is None or self.layout == GIVEN_BOXES:
            return coordinate
        return tuple(coordinate[axis] for axis in self.axes)

    @cached_property
    def members(self) -> Mapping[Coordinate, tuple[int, ...]]:
        """The indices of the ranks at each spot, ascending."""
        ranks: dict[Coordinate, list[int]] = {}
        for rank in range(len(self.coordinates)):
            spot = self.spot(rank)
            if spot is not None:
                ranks.setdefault(spot, []).append(rank)
        return {spot: tuple(members) for spot, members in ranks.items()}

    @property
    def is_cut(self) -> bool:
        """True if ranks may hold different parts."""
        return bool(self.axes) or self.layout == GIVEN_BOXES

    def pieces(self, shape: tuple[int, ...], spot: Coordinate) -> tuple[Piece, ...]:
        """Return the pieces of a tensor of this shape that the ranks at a spot hold."""
        if not self.is_cut:
            return local_pieces(shape, None, None)
        return _pieces(shape, self.layout, self.axes, spot)

    def numels(self, shape: tuple[int, ...]) -> Iterator[tuple[Coordinate, int]]:
        """Yield each spot with the number of a tensor's elements at it."""
        if self.layout == GIVEN_BOXES:
            for spot in self.members:
                yield spot, sum(piece.box.numel for piece in self.pieces(shape, spot))
            return
        lengths: list[tuple[tuple[int, ...], Mapping[Coordinate, int]]] = []
        fixed = 1
        for dim, size in enumerate(shape):
            axes, parts = _dim_parts(dim, size, self.layout)
            if axes:
                positions = tuple(self.axes.index(axis) for axis in axes)
                known = {spot: sum(length for _, length in cut) for spot, cut in parts.items()}
                lengths.append((positions, known))
            else:
                fixed *= size
        for spot in self.members:
            numel = fixed
            for positions, known in lengths:
                numel *= known[tuple(spot[n] for n in positions)]
            yield spot, numel

    def meeting(self, shape: tuple[int, ...], box: Box) -> set[int]:
        """Return the indices of the ranks that hold elements of a box."""
        if self.layout == GIVEN_BOXES:
            return {
                rank
                for spot, members in self.members.items()
                if any(piece.box.intersect(box) for piece in self.pieces(shape, spot))
                for rank in members
            }
        return {rank for spot in self._spots(shape, box) for rank in self.members.get(spot, ())}

    def _spots(self, shape: tuple[int, ...], box: Box) -> Iterator[Coordinate]:
        """Yield the spots that hold elements of a box: a product over the dims."""
        choices: list[list[tuple[tuple[int, ...], Coordinate]]] = []
        for dim, size in enumerate(shape):
            low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
            axes, parts = _dim_parts(dim, size, self.layout)
            met = [
                (axes, spot)
                for spot, cut in parts.items()
                if any(start < high and start + length > low for start, length in cut)
            ]
            if not met:
                return
            choices.append(met)
        for chosen in itertools.product(*choices):
            coordinate = {
                axis: n for axes, spot in chosen for axis, n in zip(axes, spot, strict=True)
            }
            yield tuple(coordinate[axis] for axis in self.axes)


@lru_cache(maxsize=4096)  # most tensors of a model, and their optimizer state, have the same pieces
def _pieces(
    shape: tuple[int, ...], layout: Layout, axes: tuple[int, ...], spot: Coordinate
) -> tuple[Piece, ...]:
    if layout == GIVEN_BOXES:
        return local_pieces(shape, layout, spot)
    coordinate = [0] * len(layout.mesh_shape)
    for axis, number in zip(axes, spot, strict=True):
        coordinate[axis] = number
    return local_pieces(shape, layout, coordinate)


@lru_cache(maxsize=64)  # each has as many entries as a mesh has coordinates
def _dim_parts(
    dim: int, size: int, layout: Layout | None
) -> tuple[tuple[int, ...], Mapping[Coordinate, Sequence[Interval]]]:
    """Find the mesh axes that cut a dim, and the part of the dim at each coordinate along them."""
    if layout is None:
        return (), {(): [(0, size)]}
    cuts = [n for n, p in enumerate(layout.placements) if p.kind == "shard" and p.dim == dim]
    parts: dict[Coordinate, Sequence[Interval]] = {}
    for spot in itertools.product(*(range(layout.mesh_shape[axis]) for axis in cuts)):
        coordinate = [0] * len(layout.mesh_shape)
        for axis, number in zip(cuts, spot, strict=True):
            coordinate[axis] = number
        parts[spot] = [cut for cut in dim_intervals(dim, size, layout, coordinate) if cut[1]]
    return tuple(cuts), parts
