"""SIGTERM in a loop within a step: said at once, and the last whole step is saved where asked."""

from __future__ import annotations

import gc
import logging
import signal
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import anyrank
from anyrank.runs.resume.signals import PendingSignals


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
    assert came.startswith(
        "received SIGTERM: the run will be saved and stopped after the current step"
    )
    assert f"{tmp_path / 'run'}: step 4" in came
    assert over == f"SIGTERM: step {saved} is saved, and the run stops here"
    run = anyrank.Checkpoints(tmp_path / "run", parts()[2]).saved()
    assert [(step.step, step.samples) for step in run] == [(saved, 4 * saved)]
    assert train(tmp_path / "run", 6) == whole[saved:]


def test_sigusr1_is_said_and_saved_at_the_end_of_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "anyrank.resume"):
        train(tmp_path, 6, at=3, where="saved")
    (came,) = caplog.messages
    assert came.startswith("received SIGUSR1: the run will be saved after the current step")
    saved = anyrank.Checkpoints(tmp_path, parts()[2]).saved()
    assert [step.step for step in saved] == [6, 4]


def own_loop(folder: Path, at: str, ends: bool = True, is_known: bool = True) -> anyrank.TrainState:
    """A loop of one's own; in its first step SIGTERM comes `at` a place, and is looked for."""
    model, optimizer, state = parts()
    if not is_known:
        state = anyrank.TrainState(model, data=state.data)
    with anyrank.Checkpoints(folder, state) as ckpts:
        ckpts.resume()
        for step in state.data:
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
                if at == "within" and step.is_last:
                    look(ckpts, ends)
            if at == "before":
                look(ckpts, ends)
            optimizer.step()
            optimizer.zero_grad()
            if at == "after":
                look(ckpts, ends)
            if at == "done":
                signal.raise_signal(signal.SIGTERM)
            ckpts.step_done()
    return state


def look(ckpts: anyrank.Checkpoints, ends: bool) -> None:
    if ends:
        signal.raise_signal(signal.SIGTERM)
    ckpts.end_if_asked()


@pytest.mark.parametrize(("at", "saved"), [("within", 0), ("before", 0), ("after", 1), ("done", 1)])
def test_in_a_loop_of_ones_own(at: str, saved: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        own_loop(tmp_path, at)
    run = anyrank.Checkpoints(tmp_path, parts()[2]).saved()
    assert [(step.step, step.samples) for step in run] == [(saved, 4 * saved)]
    # The rest of the run is that of one that was not stopped.
    ends = [own_loop(tmp_path / run, "never") for run in ("", "whole")]
    weights = [state.parts.by_name["model"].weight for state in ends]
    assert torch.equal(*weights)
    assert [state.step for state in ends] == [24, 24]


@pytest.mark.parametrize("at", ["within", "before", "after"])
def test_nothing_is_counted_where_no_signal_has_come(at: str, tmp_path: Path) -> None:
    assert own_loop(tmp_path, at, ends=False).step == 24


def test_without_data_that_is_counted_the_optimizer_alone_says_it(tmp_path: Path) -> None:
    model, optimizer, _ = parts()
    state = anyrank.TrainState(model, optimizer)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        optimizer.step()  # before the run begins: of none of its steps
        ckpts.resume()
        for _ in range(3):
            ckpts.end_if_asked()  # of a step whose optimizer has not stepped
            optimizer.step()
            ckpts.step_done()
        optimizer.step()
        with pytest.raises(SystemExit):
            look(ckpts, True)
    assert [step.step for step in ckpts.saved()] == [4]


def test_a_step_without_a_known_optimizer_that_is_not_done_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(anyrank.CheckpointError, match="in the middle of a step"):
        own_loop(tmp_path, "after", is_known=False)


def test_a_run_that_is_dropped_records_no_signal_and_leaves_no_hook(tmp_path: Path) -> None:
    _, optimizer, state = parts()
    before = len(optimizer._optimizer_step_post_hooks)  # pyright: ignore[reportPrivateUsage]
    ckpts = anyrank.Checkpoints(tmp_path, state)
    ckpts.save()
    ckpts.step_done()
    gone = weakref.ref(ckpts)
    gc.disable()  # at once, and not when Python looks for circles
    try:
        del ckpts
        assert gone() is None
    finally:
        gc.enable()
    assert len(optimizer._optimizer_step_post_hooks) == before  # pyright: ignore[reportPrivateUsage]
    assert not any(str(tmp_path) in run.describe() for run in PendingSignals.open_runs)


def test_a_run_that_its_optimizer_holds_is_freed_with_it(tmp_path: Path) -> None:
    """As integrations have it, whose hooks on the optimizer hold the run."""

    def begin() -> weakref.ref[anyrank.Checkpoints]:
        _, optimizer, state = parts()
        ckpts = anyrank.Checkpoints(tmp_path, state)
        optimizer.register_step_post_hook(lambda *_: print(ckpts))
        ckpts.save()
        return weakref.ref(ckpts)

    gone = begin()
    gc.collect()
    assert gone() is None
