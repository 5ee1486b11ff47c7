"""Promise 2 on real ranks: each reads its own bytes, and holds its share plus a bounded buffer."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.ranks.sharded_nets import LAYOUTS, Net, assert_same, reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import anyrank
from anyrank.loading.sharing import decision
from anyrank.testing import PeakMemory, run_ranks

MIB = 1 << 20
LAYERS, WIDTH = 12, 1024  # 48 MiB in fp32, 24 MiB in bf16


def deep(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS))
    return nn.Sequential(*layers)


@pytest.fixture
def big(tmp_path: Path) -> str:
    weights = {
        f"{n}.weight": torch.full((WIDTH, WIDTH), n, dtype=torch.bfloat16) for n in range(LAYERS)
    }
    for part in range(3):
        names = [f"{n}.weight" for n in range(LAYERS) if n % 3 == part]
        save_file({name: weights[name] for name in names}, tmp_path / f"{part}.safetensors")
    return str(tmp_path)


def job_memory(folder: str, dtype: torch.dtype, strategy: str, shard: bool) -> tuple[int, int, Any]:
    with anyrank.meta():
        model = deep(dtype)
    if shard:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    source = [f"{folder}/{part}.safetensors" for part in range(3)]
    anyrank.load(nn.Linear(1, 1), {"weight": torch.ones(1, 1), "bias": torch.ones(1)})  # warm up
    with PeakMemory() as memory:
        report = anyrank.load(model, source, strategy=strategy)
    share = 0
    for n, parameter in enumerate(model.parameters()):
        local: Any = parameter.detach()
        local = local.to_local() if shard else local
        assert bool((local == n).all())
        share += local.numel() * local.element_size()
    return share, memory.peak_bytes, report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("strategy", "shard", "world"),
    [
        ("own", True, 2),
        ("own", True, 4),
        ("own", False, 2),
        ("stripe", False, 3),
        ("scatter", True, 4),
    ],
)
def test_a_rank_holds_its_share_and_a_bounded_buffer(
    big: str, dtype: torch.dtype, strategy: str, shard: bool, world: int
) -> None:
    for share, peak, report in run_ranks(world, job_memory, big, dtype, strategy, shard):
        extra = peak - share
        assert share == LAYERS * WIDTH * WIDTH * dtype.itemsize // (world if shard else 1)
        assert extra < 16 * MIB, f"{extra / MIB:.1f} MiB beyond the share of {share / MIB:.1f} MiB"
        wanted = 2 * LAYERS * WIDTH * WIDTH  # in the file's bf16
        if strategy == "own":
            assert report.bytes_read == [wanted // (world if shard else 1)] * world
            assert report.bytes_sent == [0] * world
        elif strategy == "stripe":  # replicas read disjoint parts and exchange them
            assert sum(report.bytes_read) == wanted
            assert max(report.bytes_read) < 1.1 * wanted / world
            assert sum(report.bytes_sent) == wanted * (world - 1)
        else:  # one reads everything and sends each of the others its rows only
            assert report.bytes_read == [wanted, 0, 0, 0]
            assert report.bytes_sent == [wanted - wanted // world, 0, 0, 0]


def job_columns(folder: str, strategy: Any, dims: tuple[int, ...]) -> Any:
    """Layers in shards of their columns, and of their rows and columns where `dims` are two."""
    world = torch.distributed.get_world_size()
    sizes = (world,) if len(dims) == 1 else (world // 2, 2)
    mesh = init_device_mesh("cpu", sizes)
    with anyrank.meta():
        model = deep(torch.bfloat16)
    for layer in model:
        assert isinstance(layer, nn.Linear)
        held = distribute_tensor(layer.weight, mesh, [Shard(dim) for dim in dims])
        layer.weight = nn.Parameter(held)
    source = [f"{folder}/columns.safetensors"]
    plan = anyrank.plan(model, source, strategy=strategy)
    anyrank.load(nn.Linear(1, 1), {"weight": torch.ones(1, 1), "bias": torch.ones(1)})  # warm up
    with PeakMemory() as memory:
        report = anyrank.load(model, source, strategy=strategy)
    share = 0
    for n, parameter in enumerate(model.parameters()):
        local: Any = parameter.detach()
        shards: Any = distribute_tensor(columns(n), mesh, [Shard(dim) for dim in dims])
        assert torch.equal(local.to_local(), shards.to_local())
        share += local.to_local().nbytes
    return plan, report, memory.peak_bytes - share


def columns(n: int) -> torch.Tensor:
    return (
        (torch.arange(WIDTH * WIDTH, dtype=torch.int32) * (n + 7))
        .to(torch.bfloat16)
        .view(WIDTH, WIDTH)
    )


@pytest.mark.parametrize("strategy", ["stripe", "scatter"])
@pytest.mark.parametrize("dims", [(1,), (0, 1)], ids=str)
def test_columns_are_read_once_and_exchanged(
    tmp_path: Path, strategy: str, dims: tuple[int, ...]
) -> None:
    wanted = 2 * LAYERS * WIDTH * WIDTH
    save_file({f"{n}.weight": columns(n) for n in range(LAYERS)}, tmp_path / "columns.safetensors")
    for plan, report, extra in run_ranks(4, job_columns, str(tmp_path), strategy, dims):
        assert sum(report.bytes_read) == sum(plan.read_bytes) == wanted
        if strategy == "stripe":
            assert max(report.bytes_read) < 1.1 * wanted / 4
            others = 3 if dims == (1,) else 1  # of a row's holders
            assert sum(report.bytes_sent) == wanted * others // (others + 1)
        else:
            assert report.bytes_sent == [wanted * 3 // 4, 0, 0, 0]
        assert sum(plan.sent_bytes) == sum(report.bytes_sent)
        assert extra < 16 * MIB, f"{extra / MIB:.1f} MiB beyond the share"


def job_columns_on_machines(folder: str, machines: int) -> Any:
    """As `job_columns` with "auto", on so many machines by their names, whatever the bytes."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"machine{rank * machines // world}")
        patch.setattr(decision, "MIN_STRIPE_BYTES", 1)
        return job_columns(folder, "auto", (1,))


@pytest.mark.parametrize("machines", [1, 2])
def test_columns_are_read_once_between_machines(tmp_path: Path, machines: int) -> None:
    wanted = 2 * LAYERS * WIDTH * WIDTH
    save_file({f"{n}.weight": columns(n) for n in range(LAYERS)}, tmp_path / "columns.safetensors")
    for plan, report, _ in run_ranks(4, job_columns_on_machines, str(tmp_path), machines):
        assert report.strategy == plan.strategy == ("stripe" if machines > 1 else "own")
        assert sum(report.bytes_read) == sum(plan.read_bytes) == wanted
        assert machines == 1 or "each machine would otherwise read" in report.reason


def job_table_on_one_rank(layout: str) -> Any:
    first = torch.distributed.get_rank() == 0
    with anyrank.meta():
        net = Net()
    net = LAYOUTS[layout](net)
    report = anyrank.load(net, dict(reference().state_dict()) if first else None)
    assert_same(net, LAYOUTS[layout](reference()))
    return report


@pytest.mark.parametrize(
    ("world", "layout"), [(2, "plain"), (3, "fsdp"), (4, "fsdp_tp"), (4, "hsdp")]
)
def test_a_table_on_one_rank_reaches_all(world: int, layout: str) -> None:
    for report in run_ranks(world, job_table_on_one_rank, layout):
        assert report.strategy == "scatter"
        assert (
            f"{world - 1} of {world} ranks cannot see the source, so rank 0 reads it"
            in report.reason
        )
        assert report.bytes_read[1:] == [0] * (world - 1)


def job_subgroup(path: str) -> Any:
    rank = torch.distributed.get_rank()
    group = torch.distributed.new_group([1, 2])
    if rank == 0:
        return None
    net = Net()
    report = anyrank.load(net, path, process_group=group, strategy="stripe")
    assert torch.equal(net.embed.weight, reference().embed.weight)
    return report


def test_a_group_of_some_ranks(tmp_path: Path) -> None:
    tensors = {k: v.clone() for k, v in reference().state_dict().items()}
    save_file(tensors, tmp_path / "w.safetensors")
    results = run_ranks(3, job_subgroup, str(tmp_path / "w.safetensors"))
    assert results[0] is None
    assert results[1] == results[2]
    assert len(results[1].bytes_read) == 2
