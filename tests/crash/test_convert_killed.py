"""A conversion that is killed at any file event leaves nothing that looks finished."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank import faults
from anyrank.testing import Died, Fault, run_ranks

EVENTS = [
    *("file.folder", "file.open", "file.write", "file.fsync", "file.rename", "file.remove"),
    "convert.commit",
]
OLD = {"a": torch.zeros(50), "b": torch.zeros(3)}
NEW = {"a": torch.ones(50), "b": torch.ones(3)}


def convert_to(folder: Path, **options: Any) -> list[Path]:
    """Convert to `folder / "out"`; a copy of the folder at each event.

    A kill leaves there what the copy has, as a file keeps what a killed process has written to it.
    """
    copies: list[Path] = []

    def passed() -> None:
        copies.append(folder.with_name(f"copy-{len(copies)}"))
        shutil.copytree(folder, copies[-1])

    with pytest.MonkeyPatch.context() as patch:
        for event in EVENTS:
            patch.setitem(faults.armed, event, passed)
        anyrank.convert(NEW, folder / "out", **options)
    assert anyrank.diff(folder / "out", NEW)
    return copies


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.mark.parametrize("options", [{"shard_bytes": 1}, {"to": "dcp"}, {"to": "torch"}], ids=str)
def test_the_destination_is_whole_or_not_there(folder: Path, options: dict[str, Any]) -> None:
    copies = convert_to(folder, **options)
    assert len(copies) > 6
    there = [copy / "out" for copy in copies if (copy / "out").exists()]
    assert 0 < len(there) < len(copies)
    for out in there:
        assert anyrank.verify(out)
        assert anyrank.diff(out, NEW)


def test_what_is_replaced_is_never_lost(folder: Path) -> None:
    anyrank.convert(OLD, folder / "out")
    for copy in convert_to(folder, overwrite=True):
        places = [copy / "out", *copy.glob("out.replaced-*")]
        there = [place for place in places if place.exists()]
        assert any(anyrank.diff(place, OLD) or anyrank.diff(place, NEW) for place in there)


def job(out: str) -> str:
    torch.manual_seed(0)
    model: Any = fully_shard(torch.nn.Linear(8, 8))
    try:
        anyrank.convert(model, out)
    except anyrank.AnyrankError as error:
        return type(error).__name__
    return "done"


def test_a_rank_that_dies_ends_the_conversion_on_all(tmp_path: Path) -> None:
    fault = Fault(rank=1, point="file.write", how="kill")
    results = run_ranks(2, job, str(tmp_path / "out"), faults=[fault])
    assert results == ["RankError", Died("SIGKILL", "file.write")]
    assert os.listdir(tmp_path) == []
