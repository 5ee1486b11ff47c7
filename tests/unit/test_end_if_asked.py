"""SIGTERM in a loop within a step: said at once, and the last whole step is saved where asked."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import anyrank


def parts() -> tuple[nn.Module, torch.optim.Optimizer, anyrank.TrainState]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.randn(96, 4), global_batch=4, microbatch=2)
    return model, optimizer, anyrank.TrainState(model, optimizer, data=loader)


def evaluate(ckpts: anyrank.Checkpoints, number: signal.Signals, batches: int = 3) -> None:
    for batch in range(batches):
        if batch == 1:
            signal.raise_signal(number)
        ckpts.end_if_asked()


def train(folder: Path, until: int, at: int = -1, where: str = "after") -> list[float]:
    """The losses; a signal comes in an evaluation before or after the optimizer's step."""
    model, optimizer, state = parts()
    losses: list[float] = []
    with anyrank.Checkpoints(folder, state, every=100) as ckpts:
        ckpts.resume()
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            if step.number == at and where == "before":
                evaluate(ckpts, signal.SIGTERM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(step.loss())
            if step.number == at and where != "before":
                evaluate(ckpts, signal.SIGUSR1 if where == "saved" else signal.SIGTERM)
    return losses


@pytest.mark.parametrize(("where", "saved"), [("after", 4), ("before", 3)])
def test_the_last_whole_step_is_saved_within_an_evaluation(
    where: str, saved: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(tmp_path / "whole", 6)
    with caplog.at_level(logging.WARNING, "anyrank.resume"), pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", 6, at=3, where=where)
    assert ended.value.code == 128 + signal.SIGTERM
    came, over = caplog.messages
    assert came.startswith("SIGTERM has come: the run is saved and ends when this step is complete")
    assert f"{tmp_path / 'run'}: step 4" in came
    assert over == f"SIGTERM: step {saved} is saved, and the run ends here"
    run = anyrank.Checkpoints(tmp_path / "run", parts()[2]).saved()
    assert [(step.step, step.samples) for step in run] == [(saved, 4 * saved)]
    assert train(tmp_path / "run", 6) == whole[saved:]


def test_sigusr1_is_said_and_saved_at_the_end_of_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "anyrank.resume"):
        train(tmp_path, 6, at=3, where="saved")
    (came,) = caplog.messages
    assert came.startswith("SIGUSR1 has come: the run is saved when this step is complete")
    saved = anyrank.Checkpoints(tmp_path, parts()[2]).saved()
    assert [step.step for step in saved] == [6, 4]


def own_loop(folder: Path, end: Callable[[anyrank.Checkpoints], None]) -> int:
    model, optimizer, state = parts()
    loader = state.data
    with anyrank.Checkpoints(folder, state) as ckpts:
        ckpts.resume()
        for step in loader:
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            signal.raise_signal(signal.SIGTERM)
            end(ckpts)
    return state.step


def done_first(ckpts: anyrank.Checkpoints) -> None:
    with pytest.raises(SystemExit):
        ckpts.step_done()
    raise SystemExit


def before_it_is_done(ckpts: anyrank.Checkpoints) -> None:
    ckpts.end_if_asked(has_stepped=True)


@pytest.mark.parametrize("end", [done_first, before_it_is_done])
def test_in_a_loop_of_ones_own(end: Callable[[anyrank.Checkpoints], None], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        own_loop(tmp_path, end)
    saved = anyrank.Checkpoints(tmp_path, parts()[2]).saved()
    assert [(step.step, step.samples) for step in saved] == [(1, 4)]


def test_a_step_of_ones_own_that_does_not_count_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(anyrank.CheckpointError, match="within a step"):
        own_loop(tmp_path, lambda ckpts: ckpts.end_if_asked())
