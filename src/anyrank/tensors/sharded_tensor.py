"""Tensors in memory as the ranks hold them: global shape, layout, and who holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from anyrank.errors import LoadError
from anyrank.tensors.layout import GIVEN_BOXES, Layout, Piece, Placement, local_pieces, local_shape

Described: TypeAlias = "tuple[str, tuple[int, ...], str, str]"  # name, shape, dtype, layout


@dataclass
class ShardedTensor:
    """One tensor that the ranks hold, each its share or each the whole.

    Attributes:
        name: in errors and reports.
        tensor: a plain tensor or DTensor, real or on meta.
        shape: global shape.
        layout: how it lies on the ranks, or None for a tensor that each rank holds whole.
        coordinate: where this rank is in the layout's mesh; None outside it.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    layout: Layout | None
    coordinate: tuple[int, ...] | None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank holds."""
        if self.layout is None:  # kept by shape, as most tensors of a model are whole and alike
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
        """Shape of what this rank holds."""
        return local_shape(self.shape, self.layout, self.coordinate)

    @property
    def local_numel(self) -> int:
        if self.layout is None:
            return self.tensor.numel()
        return sum(piece.box.numel for piece in self.pieces)

    def local(self) -> torch.Tensor:
        """This rank's memory, to be written to in place."""
        tensor: Any = self.tensor
        if not self.is_dtensor:
            return tensor.detach()
        if not torch.is_grad_enabled():
            return tensor.to_local().detach()
        with torch.no_grad():  # a view for autograd would take 50 us
            return tensor.to_local().detach()

    @property
    def is_dtensor(self) -> bool:
        """Whether the tensor knows its layout itself; else it is the local part."""
        return self.layout is not None and hasattr(self.tensor, "placements")

    def describe(self) -> Described:
        """What must be equal on all ranks: name, global shape, dtype and layout."""
        return self.name, self.shape, str(self.dtype), str(self.layout)


def as_sharded(name: str, tensor: torch.Tensor) -> ShardedTensor:
    """A tensor as this rank holds it.

    Raises:
        LoadError: a tensor subclass or placement whose bytes cannot be placed.
    """
    layout, coordinate = layout_of(tensor, name)
    return ShardedTensor(name, tensor, global_shape(tensor), layout, coordinate)


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, or of the whole that it is this rank's part of."""
    return tuple(getattr(tensor, "global_shape", tensor.shape))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, which torch has no public name for.

    A DTensor's writes are counted on it, and not on its local part; an inference tensor's nowhere.
    """
    return 0 if tensor.is_inference() else tensor._version


def layout_of(tensor: torch.Tensor, name: str) -> tuple[Layout | None, tuple[int, ...] | None]:
    """Layout of a DTensor and this rank's coordinate in its mesh; (None, None) for a plain tensor.

    Raises:
        LoadError: a tensor subclass, placement or mesh whose bytes cannot be placed.
    """
    placements: Any = getattr(tensor, "placements", None)
    if placements is None:
        if what := _without_bytes(tensor):
            kind, way_out = what
            raise LoadError(f"{name}: is a {kind}, whose bytes are not the tensor's: {way_out}")
        return (GIVEN_BOXES, _given_boxes(tensor, name)) if _is_part(tensor) else (None, None)
    mesh: Any = tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    coordinate = mesh.get_coordinate()
    rules = tuple(placement_of(placement, name) for placement in placements)
    places = _places_in_groups(mesh)
    for axis, rule in enumerate(rules if places else ()):
        if rule.kind == "shard" and places[axis] != coordinate[axis]:
            raise LoadError(
                f"{name}: this rank is at place {coordinate[axis]} of axis {axis} of its mesh, and "
                f"at place {places[axis]} of the process group there, so torch itself takes the "
                f"shards in both orders: build the mesh {mesh.mesh.tolist()} with ascending ranks "
                "along each axis"
            )
    return _layout(tuple(mesh.shape), rules), None if coordinate is None else tuple(coordinate)


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor says which boxes of a whole it holds: torch's `CheckpointableTensor`,
    of 2.15, which is a protocol of four attributes.
    """
    return hasattr(tensor, "global_shape") and hasattr(tensor, "global_offsets")


def _given_boxes(tensor: Any, name: str) -> tuple[int, ...]:
    """The coordinate of such a tensor; see `GIVEN_BOXES`.

    Raises:
        LoadError: a box that does not lie in both tensors.
    """
    local, whole = tuple(tensor.shape), global_shape(tensor)
    coordinate = [*local]
    for start, own_start, sizes in zip(
        tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True
    ):
        inside = [
            len(low) == len(sizes) == len(shape)
            and all(0 <= a <= a + n <= m for a, n, m in zip(low, sizes, shape, strict=True))
            for low, shape in ((start, whole), (own_start, local))
        ]
        if not all(inside):
            raise LoadError(
                f"{name}: says that it holds {list(sizes)} at {list(start)} of {list(whole)}, at "
                f"{list(own_start)} of its {list(local)}, which do not lie in both: correct its "
                "global_offsets, local_offsets and local_sizes"
            )
        coordinate += [*start, *own_start, *sizes]
    return tuple(map(int, coordinate))


def _without_bytes(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What a plain tensor is whose values are not its bytes, and the way out; None for others."""
    if tensor.is_nested:
        return "nested tensor", "give its parts, from .unbind()"
    if tensor.layout != torch.strided:
        return f"{tensor.layout} tensor", "give a dense tensor, from .to_dense()"
    if tensor.is_quantized:
        return "quantised tensor", "load or save before it is quantised, or give .dequantize()"
    if tensor.is_conj() or tensor.is_neg():
        return "conj or neg view", "give the result of .resolve_conj().resolve_neg()"
    if _hides_bytes(type(tensor)):
        way_out = "load or save before it is wrapped or quantised, or use fully_shard (FSDP2)"
        return type(tensor).__name__, way_out
    return None


def _places_in_groups(mesh: Any) -> tuple[int, ...]:
    """This rank's place in the process group of each mesh axis, by which FSDP2 and collectives cut.

    Empty outside of the mesh, and without process groups.
    """
    if mesh.get_coordinate() is None or not dist.is_initialized():
        return ()
    return tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))


@lru_cache(maxsize=256)
def _hides_bytes(kind: type[torch.Tensor]) -> bool:
    """Whether what the bytes of such tensors mean is known to their class alone."""
    wraps = hasattr(kind, "__tensor_flatten__")  # torch's protocol of wrapper classes
    return wraps or kind.__name__ in ("FlatParameter", "Params4bit", "Int8Params", "GGUFParameter")


@lru_cache(maxsize=256)
def _layout(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Layout:
    """One object for equal layouts: a model has few of them and many tensors."""
    return Layout(tuple(int(size) for size in mesh_shape), placements)


def dtensor_like(
    like: Any, local: torch.Tensor, *, placements: Any, shape: torch.Size, stride: tuple[int, ...]
) -> Any:
    """A DTensor around `local`, on the mesh of the DTensor `like`, wherever `local` is.

    `from_local` moves what is not on the mesh's device, as the parameters are that FSDP2 keeps on
    the CPU. A meta tensor it leaves, and torch's protocol of wrapper classes puts `local` in its
    place.
    """
    mesh = like.device_mesh
    kind: Any = type(like)  # by its class, as an import statement here takes 0.1 ms
    elsewhere = local.device.type != mesh.device_type
    blank = torch.empty_like(local, device="meta") if elsewhere else local
    dtensor = kind.from_local(blank, mesh, placements, run_check=False, shape=shape, stride=stride)
    if not elsewhere:
        return dtensor
    names, context = dtensor.__tensor_flatten__()
    parts = {name: getattr(dtensor, name) for name in names}
    parts |= {name: local for name, part in parts.items() if isinstance(part, torch.Tensor)}
    return kind.__tensor_unflatten__(parts, context, shape, stride)


def placement_of(placement: Any, name: str) -> Placement:
    """A placement of torch as plain data.

    Raises:
        LoadError: it is partial, or names no dim.
    """
    if placement.is_replicate():
        return Placement("replicate")
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or dim is None:
        raise LoadError(f"{name}: has placement {placement}, which holds no value to load into")
    return Placement("shard", int(dim), int(getattr(placement, "split_factor", 1)))


@dataclass(frozen=True, slots=True)
class Coordinates:
    """One rank's mesh coordinates: distinct ones, and which of them each tensor has."""

    table: tuple[tuple[int, ...] | None, ...]
    which: tuple[int, ...]

    def coordinate(self, index: int) -> tuple[int, ...] | None:
        """The coordinate in the mesh of a tensor."""
        return self.table[self.which[index]]


def coordinates_of(tensors: Sequence[ShardedTensor]) -> Coordinates:
    """This rank's place in the mesh of each tensor, by which others know what it holds."""
    table = tuple(dict.fromkeys(tensor.coordinate for tensor in tensors))
    return Coordinates(table, tuple(table.index(tensor.coordinate) for tensor in tensors))


def replicas(
    index: int, tensor: ShardedTensor, coordinates: Mapping[int, Coordinates]
) -> dict[tuple[Piece, ...], tuple[int, ...]]:
    """The ranks that hold the same pieces of a tensor, by pieces; those with nothing are left out.

    Args:
        index: position of the tensor in every rank's list.
        tensor: the tensor, as any rank holds it.
        coordinates: of every rank, by global rank.
    """
    if tensor.layout is None:
        return {tensor.pieces: tuple(coordinates)} if tensor.pieces else {}
    by_coordinate: dict[tuple[int, ...] | None, list[int]] = {}
    for rank, known in coordinates.items():
        by_coordinate.setdefault(known.coordinate(index), []).append(rank)
    groups: dict[tuple[Piece, ...], list[int]] = {}
    for coordinate, ranks in by_coordinate.items():
        pieces = local_pieces(tensor.shape, tensor.layout, coordinate)
        groups.setdefault(pieces, []).extend(ranks)
    return {pieces: tuple(sorted(ranks)) for pieces, ranks in groups.items() if pieces}
