"""A tensor's digest: the same however the tensor is cut, and another for other values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyrank.runs.state import box_digest
from anyrank.runs.state.box_digest import digest_of_box
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
    monkeypatch.setattr(box_digest, "PART_ELEMENTS", 5)
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
