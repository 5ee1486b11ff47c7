"""The receipt of a step: the same digests however tensors are cut, and others for other values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import forge
from torch import nn

import anyrank
from anyrank.files import receipt
from anyrank.files.receipt import digest_of_box, receipt_of_step
from anyrank.tensors.box import Box

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.bool, torch.int64]


def whole(tensor: torch.Tensor) -> int:
    return digest_of_box(tensor, Box.whole(tensor.shape), tensor.shape, 7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None)
@given(st.data())
def test_any_cut_into_boxes_adds_up_to_the_same(dtype: torch.dtype, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=3))
    tensor = torch.randn(shape).mul(3).to(dtype)
    total = whole(tensor)
    boxes = [Box.whole(shape)]
    for _ in range(3):
        dims = [(i, d) for i, box in enumerate(boxes) for d, n in enumerate(box.sizes) if n > 1]
        if not dims:
            break
        index, dim = data.draw(st.sampled_from(dims))
        box = boxes.pop(index)
        at = data.draw(st.integers(1, box.sizes[dim] - 1))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    parts = [digest_of_box(tensor[box.slices()], box, shape, 7) for box in boxes]
    assert sum(parts) % 2**64 == total


def test_parts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(11, 13)
    before = whole(tensor)
    monkeypatch.setattr(receipt, "PART_ELEMENTS", 5)
    assert whole(tensor) == before
    assert whole(tensor.t().contiguous().t()) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_values_have_another_digest(dtype: torch.dtype) -> None:
    tensor = (torch.arange(6) % 2).to(dtype).view(2, 3)
    other = tensor.clone()
    other[1, 1] = (other[1, 1] == 0).to(dtype)
    swapped = tensor.flip(1).flip(0)
    assert len({whole(tensor), whole(other), whole(swapped)}) == 3


def test_negative_zero_is_another_value() -> None:
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))


DATA = {"seed": 0, "epoch": 0, "step": 1, "samples": 8, "receipt": [1, 2, 3]}


def table(**tensors: int) -> dict[str, Any]:
    return receipt_of_step([tensors], DATA)


def test_a_receipt_differs_with_values_and_with_data() -> None:
    first = table(a=1, b=2)
    assert table(b=2, a=1) == first
    assert table(a=1, b=3)["digest"] != first["digest"]
    assert receipt_of_step([{"a": 1}, {"b": 2}], DATA) == first
    other = receipt_of_step([{"a": 1, "b": 2}], DATA | {"epoch": 1})
    assert other["digest"] != first["digest"]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_of_exact_runs_have_a_receipt(
    tmp_path: Path, exact: bool, background: bool
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = anyrank.ElasticLoader(torch.randn(16, 4), global_batch=8, microbatch=4, exact=exact)
    state = anyrank.TrainState(model=model, optimizer=optimizer, data=loader)
    with anyrank.Checkpoints(tmp_path, state, background=background) as ckpts:
        for step in ckpts.steps(until=2):
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    (path,) = tmp_path.glob("*/anyrank.json")
    found = json.loads(path.read_text())
    assert ("receipt" in found) == exact
    if exact:
        names = set(found["receipt"]["tensors"])
        assert {"model.weight", "model.bias", "optimizer.state.weight.exp_avg"} <= names, names
        assert len(found["receipt"]["digest"]) == 32
        assert anyrank.Checkpoints(tmp_path, state).resume("must") is not None


# -- what reads them ------------------------------------------------------------------------------


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


def empty_files(run: Path) -> None:
    """Leave no payload: what still works reads none."""
    for path in run.glob("*/*.distcp"):
        path.write_bytes(b"")


def test_diff_names_the_first_step_that_differs_without_reading_tensors(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", rate=0.2)
    train(tmp_path / "again")
    for name in ("a", "b", "again"):
        empty_files(tmp_path / name)
    equal = anyrank.diff(tmp_path / "a", tmp_path / "again")
    assert (bool(equal), equal.steps_equal, equal.equal) == (True, [1, 2, 3, 4], 4 * 7)
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert (bool(found), found.step, found.steps_equal) == (False, 3, [1, 2])
    assert found.digests == ["model.0.bias", "model.0.weight", "model.1.weight"]
    assert (found.data, found.values, found.only_a, found.only_b) == ({}, {}, [], [])
    assert "the same samples up to this step" in str(found)
    assert json.loads(found.to_json())["digests"] == found.digests


def test_options_of_groups_are_compared(tmp_path: Path) -> None:
    """Two runs that will part at the next step."""
    train(tmp_path / "a")
    train(tmp_path / "b", final=0.2)
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert (bool(found), found.step, found.digests) == (False, 4, [])
    assert found.numbers == {"optimizer.param_groups.0.lr": (0.1, 0.2)}
    assert "number    optimizer.param_groups.0.lr: 0.1 and 0.2" in str(found)
    assert anyrank.verify(tmp_path / "b")


def digests_of(optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path) -> dict[str, Any]:
    """The tensors in the receipt of one step."""
    data = torch.linspace(-1, 1, 16).view(4, 4)
    loader = anyrank.ElasticLoader(data, global_batch=4, microbatch=2, exact=True)
    state = anyrank.TrainState(model, optimizer, data=loader)
    with anyrank.Checkpoints(folder, state) as ckpts:
        for step in ckpts.steps(until=1):
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
    return json.loads((folder / "step-00000001/anyrank.json").read_text())["receipt"]["tensors"]


def test_a_learning_rate_that_is_a_tensor_is_in_the_receipt(tmp_path: Path) -> None:
    digests: list[str] = []
    for number, rate in enumerate([0.1, 0.2]):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(rate), betas=(0.8, 0.9))
        tensors = digests_of(optimizer, model, tmp_path / str(number))
        digests.append(tensors["optimizer.param_groups.0.lr"])
    assert len({*digests}) == 2


def test_runs_that_were_saved_at_other_steps_are_compared_where_both_were(tmp_path: Path) -> None:
    """A receipt does not depend on the saves before it."""
    train(tmp_path / "a", every=2)
    train(tmp_path / "b", every=3)
    train(tmp_path / "other", every=3, rate=0.2)
    equal = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert equal
    assert (equal.steps_equal, equal.steps_only, equal.equal) == ([4], [2, 3], 7)
    assert "equal, 7 tensors in 1 step\n" in str(equal)
    assert "3 is in one of them only" in str(equal)
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
    assert "other samples were seen in this epoch" in str(found)
    assert "seed: 0 and 1" in str(found)


def test_diff_reads_the_values_of_steps_that_lack_a_receipt(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", rate=0.2, exact=False)
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert found.step == 3
    assert found.digests == []
    assert {"model.0.bias", "model.0.weight", "model.1.weight"} <= set(found.values)


def test_tensors_of_one_run_alone_are_named(tmp_path: Path) -> None:
    train(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    step = tmp_path / "b/step-00000002"
    table = json.loads((step / "anyrank.json").read_text())
    del table["receipt"]["tensors"]["model.0.bias"]
    table["receipt"]["digest"] = "0" * 32
    forge(step, table)
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert (found.step, found.only_a, found.digests, found.data) == (2, ["model.0.bias"], [], {})


def test_verify_without_a_receipt_says_nothing_of_receipts(tmp_path: Path) -> None:
    train(tmp_path, exact=False)
    assert "receipts" not in anyrank.verify(tmp_path).checked
