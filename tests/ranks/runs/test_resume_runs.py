"""Whole runs over several rank counts: data, dropout, optimizer and schedule, against one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import Died, Fault, run_ranks

STEPS = 14  # over two epochs and a bit, whose last step is short


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """50 samples with augmentation."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(6, dtype=torch.float64)
        return torch.full((6,), index / 50, dtype=torch.float64) + 0.1 * noise


def wrap(net: nn.Module, kind: str) -> nn.Module:
    if not dist.is_initialized():
        return net
    return DistributedDataParallel(net) if kind == "ddp" else fully_shard(net)


def job(
    path: str, kind: str, until: int, dtype: torch.dtype, background: bool
) -> tuple[list[float], Any, Any]:
    """Train to a step from wherever the run is; losses since, receipts, what differed."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 1)]
    net = wrap(nn.Sequential(*layers).to(dtype), kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = anyrank.ElasticLoader(Noisy(), global_batch=8, microbatch=2)
    state = anyrank.TrainState(net, optimizer, scheduler=schedule, data=loader)
    losses: list[float] = []
    with anyrank.Checkpoints(path, state, every=2, background=background) as ckpts:
        report = ckpts.resume()
        while state.step < until:
            for step in loader:
                for batch in step.microbatches(net):
                    step.backward((net(batch.to(dtype)) - 1).square().mean())
                losses.append(step.loss())
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                ckpts.step_done()
                if state.step >= until:
                    break
        ckpts.save()
    return losses, [tuple(one) for one in loader.receipts], report and report.components


SEQUENCES = [[4, 3, 2, 1], [1, 4, 2], [3, 3, 4], [2, 1, 3]]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("sizes", SEQUENCES, ids=str)
def test_a_run_over_several_rank_counts_is_the_run_on_one(
    tmp_path: Path, sizes: list[int], kind: str
) -> None:
    whole = (str(tmp_path / "one"), kind, STEPS, torch.float64, False)
    expected, receipts, _ = run_ranks(1, job, *whole, init=False)[0]
    losses: list[float] = []
    for leg, size in enumerate(sizes, 1):
        until = leg * STEPS // len(sizes)
        background = bool(leg % 2)
        results = run_ranks(
            size, job, str(tmp_path / "run"), kind, until, torch.float64, background
        )
        assert all(one == results[0] for one in results)
        losses += results[0][0]
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    assert results[0][1] == receipts == [(0, 50, "exactly once"), (1, 50, "exactly once")]
    assert results[0][2]["data"] == "exact"
    same = sizes[-1] == sizes[-2]
    assert results[0][2]["model"] == ("exact" if same else "resharded")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_killed_run_on_the_same_ranks_is_equal_bit_by_bit(tmp_path: Path, kind: str) -> None:
    whole = (str(tmp_path / "whole"), kind, STEPS, torch.float32, False)
    expected = run_ranks(3, job, *whole)[0][0]
    killed = (str(tmp_path / "run"), kind, STEPS, torch.float32, False)
    ends = run_ranks(3, job_killed, *killed, faults=[Fault(1, "save.write", "kill", 3)])
    assert isinstance(ends[1], Died)
    losses, _, components = run_ranks(3, job, *killed)[0]
    assert len(losses) == STEPS - 4
    assert losses == expected[4:]
    assert set(components.values()) == {"exact"}


def job_killed(*args: Any) -> None:
    try:
        job(*args)
    except anyrank.RankError:
        return  # a survivor of the kill has nothing left to do
