"""The loop of `Checkpoints.steps`: where it ends, which steps count, and what is saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import anyrank

SAMPLES, BATCH, EPOCH = 10, 4, 3  # three steps an epoch, of 4, 4 and 2 samples


def rows() -> torch.Tensor:
    return torch.arange(float(SAMPLES))[:, None]


class Run:
    """A run whose samples are numbers; `seen` has those of each body, counted or not."""

    def __init__(self, **parts: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.loader = anyrank.ElasticLoader(rows(), global_batch=BATCH, microbatch=2)
        self.state = anyrank.TrainState(self.model, self.optimizer, data=self.loader, **parts)
        self.seen: list[list[int]] = []

    def read(self, step: Any) -> None:
        """Forward and backward."""
        self.seen.append([])
        for batch in step.microbatches(self.model):
            self.seen[-1] += batch.int().flatten().tolist()
            step.backward(self.model(batch).square().mean())

    def train(self, step: Any) -> None:
        """A whole body."""
        self.read(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[float]:
        return [float(p.detach()) for p in self.model.parameters()]


def numbers(ckpts: anyrank.Checkpoints) -> list[int]:
    return [saved.step for saved in ckpts.saved()]


def uninterrupted(path: Path, until: int) -> Run:
    run = Run()
    with anyrank.Checkpoints(path / "uninterrupted", run.state) as ckpts:
        for step in ckpts.steps(until=until):
            run.train(step)
    return run


# -- where it ends --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        ({"until": 2}, 2),
        ({"until": 3}, 3),
        ({"until": 7}, 7),
        ({"epochs": 1}, 3),
        ({"epochs": 2}, 6),
    ],
    ids=str,
)
def test_it_goes_over_epochs_until_the_limit(
    tmp_path: Path, limit: dict[str, Any], steps: int
) -> None:
    run = Run()
    with anyrank.Checkpoints(tmp_path, run.state) as ckpts:
        for step in ckpts.steps(**limit):
            assert (step.number, step.epoch) == (run.state.step, run.state.epoch)
            run.train(step)
        assert numbers(ckpts) == [steps]  # at the end, and not only on leaving
    full, rest = divmod(steps, EPOCH)
    assert run.state.step == len(run.seen) == steps
    assert run.state.samples == run.loader.samples == full * SAMPLES + rest * BATCH
    assert run.state.epoch == full
    for epoch in range(full):
        seen = run.seen[epoch * EPOCH : (epoch + 1) * EPOCH]
        assert sorted(sample for body in seen for sample in body) == list(range(SAMPLES))
    assert [tuple(one) for one in run.loader.receipts] == [
        (epoch, SAMPLES, "exactly once") for epoch in range(full)
    ]


@pytest.mark.parametrize("limit", [{"until": 4}, {"epochs": 1}], ids=str)
def test_a_finished_run_gets_no_step(tmp_path: Path, limit: dict[str, Any]) -> None:
    for attempt in range(3):
        run, records = Run(), list[Any]()
        with anyrank.Checkpoints(tmp_path, run.state, on_commit=records.append) as ckpts:
            report = ckpts.resume()
            assert (report is None) is (attempt == 0)
            for step in ckpts.steps(**limit):
                assert attempt == 0
                run.train(step)
        assert len(records) == (attempt == 0)


def test_no_step_at_all_saves_nothing(tmp_path: Path) -> None:
    run = Run()
    with anyrank.Checkpoints(tmp_path, run.state) as ckpts:
        assert list(ckpts.steps(until=0)) == []
        assert list(ckpts.steps(epochs=0)) == []
    assert numbers(ckpts) == []


@pytest.mark.parametrize("limit", [{}, {"until": 3, "epochs": 1}], ids=str)
def test_no_limit_or_two_are_an_error_at_the_call(tmp_path: Path, limit: dict[str, int]) -> None:
    with (
        anyrank.Checkpoints(tmp_path, Run().state) as ckpts,
        pytest.raises(ValueError, match=r"needs exactly one limit: until= .* or epochs="),
    ):
        ckpts.steps(**limit)


@pytest.mark.parametrize("data", [None, torch.optim.SGD([torch.zeros(1)], lr=0.1)])
def test_a_state_without_a_loader_has_no_steps(tmp_path: Path, data: Any) -> None:
    state = anyrank.TrainState(nn.Linear(1, 1), data=data)
    with (
        anyrank.Checkpoints(tmp_path, state) as ckpts,
        pytest.raises(TypeError, match=r"ElasticLoader.*or call step_done\(\)"),
    ):
        ckpts.steps(until=3)


# -- what is left by break or return --------------------------------------------------------------


class Stop(Exception):
    """Of the body."""


def watched(steps: Iterable[Any]) -> Iterator[Any]:
    """As a progress bar goes over a loop."""
    yield from steps


class Bar:
    """As tqdm: an object that holds the loop, and whose iterator is a generator."""

    def __init__(self, steps: Iterable[Any]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        try:
            for step in self.steps:
                self.last = step.number
                yield step
        finally:
            self.closed = True


WRAPPERS: dict[str, Callable[[Iterable[Any]], Iterable[Any]]] = {
    "plain": lambda steps: steps,
    "iterator": iter,
    "generator": watched,
    "progress bar": Bar,
}
Body = Callable[[Any], bool]  # whether the loop is left at its end


def by_break(steps: Iterable[Any], body: Body, _: int) -> None:
    for step in steps:
        try:
            if body(step):
                raise Stop
        except Stop:
            break


def by_return(steps: Iterable[Any], body: Body, _: int) -> None:
    for step in steps:
        with torch.enable_grad():
            if body(step):
                return


def by_exception(steps: Iterable[Any], body: Body, _: int) -> None:
    with suppress(Stop):
        for step in steps:
            if body(step):
                raise Stop


def by_slice(steps: Iterable[Any], body: Body, number: int) -> None:
    for step in itertools.islice(steps, number):
        body(step)


def by_next(steps: Any, body: Body, number: int) -> None:
    iterator = iter(steps) if isinstance(steps, Bar) else steps
    for _ in range(number):
        body(next(iterator))


class Episode(NamedTuple):
    """A loop that is left in the body after some whole ones, and how the run goes on after it."""

    wrap: str
    leave: Callable[[Iterable[Any], Body, int], None]
    whole: int
    how_far: str
    then: str

    def play(self, run: Run, ckpts: anyrank.Checkpoints) -> None:
        steps = WRAPPERS[self.wrap](ckpts.steps(until=UNTIL))
        last = run.state.step + self.whole

        def body(step: Any) -> bool:
            if step.number < last or self.how_far == "optimizer":
                run.train(step)
            elif self.how_far == "half":
                next(step.microbatches(run.model))
            elif self.how_far == "backward":
                run.read(step)
                run.seen.pop()
            return step.number == last

        self.leave(steps, body, self.whole + 1)
        if self.then == "the same loop" and self.how_far == "optimizer":
            iterator = iter(steps)
            run.train(next(iterator))


EPISODES = st.builds(
    Episode,
    wrap=st.sampled_from([*WRAPPERS]),
    leave=st.sampled_from([by_break, by_return, by_exception, by_slice, by_next]),
    whole=st.integers(0, 2),
    how_far=st.sampled_from(["nothing", "half", "backward", "optimizer"]),
    then=st.sampled_from(["a new loop", "the same loop", "a new process"]),
)
UNTIL = 12  # three episodes have as many at most


@settings(max_examples=40)
@given(episodes=st.lists(EPISODES, max_size=3))
def test_a_step_counts_once_and_when_it_is_whole_however_its_body_was_left(
    tmp_path_factory: pytest.TempPathFactory, episodes: list[Episode]
) -> None:
    path, seen = tmp_path_factory.mktemp("left"), list[list[int]]()
    run = Run()
    while run.state.step < UNTIL:
        run = Run()
        with anyrank.Checkpoints(path, run.state) as ckpts:
            ckpts.resume()
            while episodes:
                episode = episodes.pop(0)
                episode.play(run, ckpts)
                if episode.then == "a new process":
                    break
            else:
                for step in ckpts.steps(until=UNTIL):
                    run.train(step)
        seen += run.seen
    whole = uninterrupted(path, UNTIL)
    assert seen == whole.seen
    assert run.values() == whole.values()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rolls_back", [False, True])
@pytest.mark.parametrize("how_far", ["half", "backward"])
def test_gradients_of_a_step_that_was_left_are_not_added_to_when_it_comes_again(
    tmp_path: Path, how_far: str, rolls_back: bool, exact: bool
) -> None:
    def training(name: str) -> tuple[Run, anyrank.Checkpoints]:
        run = Run()
        run.loader = anyrank.ElasticLoader(rows(), global_batch=BATCH, microbatch=2, exact=exact)
        run.state = anyrank.TrainState(run.model, run.optimizer, data=run.loader)
        return run, anyrank.Checkpoints(tmp_path / name, run.state)

    run, ckpts = training("left")
    with ckpts:
        for step in ckpts.steps(until=4):
            if step.number == 2 and how_far == "backward":
                run.read(step)
                break
            if step.number == 2:
                for batch in step.microbatches(run.model):
                    step.backward(run.model(batch).square().mean())
                    break
                break
            run.train(step)
        if how_far == "backward" or not exact:
            assert all(p.grad is not None for p in run.model.parameters())
        if rolls_back:
            ckpts.save()
            ckpts.resume("must")
        for step in ckpts.steps(until=4):
            run.train(step)
    whole, ckpts = training("whole")
    with ckpts:
        for step in ckpts.steps(until=4):
            whole.train(step)
    assert run.values() == whole.values()


def test_an_iterator_that_is_kept_when_the_run_is_closed_counts_no_step_twice(
    tmp_path: Path,
) -> None:
    run = Run()
    with anyrank.Checkpoints(tmp_path, run.state) as ckpts:
        steps = iter(ckpts.steps(until=9))
        for step in steps:
            run.train(step)
            if step.number == 2:
                break
    with pytest.raises(
        anyrank.CheckpointError, match=r"no longer valid: .* at step 2\. Call steps\(\) again"
    ):
        next(steps)
    assert (run.state.step, run.loader.step, numbers(ckpts)) == (3, 3, [3])


def test_a_body_without_the_optimizers_step_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    with anyrank.Checkpoints(tmp_path, run.state) as ckpts:
        for step in ckpts.steps(until=5):
            run.read(step)
            if step.number % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        "step 0: gradients were computed, but no optimizer in the TrainState stepped"
    )


def test_a_run_at_a_relative_path_does_not_follow_the_process_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = Run()
    with anyrank.Checkpoints("run", run.state, every=1) as ckpts:
        for step in ckpts.steps(until=1):
            run.train(step)
        assert ckpts.latest() == "run/step-00000001"
        monkeypatch.chdir(tmp_path / "elsewhere")
        for step in ckpts.steps(until=2):
            run.train(step)
        assert ckpts.latest() == f"{tmp_path}/run/step-00000002"
        report = ckpts.resume()
        assert report is not None
        assert report.path == ckpts.latest()
    assert numbers(ckpts) == [2, 1]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_trainer_that_is_a_generator_saves_what_was_due_when_its_consumer_drops_it(
    tmp_path: Path,
) -> None:
    run = Run()

    def train() -> Iterator[int]:
        with anyrank.Checkpoints(tmp_path, run.state, every=2) as ckpts:
            for step in ckpts.steps(until=9):
                run.train(step)
                yield step.number

    for number in train():
        if number == 2:
            break
    with closing(anyrank.Checkpoints(tmp_path, run.state)) as ckpts:
        assert numbers(ckpts) == [2]
    assert run.state.step == 3


def test_a_progress_bar_of_tqdm(tmp_path: Path) -> None:
    tqdm = pytest.importorskip("tqdm")
    run = Run()
    with anyrank.Checkpoints(tmp_path, run.state) as ckpts:
        for step in tqdm.tqdm(ckpts.steps(until=9), disable=False):
            run.train(step)
            if step.number == 2:
                break
    assert numbers(ckpts) == [3]


def test_step_done_in_the_body_is_refused(tmp_path: Path) -> None:
    run = Run()
    with closing(anyrank.Checkpoints(tmp_path, run.state)) as ckpts:
        steps = iter(ckpts.steps(until=9))
        run.train(next(steps))
        with pytest.raises(anyrank.CheckpointError, match="counts each step itself"):
            ckpts.step_done()
        assert run.state.step == 0


def test_without_an_optimizer_in_the_state_a_step_is_whole_when_its_microbatches_ran(
    tmp_path: Path,
) -> None:
    run = Run()
    state = anyrank.TrainState(run.model, data=run.loader)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        for step in ckpts.steps(until=9):
            run.read(step)
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            run.optimizer.zero_grad()
            if step.number == 2:
                break
    assert numbers(ckpts) == [3]


# -- exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_block_that_an_exception_leaves_saves_nothing(tmp_path: Path, has_stepped: bool) -> None:
    run = Run()
    ckpts = anyrank.Checkpoints(tmp_path, run.state, every=2)

    def train() -> None:
        with ckpts:
            for step in ckpts.steps(until=9):
                run.train(step) if has_stepped or step.number < 3 else run.read(step)
                if step.number == 3:
                    raise Stop

    with pytest.raises(Stop):
        train()
    assert (run.state.step, numbers(ckpts)) == (3 + has_stepped, [2])
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_process_is_an_exception_too(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    run = Run()
    ckpts = anyrank.Checkpoints(tmp_path, run.state)

    def train() -> None:
        with ckpts:
            for step in ckpts.steps(until=9):
                run.train(step)
                raise kind

    with pytest.raises(kind):
        train()
    assert (run.state.step, numbers(ckpts)) == (1, [])


# -- what is saved --------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize(("until", "expected"), [(4, [4, 2]), (5, [5, 4, 2])])
def test_it_saves_when_due_and_once_at_the_end(
    tmp_path: Path, until: int, expected: list[int], background: bool
) -> None:
    run = Run()
    committed: list[int] = []
    with anyrank.Checkpoints(
        tmp_path,
        run.state,
        every=2,
        background=background,
        on_commit=lambda record: committed.append(record.step),
    ) as ckpts:
        for step in ckpts.steps(until=until):
            run.train(step)
    assert numbers(ckpts) == expected
    assert committed == expected[::-1]
    again = Run()
    with anyrank.Checkpoints(tmp_path, again.state) as ckpts:
        ckpts.resume("must")
    assert (again.state.step, again.values()) == (until, run.values())


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_close_saves_no_step_that_was_left(tmp_path: Path, background: bool) -> None:
    run = Run()
    with closing(anyrank.Checkpoints(tmp_path, run.state, every=2, background=background)) as ckpts:
        for step in ckpts.steps(until=9):
            run.train(step)
            if step.number == 2:
                break
    assert run.state.step == 3
    assert numbers(ckpts) == [2]


def test_a_save_within_the_body_is_refused(tmp_path: Path) -> None:
    run = Run()
    with anyrank.Checkpoints(tmp_path, run.state) as ckpts:
        for step in ckpts.steps(until=2):
            run.train(step)
            with pytest.raises(
                anyrank.CheckpointError, match="Call it after the loop body of steps"
            ):
                ckpts.save()
    assert numbers(ckpts) == [2]


# -- a GradScaler ---------------------------------------------------------------------------------


class Scaler:
    """Leaves out the optimizer's first step, as a GradScaler does whose gradients overflow."""

    def __init__(self) -> None:
        self.skipped = 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.skipped:
            optimizer.step()
        self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]


def test_a_step_that_the_scaler_left_out_counts_when_the_body_ends(tmp_path: Path) -> None:
    scaler = Scaler()
    run = Run(scaler=scaler)
    before = run.values()
    with anyrank.Checkpoints(tmp_path, run.state) as ckpts:
        for step in ckpts.steps(until=1):
            run.read(step)
            scaler.step(run.optimizer)
            run.optimizer.zero_grad()
    assert run.values() == before
    assert numbers(ckpts) == [1]
    assert run.state.samples == BATCH


@pytest.mark.parametrize("enabled", [False, True])
def test_the_optimizers_step_within_a_grad_scaler_is_seen(tmp_path: Path, enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=enabled)
    run = Run(scaler=scaler)
    with anyrank.Checkpoints(tmp_path, run.state) as ckpts:
        for step in ckpts.steps(until=9):
            for batch in step.microbatches(run.model):
                step.backward(scaler.scale(run.model(batch).square().mean()))
            scaler.step(run.optimizer)
            scaler.update()
            break
    assert numbers(ckpts) == [1]


def leave_early(run: Run, steps: Iterable[Any], has_stepped: bool) -> None:
    """Break out of the microbatches of step 2; then step the optimizer and break, or go on."""
    for step in steps:
        if step.number < 2:
            run.train(step)
            continue
        for _ in step.microbatches(run.model):
            break
        if has_stepped:
            run.optimizer.step()
            break


@pytest.mark.parametrize(
    ("has_stepped", "match"),
    [(True, "before all of its microbatches"), (False, "not complete")],
)
def test_a_step_whose_microbatches_were_not_all_run_does_not_count(
    tmp_path: Path, has_stepped: bool, match: str
) -> None:
    run = Run()
    ckpts = anyrank.Checkpoints(tmp_path, run.state)

    def train() -> None:
        with ckpts:
            leave_early(run, ckpts.steps(until=9), has_stepped)

    with pytest.raises(anyrank.CheckpointError, match=match):
        train()
    assert run.state.step == 2
    assert numbers(ckpts) == []


# -- a dataset that is read in this process ----------------------------------------------------


class Changing(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that depend on what was read before, and on what the loop has set."""

    def __init__(self) -> None:
        self.reads = torch.zeros(16)
        self.noise = torch.Generator().manual_seed(7)
        self.level = 0.0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads[index] += 1
        drawn = torch.rand((), generator=self.noise)
        return torch.full((4,), index / 16 + self.level / float(self.reads[index]) + float(drawn))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"reads": self.reads.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.reads.copy_(state["reads"])


def changing_run(folder: Path, until: int) -> list[float]:
    """The levels that a run up to this step has seen in its rows, as losses."""
    torch.manual_seed(0)
    data, model = Changing(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(data, global_batch=8, microbatch=2)
    parts: dict[str, Any] = {"seen": data, "generators": {"noise": data.noise}}
    losses: list[float] = []
    with anyrank.Checkpoints(
        folder, anyrank.TrainState(model, optimizer, data=loader, **parts)
    ) as run:
        run.resume()
        for step in run.steps(until=until):
            data.level = float(step.number)
            for rows in step.microbatches(model):
                assert step.number == 0 or float(rows.mean()) > step.number / 4
                step.backward(model(rows).square().mean())
            losses.append(step.loss())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_a_dataset_in_this_process_is_read_within_its_step(tmp_path: Path) -> None:
    whole = changing_run(tmp_path / "whole", 6)
    parts = changing_run(tmp_path / "parts", 3) + changing_run(tmp_path / "parts", 6)
    assert parts == whole


def test_a_loop_over_a_step_itself_says_what_to_call() -> None:
    for step in Run().loader:
        with pytest.raises(TypeError, match=r"use step\.microbatches\(model\)"):
            for _ in step:
                pass
        with pytest.raises(TypeError, match=r"use step\.microbatches\(model\)"):
            step[0]
        assert not isinstance(step, Iterable)  # by which frameworks look for a batch's size
        break
