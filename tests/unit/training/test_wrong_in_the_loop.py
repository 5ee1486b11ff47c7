"""What a script gives in the middle of a run, and is refused by its name."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import anyrank
from anyrank import CheckpointError, RecomputeError
from anyrank.testing import run_ranks


class Growing:
    """A dataset whose length is set from outside."""

    def __init__(self) -> None:
        self.length = 8

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2)


def epoch(loader: anyrank.ElasticLoader, model: nn.Module) -> None:
    for step in loader:
        for batch in step.microbatches(model):
            step.backward(model(batch).sum())


@pytest.mark.parametrize("length", [10, 7])
def test_a_dataset_that_changes_its_length_is_refused_at_the_next_epoch(length: int) -> None:
    data, model = Growing(), nn.Linear(2, 1)
    loader = anyrank.ElasticLoader(data, global_batch=4, microbatch=2)
    epoch(loader, model)
    data.length = length
    with pytest.raises(CheckpointError, match=f"had 8 samples .*, and has {length} now.* Keep it"):
        epoch(loader, model)


class Holder:
    """A part whose state is deep."""

    def __init__(self, levels: int) -> None:
        self.state: dict[str, Any] = {}
        inner = self.state
        for _ in range(levels):
            inner["x"] = {}
            inner = inner["x"]
        if not levels:
            self.state["me"] = [self.state]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("levels", [0, 400])
def test_a_state_without_end_is_refused_by_the_name_of_its_part(
    tmp_path: Path, levels: int
) -> None:
    state = anyrank.TrainState(nn.Linear(1, 1), tracker=Holder(levels))
    ckpts = anyrank.Checkpoints(tmp_path / "run", state)
    with pytest.raises(
        CheckpointError, match=r"tracker\.\w+.*: is nested more than 100 levels deep"
    ):
        ckpts.save()
    ckpts.close()
    assert not list(tmp_path.glob("run/step-*"))


def test_a_state_of_many_levels_is_saved(tmp_path: Path) -> None:
    holder = Holder(99)
    state = anyrank.TrainState(nn.Linear(1, 1), tracker=holder)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.save()
        before, holder.state = holder.state, {}
        ckpts.resume("must")
    assert holder.state == before


def test_a_tile_that_is_changed_in_place_is_refused() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    x = torch.randn(9, 3, requires_grad=True)
    tiled = anyrank.tile(double, chunk_size=4, in_dims=0, out_dims=0)
    with pytest.raises(RecomputeError, match=r"double.*modifies an argument in place\. Clone"):
        tiled(x * 1)


def steps_of_two(
    exact: bool = False,
) -> tuple[nn.Linear, torch.optim.Optimizer, anyrank.ElasticLoader]:
    """A model, its optimizer and a loader whose steps have two microbatches."""
    model = nn.Linear(2, 1)
    loader = anyrank.ElasticLoader(torch.ones(8, 2), global_batch=4, microbatch=2, exact=exact)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


@pytest.mark.parametrize("exact", [False, True])
def test_an_optimizer_that_steps_by_a_part_of_the_gradients_is_refused(exact: bool) -> None:
    model, optimizer, loader = steps_of_two(exact=exact)
    before = model.weight.detach().clone()
    steps = iter(loader)
    batches = (step := next(steps)).microbatches(model)
    next(batches)
    step.backward(model(torch.ones(2, 2)).sum())
    with pytest.raises(
        ValueError, match=r"step 0: SGD.step\(\) was called inside the loop .* Call step\(\) and"
    ):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_an_optimizer_steps_in_the_last_microbatch_where_gradients_are_whole_there() -> None:
    for weight, exact, is_allowed in ((None, False, True), (3, False, False), (None, True, False)):
        model, optimizer, loader = steps_of_two(exact=exact)
        steps = iter(loader)
        for batch in (step := next(steps)).microbatches(model):
            step.backward(model(batch).sum(), weight=weight)
            if step.is_last and is_allowed:
                optimizer.step()
            elif step.is_last:
                with pytest.raises(ValueError, match="gradients are incomplete"):
                    optimizer.step()


def test_gradients_that_are_reset_between_microbatches_are_an_error() -> None:
    model, optimizer, loader = steps_of_two()
    steps = iter(loader)
    step = next(steps)
    batches = step.microbatches(model)
    step.backward(model(next(batches)).sum())
    batch = next(batches)
    optimizer.zero_grad()
    with pytest.raises(
        ValueError, match=r"step 0: gradients of earlier .* were reset, probably by zero_grad"
    ):
        step.backward(model(batch).sum())


def test_other_models_may_step_and_be_reset_between_microbatches() -> None:
    model, _, loader = steps_of_two()
    critic, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in loader:
        for batch in step.microbatches(nn.ModuleList([critic, model])):
            step.backward(critic(model(batch)).sum() + other(batch[:, :1]).sum() * 0)
            critic.zero_grad()  # the generator's loss gave it some
            optimizer.step()
        assert critic.weight.grad is None
        assert model.weight.grad is not None


def test_another_models_optimizer_may_step_in_the_loop_over_a_stream() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader.from_shards(
        ["a", "b", "c"], lambda _: torch.ones(6, 2), global_batch=6, microbatch=2
    )
    before = other.weight.detach().clone()
    for step in loader:
        for batch in step.microbatches(model):
            step.backward(model(batch).mean())
            other(batch).mean().backward()
            optimizer.step()
    assert not torch.equal(other.weight, before)


def step_beside_frozen() -> bool:
    """A step in the only microbatch of a rank, where a part without a wrapper is frozen."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    both = nn.ModuleList([model, nn.Linear(2, 1).requires_grad_(requires_grad=False)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.ones(8, 2), global_batch=4, microbatch=2)
    before = model.module.weight.detach().clone()
    for step in loader:
        for batch in step.microbatches(both):
            step.backward(model(batch).mean())
            optimizer.step()
        optimizer.zero_grad()
    return not torch.equal(model.module.weight, before)


def test_an_optimizer_steps_where_only_frozen_parameters_have_no_wrapper() -> None:
    assert run_ranks(2, step_beside_frozen) == [True, True]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: anyrank.ElasticLoader,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[float]:
    """An epoch; returns a random number of each microbatch."""
    drawn: list[float] = []
    for step in loader:
        for batch in step.microbatches(model):
            meanwhile()
            drawn.append(random.random())
            step.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    return drawn


@pytest.fixture
def slow_hook() -> Iterator[None]:
    """What lets other threads run within an optimizer's step."""
    handle = register_optimizer_step_pre_hook(lambda *_: time.sleep(0))
    yield
    handle.remove()


@pytest.mark.usefixtures("slow_hook")
@pytest.mark.parametrize("exact", [False, True])
def test_another_threads_optimizer_steps_while_passes_begin_and_end(exact: bool) -> None:
    other = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    model, own, loader = steps_of_two(exact=exact)
    train(model, own, loader)
    errors: list[Exception] = []
    has_ended, has_stepped = threading.Event(), threading.Event()

    def step_on() -> None:
        try:
            while not has_ended.is_set():
                optimizer.step()
                has_stepped.set()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=step_on)
    thread.start()
    has_stepped.wait(60)
    for _ in range(15):
        train(model, own, loader)
    has_ended.set()
    thread.join(60)
    assert not errors


@pytest.mark.parametrize("error", [None, KeyError("of the body")])
def test_a_pass_that_was_left_ends_though_its_iterator_is_kept(error: KeyError | None) -> None:
    expected = train(*steps_of_two())
    model, optimizer, loader = steps_of_two()
    random.seed(1)
    kept: list[object] = []

    def leave() -> None:
        for step in loader:
            batches = step.microbatches(model)
            kept.append(batches)  # as a progress bar, or a traceback, keeps it
            for batch in batches:
                step.backward(model(batch).sum())
                if error is not None:
                    raise error
                break
            break

    if error is None:
        leave()
    else:
        with pytest.raises(KeyError):
            leave()
    assert random.random() == random.Random(1).random()
    optimizer.step()  # of a loop of one's own, without the loader
    assert train(model, optimizer, loader, lambda: (kept.clear(), gc.collect())) == expected


def test_a_kept_loop_over_the_loader_ends_its_pass_when_another_begins() -> None:
    expected = train(*steps_of_two())
    model, optimizer, loader = steps_of_two()
    steps = iter(loader)
    kept = [steps, (step := next(steps)).microbatches(model)]
    step.backward(model(next(kept[1])).sum())
    assert train(model, optimizer, loader, lambda: (kept.clear(), gc.collect())) == expected
