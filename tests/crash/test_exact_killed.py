"""exact=True over kills: on other ranks and with other wrappers, the bits of one whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.exact_runs import sha256, wrap
from torch import nn

import anyrank
from anyrank import faults
from anyrank.testing import Died, Fault, run_ranks

STEPS = 8  # of two epochs, each with a short last step


class Noisy(torch.utils.data.Dataset[Any]):
    """Sample i, augmented at random."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, i: int) -> torch.Tensor:
        rows = torch.randn(5, generator=torch.Generator().manual_seed(i))
        return rows * (1 + 0.1 * torch.rand(()))


def job_train(folder: str, kind: str) -> str:
    """Go on with a run to its end, unless a fault ends the process before."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(5, 13), nn.GELU(), nn.Dropout(0.1), nn.Linear(13, 3))
    net = wrap(net, kind, net[0])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = anyrank.ElasticLoader(Noisy(), global_batch=10, microbatch=2, seed=3, exact=True)
    state = anyrank.TrainState(net, optimizer, scheduler=scheduler, data=loader)
    with anyrank.Checkpoints(folder, state, every=1) as ckpts:
        ckpts.resume("auto")
        for step in ckpts.steps(until=STEPS):
            for batch in step.microbatches(net):
                step.backward(net(batch).square().mean(), float(batch.abs().sum()))
                faults.point("test.microbatch")
            step.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return sha256(net, optimizer)


@pytest.mark.exact_fsdp
def test_promise_9_the_same_bits_over_kills_and_changes_of_ranks_and_wrapper(
    tmp_path: Path,
) -> None:
    whole = run_ranks(1, job_train, str(tmp_path / "whole"), "plain")[0]
    moved = str(tmp_path / "moved")
    # All ranks are killed in the middle of a step.
    for size, kind, nth in ((4, "fsdp", 4), (3, "ddp", 3), (2, "fsdp", 7)):
        kills = [Fault(rank, "test.microbatch", "kill", nth) for rank in range(size)]
        ended = run_ranks(size, job_train, moved, kind, faults=kills)
        assert all(isinstance(one, Died) for one in ended)
    assert run_ranks(1, job_train, moved, "plain") == [whole]
