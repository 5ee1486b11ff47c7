"""Schedules that another tool counted: of several within one, and stepped once for each process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import lr_scheduler as schedules

import anyrank

Make = Callable[[torch.optim.Optimizer, int], Any]  # with how often it is stepped in each step
STEPS = 5


def warmed(optimizer: torch.optim.Optimizer, often: int) -> Any:
    """As torchvision's reference makes it."""
    warmup = schedules.LinearLR(optimizer, 0.01, total_iters=2 * often)
    cosine = schedules.CosineAnnealingLR(optimizer, 8 * often)
    return schedules.SequentialLR(optimizer, [warmup, cosine], milestones=[2 * often])


def three(optimizer: torch.optim.Optimizer, often: int) -> Any:
    """Of which the last one has not begun."""
    parts: list[Any] = [
        schedules.ConstantLR(optimizer, 0.5, 2 * often),
        schedules.CosineAnnealingLR(optimizer, 12 * often),
        schedules.LinearLR(optimizer, 0.5, total_iters=4 * often),
    ]
    return schedules.SequentialLR(optimizer, parts, milestones=[2 * often, 7 * often])


def chained(optimizer: torch.optim.Optimizer, often: int) -> Any:
    warmup = schedules.LinearLR(optimizer, 0.1, total_iters=3 * often)
    return schedules.ChainedScheduler(
        [warmup, schedules.CosineAnnealingLR(optimizer, 12 * often)], optimizer=optimizer
    )


def nested(optimizer: torch.optim.Optimizer, often: int) -> Any:
    cut = schedules.MultiStepLR(optimizer, [4 * often], 0.1)  # whose milestones are a Counter
    return schedules.ChainedScheduler([warmed(optimizer, often), cut], optimizer=optimizer)


def one(optimizer: torch.optim.Optimizer, often: int) -> Any:
    return schedules.CosineAnnealingLR(optimizer, 12 * often)


MADE: dict[str, Make] = {
    "warmed": warmed,
    "three": three,
    "chained": chained,
    "nested": nested,
    "one": one,
}


class Run:
    """A model with its schedule, stepped as a tool does it on so many processes."""

    def __init__(self, make: Make, often: int = 1) -> None:
        torch.manual_seed(0)
        self.model, self.often = nn.Linear(2, 2), often
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = make(self.optimizer, often)

    def train(self, steps: int) -> list[float]:
        rates: list[float] = []
        for _ in range(steps):
            rates.append(self.optimizer.param_groups[0]["lr"])
            self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for _ in range(self.often):
                self.schedule.step()
        return rates

    def resume(self, folder: Path, path: Path, **options: Any) -> anyrank.ResumeReport:
        state = anyrank.TrainState(self.model, self.optimizer, scheduler=self.schedule)
        with anyrank.Checkpoints(folder, state) as ckpts:
            report = ckpts.resume(path, **options)
        assert report is not None
        return report


def as_file(folder: Path, run: Run) -> Path:
    path = folder / f"model_{STEPS}.pth"
    parts = {"model": run.model, "optimizer": run.optimizer, "lr_scheduler": run.schedule}
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": STEPS}, path)
    return path


def as_lightnings(folder: Path, run: Run) -> Path:
    path = folder / "last.ckpt"
    table = {
        "state_dict": run.model.state_dict(),
        "optimizer_states": [run.optimizer.state_dict()],
        "lr_schedulers": [run.schedule.state_dict()],
        "global_step": STEPS,
        "epoch": 0,
        "pytorch-lightning_version": "2.6.1",
        "loops": {},
    }
    torch.save(table, path)
    return path


def as_accelerates(folder: Path, run: Run, processes: int = 1) -> Path:
    path = folder / "checkpoint_0"
    path.mkdir()
    save_file(run.model.state_dict(), path / "model.safetensors")
    torch.save(run.optimizer.state_dict(), path / "optimizer.bin")
    torch.save(run.schedule.state_dict(), path / "scheduler.bin")
    for rank in range(processes):
        torch.save({"step": STEPS}, path / f"random_states_{rank}.pkl")
    return path


def as_trainers(folder: Path, run: Run) -> Path:
    path = folder / f"checkpoint-{STEPS}"
    path.mkdir()
    save_file(run.model.state_dict(), path / "model.safetensors")
    torch.save(run.optimizer.state_dict(), path / "optimizer.pt")
    torch.save(run.schedule.state_dict(), path / "scheduler.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": STEPS, "epoch": 0.5}))
    return path


WRITERS: dict[str, Callable[[Path, Run], Path]] = {
    "file": as_file,
    "lightning": as_lightnings,
    "accelerate": as_accelerates,
    "trainer": as_trainers,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", MADE)
def test_a_schedule_of_the_same_lines_goes_on(kind: str, writer: str, tmp_path: Path) -> None:
    whole = Run(MADE[kind])
    whole.train(STEPS)
    path = WRITERS[writer](tmp_path, whole)
    run = Run(MADE[kind])
    report = run.resume(tmp_path / "run", path)
    assert report.components["scheduler"] == "exact"
    assert run.train(5) == whole.train(5)


@pytest.mark.parametrize("often", [1, 3])
@pytest.mark.parametrize("kind", MADE)
def test_accelerates_count_of_processes_is_divided_in_each_schedule(
    kind: str, often: int, tmp_path: Path
) -> None:
    whole = Run(MADE[kind], often)
    whole.train(STEPS)
    path = as_accelerates(tmp_path, whole, often)
    run = Run(MADE[kind])
    report = run.resume(tmp_path / "run", path)
    assert report.components["scheduler"] == ("exact" if often == 1 else "derived")
    assert run.train(6) == pytest.approx(whole.train(6), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", MADE)
def test_a_file_whose_schedule_counted_processes_says_how_to_divide_it(
    kind: str, tmp_path: Path
) -> None:
    whole = Run(MADE[kind], 3)
    whole.train(STEPS)
    path = as_file(tmp_path, whole)
    report = Run(MADE[kind]).resume(tmp_path / "other", path)
    (warning,) = [note for note in report.notes if "the scheduler has stepped 15 times" in note]
    assert "resume(path, scheduler_steps=3) uses 5 instead" in warning
    for _ in range(2):  # the argument may stay in the script
        run = Run(MADE[kind])
        before = whole.train(2)
        state = anyrank.TrainState(run.model, run.optimizer, scheduler=run.schedule)
        with anyrank.Checkpoints(tmp_path / "run", state) as ckpts:
            resumed = ckpts.resume(path, scheduler_steps=3)
            assert resumed is not None
            assert not [note for note in resumed.notes if "the scheduler has stepped" in note]
            rates: list[float] = []
            for _ in range(2):
                rates += run.train(1)
                ckpts.step_done()
        assert rates == pytest.approx(before, rel=1e-9)


def test_what_the_schedules_steps_cannot_be_is_an_error(tmp_path: Path) -> None:
    whole = Run(one, 3)
    whole.train(STEPS)
    path = as_file(tmp_path, whole)
    with pytest.raises(anyrank.CheckpointError, match=r"scheduler_steps=4,.*its count is 15"):
        Run(one).resume(tmp_path / "run", path, scheduler_steps=4)
    with pytest.raises(ValueError, match="scheduler_steps"):
        Run(one).resume(tmp_path / "run", path, scheduler_steps=0)
    ckpts = anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(whole.model))
    with pytest.raises(
        ValueError, match="scheduler_steps= applies only to another tool's checkpoint"
    ):
        ckpts.resume(scheduler_steps=3)


def test_one_that_accelerate_did_not_count_by_process_is_taken_as_it_is(tmp_path: Path) -> None:
    whole = Run(one)
    whole.train(STEPS)
    path = as_accelerates(tmp_path, whole, 3)
    whole.schedule.last_epoch = 7  # stepped by hand, when the script saw fit
    torch.save(whole.schedule.state_dict(), path / "scheduler.bin")
    with pytest.raises(anyrank.CheckpointError, match="Pass the true factor with scheduler_steps="):
        Run(one).resume(tmp_path / "run", path)
    run = Run(one)
    report = run.resume(tmp_path / "run", path, scheduler_steps=1)
    assert (report.components["scheduler"], run.schedule.last_epoch) == ("exact", 7)


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ("warmed", "three"),
        ("warmed", "nested"),
        ("warmed", "chained"),
        ("chained", "warmed"),
        ("nested", "warmed"),
        ("one", "warmed"),
    ],
)
def test_other_schedules_within_one_are_refused(saved: str, now: str, tmp_path: Path) -> None:
    whole = Run(MADE[saved])
    whole.train(STEPS)
    path = as_file(tmp_path, whole)
    with pytest.raises(
        anyrank.CheckpointError, match=r"the checkpoint's scheduler has another class"
    ):
        Run(MADE[now]).resume(tmp_path / "run", path)


def adopted(folder: Path, whole_epochs: dict[str, Any], **options: Any) -> Any:
    """The outcome of the data of a run that a file of a script's begins."""
    run = Run(one)
    run.train(1)
    table = {"model": run.model.state_dict(), **whole_epochs}
    torch.save(table, folder / "file.pth")
    data = anyrank.ElasticLoader(torch.eye(24, 2), global_batch=6, microbatch=2)  # 4 steps
    state = anyrank.TrainState(nn.Linear(2, 2), data=data)
    with anyrank.Checkpoints(folder / "run", state) as ckpts:
        report = ckpts.resume(folder / "file.pth", **options)
    assert report is not None
    return report.components["data"]


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ({"step": 6}, {"epoch": 1}, "About 12 samples will be seen twice."),
        ({"step": 7, "epoch": 1}, {}, "About 18 samples will be seen twice."),
        ({"step": 8}, {"epoch": 2}, "2 whole epochs; the next one starts"),
        ({"step": 40}, {"epoch": 1}, "1 whole epoch; the next one starts"),  # of other batches
        ({"step": 6, "epoch": 1.25}, {}, "About 6 samples will be seen twice."),
    ],
)
def test_the_samples_that_are_seen_twice_are_counted(
    table: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    outcome = adopted(tmp_path, table, **options)
    assert outcome.reason.endswith(words)
