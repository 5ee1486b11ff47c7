"""A rank's part of a DTensor, from its placements, its mesh and the process groups."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from anyrank.errors import LoadError
from anyrank.tensors.layout import GIVEN_BOXES, Layout, Placement
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.wrapped import rewrapped, without_bytes


def as_sharded(name: str, tensor: torch.Tensor) -> ShardedTensor:
    """Return a tensor as this rank holds it.

    Raises:
        LoadError: a tensor subclass or placement whose bytes cannot be located.
    """
    layout, coordinate = layout_of(tensor, name)
    return ShardedTensor(name, tensor, global_shape(tensor), layout, coordinate)


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the whole tensor of which it is a part."""
    return tuple(getattr(tensor, "global_shape", tensor.shape))


Lay: TypeAlias = "tuple[Layout | None, tuple[int, ...] | None]"


def layout_of(tensor: torch.Tensor, name: str, known: dict[Any, Lay] | None = None) -> Lay:
    """Return a DTensor's layout and this rank's coordinate in its mesh; (None, None) if it is
    plain.

    Args:
        tensor: a plain tensor or a DTensor.
        name: for errors.
        known: cache of layouts by mesh and placements, to which the layout is added.

    Raises:
        LoadError: a tensor subclass, placement or mesh whose bytes cannot be located.
    """
    if what := without_bytes(tensor):
        kind, way_out = what
        raise LoadError(f"{name}: is a {kind}, whose bytes are not its values; {way_out}")
    placements: Any = getattr(tensor, "placements", None)
    if placements is None:
        return (GIVEN_BOXES, _given_boxes(tensor, name)) if _is_part(tensor) else (None, None)
    mesh: Any = tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    # The types count, because a strided shard may compare equal to a plain one.
    key = (id(mesh), placements, *map(type, placements))
    lay = None if known is None else known.get(key)
    if lay is None:
        lay = _lay_of(mesh, placements, name)
        if known is not None:
            known[key] = lay
    return lay


def _lay_of(mesh: Any, placements: Any, name: str) -> Lay:
    """Return the layout and coordinate for a mesh and placements; see `layout_of`."""
    coordinate = mesh.get_coordinate()
    rules = tuple(placement_of(placement, name) for placement in placements)
    places = _places_in_groups(mesh)
    for axis, rule in enumerate(rules if places else ()):
        if rule.kind == "shard" and places[axis] != coordinate[axis]:
            raise LoadError(
                f"{name}: this rank has position {coordinate[axis]} on axis {axis} of its mesh, "
                f"but position {places[axis]} in that axis's process group, so torch uses two "
                f"different orders of the shards. Build the mesh {mesh.mesh.tolist()} with "
                "ascending ranks along each axis."
            )
    return _layout(tuple(mesh.shape), rules), None if coordinate is None else tuple(coordinate)


def _is_part(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor declares which boxes of a global tensor it holds.

    This is torch's `CheckpointableTensor` protocol of four attributes, from torch 2.15 on.
    """
    return hasattr(tensor, "global_shape") and hasattr(tensor, "global_offsets")


def _given_boxes(tensor: Any, name: str) -> tuple[int, ...]:
    """Return the coordinate of a tensor that declares its boxes; see `GIVEN_BOXES`.

    Raises:
        LoadError: a box is outside the global or the local tensor.
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
                f"{name}: declares a box of sizes {list(sizes)} at {list(start)} of the global "
                f"shape {list(whole)} and at {list(own_start)} of the local shape {list(local)}, "
                "but it is not inside both. Correct its global_offsets, local_offsets and "
                "local_sizes."
            )
        coordinate += [*start, *own_start, *sizes]
    return tuple(map(int, coordinate))


def _places_in_groups(mesh: Any) -> tuple[int, ...]:
    """Return this rank's position in the process group of each mesh axis, which FSDP2 uses.

    Collectives use these positions too.

    Empty outside the mesh, and without process groups.
    """
    if mesh.get_coordinate() is None or not dist.is_initialized():
        return ()
    return tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))


@lru_cache(maxsize=256)
def _layout(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Layout:
    """Return the same object for equal layouts; a model has few layouts and many tensors."""
    return Layout(tuple(int(size) for size in mesh_shape), placements)


def dtensor_like(
    like: Any, local: torch.Tensor, *, placements: Any, shape: torch.Size, stride: tuple[int, ...]
) -> Any:
    """Make a DTensor around `local` on the mesh of the DTensor `like`, whatever device `local` is
    on.

    `from_local` would move a tensor that is not on the mesh's device, such as a parameter that
    FSDP2 keeps on the CPU. It does not move a meta tensor, which is then replaced by `local` with
    torch's protocol of wrapper classes. If `like` holds its values in a wrapper, such as for
    float8, so does the new tensor.
    """
    mesh = like.device_mesh
    local = rewrapped(like.to_local(), local)
    kind: Any = type(like)  # from its class, because an import statement here takes 0.1 ms
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
    """Return a torch placement as plain data.

    Raises:
        LoadError: it is partial, or has no dim.
    """
    if placement.is_replicate():
        return Placement("replicate")
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or dim is None:
        raise LoadError(f"{name}: has placement {placement}, which does not hold values")
    return Placement("shard", int(dim), int(getattr(placement, "split_factor", 1)))
