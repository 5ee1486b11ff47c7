"""`sync` from every layout into every other, on the same ranks, on others, and on some of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.sharded_nets import Block, Net, locals_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.loading.sharing import move
from anyrank.testing import run_ranks

SIZES = {"width": 7, "hidden": 9}


Meshes = dict[Any, Any]  # a mesh takes 50 ms: one for each layout of a job


def mesh_of(kind: str, ranks: list[int], known: Meshes) -> Any:
    """The mesh of a layout, or DDP's group. All ranks."""
    key = (kind if kind in ("ddp", "hsdp", "fsdp_tp") else "", tuple(ranks))
    if key in known:
        return known[key]
    size = len(ranks)
    shape, names = {"hsdp": ((2, size // 2), ("rep", "shard"))}.get(kind, ((size,), ("all",)))
    if kind == "fsdp_tp":
        shape, names = (size // 2, 2), ("dp", "tp")
    if kind == "ddp":
        known[key] = dist.new_group(ranks)
    else:
        known[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=names)
    return known[key]


def build(kind: str, ranks: list[int], seed: int, known: Meshes, meta: bool = False) -> Any:
    """A model on some ranks, in some layout; None elsewhere. All ranks."""
    mesh = mesh_of(kind, ranks, known)
    if dist.get_rank() not in ranks:
        return None
    torch.manual_seed(seed)
    if meta:
        with anyrank.meta():
            net: Any = Net(**SIZES)
    else:
        net = Net(**SIZES)
        with torch.no_grad():
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.normal_()
    if kind == "ddp":
        return DistributedDataParallel(net, process_group=mesh)
    if kind == "compiled":
        return torch.compile(net, backend="eager")
    if kind in ("tp", "fsdp_tp"):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        inner = mesh["tp"] if kind == "fsdp_tp" else mesh
        for block in net.blocks:
            parallelize_module(block, inner, plan, src_data_rank=None)
    if kind in ("fsdp", "hsdp", "fsdp_tp", "offload"):
        options: Any = {"mesh": mesh["dp"] if kind == "fsdp_tp" else mesh}
        if kind == "offload":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in net.blocks:
            fully_shard(block, **options)
        fully_shard(net, **options)
    return net


def bare(net: Any) -> dict[str, torch.Tensor]:
    return {
        k.removeprefix("module.").removeprefix("_orig_mod."): v for k, v in locals_of(net).items()
    }


def job_pairs(cases: list[tuple[str, list[int], str, list[int]]]) -> None:
    known: Meshes = {}
    for number, (src_kind, src_ranks, dst_kind, dst_ranks) in enumerate(cases):
        meta = number % 2 == 0
        case = (cases[number], meta)
        src = build(src_kind, src_ranks, 1, known)
        dst = build(dst_kind, dst_ranks, 2, known, meta and dst_kind not in ("ddp", "compiled"))
        expected = build(dst_kind, dst_ranks, 1, known)
        report = anyrank.sync(dst, src)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, report)
        assert all(each == report for each in everyone), case
        assert sum(report.bytes_sent) == sum(report.bytes_received), case
        if dst is None:
            continue
        mine, wanted = bare(dst), bare(expected)
        for name, tensor in wanted.items():
            if name.endswith("table"):  # not persistent, and so not src's to give
                continue
            assert torch.equal(mine[name], tensor), (case, name)
        inner = getattr(dst, "module", getattr(dst, "_orig_mod", dst))
        assert inner.head.weight is inner.embed.weight, case


ALL = [0, 1, 2, 3]
CASES = [
    ("fsdp", [0, 1], "tp", [2, 3]),
    ("fsdp", ALL, "tp", ALL),
    ("tp", [1, 2, 3], "fsdp", ALL),
    ("fsdp_tp", ALL, "plain", [0]),
    ("plain", [3], "fsdp_tp", ALL),
    ("hsdp", ALL, "tp", [1, 2]),
    ("fsdp", [0, 1, 2], "hsdp", ALL),
    ("ddp", [0, 1], "fsdp", [1, 2, 3]),
    ("offload", [2, 3], "ddp", [0, 1]),
    ("tp", [0, 1], "offload", ALL),
    ("compiled", ALL, "fsdp", [0, 2]),
    ("fsdp", ALL, "compiled", [3, 1]),
]


def test_sync_equals_torchs_own_sharding_of_the_same_values() -> None:
    run_ranks(4, job_pairs, CASES)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sync_on_fewer_ranks(world: int) -> None:
    ranks = list(range(world))
    cases = [
        ("plain", ranks, "fsdp", ranks),
        ("fsdp", ranks, "tp", ranks),
        ("tp", ranks, "ddp", [0]),
    ]
    run_ranks(world, job_pairs, cases)


def test_sync_without_a_process_group() -> None:
    dst, src = Block(4, 6), Block(4, 6)
    weights = anyrank.Sync(dst, src)
    report = weights()
    assert torch.equal(dst.up.weight, src.up.weight)
    assert report.bytes_sent == [0]
    assert report.is_planned
    assert not weights().is_planned


def job_small_window(seed: int) -> bool:
    """Many tensors of other strides at the other end, through a window of a few messages."""
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.randint(1, 30, (60, 2), generator=generator).tolist()
    src = {f"t{n}": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}
    dst = {name: torch.zeros(tensor.shape[::-1]).t() for name, tensor in src.items()}
    usual, move.MESSAGE_BYTES = move.MESSAGE_BYTES, 512
    try:
        is_source = dist.get_rank() == 0
        anyrank.sync(None if is_source else dst, src if is_source else None, verify=True)
    finally:
        move.MESSAGE_BYTES = usual
    return is_source or all(torch.equal(dst[name], tensor) for name, tensor in src.items())


@pytest.mark.parametrize("seed", range(2))
def test_messages_go_round_a_small_window(seed: int) -> None:
    environ = {"ANYRANK_BUFFER_BYTES": "4096"}
    assert run_ranks(2, job_small_window, seed, env=environ) == [True, True]
