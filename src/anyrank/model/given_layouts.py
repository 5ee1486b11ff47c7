"""`layout=`: plain tensors that are each rank's part of a whole, as Megatron and vLLM hold them."""

from __future__ import annotations

import fnmatch
import logging
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

One: TypeAlias = "tuple[Any, Sequence[Any]] | tuple[Any, Sequence[Any], Sequence[Any]]"
GivenLayout: TypeAlias = "Mapping[str, One] | Callable[[str], One | None] | None"
"""What `layout=` takes: name or pattern -> (mesh, placements), or a function of the name.

The mesh is a DeviceMesh, or the global ranks as a tensor or nested lists. A third element says what
the ranks hold of the sharded dim, if that is not equal chunks: for each place on the mesh
axis its (start, length) pairs, in the order in which they lie in the part.
"""
Layouts: TypeAlias = "GivenLayout | tuple[GivenLayout, ...]"  # one for both ends, or a pair

log = logging.getLogger("anyrank.load")


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


def check_layout(given: object) -> None:
    """Refuse what is not a layout.

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


def lay_out(
    tensors: Sequence[ModelTensor], given: GivenLayout, ranks: Ranks
) -> dict[int, RankMesh]:
    """Make plain tensors parts of a whole, as `layout=` says. Each rank by itself.

    Parts are equal, or say their intervals, so that a rank knows the whole from its own part; that
    all ranks know the same whole is compared where their models are.

    Args:
        tensors: of a model, which are changed in place; DTensors keep their own layout.
        given: the layouts on this rank.
        ranks: of the call.

    Returns:
        Position of a tensor -> its mesh.

    Raises:
        LoadError: a tensor that has no such dim, is outside of its mesh, or is not the part that
            the intervals say; a mesh with other ranks than the call's; no name or pattern that a
            tensor has; a function failed.
        TypeError, ValueError: a function gave no layout.
    """
    found = _chosen(tensors, given)
    for index, mesh, layout in found:
        _lay_out(tensors[index], mesh, layout, ranks)
    return {index: mesh for index, mesh, _ in found}


def pair_of(given: Layouts) -> tuple[GivenLayout, GivenLayout]:
    """The layouts of `dst` and `src`.

    Raises:
        TypeError: a tuple that is no pair.
    """
    if not isinstance(given, tuple):
        return given, given
    if len(given) != 2:
        raise WrongType(f"layout= is a tuple of {len(given)}: give one for each of dst, src")
    return given


def _lay_out(tensor: ModelTensor, mesh: RankMesh, layout: Layout, ranks: Ranks) -> None:
    """Say of one tensor what it is a part of.

    Raises:
        LoadError: as `lay_out`.
    """
    name, held = tensor.name, tensor.tensor
    at = mesh.coordinate(ranks.rank)
    if at is None:
        raise LoadError(
            f"{name}: rank {ranks.rank} holds {list(held.shape)}, and is not in the mesh of its "
            f"layout=, whose ranks are {list(mesh.ranks)}"
        )
    absent = sorted({*mesh.ranks}.difference(ranks.ranks))
    if absent:
        raise LoadError(f"{name}: its layout= has rank {absent[0]} in its mesh, which has no part")
    shape = list(held.shape)
    for axis, rule in enumerate(layout.placements):
        if rule.kind != "shard":
            continue
        if not 0 <= rule.dim < len(shape):
            raise LoadError(
                f"{name}: layout= shards dim {rule.dim} of a tensor of {len(shape)} dims: "
                "count dims from 0"
            )
        if isinstance(rule, IntervalShard):
            shape[rule.dim] = sum(size for part in rule.intervals for _, size in part)
        else:
            shape[rule.dim] *= mesh.shape[axis]
    expected = local_shape(shape, layout, at)
    if tuple(held.shape) != expected:
        raise LoadError(
            f"{name}: rank {ranks.rank} holds {list(held.shape)}, and its part of {shape} by "
            f"layout= is {list(expected)}: there is a hole or an overlap"
        )
    tensor.layout, tensor.coordinate, tensor.shape = layout, at, tuple(shape)


def _answer(given: Callable[[str], Any], name: str) -> Any:
    """What a function of the user's says of a name."""
    try:
        return given(name)
    except Exception as error:
        raise LoadError(f"layout= failed for {name}: {type(error).__name__}: {error}") from error


def _chosen(
    tensors: Sequence[ModelTensor], given: GivenLayout
) -> list[tuple[int, RankMesh, Layout]]:
    """Position, mesh and layout of each plain tensor that has one."""
    found: list[tuple[int, RankMesh, Layout]] = []
    if not given:
        return found
    known: dict[int, tuple[Any, RankMesh, Layout]] = {}  # by identity; holds what it is of
    table: Mapping[str, One] = given if isinstance(given, Mapping) else {}
    patterns = [
        (key, re.compile(fnmatch.translate(key)).match) for key in table if {*key} & {*"*?["}
    ]
    used: set[str] = set()
    for index, tensor in enumerate(tensors):
        # Also those without the `module.` of a wrapper that is not torch's own, as AveragedModel.
        every = (name for raw in tensor.flat_names() for name in candidates(raw))
        names = list(dict.fromkeys(every))
        if callable(given):
            answers = (_answer(given, name) for name in names)
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
            known[id(value)] = value, mesh, Layout(mesh.shape, rules)
        found.append((index, *known[id(value)][1:]))
    unused = ", ".join([key for key in table if key not in used][:10])
    if unused and tensors and not used:
        raise LoadError(
            f"layout= names {unused}, which no tensor here has: give it to the ranks that have "
            "them, and sync a pair of layouts where one end has none"
        )
    if unused and tensors:  # ranks of a pipeline, and both ends, may share one dict
        log.warning("layout= names %s, which no tensor here has", unused)
    return found
