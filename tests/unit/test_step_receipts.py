"""The receipt of a step: the same digests however tensors are cut, and others for other values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anyrank
from anyrank.resume import receipt
from anyrank.resume.receipt import digest_of_box, receipt_of_step
from anyrank.tensors.box import Box

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.bool, torch.int64]


def whole(tensor: torch.Tensor) -> int:
    return digest_of_box(tensor, Box.whole(tensor.shape), tensor.shape, 7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
    assert receipt_of_step([{"a": 1, "b": 2}], DATA | {"epoch": 1})["digest"] != first["digest"]


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
