"""`layout=`: plain tensors that are each rank's part of a whole.

vLLM and hand-written tensor parallelism hold such tensors.
"""

from __future__ import annotations

import fnmatch
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from anyrank.errors import LoadError, WrongType, WrongValue
from anyrank.models.dtensors import placement_of
from anyrank.models.tensors import ModelTensor, find_tensors
from anyrank.tensors.layout import IntervalShard, Layout, Placement, local_shape
from anyrank.tensors.names import candidates
from anyrank.tensors.sharded_tensor import Coordinates
from anyrank.tensors.spec import StoredTensor
from anyrank.wording import first_few
from anyrank.world.ranks import Ranks

SHOWN = 8  # positions in a mesh that a message lists
log = logging.getLogger("anyrank.load")

Shape: TypeAlias = "tuple[int, ...]"
Spots: TypeAlias = "dict[Any, dict[Any, set[Shape]]]"
"""Tensor -> place on its mesh -> shapes of the parts of the ranks there."""
LayoutEntry: TypeAlias = "tuple[Any, Sequence[Any]] | tuple[Any, Sequence[Any], Sequence[Any]]"
GivenLayout: TypeAlias = "Mapping[str, LayoutEntry] | Callable[[str], LayoutEntry | None] | None"
"""The values of `layout=`: name or pattern -> (mesh, placements), or a function of the name.

The mesh is a DeviceMesh, or the global ranks as a tensor or nested lists. A third element gives the
ranks' parts of the sharded dim, if they are not chunks of equal size: for each position on the mesh
axis its (start, length) pairs, in the order in which they lie in the part.
"""


@dataclass(frozen=True, slots=True)
class RankMesh:
    """A grid of ranks.

    Attributes:
        shape: sizes of the axes.
        ranks: global ranks, in row-major order.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The position of a rank; None outside."""
        if rank not in self.ranks:
            return None
        index = self.ranks.index(rank)
        steps = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return tuple(index // step % size for step, size in zip(steps, self.shape, strict=True))


def check_layout(layout: object) -> None:
    """Refuse a value that is not a layout.

    Raises:
        TypeError: neither a dict of (mesh, placements), nor a function, nor None.
        ValueError: parts that overlap, or leave a hole; a mesh with a rank twice.
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
    """Return a layout as plain data.

    Raises:
        TypeError: it is not a layout.
        ValueError: its parts overlap, or leave a hole; a rank is twice in its mesh.
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
    if len({*mesh.ranks}) < len(mesh.ranks):
        raise WrongValue(f"layout= of {name}: a rank is twice in its mesh: {list(mesh.ranks)}")
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


def apply_layout(tensors: Sequence[ModelTensor], layout: GivenLayout, ranks: Ranks) -> None:
    """Make plain tensors parts of a whole, as `layout=` says. Each rank alone.

    Along a sharded dim the parts are taken to be equal in size, or the third element of the layout
    gives their sizes. So one rank's part determines the shape of the whole, until a load knows the
    source's shape (`cut_as_source`), or the ranks know all parts (`join_parts`).

    Args:
        tensors: the tensors of a model, changed in place; DTensors keep their own layout.
        layout: the layout given to this rank.
        ranks: the ranks of the call.

    Raises:
        LoadError: a tensor has no such dim, or another size than its layout says; its mesh lacks
            this rank, or has ranks that do not take part; a function failed. TypeError, ValueError:
            a function returned no layout.
    """
    for tensor, mesh, rules in _chosen(tensors, layout):
        tensor.shape = _whole(tensor.name, tuple(tensor.tensor.shape), mesh, rules, ranks)
        tensor.layout, tensor.coordinate = rules, mesh.coordinate(ranks.rank)


def cut_as_source(tensor: ModelTensor, shape: Shape) -> None:
    """Make a tensor with a `layout=` part of a whole of the source's shape, if torch cuts so.

    45 rows on two ranks are 23 and 22: one rank's part alone does not tell how many there are.
    """
    if _is_given(tensor) and tensor.shape != shape and len(tensor.shape) == len(shape):
        assert tensor.layout is not None
        if local_shape(shape, tensor.layout, tensor.coordinate) == tuple(tensor.tensor.shape):
            tensor.shape = shape
            tensor.__dict__.pop("_cut", None)  # cached for the former shape


def join_parts(ends: Sequence[Sequence[ModelTensor]], ranks: Ranks) -> None:
    """Make the tensors with a `layout=` parts of the whole that all ranks' parts form. All ranks.

    The parts must be cut as torch would cut that whole.

    Args:
        ends: tensors of one model or of several, the same models in the same order on all ranks;
            their shapes are changed in place.
        ranks: the ranks of the call.

    Raises:
        LoadError: torch would cut the parts differently; lists each position's. On all ranks.
    """
    tensors = [(n, tensor) for n, end in enumerate(ends) for tensor in end if _is_given(tensor)]
    own_spots: Spots = {
        (n, t.name, str(t.layout)): {t.coordinate: {tuple(t.tensor.shape)}} for n, t in tensors
    }
    # The parts of all places: nobody else knows what a rank's own layout= says.
    spots = ranks.reduce("comparing layout=", own_spots, _join_spots)

    def join() -> None:
        for number, tensor in tensors:
            tensor.shape = _joined(tensor, spots[number, tensor.name, str(tensor.layout)])
            tensor.__dict__.pop("_cut", None)

    ranks.run("joining the parts of layout=", join)


def _join_spots(spots: Spots, others: Spots) -> Spots:
    """Merge the parts that ranks hold, by tensor and place."""
    joined = {key: dict(by_spot) for key, by_spot in spots.items()}
    for key, by_spot in others.items():
        known = joined.setdefault(key, {})
        for spot, parts in by_spot.items():
            known[spot] = known.get(spot, set()) | parts
    return joined


def _joined(tensor: ModelTensor, spots: Mapping[Any, set[Shape]]) -> Shape:
    """The shape of the whole of which each position in the mesh holds a part.

    Raises:
        LoadError: as for `join_parts`.
    """
    layout = tensor.layout
    assert layout is not None
    if len(spots) < math.prod(layout.mesh_shape):
        return tensor.shape  # a position without a rank is refused when the ranks are compared
    shape = list(tensor.tensor.shape)
    axes = list(zip(layout.placements, layout.mesh_shape, strict=True))
    for dim in range(len(shape)):
        along = [range(n if rule.kind == "shard" and rule.dim == dim else 1) for rule, n in axes]
        shape[dim] = sum(min(spots[spot])[dim] for spot in itertools.product(*along))
    cut = {spot: local_shape(shape, layout, spot) for spot in spots}
    if any(spots[spot] != {part} for spot, part in cut.items()):
        parts = [f"{list(spot)}: {_listed(known)}" for spot, known in sorted(spots.items())]
        cuts = [f"{list(spot)}: {list(part)}" for spot, part in sorted(cut.items())]
        raise LoadError(
            f"{tensor.name}: the ranks at the places of the mesh of its layout= hold "
            f"{', '.join(first_few(parts, SHOWN))}, and torch cuts a whole of {shape} into "
            f"{', '.join(first_few(cuts, SHOWN))}: for another cut give each place's "
            "(start, length) as the third element of the layout"
        )
    return tuple(shape)


def _listed(parts: Iterable[Shape]) -> str:
    return " and ".join(str(list(part)) for part in sorted(parts))


def misfit_of_parts(tensor: ModelTensor, stored: StoredTensor) -> str | None:
    """Explain why a part does not fit the source's tensor; None for tensors of other layouts."""
    layout, part, shape = tensor.layout, list(tensor.tensor.shape), stored.shape
    if layout is None or not _is_given(tensor) or len(part) != len(shape):
        return None
    spots = itertools.product(*map(range, layout.mesh_shape))
    cuts = [f"{list(spot)}: {list(local_shape(shape, layout, spot))}" for spot in spots]
    return (
        f"{tensor.name}: this rank, at {list(tensor.coordinate or ())} of the mesh of its layout=, "
        f"holds {part}, and the source {list(shape)} ({stored.name}), of which the places hold "
        f"{', '.join(first_few(cuts, SHOWN))} as torch cuts it: for another cut give each place's "
        "(start, length) as the third element of the layout"
    )


def _is_given(tensor: ModelTensor) -> bool:
    """Return whether a `layout=` makes a tensor one of equal parts, or of those that torch cuts."""
    layout = tensor.layout
    if layout is None or not layout.is_given:
        return False
    return not any(isinstance(rule, IntervalShard) for rule in layout.placements)


def check_parts(
    layouts: Iterable[tuple[str, Layout | None]], coordinates: Mapping[int, Coordinates]
) -> None:
    """Refuse parts of which the ranks' own `layout=` make no whole.

    Each position in the mesh must belong to the same number of ranks.

    Args:
        layouts: name and layout of each tensor.
        coordinates: coordinates of every rank that has them.

    Raises:
        LoadError: names the tensor, and which ranks have the same part. The same on all ranks.
    """
    for index, (name, layout) in enumerate(layouts):
        if layout is None or not layout.is_given:
            continue
        holders: dict[Any, list[int]] = {}
        for rank, known in coordinates.items():
            holders.setdefault(known.coordinate(index), []).append(rank)
        counts = {len(ranks) for ranks in holders.values()}
        if len(holders) != math.prod(layout.mesh_shape) or len(counts) > 1:
            parts = "; ".join(
                f"{list(coordinate)}: {ranks}" for coordinate, ranks in holders.items()
            )
            raise LoadError(
                f"{name}: the ranks' layout= make no whole: the ranks at each place of its mesh "
                f"of {list(layout.mesh_shape)} are {parts}: give all ranks of a mesh the same list"
            )


def tensors_with_layout(model: nn.Module, layout: GivenLayout, ranks: Ranks) -> list[ModelTensor]:
    """The tensors of a model, as the parts that the layout declares. Each rank alone.

    Raises:
        LoadError, TypeError, ValueError: as for `apply_layout`.
    """
    tensors = find_tensors(model)
    apply_layout(tensors, layout, ranks)
    warn_of_unused(layout, tensors)
    return tensors


def warn_of_unused(layout: GivenLayout, *ends: Sequence[ModelTensor]) -> None:
    """Warn of names and patterns that no tensor has, if this rank has tensors of each end.

    It is not an error, because ranks with other parts of a model may get the same layout.
    """
    if not isinstance(layout, Mapping) or not all(ends):
        return
    find = _finder(layout)
    used = {key for tensors in ends for tensor in tensors for key in find(_names(tensor))}
    if unused := [str(key) for key in layout if key not in used]:
        log.warning("layout= names %s, which no tensor of this rank has", ", ".join(unused[:10]))


def _names(tensor: ModelTensor) -> list[str]:
    """All names of a tensor, also without the `module.` of a wrapper that is not torch's own."""
    return list(dict.fromkeys(name for raw in tensor.flat_names() for name in candidates(raw)))


def _finder(layout: Mapping[str, LayoutEntry]) -> Callable[[Sequence[str]], list[str]]:
    """Make a function from a tensor's names to the keys for it: names first, then patterns."""
    patterns = [
        (key, re.compile(fnmatch.translate(key)).match) for key in layout if {*key} & {*"*?["}
    ]

    def find(names: Sequence[str]) -> list[str]:
        exact = [name for name in names if name in layout]
        return exact + [key for key, fits in patterns if any(map(fits, names))]

    return find


def _answer(function: Callable[[str], Any], name: str) -> Any:
    """The answer of a user's function for a name."""
    try:
        return function(name)
    except Exception as error:
        raise LoadError(f"layout= failed for {name}: {type(error).__name__}: {error}") from error


def _chosen(
    tensors: Sequence[ModelTensor], layout: GivenLayout
) -> Iterator[tuple[ModelTensor, RankMesh, Layout]]:
    """Each plain tensor that has a layout, with its mesh and the layout."""
    if layout is None:
        return
    entries = layout if isinstance(layout, Mapping) else {}
    find = _finder(entries)
    known: dict[int, tuple[Any, RankMesh, Layout]] = {}  # by identity; keeps its object alive
    for tensor in tensors:
        names = _names(tensor)
        if callable(layout):
            answers = (_answer(layout, name) for name in names)
            value: Any = next((answer for answer in answers if answer is not None), None)
        else:
            value = next((entries[key] for key in find(names)), None)
        if value is None or tensor.layout is not None:
            continue
        if id(value) not in known:
            mesh, rules = _checked(tensor.name, value)
            known[id(value)] = value, mesh, Layout(mesh.shape, rules, is_given=True)
        yield tensor, *known[id(value)][1:]


def _whole(name: str, part: Shape, mesh: RankMesh, layout: Layout, ranks: Ranks) -> Shape:
    """The shape of the whole of which this rank holds a part.

    Raises:
        LoadError: as for `apply_layout`.
    """
    coordinate = mesh.coordinate(ranks.rank)
    if coordinate is None:
        raise LoadError(
            f"{name}: rank {ranks.rank} holds {list(part)}, and is not in the mesh of its layout=, "
            f"whose ranks are {list(mesh.ranks)}"
        )
    if absent := sorted({*mesh.ranks}.difference(ranks.ranks)):
        raise LoadError(
            f"{name}: its layout= has rank {absent[0]} in its mesh, which takes no part in the call"
        )
    shape = list(part)
    for size, rule in zip(layout.mesh_shape, layout.placements, strict=True):
        if rule.kind != "shard":
            continue
        if not 0 <= rule.dim < len(part):
            raise LoadError(
                f"{name}: layout= shards dim {rule.dim} of a tensor of {len(part)} dims: count "
                "dims from 0"
            )
        if isinstance(rule, IntervalShard):
            shape[rule.dim] = sum(size for parts in rule.intervals for _, size in parts)
        else:
            shape[rule.dim] *= size
    expected = local_shape(shape, layout, coordinate)
    if part != expected:
        raise LoadError(
            f"{name}: rank {ranks.rank} holds {list(part)}, and its part of {shape} by layout= is "
            f"{list(expected)}: there is a hole or an overlap"
        )
    return tuple(shape)
