"""Progress: told to a program when it asks, shown to a person at a terminal, otherwise silent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyrank


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
