"""What has ended a run, by its log, which the first rank writes: a rank that was killed, though the
others leave by an exception; another rank's exception, though that ends their connections.
"""

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


def train_in_trainer(path: str, _: str, until: int, killed_at: int) -> None:
    from tests.page_setups.trainer_run import make
    from transformers import TrainerCallback

    from anyrank.integrations.transformers import elastic

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == killed_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = make(until)
    trainer.add_callback(Kill())
    run = elastic(trainer, path, global_batch=4, every=1)
    run.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("job", "wrapper"), [(train, "ddp"), (train, "fsdp2"), (train_in_trainer, "Trainer")]
)
def test_the_survivors_exception_is_no_end(job: Any, wrapper: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    with pytest.raises(RanksFailed):
        run_ranks(2, job, path, wrapper, 6, 3)
    after_the_kill = str(anyrank.inspect(path).run_time)
    assert "0 kills" not in after_the_kill
    assert "the last process is still running or was killed; ranks 2" in after_the_kill
    run_ranks(1, job, path, wrapper, 5, -1)
    run_ranks(2, job, path, wrapper, 6, -1)
    time_of_run = anyrank.inspect(path).run_time
    assert time_of_run is not None
    assert "1 kill; ranks 2 -> 1 -> 2" in str(time_of_run)
    assert (time_of_run.kills, time_of_run.errors, time_of_run.ranks) == (1, 0, [2, 1, 2])


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.fails and dist.get_rank() == 1:
            raise ValueError("a row that cannot be read")
        return torch.ones(4)


def fail(path: str, where: str) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Rows(fails=False)
    loader = anyrank.ElasticLoader(rows, global_batch=4, microbatch=2)
    state = anyrank.TrainState(model, optimizer, data=loader)
    with anyrank.Checkpoints(path, state, every=1) as ckpts:
        for step in ckpts.steps(until=4):
            rows.fails = step.number >= 1 and where == "dataset"
            for batch in step.microbatches(model):
                loss = model(batch).square().mean()
                if step.number == 2 and where == "body" and dist.get_rank() == 1:
                    raise ValueError("of the script")
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("where", ["dataset", "body"])
def test_another_ranks_exception_is_an_error_and_no_kill(where: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    with pytest.raises(RanksFailed, match="ValueError"):
        run_ranks(2, fail, path, where)
    time_of_run = anyrank.inspect(path).run_time
    assert time_of_run is not None
    assert (time_of_run.kills, time_of_run.errors, time_of_run.is_open) == (0, 1, False)
