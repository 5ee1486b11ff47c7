"""State that is awkward to save or to lay out anew: buffers that differ, odd shapes, layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import RanksFailed, run_ranks


class Quantized(torch.optim.Optimizer):
    """Codes and block maxima of each rank's shard in plain tensors, as 8-bit optimizers keep."""

    def __init__(self, params: Any, blocks: int) -> None:
        super().__init__(params, {"lr": 0.1, "blocks": blocks})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.detach()
                local = local.to_local() if hasattr(local, "to_local") else local
                state = self.state[parameter]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                state["codes"] = (local.flatten() * 9).round().to(torch.int8)
                count = min(group["blocks"], local.numel())
                state["absmax"] = torch.full((count,), dist.get_rank() + 1.5)


def sharded(rows: int, seed: int, dim: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 4))
    return fully_shard(net, shard_placement_fn=lambda p: Shard(min(dim, p.ndim - 1)))


def states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        {key: value.tolist() for key, value in state.items()} for state in optimizer.state.values()
    ]


def job_own(path: str, rows: int, blocks: int, save: bool, dim: int) -> Any:
    net = sharded(rows, 0 if save else 1, dim)
    optimizer = Quantized(net.parameters(), blocks)
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(path, state) as ckpts:
        if save:
            optimizer.step()
            ckpts.save()
            return states(optimizer)
        try:
            report = ckpts.resume("must")
        except anyrank.CheckpointError as error:
            return str(error)
        assert report is not None
        return states(optimizer), str(report.components["optimizer"])


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(("world", "rows"), [(2, 8), (3, 7), (4, 3)])
def test_state_of_a_ranks_own_goes_back_to_its_rank(
    tmp_path: Path, world: int, rows: int, blocks: int
) -> None:
    saved = run_ranks(world, job_own, str(tmp_path), rows, blocks, True, 0)
    found = run_ranks(world, job_own, str(tmp_path), rows, blocks, False, 0)
    assert [one[0] for one in found] == saved
    assert {one[1] for one in found} == {"exact"}
    # FSDP2 cuts columns into equal parts only.
    for other, dim in ((world - 1, 0), (world, 1)):
        if other > 1 and (dim == 0 or rows % world == 0):
            texts = run_ranks(other, job_own, str(tmp_path), rows, blocks, False, dim)
            assert all(
                "only on the same number of ranks with the same layout" in text for text in texts
            )


class Statistics(torch.optim.Optimizer):
    """One statistic replicated on the mesh, and one of each row, laid out as the rows are."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                whole = parameter.detach().full_tensor()
                mesh = parameter.device_mesh
                column = torch.arange(1.0, whole.shape[-1] + 1)
                row = torch.arange(1.0, whole.shape[0] + 1)
                state = self.state[parameter]
                state["column"] = distribute_tensor(column, mesh, [Replicate()])
                state["row"] = distribute_tensor(row, mesh, parameter.placements)


def job_statistics(path: str, save: bool, dim: int) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(6, 8, bias=False)
    net = fully_shard(net, shard_placement_fn=lambda parameter: Shard(dim))
    optimizer = Statistics(net.parameters(), {"lr": 0.1})
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(path, state) as ckpts:
        if save:
            optimizer.step()
            ckpts.save()
        else:
            ckpts.resume("must")
    (kept,) = optimizer.state.values()
    return {k: (v.full_tensor().tolist(), type(v).__name__) for k, v in kept.items()}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_state_of_other_shapes_stays_sharded_state(
    tmp_path: Path, world: int, dim: int
) -> None:
    saved = run_ranks(2, job_statistics, str(tmp_path), True, 0)[0]
    found = run_ranks(world, job_statistics, str(tmp_path), False, dim)
    assert all(one == saved for one in found)
    assert {kind for _, kind in saved.values()} == {"DTensor"}


def job_buffers(path: str, wrap: str, save: bool) -> Any:
    """BatchNorm whose running statistics each rank has for itself."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 512), nn.BatchNorm1d(512)]
    net: Any = nn.Sequential(*layers)
    net = DistributedDataParallel(net) if wrap == "ddp" else fully_shard(net)
    if save:
        for number, buffer in enumerate(net.buffers()):
            buffer.fill_(10 * number + dist.get_rank())
    state = anyrank.TrainState(net)
    with anyrank.Checkpoints(path, state) as ckpts:
        if save:
            ckpts.save()
            return None
        report = ckpts.resume("must")
    assert report is not None
    return [float(buffer.max()) for buffer in net.buffers()], report.notes


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_buffers_that_differ_are_all_the_first_ranks(tmp_path: Path, wrap: str) -> None:
    run_ranks(3, job_buffers, str(tmp_path), wrap, True)
    for values, notes in run_ranks(2, job_buffers, str(tmp_path), wrap, False):
        assert values == [10.0 * number for number in range(6)]
        assert "6 tensors differed between the ranks that saved the checkpoint" in notes[-1]


class Log:
    """A stateful part that differs between ranks, as one with times in it."""

    def __init__(self, seconds: float) -> None:
        self.state: dict[str, Any] = {"seconds": seconds, "last": torch.full((2,), seconds)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def job_log(path: str, seconds: float, first_rank: list[str]) -> Any:
    rank = dist.get_rank() if dist.is_initialized() else 0
    log = Log(seconds + rank)
    state = anyrank.TrainState(nn.Linear(1, 1), log=log, first_rank=first_rank)
    with anyrank.Checkpoints(path, state) as ckpts:
        report = ckpts.resume()
        ckpts.save()
    return log.state["seconds"], log.state["last"].tolist(), report and report.components["log"]


def test_of_a_part_that_may_differ_the_first_ranks_state_is_for_all(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    assert run_ranks(2, job_log, path, 5.0, ["log"])[1] == (6.0, [6.0, 6.0], None)
    for ranks in (2, 3, 1):
        found = run_ranks(ranks, job_log, path, 9.0, ["log"])
        assert found == [(5.0, [5.0, 5.0], "exact")] * ranks
    path = str(tmp_path / "without")
    run_ranks(2, job_log, path, 5.0, [])
    with pytest.raises(RanksFailed, match="whose state differed between the 2 ranks"):
        run_ranks(3, job_log, path, 9.0, [])
    with pytest.raises(
        ValueError, match="first_rank contains 'model', which is not a stateful part"
    ):
        anyrank.TrainState(nn.Linear(1, 1), first_rank=["model"])


def job_plateau(path: str, until: int) -> Any:
    """A plateau that is stepped by the metric of each rank; it never has reason to reduce."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    state = anyrank.TrainState(model, optimizer, scheduler=schedule)
    rank = dist.get_rank() if dist.is_initialized() else 0
    with anyrank.Checkpoints(path, state) as ckpts:
        report = ckpts.resume()
        while state.step < until:
            schedule.step(1 / (state.step + 1) + rank)
            ckpts.step_done()
    return report and report.components["scheduler"], schedule.best, schedule.last_epoch


def test_a_plateau_of_each_ranks_own_metric_goes_on_as_the_first_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run_ranks(2, job_plateau, path, 2)
    assert run_ranks(2, job_plateau, path, 2) == [("exact", 0.5, 2), ("exact", 1.5, 2)]
    assert run_ranks(3, job_plateau, path, 2) == [("derived", 0.5, 2)] * 3
    assert run_ranks(1, job_plateau, path, 4) == [("derived", 0.25, 4)]
