"""Loading onto a device: where things land, what they cost, and that nothing lands elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import anyrank
from anyrank.models.memory_meter import rss_anon

pytestmark = pytest.mark.gpu
MIB = 1 << 20
WIDTH = 256 if hasattr(torch, "sim") else 2048


def deep(width: int = WIDTH, layers: int = 8, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(layers)))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    tensors = {k: torch.randn_like(v) for k, v in deep().state_dict().items()}
    save_file(tensors, tmp_path / "w.safetensors")
    return str(tmp_path / "w.safetensors"), tensors


@pytest.fixture
def group(device: torch.device, tmp_path: Path) -> Iterator[None]:
    torch.accelerator.set_device_index(device)
    backend = "nccl" if device.type == "cuda" else "simccl"
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.accelerator.set_device_index(0)


def same(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole.cpu(), tensors[name].to(whole.dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_on_meta_lands_on_the_ranks_device(
    device: torch.device, saved: Any, dtype: torch.dtype
) -> None:
    path, tensors = saved
    with anyrank.meta():
        model = deep(dtype=dtype)
    report = anyrank.load(model, path, verify=True)
    assert {p.device for p in model.parameters()} == {device}
    same(model, tensors)
    assert model(torch.randn(4, WIDTH, device=device, dtype=dtype)).isfinite().all()
    assert report.peak_host_bytes[0] < 256 * MIB
    share = sum(p.numel() * p.element_size() for p in model.parameters())
    assert share <= report.peak_device_bytes[0] <= share + 128 * MIB


def test_a_real_model_is_filled_where_it_is(device: torch.device, saved: Any) -> None:
    path, tensors = saved
    model = deep().to(device)
    pointers = [p.data_ptr() for p in model.parameters()]
    anyrank.load(model, path)
    assert pointers == [p.data_ptr() for p in model.parameters()]
    same(model, tensors)


def test_device_memory_is_the_share_and_a_bounded_buffer(device: torch.device, saved: Any) -> None:
    path, _ = saved
    with anyrank.meta():
        model = deep(dtype=torch.float32)
    torch.accelerator.reset_peak_memory_stats(device)
    before, host = torch.accelerator.memory_allocated(device), rss_anon()
    anyrank.load(model, path)
    share = sum(p.numel() * p.element_size() for p in model.parameters())
    assert torch.accelerator.max_memory_allocated(device) - before <= share + 128 * MIB
    assert rss_anon() - host < 256 * MIB


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("offload", [False, True])
def test_fsdp2_over_the_devices_own_backend(
    device: torch.device, saved: Any, offload: bool
) -> None:
    """The default group has no CPU backend: anyrank brings its own."""
    path, tensors = saved
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    with anyrank.meta():
        model = deep()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    anyrank.load(model, path, verify=True)
    wanted = "cpu" if offload else device.type
    assert {p.to_local().device.type for p in model.parameters()} == {wanted}
    model(torch.randn(4, WIDTH, device=device, dtype=torch.bfloat16)).sum().backward()
    same(model, tensors)


def test_values_from_scratch_are_the_same_twice(device: torch.device) -> None:
    made: list[list[torch.Tensor]] = []
    for _ in range(2):
        torch.manual_seed(5)
        with anyrank.meta():
            model = deep(256, 2)
        anyrank.materialize(model)
        assert all(p.device == device for p in model.parameters())
        made.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_staging_ends_on_the_cpu(device: torch.device, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3, device=device)}, tmp_path / "w.pt")
    with anyrank.cpu_only():
        assert torch.load(tmp_path / "w.pt")["w"].device.type == "cpu"
        assert torch.load(tmp_path / "w.pt", map_location=str(device))["w"].device.type == "cpu"
        assert torch.ones(2, device=device).device.type == "cpu"
        assert getattr(torch.ones(2), device.type)().device.type == "cpu"
        assert getattr(deep(4, 1), device.type)()[0].weight.device.type == "cpu"
    assert torch.load(tmp_path / "w.pt")["w"].device == device
