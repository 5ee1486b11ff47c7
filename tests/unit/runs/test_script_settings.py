"""Promise 8: what the script gives otherwise at a resume is named, or used where that is asked."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import anyrank

Schedule = Callable[[torch.optim.Optimizer], Any]


def linear_decay(step: int, *, warmup: int, total: int) -> float:
    return step / warmup if step < warmup else max(0.0, (total - step) / (total - warmup))


def decay(total: int) -> Callable[[int], float]:
    return lambda count: max(0.0, 1 - count / total)


def warmed(steps: int) -> Schedule:
    return lambda o: schedules.SequentialLR(
        o,
        [schedules.LinearLR(o, 0.1, total_iters=2), schedules.CosineAnnealingLR(o, steps - 2)],
        milestones=[2],
    )


def chained(gamma: float) -> Schedule:
    return lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, total_iters=2), schedules.ExponentialLR(o, gamma)]
    )


def partial_decay(total: int) -> Schedule:  # as transformers' schedules are made
    function = functools.partial(linear_decay, warmup=2, total=total)
    return lambda o: schedules.LambdaLR(o, function)


# Name of the value that differs, its value here and before, the schedule by that value.
CASES: dict[str, tuple[str, Any, Any, Callable[[Any], Schedule]]] = {
    "cosine": ("T_max", 16, 8, lambda n: lambda o: schedules.CosineAnnealingLR(o, n)),
    "eta_min": (
        "eta_min",
        0.01,
        0.0,
        lambda low: lambda o: schedules.CosineAnnealingLR(o, 16, low),
    ),
    "cycle": (
        "total_steps",
        16,
        12,
        lambda n: lambda o: schedules.OneCycleLR(o, 0.2, total_steps=n),
    ),
    "max_lr": ("max_lr", 0.3, 0.2, lambda m: lambda o: schedules.OneCycleLR(o, m, total_steps=9)),
    "pct_start": (
        "schedule_phases",
        0.5,
        0.3,
        lambda part: lambda o: schedules.OneCycleLR(o, 0.2, total_steps=12, pct_start=part),
    ),
    "triangles": (
        "total_size",
        12.0,
        6.0,
        lambda n: lambda o: schedules.CyclicLR(o, 0.1, 0.2, step_size_up=n / 2),
    ),
    "steps": ("step_size", 6, 3, lambda n: lambda o: schedules.StepLR(o, n)),
    "gamma": ("gamma", 0.5, 0.9, lambda g: lambda o: schedules.ExponentialLR(o, g)),
    "milestones": (
        "milestones",
        [2, 7],
        [3, 6],
        lambda at: lambda o: schedules.MultiStepLR(o, at),
    ),
    "restarts": (
        "T_0",
        3,
        5,
        lambda n: lambda o: schedules.CosineAnnealingWarmRestarts(o, n),
    ),
    "sequence": ("schedulers.1.T_max", 14, 6, lambda n: warmed(n + 2)),
    "chain": ("schedulers.1.gamma", 0.8, 0.9, chained),
    "polynomial": ("power", 2.0, 1.0, lambda p: lambda o: schedules.PolynomialLR(o, 12, p)),
    "averages": (
        "anneal_epochs",
        9,
        5,
        lambda n: lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=n),
    ),
}


def train(
    folder: Path,
    until: int,
    make: Schedule | None,
    *,
    lr: float = 0.1,
    at: Callable[[int], float] | None = None,
    settings: Any = "saved",
) -> tuple[anyrank.ResumeReport | None, list[float]]:
    """A loop as people write it: each step's rate."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = None if make is None else make(optimizer)
    state = anyrank.TrainState(model, optimizer, scheduler=schedule)
    rates: list[float] = []
    with anyrank.Checkpoints(folder, state) as ckpts:
        report = ckpts.resume(settings=settings)
        while state.step < until:
            if at is not None:
                optimizer.param_groups[0]["lr"] = at(state.step)
            rates.append(optimizer.param_groups[0]["lr"])
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(schedule, schedules.ReduceLROnPlateau):
                schedule.step(1.0)
            elif schedule is not None:
                schedule.step()
            ckpts.step_done()
    return report, rates


def notes_of(report: anyrank.ResumeReport | None) -> list[str]:
    assert report is not None
    return report.notes


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_that_the_script_changes_is_named_and_the_saved_one_used(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, here, saved, make = CASES[name]
    train(tmp_path / "run", 4, make(saved))
    (tmp_path / "whole").mkdir()
    _, whole = train(tmp_path / "whole", 8, make(saved))
    with caplog.at_level(logging.WARNING, "anyrank.resume"):
        report, rates = train(tmp_path / "run", 8, make(here))
    text = f"{here:g}" if isinstance(here, float) else str(here)
    before = f"{saved:g}" if isinstance(saved, float) else str(saved)
    (note,) = [note for note in notes_of(report) if f"{key}" in note]
    if key != "schedule_phases":
        assert f"{key}: {text} in this script, {before} in the saved run; the saved value" in note
    assert note in caplog.messages
    assert rates == pytest.approx(whole[4:])
    report, _ = train(tmp_path / "run", 9, make(here))  # until the script or the call is changed
    assert note in notes_of(report)


@pytest.mark.parametrize("name", CASES)
def test_an_unchanged_script_has_no_note(name: str, tmp_path: Path) -> None:
    _, _, saved, make = CASES[name]
    _, whole = train(tmp_path / "whole", 7, make(saved))
    train(tmp_path / "run", 4, make(saved))
    for settings, until in (("saved", 6), ("script", 7)):
        report, rates = train(tmp_path / "run", until, make(saved), settings=settings)
        assert report is not None
        assert report.notes == []
        assert report.components["scheduler"] == "exact"
        assert rates == whole[until - len(rates) : until]


@pytest.mark.parametrize("name", CASES)
def test_with_settings_script_the_rates_are_those_of_a_run_that_had_them_from_the_start(
    name: str, tmp_path: Path
) -> None:
    key, here, saved, make = CASES[name]
    train(tmp_path / "run", 4, make(saved))
    _, whole = train(tmp_path / "whole", 8, make(here))
    report, rates = train(tmp_path / "run", 6, make(here), settings="script")
    assert rates == pytest.approx(whole[4:6], rel=1e-12)
    assert any(key in note and "this script's value is used" in note for note in notes_of(report))
    report, rates = train(tmp_path / "run", 8, make(here))  # and it is the run's from there on
    assert rates == pytest.approx(whole[6:], rel=1e-12)
    assert notes_of(report) == []


@pytest.mark.parametrize(
    "make",
    [None, lambda o: schedules.LambdaLR(o, decay(12)), *(c[3](c[2]) for c in CASES.values())],
)
def test_a_new_learning_rate_works_under_every_schedule(
    make: Schedule | None, tmp_path: Path
) -> None:
    train(tmp_path / "run", 4, make)
    _, whole = train(tmp_path / "whole", 8, make, lr=0.02)
    report, rates = train(tmp_path / "run", 8, make, lr=0.02, settings="script")
    assert rates == pytest.approx(whole[4:], rel=1e-12)
    cycles = math.isclose(whole[0], train(tmp_path / "other", 1, make, lr=0.1)[1][0])
    said = "optimizer lr: 0.02 in this script, 0.1 in the saved run; this script's value is used"
    assert (said in notes_of(report)) is not cycles  # a cycle has rates of its own


class Falling:
    """A function that is an object, whose numbers are among the schedule's settings."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, count: int) -> float:
        return 1 - count / self.total


@pytest.mark.parametrize(
    "make",
    [
        lambda total: lambda o: schedules.LambdaLR(o, decay(total)),
        partial_decay,
        lambda total: lambda o: schedules.MultiplicativeLR(o, decay(total)),
        lambda total: (
            lambda o: schedules.SequentialLR(
                o,
                [schedules.LinearLR(o, 0.1, total_iters=2), schedules.LambdaLR(o, decay(total))],
                milestones=[2],
            )
        ),
        lambda total: (
            lambda o: schedules.ChainedScheduler(
                [schedules.ConstantLR(o, 0.5, 2), schedules.MultiplicativeLR(o, decay(total))]
            )
        ),
    ],
)
def test_with_settings_script_a_function_is_the_scripts_from_the_next_step_of_the_schedule_on(
    make: Any, tmp_path: Path
) -> None:
    _, as_before = train(tmp_path / "as_before", 7, make(12))
    _, changed = train(tmp_path / "changed", 4, make(12))
    report, changed = train(tmp_path / "changed", 7, make(30))  # with the settings of the run
    train(tmp_path / "run", 4, make(12))
    report, rates = train(tmp_path / "run", 4, make(12), settings="script")  # unchanged
    assert report is not None
    assert report.components["scheduler"] == "exact"
    assert report.notes == []
    assert train(tmp_path / "run", 4, make(12), settings="script")[1] == []
    report, rates = train(tmp_path / "run", 7, make(30), settings="script")
    assert rates == pytest.approx(changed, rel=1e-12)
    assert (rates[0], rates[1] > as_before[5]) == (as_before[4], True)


def test_with_settings_script_an_object_in_the_place_of_a_function_is_as_if_from_the_start(
    tmp_path: Path,
) -> None:
    def make(total: int) -> Schedule:  # the object's numbers are in the schedule's state
        return lambda o: schedules.LambdaLR(o, Falling(total))

    _, whole = train(tmp_path / "whole", 7, make(30))
    train(tmp_path / "run", 4, make(12))
    _, rates = train(tmp_path / "run", 7, make(30), settings="script")
    assert rates == pytest.approx(whole[4:], rel=1e-12)


PLATEAU: Schedule = lambda o: schedules.ReduceLROnPlateau(o, patience=0, factor=0.5)  # noqa: E731


def drive(
    folder: Path,
    until: int,
    makes: dict[str, Schedule],
    *,
    lrs: tuple[float, ...] = (0.1, 0.02),
    as_tensor: bool = False,
    by_hand: Callable[[int, Any], None] = lambda number, group: None,
    **options: Any,
) -> tuple[anyrank.ResumeReport | None, list[list[float]]]:
    """A run whose two groups have other rates, with schedules of which each is stepped in each
    step; a plateau's loss never falls. The rates of each step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    groups: list[dict[str, Any]] = [
        {"params": [*layer.parameters()], "lr": torch.tensor(lr) if as_tensor else lr}
        for layer, lr in zip(model, lrs, strict=True)
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    parts = {name: make(optimizer) for name, make in makes.items()}
    state = anyrank.TrainState(model, optimizer, **parts)
    rates: list[list[float]] = []
    with anyrank.Checkpoints(folder, state) as ckpts:
        report = ckpts.resume(**options)
        while state.step < until:
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for part in parts.values():
                is_plateau = isinstance(part, schedules.ReduceLROnPlateau)
                part.step(*[1.0] * is_plateau)
            for group in optimizer.param_groups:
                by_hand(state.step, group)
            ckpts.step_done()
    return report, rates


def cut(number: int, group: Any) -> None:
    """A tenth of the rate from the third step on, by hand."""
    group["lr"] *= 0.1 if number == 2 else 1.0


MANY: dict[str, Schedule] = {
    **{name: make(saved) for name, (_, _, saved, make) in CASES.items()},
    "function": lambda o: schedules.LambdaLR(o, decay(12)),
    "factors": lambda o: schedules.MultiplicativeLR(o, lambda _: 0.9),
    "constant": lambda o: schedules.ConstantLR(o, 0.5, 3),
    "warm": lambda o: schedules.LinearLR(o, 0.1, total_iters=3),
}


@pytest.mark.parametrize(
    ("name", "as_tensor"), [*((name, False) for name in MANY), ("gamma", True), ("function", True)]
)
def test_an_unchanged_script_keeps_what_a_plateau_and_a_hand_did(
    name: str, as_tensor: bool, tmp_path: Path
) -> None:
    makes = {"scheduler": MANY[name], "plateau": PLATEAU}
    case: dict[str, Any] = {"as_tensor": as_tensor, "by_hand": cut}
    _, whole = drive(tmp_path / "whole", 8, makes, **case)
    drive(tmp_path / "run", 5, makes, **case)
    report, rates = drive(tmp_path / "run", 8, makes, settings="script", **case)
    assert rates == whole[5:]
    assert report is not None
    assert (report.notes, {*report.components.values()}) == ([], {"exact"})


# Schedules that compute a rate from the one before, by a value that the script changes.
RECURSIVE: dict[str, Callable[[Any], Schedule]] = {
    "exponential": lambda g: lambda o: schedules.ExponentialLR(o, (0.9, 0.8)[g]),
    "step": lambda g: lambda o: schedules.StepLR(o, (2, 3)[g], 0.5),
    "cosine": lambda g: lambda o: schedules.CosineAnnealingLR(o, (12, 20)[g]),
    "warm": lambda g: lambda o: schedules.LinearLR(o, 0.1, total_iters=(3, 4)[g]),
    "polynomial": lambda g: lambda o: schedules.PolynomialLR(o, (12, 20)[g]),
    "sequence": lambda g: warmed((14, 20)[g]),
    "chain": lambda g: chained((0.9, 0.8)[g]),
}


@pytest.mark.parametrize("by_hand", [cut, lambda number, group: None])
@pytest.mark.parametrize("name", RECURSIVE)
def test_another_setting_or_rate_is_as_the_scripts_schedules_give_it_at_the_count(
    name: str, by_hand: Any, tmp_path: Path
) -> None:
    """Without what a plateau or a hand had done to the rate, which the warning shows."""
    before = {"scheduler": RECURSIVE[name](0), "plateau": PLATEAU}
    after = {"scheduler": RECURSIVE[name](1), "plateau": PLATEAU}
    for lrs in ((0.1, 0.02), (0.05, 0.02)):
        folder = tmp_path / str(lrs[0])
        _, alone = drive(folder / "alone", 6, {"scheduler": after["scheduler"]}, lrs=lrs)
        drive(folder / "run", 5, before, by_hand=by_hand)
        report, rates = drive(folder / "run", 6, after, lrs=lrs, settings="script")
        assert rates == [pytest.approx(alone[5], rel=1e-9)]
        (note,) = [note for note in notes_of(report) if "at the run's step" in note]
        assert note.startswith(
            f"optimizer lr: {rates[0][0]:g}, {rates[0][1]:g}, from this script's"
        )
        assert " in the saved run" in note
        report, _ = drive(folder / "run", 7, after, lrs=lrs, settings="script")
        assert notes_of(report) == []  # and what the plateau does from there on stays


@pytest.mark.parametrize("makes", [{"plateau": PLATEAU}, {}])
def test_a_new_rate_without_a_schedule_is_used_by_its_group_and_the_others_start_at_theirs(
    makes: dict[str, Schedule], tmp_path: Path
) -> None:
    drive(tmp_path / "run", 5, makes, by_hand=cut)
    report, rates = drive(tmp_path / "run", 6, makes, lrs=(0.1, 0.06), settings="script")
    assert rates[0] == [0.1, 0.06]
    notes = notes_of(report)
    assert any("lr of group 1: 0.06 in this script, 0.02 in the saved run" in n for n in notes)
    (note,) = [note for note in notes if "at the run's step; it was " in note]
    assert note.startswith("optimizer lr: 0.1, 0.06, from this script's settings")


def test_with_another_option_the_rates_too_are_the_scripts_which_a_warning_tells(
    tmp_path: Path,
) -> None:
    def run(until: int, momentum: float, settings: Any = "saved") -> Any:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        parts = {"scheduler": MANY["gamma"](optimizer), "plateau": PLATEAU(optimizer)}
        state = anyrank.TrainState(model, optimizer, **parts)
        with anyrank.Checkpoints(tmp_path, state) as ckpts:
            report = ckpts.resume(settings=settings)
            group = dict(optimizer.param_groups[0])
            while state.step < until:
                optimizer.step()
                parts["scheduler"].step()
                parts["plateau"].step(1.0)
                cut(state.step, optimizer.param_groups[0])
                ckpts.step_done()
        return report, group["lr"], group["momentum"], optimizer.param_groups[0]["lr"]

    _, _, _, last = run(5, 0.9)
    report, rate, momentum, _ = run(6, 0.8, "script")
    assert (rate, momentum) == (pytest.approx(0.1 * 0.9**5), 0.8)
    assert report.components["optimizer"] == "derived"
    assert notes_of(report) == [
        f"optimizer lr: {rate:g}, from this script's settings at the run's step; it was {last:g} "
        "in the saved run",
        "optimizer momentum: 0.8 in this script, 0.9 in the saved run; this script's value is used",
    ]
    report, _, _, _ = run(7, 0.8, "script")  # the script has not changed since
    assert (report.components["optimizer"], notes_of(report)) == ("exact", [])


NEW: dict[str, Schedule] = {**MANY, "plateau": PLATEAU, "again": RECURSIVE["cosine"](1)}


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, "saved") for name in NEW), ("again", "script"), ("warm", "script")],
)
def test_a_schedule_that_is_not_restored_begins_with_its_own_rates(
    name: str, settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, whole = drive(tmp_path / "whole", 6, {"scheduler": NEW[name]})
    drive(tmp_path / "run", 5, {"scheduler": lambda o: schedules.CosineAnnealingLR(o, 5)})
    options: dict[str, Any] = {"skip": ["scheduler"], "settings": settings}
    report, rates = drive(tmp_path / "run", 9, {"scheduler": NEW[name]}, **options)
    assert rates == whole[:4]
    (note,) = notes_of(report)
    words = "the initial value of scheduler, which is not restored; it was 0"
    assert words in note
    assert all(f"{rate:g}" in note for rate in rates[0])
    assert note in caplog.messages
    report, rates = drive(tmp_path / "run", 11, {"scheduler": NEW[name]}, settings=settings)
    assert (rates, notes_of(report)) == (whole[4:], [])


def test_a_new_schedule_beside_a_restored_one_is_an_error_but_for_a_plateau(
    tmp_path: Path,
) -> None:
    cosine, warm = RECURSIVE["cosine"](0), MANY["warm"]
    _, alone = drive(tmp_path / "alone", 7, {"scheduler": cosine})
    drive(tmp_path / "run", 5, {"scheduler": cosine})
    makes = {"scheduler": cosine, "second": warm}
    for settings in ("saved", "script"):
        with pytest.raises(
            anyrank.CheckpointError, match=r"second: is new, but scheduler is .*skip"
        ):
            drive(tmp_path / "run", 6, makes, skip=["second"], settings=settings)
    makes = {"scheduler": cosine, "plateau": PLATEAU}
    report, rates = drive(tmp_path / "run", 6, makes, skip=["plateau"])
    assert (rates, notes_of(report)) == (alone[5:6], [])


def test_without_a_schedule_in_the_script_the_saved_rate_stays(tmp_path: Path) -> None:
    _, before = drive(tmp_path, 5, {"scheduler": RECURSIVE["exponential"](0)})
    _, rates = drive(tmp_path, 6, {}, skip=["scheduler"])
    assert rates == [pytest.approx([0.9 * rate for rate in before[-1]])]


@pytest.mark.parametrize("settings", ["saved", "script"])
@pytest.mark.parametrize("name", MANY)
def test_an_optimizer_that_is_not_restored_has_the_rates_of_its_restored_schedules(
    name: str, settings: Any, tmp_path: Path
) -> None:
    makes = {"scheduler": MANY[name]}
    _, whole = drive(tmp_path / "whole", 8, makes)
    drive(tmp_path / "run", 5, makes)
    options: dict[str, Any] = {"skip": ["optimizer"], "settings": settings}
    report, rates = drive(tmp_path / "run", 7, makes, **options)
    assert rates == [pytest.approx(row, rel=1e-12) for row in whole[5:7]]
    assert notes_of(report) == []
    _, rates = drive(tmp_path / "run", 8, makes, settings=settings)
    assert rates == [pytest.approx(row, rel=1e-12) for row in whole[7:]]


@pytest.mark.parametrize("settings", ["saved", "script"])
@pytest.mark.parametrize("name", RECURSIVE)
def test_an_optimizer_that_is_not_restored_and_its_schedules_have_the_scripts_settings(
    name: str, settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = {"scheduler": RECURSIVE[name](0), "plateau": PLATEAU}
    after = {"scheduler": RECURSIVE[name](1), "plateau": PLATEAU}
    _, alone = drive(tmp_path / "alone", 8, {"scheduler": after["scheduler"]}, lrs=(0.05, 0.02))
    _, cut_rates = drive(tmp_path / "run", 6, before)
    drive(tmp_path / "run2", 5, before)
    options: dict[str, Any] = {"skip": ["optimizer"], "settings": settings}
    report, rates = drive(tmp_path / "run2", 6, after, lrs=(0.05, 0.02), **options)
    assert rates == [pytest.approx(alone[5], rel=1e-9)]
    (note,) = [note for note in notes_of(report) if "at the run's step; it was " in note]
    assert note.endswith(f"it was {cut_rates[5][0]:g}, {cut_rates[5][1]:g} in the saved run")
    assert any("this script's value is used" in note for note in notes_of(report))
    assert not any("the saved value is used" in note for note in notes_of(report))
    assert note in caplog.messages
    report, _ = drive(tmp_path / "run2", 7, after, lrs=(0.05, 0.02))  # they are the run's now
    assert notes_of(report) == []


def test_the_rates_of_an_optimizer_outside_the_state_are_those_of_its_schedule(
    tmp_path: Path,
) -> None:
    def run(until: int) -> list[float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = schedules.ExponentialLR(optimizer, 0.5)
        state = anyrank.TrainState(model, scheduler=schedule)
        rates: list[float] = []
        with anyrank.Checkpoints(tmp_path, state) as ckpts:
            ckpts.resume()
            while state.step < until:
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                schedule.step()
                ckpts.step_done()
        return rates

    run(3)
    assert run(5) == [0.1 * 0.5**3, 0.1 * 0.5**4]


def test_a_plateau_takes_its_settings_and_keeps_its_counts(tmp_path: Path) -> None:
    def make(patience: int) -> Schedule:
        return lambda o: schedules.ReduceLROnPlateau(o, patience=patience, factor=0.5)

    train(tmp_path / "run", 3, make(9))
    report, rates = train(tmp_path / "run", 4, make(2), settings="script")
    assert notes_of(report) == [
        "scheduler patience: 2 in this script, 9 in the saved run; this script's value is used"
    ]
    assert rates == [0.1]
    _, rates = train(tmp_path / "run", 6, make(2))
    assert rates == [0.05, 0.05]


def test_options_of_an_optimizer_are_named_by_group(tmp_path: Path) -> None:
    def run(decays: list[float], settings: Any = "saved") -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        groups = [
            {"params": [*part.parameters()], "weight_decay": decay}
            for part, decay in zip(model, decays, strict=True)
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        with anyrank.Checkpoints(tmp_path, anyrank.TrainState(model, optimizer)) as ckpts:
            report = ckpts.resume(settings=settings)
            optimizer.param_groups[0]["lr"] = 0.07  # as a loop sets it
            ckpts.step_done()
        return report, [group["weight_decay"] for group in optimizer.param_groups]

    run([0.1, 0.1, 0.2])
    report, used = run([0.0, 0.0, 0.2])
    words = (
        "weight_decay of groups 0, 1: 0 in this script, 0.1 in the saved run; the saved value is "
        "used"
    )
    assert report.notes == [
        f"optimizer {words}",
        'pass settings="script" to use the values of this script',
    ]
    assert used == [0.1, 0.1, 0.2]
    report, used = run([0.0, 0.3, 0.2], "script")
    assert report.components["optimizer"] == "derived"
    assert used == [0.0, 0.3, 0.2]
    report, used = run([0.0, 0.3, 0.2])
    assert report.notes == []


@pytest.mark.parametrize("name", ["betas", "eps"])
def test_options_without_a_schedule(name: str, tmp_path: Path) -> None:
    values = {"betas": ((0.9, 0.95), (0.9, 0.999)), "eps": (1e-6, 1e-8)}[name]

    def run(value: Any, settings: Any = "saved") -> Any:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), **{name: value})
        with anyrank.Checkpoints(tmp_path, anyrank.TrainState(model, optimizer)) as ckpts:
            report = ckpts.resume(settings=settings)
            ckpts.step_done()
        return report, optimizer.param_groups[0][name]

    run(values[1])
    report, used = run(values[0])
    assert any(f"optimizer {name}: " in note for note in report.notes)
    assert used == values[1]
    assert run(values[0], "script")[1] == values[0]


def test_rates_that_the_loop_sets_by_hand_are_no_news(tmp_path: Path) -> None:
    def at(step: int) -> float:
        return 0.1 * min(1, (step + 1) / 3)

    train(tmp_path, 4, None, at=at)
    report, rates = train(tmp_path, 6, None, at=at)
    assert notes_of(report) == []
    assert rates == [0.1, 0.1]


def test_a_schedule_that_steps_after_the_save_of_its_step_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(is_late: bool) -> list[str]:
        caplog.clear()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = schedules.ExponentialLR(optimizer, 0.5)
        state = anyrank.TrainState(model, optimizer, scheduler=schedule)
        with anyrank.Checkpoints(tmp_path / str(is_late), state, every=2) as ckpts:
            for _ in range(2):
                optimizer.step()
                if state.step == 1 and not is_late:
                    schedule.step()
                ckpts.step_done()
            if is_late:
                schedule.step()
        return caplog.messages

    (message,) = [text for text in run(is_late=True) if "step 2 is already saved" in text]
    assert "but scheduler stepped since then" in message
    assert not [text for text in run(is_late=False) if "is already saved" in text]


class Average:
    """An average whose constructor's arguments are in its state, as diffusers' EMAModel."""

    def __init__(self, decay: float) -> None:
        self.decay, self.updates, self.started = decay, 0, object()

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decay, self.updates = state["decay"], state["updates"]


def test_other_parts_settings_are_arguments_of_their_class(tmp_path: Path) -> None:
    def run(decay: float, settings: Any = "saved") -> tuple[Any, Average]:
        average = Average(decay)
        scaler = torch.amp.GradScaler("cpu", growth_interval=int(1 / (1 - decay)))
        state = anyrank.TrainState(nn.Linear(2, 1), ema=average, scaler=scaler)
        with anyrank.Checkpoints(tmp_path, state) as ckpts:
            report = ckpts.resume(settings=settings)
            average.updates += 1
            ckpts.step_done()
        return report, average

    run(0.5)
    report, average = run(0.75)
    assert report.notes[:2] == [
        "scaler growth_interval: 4 in this script, 2 in the saved run; the saved value is used",
        "ema decay: 0.75 in this script, 0.5 in the saved run; the saved value is used",
    ]
    assert (average.decay, average.updates) == (0.5, 2)
    report, average = run(0.75, "script")
    assert (average.decay, average.updates) == (0.75, 3)
    assert run(0.75)[0].notes == []


def unfrozen(
    folder: Path,
    make: Schedule,
    until: int,
    *,
    settings: Any = "saved",
    joins: bool = True,
    is_first: bool = False,
) -> tuple[anyrank.ResumeReport | None, list[list[float]]]:
    """A run whose second layer joins as a group of its own, the last or the first one, and the
    rates of its groups, in the order of the layers.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    groups = [{"params": [*layer.parameters()]} for layer in model]
    groups[1]["lr"] = 0.01  # pyright: ignore[reportArgumentType]
    order = -1 if is_first else 1
    optimizer = torch.optim.SGD(groups[: 1 + joins][::order], lr=0.1)
    schedule = make(optimizer)
    state = anyrank.TrainState(model, optimizer, scheduler=schedule)
    rates: list[list[float]] = []
    with anyrank.Checkpoints(folder, state) as ckpts:
        report = ckpts.resume(settings=settings, fresh=["1.*"] if joins else [])
        while state.step < until:
            rates.append([group["lr"] for group in optimizer.param_groups][::order])
            optimizer.step()
            schedule.step()
            ckpts.step_done()
    return report, rates


def with_added_group(
    rates: tuple[float, float], *, joins: bool = True
) -> tuple[anyrank.TrainState, torch.optim.Optimizer]:
    """A state whose optimizer gets its second group, if any, after it was made."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=rates[0])
    state = anyrank.TrainState(model, optimizer)
    if joins:
        optimizer.add_param_group({"params": [*model[1].parameters()], "lr": rates[1]})
    return state, optimizer


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("settings", ["saved", "script"])
def test_a_group_that_is_added_to_a_states_optimizer_has_settings_too(
    settings: Any, joins: bool, tmp_path: Path
) -> None:
    state, _ = with_added_group((0.1, 0.2), joins=joins)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.save()
    state, optimizer = with_added_group((0.3, 0.4))
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.resume("must", settings=settings, fresh=[] if joins else ["1.*"])
    saved = [0.1, 0.2 if joins else 0.4]
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == (saved if settings == "saved" else [0.3, 0.4])


@pytest.mark.parametrize("settings", ["saved", "script"])
def test_a_new_groups_function_is_no_difference(settings: Any, tmp_path: Path) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return schedules.LambdaLR(optimizer, decay(12))

    unfrozen(tmp_path, make, 4, joins=False)
    report, _ = unfrozen(tmp_path, make, 6, settings=settings)
    assert [note for note in notes_of(report) if "lr_lambdas" in note] == []


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", ["cosine", "gamma", "cycle", "sequence"])
def test_a_new_group_is_where_its_schedule_is_or_is_named(
    name: str, is_first: bool, tmp_path: Path
) -> None:
    make = CASES[name][3](CASES[name][2])
    number = 0 if is_first else 1
    _, whole = unfrozen(tmp_path / "whole", make, 8, is_first=is_first)
    unfrozen(tmp_path / "run", make, 4, joins=False)
    unfrozen(tmp_path / "other", make, 4, joins=False)
    report, _ = unfrozen(tmp_path / "other", make, 5, is_first=is_first)
    said = f"optimizer group {number}: new, with the learning rate of step 0 of scheduler"
    assert any(said in note for note in notes_of(report))
    report, rates = unfrozen(tmp_path / "run", make, 8, settings="script", is_first=is_first)
    assert rates == [pytest.approx(row, rel=1e-12) for row in whole[4:]]
    assert not any(f"group {number}" in note for note in notes_of(report))


@pytest.mark.parametrize(
    "make",
    [
        lambda total: lambda o: schedules.LambdaLR(o, decay(total)),
        lambda total: (
            lambda o: schedules.SequentialLR(
                o,
                [schedules.LinearLR(o, 0.1, total_iters=2), schedules.LambdaLR(o, decay(total))],
                milestones=[2],
            )
        ),
        lambda total: (
            lambda o: schedules.ChainedScheduler(
                [schedules.LambdaLR(o, decay(total)), schedules.ExponentialLR(o, 0.9)]
            )
        ),
    ],
)
def test_a_function_that_gives_another_rate_is_named_in_a_schedule_of_schedules_too(
    make: Any, tmp_path: Path
) -> None:
    train(tmp_path, 4, make(12))
    report, _ = train(tmp_path, 5, make(12))
    assert report is not None
    assert report.components["scheduler"] == "exact"
    report, _ = train(tmp_path, 6, make(30))
    assert report is not None
    assert report.components["scheduler"] == "derived"
    assert "its lambda returns a learning rate of" in report.components["scheduler"].reason


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["cosine", "function", "cycle", "plateau"])
def test_a_schedule_continues_with_another_optimizer_of_another_number_of_groups(
    name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    def run(folder: str, size: int, until: int, **options: Any) -> list[list[float]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        params = [*model.parameters()]
        rows = [{"params": params}] if size == 1 else [{"params": [*m.parameters()]} for m in model]
        optimizer = torch.optim.SGD(rows, lr=0.1)
        schedule = PLATEAU(optimizer) if name == "plateau" else MANY[name](optimizer)
        state = anyrank.TrainState(model, optimizer, scheduler=schedule)
        rates: list[list[float]] = []
        with anyrank.Checkpoints(tmp_path / folder, state) as ckpts:
            ckpts.resume(**options)
            while state.step < until:
                rates.append([group["lr"] for group in optimizer.param_groups])
                optimizer.step()
                schedule.step(*([1.0] if name == "plateau" else []))
                ckpts.step_done()
        return rates

    before, now = sizes
    whole = run("whole", now, 5)
    run("run", before, 3)
    rates = run("run", now, 5, skip=["optimizer"])
    if name == "plateau":  # it keeps its count of steps without progress, and cuts at once
        assert rates == [[0.1] * now, [0.05] * now]
    else:
        assert rates == [pytest.approx(row, rel=1e-12) for row in whole[3:]]


@pytest.mark.parametrize("name", [None, "cosine", "function", "chain"])
@pytest.mark.parametrize("after", [[[0, 2, 1], [3]], [[0, 1, 2, 3]], [[1], [0, 2, 3]]])
def test_groups_are_joined_and_parameters_moved_with_their_moments(
    after: list[list[int]], name: str | None, tmp_path: Path
) -> None:
    def run(
        folder: str, groups: list[list[int]], until: int, **options: Any
    ) -> tuple[list[Any], Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        params = [*model.parameters()]
        rows = [
            {"params": [params[n] for n in numbers], "lr": lr, "weight_decay": lr / 10}
            for numbers, lr in zip(groups, (0.1, 0.02), strict=False)
        ]
        optimizer = torch.optim.AdamW(rows)
        parts = {} if name is None else {"scheduler": MANY[name](optimizer)}
        state = anyrank.TrainState(model, optimizer, **parts)
        rates: list[Any] = []
        with anyrank.Checkpoints(tmp_path / folder, state) as ckpts:
            ckpts.resume(**options)
            moments = [optimizer.state[p].get("exp_avg") for p in params]
            moments = [None if m is None else m.clone() for m in moments]
            while state.step < until:
                rates.append([(g["lr"], g["weight_decay"]) for g in optimizer.param_groups])
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                for schedule in parts.values():
                    schedule.step()
                ckpts.step_done()
        return rates, moments, [optimizer.state[p]["exp_avg"] for p in params]

    whole, _, _ = run("whole", after, 8)
    _, _, saved = run("run", [[0, 2], [1, 3]], 5)
    with pytest.raises(anyrank.CheckpointError, match=r'differ.*or pass settings="script"'):
        run("run", after, 8)
    rates, moments, _ = run("run", after, 8, settings="script")
    assert all(torch.equal(*pair) for pair in zip(moments, saved, strict=True))
    for row, expected in zip(rates, whole[5:], strict=True):
        assert row == [pytest.approx(group, rel=1e-9) for group in expected]


def test_a_rate_as_a_tensor_is_the_same_rate(tmp_path: Path) -> None:
    makes = {"scheduler": MANY["gamma"]}
    for number, as_tensor in enumerate((True, False, True), 1):
        report, _ = drive(tmp_path, 2 * number, makes, as_tensor=as_tensor)
        assert report is None or report.notes == []


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
)
def test_an_option_whose_state_the_run_has_not_is_an_error(
    make: Any, option: dict[str, Any], tmp_path: Path
) -> None:
    def run(**options: Any) -> None:
        model = nn.Linear(2, 1)
        optimizer = make(model.parameters(), **options)
        with anyrank.Checkpoints(tmp_path, anyrank.TrainState(model, optimizer)) as ckpts:
            ckpts.resume(settings="script")
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ckpts.step_done()

    run()
    with pytest.raises(anyrank.CheckpointError, match=f"optimizer: {next(iter(option))} is "):
        run(**option)
    run()


@pytest.mark.parametrize("settings", ["saved", "script"])
@pytest.mark.parametrize("kind", ["sequence", "chain"])
def test_another_class_within_a_schedule_of_schedules_is_an_error(
    kind: str, settings: Any, tmp_path: Path
) -> None:
    def make(second: Any) -> Schedule:
        def schedule(optimizer: torch.optim.Optimizer) -> Any:
            inner: list[Any] = [schedules.ConstantLR(optimizer, 0.1, 2), second(optimizer)]
            if kind == "chain":
                return schedules.ChainedScheduler(inner)
            return schedules.SequentialLR(optimizer, inner, milestones=[2])

        return schedule

    train(tmp_path, 4, make(lambda o: schedules.CosineAnnealingLR(o, 16)))
    words = r"\(ConstantLR, LinearLR\).*\(ConstantLR, CosineAnnealingLR\)"
    with pytest.raises(anyrank.CheckpointError, match=words):
        train(tmp_path, 6, make(lambda o: schedules.LinearLR(o)), settings=settings)


def test_a_schedule_that_is_too_short_for_the_run_is_an_error(tmp_path: Path) -> None:
    train(tmp_path, 4, CASES["cycle"][3](12))
    with pytest.raises(anyrank.CheckpointError, match="cannot be stepped 4 times"):
        train(tmp_path, 8, CASES["cycle"][3](3), settings="script")


def test_settings_has_two_values(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="settings"):
        train(tmp_path, 1, None, settings="mine")
