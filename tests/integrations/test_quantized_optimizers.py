"""Optimizers whose state is quantized in blocks: what is right, and what is refused by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

PACKAGES = Path(sys.prefix) / "quantized"  # where `make` installs them, apart from all others
EAGER = {"TORCHDYNAMO_DISABLE": "1"}  # torchao compiles its steps, with threads that stay
WIDTH = 128  # a weight has 4096 elements or more, else its state is not quantized


pytestmark = pytest.mark.skipif(not PACKAGES.is_dir(), reason=f"there is no {PACKAGES}")


def optimizer_of(package: str, name: str) -> Any:
    sys.path.append(str(PACKAGES))  # on a rank of the pool, which sets it back
    return getattr(importlib.import_module(f"{package}.optim"), name)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def job_bitsandbytes(path: str, name: str, goes_on: bool) -> list[torch.Tensor]:
    """The weights after five steps; a save after three, or a resume of it."""
    torch.manual_seed(int(goes_on))
    net = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = optimizer_of("bitsandbytes", name)(net.parameters(), lr=0.01)
    with anyrank.Checkpoints(path, anyrank.TrainState(net, optimizer)) as ckpts:
        if goes_on:
            ckpts.resume("must")
        else:
            train(net, optimizer, range(3))
            ckpts.save()
        assert optimizer.state[net.module.weight]["state1"].dtype == torch.uint8
        train(net, optimizer, range(3, 5))
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_bitsandbytes_goes_on_bit_by_bit_on_another_number_of_ranks(
    tmp_path: Path, name: str
) -> None:
    wanted = run_ranks(2, job_bitsandbytes, str(tmp_path), name, False)[0]
    for size in (2, 1):
        for found in run_ranks(size, job_bitsandbytes, str(tmp_path), name, True):
            assert all(map(torch.equal, found, wanted))


def job_torchao(path: str, name: str, wrap: str) -> tuple[str, list[Any]]:
    """What a save says, and what it has left."""
    net: Any = nn.Linear(WIDTH, WIDTH)
    net = fully_shard(net) if wrap == "fsdp" else DistributedDataParallel(net)
    optimizer = optimizer_of("torchao", name)(net.parameters())
    train(net, optimizer, range(1))
    ckpts = anyrank.Checkpoints(path, anyrank.TrainState(net, optimizer))
    with pytest.raises(anyrank.CheckpointError) as caught:
        ckpts.save()
    return str(caught.value), ckpts.saved()


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("name", "kind"), [("AdamW8bit", "OptimState8bit"), ("AdamW4bit", "OptimState4bit")]
)
def test_state_of_torchao_is_refused_by_name(
    tmp_path: Path, wrap: str, name: str, kind: str
) -> None:
    for text, saved in run_ranks(2, job_torchao, str(tmp_path), name, wrap, env=EAGER):
        assert text.startswith("optimizer.state.weight.exp_avg: a")
        assert f"{kind} cannot be saved" in text
        assert saved == []
