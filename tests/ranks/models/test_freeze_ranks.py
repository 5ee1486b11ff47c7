"""Frozen parts under DDP and FSDP2: nothing of them is sent, and the rest trains as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.nets import whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.models.dialects.frozen.freeze import check_frozen
from anyrank.models.frozen_parts import frozen_parts
from anyrank.testing import run_ranks

SOURCE = "weights/vae.safetensors"


class AutoEncoder(nn.Module):
    """The part that is frozen; 70 KB of parameters, 64 KB of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Dropout(0.5))
        self.project = nn.Linear(256, 8)
        self.register_buffer("table", torch.linspace(0, 1, 8192))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.encoder(x)) + self.table[:8]


class Latent(nn.Module):
    """Trainable parts before and after the frozen one."""

    def __init__(self, source: str | None = None, *, freeze: bool = True) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.vae = AutoEncoder()
        self.after = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        if freeze:
            anyrank.freeze(self.vae, source=source)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.vae(self.before(x)))


def build(source: str | None = None, *, freeze: bool = True) -> Latent:
    """The model in float64, equal on every rank."""
    torch.manual_seed(0)
    return Latent(source, freeze=freeze).double()


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        100 * step + (dist.get_rank() if rank is None else rank)
    )
    return torch.randn(4, 8, dtype=torch.float64, generator=generator)


def train(model: nn.Module, module: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Some steps; the first step's gradients."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    grads: list[torch.Tensor] = []
    for step in range(steps):
        model.train()
        model(batch(step)).square().mean().backward()
        grads = grads or [p.grad.clone() for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
    return grads


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# -- DDP ------------------------------------------------------------------------------------------


def job_ddp_leaves_it_alone(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = build()
    with torch.no_grad():
        for tensor in (*model.vae.parameters(), *model.vae.buffers()):
            tensor.add_(dist.get_rank())
    anyrank.freeze(model.vae)
    own = values(model.vae)
    ddp = DistributedDataParallel(model, **options)
    assert_same(values(model.vae), own)
    train(ddp, model)
    assert_same(values(model.vae), own)
    check_frozen(model.vae)
    assert not any(part.training for part in model.vae.modules())
    return values(model)


@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"broadcast_buffers": False}]
)
def test_ddp_sends_nothing_of_it_at_construction_or_in_steps(options: dict[str, Any]) -> None:
    one, two = run_ranks(2, job_ddp_leaves_it_alone, options)
    for name in one:
        # What was different before is different still: no byte went across.
        if "running" not in name or name.startswith("vae."):
            assert torch.equal(one[name], two[name]) != name.startswith("vae."), name


# -- FSDP2 ----------------------------------------------------------------------------------------


def shard(how: str, source: str | None) -> Latent:
    """The model under FSDP2, its frozen part whole, or sharded by the user in some order."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(source, freeze=how != "before")
    if how != "whole":
        fully_shard(model.vae.encoder, mesh=mesh)
    if how not in ("whole", "inner"):
        fully_shard(model.vae, mesh=mesh)
    if how == "before":
        anyrank.freeze(model.vae, source=source)
    fully_shard(model.after, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def job_fsdp(how: str) -> list[torch.Tensor]:
    model = shard(how, SOURCE)
    own = {name: whole(tensor).clone() for name, tensor in model.vae.state_dict().items()}
    sharded = {name for name, p in model.vae.named_parameters() if isinstance(p, DTensor)}
    assert all(
        isinstance(p, DTensor) for p in (*model.before.parameters(), *model.after.parameters())
    )
    grads = [whole(grad) for grad in train(model, model)]
    with torch.no_grad():
        model(batch(0))
    # Sharded again after forward, as only the root unit of the parent sees to.
    assert {n for n, p in model.vae.named_parameters() if isinstance(p, DTensor)} == sharded
    assert not any(p.requires_grad for p in model.vae.parameters())
    assert not any(part.training for part in model.vae.modules())
    check_frozen(model.vae)
    assert not [key for key in model.state_dict() if key.startswith("vae")]
    model.load_state_dict(model.state_dict())
    assert_same({name: whole(t) for name, t in model.vae.state_dict().items()}, own)
    if "project.bias" in sharded:  # told by torch itself
        with pytest.raises(RuntimeError, match="DTensor"):
            model.load_state_dict({**model.state_dict(), "vae.project.bias": torch.zeros(8)})
    if how == "whole":
        assert not isinstance(model.vae, FSDPModule)
        model.vae.project(torch.ones(2, 256, dtype=torch.float64))  # also outside forward
    if how not in ("whole", "inner"):
        assert isinstance(model.vae, FSDPModule)
    expected = {"whole": 0, "inner": 4}.get(how, 6)
    assert len(sharded) == expected
    return grads


@pytest.mark.parametrize("how", ["whole", "inner", "before", "after"])
def test_fsdp_shards_it_only_when_asked_and_trains_the_rest_alike(how: str) -> None:
    model = build()
    expected: list[torch.Tensor] = []
    for rank in range(2):
        twin = build()
        twin.train()(batch(0, rank)).square().mean().backward()
        expected.append([p.grad / 2 for p in twin.parameters()])
    for grads in run_ranks(2, job_fsdp, how):
        for got, one, two in zip(grads, *expected, strict=True):
            torch.testing.assert_close(got, one + two, rtol=1e-12, atol=1e-14)
    assert len(expected[0]) == len(list(model.parameters()))


def job_state_dict_api(how: str) -> None:
    model = shard(how, SOURCE) if how else build(SOURCE)
    own = {name: whole(tensor).clone() for name, tensor in model.vae.state_dict().items()}
    state = get_model_state_dict(model)
    assert not [key for key in state if key.startswith("vae")]
    with torch.no_grad():
        for tensor in model.before.parameters():
            tensor.zero_()
    saved = {key: tensor.clone() + 1 for key, tensor in state.items()}
    set_model_state_dict(model, saved)
    assert_same({n: whole(t) for n, t in model.vae.state_dict().items()}, own)
    assert torch.equal(whole(model.before.bias.data), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("how", ["", "whole", "after"])
def test_torchs_state_dict_functions_leave_it_out(how: str) -> None:
    run_ranks(2, job_state_dict_api, how)


# -- load -----------------------------------------------------------------------------------------


def job_load(vae: str, rest: str, layout: str) -> Any:
    with anyrank.meta():
        model = Latent(vae)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "sharded":
        fully_shard(model.vae, mesh=mesh)
    if layout != "ddp":
        fully_shard(model, mesh=mesh)
    report = anyrank.load(model, rest, verify=True)
    wrapped = DistributedDataParallel(model) if layout == "ddp" else model
    wrapped.train()(torch.randn(4, 8)).sum().backward()
    assert not model.vae.training
    assert all(p.grad is None for p in model.vae.parameters())
    parts = [name for name, _ in frozen_parts(wrapped)]
    assert parts == ["module.vae" if layout == "ddp" else "vae"]
    return report.frozen, {name: whole(tensor) for name, tensor in model.vae.state_dict().items()}


@pytest.mark.parametrize("layout", ["ddp", "whole", "sharded"])
def test_load_fills_it_from_its_own_source(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = Latent(SOURCE)
    vae, rest = str(tmp_path / "vae.safetensors"), str(tmp_path / "rest.safetensors")
    save_file(model.vae.state_dict(), vae)
    save_file(model.state_dict(), rest)
    for frozen, loaded in run_ranks(2, job_load, vae, rest, layout):
        assert set(frozen.values()) == {vae}
        assert_same(loaded, model.vae.state_dict())
