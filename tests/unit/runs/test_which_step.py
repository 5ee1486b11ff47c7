"""What `Checkpoints.resume` is told to resume: a step of this run, by its number or by its path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.runs import resume, save
from torch import nn

import anyrank
from anyrank.testing import run_ranks


def train(path: str | os.PathLike[str]) -> None:
    """Steps 2, 4 and 6, whose weights are their numbers."""
    model = nn.Linear(1, 1)
    state = anyrank.TrainState(model)
    with anyrank.Checkpoints(path, state, every=2) as ckpts:
        for number in range(1, 7):
            nn.init.constant_(model.weight, number)
            ckpts.step_done()


def resumed(path: str | os.PathLike[str], which: str | int) -> tuple[float, list[str]]:
    model = nn.Linear(1, 1)
    report = resume(path, anyrank.TrainState(model), which)
    assert report is not None
    return model.weight.item(), report.notes


@pytest.mark.parametrize("step", [2, 4, 6])
@pytest.mark.parametrize(
    "form",
    [
        "{}/step-{:08d}",
        "{}/step-{:08d}/",
        "{}/../run/step-{:08d}",
        "{}/step-{:08d}/anyrank.json",
        "{}/step-{:08d}/.metadata",
        "{}/step-{:08d}/__0_0.distcp",
    ],
)
def test_a_path_into_the_own_run_means_that_step(tmp_path: Path, form: str, step: int) -> None:
    train(tmp_path / "run")
    which = form.format(tmp_path / "run", step)
    assert resumed(tmp_path / "run", which) == (step, [])


def test_so_it_does_through_a_link_and_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    assert resumed("run", f"{tmp_path}/link/step-00000002") == (2, [])
    assert resumed("link", "run/step-00000004") == (4, [])


def test_the_own_runs_path_is_its_newest_step(tmp_path: Path) -> None:
    train(tmp_path)
    assert resumed(tmp_path, str(tmp_path)) == (6, [])


def test_a_path_into_the_own_run_in_an_object_store(tmp_path: Path) -> None:
    train("memory://which/run")
    assert resumed("memory://which/run", "memory://which/run/step-00000002") == (2, [])
    with pytest.raises(ValueError, match="no such path"):
        resumed("memory://which/run", "memory://which/run/step-00000099")


@pytest.mark.parametrize("has_steps", [True, False])
@pytest.mark.parametrize("which", ["latest", "AUTO", "2", "runs/none", "./step-00000002"])
def test_what_is_no_step_and_no_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, has_steps: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if has_steps:
        train("run")
    has = "6, 4, 2" if has_steps else "no steps"
    model = nn.Linear(1, 1)
    before = model.weight.item()
    with pytest.raises(ValueError, match=f"no such path.*Pass 'auto'.*has {has}\\)$"):
        resume("run", anyrank.TrainState(model), which)
    assert model.weight.item() == before


@pytest.mark.parametrize("name", ["latest", "log.jsonl", ".aside-damaged-step-00000004"])
def test_what_else_is_in_the_own_run_is_no_step(tmp_path: Path, name: str) -> None:
    train(tmp_path)
    (tmp_path / "step-00000004").rename(tmp_path / ".aside-damaged-step-00000004")
    with pytest.raises(ValueError, match=r"not a step of the run.*Pass 'auto'.*has 6, 2\)$"):
        resumed(tmp_path, str(tmp_path / name))


def test_a_path_of_another_run_begins_this_one_once(tmp_path: Path) -> None:
    train(tmp_path / "a")
    other = f"{tmp_path}/a/step-00000004"
    assert resumed(tmp_path / "b", other) == (4, [])
    save(tmp_path / "b", anyrank.TrainState(nn.Linear(1, 1)))
    assert "was ignored because this run already has steps" in resumed(tmp_path / "b", other)[1][0]


def test_new_names_are_no_option_for_the_own_run(tmp_path: Path) -> None:
    train(tmp_path)
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(nn.Linear(1, 1))) as ckpts:
        for which in (tmp_path, tmp_path / "step-00000002"):
            with pytest.raises(
                ValueError, match="rename= applies only to another tool's checkpoint"
            ):
                ckpts.resume(which, rename={"a": "b"})


def job(path: str) -> str:
    model = nn.Linear(1, 1)
    torch.distributed.barrier()
    with anyrank.Checkpoints(path, anyrank.TrainState(model)) as ckpts:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is returned
            ckpts.resume("latest")
        ckpts.resume(f"{path}/step-00000002")
    return f"{model.weight.item():g} {caught.value}"


def test_on_ranks(tmp_path: Path) -> None:
    train(tmp_path)
    first, second = run_ranks(2, job, str(tmp_path))
    assert first == second
    assert first.startswith("2 resume('latest'): no such path")
