"""Checks of a tiled call: equal tile counts on sharded ranks, independent rows, side results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from anyrank.errors import RankError
from anyrank.memory.ambient import Ambient
from anyrank.memory.call import Call, find_module, flatten
from anyrank.memory.tiling_dims import Tiling, expand_dims, nonnegative_dim
from anyrank.tensors.walk import walk


def called_units(fn: Callable[..., Any]) -> list[nn.Module]:
    """The units of FSDP2 that a module calls. The unit whose own forward is tiled is gathered
    already. A function that is no module is not looked into.
    """
    module = find_module(fn)
    if module is None:
        return []
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    return [unit for unit in units if unit is not module or fn is module]


def check_tile_counts(fn: Callable[..., Any], number: int, label: str) -> None:
    """Compare the number of tiles on the ranks over which FSDP2 shards units that `fn` calls: each
    tile gathers them, and with different numbers the ranks would wait for each other forever.

    All ranks of the units' mesh must call, every time: a rank that skipped the comparison because
    its own number did not change would let the others wait. The comparison runs on the CPU where
    the mesh's groups have a CPU backend, as those of `init_process_group()` without arguments have;
    else it synchronizes with the device.

    Raises:
        RankError: the numbers differ.
    """
    if not dist.is_initialized() or torch.compiler.is_compiling():
        return
    meshes = {
        parameter.device_mesh: None
        for unit in called_units(fn)
        for parameter in unit.parameters()
        if isinstance(parameter, DTensor)
    }
    for mesh in meshes:
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        on_hosts = all("cpu:" in dist.get_backend_config(group) for group in groups)
        bounds = torch.tensor([number, -number], device="cpu" if on_hosts else mesh.device_type)
        for group in groups:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        largest, minus_smallest = bounds.tolist()
        smallest = -minus_smallest
        if largest != smallest:
            raise RankError(
                f"{label}: this rank has {number} tiles, and the ranks that share its sharded "
                f"parameters have between {smallest} and {largest}: each tile gathers the "
                "parameters, so the numbers must be equal. Put the tiles inside the sharded unit "
                "(tile_ of the same module, or fully_shard of the module that calls it), or pad "
                "the input"
            )


def check_independence(call: Call, tiling: Tiling, out_dims: Any, label: str) -> None:
    """Compare the second tile with its rows of an untiled call, without gradients (`check=True`).

    Restores torch's random state. Runs one untiled call and two tiles.

    Raises:
        ValueError: the results differ, or the function draws random numbers.
    """
    devices = {leaf.device for leaf in call.leaves if isinstance(leaf, torch.Tensor)}
    ambient = Ambient(devices, ())
    before = ambient.random()
    k = 1
    try:
        with torch.no_grad():
            probe = flatten(call.run(tiling.tile(k, call.leaves)))[0]
            result = call.run(call.leaves)
            again = flatten(call.run(tiling.tile(k, call.leaves)))[0]
    finally:
        ambient.put(before)
    whole = flatten(result)[0]
    dims = expand_dims(out_dims, result, label)
    for n, tensor in enumerate(whole):
        if not isinstance(tensor, torch.Tensor):
            continue
        dim = nonnegative_dim(dims[n], tensor, f"{label}: a result")
        if not _equal_up_to_rounding(probe[n], again[n], dim):
            raise ValueError(
                f"{label}: gives a different result for the same tile each time, so check=True "
                "cannot compare: turn dropout off for the check, or leave out check=True"
            )
        if tensor.shape[dim] != tiling.size:
            raise ValueError(
                f"{label}: a result has shape {list(tensor.shape)}, expected {tiling.size} rows "
                f"in dim {dim} (out_dims)"
            )
        rows = tensor.narrow(dim, tiling.starts[k], tiling.length(k))
        if not _equal_up_to_rounding(probe[n], rows, dim):
            raise ValueError(
                f"{label}: is not independent along the tiled dim: rows {tiling.starts[k]} to "
                f"{tiling.starts[k] + tiling.length(k) - 1}, computed alone, differ from those of "
                f"the whole ({_distance(probe[n], rows)}); tile another dim, or another function"
            )


def _equal_up_to_rounding(a: torch.Tensor, b: torch.Tensor, dim: int) -> bool:
    """Equal up to the order of sums, row by row along a dim, so that a few wrong rows (at the edges
    of a tile) are not averaged out by many right rows.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    # Narrow dtypes are summed in float32 and rounded at the end; wide ones in their own precision.
    tolerance = (4 if a.dtype.itemsize <= 2 else 32) * torch.finfo(a.dtype).eps
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = (tensor.to(wide).movedim(dim, 0).flatten(1) for tensor in (a, b))
    nonfinite = ~(a.isfinite() & b.isfinite())  # infinities and nan must be in the same places
    if not torch.equal(a[nonfinite].nan_to_num(), b[nonfinite].nan_to_num()):
        return False
    a, b = a.masked_fill(nonfinite, 0), b.masked_fill(nonfinite, 0)
    size = b.norm(dim=1)
    # A row that cancels to about 0 has the absolute error of the other rows.
    scale = torch.maximum(size, size.square().mean().sqrt())
    return bool(((a - b).norm(dim=1) <= tolerance * scale).all())


def _distance(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} for {list(b.shape)}"
    return f"by up to {(a.double() - b.double()).abs().max().item():.3g}"


def check_side_results(modules: Iterable[nn.Module], label: str) -> None:
    """After the first tile: refuse a function that leaves tensors outside of its results.

    Raises:
        ValueError: an attribute of a module has a tensor with a graph. The last tile's alone would
            be kept.
    """
    seen = set[nn.Module]()
    for top in modules:
        for name, module in walk(top, "", seen):
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    _check_attribute(module, name, key, label)


def _check_attribute(module: nn.Module, name: str, key: str, label: str) -> None:
    # Torch's hooks for weight norm, spectral norm and pruning compute `weight` of the parameters
    # `weight_g`, `weight_orig`: these do not depend on the tile.
    if any(p.startswith(f"{key}_") for p, _ in module.named_parameters(recurse=False)):
        return
    attribute = f"{name}.{key}".removeprefix(".")
    raise ValueError(
        f"{label}: each tile leaves a tensor with a gradient in the attribute {attribute}, where "
        "only the last tile's is kept: return the tensor as a result, tile an inner module that "
        "leaves none (the experts, not their router), or use recompute"
    )
