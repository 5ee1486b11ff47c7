"""The order of an epoch: a permutation, the same everywhere, made in any pieces."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyrank.tensors.hashing import derive, mix64, signed
from anyrank.training.data.order import Order

SEEDS = st.integers(-(2**70), 2**70)


@given(n=st.integers(1, 700), seed=SEEDS, epoch=st.integers(0, 2**40), shuffle=st.booleans())
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int, shuffle: bool) -> None:
    ids = Order(n, seed, shuffle).ids(epoch, 0, n).tolist()
    assert sorted(ids) == list(range(n))
    assert shuffle or ids == list(range(n))


@given(
    n=st.integers(1, 2**50),
    seed=SEEDS,
    epoch=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 10_000), min_size=2, max_size=6),
)
def test_pieces_are_parts_of_the_same_order(n: int, seed: int, epoch: int, cuts: list[int]) -> None:
    order = Order(n, seed, True)
    cuts = sorted(min(cut, n) for cut in cuts)
    whole = order.ids(epoch, cuts[0], cuts[-1]).tolist()
    pieces = [order.ids(epoch, a, b).tolist() for a, b in pairwise(cuts)]
    assert whole == [one for piece in pieces for one in piece]
    assert all(0 <= one < n for one in whole)


def test_the_order_is_the_one_that_checkpoints_name() -> None:
    # Another result here is another order: it needs another name than feistel-v1.
    assert Order(10, 0, True).ids(0, 0, 10).tolist() == EXPECTED_10
    assert Order(10**12, 7, True).ids(3, 5, 8).tolist() == EXPECTED_LARGE


EXPECTED_10 = [7, 9, 4, 5, 1, 2, 0, 6, 3, 8]
EXPECTED_LARGE = [905531018937, 548011015973, 103968890500]


def test_seed_and_epoch_change_the_order() -> None:
    orders = {
        tuple(Order(50, seed, True).ids(epoch, 0, 50).tolist())
        for seed in (0, 1, -1)
        for epoch in range(4)
    }
    assert len(orders) == 12


@pytest.mark.parametrize("n", [3, 5, 10])
def test_every_sample_comes_first_equally_often(n: int) -> None:
    order = Order(n, 5, True)
    orders = [order.ids(epoch, 0, n).tolist() for epoch in range(100 * n)]
    for position in (0, n - 1):
        counts = Counter(ids[position] for ids in orders)
        # 100 expected each, and a standard deviation of 10
        assert all(65 < counts[i] < 135 for i in range(n)), counts


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_mix64_is_splitmix64(numbers: list[int]) -> None:
    def expected(z: int) -> int:
        mask = 2**64 - 1
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    found = mix64(torch.tensor([signed(n) for n in numbers])).tolist()
    assert [one % 2**64 for one in found] == [expected(n) for n in numbers]


def test_a_derived_number_depends_on_every_part() -> None:
    parts: list[tuple[int | str, ...]] = [(1, 2), (12,), (2, 1), ("1", 2), (1, 2, ""), (1, "2")]
    assert len({derive(*one) for one in parts}) == len(parts)
    assert derive("x", size=4) < 2**32
