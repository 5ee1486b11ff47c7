"""Optimizers that keep their state by rank, behind methods of their own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks


class ByRank(torch.optim.SGD):
    """Each rank keeps something else beside the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.mine = torch.full((2,), float(dist.get_rank()))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mine": self.mine}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mine = state_dict["mine"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def job(path: str, kind: str, save: bool) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Linear(4, 4)
    if kind == "zero":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.jit, which torch.distributed.optim uses
            from torch.distributed.optim import ZeroRedundancyOptimizer
        net = DistributedDataParallel(net)
        optimizer: Any = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
        net(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    else:
        optimizer = ByRank((fully_shard(net) if kind == "sharded" else net).parameters())
        if kind == "sharded":
            net(torch.ones(2, 4)).square().sum().backward()
            optimizer.param_groups[0]["momentum"] = 0.9
            optimizer.step()
    state = anyrank.TrainState(net, optimizer)
    try:
        with anyrank.Checkpoints(path, state) as ckpts:
            if save:
                ckpts.save()
            else:
                optimizer.mine = torch.zeros(2)
                ckpts.resume()
    except anyrank.CheckpointError as error:
        return str(error)
    return optimizer.mine.tolist()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "zero",
            "a ZeroRedundancyOptimizer cannot be saved, because it has no state_dict()",
        ),
        ("sharded", "a ByRank cannot be saved: its custom state_dict() contains sharded"),
    ],
)
def test_an_optimizer_that_cannot_be_saved_is_refused_by_name(
    tmp_path: Path, kind: str, said: str
) -> None:
    for text in run_ranks(2, job, str(tmp_path), kind, True):
        assert said in text
    assert not list(tmp_path.glob("step-*"))


def test_state_by_rank_goes_on_with_as_many_ranks_only(tmp_path: Path) -> None:
    assert run_ranks(2, job, str(tmp_path), "own", True) == [[0, 0], [1, 1]]
    assert run_ranks(2, job, str(tmp_path), "own", False) == [[0, 0], [1, 1]]
    for text in run_ranks(3, job, str(tmp_path), "own", False):
        assert "optimizer: a ByRank whose state differed between the 2 ranks" in text


def job_of_own_parameters(path: str, save: bool) -> tuple[Any, Any]:
    """A layer for each rank, which alone keeps its state; returns its moments and the outcome."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = OwnParameters(net[dist.get_rank()].parameters(), lr=0.1)
    outcome = None
    with anyrank.Checkpoints(path, anyrank.TrainState(net, optimizer)) as ckpts:
        if save:
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
            optimizer.step()
            for rank, layer in enumerate(net):
                for parameter in layer.parameters():
                    dist.broadcast(parameter.detach(), rank)
            ckpts.save()
        else:
            report = ckpts.resume()
            outcome = report and report.components["optimizer"]
    return [float(row["exp_avg"].sum()) for row in optimizer.state.values()], outcome


class OwnParameters(torch.optim.AdamW):
    """Says more than torch's state, and is made with other parameters on each rank."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"kind": "own"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def test_each_rank_may_have_the_state_of_its_own_parameters(tmp_path: Path) -> None:
    saved = run_ranks(2, job_of_own_parameters, str(tmp_path), True)
    resumed = run_ranks(2, job_of_own_parameters, str(tmp_path), False)
    assert saved[0][0] != saved[1][0]
    assert resumed == [(moments, "exact") for moments, _ in saved]
