"""Shares of DTensors in one file per rank, which are joined by their placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from anyrank.errors import LoadError, UnsafeFile
from anyrank.tensors.layout import Layout, Placement, local_pieces, local_shape
from anyrank.tensors.spec import Chunk, StoredTensor


@dataclass(frozen=True)
class StoredShard:
    """A rank's share of a tensor.

    Attributes:
        local: the stored share.
        shape: shape of the whole tensor.
        layout: its layout on the ranks.
        coordinate: the rank's coordinate in the layout's mesh.
    """

    local: StoredTensor
    shape: tuple[int, ...]
    layout: Layout
    coordinate: tuple[int, ...]


def shard_of(local: StoredTensor, spec: Any, path: str) -> StoredShard:
    """Make a rank's share from the pickled spec of a DTensor.

    Raises:
        UnsafeFile: the spec was not written by torch, or contradicts the share.
        LoadError: a placement without values, or a mesh of unknown shape.
    """
    try:
        shape = tuple(int(n) for n in spec["tensor_meta"].arguments[0])
        mesh_shape, coordinate = _mesh(spec["mesh"].fields)
        placements = tuple(_placement(placement, path) for placement in spec["placements"])
        layout = Layout(mesh_shape, placements)
        sound = len(mesh_shape) == len(placements) == len(coordinate)
        sound = sound and all(0 <= c < n for c, n in zip(coordinate, mesh_shape, strict=True))
        sound = sound and all(0 <= p.dim < max(1, len(shape)) for p in placements)
        sound = sound and local.shape == local_shape(shape, layout, coordinate)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise UnsafeFile(
            f"{path}: {local.name}: is not a DTensor that torch saved ({error})"
        ) from error
    if not sound:
        raise UnsafeFile(
            f"{path}: {local.name}: its share has shape {list(local.shape)}, which does not match "
            f"coordinate {list(coordinate)} in a mesh of shape {list(mesh_shape)} for a tensor of "
            f"shape {list(shape)}"
        )
    return StoredShard(local, shape, layout, coordinate)


def _mesh(fields: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a pickled mesh, and this rank's coordinate in it."""
    coordinate = tuple(int(n) for n in fields["_coordinate_on_dim"])
    if "_layout" in fields:
        axes = fields["_layout"].fields.get("axes")
        if axes is not None:
            return tuple(math.prod(axis.fields["shape"]) for axis in axes), coordinate
        shape = fields["_layout"].fields["shape"]  # torch 2.9 to 2.12
        return (tuple(shape) if isinstance(shape, tuple) else (int(shape),)), coordinate
    mesh: Any = fields.get("mesh", fields.get("_mesh"))
    return tuple(mesh.shape), coordinate


def _placement(placement: Any, path: str) -> Placement:
    kind = type(placement).__name__
    if kind == "Replicate":
        return Placement("replicate")
    if kind not in ("Shard", "_StridedShard"):
        raise LoadError(f"{path}: a tensor has the placement {kind}, which does not hold values")
    fields: Any = placement.fields
    fields = fields[1] if isinstance(fields, tuple) else fields
    return Placement("shard", int(fields["dim"]), int(fields.get("split_factor", 1)))


def whole_tensors(trees: Sequence[Any], path: str) -> dict[str, StoredTensor]:
    """Join the tensors in the tables of all ranks by key; shares become whole tensors.

    Values that are not shares are taken from the first rank.

    Raises:
        LoadError: the shares do not cover a tensor.
    """
    parts_by_key: dict[str, list[StoredTensor | StoredShard]] = {}
    for tree in trees:
        for key, value in cast("dict[Any, Any]", tree).items() if isinstance(tree, dict) else ():
            if isinstance(value, (StoredTensor, StoredShard)):
                parts_by_key.setdefault(str(key), []).append(value)
    tensors: dict[str, StoredTensor] = {}
    for key, parts in parts_by_key.items():
        first, shards = parts[0], [part for part in parts if isinstance(part, StoredShard)]
        tensors[key] = first if isinstance(first, StoredTensor) else _whole(shards, path)
    return tensors


def _whole(shards: Sequence[StoredShard], path: str) -> StoredTensor:
    first = shards[0]
    chunks: dict[tuple[int, ...], Chunk] = {}
    for shard in shards:
        if (shard.shape, shard.local.dtype) != (first.shape, first.local.dtype):
            raise LoadError(
                f"{path}: {first.local.name} is {first.local.dtype}{list(first.shape)} on one rank "
                f"and {shard.local.dtype}{list(shard.shape)} on another, so the files are from "
                "different saves"
            )
        for piece in local_pieces(shard.shape, shard.layout, shard.coordinate):
            inner = shard.local.chunks[0]
            start = sum(n * stride for n, stride in zip(piece.local, inner.strides, strict=True))
            offset = inner.offset + start * shard.local.dtype.itemsize
            chunks.setdefault(piece.box.offsets, replace(inner, box=piece.box, offset=offset))
    numel = sum(chunk.box.numel for chunk in chunks.values())
    if numel != math.prod(first.shape):
        raise LoadError(
            f"{path}: {first.local.name}: the files of all ranks have {numel} of its "
            f"{math.prod(first.shape)} elements. A file is missing, or is from a different save."
        )
    return StoredTensor(first.local.name, first.shape, first.local.dtype, tuple(chunks.values()))
