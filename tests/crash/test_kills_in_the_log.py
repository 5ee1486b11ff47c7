"""A rank that is killed is a kill in the run's log, also where the others leave by an exception."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import RanksFailed, run_ranks


def train(path: str, wrapper: str, until: int, killed_at: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        wrapped: Any = fully_shard(model)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.randn(96, 4), global_batch=4, microbatch=2)
    state = anyrank.TrainState(wrapped, optimizer, data=loader)
    with anyrank.Checkpoints(path, state, every=1) as ckpts:
        ckpts.resume()
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(wrapped):
                loss = wrapped(batch).square().mean()
                if state.step == killed_at and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_the_survivors_exception_is_no_end(wrapper: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    with pytest.raises(RanksFailed):
        run_ranks(2, train, path, wrapper, 6, 3)
    run_ranks(1, train, path, wrapper, 5, -1)
    run_ranks(2, train, path, wrapper, 6, -1)
    time_of_run = anyrank.inspect(path).run_time
    assert time_of_run is not None
    assert (time_of_run.kills, time_of_run.errors, time_of_run.ranks) == (1, 0, [2, 1, 2])
