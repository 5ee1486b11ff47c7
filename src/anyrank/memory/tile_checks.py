"""What a tiled call checks: equal tile counts on sharded ranks, independent rows, side results.

Ranks that call a sharded module tile by tile run its collectives tile by tile: with different
numbers of tiles they would wait for each other forever.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from anyrank.errors import RankError
from anyrank.memory.ambient_state import AmbientState
from anyrank.memory.arguments import Call, flatten
from anyrank.memory.captured import INTERNAL, MAX_OBJECTS, Captured
from anyrank.memory.tiling_dims import Tiling, dims_of_leaves, nonnegative_dim
from anyrank.memory.uncompiled import uncompiled
from anyrank.tensors.walk import walk


def check_tile_counts(module: nn.Module, number: int, label: str) -> None:
    """Compare the number of tiles on the ranks over which a module's parameters are sharded now.

    Without such parameters nothing is sent. All ranks of their mesh must call, every time: a rank
    that skipped the comparison because its own number did not change would let the others wait.
    The comparison runs on the CPU where the mesh's groups have a CPU backend, as those of
    `init_process_group()` without arguments have; else it synchronizes with the device.

    Raises:
        RankError: the numbers differ.
    """
    _compare(_meshes(module.parameters()), number, label)


class TileCountCheck:
    """A function that compares the number of tiles at its first call, as `check_tile_counts` does.

    Which modules a function calls is not known before: it may use a part of a module from a
    closure, a global or an argument. So the first tile, which every rank has, records the modules
    that are sharded when they are called, and the numbers are compared after it.
    """

    def __init__(self, fn: Callable[..., Any], number: int, label: str) -> None:
        self.fn = fn
        self.number = number
        self.label = label
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.called = alone or torch.compiler.is_compiling()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.called:
            return self.fn(*args, **kwargs)
        self.called = True
        meshes: dict[DeviceMesh, None] = {}

        def record_meshes(module: nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_compiling():  # an FSDP2 unit gathers for all its submodules
                meshes.update(_meshes(module.parameters(recurse=isinstance(module, FSDPModule))))

        handle = register_module_forward_pre_hook(record_meshes)
        try:
            result = self.fn(*args, **kwargs)
        finally:
            handle.remove()
        _compare(meshes, self.number, self.label)
        return result


def _meshes(parameters: Iterable[torch.Tensor]) -> dict[DeviceMesh, None]:
    return {p.device_mesh: None for p in parameters if isinstance(p, DTensor)}


def _compare(meshes: Iterable[DeviceMesh], number: int, label: str) -> None:
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

    Restores the random state. Runs one untiled call and two tiles.

    Raises:
        ValueError: the results differ, or the function draws random numbers.
    """
    devices = {leaf.device for leaf in call.leaves if isinstance(leaf, torch.Tensor)}
    generators = Captured(call.fn, call.leaves).generators
    with torch.no_grad(), AmbientState.now(devices, generators).restored():
        k = 1
        probe = flatten(call.run(tiling.tile(k, call.leaves)))[0]
        result = call.run(call.leaves)
        again = flatten(call.run(tiling.tile(k, call.leaves)))[0]
        whole = flatten(result)[0]
        dims = dims_of_leaves(out_dims, result, label)
    for n, tensor in enumerate(whole):
        if not isinstance(tensor, torch.Tensor):
            continue
        dim = nonnegative_dim(dims[n], tensor, f"{label}: a result")
        if not same(probe[n], again[n], dim):
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
        if not same(probe[n], rows, dim):
            raise ValueError(
                f"{label}: is not independent along the tiled dim: rows {tiling.starts[k]} to "
                f"{tiling.starts[k] + tiling.length(k) - 1}, computed alone, differ from those of "
                f"the whole ({_distance(probe[n], rows)}); tile another dim, or another function"
            )


def same(a: torch.Tensor, b: torch.Tensor, dim: int) -> bool:
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
    a, b = (each.to(wide).movedim(dim, 0).flatten(1) for each in (a, b))
    odd = ~(a.isfinite() & b.isfinite())  # infinities and nan must be in the same places
    if not torch.equal(a[odd].nan_to_num(), b[odd].nan_to_num()):
        return False
    a, b = a.masked_fill(odd, 0), b.masked_fill(odd, 0)
    size = b.norm(dim=1)
    # A row that cancels to about 0 has the absolute error of the other rows.
    scale = torch.maximum(size, size.square().mean().sqrt())
    return bool(((a - b).norm(dim=1) <= tolerance * scale).all())


def _distance(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} for {list(b.shape)}"
    return f"by up to {(a.double() - b.double()).abs().max().item():.3g}"


class SideResults:
    """Tensors that a tile leaves outside of its results, where only the last tile's would be kept.

    Records the attributes of some modules, and what transformers recorded, before a tile runs.
    """

    @uncompiled
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.attributes = dict(attributes_of(modules))
        self.recorded = recorded()

    @uncompiled
    def check(self, label: str) -> None:
        """After a tile.

        Raises:
            ValueError: the tile left a tensor with a gradient in an attribute, or transformers
                recorded an output inside it.
        """
        for name, tensor in attributes_of(self.modules):
            if self.attributes.get(name) is not tensor:
                raise ValueError(
                    f"{label}: each tile leaves a tensor with a gradient in the attribute {name}, "
                    "where only the last tile's is kept: return the tensor as a result, tile an "
                    "inner module that leaves none (the experts, not their router), or use "
                    "recompute"
                )
        for key, number in recorded().items():
            if self.recorded.get(key, number) != number:
                raise ValueError(
                    f"{label}: transformers records {key} inside it, and would have an entry "
                    "for each tile: tile an inner module that is not recorded (the experts, not "
                    f"their router), or call the model with output_{key}=False"
                )


def attributes_of(modules: Sequence[nn.Module]) -> Generator[tuple[str, torch.Tensor]]:
    """Names and tensors of the modules' plain attributes, for tensors that have a graph."""
    seen, containers = set[nn.Module](), set[int]()
    for top in modules:
        for name, module in walk(top, "", seen):
            own = [name for name, _ in module.named_parameters(recurse=False)]
            for key, value in vars(module).items():
                # torch's hooks for weight norm, spectral norm and pruning compute `weight` of the
                # parameters `weight_g`, `weight_orig`: these do not depend on the tile.
                if key in INTERNAL or any(p.startswith(f"{key}_") for p in own):
                    continue
                for part, tensor in _tensors_in(value, containers):
                    yield f"{name}.{key}{part}".removeprefix("."), tensor


def _tensors_in(value: Any, seen: set[int]) -> Generator[tuple[str, torch.Tensor]]:
    """The tensors with a graph in an attribute: itself, or those in containers within each other.

    Args:
        value: the attribute.
        seen: ids of containers to leave out; those that are found are added.
    """
    waiting = deque([("", value)])
    left = MAX_OBJECTS
    while waiting and left:
        name, each = waiting.popleft()
        if isinstance(each, torch.Tensor):
            if each.grad_fn is not None:
                yield name, each
        elif id(each) not in seen and _is_container(each):
            seen.add(id(each))
            left -= 1
            waiting += [
                (f"{name}{part}", item)
                for part, item in _items(each)
                if isinstance(item, torch.Tensor) or _is_container(item)
            ]


def _is_container(value: Any) -> bool:
    is_plain = isinstance(value, dict | list | tuple | deque | SimpleNamespace)
    return is_plain or (is_dataclass(value) and not isinstance(value, type))


def _items(container: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(container, dict):
        table = cast("dict[Any, Any]", container)
        return ((f"[{key!r}]", item) for key, item in table.items())
    if isinstance(container, list | tuple | deque):
        return ((f"[{n}]", item) for n, item in enumerate(cast("Iterable[Any]", container)))
    slots = not hasattr(container, "__dict__")
    names = [f.name for f in fields(container)] if slots else list(vars(container))
    return ((f".{name}", getattr(container, name, None)) for name in names)


def recorded() -> dict[str, int]:
    """How many outputs of modules transformers has recorded in the current call, by kind."""
    module = sys.modules.get("transformers.utils.output_capturing")
    active: Any = getattr(module, "_active_collector", None)
    lists: dict[str, Any] = (active.get() if active is not None else None) or {}
    return {key: len(each) for key, each in lists.items() if isinstance(each, list)}
