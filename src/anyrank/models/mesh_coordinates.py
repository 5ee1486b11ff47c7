"""The coordinates of every rank in the mesh of each tensor, which tell what other ranks hold.

A DTensor's mesh has the coordinates of all its ranks, so nothing is sent. A mesh of some of the
ranks, such as FSDP2's with tensor parallelism, is a slice of a mesh of all of them, which torch
knows too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor, coordinates_of
from anyrank.world.alike import digest_of
from anyrank.world.ranks import Ranks

Coordinate: TypeAlias = "tuple[int, ...] | None"
UNKNOWN = "unknown"  # the digest if this rank does not know the coordinates of the others

ByRank: TypeAlias = "tuple[Coordinate, ...]"  # in the order of the ranks


def digest_meshes(tensors: Sequence[ShardedTensor], ranks: Ranks) -> str:
    """Return a digest of the coordinates that this rank knows; UNKNOWN if it does not know them
    all.
    """
    known = _by_mesh(tensors, ranks)
    return UNKNOWN if known is None else digest_of(known)


def coordinates_of_all(
    tensors: Sequence[ShardedTensor], ranks: Ranks, *, are_alike: bool
) -> Mapping[int, Coordinates]:
    """Return the coordinates of every rank, by global rank. Collective.

    Args:
        tensors: tensors of this rank.
        ranks: ranks of the call.
        are_alike: whether all ranks have the same `digest_meshes`.
    """
    known = _by_mesh(tensors, ranks) if are_alike else None
    if known is None:
        # With layout=, or meshes that are not a slice of a mesh of all ranks, each rank knows only
        # its own coordinates.
        gathered = ranks.gather("comparing the meshes", coordinates_of(tensors))
        return dict(zip(ranks.ranks, gathered, strict=True))
    meshes, which = known
    return {
        rank: Coordinates(tuple(mesh[position] for mesh in meshes), which)
        for position, rank in enumerate(ranks.ranks)
    }


def _by_mesh(
    tensors: Sequence[ShardedTensor], ranks: Ranks
) -> tuple[tuple[ByRank, ...], tuple[int, ...]] | None:
    """Return the coordinates of all ranks in each mesh of the tensors, and which mesh each tensor
    has; None for coordinates that this rank does not know.
    """
    nowhere: ByRank = (None,) * ranks.size
    by_id: dict[int, ByRank | None] = {}
    numbers: dict[ByRank, int] = {}
    which: list[int] = []
    for tensor in tensors:
        known: ByRank | None = nowhere
        if tensor.layout is not None:
            mesh: Any = getattr(tensor.tensor, "device_mesh", None)
            if id(mesh) not in by_id:
                by_id[id(mesh)] = None if mesh is None else _in_mesh(mesh, ranks)
            known = by_id[id(mesh)]
            if known is None or known[ranks.index] != tensor.coordinate:
                return None
        which.append(numbers.setdefault(known, len(numbers)))
    return tuple(numbers), tuple(which)


def _in_mesh(mesh: Any, ranks: Ranks) -> ByRank | None:
    """Return the coordinates of all ranks in a mesh, or in the corresponding other meshes."""
    root = (
        mesh if mesh.mesh.numel() == ranks.size else getattr(mesh, "_get_root_mesh", lambda: mesh)()
    )
    coordinates = _coordinates_in(root)
    if {*coordinates} != {*ranks.ranks}:
        return None
    if root is not mesh:
        names, all_names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
        if len(names) != mesh.ndim or not {*names} <= {*all_names}:
            return None
        axes = [all_names.index(name) for name in names]
        coordinates = {
            rank: tuple(known[axis] for axis in axes) for rank, known in coordinates.items()
        }
        if any(coordinates[rank] != known for rank, known in _coordinates_in(mesh).items()):
            return None
    return tuple(coordinates[rank] for rank in ranks.ranks)


def _coordinates_in(mesh: Any) -> dict[int, tuple[int, ...]]:
    """Return the coordinate of each rank of a mesh."""
    ranks = mesh.mesh.flatten().tolist()
    indices = (mesh.mesh >= 0).nonzero().tolist()
    return {rank: tuple(index) for rank, index in zip(ranks, indices, strict=True)}
