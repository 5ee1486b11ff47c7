"""The loop of `Checkpoints.steps` on several ranks: other rank counts, and a rank that fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

SAMPLES, BATCH = 20, 6
DEADLINE_SEC = 10


class Rows(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Samples with their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((4,), index / SAMPLES) + torch.randn(4)


class Run:
    """The objects of a run on this rank."""

    def __init__(self, wrap: bool = True) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1)).double()
        is_wrapped = wrap and dist.is_initialized()
        self.model = DistributedDataParallel(net) if is_wrapped else net
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = anyrank.ElasticLoader(Rows(), global_batch=BATCH, microbatch=1)
        self.state = anyrank.TrainState(self.model, self.optimizer, data=self.loader)
        self.seen: list[tuple[int, int]] = []  # step and sample

    def train(self, step: Any) -> None:
        for ids, rows in step.microbatches(self.model):
            if not step.is_copy:
                self.seen += [(step.number, one) for one in ids.tolist()]
            step.backward(self.model(rows.double()).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[float]:
        return [float(x) for p in self.model.parameters() for x in p.detach().flatten()]


def job_run(path: str, epochs: int, last: int | None) -> tuple[list[Any], list[float], list[Any]]:
    """Samples of each step, the parameters, and the receipts; left after step `last`."""
    run = Run()
    with anyrank.Checkpoints(path, run.state) as ckpts:
        ckpts.resume()
        for step in ckpts.steps(epochs=epochs):
            run.train(step)
            if step.number == last:
                break
    return run.seen, run.values(), [tuple(one) for one in run.loader.receipts]


def test_a_run_that_was_left_goes_on_on_other_ranks(tmp_path: Path) -> None:
    whole = run_ranks(1, job_run, str(tmp_path / "whole"), 3, None)[0]
    seen: list[Any] = []
    for world, last in ((3, 4), (2, 6), (1, None)):
        answers = run_ranks(world, job_run, str(tmp_path / "run"), 3, last)
        seen += [pair for answer in answers for pair in answer[0]]
    assert sorted(seen) == sorted(whole[0])
    assert answers[0][1] == pytest.approx(whole[1], rel=1e-9)
    assert answers[0][2] == [(epoch, SAMPLES, "exactly once") for epoch in range(3)]
    again = run_ranks(3, job_run, str(tmp_path / "run"), 3, None)
    assert all(answer[0] == [] for answer in again)


# -- a rank that fails ----------------------------------------------------------------------------


def job_raise(path: str, where: str, background: bool) -> tuple[str, str, float]:
    """Rank 1 raises in step 2, and the other goes on; the error on this rank, and its seconds."""
    run = Run(wrap=False)  # DDP's own waits end with the process, and this one goes on
    alone = dist.get_rank() == 1
    start = time.monotonic()
    try:
        with anyrank.Checkpoints(
            path, run.state, every=1, background=background, on_commit=lambda record: None
        ) as ckpts:
            for step in ckpts.steps(until=9):
                if alone and step.number == 2 and where == "before":
                    raise ValueError("cannot decode image 17")
                run.train(step)
                if alone and step.number == 2:
                    raise ValueError("cannot decode image 17")
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", time.monotonic() - start


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_rank_that_raises_ends_the_run_on_all_within_seconds(
    tmp_path: Path, where: str, background: bool
) -> None:
    first, second = run_ranks(2, job_raise, str(tmp_path), where, background)
    assert second[:2] == ("ValueError", "cannot decode image 17")
    assert first[0] == "RankError"
    assert max(first[2], second[2]) < DEADLINE_SEC
    assert sorted(path.name for path in tmp_path.glob("step-*[0-9]"))[-1:] == ["step-00000002"]


def job_raise_in_own_loop(path: str) -> tuple[str, str, float]:
    """A rank raises after step_done, while a background save is in flight."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = anyrank.TrainState(model, optimizer)
    start = time.monotonic()
    try:
        with anyrank.Checkpoints(
            path, state, every=1, background=True, on_commit=lambda record: None
        ) as ckpts:
            for number in range(5):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpts.step_done()
                if number == 2 and dist.get_rank() == 1:
                    start = time.monotonic()
                    raise ValueError("cannot decode image 17")
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", 0.0


def test_an_exception_beside_a_background_save_keeps_its_cause(tmp_path: Path) -> None:
    first, second = run_ranks(2, job_raise_in_own_loop, str(tmp_path))
    assert second[:2] == ("ValueError", "cannot decode image 17")
    assert first[0] == "RankError"
    assert max(first[2], second[2]) < 2 * DEADLINE_SEC


# -- ranks that leave the loop differently --------------------------------------------------------


def job_leave(path: str, how: str) -> tuple[str, float, int, list[int]]:
    """Rank 1 leaves step 1 otherwise than rank 0, and neither raises."""
    run = Run()
    alone = dist.get_rank() == 1
    start, error = time.monotonic(), "none"
    ckpts = anyrank.Checkpoints(path, run.state)
    try:
        with ckpts:
            for step in ckpts.steps(until=9):
                if step.number == 1 and alone and how == "before the optimizer's step":
                    for _, rows in step.microbatches(run.model):
                        step.backward(run.model(rows.double()).square().mean())
                    break
                run.train(step)
                if step.number == 1:
                    break
    except anyrank.AnyrankError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, time.monotonic() - start, run.state.step, [one.step for one in ckpts.saved()]


def test_ranks_that_leave_at_other_steps_are_told_alike(tmp_path: Path) -> None:
    answers = run_ranks(2, job_leave, str(tmp_path), "before the optimizer's step")
    assert [answer[2] for answer in answers] == [2, 1]
    assert answers[0][0] == answers[1][0]
    assert answers[0][0].startswith("CheckpointError: ")
    assert "they are at steps [2, 1]" in answers[0][0]
    assert max(answer[1] for answer in answers) < DEADLINE_SEC
    assert answers[0][3] == []
