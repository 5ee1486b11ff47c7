"""A conversion that is killed at any file event leaves nothing that looks finished."""

from __future__ import annotations

import os
import signal
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


def killed_at(event: str, passage: int, out: Path, options: dict[str, Any]) -> bool:
    """Convert in a forked process that is killed at this passage; whether it came to that."""
    child = os.fork()
    if child == 0:
        left = [passage]

        def strike() -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            faults.armed[event] = strike
            anyrank.convert(NEW, out, **options)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("options", [{"shard_bytes": 1}, {"to": "dcp"}, {"to": "torch"}], ids=str)
def test_the_destination_is_whole_or_not_there(tmp_path: Path, options: dict[str, Any]) -> None:
    kills = 0
    for event in EVENTS:
        passage = 1
        while killed_at(event, passage, out := tmp_path / f"{event}-{passage}", options):
            if out.exists():
                assert anyrank.verify(out)
                assert anyrank.diff(out, NEW)
            passage += 1
            kills += 1
        assert anyrank.diff(out, NEW)
    assert kills > 6


def test_what_is_replaced_is_never_lost(tmp_path: Path) -> None:
    for event in EVENTS:
        passage, is_killed = 1, True
        while is_killed:
            folder = tmp_path / f"{event}-{passage}"
            folder.mkdir()
            anyrank.convert(OLD, folder / "out")
            is_killed = killed_at(event, passage, folder / "out", {"overwrite": True})
            places = [folder / "out", *folder.glob("out.replaced-*")]
            there = [place for place in places if place.exists()]
            assert any(anyrank.diff(place, OLD) or anyrank.diff(place, NEW) for place in there)
            passage += 1


def job(out: str) -> str:
    import anyrank.world.lines as world

    world.ROLL_CALL_SEC = 0.2  # type: ignore[misc]
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
