"""Ranks that call a sharded module tile by tile run its collectives tile by tile: the number of
tiles has to be the same on all of them, or they wait for one another for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from anyrank.errors import RankError


def check_tile_counts(module: nn.Module, number: int, label: str) -> None:
    """Compare the number of tiles on the ranks over which a module's parameters are sharded now.

    Without such parameters nothing is sent. All ranks of their mesh must call, every time: a rank
    that left out the comparison, as its own number is the one it was, would leave the others to
    wait in theirs. Numbers travel between hosts where the mesh's groups have a backend for the CPU,
    as those of `init_process_group()` without an argument have; else the host waits for the device.

    Raises:
        RankError: the numbers differ.
    """
    _compare(_meshes(module.parameters()), number, label)


class Agreed:
    """A function that compares the number of tiles at its first call, as `check_tile_counts` does.

    What a function calls is not known before: it may find a module in a closure, a global or an
    argument, and leave most of it alone. So the first tile, which every rank has, is watched for
    modules that are sharded when they are called, and compared right after it.
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

        def look(module: nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_compiling():  # a unit of FSDP2 gathers for all that is in it
                meshes.update(_meshes(module.parameters(recurse=isinstance(module, FSDPModule))))

        handle = register_module_forward_pre_hook(look)
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
        most, minus_least = bounds.tolist()
        least = -minus_least
        if most != least:
            raise RankError(
                f"{label}: this rank has {number} tiles, and the ranks that share its sharded "
                f"parameters between {least} and {most}: each tile gathers the parameters, so the "
                "numbers must be equal. Put the tiles inside the sharded unit (tile_ of the same "
                "module, or fully_shard of the module that calls it), or pad the input"
            )
