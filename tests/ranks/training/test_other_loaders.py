"""Promise 7: a loader that may split its samples by rank does not go on on another number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import run_ranks


class Rows:
    """Every n-th row, or all of them on each rank; its state is how many this rank has read."""

    def __init__(self, total: int, is_split: bool) -> None:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_split else (0, 1)
        self.rows, self.read = range(total)[rank::ranks], 0

    def __iter__(self) -> Iterator[int]:
        while self.read < len(self.rows):
            self.read += 1
            yield self.rows[self.read - 1]

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def train(path: str, until: int, is_split: bool, options: dict[str, Any]) -> Any:
    rows = Rows(12, is_split)
    skip = options.pop("skip", ())
    state = anyrank.TrainState(nn.Linear(1, 1), data=rows, **options)
    read: list[int] = []
    with anyrank.Checkpoints(path, state) as ckpts:
        try:
            report = ckpts.resume(skip=skip)
        except anyrank.CheckpointError as error:
            return str(error)
        for row in rows:
            read.append(row)
            ckpts.step_done()
            if state.step == until:
                break
    return report and report.components["data"], read


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_place_within_a_ranks_share_is_refused_on_another_number(
    ranks: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    run_ranks(2, train, path, 2, True, {})
    for text in run_ranks(ranks, train, path, 3, True, {}):
        assert "data: a Rows was saved on 2 ranks" in text
        for way in ("ElasticLoader.from_shards", "first_rank=['data']", "skip=['data']"):
            assert way in text
    for outcome, read in run_ranks(2, train, path, 3, True, {}):
        assert outcome == "exact"
        assert len(read) == 1


def test_one_that_the_user_says_is_the_same_on_all_ranks_goes_on(tmp_path: Path) -> None:
    path, says = str(tmp_path / "run"), {"first_rank": ["data"]}
    run_ranks(2, train, path, 2, False, says)
    for outcome, read in run_ranks(3, train, path, 4, False, says):
        assert (outcome, read) == ("derived", [2, 3])
    for outcome, _ in run_ranks(2, train, path, 5, False, {"skip": ["data"]}):
        assert outcome == "skipped"
