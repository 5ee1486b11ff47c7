"""Plain tensors that say which boxes of a whole they hold: torch's CheckpointableTensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.runs import resume, save
from torch import nn

import anyrank
from anyrank.testing import run_ranks

FULL = torch.arange(16 * 6, dtype=torch.float32).reshape(16, 6)


class Boxes(nn.Module):
    """A weight of rows 0 to 3 and 12 to 15 on the first of two ranks, the others on the second."""

    def __init__(self, rank: int, device: str = "cpu") -> None:
        super().__init__()
        weight: Any = nn.Parameter(torch.full((9, 6), -1.0, device=device))  # a row of padding
        weight.global_shape = tuple(FULL.shape)
        weight.global_offsets = ((0, 0), (12, 0)) if rank == 0 else ((4, 0), (8, 0))
        weight.local_offsets = ((0, 0), (5, 0))
        weight.local_sizes = ((4, 6), (4, 6))
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(3, device=device))


def expected(rank: int) -> torch.Tensor:
    rows = [*range(4), *range(12, 16)] if rank == 0 else [*range(4, 12)]
    return FULL[rows]


def without_padding(module: Boxes) -> torch.Tensor:
    return torch.cat([module.weight.detach()[:4], module.weight.detach()[5:]])


def job_load(path: str, strategy: Any, device: str) -> bool:
    rank = dist.get_rank()
    model = Boxes(rank, device)
    anyrank.load(model, path, strategy=strategy)
    if device == "cpu":
        assert bool((model.weight[4] == -1).all())
    assert bool((model.bias == 1).all())
    assert model.weight.global_shape == (16, 6)
    return torch.equal(without_padding(model), expected(rank))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("strategy", ["own", "stripe", "scatter"])
def test_boxes_are_loaded(tmp_path: Path, strategy: str, device: str) -> None:
    save_file({"weight": FULL, "bias": torch.ones(3)}, tmp_path / "w.safetensors")
    path = str(tmp_path / "w.safetensors")
    assert run_ranks(2, job_load, path, strategy, device) == [True, True]


def job_sync() -> list[bool]:
    rank = dist.get_rank()
    boxes, whole = Boxes(rank), nn.ParameterDict({"weight": FULL.clone(), "bias": torch.ones(3)})
    into = anyrank.Sync(boxes, whole, verify=True)
    planned = [into().is_planned for _ in range(2)]
    back = nn.ParameterDict({"weight": torch.zeros(16, 6), "bias": torch.zeros(3)})
    anyrank.sync(back, boxes, verify=True)
    arrived = torch.equal(without_padding(boxes), expected(rank))
    return [*planned, arrived, torch.equal(back["weight"], FULL)]


def test_boxes_are_synced_both_ways() -> None:
    assert run_ranks(2, job_sync) == [[True, False, True, True]] * 2


def job_wrong() -> str:
    model: Any = Boxes(dist.get_rank())
    model.weight.local_offsets = ((0, 0), (6, 0))
    try:
        anyrank.load(model, {"weight": FULL, "bias": torch.ones(3)})
    except anyrank.LoadError as error:
        return str(error)
    return ""


def test_a_box_outside_of_its_tensor_is_refused() -> None:
    for text in run_ranks(2, job_wrong):
        assert "weight: declares a box of sizes [4, 6]" in text
        assert "at [6, 0] of the local shape [9, 6]" in text


def trained(model: nn.Module, grads: torch.Tensor) -> tuple[nn.Module, Any]:
    """A model after a step of Adam, whose state lies like its parameters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model.get_parameter("weight").grad = grads
    model.get_parameter("bias").grad = torch.ones(3)
    optimizer.step()
    return model, optimizer


def padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[:4], torch.zeros(1, 6), rows[4:]])


def job_save(path: str) -> None:
    rank = dist.get_rank()
    model = Boxes(rank)
    model.weight.data.copy_(padded(expected(rank)))
    save(path, anyrank.TrainState(*trained(model, padded(expected(rank)))))


def job_resume(path: str) -> list[torch.Tensor]:
    """Weight and second moment of this rank after a resume."""
    alone = dist.get_world_size() == 1
    model: Any = Whole() if alone else Boxes(dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    report = resume(path, anyrank.TrainState(model, optimizer))
    assert report is not None
    assert report.components["optimizer"] == ("resharded" if alone else "exact")
    return [model.weight.detach(), optimizer.state[model.weight]["exp_avg_sq"]]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(16, 6)), nn.Parameter(torch.zeros(3))


def test_a_run_of_boxes_goes_on_as_boxes_or_whole(tmp_path: Path) -> None:
    whole = Whole()
    whole.weight.data.copy_(FULL)
    model, optimizer = trained(whole, FULL.clone())
    weight = model.get_parameter("weight")
    want = [weight.detach(), optimizer.state[weight]["exp_avg_sq"]]
    run_ranks(2, job_save, str(tmp_path))
    for found, full in zip(run_ranks(1, job_resume, str(tmp_path))[0], want, strict=True):
        assert torch.equal(found, full)
    for rank, tensors in enumerate(run_ranks(2, job_resume, str(tmp_path))):
        rows = [*range(4), *range(12, 16)] if rank == 0 else [*range(4, 12)]
        for found, full in zip(tensors, want, strict=True):
            assert torch.equal(torch.cat([found[:4], found[5:]]), full[rows])


def job_parts(path: str) -> str:
    model = nn.ParameterDict({"weight": FULL.chunk(2)[dist.get_rank()].clone()})
    with pytest.raises(anyrank.CheckpointError) as caught:
        save(path, anyrank.TrainState(model))
    return str(caught.value)


def test_plain_parts_that_do_not_say_so_are_no_run(tmp_path: Path) -> None:
    for text in run_ranks(2, job_parts, str(tmp_path)):
        assert "weight: rank 0 vs. rank 1" in text
        assert "If the tensors are shards of one tensor, store them as DTensors" in text
