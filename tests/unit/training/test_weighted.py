"""An order by weights: the same in every version, computed in little memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyrank.training.data.weighted_order import exact_sum, weighted_order

VALUES = [(3 * i % 101) ** 2 / 7 + 1e-9 * i for i in range(40_000)]


@pytest.mark.parametrize(
    "weights", [VALUES, torch.tensor(VALUES, dtype=torch.float64), np.array(VALUES)]
)
def test_saved_runs_go_on_with_the_order_that_they_had(weights: Any) -> None:
    order = weighted_order(len(VALUES), 5, weights)
    assert order.name == "weighted-v1 53e14f17"
    assert order.ids(2, 100, 106).tolist() == [32050, 23430, 18143, 2524, 3731, 15142]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 7))
def test_a_sum_of_chunks_is_rounded_once(values: list[float], size: int) -> None:
    chunks = torch.tensor(values, dtype=torch.float64).split(size)
    assert exact_sum(chunks) == math.fsum(values)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any))
def test_integers_are_weights_too(values: list[int]) -> None:
    expected = weighted_order(len(values), 0, [float(value) for value in values])
    assert weighted_order(len(values), 0, torch.tensor(values)) == expected


def test_threads_are_as_before() -> None:
    torch.set_num_threads(2)
    try:
        weighted_order(3, 0, [1.0, 2.0, 3.0])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
