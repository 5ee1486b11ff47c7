"""`anyrank.diff` of two runs: the first step that differs, by the bytes of its tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import anyrank


def train(
    folder: Path,
    *,
    rate: float = 0.1,
    seed: int = 0,
    exact: bool = True,
    every: int = 1,
    final: float = 0.1,
) -> None:
    """A run of four steps, whose third has another learning rate; the last one is always saved.

    The last step sets one more learning rate, for a step that is never trained.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1, bias=False))
    model.register_buffer("empty", torch.empty(0, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.linspace(-1, 1, 64).view(16, 4)
    loader = anyrank.ElasticLoader(data, global_batch=4, microbatch=2, seed=seed, exact=exact)
    state = anyrank.TrainState(model, optimizer, data=loader)
    with anyrank.Checkpoints(folder, state, every=every, keep=9) as ckpts:
        for step in ckpts.steps(until=4):
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.param_groups[0]["lr"] = rate if state.step == 2 else 0.1
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = final if state.step == 3 else 0.1


@pytest.mark.parametrize("exact", [True, False])
def test_diff_names_the_first_step_that_differs_and_its_values(tmp_path: Path, exact: bool) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", rate=0.2, exact=exact)
    train(tmp_path / "again", exact=exact)
    equal = anyrank.diff(tmp_path / "a", tmp_path / "again")
    assert (bool(equal), equal.steps_equal, equal.equal) == (True, [1, 2, 3, 4], 4 * 7)
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert (bool(found), found.step, found.steps_equal) == (False, 3, [1, 2])
    assert sorted(found.values) == ["model.0.bias", "model.0.weight", "model.1.weight"]
    assert (found.data, found.only_a, found.only_b) == ({}, [], [])
    largest = max(difference.largest for difference in found.values.values())
    assert f"by at most {largest:.3g}" in str(found)
    assert json.loads(found.to_json())["values"]["model.0.bias"]["of"] == 2


def test_options_of_groups_are_compared(tmp_path: Path) -> None:
    """Two runs that will part at the next step."""
    train(tmp_path / "a")
    train(tmp_path / "b", final=0.2)
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert (bool(found), found.step, found.values) == (False, 4, {})
    assert found.numbers == {"optimizer.param_groups.0.lr": (0.1, 0.2)}
    assert "number    optimizer.param_groups.0.lr: 0.1 and 0.2" in str(found)
    assert anyrank.verify(tmp_path / "b")


def test_a_learning_rate_that_is_a_tensor_is_compared(tmp_path: Path) -> None:
    for name, rate in (("a", 0.25), ("b", 0.5)):
        model = nn.Linear(4, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(rate), betas=(0.8, 0.9))
        anyrank.Checkpoints(tmp_path / name, anyrank.TrainState(model, optimizer)).save()
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert list(found.values) == ["optimizer.param_groups.0.lr"]
    assert found.values["optimizer.param_groups.0.lr"].largest == 0.25


def test_runs_that_were_saved_at_other_steps_are_compared_where_both_were(tmp_path: Path) -> None:
    train(tmp_path / "a", every=2)
    train(tmp_path / "b", every=3)
    train(tmp_path / "other", every=3, rate=0.2)
    equal = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert equal
    assert (equal.steps_equal, equal.steps_only, equal.equal) == ([4], [2, 3], 7)
    assert "equal, 7 tensors in 1 step\n" in str(equal)
    assert "3: only in one of the two" in str(equal)
    found = anyrank.diff(tmp_path / "a", tmp_path / "other")
    assert (bool(found), found.step, found.steps_only) == (False, 4, [2, 3])
    shutil.rmtree(tmp_path / "b/step-00000004")
    nothing = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert (bool(nothing), nothing.steps_equal, nothing.steps_only) == (False, [], [2, 3, 4])
    assert str(nothing).splitlines()[0].endswith(": no step in common")


def test_diff_says_when_the_samples_are_other_ones(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", seed=1)
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert found.step == 1
    assert set(found.data) == {"seed", "receipt"}
    assert "different samples were seen in this epoch" in str(found)
    assert "seed: 0 and 1" in str(found)


def test_tensors_of_one_run_alone_are_named(tmp_path: Path) -> None:
    for name, bias in (("a", True), ("b", False)):
        model = nn.Linear(4, 1, bias=bias)
        nn.init.ones_(model.weight)
        anyrank.Checkpoints(tmp_path / name, anyrank.TrainState(model)).save()
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert (found.step, found.only_a, found.values, found.data) == (0, ["model.bias"], {}, {})
    assert found.parts == {"model": False}
