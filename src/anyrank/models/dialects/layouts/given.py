"""`layout=`: plain tensors that are a rank's part of a global tensor.

vLLM and hand-written tensor parallelism have such tensors.
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

from anyrank.errors import LoadError, WrongType, WrongValue
from anyrank.models.dtensors import placement_of
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.layout import IntervalShard, Layout, Placement, local_shape
from anyrank.tensors.names import candidates
from anyrank.tensors.sharded_tensor import Coordinates
from anyrank.tensors.spec import StoredTensor
from anyrank.wording import count, first_few
from anyrank.world.ranks import Ranks

SHOWN = 8  # mesh coordinates that a message lists
log = logging.getLogger("anyrank.load")

Shape: TypeAlias = "tuple[int, ...]"
Spots: TypeAlias = "dict[Any, dict[Any, set[Shape]]]"
"""Tensor -> mesh coordinate -> shapes of the parts of the ranks at it."""
LayoutEntry: TypeAlias = "tuple[Any, Sequence[Any]] | tuple[Any, Sequence[Any], Sequence[Any]]"
GivenLayout: TypeAlias = "Mapping[str, LayoutEntry] | Callable[[str], LayoutEntry | None] | None"
"""The types of `layout=`: name or pattern -> (mesh, placements), or a function of the name.

The mesh is a DeviceMesh, or the global ranks as a tensor or nested lists. A third element lists the
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
        """Return the mesh coordinate of a rank; None outside the mesh."""
        if rank not in self.ranks:
            return None
        index = self.ranks.index(rank)
        steps = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return tuple(index // step % size for step, size in zip(steps, self.shape, strict=True))


def check_layout(layout: object) -> None:
    """Check that a value is a layout.

    Raises:
        TypeError: it is neither a dict of (mesh, placements), nor a function, nor None.
        ValueError: parts overlap or leave a gap, or a mesh has duplicate ranks.
    """
    if layout is None or callable(layout):
        return
    if not isinstance(layout, Mapping):
        raise TypeError(
            "layout=: expected a dict of name or pattern to (mesh, placements), or a function of "
            f"the name, got {type(layout).__name__}"
        )
    for name, value in layout.items():
        _checked(str(name), value)


def _checked(name: str, value: Any) -> tuple[RankMesh, tuple[Placement, ...]]:
    """Return a layout as plain data.

    Raises:
        TypeError: it is not a layout.
        ValueError: its parts overlap or leave a gap, or its mesh has duplicate ranks.
        LoadError: a placement does not hold values.
    """
    mesh: RankMesh | None = None
    placements: Any = None
    if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) in (2, 3):
        mesh, placements = _mesh_of(value[0]), value[1]
    if mesh is None or not isinstance(placements, (tuple, list)):
        raise WrongType(f"layout= of {name}: expected (mesh, placements), got {value!r}")
    rules = tuple(placement_of(placement, name) for placement in cast("Sequence[Any]", placements))
    if len(mesh.shape) != len(rules):
        raise WrongType(
            f"layout= of {name}: expected {count(len(mesh.shape), 'placement')}, one per mesh "
            f"axis, got {len(rules)}"
        )
    if len({*mesh.ranks}) < len(mesh.ranks):
        raise WrongValue(f"layout= of {name}: its mesh has duplicate ranks, {list(mesh.ranks)}")
    return mesh, rules if len(value) == 2 else _with_intervals(name, mesh, rules, value[2])


def _mesh_of(mesh: Any) -> RankMesh | None:
    """Return the ranks of a DeviceMesh, a tensor or nested lists; None for anything else."""
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
            f"layout= of {name}: expected as third element, for each position on the only mesh "
            f"axis that shards, a list of (start, length), got {intervals!r}"
        )
    end = 0
    for start, size in sorted(interval for part in parts for interval in part if interval[1]):
        if start != end or size < 0:
            raise WrongValue(
                f"layout= of {name}: {'a gap' if start > end else 'an overlap'} before element "
                f"{start} of the sharded dim. Each element must belong to exactly one position on "
                "the mesh axis."
            )
        end = start + size
    return tuple(
        IntervalShard("shard", rule.dim, intervals=parts) if axis in axes else rule
        for axis, rule in enumerate(rules)
    )


def apply_layout(tensors: Sequence[ModelTensor], layout: GivenLayout, ranks: Ranks) -> None:
    """Make plain tensors parts of global tensors, by `layout=`. Does not communicate.

    Along a sharded dim, the parts are assumed to have the same size, or the third element of the
    layout tells their sizes. So one rank's part determines the global shape, until a load knows the
    source's shape (`cut_as_source`), or the ranks know all parts (`join_parts`).

    Args:
        tensors: the tensors of a model, changed in place; DTensors keep their own layout.
        layout: the layout that this rank passed.
        ranks: the ranks of the call.

    Raises:
        LoadError: a tensor does not have the dim, or its size does not match its layout; its mesh
            lacks this rank, or has ranks that do not take part; or a function failed. TypeError,
            ValueError: a function returned an invalid layout.
    """
    for tensor, mesh, rules in _chosen(tensors, layout):
        tensor.shape = _whole(tensor.name, tuple(tensor.tensor.shape), mesh, rules, ranks)
        tensor.layout, tensor.coordinate = rules, mesh.coordinate(ranks.rank)


def cut_as_source(tensor: ModelTensor, shape: Shape) -> None:
    """Use the source's shape as the global shape of a tensor with a `layout=`, if torch's split
    fits.

    45 rows on two ranks are 23 and 22, so one rank's part does not tell the total.
    """
    if _is_given(tensor) and tensor.shape != shape and len(tensor.shape) == len(shape):
        assert tensor.layout is not None
        if local_shape(shape, tensor.layout, tensor.coordinate) == tuple(tensor.tensor.shape):
            tensor.shape = shape
            tensor.__dict__.pop("_cut", None)  # it was cached for the previous shape


def join_parts(ends: Sequence[Sequence[ModelTensor]], ranks: Ranks) -> None:
    """Find the global shapes of tensors with a `layout=` from the parts of all ranks. Collective.

    The parts must be those of torch's split of the global tensor.

    Args:
        ends: tensors of one or several models, which must be the same in the same order on every
            rank; their shapes are changed in place.
        ranks: the ranks of the call.

    Raises:
        LoadError: torch would split the tensor differently; the error lists the parts. Raised on
            every rank.
    """
    tensors = [(n, tensor) for n, end in enumerate(ends) for tensor in end if _is_given(tensor)]
    own_spots: Spots = {
        (n, t.name, str(t.layout)): {t.coordinate: {tuple(t.tensor.shape)}} for n, t in tensors
    }
    # The parts at all coordinates, because each rank knows only its own layout=.
    spots = ranks.reduce("comparing layout=", own_spots, _join_spots)

    def join() -> None:
        for number, tensor in tensors:
            tensor.shape = _joined(tensor, spots[number, tensor.name, str(tensor.layout)])
            tensor.__dict__.pop("_cut", None)

    ranks.run("joining the parts of layout=", join)


def _join_spots(spots: Spots, others: Spots) -> Spots:
    """Merge the parts that ranks hold, by tensor and coordinate."""
    joined = {key: dict(by_spot) for key, by_spot in spots.items()}
    for key, by_spot in others.items():
        known = joined.setdefault(key, {})
        for spot, parts in by_spot.items():
            known[spot] = known.get(spot, set()) | parts
    return joined


def _joined(tensor: ModelTensor, spots: Mapping[Any, set[Shape]]) -> Shape:
    """Return the global shape of a tensor from the parts at each mesh coordinate.

    Raises:
        LoadError: as for `join_parts`.
    """
    layout = tensor.layout
    assert layout is not None
    if len(spots) < math.prod(layout.mesh_shape):
        return tensor.shape  # a coordinate without a rank is an error when the ranks are compared
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
            f"{tensor.name}: at the mesh coordinates of its layout=, the ranks hold "
            f"{', '.join(first_few(parts, SHOWN))}, but an even split of shape {shape} gives "
            f"{', '.join(first_few(cuts, SHOWN))}. If the split is uneven, pass the (start, "
            "length) of each position as the third element of the layout."
        )
    return tuple(shape)


def _listed(parts: Iterable[Shape]) -> str:
    return " and ".join(str(list(part)) for part in sorted(parts))


def misfit_of_parts(tensor: ModelTensor, stored: StoredTensor) -> str | None:
    """Return the error text for a part that does not match the source; None for other layouts."""
    layout, part, shape = tensor.layout, list(tensor.tensor.shape), stored.shape
    if layout is None or not _is_given(tensor) or len(part) != len(shape):
        return None
    spots = itertools.product(*map(range, layout.mesh_shape))
    cuts = [f"{list(spot)}: {list(local_shape(shape, layout, spot))}" for spot in spots]
    return (
        f"{tensor.name}: this rank, at mesh coordinate {list(tensor.coordinate or ())} of its "
        f"layout=, holds {part}, but the source has {list(shape)} ({stored.name}), and an even "
        f"split gives {', '.join(first_few(cuts, SHOWN))}. If the split is uneven, pass the "
        "(start, length) of each position as the third element of the layout."
    )


def _is_given(tensor: ModelTensor) -> bool:
    """Return whether a tensor has a `layout=` with an even split, and not with explicit parts."""
    layout = tensor.layout
    if layout is None or not layout.is_given:
        return False
    return not any(isinstance(rule, IntervalShard) for rule in layout.placements)


def check_parts(
    layouts: Iterable[tuple[str, Layout | None]], coordinates: Mapping[int, Coordinates]
) -> None:
    """Check that the parts that the ranks declare by `layout=` add up to one tensor.

    Each mesh coordinate must have the same number of ranks.

    Args:
        layouts: name and layout of each tensor.
        coordinates: coordinates of every rank that has the tensors.

    Raises:
        LoadError: they do not; the error names the tensor, and the ranks with the same part. The
            same on every rank.
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
                f"{name}: the parts that the ranks declare by layout= do not add up to one tensor. "
                f"The ranks at the coordinates of its mesh of shape {list(layout.mesh_shape)} are "
                f"{parts}. Pass the same list of ranks on every rank of a mesh."
            )


def warn_about_unused_layout(layout: GivenLayout, *ends: Sequence[ModelTensor]) -> None:
    """Warn about names and patterns that match no tensor, if this rank has tensors of each end.

    It is not an error, because ranks with different parts of a model may pass the same layout.
    """
    if not isinstance(layout, Mapping) or not all(ends):
        return
    find = _finder(layout)
    used = {key for tensors in ends for tensor in tensors for key in find(_names(tensor))}
    if unused := [str(key) for key in layout if key not in used]:
        log.warning(
            "layout= names %s, which matches no tensor of this rank", ", ".join(unused[:10])
        )


def _names(tensor: ModelTensor) -> list[str]:
    """Return all names of a tensor, also without the `module.` of wrappers other than torch's."""
    return list(dict.fromkeys(name for raw in tensor.flat_names() for name in candidates(raw)))


def _finder(layout: Mapping[str, LayoutEntry]) -> Callable[[Sequence[str]], list[str]]:
    """Return a function that maps a tensor's names to the keys that match: names, then patterns."""
    patterns = [
        (key, re.compile(fnmatch.translate(key)).match) for key in layout if {*key} & {*"*?["}
    ]

    def find(names: Sequence[str]) -> list[str]:
        exact = [name for name in names if name in layout]
        return exact + [key for key, fits in patterns if any(map(fits, names))]

    return find


def _answer(function: Callable[[str], Any], name: str) -> Any:
    """Return the result of a user's function for a name."""
    try:
        return function(name)
    except Exception as error:
        raise LoadError(f"layout= failed for {name}: {type(error).__name__}: {error}") from error


def _chosen(
    tensors: Sequence[ModelTensor], layout: GivenLayout
) -> Iterator[tuple[ModelTensor, RankMesh, Layout]]:
    """Yield each plain tensor that has a layout, with its mesh and the layout."""
    if layout is None:
        return
    entries = layout if isinstance(layout, Mapping) else {}
    find = _finder(entries)
    known: dict[int, tuple[Any, RankMesh, Layout]] = {}  # by identity; keeps the object alive
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
    """Return the global shape of a tensor of which this rank holds a part.

    Raises:
        LoadError: as for `apply_layout`.
    """
    coordinate = mesh.coordinate(ranks.rank)
    if coordinate is None:
        raise LoadError(
            f"{name}: rank {ranks.rank} holds {list(part)}, but is not in the mesh of its layout=, "
            f"whose ranks are {list(mesh.ranks)}"
        )
    if absent := sorted({*mesh.ranks}.difference(ranks.ranks)):
        raise LoadError(
            f"{name}: the mesh of its layout= has rank {absent[0]}, which does not take part in "
            "the call"
        )
    shape = list(part)
    for size, rule in zip(layout.mesh_shape, layout.placements, strict=True):
        if rule.kind != "shard":
            continue
        if not 0 <= rule.dim < len(part):
            raise LoadError(
                f"{name}: layout= shards dim {rule.dim}, but the tensor has "
                f"{count(len(part), 'dim')}; dims are counted from 0"
            )
        if isinstance(rule, IntervalShard):
            shape[rule.dim] = sum(size for parts in rule.intervals for _, size in parts)
        else:
            shape[rule.dim] *= size
    expected = local_shape(shape, layout, coordinate)
    if part != expected:
        raise LoadError(
            f"{name}: rank {ranks.rank} holds {list(part)}, but its part of {shape} according to "
            f"layout= is {list(expected)}, so there is a gap or an overlap"
        )
    return tuple(shape)
