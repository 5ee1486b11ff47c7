"""`layout=`: plain tensors that are each rank's part of a whole, as Megatron and vLLM hold them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from anyrank.errors import LoadError
from anyrank.model.tensors import ModelTensor
from anyrank.tensors.layout import Layout, local_shape
from anyrank.tensors.sharded_tensor import placement_of
from anyrank.world.ranks import Ranks

One: TypeAlias = "tuple[Any, Sequence[Any]]"
GivenLayout: TypeAlias = "Mapping[str, One] | Callable[[str], One | None] | None"
"""What `layout=` takes: name or pattern -> (mesh, placements), or a function of the name."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank holds of a tensor: its shape, and where that is."""

    layout: Layout
    coordinate: tuple[int, ...] | None
    shape: tuple[int, ...]


def check_layout(given: object) -> None:
    """Refuse what is no layout.

    Raises:
        TypeError: neither a dict of (mesh, placements), nor a function, nor None.
    """
    if given is None or callable(given):
        return
    if not isinstance(given, Mapping):
        raise TypeError(
            "layout= takes a dict of name or pattern to (mesh, placements), or a function of the "
            f"name, not {type(given).__name__}"
        )
    for name, one in given.items():
        _checked(str(name), one)


def _checked(name: str, one: Any) -> tuple[Any, tuple[Any, ...]]:
    mesh: Any = None
    placements: Any = None
    if isinstance(one, tuple) and len(one) == 2:
        mesh, placements = one
    if not hasattr(mesh, "get_coordinate") or not isinstance(placements, (tuple, list)):
        raise TypeError(f"layout= of {name}: give (mesh, placements), not {one!r}")
    if len(mesh.shape) != len(placements):
        raise TypeError(
            f"layout= of {name}: {len(placements)} placements for a mesh of {len(mesh.shape)} axes"
        )
    return mesh, tuple(placements)


def apply_layouts(
    tensors: list[ModelTensor], given: GivenLayout, ranks: Ranks, *, strict: bool
) -> dict[int, Any]:
    """Make plain tensors parts of a whole, as `layout=` says. All ranks.

    The whole's shape is what its parts add up to, and every part has to be the one that the layout
    gives its rank: no element is there twice on one axis, and none is missing.

    Args:
        tensors: of one model; changed in place.
        given: the layouts on this rank; DTensors keep their own.
        ranks: of the call.
        strict: whether each name and pattern has to be of use here.

    Returns:
        Position of a tensor -> its mesh.

    Raises:
        LoadError: parts that do not make a whole; a name or pattern that no tensor has.
    """

    def find() -> tuple[dict[int, Any], dict[str, _Part]]:
        meshes: dict[int, Any] = {}
        parts: dict[str, _Part] = {}
        for index, placements, mesh in _chosen(tensors, given, strict):
            tensor = tensors[index]
            rules = tuple(placement_of(placement, tensor.name) for placement in placements)
            cut = [rule.dim for rule in rules if rule.kind == "shard"]
            if any(not 0 <= dim < tensor.tensor.dim() for dim in cut):
                raise LoadError(f"{tensor.name}: layout= shards a dim that it has not")
            coordinate = mesh.get_coordinate()
            layout = Layout(tuple(int(n) for n in mesh.shape), rules)
            at = None if coordinate is None else tuple(int(n) for n in coordinate)
            meshes[index] = mesh
            parts[tensor.name] = _Part(layout, at, tuple(tensor.tensor.shape))
        return meshes, parts

    meshes, every = ranks.own_and_all("reading layout=", find)

    def join() -> None:
        for index, mesh in meshes.items():
            tensor = tensors[index]
            inside = {int(rank) for rank in mesh.mesh.flatten()}
            held = {
                rank: parts[tensor.name]
                for rank, parts in zip(ranks.ranks, every, strict=True)
                if tensor.name in parts and rank in inside
            }
            tensor.layout = every[ranks.index][tensor.name].layout
            tensor.coordinate = every[ranks.index][tensor.name].coordinate
            tensor.shape = _whole(tensor.name, tensor.layout, held, inside)

    ranks.together("joining the parts of layout=", join)
    return meshes


def _chosen(
    tensors: Sequence[ModelTensor], given: GivenLayout, strict: bool
) -> list[tuple[int, tuple[Any, ...], Any]]:
    """Position, placements and mesh of each plain tensor that has a layout."""
    found: list[tuple[int, tuple[Any, ...], Any]] = []
    used: set[str] = set()
    for index, tensor in enumerate(tensors):
        names = [name for place in tensor.registrations for name in place.names]
        one: Any = None
        if callable(given):
            one = given(tensor.name)
        elif given is not None:
            keys = [k for k in given if any(n == k or fnmatch.fnmatchcase(n, k) for n in names)]
            used.update(keys)
            exact = [key for key in keys if key in names]
            one = given[(exact or keys)[0]] if keys else None
        if one is not None and tensor.layout is None:
            mesh, placements = _checked(tensor.name, one)
            found.append((index, placements, mesh))
    unused = [key for key in given if key not in used] if isinstance(given, Mapping) else []
    if unused and strict:
        raise LoadError(f"layout= names {', '.join(unused[:10])}, which no tensor of the model has")
    return found


def _whole(
    name: str, layout: Layout, held: Mapping[int, _Part], inside: set[int]
) -> tuple[int, ...]:
    """The shape of the tensor whose parts the ranks hold.

    Raises:
        LoadError: a part is missing, or is not the one that the layout gives its rank.
    """
    absent = sorted(inside.difference(held))
    if absent:
        raise LoadError(f"{name}: its layout= has rank {absent[0]} in its mesh, which has no part")
    if any(part.layout != layout for part in held.values()):
        raise LoadError(f"{name}: ranks were given different layout= for it")
    first = next(iter(held.values()))
    shape = list(first.shape)
    for dim in range(len(shape)):
        axes = [a for a, p in enumerate(layout.placements) if p.kind == "shard" and p.dim == dim]
        sizes = {
            tuple(part.coordinate[axis] for axis in axes): part.shape[dim]
            for part in held.values()
            if part.coordinate is not None and len(part.shape) > dim
        }
        shape[dim] = sum(sizes.values()) if axes else shape[dim]
    for rank, part in held.items():
        expected = local_shape(shape, layout, part.coordinate)
        if part.shape != expected:
            raise LoadError(
                f"{name}: rank {rank} holds {list(part.shape)}, and its part of {shape} by layout= "
                f"is {list(expected)}: there is a hole or an overlap"
            )
    return tuple(shape)
