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

PLANNED = [True, False, True, False, True, True, True, True]
SIZES = {"width": 7, "hidden": 9}


def test_layouts_that_change_between_two_calls_are_seen() -> None:
    assert run_ranks(2, change_layouts, timeout=60) == [PLANNED] * 2


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
    name, old = next(iter(src.named_parameters()))
    owner, _, attribute = name.rpartition(".")

    def put(whole: torch.Tensor, mesh: Any, placements: Any) -> None:
        new = torch.nn.Parameter(distribute_tensor(whole, mesh, placements))
        setattr(src.get_submodule(owner), attribute, new)
        sync()

    held: Any = old
    put(wanted[name].double(), held.device_mesh, held.placements)
    for ranks in ([[0], [1]], [[0, 1]]):  # the same placements on another mesh
        put(wanted[name], DeviceMesh("cpu", ranks), [Shard(0), Replicate()])
    return planned
