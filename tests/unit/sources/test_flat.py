"""Ranges of a tensor's elements as boxes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyrank.sources.foreign.flat import assembled, boxes_of_range
from anyrank.tensors.box import Box
from anyrank.tensors.spec import StoredTensor


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_boxes_are_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    whole = torch.arange(total).reshape(shape)
    found: list[int] = []
    for box, at in boxes_of_range(shape, start, stop):
        assert at == len(found)
        found += whole[box.slices()].flatten().tolist() if shape else [whole.item()]
    assert found == list(range(start, stop))


def test_an_assembled_tensor_covers_its_shape() -> None:
    flat = StoredTensor.contiguous("flat", (10,), torch.float32, 2, 100)
    made = assembled("w", (3, 4), [(flat, 5, 5), (flat, 1, 7)])
    assert [(chunk.box, chunk.offset) for chunk in made.chunks] == [
        (Box((0, 0), (1, 4)), 120),
        (Box((1, 0), (1, 1)), 136),
        (Box((1, 1), (1, 3)), 104),
        (Box((2, 0), (1, 4)), 116),
    ]
    for parts in ([(flat, 0, 10)], [(flat, 5, 5), (flat, 4, 7)]):
        with pytest.raises(ValueError, match="elements"):
            assembled("w", (3, 4), parts)
