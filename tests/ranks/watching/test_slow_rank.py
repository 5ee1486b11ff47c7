"""A slow rank is named, with the part of the step that it is slow in; none in an even job."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import anyrank
from anyrank.testing import run_ranks
from anyrank.training.steps.pace import WINDOW, Pace
from anyrank.training.steps.step_listeners import fetching_ahead

SLOW, SLOW_SEC = 2, 0.03
STEPS = 30


class Rows(Dataset[torch.Tensor]):
    """Rows that one rank fetches slowly."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __len__(self) -> int:
        return 6 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.where == "loader" and dist.get_rank() == SLOW:
            time.sleep(SLOW_SEC / 2)  # two a step
        return torch.randn(4)


class Net(nn.Module):
    """A model that one rank runs slowly."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where = where
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_slow = dist.get_rank() == SLOW
        if self.where == "forward" and is_slow:
            time.sleep(SLOW_SEC)
        hidden = self.first(x)
        if self.where == "backward" and is_slow and hidden.requires_grad:
            hidden.register_hook(lambda gradient: time.sleep(SLOW_SEC))
        return self.last(hidden)


class Warnings(logging.Handler):
    """What a rank says at WARNING of a slow one, and after how many steps."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.steps = 0
        self.said: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "anyrank.steps":
            self.said.append((self.steps, record.getMessage()))

    def __enter__(self) -> Warnings:
        logging.getLogger("anyrank.steps").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("anyrank.steps").removeHandler(self)


def wrapped(where: str, wrapper: str) -> Any:
    net: Any = Net(where)
    if wrapper == "fsdp2":
        return fully_shard(net)
    return DistributedDataParallel(net) if wrapper == "ddp" else net


def is_over(warnings: Warnings, where: str, begin: float) -> bool:
    """Whether a rank was named, on all ranks alike: where the machine is busy a window may show no
    rank that stands out from chance, and the next one does.
    """
    if where == "even":
        return warnings.steps >= STEPS
    over = torch.tensor([float(bool(warnings.said) or time.monotonic() - begin > 60)])
    dist.broadcast(over, 0)
    return bool(over)


def job_of_a_run(path: str, where: str, wrapper: str) -> list[tuple[int, str]]:
    """What is said in a run with an ElasticLoader, and at which step."""
    model, begin = wrapped(where, wrapper), time.monotonic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = anyrank.ElasticLoader(Rows(where), global_batch=6, microbatch=2)
    state = anyrank.TrainState(model, optimizer, data=loader)
    with Warnings() as warnings, anyrank.Checkpoints(path, state) as ckpts:
        for step in ckpts.steps(until=100 * STEPS):
            warnings.steps = step.number + 1
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if is_over(warnings, where, begin):
                break
    return warnings.said


def job_of_a_watch(where: str, wrapper: str) -> list[tuple[int, str]]:
    """The same of a plain job that is watched."""
    with Warnings() as warnings:
        watching = anyrank.watch("1h")
        model, begin = wrapped(where, wrapper), time.monotonic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        while not is_over(warnings, where, begin):
            for batch in DataLoader(Rows(where), batch_size=2):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                warnings.steps += 1
                if is_over(warnings, where, begin):
                    break
        if where == "even":
            time.sleep(2)  # in which it could be said
        watching.close()
    return warnings.said


def job_drops_a_run(path: str) -> tuple[bool, bool]:
    """Whether a run's pace is measured, and whether it still is when the run was dropped."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = anyrank.ElasticLoader(Rows("even"), global_batch=6, microbatch=2)
    ckpts = anyrank.Checkpoints(path, anyrank.TrainState(model, optimizer, data=loader))
    for step in loader:
        for batch in step.microbatches(model):
            step.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ckpts.step_done()
        if step.number == 2:
            break
    was_measured = Pace.running is not None
    del ckpts
    return was_measured, Pace.running is not None


def check(every: list[list[tuple[int, str]]], where: str) -> None:
    assert every[1:] == [[], []]
    if where == "even":
        assert every[0] == []
        return
    ((step, text),) = every[0]
    assert text.startswith("rank 2 is slow: other ranks wait ")
    assert text.endswith(f" ms per step for it ({where})")
    assert step > WINDOW
    assert int(text.split()[7]) >= 20  # the pause itself is longer on a busy machine


def test_what_is_loaded_before_the_optimizer_steps_is_no_wait() -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with contextlib.closing(Pace(net, [optimizer])) as pace:
        for _ in range(WINDOW):
            net(torch.ones(1)).sum().backward()
            with fetching_ahead():
                time.sleep(0.02)
            optimizer.step()
        (loader, _), *_ = pace.take_window()
    assert loader >= 0.02
    assert pace.waited_sec < 0.02 * WINDOW / 2


@pytest.mark.parametrize(
    ("where", "wrapper"),
    [
        ("loader", "ddp"),
        ("forward", "ddp"),
        ("backward", "ddp"),
        ("even", "ddp"),
        ("loader", "fsdp2"),
        ("loader", "none"),
        ("forward", "none"),
    ],
)
def test_a_slow_rank_of_a_run_is_named(where: str, wrapper: str, tmp_path: Path) -> None:
    check(run_ranks(3, job_of_a_run, str(tmp_path / "run"), where, wrapper), where)


@pytest.mark.parametrize("where", ["loader", "forward", "backward", "even"])
def test_a_slow_rank_of_a_plain_job_is_named_by_its_watch(where: str) -> None:
    check(run_ranks(3, job_of_a_watch, where, "ddp"), where)


def test_a_model_that_is_timed_is_copied_and_saved_without_it() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.closing(Pace(model, [optimizer])):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        copied = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
    assert not model._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
    assert copied(torch.ones(1, 2)).shape == (1, 2)


def test_a_run_that_is_dropped_is_measured_no_more(tmp_path: Path) -> None:
    assert run_ranks(2, job_drops_a_run, str(tmp_path / "run")) == [(True, False)] * 2


def job_watches_for_a_moment() -> None:
    anyrank.watch("1h").close()


def test_ranks_that_have_watched_another_job_before_watch_the_same_one() -> None:
    run_ranks(2, job_watches_for_a_moment)  # and the third rank of the next job did not
    check(run_ranks(3, job_of_a_watch, "forward", "ddp"), "forward")
