"""What a script gives in the middle of a run, and is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank import CheckpointError, RecomputeError


class Growing:
    """A dataset whose length is set from outside."""

    def __init__(self) -> None:
        self.length = 8

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2)


def epoch(loader: anyrank.ElasticLoader, model: nn.Module) -> None:
    for step in loader:
        for batch in step.microbatches(model):
            step.backward(model(batch).sum())


@pytest.mark.parametrize("length", [10, 7])
def test_a_dataset_that_changes_its_length_is_refused_at_the_next_epoch(length: int) -> None:
    data, model = Growing(), nn.Linear(2, 1)
    loader = anyrank.ElasticLoader(data, global_batch=4, microbatch=2)
    epoch(loader, model)
    data.length = length
    with pytest.raises(CheckpointError, match=f"has {length} samples now, and had 8 .*: keep its"):
        epoch(loader, model)


class Holder:
    """A part whose state is deep."""

    def __init__(self, levels: int) -> None:
        self.state: dict[str, Any] = {}
        inner = self.state
        for _ in range(levels):
            inner["x"] = {}
            inner = inner["x"]
        if not levels:
            self.state["me"] = [self.state]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("levels", [0, 400])
def test_a_state_without_end_is_refused_by_the_name_of_its_part(
    tmp_path: Path, levels: int
) -> None:
    state = anyrank.TrainState(nn.Linear(1, 1), tracker=Holder(levels))
    ckpts = anyrank.Checkpoints(tmp_path / "run", state)
    with pytest.raises(CheckpointError, match=r"tracker\.\w+.*: is nested more than 100 deep"):
        ckpts.save()
    ckpts.close()
    assert not list(tmp_path.glob("run/step-*"))


def test_a_state_of_many_levels_is_saved(tmp_path: Path) -> None:
    holder = Holder(99)
    state = anyrank.TrainState(nn.Linear(1, 1), tracker=holder)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.save()
        before, holder.state = holder.state, {}
        ckpts.resume("must")
    assert holder.state == before


def test_a_tile_that_is_changed_in_place_is_refused() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    x = torch.randn(9, 3, requires_grad=True)
    tiled = anyrank.tile(double, chunk_size=4, in_dims=0, out_dims=0)
    with pytest.raises(RecomputeError, match=r"double.*changes an argument in place: clone"):
        tiled(x * 1)
