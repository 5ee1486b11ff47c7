"""`layout=`: plain tensors that are each rank's part of a whole, as Megatron and vLLM hold them."""

from __future__ import annotations

import fnmatch
import math
import re
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

LayoutEntry: TypeAlias = "tuple[Any, Sequence[Any]] | tuple[Any, Sequence[Any], Sequence[Any]]"
GivenLayout: TypeAlias = "Mapping[str, LayoutEntry] | Callable[[str], LayoutEntry | None] | None"
"""What `layout=` takes: name or pattern -> (mesh, placements), or a function of the name.

The mesh is a DeviceMesh, or the global ranks as a tensor or nested lists. A third element says what
the ranks hold of the sharded dim, if that is not torch's even chunks: for each place on the mesh
axis its (start, length) pairs, in the order in which they lie in the part.
"""
Layouts: TypeAlias = "GivenLayout | tuple[GivenLayout, ...]"  # one for all ends, or one for each
Shape: TypeAlias = "tuple[int, ...]"


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

    name: str
    mesh: RankMesh
    layout: Layout
    coordinate: tuple[int, ...] | None
    shape: Shape


@dataclass(frozen=True, slots=True)
class RankLayouts:
    """What one rank's `layout=` says of its tensors; equal where it says the same.

    Attributes:
        parts: of each end, by position of the tensor.
        used: each end, with the names and patterns that a tensor of it has.
        asked: the ends of which one is to have such a tensor, with each name and pattern.
    """

    parts: dict[str, dict[int, _Part]]
    used: set[tuple[str, str]]
    asked: set[tuple[tuple[str, ...], str]]


@dataclass(frozen=True, slots=True)
class JoinedLayouts:
    """What this rank's parts are parts of: of each end, by position of the tensor."""

    parts: dict[str, dict[int, _Part]]
    shapes: dict[str, dict[int, Shape]]

    def apply(self, ends: Mapping[str, Sequence[ModelTensor]]) -> dict[str, dict[int, RankMesh]]:
        """Say so of the tensors, which are changed in place.

        Returns:
            Of each end, position of a tensor -> its mesh; of equal ones, the same object.
        """
        meshes: dict[str, dict[int, RankMesh]] = {}
        for end, parts in self.parts.items():
            for index, part in parts.items():
                tensor = ends[end][index]
                tensor.layout, tensor.coordinate = part.layout, part.coordinate
                tensor.shape = self.shapes[end][index]
            meshes[end] = {index: part.mesh for index, part in parts.items()}
        return meshes


def check_layout(layout: object) -> None:
    """Refuse what is not a layout.

    Raises:
        TypeError: neither a dict of (mesh, placements), nor a function, nor None.
        ValueError: parts that overlap, or leave a hole.
    """
    if layout is None or callable(layout):
        return
    if not isinstance(layout, Mapping):
        raise TypeError(
            "layout= takes a dict of name or pattern to (mesh, placements), or a function of the "
            f"name, not {type(layout).__name__}"
        )
    for name, value in layout.items():
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


def _mesh_of(mesh: Any) -> RankMesh | None:
    """The ranks of a DeviceMesh, a tensor or nested lists; None for anything else."""
    try:
        grid = torch.as_tensor(getattr(mesh, "mesh", mesh), device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    if not grid.numel() or grid.is_floating_point():
        return None
    grid = grid.reshape(-1) if not grid.ndim else grid
    return RankMesh(tuple(grid.shape), tuple(int(rank) for rank in grid.flatten().tolist()))


def _with_intervals(
    name: str, mesh: RankMesh, rules: tuple[Placement, ...], intervals: Any
) -> tuple[Placement, ...]:
    axes = [axis for axis, rule in enumerate(rules) if rule.kind == "shard"]
    try:
        parts = tuple(tuple((int(start), int(size)) for start, size in part) for part in intervals)
    except (TypeError, ValueError):
        parts = ()
    if len(axes) != 1 or len(parts) != mesh.shape[axes[0]]:
        raise WrongType(
            f"layout= of {name}: the third element is, for each place on the one axis that shards, "
            f"a list of (start, length), not {intervals!r}"
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
    ends: Mapping[str, list[ModelTensor]], layouts: Layouts, ranks: Ranks
) -> dict[str, dict[int, RankMesh]]:
    """Make plain tensors parts of a whole, as `layout=` says. All ranks.

    The whole's shape is what its parts add up to, and every part has to be the one that the layout
    gives its rank: no element is there twice on one axis, and none is missing.

    Args:
        ends: the tensors of each model, which are changed in place, by what messages call it.
        layouts: the layouts on this rank; DTensors keep their own.
        ranks: of the call.

    Returns:
        Of each model, position of a tensor -> its mesh.

    Raises:
        LoadError: parts that do not make a whole; a name or pattern that no tensor has on any rank
            that gives it.
    """

    def read() -> tuple[RankLayouts, RankLayouts]:
        own_layouts = read_layouts(ends, layouts, ranks.rank)
        return own_layouts, own_layouts

    own_layouts, answers = ranks.run_and_gather("reading layout=", read)
    return join_layouts(own_layouts, answers, ranks).apply(ends)


def join_layouts(
    own_layouts: RankLayouts, answers: Sequence[RankLayouts], ranks: Ranks
) -> JoinedLayouts:
    """The wholes, from what each rank says of its parts. All ranks.

    Raises:
        LoadError: as `apply_layouts`.
    """
    by_rank = dict(zip(ranks.ranks, answers, strict=True))
    what = "joining the parts of layout="
    return JoinedLayouts(own_layouts.parts, ranks.run(what, lambda: _join(own_layouts, by_rank)))


def read_layouts(ends: Mapping[str, list[ModelTensor]], layouts: Layouts, rank: int) -> RankLayouts:
    """What this rank's `layout=` says of its tensors.

    Raises:
        LoadError: of a tensor that has no such dim, or is outside of its mesh; a function failed.
        TypeError, ValueError: a function gave no layout.
    """
    alike = not isinstance(layouts, tuple)
    if not alike and len(layouts) != len(ends):
        raise WrongType(
            f"layout= is a tuple of {len(layouts)}: give one for each of {', '.join(ends)}"
        )
    by_end = dict(zip(ends, (layouts,) * len(ends) if alike else layouts, strict=True))
    answer = RankLayouts({}, set(), set())
    for end, tensors in ends.items():
        layout = by_end[end]
        chosen, used = _chosen(tensors, layout)
        parts: dict[int, _Part] = {}
        for index, mesh, rules in chosen:
            name, local = tensors[index].name, tensors[index].tensor
            cut = [rule.dim for rule in rules.placements if rule.kind == "shard"]
            wrong = [dim for dim in cut if not 0 <= dim < local.dim()]
            if wrong:
                raise LoadError(
                    f"{name}: layout= shards dim {wrong[0]} of a tensor of {local.dim()} dims: "
                    "count dims from 0"
                )
            coordinate = mesh.coordinate(rank)
            if coordinate is None and local.numel():
                raise LoadError(
                    f"{name}: rank {rank} holds {list(local.shape)}, and is not in the mesh of its "
                    f"layout=, whose ranks are {list(mesh.ranks)}"
                )
            parts[index] = _Part(name, mesh, rules, coordinate, tuple(local.shape))
        answer.parts[end] = parts
        answer.used.update((end, key) for key in used)
        asked = layout if isinstance(layout, Mapping) else ()
        answer.asked.update((tuple(ends) if alike else (end,), key) for key in asked)
    return answer


def _join(
    own_layouts: RankLayouts, by_rank: Mapping[int, RankLayouts]
) -> dict[str, dict[int, Shape]]:
    """Of each end, position of a tensor of this rank -> the shape of the whole it is a part of.

    Raises:
        LoadError: as `apply_layouts`.
    """
    used: set[tuple[str, str]] = set().union(*(answer.used for answer in by_rank.values()))
    asked = {asked for answer in by_rank.values() for asked in answer.asked}
    unused = sorted(
        (ends, key) for ends, key in asked if not used.intersection((end, key) for end in ends)
    )
    if unused:
        ends = unused[0][0]
        keys = ", ".join([key for among, key in unused if among == ends][:10])
        raise LoadError(
            f"layout= names {keys}, which no tensor of {' or '.join(ends)} has on any rank that "
            "gives it"
        )
    shapes: dict[str, dict[int, Shape]] = {}
    for end, parts in own_layouts.parts.items():
        named = {r: {part.name: part for part in s.parts[end].values()} for r, s in by_rank.items()}
        shapes[end] = {}
        for index, part in parts.items():
            inside = {*part.mesh.ranks}
            holders = {
                r: named[r][part.name] for r in named if r in inside and part.name in named[r]
            }
            shapes[end][index] = _whole(part.name, part.layout, holders, inside)
    return shapes


def _answer(function: Callable[[str], Any], name: str) -> Any:
    """What a function of the user's says of a name."""
    try:
        return function(name)
    except Exception as error:
        raise LoadError(f"layout= failed for {name}: {type(error).__name__}: {error}") from error


def _chosen(
    tensors: Sequence[ModelTensor], layout: GivenLayout
) -> tuple[list[tuple[int, RankMesh, Layout]], set[str]]:
    """Position, mesh and layout of each plain tensor that has one; the keys that tensors have."""
    chosen: list[tuple[int, RankMesh, Layout]] = []
    used: set[str] = set()
    if layout is None:
        return chosen, used
    meshes: dict[RankMesh, RankMesh] = {}
    known: dict[int, tuple[Any, RankMesh, Layout]] = {}  # by identity; holds what it is of
    table: Mapping[str, LayoutEntry] = layout if isinstance(layout, Mapping) else {}
    patterns = [
        (key, re.compile(fnmatch.translate(key)).match) for key in table if {*key} & {*"*?["}
    ]
    for index, tensor in enumerate(tensors):
        # Also those without the `module.` of a wrapper that is not torch's own, as AveragedModel.
        spellings = (name for raw in tensor.flat_names() for name in candidates(raw))
        names = list(dict.fromkeys(spellings))
        if callable(layout):
            answers = (_answer(layout, name) for name in names)
            value: Any = next((answer for answer in answers if answer is not None), None)
        else:
            keys = [name for name in names if name in table]
            keys += [key for key, fits in patterns if any(map(fits, names))]
            used.update(keys)
            value = table[keys[0]] if keys else None
        if value is None or tensor.layout is not None:
            continue
        if id(value) not in known:
            mesh, rules = _checked(tensor.name, value)
            known[id(value)] = value, meshes.setdefault(mesh, mesh), Layout(mesh.shape, rules)
        chosen.append((index, *known[id(value)][1:]))
    return chosen, used


def _whole(
    name: str, layout: Layout, parts: Mapping[int, _Part], inside: set[int]
) -> tuple[int, ...]:
    """The shape of the tensor whose parts the ranks hold.

    Raises:
        LoadError: a part is missing, or is not the one that the layout gives its rank.
    """
    absent = sorted(inside.difference(parts))
    if absent:
        raise LoadError(f"{name}: its layout= has rank {absent[0]} in its mesh, which has no part")
    if any(part.layout != layout for part in parts.values()):
        raise LoadError(f"{name}: ranks were given different layout= for it: give all the same")
    first = next(iter(parts.values()))
    shape = list(first.shape)
    for dim in range(len(shape)):
        axes = [a for a, p in enumerate(layout.placements) if p.kind == "shard" and p.dim == dim]
        sizes = {
            tuple(part.coordinate[axis] for axis in axes): part.shape[dim]
            for part in parts.values()
            if part.coordinate is not None and len(part.shape) > dim
        }
        shape[dim] = sum(sizes.values()) if axes else shape[dim]
    for rank, part in parts.items():
        expected = local_shape(shape, layout, part.coordinate)
        if part.shape != expected:
            raise LoadError(
                f"{name}: rank {rank} holds {list(part.shape)}, and its part of {shape} by layout= "
                f"is {list(expected)}: there is a hole or an overlap"
            )
    return tuple(shape)
