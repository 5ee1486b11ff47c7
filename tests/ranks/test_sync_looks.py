"""A second `sync` on ranks sees that a model was sharded, gathered or given another mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.models import Net, locals_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import anyrank
from anyrank.testing import run_ranks

SIZES = {"width": 7, "hidden": 9}


def test_layouts_that_change_between_two_calls_are_seen() -> None:
    assert run_ranks(2, change_layouts, timeout=60) == [[True, False, True, False, True, True, True]] * 2


def change_layouts() -> list[bool]:
    torch.manual_seed(dist.get_rank())
    src, dst = Net(**SIZES), Net(**SIZES)
    for tensor in (*src.parameters(), *src.buffers()):
        dist.broadcast(tensor.detach(), 0)
    wanted = {name: p.detach().clone() for name, p in src.named_parameters()}
    planned: list[bool] = []

    def sync() -> None:
        with torch.no_grad():
            for local in locals_of(dst).values():
                local.zero_()
        planned.append(anyrank.sync(dst, src).is_planned)
        for name, parameter in dst.named_parameters():
            held: Any = parameter.detach()
            whole = held.full_tensor() if hasattr(held, "full_tensor") else held
            assert torch.equal(whole, wanted[name]), name

    sync()
    sync()
    fully_shard(dst)
    sync()
    unit: Any = dst
    unit.unshard()
    sync()  # what is gathered is no other layout: the optimizer has the shares
    fully_shard(src)
    sync()
    dst.double()  # casts from float, so the values are the same
    sync()
    mesh = DeviceMesh("cpu", [[0], [1]])
    name, old = next(iter(src.named_parameters()))
    module = src.get_submodule(name.rpartition(".")[0])
    new = distribute_tensor(wanted[name], mesh, [Shard(0), Replicate()])
    setattr(module, name.rpartition(".")[2], torch.nn.Parameter(new))
    assert old is not new
    sync()
    return planned
