"""`tensors.json`: the tensors of a step of a run, and their layouts on the ranks that saved it.

Its size grows with the number of tensors and of ranks, but not with their product: the index of
each rank's file (`rank_index`) says which bytes hold a part of a tensor, and the mesh says which
ranks have a part.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from anyrank.files.json_codec import reading_record
from anyrank.files.manifest import RankFiles
from anyrank.tensors.box import Box
from anyrank.tensors.layout import IntervalShard, Layout, Placement
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spec import dtype_name
from anyrank.tensors.spread import Coordinate, Spread
from anyrank.tensors.writes import WritePlan

INDEX = "tensors.json"


class IndexedTensor(NamedTuple):
    """A tensor of a step.

    Attributes:
        name, shape, dtype: its name, shape and dtype.
        where: its layout on the ranks that saved it; or the indices of the ranks whose files have
            parts of it, if it is not on a mesh.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: Spread | tuple[int, ...]

    def ranks_with(self, box: Box) -> Iterator[int]:
        """Yield the ranks whose files may hold elements of a box; other files hold none."""
        if isinstance(self.where, tuple):
            return iter(self.where)
        return iter(self.where.meeting(self.shape, box))

    @property
    def ranks(self) -> Iterator[int]:
        """Yield the ranks whose files may hold elements of the tensor."""
        return self.ranks_with(Box.whole(self.shape))


@dataclass(frozen=True)
class StepIndex:
    """The tensors of a step, in the order in which the ranks' indexes number them.

    Attributes:
        tensors: the tensors, each once.
        aliases: other names of a tied tensor -> the name under which it is saved.
        owners: ranks with tensors that no other rank has, which only their indexes list.
    """

    tensors: Sequence[IndexedTensor]
    aliases: Mapping[str, str]
    owners: Sequence[int] = ()

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The position of the tensor of each name or alias."""
        numbers = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        return numbers | {alias: numbers[name] for alias, name in self.aliases.items()}

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        spreads: dict[int, Spread] = {}
        for tensor in self.tensors:
            if isinstance(tensor.where, Spread):
                spreads.setdefault(id(tensor.where), tensor.where)
        positions = {key: position for position, key in enumerate(spreads)}
        meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        rows: list[tuple[int, list[Any]]] = []
        for spread in spreads.values():
            layout = spread.layout
            assert layout is not None
            mesh = (
                layout.mesh_shape,
                tuple(_row_major(layout, known) for known in spread.coordinates),
            )
            placements = [*map(_placement_to_json, layout.placements)]
            rows.append((meshes.setdefault(mesh, len(meshes)), placements))
        tensors = [
            (
                tensor.name,
                dtype_name(tensor.dtype),
                tensor.shape,
                positions[id(tensor.where)] if isinstance(tensor.where, Spread) else tensor.where,
            )
            for tensor in self.tensors
        ]
        index = {
            "tensors": tensors,
            "aliases": dict(self.aliases),
            "owners": self.owners,
            "layouts": [{"mesh": mesh, "placements": placements} for mesh, placements in rows],
            "meshes": [{"shape": shape, "places": places} for shape, places in meshes],
        }
        return (json.dumps(index, separators=(",", ":")) + "\n").encode()


def index_of(
    tensors: Sequence[ShardedTensor],
    plan: WritePlan,
    identical: Sequence[ShardedTensor] = (),
    aliases: Mapping[str, str] | None = None,
) -> StepIndex:
    """Make the index of a step.

    Args:
        tensors: tensors of the plan.
        plan: plan of who writes what of them.
        identical: further tensors, which are identical on every rank; only the first writes them.
        aliases: other name of a tied tensor -> the name under which it is saved.
    """
    rows: list[IndexedTensor] = []
    for number, tensor in enumerate(tensors):
        spread = plan.tensors[number].spread
        is_on_mesh = spread.axes != () and 0 not in tensor.shape
        where = spread if is_on_mesh else tuple(plan.writers(number))
        rows.append(IndexedTensor(tensor.name, tensor.shape, tensor.dtype, where))
    rows += [IndexedTensor(t.name, t.shape, t.dtype, (0,)) for t in identical]
    return StepIndex(rows, aliases or {})


def parse(data: bytes, where: str, ranks: Sequence[RankFiles]) -> StepIndex:
    """Read the index of a step.

    Args:
        data: bytes of the file.
        where: path of the file.
        ranks: files of the ranks that saved the step.

    Raises:
        CorruptCheckpoint: a save does not write such an index, or it lists more than the files can
            hold.
    """
    with reading_record(where):
        index = json.loads(data)
        meshes = [_mesh(entry, len(ranks)) for entry in index["meshes"]]
        spreads = [_spread(entry, meshes) for entry in index["layouts"]]
        most_bytes = sum(files.size for files in ranks)
        tensors = [_tensor(row, spreads, ranks, most_bytes) for row in index["tensors"]]
        names = {tensor.name for tensor in tensors}
        aliases = {str(alias): str(name) for alias, name in index["aliases"].items()}
        if len(names) < len(tensors) or not names >= {*aliases.values()} or names & aliases.keys():
            raise ValueError("a name is duplicated, or does not belong to a tensor")
        owners = whole_numbers("owners", index["owners"])
        if any(rank >= len(ranks) for rank in owners):
            raise ValueError("the owners include a rank that did not save")
        return StepIndex(tensors, aliases, owners)


def _row_major(layout: Layout, coordinate: Coordinate | None) -> int:
    """Return the row-major position of a coordinate in a mesh; -1 outside."""
    if coordinate is None:
        return -1
    position = 0
    for size, number in zip(layout.mesh_shape, coordinate, strict=True):
        position = position * size + number
    return position


def _placement_to_json(placement: Placement) -> list[Any]:
    if placement.kind == "replicate":
        return ["replicate"]
    if isinstance(placement, IntervalShard):
        return ["intervals", placement.dim, placement.intervals]
    return ["shard", placement.dim, placement.split_factor]


def _mesh(entry: Mapping[str, Any], size: int) -> tuple[tuple[int, ...], list[Coordinate | None]]:
    """Read the shape of a mesh of some of `size` ranks, and each rank's coordinate in it."""
    shape, places = whole_numbers("a mesh", entry["shape"]), entry["places"]
    if (
        len(places) != size
        or not 0 < math.prod(shape) <= size
        or len(shape) > size.bit_length() + 8
    ):
        raise ValueError(f"mesh shape {shape!r:.80} does not match the ranks that saved")
    coordinates: list[Coordinate | None] = [*itertools.product(*map(range, shape)), None]
    if not all(type(n) is int and -1 <= n < len(coordinates) - 1 for n in places):
        raise ValueError("a rank's coordinate is outside its mesh")
    return shape, [coordinates[n] for n in places]


def _spread(
    entry: Mapping[str, Any], meshes: Sequence[tuple[tuple[int, ...], list[Coordinate | None]]]
) -> Spread:
    (number,) = whole_numbers("a layout", [entry["mesh"]])
    shape, coordinates = meshes[number]
    placements = tuple(
        _placement(row, size, len(coordinates))
        for row, size in zip(entry["placements"], shape, strict=True)
    )
    if not any(placement.kind == "shard" for placement in placements):
        raise ValueError("a layout on a mesh does not shard any dim")
    return Spread(Layout(shape, placements), coordinates)


def _placement(row: Sequence[Any], size: int, num_ranks: int) -> Placement:
    """Read the placement of a tensor on a mesh axis of this size."""
    kind, *values = row
    if kind == "replicate" and not values:
        return Placement("replicate")
    if kind == "intervals":
        (dim,), parts = whole_numbers(kind, values[:1]), values[1]
        intervals = tuple(
            tuple((start, length) for start, length in (whole_numbers(kind, i) for i in part))
            for part in parts
        )
        if len(intervals) != size:
            raise ValueError(
                "the number of parts of a layout does not match the size of its mesh axis"
            )
        return IntervalShard("shard", dim, intervals=intervals)
    dim, factor = whole_numbers(kind, values)
    if kind != "shard" or not 0 < factor <= num_ranks:
        raise ValueError(f"invalid placement {row!r:.80}")
    return Placement("shard", dim, factor)


def _tensor(
    row: Sequence[Any],
    spreads: Sequence[Spread],
    files: Sequence[RankFiles],
    most_bytes: int,
) -> IndexedTensor:
    """Read a tensor; check that it is not larger than the files of the ranks that have it."""
    name, dtype, shape, where = row
    kind, sizes = getattr(torch, dtype), whole_numbers(name, shape)
    if type(name) is not str or not isinstance(kind, torch.dtype):
        raise ValueError(f"invalid name {name!r:.80} or dtype {dtype!r:.40}")
    if isinstance(where, list):
        ranks = whole_numbers(name, where)
        most_bytes = sum(files[rank].size for rank in {*ranks})
        lies: Spread | tuple[int, ...] = ranks
    else:
        (number,) = whole_numbers(name, [where])
        lies = spreads[number]
        layout = lies.layout
        assert layout is not None
        if any(p.dim >= len(sizes) for p in layout.placements if p.kind == "shard"):
            raise ValueError(f"{name}: its layout shards a dim that it does not have")
    if math.prod(sizes) * kind.itemsize > most_bytes:
        raise ValueError(f"{name}: is larger than the files that hold it")
    return IndexedTensor(name, sizes, kind, lies)


def whole_numbers(what: object, numbers: Sequence[Any]) -> tuple[int, ...]:
    """Return whole numbers of at least 0; raise ValueError for anything else."""
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{what}: {numbers!r:.80} is not a list of sizes")
    return tuple(numbers)
