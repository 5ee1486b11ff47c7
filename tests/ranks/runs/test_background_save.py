"""Background saves: the values of their step, at most one in flight, failures on all ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import resume
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.testing import Fault, run_ranks


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    if torch.distributed.is_initialized():
        net = fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def values(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    tensors: list[Any] = [*net.parameters(), *net.buffers()]
    tensors += [one["exp_avg"] for one in optimizer.state.values()]
    whole = [t.detach() for t in tensors]
    return [
        float((t.full_tensor() if hasattr(t, "full_tensor") else t).double().sum()) for t in whole
    ]


def job_train(path: str) -> list[list[float]]:
    """Six steps, each saved while the next one runs."""
    net, optimizer = build(0)
    state = anyrank.TrainState(net, optimizer)
    seen: list[list[float]] = []
    with anyrank.Checkpoints(path, state, every=1, keep=9, background=True) as ckpts:
        for step in range(6):
            net(torch.ones(4, 64) * step + torch.eye(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(values(net, optimizer))
            ckpts.step_done()
    assert [one.step for one in ckpts.saved()] == [6, 5, 4, 3, 2, 1]
    return seen


def job_resume(path: str, step: int) -> list[float]:
    net, optimizer = build(1)
    resume(path, anyrank.TrainState(net, optimizer), step)
    return values(net, optimizer)


@pytest.mark.parametrize("world", [1, 3])
def test_each_save_has_the_values_of_its_own_step(tmp_path: Path, world: int) -> None:
    slow = Fault(world - 1, "save.write", "slow", 3, seconds=0.5)
    seen = run_ranks(world, job_train, str(tmp_path), faults=[slow])[0]
    for step in range(1, 7):
        assert run_ranks(world, job_resume, str(tmp_path), step)[0] == seen[step - 1], step


def job_failure(path: str) -> tuple[int, str, list[int]]:
    """At which step the failure of the save of step 1 is told, and what is committed later."""
    net, optimizer = build(0)
    state = anyrank.TrainState(net, optimizer)
    told = (0, "")
    with anyrank.Checkpoints(path, state, every=2, background=True) as ckpts:
        for step in range(1, 7):
            net(torch.eye(4, 64) * step).sum().backward()
            optimizer.step()
            try:
                ckpts.step_done()
            except anyrank.CheckpointError as error:
                told = (step, str(error))
            time.sleep(0.1)
        ckpts.wait()
        return *told, [one.step for one in ckpts.saved()]


def test_a_failure_reaches_all_ranks_at_the_next_step(tmp_path: Path) -> None:
    full = Fault(1, "file.write", "enospc")
    for step, text, committed in run_ranks(2, job_failure, str(tmp_path), faults=[full]):
        assert step == 3
        assert "[rank 1]" in text
        assert "No space left" in text
        assert committed == [6, 4]


def job_release(path: str) -> str:
    """Release the last rank's parameters before they are saved."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = anyrank.TrainState(model, optimizer)
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    ckpts = anyrank.Checkpoints(path, state, background=True)
    if is_last:
        for parameter in model.parameters():
            parameter.untyped_storage().resize_(0)
    with pytest.raises(anyrank.CheckpointError) as found:
        ckpts.save()
    ckpts.close()
    return str(found.value)


def test_memory_that_is_released_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    errors = set(run_ranks(2, job_release, str(tmp_path)))
    assert len(errors) == 1
    assert "weight: its storage was freed" in errors.pop()
    assert not list(tmp_path.glob("step-*"))
