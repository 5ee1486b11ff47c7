"""Random streams of a run on another number of ranks: what the report says of them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import run_ranks


def job_save(path: str, used: str) -> None:
    torch.manual_seed(0)
    random.seed(dist.get_rank())  # as of processes that nobody seeds
    np.random.seed(dist.get_rank())
    state = anyrank.TrainState(nn.Linear(1, 1))
    if used == "drawn":
        random.random()
    if used == "seeded":
        np.random.seed(10 + dist.get_rank())
    with anyrank.Checkpoints(path, state) as ckpts:
        ckpts.save()


def job_resume(path: str) -> tuple[str, str, list[str]]:
    with anyrank.Checkpoints(path, anyrank.TrainState(nn.Linear(1, 1))) as ckpts:
        report = ckpts.resume("must")
    assert report is not None
    outcome = report.components["streams"]
    return outcome, outcome.reason, [note for note in report.notes if "random stream" in note]


@pytest.mark.parametrize(("used", "name"), [("", ""), ("drawn", "python"), ("seeded", "numpy")])
def test_derived_streams_are_told_of_where_somebody_used_them(
    used: str, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    run_ranks(2, job_save, path, used)
    for outcome, reason, notes in run_ranks(3, job_resume, path):
        assert outcome == ("derived" if name else "exact")
        assert reason.startswith(f"{name}: saved on rank 0 of 2" if name else "")
        assert [note.split(":")[0] for note in notes] == [f"random stream {name}"] * bool(name)
