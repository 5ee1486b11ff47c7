"""The diffusion seed case: saved on 7 ranks and resumed on 6 and on 8, as if it had been one.

In float64, on the example itself: the same losses, the same average, each sample once an epoch.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import diffusion_resume
from tests.scripts import run_python

import anyrank
from anyrank.testing import run_ranks
from anyrank.training.random_state import saved as saved_generators

SAVED_ON, STOP, END = 7, 4, 9
EPOCH = 7  # steps of 24 of the 168 images


class Seen(diffusion_resume.Images):
    """The dataset, with a list of what was asked for."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.ids.append(index)
        return super().__getitem__(index)


class Card:
    """A stream like that of an accelerator that only the saving process has."""

    algorithm = "cuda philox"

    def __init__(self, number: int) -> None:
        self.name = f"device{number}"

    def get(self) -> int:
        return 0

    def to_json(self, state: Any) -> str:
        return ""


def job(arguments: list[str], cards: int = 0) -> dict[str, Any]:
    """Run the example on this rank, whose saves hold the states of `cards` accelerators more.

    Returns what the example does, and the images that this rank has read.
    """
    seen = Seen()
    generators_here = saved_generators.generators_here

    def more(generators: Any) -> list[Any]:
        return [*generators_here(generators), *(Card(number) for number in range(cards))]

    with pytest.MonkeyPatch.context() as patch:  # the process is a rank of later tests as well
        patch.setattr(diffusion_resume, "Images", lambda: seen)
        patch.setattr(saved_generators, "generators_here", more)
        result = diffusion_resume.main(["--double", *arguments])
    loader = result.pop("loader")
    return result | {"ids": seen.ids, "receipts": loader.receipts, "samples": loader.samples}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run on one rank, never stopped."""
    folder = str(tmp_path_factory.mktemp("reference"))
    return run_ranks(1, job, ["--folder", folder, "--stop", str(END)])[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """A run that was saved on 7 ranks, each of which had eight accelerators; what they returned."""
    folder = str(tmp_path_factory.mktemp("saved"))
    arguments = ["--folder", folder, "--stop", str(STOP)]
    return folder, run_ranks(SAVED_ON, job, arguments, cards=8)


def copied(folder: str, to: Path) -> str:
    shutil.copytree(folder, to / "run")
    return str(to / "run")


def once_each(results: list[dict[str, Any]]) -> list[int]:
    """What ranks have read, the repeats of a rank's own left out: none is read by two ranks."""
    return sorted(index for result in results for index in set(result["ids"]))


@pytest.mark.parametrize("ranks", [6, 8])
def test_seven_ranks_go_on_on_another_number(
    tmp_path: Path, ranks: int, reference: dict[str, Any], saved: tuple[str, list[dict[str, Any]]]
) -> None:
    folder, first = saved
    arguments = ["--folder", copied(folder, tmp_path), "--resume"]
    for stop in (EPOCH, END):  # to the epoch's end, and on
        results = run_ranks(ranks, job, [*arguments, "--stop", str(stop)])
        report = results[0]["report"]
        assert report.saved_on.ranks == (SAVED_ON if stop == EPOCH else ranks)
        moved = {str(report.components[part]) for part in ("model", "optimizer", "ema")}
        assert moved == {"resharded" if stop == EPOCH else "exact"}
        assert report.components["data"] == report.components["scheduler"] == "exact"
        for result in results:
            for step, loss in result["losses"].items():
                assert loss == pytest.approx(reference["losses"][step], rel=1e-10)
        if stop == EPOCH:
            assert sorted([*once_each(first), *once_each(results)]) == list(range(168))
    assert len(results[0]["losses"]) == END - EPOCH
    for name, tensor in reference["ema"].items():
        torch.testing.assert_close(results[0]["ema"][name], tensor, rtol=1e-10, atol=1e-12)
    assert results[0]["receipts"] == [(0, 168, "exactly once")]
    assert results[0]["samples"] == END * 24


def test_states_of_accelerators_that_are_not_here_are_no_error(
    tmp_path: Path, saved: tuple[str, list[dict[str, Any]]]
) -> None:
    arguments = ["--folder", copied(saved[0], tmp_path), "--resume", "--stop", str(STOP)]
    for ranks in (1, 2):
        report = run_ranks(ranks, job, arguments)[0]["report"]
        notes = [note for note in report.notes if note.startswith("random generator device")]
        assert len(notes) == 8
        assert all(
            "skipped, it was saved but is not used by this process" in note for note in notes
        )


def test_weights_alone_start_a_new_run(
    tmp_path: Path, saved: tuple[str, list[dict[str, Any]]]
) -> None:
    new = ["--folder", str(tmp_path), "--load-from", saved[0], "--seed", "1"]
    result = run_ranks(2, job, [*new, "--stop", "1"])[0]
    assert list(result["losses"]) == [0]
    assert result["report"] is None
    assert result["samples"] == 24
    assert result["ids"] != saved[1][0]["ids"][: len(result["ids"])]
    steps = anyrank.Checkpoints(tmp_path, anyrank.TrainState()).saved()
    assert [one.step for one in steps] == [1]
    weights = diffusion_resume.Denoiser().double()
    anyrank.load(weights, saved[0])
    assert result["losses"][0] < saved[1][0]["losses"][0]


def test_the_example_runs_unchanged_under_python(tmp_path: Path) -> None:
    said = run_python(diffusion_resume.__file__, "--folder", str(tmp_path), "--stop", "1")
    assert said.startswith("a new run with first weights\nloss ")
