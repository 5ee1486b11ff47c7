"""Tensors in memory, as the ranks hold them: global shape, layout, and which rank holds what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, TypeVar

import torch

from anyrank.tensors.layout import Layout, Piece, local_pieces, local_shape
from anyrank.tensors.wrapped import PLAIN, values_of

Members: TypeAlias = "tuple[int, ...]"  # global ranks that hold the same part of a tensor

MAY_DIFFER = "(may differ, because it is a buffer or in no optimizer)"


@dataclass
class ShardedTensor:
    """One tensor that the ranks hold, each its share or all of it.

    Attributes:
        name: the name in errors and reports.
        tensor: a plain tensor or DTensor, real or on meta.
        shape: global shape.
        layout: how it is laid out on the ranks; None for a tensor that every rank holds whole.
        coordinate: coordinate of this rank in the layout's mesh; None outside it.
        may_differ: whether ranks that hold the same part of it may have different values, because
            nothing keeps them the same. The first of them writes the part.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    layout: Layout | None
    coordinate: tuple[int, ...] | None
    may_differ: bool = field(default=False, kw_only=True)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces that this rank holds."""
        if self.layout is None:  # cached by shape, which most tensors share
            return local_pieces(self.shape, None, None)
        return self._cut

    @cached_property
    def _cut(self) -> tuple[Piece, ...]:
        return local_pieces(self.shape, self.layout, self.coordinate)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def is_meta(self) -> bool:
        return self.tensor.is_meta

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part that this rank holds."""
        return local_shape(self.shape, self.layout, self.coordinate)

    @property
    def local_numel(self) -> int:
        if self.layout is None:
            return self.tensor.numel()
        return sum(piece.box.numel for piece in self.pieces)

    def local(self) -> torch.Tensor:
        """Return this rank's memory, to be written to in place."""
        tensor: Any = self.tensor
        if not self.is_dtensor:
            return values_of(tensor)
        if not torch.is_grad_enabled():
            return values_of(tensor.to_local())
        with torch.no_grad():  # a view for autograd would take 50 us
            return values_of(tensor.to_local())

    @property
    def is_dtensor(self) -> bool:
        """True if `tensor` is a DTensor, which knows its layout; otherwise it is the local part."""
        return self.layout is not None and hasattr(self.tensor, "placements")


def describe(tensors: Sequence[ShardedTensor]) -> list[str]:
    """Describe what must be the same on every rank: each tensor's name, shape, dtype and layout,
    and whether its values may differ. The ranks' plans follow from these.
    """
    rows: list[str] = []
    texts: dict[Any, str] = {}  # many tensors differ only in name; layouts are compared by identity
    for tensor in tensors:
        key = tensor.shape, tensor.tensor.dtype, id(tensor.layout), tensor.may_differ
        text = texts.get(key)
        if text is None:
            words = [list(tensor.shape), tensor.dtype, *filter(None, [tensor.layout])]
            words += [MAY_DIFFER] if tensor.may_differ else []
            text = texts[key] = " ".join(map(str, words))
        rows.append(f"{tensor.name} {text}")
    return rows


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor; torch has no public name for it.

    Writes to a DTensor are counted on the DTensor, not on its local part; an inference tensor
    counts none.
    """
    return 0 if tensor.is_inference() else tensor._version


def is_released(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage was freed: then a read of its elements ends the process."""
    if not tensor.numel() or tensor.is_meta:
        return False
    tensor = tensor if type(tensor) in PLAIN else values_of(tensor)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize


@dataclass(frozen=True, slots=True)
class Coordinates:
    """One rank's mesh coordinates: the distinct ones, and which of them each tensor has."""

    distinct: tuple[tuple[int, ...] | None, ...]
    which: tuple[int, ...]

    def coordinate(self, index: int) -> tuple[int, ...] | None:
        """Return the coordinate of a tensor in its mesh."""
        return self.distinct[self.which[index]]


def coordinates_of(tensors: Sequence[ShardedTensor]) -> Coordinates:
    """Return this rank's coordinate in the mesh of each tensor, which says what the rank holds."""
    distinct = tuple(dict.fromkeys(tensor.coordinate for tensor in tensors))
    return Coordinates(distinct, tuple(distinct.index(tensor.coordinate) for tensor in tensors))


def replicas(
    index: int, tensor: ShardedTensor, coordinates: Mapping[int, Coordinates]
) -> Mapping[tuple[Piece, ...], Members]:
    """Map the pieces of a tensor to the ranks that hold them; ranks without a piece are left out.

    Args:
        index: position of the tensor in every rank's list.
        tensor: the tensor, as any rank holds it.
        coordinates: coordinates of every rank, by global rank.
    """
    if tensor.layout is None:
        return {tensor.pieces: tuple(coordinates)} if tensor.pieces else {}
    places = tuple((rank, known.coordinate(index)) for rank, known in coordinates.items())
    return holders(tensor.shape, tensor.layout, places)


T = TypeVar("T", bound=ShardedTensor)


def shared(
    tensors: Sequence[T], coordinates: Mapping[int, Coordinates]
) -> Iterator[tuple[T, Members]]:
    """Yield each tensor of which several ranks hold the same part, with these ranks.

    A tensor that is both sharded and replicated is yielded once for each part. The result is the
    same on every rank.
    """
    for index, tensor in enumerate(tensors):
        for members in replicas(index, tensor, coordinates).values():
            if len(members) > 1:
                yield tensor, members


@lru_cache(maxsize=64)  # most tensors of a model, and their optimizer state, look the same
def holders(
    shape: tuple[int, ...],
    layout: Layout | None,
    places: tuple[tuple[int, tuple[int, ...] | None], ...],
) -> Mapping[tuple[Piece, ...], Members]:
    """Do what `replicas` does; `places` has every rank and its coordinate."""
    by_coordinate: dict[tuple[int, ...] | None, list[int]] = {}
    for rank, coordinate in places:
        by_coordinate.setdefault(coordinate, []).append(rank)
    groups: dict[tuple[Piece, ...], list[int]] = {}
    for coordinate, ranks in by_coordinate.items():
        groups.setdefault(local_pieces(shape, layout, coordinate), []).extend(ranks)
    return {pieces: tuple(sorted(ranks)) for pieces, ranks in groups.items() if pieces}
