"""Progress: told to a program when it asks, shown to a person at a terminal, otherwise silent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyrank
from anyrank.files import progress


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(nn.Linear(64, 64).state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_a_callback_is_told_every_byte(path: Path) -> None:
    told: list[tuple[int, int]] = []
    model = nn.Linear(64, 64, dtype=torch.bfloat16)  # cast, so read through the buffer
    anyrank.load(
        model, path, progress=lambda done, total: told.append((done, total)), buffer_bytes=4096
    )
    total = 64 * 65 * 4
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 3


@pytest.mark.parametrize(("wanted", "shown"), [(None, False), (False, False), (True, True)])
def test_a_bar_is_shown_on_request(
    path: Path, capsys: pytest.CaptureFixture[str], wanted: bool | None, shown: bool
) -> None:
    anyrank.load(nn.Linear(64, 64), path, progress=wanted)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("anyrank: loading" in err) == shown


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("doing", ["verifying", "comparing", "converting"])
def test_tools_show_a_bar_of_long_work_on_a_terminal(
    path: Path,
    doing: str,
    is_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> str:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)  # capsys' own stream
        if doing == "verifying":
            anyrank.verify(path, finite=True)
        elif doing == "comparing":
            anyrank.diff(path, path)
        else:
            anyrank.convert(path, path.parent / "out", overwrite=True)
        return capsys.readouterr().err

    assert f"anyrank: {doing}" not in run()  # it is over before one can read it
    monkeypatch.setattr(progress, "LONG_BYTES", 100)
    shown = run()
    assert (f"anyrank: {doing}" in shown) == is_terminal
    assert ("100%" in shown or "33.3/33.3 kB" in shown or is_terminal) == is_terminal
