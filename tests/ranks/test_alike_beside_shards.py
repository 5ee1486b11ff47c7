"""Optimizer state that every rank computes alike from whole gradients, beside sharded parameters: a
preconditioner as SOAP's and Shampoo's. It goes on on any number of ranks, as replicas do.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks


class Preconditioned(torch.optim.Optimizer):
    """Keeps a square matrix, a nested one and a row of each parameter, whole on each rank."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def make_state(self, grad: torch.Tensor) -> dict[str, Any]:
        return {
            "left": torch.eye(len(grad)),
            "of": {"right": torch.eye(grad.shape[1])},
            "rows": torch.zeros(grad.shape[1]),
            "step": torch.tensor(0.0),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            state = self.state[p]
            if not state:
                state.update(self.make_state(grad))
            state["left"].lerp_(grad @ grad.T, 0.1)
            state["of"]["right"].lerp_(grad.T @ grad, 0.1)
            state["rows"] += grad.abs().sum(0)
            state["step"] += 1
            update = torch.tanh(state["left"]) @ grad @ state["of"]["right"]
            if hasattr(p, "device_mesh"):
                update = distribute_tensor(update, p.device_mesh, p.placements)
            p.sub_(update, alpha=0.01)


class OfShares(Preconditioned):
    """Keeps a matrix of each rank's share, as one that knows nothing of FSDP2."""

    def make_state(self, grad: torch.Tensor) -> dict[str, Any]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return super().make_state(grad) | {"own": torch.full((3,), float(rank))}


KINDS: dict[str, type[Preconditioned]] = {"whole": Preconditioned, "of shares": OfShares}


def job(path: str, kind: str, layout: str, until: int) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 7, bias=False)  # a share of two is as large as one of its matrices
    wrapped = model
    if layout == "fsdp":
        fully_shard(model)
    elif dist.is_initialized():
        wrapped = DistributedDataParallel(model)
    optimizer = KINDS[kind](model.parameters())
    loader = anyrank.ElasticLoader(torch.eye(24, 4), global_batch=12, microbatch=2)
    with anyrank.Checkpoints(path, anyrank.TrainState(wrapped, optimizer, data=loader)) as ckpts:
        report = ckpts.resume()
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(wrapped):
                step.backward(wrapped(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    (state,) = optimizer.state.values()
    tensors = [state["left"], state["of"]["right"], state["rows"], model.weight.detach()]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return report and report.components["optimizer"], [t.tolist() for t in whole]


WAYS = [
    [(2, "fsdp"), (1, "plain")],
    [(2, "fsdp"), (2, "fsdp")],
    [(2, "fsdp"), (3, "fsdp"), (1, "plain"), (2, "fsdp")],
    [(3, "fsdp"), (2, "ddp"), (2, "fsdp")],
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it_goes_on_on_any_number_of_ranks(way: list[tuple[int, str]], tmp_path: Path) -> None:
    until = 2 * len(way)
    expected = run_ranks(1, job, str(tmp_path / "whole"), "whole", "plain", until)[0][1]
    values: list[Any] = []
    for number, (ranks, layout) in enumerate(way):
        path, steps = str(tmp_path / "run"), 2 * number + 2
        rows = run_ranks(ranks, job, path, "whole", layout, steps)
        if number:
            same = way[number - 1][0] == ranks
            assert {outcome for outcome, _ in rows} == {"exact" if same else "resharded"}
        values = rows[-1][1]
    for one, other in zip(values, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


def test_it_is_written_once(tmp_path: Path) -> None:
    run_ranks(2, job, str(tmp_path), "whole", "fsdp", 2)
    names = json.loads((tmp_path / "step-00000002" / "tensors.json").read_text())
    assert "optimizer.state.weight.left@00000" in str(names)
    assert "optimizer.state.weight.left@00001" not in str(names)


def job_warned(path: str) -> list[str]:
    texts: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Kept()
    log = logging.getLogger("anyrank.saving")
    log.addHandler(handler)
    try:
        job(path, "of shares", "fsdp", 2)
        job(path, "of shares", "fsdp", 3)
    finally:
        log.removeHandler(handler)
    return [text for text in texts if "tensors that are not sharded like their parameter" in text]


def test_what_each_rank_has_otherwise_is_warned_of_and_needs_as_many_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, job_warned, str(tmp_path))
    assert len(first) == 2  # once in each process's run
    assert "optimizer.state.weight.own" in first[0]
    assert "left" not in first[0]
    assert second == []
    (failed,) = run_ranks(1, job_refused, str(tmp_path))
    assert "differed between the 2 ranks that saved it" in failed
    assert "left" not in failed


def job_refused(path: str) -> str:
    with pytest.raises(anyrank.CheckpointError) as caught:
        job(path, "of shares", "plain", 4)
    return str(caught.value)


def job_made(path: str, has_state: bool) -> Any:
    """A run of one process goes on under FSDP2, where the optimizer alone can say how it lies."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 7, bias=False))
    optimizer = Preconditioned(model.parameters())
    if has_state:
        optimizer.state[model.weight].update(optimizer.make_state(torch.zeros(7, 4)))
    with anyrank.Checkpoints(path, anyrank.TrainState(model, optimizer)) as ckpts:
        report = ckpts.resume(skip=["data"])
        assert report is not None
        return report.components["optimizer"], optimizer.state[model.weight]["left"].tolist()


def test_one_of_a_whole_parameter_asks_the_optimizer_how_it_lies(tmp_path: Path) -> None:
    expected = run_ranks(1, job, str(tmp_path), "whole", "plain", 2)[0][1][0]
    with pytest.raises(Exception, match="Create the optimizer's state first"):
        run_ranks(2, job_made, str(tmp_path), False)
    for outcome, left in run_ranks(2, job_made, str(tmp_path), True):
        assert (outcome, left) == ("resharded", expected)
