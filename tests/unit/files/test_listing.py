"""Listing a source asks the file system little: each file is opened once, and its header read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.runs import save

import anyrank
from anyrank.sources.source import list_source

COUNT = 16
METADATA_CALLS = ("stat", "open", "fstat", "listdir", "scandir", "readlink")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the file system is asked, by function; `preadv` counts bytes."""
    made = Counter[str]()

    def count(name: str) -> None:
        real = getattr(os, name)

        def call(*given: Any, **options: Any) -> Any:
            found = real(*given, **options)
            made[name] += found if name == "preadv" else 1
            return found

        monkeypatch.setattr(os, name, call)

    for name in (*METADATA_CALLS, "preadv"):
        count(name)
    return made


def shards(folder: Path) -> str:
    for number in range(1, COUNT + 1):
        name = f"model-{number:05d}-of-{COUNT:05d}.safetensors"
        save_file({f"w{number}": torch.zeros(1 << 16)}, folder / name)
    return str(folder)


def run(folder: Path) -> str:
    model = torch.nn.Linear(256, 256)
    save(folder, anyrank.TrainState(model))
    return str(folder)


def test_a_file_costs_an_open_and_its_header(tmp_path: Path, calls: Counter[str]) -> None:
    path = shards(tmp_path)
    calls.clear()
    listing = list_source(path)
    assert len(listing.tensors) == COUNT
    assert calls["open"] == calls["fstat"] == COUNT
    assert calls["stat"] <= 2  # of the folder
    assert calls["preadv"] < 256 * COUNT  # no file's first and last 64 KiB


def test_a_data_file_of_a_run_costs_one_look(tmp_path: Path, calls: Counter[str]) -> None:
    path = run(tmp_path / "run")
    calls.clear()
    listing = list_source(path)
    assert [Path(info.path).suffix for info in listing.files] == [".distcp"]
    assert sum(calls[name] for name in METADATA_CALLS) <= 12  # two for the index of its rank
    assert calls["preadv"] < 32 << 10  # the manifest, the index, and the rank's


def test_a_folder_of_one_checkpoint_of_lightnings_is_its_weights(tmp_path: Path) -> None:
    state = {"state_dict": {"weight": torch.ones(2)}, "pytorch-lightning_version": "2.6"}
    torch.save(state, tmp_path / "last.ckpt")
    assert list(list_source(str(tmp_path)).tensors) == ["weight"]
    with pytest.raises(ValueError, match="is the name of a torch file"):
        anyrank.convert(tmp_path, tmp_path / "out.ckpt", to="safetensors")


def test_what_a_folder_is_is_asked_without_the_room_of_other_tools(tmp_path: Path) -> None:
    """Weights of the core's own formats are listed by the core alone."""
    (tmp_path / "shards").mkdir()
    anyrank.convert(shards(tmp_path / "shards"), tmp_path / "dcp", to="dcp")
    code = f"""
import sys, anyrank
for path in ({str(tmp_path / "shards")!r}, {str(tmp_path / "dcp")!r}):
    anyrank.inspect(path)
print(*[name for name in sys.modules if name.startswith("anyrank.sources.foreign")])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr
