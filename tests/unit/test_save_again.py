"""`save()` at a step that is saved already: what was changed since is saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.runs import resume
from torch import nn

import anyrank
from anyrank import faults
from anyrank.files.store import LocalStore
from anyrank.testing import run_ranks

EVENTS = ["file.folder", "file.open", "file.write", "file.fsync", "file.rename", "file.remove"]


def model() -> nn.Linear:
    made = nn.Linear(3, 2)
    nn.init.zeros_(made.weight)
    return made


def fill(made: nn.Linear, value: float) -> None:
    made.weight.data.fill_(value)  # which torch counts as no change


def resumed_weight(path: Path) -> float:
    made = model()
    resume(path, anyrank.TrainState(made))
    return made.weight[0, 0].item()


@pytest.mark.parametrize("background", [False, True])
def test_what_was_changed_after_the_last_step_is_saved(tmp_path: Path, background: bool) -> None:
    made = model()
    state = anyrank.TrainState(made)
    with anyrank.Checkpoints(tmp_path, state, every=1, background=background) as ckpts:
        ckpts.step_done()
        fill(made, 7)
        ckpts.save()
        ckpts.wait()
        assert [record.step for record in ckpts.stats()] == [1, 1]
        ckpts.save(unless_saved=True)  # nor does the end of the block
        ckpts.wait()
        assert len(ckpts.stats()) == 2
    assert resumed_weight(tmp_path) == 7
    assert anyrank.verify(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_file_event_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(LocalStore, "exchange", lambda *args: False)
    made, copies = model(), list[Path]()

    def copy() -> None:
        copies.append(tmp_path / f"copy-{len(copies)}")
        shutil.copytree(tmp_path / "run", copies[-1])

    ckpts = anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(made))
    for value in (1, 2):
        fill(made, value)
        ckpts.save()
        monkeypatch.setattr(faults, "armed", dict.fromkeys(EVENTS, copy))
    monkeypatch.setattr(faults, "armed", {})
    ckpts.close()
    found: list[float] = []
    for path in copies:
        (path / ".lock").unlink(missing_ok=True)
        aside = [*path.glob(".replaced-step-*")]
        if aside and not (path / "step-00000000").exists():  # between the two renames: by hand
            aside[0].rename(path / "step-00000000")
        found.append(resumed_weight(path))
    assert found == sorted(found)
    assert {*found} == {1, 2}
    assert resumed_weight(tmp_path / "run") == 2


def test_an_object_store_keeps_the_first_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    ckpts = anyrank.Checkpoints("memory://again", anyrank.TrainState(made))
    ckpts.save()
    fill(made, 7)
    ckpts.save()
    ckpts.close()
    assert "step 0 is saved already, and cannot be replaced in an object store" in caplog.text
    assert len(ckpts.stats()) == 1


def job(path: str) -> list[int]:
    made = model()
    with anyrank.Checkpoints(path, anyrank.TrainState(made), every=1) as ckpts:
        ckpts.step_done()
        fill(made, 1)
        ckpts.save()
        return [record.step for record in ckpts.stats()]


def test_on_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, job, str(tmp_path)) == [[1, 1], [1, 1]]
    assert resumed_weight(tmp_path) == 1
