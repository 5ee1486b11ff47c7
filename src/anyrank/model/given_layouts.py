"""`layout=`: plain tensors that are each rank's part of a whole, as Megatron and vLLM hold them."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch

from anyrank.errors import LoadError, WrongType, WrongValue
from anyrank.model.tensors import ModelTensor
from anyrank.tensors.layout import IntervalShard, Layout, Placement, local_shape
from anyrank.tensors.names import candidates
from anyrank.tensors.sharded_tensor import placement_of
from anyrank.world.ranks import Ranks

One: TypeAlias = "tuple[Any, Sequence[Any]] | tuple[Any, Sequence[Any], Sequence[Any]]"
GivenLayout: TypeAlias = "Mapping[str, One] | Callable[[str], One | None] | None"
"""What `layout=` takes: name or pattern -> (mesh, placements), or a function of the name.

The mesh is a DeviceMesh, or the global ranks as a tensor or nested lists. A third element says what
the ranks hold of the sharded dim, if that is not torch's even chunks: for each place on the mesh
axis its (start, length) pairs, in the order in which they lie in the part.
"""


@dataclass(frozen=True, slots=True)
class RankMesh:
    """Ranks in a grid.

    Attributes:
        shape: sizes of the axes.
        ranks: global, in row-major order.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where a rank is; None outside."""
        if rank not in self.ranks:
            return None
        index = self.ranks.index(rank)
        steps = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return tuple(index // step % size for step, size in zip(steps, self.shape, strict=True))


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
        ValueError: parts that overlap, or leave a hole.
    """
    if given is None or callable(given):
        return
    if not isinstance(given, Mapping):
        raise TypeError(
            "layout= takes a dict of name or pattern to (mesh, placements), or a function of the "
            f"name, not {type(given).__name__}"
        )
    for name, value in given.items():
        _checked(str(name), value)


def _checked(name: str, value: Any) -> tuple[RankMesh, tuple[Placement, ...]]:
    """A layout as plain data.

    Raises:
        TypeError: it is none.
        ValueError: its parts overlap, or leave a hole.
        LoadError: a placement that holds no values.
    """
    mesh: RankMesh | None = None
    placements: Any = None
    if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) in (2, 3):
        mesh, placements = _mesh_of(value[0]), value[1]
    if mesh is None or not isinstance(placements, (tuple, list)):
        raise WrongType(f"layout= of {name}: give (mesh, placements), not {value!r}")
    rules = tuple(placement_of(placement, name) for placement in cast("Sequence[Any]", placements))
    if len(mesh.shape) != len(rules):
        raise WrongType(
            f"layout= of {name}: {len(rules)} placements for a mesh of {len(mesh.shape)} axes"
        )
    return mesh, rules if len(value) == 2 else _with_intervals(name, mesh, rules, value[2])


def _mesh_of(given: Any) -> RankMesh | None:
    """The ranks of a DeviceMesh, a tensor or nested lists; None for anything else."""
    try:
        grid = torch.as_tensor(getattr(given, "mesh", given), device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    if not grid.numel() or grid.is_floating_point():
        return None
    grid = grid.reshape(-1) if not grid.ndim else grid
    return RankMesh(tuple(grid.shape), tuple(int(rank) for rank in grid.flatten().tolist()))


def _with_intervals(
    name: str, mesh: RankMesh, rules: tuple[Placement, ...], given: Any
) -> tuple[Placement, ...]:
    axes = [axis for axis, rule in enumerate(rules) if rule.kind == "shard"]
    try:
        parts = tuple(tuple((int(start), int(size)) for start, size in part) for part in given)
    except (TypeError, ValueError):
        parts = ()
    if len(axes) != 1 or len(parts) != mesh.shape[axes[0]]:
        raise WrongType(
            f"layout= of {name}: the third element is, for each place on the one axis that shards, "
            f"a list of (start, length), not {given!r}"
        )
    end = 0
    for start, size in sorted(interval for part in parts for interval in part if interval[1]):
        if start != end or size < 0:
            raise WrongValue(
                f"layout= of {name}: {'a hole' if start > end else 'an overlap'} before element "
                f"{start} of the sharded dim: each element belongs to one place on the axis"
            )
        end = start + size
    return tuple(
        IntervalShard("shard", rule.dim, intervals=parts) if axis in axes else rule
        for axis, rule in enumerate(rules)
    )


def apply_layouts(
    tensors: list[ModelTensor], given: GivenLayout, ranks: Ranks, *, strict: bool
) -> dict[int, RankMesh]:
    """Make plain tensors parts of a whole, as `layout=` says. All ranks.

    The whole's shape is what its parts add up to, and every part has to be the one that the layout
    gives its rank: no element is there twice on one axis, and none is missing.

    Args:
        tensors: of one model; changed in place.
        given: the layouts on this rank; DTensors keep their own.
        ranks: of the call.
        strict: whether each name and pattern has to be of use here.

    Returns:
        Position of a tensor -> its mesh; of equal ones, the same object.

    Raises:
        LoadError: parts that do not make a whole; a name or pattern that no tensor has.
    """

    def find() -> tuple[dict[int, RankMesh], dict[str, _Part]]:
        meshes: dict[int, RankMesh] = {}
        known: dict[RankMesh, RankMesh] = {}
        parts: dict[str, _Part] = {}
        for index, mesh, rules in _chosen(tensors, given, strict):
            tensor = tensors[index]
            cut = [rule.dim for rule in rules if rule.kind == "shard"]
            wrong = [dim for dim in cut if not 0 <= dim < tensor.tensor.dim()]
            if wrong:
                raise LoadError(
                    f"{tensor.name}: layout= shards dim {wrong[0]} of a tensor of "
                    f"{tensor.tensor.dim()} dims: count dims from 0"
                )
            at = mesh.coordinate(ranks.rank)
            if at is None and tensor.tensor.numel():
                raise LoadError(
                    f"{tensor.name}: rank {ranks.rank} holds {list(tensor.tensor.shape)}, and is "
                    f"not in the mesh of its layout=, whose ranks are {list(mesh.ranks)}"
                )
            meshes[index] = known.setdefault(mesh, mesh)
            layout = Layout(mesh.shape, rules)
            parts[tensor.name] = _Part(layout, at, tuple(tensor.tensor.shape))
        return meshes, parts

    meshes, every = ranks.own_and_all("reading layout=", find)

    def join() -> None:
        for index, mesh in meshes.items():
            tensor = tensors[index]
            inside = {*mesh.ranks}
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


def _answer(given: Callable[[str], Any], name: str) -> Any:
    """What a function of the user's says of a name."""
    try:
        return given(name)
    except Exception as error:
        raise LoadError(f"layout= failed for {name}: {type(error).__name__}: {error}") from error


def _chosen(
    tensors: Sequence[ModelTensor], given: GivenLayout, strict: bool
) -> list[tuple[int, RankMesh, tuple[Placement, ...]]]:
    """Position, mesh and placements of each plain tensor that has a layout."""
    found: list[tuple[int, RankMesh, tuple[Placement, ...]]] = []
    used: set[str] = set()
    for index, tensor in enumerate(tensors):
        # Also those without the `module.` of a wrapper that is not torch's own, as AveragedModel.
        every = (name for raw in tensor.flat_names() for name in candidates(raw))
        names = list(dict.fromkeys(every))
        value: Any = None
        if callable(given):
            answers = (_answer(given, name) for name in names)
            value = next((answer for answer in answers if answer is not None), None)
        elif given is not None:
            keys = [k for k in given if any(n == k or fnmatch.fnmatchcase(n, k) for n in names)]
            used.update(keys)
            exact = [key for key in keys if key in names]
            value = given[(exact or keys)[0]] if keys else None
        if value is not None and tensor.layout is None:
            found.append((index, *_checked(tensor.name, value)))
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
        raise LoadError(f"{name}: ranks were given different layout= for it: give all the same")
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
