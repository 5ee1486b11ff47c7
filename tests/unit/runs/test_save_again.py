"""`save()` at a step that is saved already: a step is saved once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runs import resume
from torch import nn

import anyrank
from anyrank.testing import run_ranks

WARNING = "step 1 is already saved, and a step is saved only once"


def model() -> nn.Linear:
    made = nn.Linear(3, 2)
    nn.init.zeros_(made.weight)
    return made


def job(path: str, background: bool) -> list[int]:
    made = model()
    state = anyrank.TrainState(made)
    saved: list[int] = []
    with anyrank.Checkpoints(
        path,
        state,
        every=1,
        background=background,
        on_commit=lambda record: saved.append(record.step),
    ) as ckpts:
        ckpts.step_done()
        made.weight.data.fill_(1)  # which torch counts as no change
        ckpts.save(unless_saved=True)
        ckpts.save()
    return saved


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", ["folder", "object store"])
def test_a_step_is_saved_once_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool, place: str
) -> None:
    path = str(tmp_path) if place == "folder" else f"memory://again-{background}"
    assert job(path, background) == [1]
    assert caplog.text.count(WARNING) == 1
    made = model()
    nn.init.ones_(made.weight)
    report = resume(path, anyrank.TrainState(made))
    assert report is not None
    assert made.weight.sum().item() == 0


def test_a_loop_without_step_done_learns_that_nothing_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(made, optimizer)) as ckpts:
        for _ in range(2):
            made(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            ckpts.save()
        assert "step 0 is already saved, so this call saved nothing" in caplog.text
        assert "Call step_done() after each optimizer step" in caplog.text
        caplog.clear()
        ckpts.step_done()
        ckpts.save()
    assert caplog.text == ""
    assert [saved.step for saved in ckpts.saved()] == [1, 0]


def test_on_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, job, str(tmp_path), False) == [[1], []]
    assert anyrank.verify(tmp_path)
