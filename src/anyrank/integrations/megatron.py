"""What Megatron-core says of its parameters, as `layout=`.

Tested with megatron-core 0.16, of which it imports nothing: it reads the attributes that its layers
set on parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from anyrank.versions import warn_if_untested

__all__ = ["layout"]

warn_if_untested("megatron-core")


def layout(model: nn.Module, mesh: Any) -> dict[str, Any]:
    """`layout=` of a Megatron model: what each tensor-parallel parameter is a part of.

    Column-, row- and vocabulary-parallel layers are known by `tensor_model_parallel`,
    `partition_dim` and `partition_stride`; the first layer of a gated MLP, which holds its part of
    the gate above its part of the up projection, also where its stride does not say so. All other
    parameters are whole on each rank. The whole vocabulary is Megatron's padded one.

    Args:
        model: on this rank, wrapped by Megatron's DistributedDataParallel and Float16Module or not.
        mesh: the ranks of its tensor-parallel group: a DeviceMesh of one axis, or global ranks.

    Returns:
        Name -> layout, for `sync`, `load`, `plan` and `convert`.

    Raises:
        ValueError: experts that differ between ranks under one name; a mesh of several axes.

    Example::

        from torch.distributed.tensor import Shard

        model = torch.nn.Linear(4, 6)  # ColumnParallelLinear sets these on its weight
        model.weight.tensor_model_parallel = True
        model.weight.partition_dim, model.weight.partition_stride = 0, 1
        layout = anyrank.integrations.megatron.layout(model, [0])
        assert layout == {"weight": ([0], [Shard(0)])}
        anyrank.convert(model, "weights", layout=layout)
    """
    grid = torch.as_tensor(getattr(mesh, "mesh", mesh), device="cpu")
    if grid.ndim != 1:
        raise ValueError(f"mesh has {grid.ndim} axes: give the tensor-parallel ranks alone")
    ranks = [int(rank) for rank in grid.tolist()]
    gated = _gated(model)
    layouts: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        marked: Any = parameter
        if getattr(marked, "allreduce", True) is False:
            raise ValueError(
                f"{name}: belongs to an expert that this rank has alone (expert parallelism), and "
                "other ranks have others of this name: sync or save these by themselves"
            )
        if not getattr(marked, "tensor_model_parallel", False):
            continue
        dim, stride = int(marked.partition_dim), int(marked.partition_stride)
        if id(parameter) in gated:
            stride = 2
        layouts[name] = (ranks, [Shard(dim)])
        if stride > 1:
            intervals = _strided(parameter.shape[dim], stride, len(ranks))
            layouts[name] = (ranks, [Shard(dim)], intervals)
    return layouts


def _gated(model: nn.Module) -> set[int]:
    """Ids of the parameters that hold a part of the gate above a part of the up projection."""
    return {
        id(parameter)
        for module in model.modules()
        if getattr(getattr(module, "config", None), "gated_linear_unit", False)
        for child, layer in module.named_children()
        if child == "linear_fc1"
        for parameter in layer.parameters(recurse=False)
    }


def _strided(length: int, stride: int, size: int) -> list[list[tuple[int, int]]]:
    """What each rank holds of a dim of `stride` parts, of each of which it has its chunk."""
    rows = length // stride
    return [
        [(part * rows * size + rank * rows, rows) for part in range(stride)] for rank in range(size)
    ]
