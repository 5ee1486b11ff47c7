"""Ranks that call a sharded module tile by tile run its collectives tile by tile: the number of
tiles has to be the same on all of them, or they wait for one another for ever.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from anyrank.errors import RankError


def agree_on_tiles(module: nn.Module, number: int, label: str) -> None:
    """Compare the number of tiles on the ranks over which a module's parameters are sharded now.

    Without such parameters nothing is sent. All ranks of their mesh must call, every time: a rank
    that left out the comparison, as its own number is the one it was, would leave the others to
    wait in theirs. Numbers travel between hosts where the mesh's groups have a backend for the CPU,
    as those of `init_process_group()` without an argument have; else the host waits for the device.

    Raises:
        RankError: the numbers differ.
    """
    meshes: dict[DeviceMesh, None] = {}
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            meshes[parameter.device_mesh] = None
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
