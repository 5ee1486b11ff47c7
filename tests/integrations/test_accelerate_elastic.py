"""A loop of Accelerate's, saved and resumed on other numbers of ranks by anyrank's Accelerator."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import anyrank
from anyrank.testing import Fault, RanksFailed, run_ranks

pytest.importorskip("accelerate")

from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch.distributed.fsdp import fully_shard

END, STOP, ROWS = 16, 6, 46  # an epoch has 4 steps


def fresh() -> None:
    """Accelerate keeps its state in classes, and a rank of the pool is one of several runs."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(arguments: list[str]) -> dict[str, Any]:
    """The example on this rank: its losses, what it read, and what it came to."""
    from examples import accelerate_resume

    fresh()
    ids: list[int] = []

    class Seen(accelerate_resume.Points):
        def __getitem__(self, index: int) -> Any:
            if len(self) == ROWS:
                ids.append(index)
            return super().__getitem__(index)

    with pytest.MonkeyPatch.context() as patch:  # the process is a rank of later tests as well
        patch.setattr(accelerate_resume, "Points", Seen)
        result = accelerate_resume.main(arguments)
    accelerator = result["accelerator"]
    run = accelerator.run
    found = {
        "losses": result["losses"],
        "errors": result["errors"],
        "ids": ids,
        "report": accelerator.report,
        "receipts": result["data"].loader.receipts,
        "counts": (run.step, run.samples, run.epoch),
        "ema": {name: tensor.clone() for name, tensor in result["ema"].state_dict().items()},
    }
    accelerator.free_memory()
    return found


@pytest.fixture(scope="module", autouse=True)
def ranks() -> None:
    """Four ranks that have imported the framework, all at a time."""
    run_ranks(4, fresh)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run on one rank, never stopped."""
    return run_ranks(1, train, ["--folder", str(tmp_path_factory.mktemp("reference"))])[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(3, train, ["--folder", folder, "--stop", str(STOP)])


@pytest.mark.slow
def test_three_ranks_continue_on_two_and_then_on_four(
    tmp_path: Path, reference: dict[str, Any], saved: tuple[str, list[dict[str, Any]]]
) -> None:
    folder, first = saved
    shutil.copytree(folder, tmp_path / "run")
    arguments = ["--folder", str(tmp_path / "run")]
    second = run_ranks(2, train, [*arguments, "--stop", "8"])
    third = run_ranks(4, train, arguments)
    for results, steps in ((first, range(STOP)), (second, range(STOP, 8)), (third, range(8, END))):
        for result in results:
            assert list(result["losses"]) == [step + 1 for step in steps]
            for step, loss in result["losses"].items():
                assert loss == pytest.approx(reference["losses"][step], rel=1e-9), step
    components = second[0]["report"].components
    assert {components[part] for part in ("scheduler", "data")} == {"exact"}
    # The rest of the second epoch: each sample on one of the ranks, and nothing else.
    read = [index for result in second for index in set(result["ids"])]
    assert sorted(read) == sorted(reference["ids"][ROWS + 24 : ROWS + ROWS])
    for result in third:
        assert result["counts"] == reference["counts"] == (END, 4 * ROWS, 4)
        assert result["receipts"] == [(epoch, ROWS, "exactly once") for epoch in range(4)]
        assert result["errors"][-2:] == pytest.approx(reference["errors"][-2:], rel=1e-9)
        for name, tensor in reference["ema"].items():
            torch.testing.assert_close(result["ema"][name], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_step_before(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    arguments = ["--folder", str(tmp_path / "run")]
    kill = Fault(0, "save.commit", "kill", 2)  # of step 10
    with pytest.raises(RanksFailed):
        run_ranks(2, train, arguments, faults=[kill], grace=2)
    results = run_ranks(2, train, arguments)
    assert results[0]["report"].step == 5
    assert list(results[0]["losses"]) == list(range(6, END + 1))
    for step, loss in results[0]["losses"].items():
        assert loss == pytest.approx(reference["losses"][step], rel=1e-9)


def exact(folder: str, stop: int) -> tuple[list[float], bytes]:
    """Losses of steps, and the bytes of the weights that they led to."""
    on = setup(Path(folder), exact=True)
    on.accelerator.load_state()
    losses = [*steps(on, stop)]
    on.accelerator.end_training()
    weights = torch.cat([parameter.flatten() for parameter in on.model.parameters()])
    return losses, weights.detach().numpy().tobytes()


@pytest.mark.slow
def test_exact_runs_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    (alone, weights), *_ = run_ranks(1, exact, str(tmp_path / "one"), 8)
    first = run_ranks(3, exact, str(tmp_path / "run"), 3)
    second = run_ranks(2, exact, str(tmp_path / "run"), 8)
    assert [first[0][0] + second[0][0]] == [alone]
    assert {result[1] for result in second} == {weights}


def sharded(folder: str) -> tuple[bytes, list[str]]:
    """The weights after clipped steps, of a model that FSDP2 shards; and the loader's notes.

    Accelerate shards on accelerators alone, so it is as if it had prepared the model.
    """
    fresh()
    accelerator = anyrank.integrations.accelerate.Accelerator(
        cpu=True, folder=folder, global_batch=6, exact=True
    )
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Dropout(0.2)))
    accelerator._wrapped.append(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    on = Setup(accelerator, model, *accelerator.prepare(optimizer, scheduler, points()))
    assert len([*steps(on, 3)]) == 3
    weights = [parameter.full_tensor().detach().flatten() for parameter in model.parameters()]
    accelerator.end_training()
    return torch.cat(weights).numpy().tobytes(), on.data.loader.notes


@pytest.mark.slow
@pytest.mark.exact_fsdp
def test_clipping_of_shards_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    results = [run_ranks(n, sharded, str(tmp_path / str(n)))[0] for n in (1, 3)]
    assert results[0] == results[1]
    assert results[0][1] == []


# -- one process ----------------------------------------------------------------------------------


class Setup(NamedTuple):
    """A prepared training."""

    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any
    data: Any


def setup(folder: Path, loader: Any = None, **options: Any) -> Setup:
    fresh()
    accelerator = anyrank.integrations.accelerate.Accelerator(
        cpu=True, folder=folder, global_batch=6, **options
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / 20))
    data = points() if loader is None else loader
    return Setup(accelerator, *accelerator.prepare(model, optimizer, scheduler, data))


def points(rows: int = 28, **options: Any) -> DataLoader[torch.Tensor]:
    data: Any = torch.linspace(0, 1, 4 * rows).view(rows, 4)
    return DataLoader(data, **{"batch_size": 2, "shuffle": True, **options})


def steps(on: Setup, stop: int | None = None, epochs: int = 2) -> Iterator[float]:
    """The losses of steps, in the loop of a script; stops by `break`."""
    for _ in range(epochs):
        for batch in on.data:
            with on.accelerator.accumulate(on.model):
                on.accelerator.backward(on.model(batch).square().mean())
                on.accelerator.clip_grad_norm_(on.model.parameters(), 0.5)
                on.optimizer.step()
                on.scheduler.step()
                on.optimizer.zero_grad()
            if on.accelerator.sync_gradients:
                yield on.accelerator.step_loss()
                if stop is not None and on.optimizer.state_dict()["state"][0]["step"] == stop:
                    return


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return [*steps(setup(tmp_path_factory.mktemp("whole") / "run"))]


@pytest.mark.parametrize("stop", [1, 5, 7])
@pytest.mark.parametrize("end", ["save_state", "end_training", "free_memory"])
def test_a_loop_goes_on_where_it_was_left(
    stop: int, end: str, tmp_path: Path, whole: list[float]
) -> None:
    first = setup(tmp_path / "run")
    assert len(first.data) == 5
    losses = [*steps(first, stop)]
    path = getattr(first.accelerator, end)()
    run = first.accelerator.run
    assert run is None if end == "free_memory" else run.step == stop
    second = setup(tmp_path / "run")
    second.accelerator.load_state(path if end == "save_state" else None)
    assert second.accelerator.run.step == stop
    assert [*losses, *steps(second)] == whole
    assert second.data.loader.receipts == [(epoch, 28, "exactly once") for epoch in (0, 1)]
    second.accelerator.save_state()
    assert second.scheduler.get_last_lr() == [0.02 * (1 - 10 / 20)]


def test_a_pass_after_a_break_has_the_rest_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on = setup(tmp_path / "run")
    assert [len([*steps(on, stop, epochs=1)]) for stop in (2, None, None)] == [2, 3, 5]
    assert [
        m
        for m in caplog.messages
        if "stopped in epoch 0; this one yields the remaining batches" in m
    ]
    assert len([m for m in caplog.messages if "stopped in epoch" in m]) == 1


def test_saves_are_made_when_due_and_the_path_that_is_given_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on = setup(tmp_path / "run", every=3)
    for number, _ in enumerate(steps(on), 1):
        if number == 7:
            on.accelerator.save_state(tmp_path / "checkpoint-7")
            on.accelerator.save_state()  # is there already
    on.accelerator.save_state()
    assert "the run is saved in" in caplog.text
    with anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState()) as ckpts:
        assert [saved.step for saved in ckpts.saved()] == [10, 9, 7]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_epochs_that_were_finished_before_step_no_schedule(tmp_path: Path) -> None:
    def epochs(on: Setup, number: int) -> list[float]:
        for _ in range(number):
            for batch in on.data:
                on.accelerator.backward(on.model(batch).square().mean())
                on.optimizer.step()
                on.optimizer.zero_grad()
            on.scheduler.step()
        on.accelerator.save_state()
        return on.scheduler.get_last_lr()

    epochs(setup(tmp_path / "run"), 2)
    second = setup(tmp_path / "run")
    second.accelerator.load_state()
    assert epochs(second, 3) == epochs(setup(tmp_path / "whole"), 3) == [0.02 * (1 - 3 / 20)]


def rates_of_epochs(
    folder: Path, epochs: int, kind: str = "epochs", stop: int | None = None, **options: Any
) -> list[float]:
    """The rate of each step in a loop whose code after an epoch steps the schedule; `stop` leaves
    the process at a step, as a kill does.
    """
    fresh()
    accelerator = anyrank.integrations.accelerate.Accelerator(
        cpu=True, folder=folder, global_batch=6, **options
    )
    optimizer = torch.optim.SGD((model := torch.nn.Linear(4, 4)).parameters(), lr=0.08)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if kind == "plateau":
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    model, optimizer, schedule, data, other = accelerator.prepare(
        model, optimizer, schedule, points(), points(8)
    )
    accelerator.load_state()
    rates: list[float] = []
    for _ in range(epochs):
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
                if len(rates) == stop:
                    accelerator._run.abandon(KeyboardInterrupt())
                    return rates
        for _ in other:  # an evaluation, in which a signal may come
            accelerator.end_if_asked()
        schedule.step(*[1.0] * (kind == "plateau"))
    accelerator.end_training()
    assert data.loader.receipts == [(epoch, 28, "exactly once") for epoch in range(epochs)]
    return rates


@pytest.mark.parametrize("every", [1, 5, "0.000001s", None])
@pytest.mark.parametrize("kind", ["epochs", "plateau"])
def test_the_code_after_an_epoch_belongs_to_its_last_step(
    kind: str, every: Any, tmp_path: Path
) -> None:
    whole = rates_of_epochs(tmp_path / "whole", 4, kind)
    for stop in (6, 10, 12):  # behind an epoch's end, at one, and in an epoch
        folder = tmp_path / str(stop)
        first = rates_of_epochs(folder, 4, kind, stop, every=every)
        with anyrank.Checkpoints(folder, anyrank.TrainState()) as ckpts:
            step = ckpts.saved()[0].step if ckpts.latest() else 0
        assert step == {1: stop - 1, 5: (stop - 1) // 5 * 5, None: 0}.get(every, stop - 1)
        assert [*first[:step], *rates_of_epochs(folder, 4, kind, every=every)] == whole
    rates_of_epochs(tmp_path / "two", 2, kind)
    assert rates_of_epochs(tmp_path / "two", 4, kind) == whole[10:]


def test_a_signal_in_the_code_after_an_epoch_waits_for_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rates_of_epochs(tmp_path / "whole", 3)
    asked = anyrank.integrations.accelerate.Accelerator.end_if_asked

    def ask(self: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        asked(self)

    with monkeypatch.context() as patch:
        patch.setattr(anyrank.integrations.accelerate.Accelerator, "end_if_asked", ask)
        with pytest.raises(SystemExit):
            rates_of_epochs(tmp_path / "run", 3)
    assert rates_of_epochs(tmp_path / "run", 3) in (whole[5:], whole[6:])


def test_a_save_before_the_schedule_of_an_epoch_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on = setup(tmp_path / "run")
    for _ in range(2):
        for batch in on.data:
            on.accelerator.backward(on.model(batch).square().mean())
            on.optimizer.step()
            on.optimizer.zero_grad()
        on.accelerator.save_state()
        on.scheduler.step()
    assert len([m for m in caplog.messages if "before the epoch's scheduler.step()" in m]) == 2
    caplog.clear()
    list(steps(on))
    on.accelerator.save_state()
    assert not [m for m in caplog.messages if "before the epoch's scheduler.step()" in m]


def test_weights_of_losses_and_other_precision(tmp_path: Path) -> None:
    on = setup(tmp_path / "run", mixed_precision="bf16")
    for number, batch in enumerate(on.data):
        on.accelerator.backward(on.model(batch).square().mean(), weight=number + 1)
        on.optimizer.step()
        on.optimizer.zero_grad()
        if number == 2:
            break
    assert on.accelerator.save_state() == str(tmp_path / "run" / "step-00000001")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"gradient_accumulation_steps": 2},
            "remove gradient_accumulation_steps; global_batch determines",
        ),
        (
            {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
            "split_batches divides a batch",
        ),
        (
            {"project_config": ProjectConfiguration(".", total_limit=2)},
            "total_limit and automatic_checkpoint_naming",
        ),
    ],
)
def test_settings_that_divide_a_second_time_are_refused(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        setup(tmp_path, **options)


def test_data_that_is_divided_already_is_refused(tmp_path: Path) -> None:
    sampler = torch.utils.data.DistributedSampler(range(28), 1, 0)
    with pytest.raises(ValueError, match="a second sharding would lose samples"):
        setup(tmp_path, loader=points(shuffle=False, sampler=sampler))


def test_calls_at_the_wrong_place_are_refused(tmp_path: Path) -> None:
    on = setup(tmp_path / "run")
    loss = on.model(torch.ones(2, 4)).mean()
    with pytest.raises(ValueError, match=r"backward\(\) was called outside the loop"):
        on.accelerator.backward(loss)
    with pytest.raises(
        ValueError, match=r"skip_first_batches\(\) was called with the training DataLoader"
    ):
        on.accelerator.skip_first_batches(on.data, 2)
    with pytest.raises(AttributeError, match=r"do not skip batches yourself"):
        skip_first_batches(on.data, 2)
    for batch in on.data:
        on.accelerator.backward(on.model(batch).mean())
        if not on.accelerator.sync_gradients:
            with pytest.raises(
                ValueError, match=r"save_state\(\) was called in the middle of a step"
            ):
                on.accelerator.save_state()
            continue
        on.optimizer.step()
        with pytest.raises(
            ValueError,
            match=r"backward\(\) was called after clipping, or after the optimizer's step",
        ):
            on.accelerator.backward(on.model(batch).mean())
        break
    on.accelerator.save_state()
    assert on.accelerator.run.step == 1
    with pytest.raises(
        ValueError, match=r"run already contains a run. Call accelerator.load_state\(\)"
    ):
        next(iter(setup(tmp_path / "run").data))


def test_a_scheduler_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    on = setup(tmp_path)
    inner = on.scheduler.scheduler
    on.accelerator.register_for_checkpointing(inner)
    with pytest.raises(
        ValueError,
        match=r"register_for_checkpointing\(\) got a scheduler \(LambdaLR\)\. Pass .* prepare",
    ):
        on.accelerator.load_state()


def test_a_loop_without_accelerators_backward_is_refused(tmp_path: Path) -> None:
    on = setup(tmp_path / "run")
    for batch in on.data:
        on.model(batch).mean().backward()
        if on.accelerator.sync_gradients:
            with pytest.raises(
                ValueError, match=r"optimizer.step\(\) without accelerator.backward\(loss\)"
            ):
                on.optimizer.step()
            break
    on = setup(tmp_path / "other")  # as where the DataLoader of a test is prepared first
    with pytest.raises(
        ValueError, match=r"optimizer.step\(\) without .* \(the first one passed to prepare"
    ):
        list(on.data)
    assert on.data.loader.step == 0


def test_an_optimizer_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    fresh()
    accelerator = anyrank.integrations.accelerate.Accelerator(
        cpu=True, folder=tmp_path, global_batch=6
    )
    accelerator.prepare(torch.nn.Linear(4, 4), points())
    with pytest.raises(ValueError, match=r"no optimizer was prepared\. First pass"):
        accelerator.load_state()


def test_parts_are_skipped_and_the_batch_is_rescaled_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = setup(tmp_path / "run")
    assert len([*steps(first, 2)]) == 2
    first.accelerator.save_state()
    fresh()
    other = anyrank.integrations.accelerate.Accelerator(
        cpu=True, folder=tmp_path / "run", global_batch=4, on_batch_change="rescale"
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer, data = other.prepare(model, optimizer, points())
    with pytest.raises(anyrank.CheckpointError, match=r"skip=\['optimizer'\]"):
        other.load_state()
    other.load_state(skip=["optimizer", "scheduler"])
    assert other.report is not None
    assert other.report.components["optimizer"] == "skipped"
    assert f"anyrank: {other.report.in_a_line()}" in capsys.readouterr().out.splitlines()
    assert (other.run.step, other.run.samples, len(data)) == (2, 12, 7)


def test_what_accelerate_saved_begins_a_run(tmp_path: Path) -> None:
    fresh()
    own = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / 20))
    model, optimizer, scheduler = own.prepare(model, optimizer, scheduler)
    own.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
    scheduler.step()
    own.save_state(str(tmp_path / "checkpoint"))
    on = setup(tmp_path / "run")
    on.accelerator.load_state(tmp_path / "checkpoint")
    torch.testing.assert_close(on.model.state_dict(), model.state_dict())
    assert on.scheduler.get_last_lr() == [0.02 * (1 - 1 / 20)]
    assert len([*steps(on, epochs=1)]) == 5
